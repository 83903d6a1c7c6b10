"""StoSignSGD: GPT-2 in FP8, trained with stochastic signs of the momentum (2604.15416).

python -m experiments.train --config=configs/stosignsgd.py --workdir=runs/stosignsgd

trains a GPT-2 of 1.0M parameters on bytes, on a laptop. The paper's second version is
--config.optimizer.name=stosignsgd_v2, its baselines are signum, lion and adamw.

The formats are the paper's: every linear, the LM head too, in FP8 with the current scale of each
tensor; clipped gradients rounded to E5M2, momentum stored in E4M3, both without a scale; master
weights in BF16. What the paper leaves open: gradients are rounded after clipping, weights to
nearest, and StoSignSGD's largest magnitude G stays in float32, since in E4M3 it would underflow and
never decay. What differs from the paper's code: gradients are float32 until they become E5M2, and
norms, logits and the optimizer compute in float32. AdamW diverges in these formats: its second
moment underflows, which --config.optimizer.moments=fp8 avoids. docs/results/stosignsgd.md has the
losses.

The paper's run is --config=configs/stosignsgd.py:gpt2_125m: OpenWebText, 256 rows of 1024 tokens in
a step, 50,000 steps. Give the text with --config.data and GPT-2's tokenizer with
--config.tokenizer=bpe:PATH.
"""

import ml_collections

import fp8jax

SIZES = ("small", "gpt2_125m")


def get_config(size: str = "small") -> ml_collections.ConfigDict:
    if size not in SIZES:
        raise ValueError(f"size {size!r} is none of {', '.join(SIZES)}")
    config = fp8jax.base_config()
    config.precision = "fp8_current:head=fp8_current"
    config.optimizer.name = "stosignsgd"
    config.optimizer.gradients = "e5m2"
    config.optimizer.moments = "fp8_unscaled"
    config.optimizer.master_weights = "bfloat16"
    config.model_overrides.biases = "none"
    config.optimizer.final_fraction = 0.01
    if size == "small":
        config.model = "gpt2_tiny"
        config.num_steps = 150
        config.optimizer.warmup_steps = 15
        config.valid.every = 50
        config.valid.batches = 8
        return config
    config.model = size
    config.seed = 61
    config.seq_len = 1024
    config.batch_size = 256
    config.num_steps = 50_000
    config.optimizer.warmup_steps = 2000
    config.optimizer.learning_rate = 1e-4
    config.valid.every = 1000
    config.valid.batches = 16
    config.checkpoint.every = 1000
    return config
