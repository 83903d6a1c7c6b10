"""`fp8jax generate` as python -m experiments.generate, in a clone (fp8jax/lm/cli)."""

from fp8jax.lm.cli import main

if __name__ == "__main__":
    main.run("generate", program="python -m experiments.generate")
