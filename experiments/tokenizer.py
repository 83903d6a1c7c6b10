"""`fp8jax tokenizer` as python -m experiments.tokenizer, in a clone (fp8jax/lm/cli)."""

from fp8jax.lm.cli import main

if __name__ == "__main__":
    main.run("tokenizer", program="python -m experiments.tokenizer")
