"""The commands of `fp8jax`: train, generate, evaluate, convert, tokenizer and report."""
