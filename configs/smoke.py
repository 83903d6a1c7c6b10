"""Smoke test: a tiny byte-level Llama in FP8 on the source text of Python's standard library.

python -m experiments.train --config=configs/smoke.py --workdir=runs/smoke

takes two minutes on two CPU cores. Expect a validation loss near 2.3 nats a token
(docs/results/recipes_loss.md); it varies with the Python version, whose library is the text. The
other precisions are --config.precision=bf16, fp8_current, fp8_block, fp8_block_ue8m0 or fp4_mixed;
give each its own --workdir.
"""

import ml_collections

import fp8jax


def get_config() -> ml_collections.ConfigDict:
    config = fp8jax.base_config()
    config.precision = "fp8_delayed"
    config.num_steps = 150
    config.optimizer.warmup_steps = 15
    config.valid.every = 50
    config.valid.batches = 8
    return config
