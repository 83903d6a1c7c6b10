"""fp8jax: training and running transformers in FP8 and FP4."""
