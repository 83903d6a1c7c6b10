"""Why low-precision transformer training fails: GPT-2 in BF16, attention in blocks (2510.04212).

python -m experiments.train --config=configs/flash_rounding.py --workdir=runs/flash_rounding

trains a GPT-2 of 1.0M parameters on bytes, on a laptop, with the paper's fix: where several keys
share the largest score of a row, a larger maximum is subtracted (blockwise_attention.py).
--config.attention=reference runs without the fix; --config.attention_beta and
--config.attention_tie_tolerance change it. At this size no run fails (docs/results/attention.md).

The paper's run is --config=configs/flash_rounding.py:gpt2_125m: OpenWebText, 512 rows of 1024
tokens in a step, no weight decay, no biases (here the norms keep theirs). Give the text with
--config.data and GPT-2's tokenizer with --config.tokenizer=bpe:PATH. As in the authors' code,
scores, row maxima, sums, outputs and deltas are bfloat16; a block has 128 keys here and 512 there.
Without the fix (--config.attention=reference_all_bf16) it is the run whose loss the paper reports
to explode after several thousand steps. stabilized_bf16 and reference_bf16 round only the product
p v of each block and keep the rest in float32; --config.attention=xla computes whole rows of scores
instead of blocks.
"""

import ml_collections

import fp8jax

SIZES = ("small", "gpt2_125m")


def get_config(size: str = "small") -> ml_collections.ConfigDict:
    if size not in SIZES:
        raise ValueError(f"size {size!r} is none of {', '.join(SIZES)}")
    config = fp8jax.base_config()
    config.attention = "stabilized"
    config.model_overrides.biases = "none"
    config.optimizer.weight_decay = 0.0
    config.optimizer.final_fraction = 0.01
    if size == "small":
        config.model = "gpt2_tiny"
        config.num_steps = 150
        config.optimizer.warmup_steps = 15
        config.valid.every = 50
        config.valid.batches = 8
        return config
    config.model = size
    config.attention = "stabilized_all_bf16"
    config.seq_len = 1024
    config.batch_size = 512
    config.grad_accum = 4
    config.num_steps = 600_000
    config.optimizer.warmup_steps = 2000
    config.valid.every = 1000
    config.valid.batches = 4
    config.checkpoint.every = 1000
    return config
