"""`fp8jax report` as python -m experiments.report, in a clone (fp8jax/lm/cli)."""

from fp8jax.lm.cli import main

if __name__ == "__main__":
    main.run("report", program="python -m experiments.report")
