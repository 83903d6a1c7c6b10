"""Every key of a run, once. Experiments are copies of this with a few lines changed."""

import ml_collections
from ml_collections.config_dict import placeholder


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()

    # Precision
    config.precision = "bf16"  # a policy: which module runs which recipe (README's table)
    config.precision_schedule = ()  # (share of the steps done, next policy): ((0.9, "bf16"),)
    config.backend = placeholder(str)  # emulated, xla, pallas; None: the fastest that can
    config.size_gate = False  # leave linears in BF16 where an H200's table says that FP8 is slower
    config.require_fp8_gemms = False  # stop before the first step if one of them is not FP8
    config.attention = placeholder(str)  # a key of fp8jax.attention.ATTENTIONS; None takes xla
    config.attention_beta = placeholder(float)  # of attention=stabilized(_bf16); None: its own
    config.attention_tie_tolerance = placeholder(float)  # of the same; None for its own
    config.remat = "none"  # what layers recompute in the backward: none, quantized, dots or full

    # Model
    config.model = "llama_tiny"  # a key of fp8jax.MODELS; single fields in model_overrides
    config.model_overrides = ml_collections.ConfigDict()
    config.model_overrides.vocab_size = placeholder(int)  # None: the model's own, as below
    config.model_overrides.d_model = placeholder(int)  # residual width
    config.model_overrides.n_layers = placeholder(int)  # number of layers
    config.model_overrides.n_heads = placeholder(int)  # query heads
    config.model_overrides.n_kv_heads = placeholder(int)  # key and value heads
    config.model_overrides.d_ff = placeholder(int)  # hidden width of the MLP
    config.model_overrides.head_dim = placeholder(int)  # size of a head
    config.model_overrides.norm = placeholder(str)  # rms or layer
    config.model_overrides.norm_eps = placeholder(float)  # of the norms
    config.model_overrides.mlp = placeholder(str)  # swiglu, smooth_swiglu, gelu or gelu_tanh
    config.model_overrides.biases = placeholder(str)  # none, qkv or all
    config.model_overrides.qk_norm = placeholder(bool)  # queries and keys normalized
    config.model_overrides.tie_embeddings = placeholder(bool)  # the head is the embedding
    config.model_overrides.learned_positions = placeholder(int)  # size of their table; 0: rotary
    config.model_overrides.rope_theta = placeholder(float)  # base of the rotary wavelengths
    config.model_overrides.rope_scaling = placeholder(str)  # a key of fp8jax.rope.ROPE_SCALINGS
    config.unroll = 1  # layers a loop iteration; the number of layers for no loop

    # Devices
    config.mesh = "data"  # all devices along data, fsdp or tensor; single axes in mesh_axes
    config.mesh_axes = ml_collections.ConfigDict()
    config.mesh_axes.data = placeholder(int)  # devices that share the batch
    config.mesh_axes.fsdp = placeholder(int)  # devices that share the batch and cut parameters
    config.mesh_axes.tensor = placeholder(int)  # devices that share heads and hidden units

    # Data
    config.data = "python_stdlib"  # [NAME=][WEIGHT*]KIND[:ARGUMENT],…: see fp8jax/data/sources.py
    config.tokenizer = "bytes"  # or bpe:PATH of a tokenizer.json, see fp8jax/data/tokenizers.py
    config.seq_len = 256  # tokens a row
    config.valid_fraction = 0.05  # share of the documents held out, chosen by their hash
    config.data_timeout = 600.0  # seconds that a batch may take; then the run saves and stops
    config.cache_dir = "~/.cache/fp8jax/data"  # where tokenized text is kept

    # Run
    config.seed = 0  # of initialization and data order
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
    config.moments = "float32"  # a key of fp8jax.moments.MOMENTS

    # Bad steps: what is not finite, and spikes if they are watched for, never changes the state
    config.recovery = ""  # then: rungs with budgets, as in repeat:5,skip:50,rollback:2; "": stop
    config.recovery_precision = "bf16"  # the policy of repeat
    config.spike_window = placeholder(int)  # accepted losses to compare with; None: no detector
    config.spike_deviations = 6.0  # above their median, in standard deviations from the MAD

    # GNMR: layers whose gradients grow run in higher precision for a while
    config.gnmr_alpha = ()  # thresholds of the ratio, one or two stages as in (1.5, 1.1); (): off
    config.gnmr_beta = 1.3  # threshold of its acceleration
    config.gnmr_first = 0.025  # share of the run that has the first of two thresholds
    config.gnmr_most = 1  # layers at a time
    config.gnmr_lock = 1  # steps that a promotion outlasts its cause
    config.gnmr_window = 5  # ratios that an acceleration is measured against
    config.gnmr_random = placeholder(float)  # a control: this share of layers, drawn each step
    config.gnmr_precision = "fp8_current"  # the policy of promoted layers

    # Keeping track
    config.valid_every = 100  # steps between validations; the last step always validates
    config.valid_batches = placeholder(int)  # batches a source and validation; None for all
    config.sample_every = placeholder(int)  # steps between samples of text; None for none
    config.sample_prompt = ""  # what a sample begins with
    config.sample_tokens = 128  # new tokens a sample
    config.sample_temperature = 0.8  # of the draws; 0 takes the most likely token
    config.checkpoint_every = 100  # steps between checkpoints; the last step always saves
    config.checkpoint_keep = 2  # the latest ones that stay
    config.checkpoint_keep_best = 0  # those of the lowest validation loss that stay as well
    config.resume_with_changes = False  # resume a workdir whose checkpoint had another config
    return config
