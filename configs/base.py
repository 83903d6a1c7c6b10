"""The base config: every key at its default, which fp8jax/lm/training/config.py lists."""

import fp8jax

get_config = fp8jax.base_config
