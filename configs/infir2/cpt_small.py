"""InfiR2: continual pre-training in FP8 with 1x128 and 128x128 blocks, on a laptop (2509.22536).

python -m experiments.train --config=configs/infir2/cpt_small.py --workdir=runs/infir2/cpt_small

trains a Qwen of 0.8M parameters on bytes, with warm-up, stable phase and decay in the paper's
proportions. The baseline is --config.precision=bf16; --config.precision=fp8_block has float32
scales instead of powers of two. The paper's sizes are cpt_1_5b.py and cpt_7b.py.

The paper's scripts let a document see those before it in its row; this run does not, unless asked
with --config.document_masking=False.
"""

import ml_collections

import fp8jax


def get_config() -> ml_collections.ConfigDict:
    config = fp8jax.base_config()
    config.precision = "fp8_block_ue8m0"
    config.model = "qwen2_tiny"
    config.optimizer.schedule = "wsd"
    config.optimizer.decay_fraction = 0.125
    config.optimizer.final_fraction = 0.1
    config.num_steps = 160
    config.optimizer.warmup_steps = 20
    config.valid.every = 80
    config.valid.batches = 8
    return config
