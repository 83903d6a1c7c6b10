"""Exploring FP4 precision: MLP forward in FP4, attention linears and backward in FP8 (2502.11458).

python -m experiments.train --config=configs/fp4.py --workdir=runs/fp4

trains a Llama of 0.9M parameters on bytes, on a laptop. The last tenth of training runs in the
target precision, BF16; the paper does not say how long its last stage is. The results are in
docs/results/fp4_schedule.md. To train in FP4 to the end:

    --config.precision_schedule='()'

Together with that option, --config.precision=bf16 and fp8_block are the baselines, and fp4_naive,
fp4_block and fp4_backward are the other corners of the paper's 2 x 2 comparison. Options cover what
the paper leaves open: fp4_mixed:fp4_tile=row (scales along a whole token and channel),
fp4_mixed:gradients=e5m2, and fp4_mixed:dgrad=bf16 (the input gradient in BF16 instead of FP8). To
end one of them in BF16 as well, give --config.precision_schedule='((0.9,"bf16"),)'.

The paper's sizes are --config=configs/fp4.py:SIZE with SIZE one of gpt2_125m, gpt2_335m,
llama_125m, llama_1b, with rows of 1024 tokens. Its other settings are not published; those here are
ours. Give the text with --config.data and the tokenizer with --config.tokenizer=bpe:PATH.
"""

import ml_collections

import fp8jax

SIZES = ("small", "gpt2_125m", "gpt2_335m", "llama_125m", "llama_1b")


def get_config(size: str = "small") -> ml_collections.ConfigDict:
    if size not in SIZES:
        raise ValueError(f"size {size!r} is none of {', '.join(SIZES)}")
    config = fp8jax.base_config()
    config.precision = "fp4_mixed"
    config.precision_schedule = ((0.0, "fp4_mixed"), (0.9, "bf16"))
    if size == "small":
        config.num_steps = 150
        config.optimizer.warmup_steps = 15
        config.valid.every = 50
        config.valid.batches = 8
        return config
    config.model = size
    config.seq_len = 1024
    config.batch_size = 256
    config.num_steps = 20_000
    config.optimizer.warmup_steps = 1000
    config.optimizer.learning_rate = 6e-4
    config.valid.every = 500
    config.valid.batches = 16
    config.checkpoint.every = 500
    return config
