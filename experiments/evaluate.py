"""`fp8jax evaluate` as python -m experiments.evaluate, in a clone (fp8jax/lm/cli)."""

from fp8jax.lm.cli import main

if __name__ == "__main__":
    main.run("evaluate", program="python -m experiments.evaluate")
