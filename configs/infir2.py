"""InfiR2: continual pre-training of Qwen 2.5 in FP8 with 1x128 and 128x128 blocks (2509.22536).

python -m experiments.train --config=configs/infir2.py --workdir=runs/infir2

trains a Qwen of 0.8M parameters on bytes, on a laptop, with warm-up, stable phase and decay in the
paper's proportions. The baseline is --config.precision=bf16; --config.precision=fp8_block has
float32 scales instead of powers of two.

The paper's sizes are --config=configs/infir2.py:qwen2.5_1.5b and :qwen2.5_7b, for a pod: 128 rows
of 32,768 tokens in a step, 40,000 steps. They start from random weights; the paper starts from
Qwen's. Its data mixture is not published: give yours with --config.data, and Qwen's tokenizer with
--config.tokenizer=bpe:PATH.
"""

import ml_collections

from configs import base

SIZES = ("small", "qwen2.5_1.5b", "qwen2.5_7b")


def get_config(size: str = "small") -> ml_collections.ConfigDict:
    if size not in SIZES:
        raise ValueError(f"size {size!r} is none of {', '.join(SIZES)}")
    config = base.get_config()
    config.precision = "fp8_block_ue8m0"
    config.schedule = "wsd"
    config.decay_fraction = 0.125
    config.final_fraction = 0.1
    if size == "small":
        config.model = "qwen2_tiny"
        config.num_steps = 160
        config.warmup_steps = 20
        config.valid_every = 80
        config.valid_batches = 8
        return config
    config.model = size
    config.mesh = "fsdp"
    config.remat = "full"
    config.seed = 1236
    config.seq_len = 32_768
    config.batch_size = 128
    config.num_steps = 40_000
    config.warmup_steps = 5000
    config.learning_rate = 1e-4
    config.valid_every = 1000
    config.valid_batches = 16
    config.checkpoint_every = 1000
    return config
