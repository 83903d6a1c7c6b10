"""Every key of a run, once. Experiments are copies of this with a few lines changed."""

import ml_collections
from ml_collections.config_dict import placeholder


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()

    # Precision
    config.precision = "bf16"  # a policy: which module runs which recipe (README's table)
    config.backend = placeholder(str)  # emulated or xla; None takes the fastest that can
    config.remat = "none"  # what layers recompute in the backward: none, dots or full

    # Model
    config.model = "llama_tiny"  # a key of fp8jax.MODELS; single sizes in model_overrides
    config.model_overrides = ml_collections.ConfigDict()
    config.model_overrides.vocab_size = placeholder(int)  # None: the model's own, as below
    config.model_overrides.d_model = placeholder(int)  # residual width
    config.model_overrides.n_layers = placeholder(int)  # number of layers
    config.model_overrides.n_heads = placeholder(int)  # query heads
    config.model_overrides.n_kv_heads = placeholder(int)  # key and value heads
    config.model_overrides.d_ff = placeholder(int)  # hidden width of the MLP
    config.model_overrides.head_dim = placeholder(int)  # size of a head
    config.model_overrides.rope_theta = placeholder(float)  # base of the rotary wavelengths
    config.model_overrides.norm_eps = placeholder(float)  # of RMSNorm
    config.unroll = 1  # layers a loop iteration; the number of layers for no loop

    # Devices
    config.mesh = "data"  # all devices along data, fsdp or tensor; single axes in mesh_axes
    config.mesh_axes = ml_collections.ConfigDict()
    config.mesh_axes.data = placeholder(int)  # devices that share the batch
    config.mesh_axes.fsdp = placeholder(int)  # devices that share the batch and cut parameters
    config.mesh_axes.tensor = placeholder(int)  # devices that share heads and hidden units

    # Data
    config.data = (
        "python_stdlib"  # sources, comma-separated: [NAME=]KIND[:GLOB], see fp8jax/data.py
    )
    config.tokenizer = "bytes"  # a key of fp8jax.text.TOKENIZERS
    config.seq_len = 256  # tokens a row
    config.valid_fraction = 0.05  # share of the documents held out, chosen by their hash
    config.cache_dir = "~/.cache/fp8jax/data"  # where tokenised text is kept

    # Run
    config.seed = 0  # of initialisation and data order
    config.num_steps = 300  # optimizer steps
    config.batch_size = 16  # rows a step, over all devices and microbatches
    config.grad_accum = 1  # microbatches a step

    # Optimizer
    config.optimizer = "adamw"  # a key of fp8jax.optim.OPTIMIZERS
    config.learning_rate = 1e-3  # after the warm-up
    config.schedule = "cosine"  # or wsd: warm-up, stable, decay
    config.warmup_steps = 20  # of linear growth
    config.decay_fraction = 0.2  # wsd: share of the run that decays
    config.final_fraction = 0.1  # learning rate at the end, as a share of the largest
    config.weight_decay = 0.1  # on kernels and embeddings
    config.b1 = 0.9  # decay of the first moment
    config.b2 = 0.95  # decay of the second moment
    config.eps = 1e-8  # added to the root of the second moment
    config.clip_norm = 1.0  # largest global norm of the gradients

    # Keeping track
    config.valid_every = 100  # steps between validations; the last step always validates
    config.valid_batches = placeholder(int)  # batches a source and validation; None for all
    config.checkpoint_every = 100  # steps between checkpoints; the last step always saves
    config.checkpoint_keep = 2  # the latest ones that stay
    config.resume_with_changes = False  # resume a workdir whose checkpoint had another config
    return config
