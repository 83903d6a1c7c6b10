"""`fp8jax convert` as python -m experiments.convert, in a clone (fp8jax/lm/cli)."""

from fp8jax.lm.cli import main

if __name__ == "__main__":
    main.run("convert", program="python -m experiments.convert")
