"""DeepSeek-V4's late FP4: weights of MLPs in MXFP4, and SwiGLU with limits; on a dense Llama.

python -m experiments.train --config=configs/deepseek_v4.py --workdir=runs/deepseek_v4

trains a Llama of 0.9M parameters on bytes, on a laptop: in FP8 blocks with power-of-two scales, and
in the last fifth with the weights of the MLPs in MXFP4 (the policy deepseek_v4); they end as MXFP4.
The gate of SwiGLU is at most 10, its other factor between -10 and 10. There the weights are those
of experts, and FP4 begins after pre-training: the last fifth is ours. docs/recipes.md has what else
differs. Baselines:

    --config.precision_schedule='()'                        FP8 to the end
    --config.model_overrides.mlp=swiglu                     without limits
"""

import ml_collections

import fp8jax


def get_config() -> ml_collections.ConfigDict:
    config = fp8jax.base_config()
    config.precision = "fp8_block_ue8m0"
    config.precision_schedule = ((0.0, "fp8_block_ue8m0"), (0.8, "deepseek_v4"))
    config.model_overrides.mlp = "clamped_swiglu"
    config.num_steps = 150
    config.optimizer.warmup_steps = 15
    config.valid.every = 50
    config.valid.batches = 8
    return config
