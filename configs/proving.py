"""The proving ground: a small Llama that is large enough to tell recipes apart.

python -m experiments.train --config=configs/proving.py --workdir=runs/proving

trains in minutes on two CPU cores. Width 256 and hidden width 640 are two and five times 128. So in
every linear, and in all three GEMMs, a 1x128 tile is less than a row, a row less than the tensor,
and a 128x128 block less than the weight: a granularity is what its name says, which it is not in
configs/smoke.py. Of six layers the last 15% are one, 17%. There are 4.7M parameters.

    python -m experiments.study proving --plan=recipes …

trains --config=configs/proving.py:ranking, a longer run of larger steps, in every recipe with three
seeds on GPUs; docs/results/recipes_loss.md has the losses.
"""

import ml_collections

import fp8jax

SIZES = ("small", "ranking")


def get_config(size: str = "small") -> ml_collections.ConfigDict:
    if size not in SIZES:
        raise ValueError(f"size {size!r} is none of {', '.join(SIZES)}")
    config = fp8jax.base_config()
    config.precision = "fp8_delayed"
    config.model_overrides.d_model = 256
    config.model_overrides.n_layers = 6
    config.model_overrides.n_heads = 4
    config.model_overrides.n_kv_heads = 4
    config.model_overrides.head_dim = 64
    config.model_overrides.d_ff = 640
    config.unroll = 1  # a loop over layers, which compiles fast; of all runs, so that they compare
    config.remat = "none"
    if size == "small":
        config.num_steps = 100
        config.optimizer.warmup_steps = 10
        config.valid.every = 50
        config.valid.batches = 8
        return config
    config.batch_size = 64
    config.num_steps = 1000
    config.optimizer.warmup_steps = 100
    config.optimizer.learning_rate = 2e-3
    config.valid.every = 1000  # all held-out rows, once
    config.checkpoint.every = 1000
    config.checkpoint.keep = 1
    return config
