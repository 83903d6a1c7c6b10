"""GNMR: Llamas on short rows in 4 bits, whose unstable layers run in 8 bits (2606.00539).

python -m experiments.train --config=configs/gnmr.py --workdir=runs/gnmr

trains a Llama of 0.9M parameters on bytes, on a laptop. As in the paper's stress test, only the
activations that are saved for the weight gradient are quantized, with one scale for each token: in
E2M1, and in E4M3 in promoted layers. All else is BF16. The choice of the two formats is ours.

    --config.gnmr.alpha='()'                                is the run without promotions,
    --config.gnmr.alpha='()' --config.precision=bf16        the baseline, and
    --config.gnmr.alpha='()' --config.precision=fp8_rowwise:only=wgrad_x,wgrad_tile=token
                                                            the run in 8 bits throughout.

The paper's 6 bits with 8, in all three GEMMs, are

    --config.precision=fp8_rowwise:formats=e3m2,wgrad_tile=token --config.gnmr.precision=fp8_current

The paper's sizes are --config=configs/gnmr.py:SIZE with SIZE one of llama_60m, llama_125m (its
130M), llama_350m, llama_1b (its 1.3B): C4, 512 rows of 256 tokens in a step, warm-up over a tenth
of the run, at most 4 layers promoted at a time at 130M and 6 of 24 layers above. At 60M a quarter
of the layers, 2, is ours, and so is the number of steps. Give the text with --config.data and the
tokenizer with --config.tokenizer=bpe:PATH.

--config=configs/gnmr.py:naive is a harder test of ours, on the small model: activations, weights
and gradients in E2M1 in all three GEMMs, rounded to nearest, with one scale for each token, and for
each channel of a weight. Promoted layers run in fp8_current. The losses are in
docs/results/recipe_readings.md.
"""

import ml_collections

import fp8jax

SAVED_IN_4_BITS = "fp4_naive:only=wgrad_x,wgrad_tile=token"
SAVED_IN_8_BITS = "fp8_rowwise:only=wgrad_x,wgrad_tile=token"
LEARNING_RATES = {
    "small": 1e-3,
    "naive": 2e-3,
    "llama_60m": 2.5e-3,
    "llama_125m": 2.5e-3,
    "llama_350m": 1e-3,
    "llama_1b": 6e-4,
}
# Layers that may be promoted at a time.
MOST = {"small": 1, "naive": 1, "llama_60m": 2, "llama_125m": 4, "llama_350m": 6, "llama_1b": 6}
SIZES = tuple(LEARNING_RATES)


def get_config(size: str = "small") -> ml_collections.ConfigDict:
    if size not in SIZES:
        raise ValueError(f"size {size!r} is none of {', '.join(SIZES)}")
    config = fp8jax.base_config()
    config.precision = SAVED_IN_4_BITS
    config.gnmr.precision = SAVED_IN_8_BITS
    config.gnmr.alpha = (1.5,)
    config.gnmr.beta = 1.3
    config.gnmr.most = MOST[size]
    config.optimizer.learning_rate = LEARNING_RATES[size]
    config.seq_len = 256
    if size == "small":
        config.num_steps = 150
        config.optimizer.warmup_steps = 15
        config.valid.every = 50
        config.valid.batches = 8
        return config
    if size == "naive":
        config.precision = "fp4_naive:fp4_tile=row,wgrad_tile=token"
        config.gnmr.precision = "fp8_current"
        config.num_steps = 400
        config.optimizer.warmup_steps = 40
        config.valid.every = 200
        config.valid.batches = 8
        return config
    config.model = size
    config.batch_size = 512
    config.num_steps = 20_000
    config.optimizer.warmup_steps = 2000
    config.valid.every = 500
    config.valid.batches = 16
    config.checkpoint.every = 500
    return config
