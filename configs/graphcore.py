"""Training in 8-bit floating point with one scale for each tensor: GPT and Llama 2 (2309.17224).

python -m experiments.train --config=configs/graphcore.py --workdir=runs/graphcore

trains a GPT of 1.0M parameters on bytes, on a laptop. The recipe is FP8-AMAX: one power-of-two
scale for each tensor, from its own amax, with E4M3 weights and activations and E5M2 gradients. The
projections to queries, keys and values are one tensor in the paper, so they share a scale. The
baseline is --config.precision=bf16. Options cover what is open:

    --config.precision=fp8_amax                             a scale for each of the three
    --config.precision=fp8_amax:qkv=shared,margin=3         as the authors' code: biases within 31,
                                                            three binades left free for gradients
    --config.precision=fp8_amax:scale=mse,margin=3          scales of least squared error
    --config.precision=fp8_amax:qkv=shared,formats=fnuz     formats with the largest number 240
    --config.optimizer.loss_scale=dynamic                   loss scaling, as in the paper's FP16

Gradients are BF16 here, and follow any loss scale. It matters where biases are clipped (margin=3),
since gradients of large batches are small, and to one constant (fp8_cscale:qkv=shared).

The paper's sizes are --config=configs/graphcore.py:SIZE with SIZE one of gpt_111m, gpt_590m,
gpt_1.3b, gpt_6.7b, gpt_13b, llama2_7b, llama2_13b, llama2_70b, with rows of 2048 tokens; gpt_256m
and gpt_2.7b complete the family. The paper fine-tunes these models; here they start from random
weights, and learning rate, batch and steps are ours. Give the text with --config.data and the
tokenizer with --config.tokenizer=bpe:PATH.
"""

import ml_collections

import fp8jax

SIZES = (
    "small",
    "gpt_111m",
    "gpt_256m",
    "gpt_590m",
    "gpt_1.3b",
    "gpt_2.7b",
    "gpt_6.7b",
    "gpt_13b",
    "llama2_7b",
    "llama2_13b",
    "llama2_70b",
)


def get_config(size: str = "small") -> ml_collections.ConfigDict:
    if size not in SIZES:
        raise ValueError(f"size {size!r} is none of {', '.join(SIZES)}")
    config = fp8jax.base_config()
    config.precision = "fp8_amax:qkv=shared"
    if size == "small":
        config.model = "gpt2_tiny"
        config.model_overrides.mlp = "gelu"
        config.num_steps = 150
        config.optimizer.warmup_steps = 15
        config.valid.every = 50
        config.valid.batches = 8
        return config
    config.model = size
    config.mesh = "fsdp"
    config.seq_len = 2048
    config.batch_size = 128
    config.num_steps = 10_000
    config.optimizer.warmup_steps = 500
    config.optimizer.learning_rate = 2e-4
    config.valid.every = 500
    config.valid.batches = 16
    config.checkpoint.every = 500
    return config
