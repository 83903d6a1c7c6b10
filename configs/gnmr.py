"""GNMR: Llamas on short rows in low precision, with and without promotions (2606.00539).

python -m experiments.train --config=configs/gnmr.py --workdir=runs/gnmr

trains a Llama of 0.9M parameters on bytes, on a laptop, in fp8_current. The baseline is
--config.precision=bf16. The paper's sizes are --config=configs/gnmr.py:SIZE with SIZE one of
llama_60m, llama_125m (its 130M), llama_350m, llama_1b (its 1.3B): C4, 512 rows of 256 tokens in a
step, warm-up over a tenth of the run. The number of steps is ours. Give the text with
--config.data and the tokenizer with --config.tokenizer=bpe:PATH.

--config=configs/gnmr.py:naive is the small run with activations, weights and gradients in E2M1, one
scale for each token, rounded to nearest, without promotions. Its loss stalls 16% above that of FP8.
--config.gnmr_alpha=3.0 promotes layers whose gradients grow to fp8_current, which does not repair
the run: docs/results/gnmr.md has the table and the reason.
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
