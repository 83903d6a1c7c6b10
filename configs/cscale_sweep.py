"""FP8 with one constant scale for all tensors: the run whose bias is swept (2309.17224).

python -m experiments.train --config=configs/cscale_sweep.py --workdir=runs/cscale_sweep

trains a Llama of 0.4M parameters on bytes for 60 steps, with the default bias of fp8_cscale. The
sweep covers two widths of this model, training and inference, and takes a few minutes on two CPU
cores (docs/results/cscale_bias.md):

    python -m experiments.study sweep --config=configs/cscale_sweep.py --workdir=runs/cscale

The head is tied to the embedding, so that the model must learn through its linears. A step has 2048
tokens. That number matters: the gradients of a mean loss shrink with it, and the bias that they
need changes with them.
"""

import ml_collections

import fp8jax


def get_config() -> ml_collections.ConfigDict:
    config = fp8jax.base_config()
    config.precision = "fp8_cscale"
    config.model_overrides.n_layers = 2
    config.model_overrides.tie_embeddings = True
    config.seq_len = 128
    config.num_steps = 60
    config.optimizer.warmup_steps = 6
    config.optimizer.learning_rate = 3e-3
    config.valid.every = 30
    config.valid.batches = 16
    return config
