"""GNMR's baselines: Llamas on short rows in low precision (2606.00539).

python -m experiments.train --config=configs/gnmr.py --workdir=runs/gnmr

runs a Llama of 0.9M parameters on bytes, on a laptop. The paper's sizes are
--config=configs/gnmr.py:SIZE with SIZE one of llama_60m, llama_125m (its 130M), llama_350m,
llama_1b (its 1.3B): 512 rows of 256 tokens a step of C4, a tenth of the run warming up; the number
of steps is ours. Give the text with --config.data and the tokenizer with
--config.tokenizer=bpe:PATH. The baseline is --config.precision=bf16.

--config=configs/gnmr.py:naive is the small one with activations, weights and gradients in E2M1, one
scale a token, rounded to nearest, and no promotions: it stalls 16% above 8 bits. With
--config.gnmr_alpha=3.0, layers whose gradients grow are promoted to fp8_current, which does not
mend it: docs/log.md has the table and why.
"""

import ml_collections

from configs import base

LEARNING_RATES = {
    "small": 1e-3,
    "naive": 2e-3,
    "llama_60m": 2.5e-3,
    "llama_125m": 2.5e-3,
    "llama_350m": 1e-3,
    "llama_1b": 6e-4,
}
SIZES = tuple(LEARNING_RATES)


def get_config(size: str = "small") -> ml_collections.ConfigDict:
    if size not in SIZES:
        raise ValueError(f"size {size!r} is none of {', '.join(SIZES)}")
    config = base.get_config()
    config.precision = "fp8_current"
    config.learning_rate = LEARNING_RATES[size]
    config.seq_len = 256
    if size == "small":
        config.num_steps = 150
        config.warmup_steps = 15
        config.valid_every = 50
        config.valid_batches = 8
        return config
    if size == "naive":
        config.precision = "fp4_naive:fp4_tile=row"
        config.num_steps = 400
        config.warmup_steps = 40
        config.valid_every = 200
        config.valid_batches = 8
        config.gnmr_beta = 2.0
        return config
    config.model = size
    config.batch_size = 512
    config.num_steps = 20_000
    config.warmup_steps = 2000
    config.valid_every = 500
    config.valid_batches = 16
    config.checkpoint_every = 500
    return config
