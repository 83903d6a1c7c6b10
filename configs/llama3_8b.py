"""Llama 3 8B: a size at which FP8 starts to pay off, for a pod or for a dry run.

python -m experiments.train --config=configs/llama3_8b.py --workdir=runs/llama3_8b

needs several GPUs. A dry run tells on any machine how much memory and compute it would take:

python -m experiments.train --config=configs/llama3_8b.py --dry_run

Give the text with --config.data and Llama's tokenizer with --config.tokenizer=bpe:PATH. The
learning rate is that of the release; batch and steps are ours.
"""

import ml_collections

import fp8jax


def get_config() -> ml_collections.ConfigDict:
    config = fp8jax.base_config()
    config.model = "llama3_8b"
    config.precision = "fp8_delayed"
    config.mesh = "fsdp"
    config.seq_len = 8192
    config.batch_size = 64
    config.grad_accum = 8
    config.num_steps = 100_000
    config.optimizer.warmup_steps = 2000
    config.optimizer.learning_rate = 3e-4
    config.valid.every = 1000
    config.valid.batches = 2
    config.checkpoint.every = 1000
    return config
