"""Exploring FP4 precision: MLPs forward in FP4, attention's linears in FP8, backward in FP8
(2502.11458).

python -m experiments.train --config=configs/fp4.py --workdir=runs/fp4

runs a Llama of 0.9M parameters on bytes, on a laptop. The paper's sizes are
--config=configs/fp4.py:SIZE with SIZE one of gpt2_125m, gpt2_335m, llama_125m, llama_1b: rows of
1024 tokens; its other settings are unknown, these are ours. Give the text with --config.data and
the tokenizer with --config.tokenizer=bpe:PATH. The baselines are --config.precision=bf16 and
fp8_block.
"""

import ml_collections

from configs import base

SIZES = ("small", "gpt2_125m", "gpt2_335m", "llama_125m", "llama_1b")


def get_config(size: str = "small") -> ml_collections.ConfigDict:
    if size not in SIZES:
        raise ValueError(f"size {size!r} is none of {', '.join(SIZES)}")
    config = base.get_config()
    config.precision = "fp4_mixed"
    if size == "small":
        config.num_steps = 150
        config.warmup_steps = 15
        config.valid_every = 50
        config.valid_batches = 8
        return config
    config.model = size
    config.seq_len = 1024
    config.batch_size = 256
    config.num_steps = 20_000
    config.warmup_steps = 1000
    config.learning_rate = 6e-4
    config.valid_every = 500
    config.valid_batches = 16
    config.checkpoint_every = 500
    return config
