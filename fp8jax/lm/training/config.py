"""All config keys of a run, with their defaults. Configs change a few of them."""

import ml_collections
from ml_collections.config_dict import placeholder


def base_config() -> ml_collections.ConfigDict:
    """Returns a config with every key at its default, as `train_and_evaluate` and --config take it.

    Returns:
      The config, of which a run changes a few keys. A key that is not there is refused.

    Example:
      >>> config = fp8jax.base_config()
      >>> config.precision = "fp8_delayed"
      >>> config.num_steps, config.tokenizer
      (300, 'bytes')
    """
    config = ml_collections.ConfigDict()

    # Precision
    config.precision = "bf16"  # which linear runs which recipe: a policy, or MODULE:OBJECT of yours
    config.precision_schedule = ()  # changes of policy, by share of the run: ((0.9, "bf16"),)
    config.backend = placeholder(str)  # emulated, xla or pallas; None: the fastest one that can run
    config.require_fp8_gemms = False  # stop before the first step if a GEMM was not compiled to FP8
    config.require_fp8_gathers = False  # or if a mesh gathers weights wider than they are cast to
    config.attention = placeholder(str)  # a key of ATTENTIONS; None: the fastest one that can run
    config.attention_beta = placeholder(float)  # of stabilized and its variants; None: default
    config.attention_tie_tolerance = placeholder(float)  # as attention_beta; None: default
    config.remat = placeholder(str)  # what the backward recomputes: a key of REMAT; None: chosen

    # Model; model_overrides replace single fields of it, None keeps the model's own
    config.model = "llama_tiny"  # a key of MODELS (fp8jax/lm/model/models.py), or hf:DIR
    config.initial_weights = ""  # hf:DIR or a workdir, whose weights step 0 starts from; "": random
    config.initial_state = ""  # WORKDIR or WORKDIR@STEP of a run to start from, its optimizer too
    config.model_overrides = ml_collections.ConfigDict()
    config.model_overrides.vocab_size = placeholder(int)  # rows of the embedding
    config.model_overrides.d_model = placeholder(int)  # width of the residual stream
    config.model_overrides.n_layers = placeholder(int)  # number of layers
    config.model_overrides.n_heads = placeholder(int)  # number of query heads
    config.model_overrides.n_kv_heads = placeholder(int)  # number of key and value heads
    config.model_overrides.d_ff = placeholder(int)  # hidden width of the MLP
    config.model_overrides.head_dim = placeholder(int)  # size of a head
    config.model_overrides.norm = placeholder(str)  # rms, rms_offset or layer
    config.model_overrides.norm_at = placeholder(str)  # of attention and MLP: before, after or both
    config.model_overrides.norm_eps = placeholder(float)  # added to the variance by the norms
    config.model_overrides.mlp = placeholder(str)  # a key of MLPS (fp8jax/lm/model/config.py)
    config.model_overrides.biases = placeholder(str)  # linears with a bias: none, qkv or all
    config.model_overrides.qk_norm = placeholder(bool)  # normalize queries and keys
    config.model_overrides.qk_norm_joint = placeholder(bool)  # all heads of a token together
    config.model_overrides.query_scalar = placeholder(int)  # in place of head_dim in attention
    config.model_overrides.layer_pattern = placeholder(str)  # kinds of layers: letters f, w and n
    config.model_overrides.window = placeholder(int)  # keys that a query of a layer "w" sees
    config.model_overrides.joined_projections = placeholder(bool)  # in folders of Hugging Face
    config.model_overrides.scale_embedding = placeholder(bool)  # by the root of the width
    config.model_overrides.tie_embeddings = placeholder(bool)  # use the embedding as the head
    config.model_overrides.learned_positions = placeholder(int)  # rows of their table; 0: rotary
    config.model_overrides.rope_theta = placeholder(float)  # base of the rotary wavelengths
    config.model_overrides.rope_scaling = placeholder(str)  # a key of ROPE_SCALINGS
    config.model_overrides.window_rope_theta = placeholder(float)  # base in layers "w"; 0: the same
    config.model_overrides.rotary_dim = placeholder(int)  # elements of a head that turn; 0: all
    config.unroll = placeholder(int)  # layers in an iteration of their loop; None: chosen

    # Devices
    config.mesh = "data"  # the axis of all devices: data, fsdp or tensor; mesh_axes sets several
    config.mesh_axes = ml_collections.ConfigDict()
    config.mesh_axes.data = placeholder(int)  # devices that split the batch
    config.mesh_axes.fsdp = placeholder(int)  # devices that split the batch and the parameters
    config.mesh_axes.tensor = placeholder(int)  # devices that split heads and hidden units

    # Data
    config.data = "python_stdlib"  # [NAME=][WEIGHT*]KIND[:ARGUMENT],…: see lm/sources.py
    config.tokenizer = "bytes"  # bytes, bpe:PATH of a tokenizer.json, or hf:DIR
    config.seq_len = 256  # tokens in a row
    config.document_masking = True  # False: documents of a training row see those before them
    config.long_examples = "error"  # conversations longer than a row: error, skip or cut
    config.bad_examples = "error"  # records that nothing can be learned from: error or skip
    config.data_timeout = 600.0  # seconds to wait for a batch; after that the run saves and stops
    config.cache_dir = "~/.cache/fp8jax/data"  # folder of the tokenized text

    # Run
    config.seed = 0  # of initialization and data order
    config.num_steps = 300  # optimizer steps
    config.num_epochs = placeholder(int)  # passes over the data, instead of num_steps; None: off
    config.batch_size = 16  # rows in a step, over all devices and microbatches
    config.grad_accum = 1  # microbatches in a step
    config.resume_with_changes = False  # resume from a checkpoint of another config
    config.log_to = ""  # also send scalars to wandb:PROJECT or trackio:PROJECT; empty: nowhere

    # Optimizer
    config.optimizer = ml_collections.ConfigDict()
    config.optimizer.name = "adamw"  # a key of OPTIMIZERS (lm/optim), or MODULE:OBJECT of yours
    config.optimizer.learning_rate = 1e-3  # the largest one, reached after the warm-up
    config.optimizer.schedule = "cosine"  # a key of SCHEDULES (lm/optim), or MODULE:OBJECT of yours
    config.optimizer.warmup_steps = 20  # of linear growth; if too many, a tenth of the run
    config.optimizer.warmup_fraction = placeholder(float)  # as a share of the run; None: steps
    config.optimizer.decay_fraction = 0.2  # wsd: fraction of the run that decays
    config.optimizer.final_fraction = 0.1  # final learning rate divided by the largest
    config.optimizer.weight_decay = 0.1  # applies to kernels and embeddings
    config.optimizer.b1 = 0.9  # decay rate of the first moment
    config.optimizer.b2 = 0.95  # decay rate of the second moment
    config.optimizer.eps = 1e-8  # added to the root of the second moment
    config.optimizer.clip_norm = 1.0  # gradients with a larger global norm are scaled down to it
    config.optimizer.loss_scale = "none"  # of the backward pass: none, a power of two, or dynamic
    config.optimizer.loss_scale_window = 2000  # accepted steps after which a dynamic one doubles
    config.optimizer.gradients = "float32"  # format, once clipped: float32 or e5m2, unscaled
    config.optimizer.moments = "float32"  # how they are stored: a key of MOMENTS (lm/optim)
    config.optimizer.reset = ""  # recipe by whose cast oscillating kernels are reset; "": none are
    config.optimizer.reset_from = 0.6  # share of the run from which on they are
    config.optimizer.master_weights = "float32"  # how parameters are stored: float32 or bfloat16

    # Bad steps (non-finite values, and loss spikes if a detector is on) never change the state
    config.recovery = ml_collections.ConfigDict()
    config.recovery.ladder = ""  # what to try, in order, with budgets: repeat:5,skip:50; "": stop
    config.recovery.precision = "bf16"  # policy in which repeat runs the step again
    config.recovery.spike_window = placeholder(int)  # accepted losses to compare with; None: off
    config.recovery.spike_deviations = 6.0  # threshold above their median, in robust deviations

    # GNMR: runs layers, or linears, whose gradients grow in higher precision for a while
    config.gnmr = ml_collections.ConfigDict()
    config.gnmr.alpha = ()  # thresholds of the gradient ratio, one or two: (1.5, 1.1); (): off
    config.gnmr.beta = 1.3  # threshold of the ratio's acceleration
    config.gnmr.first = 0.025  # fraction of the run that uses the first of two thresholds
    config.gnmr.unit = "layer"  # what is promoted as a whole: "layer" or "linear"
    config.gnmr.most = 1  # largest number of layers or linears promoted at a time
    config.gnmr.lock_steps = 1  # steps that a promotion lasts after its cause is gone
    config.gnmr.window = 5  # earlier ratios that the acceleration is computed from
    config.gnmr.random = placeholder(float)  # control: promote this share of them by chance
    config.gnmr.precision = "fp8_current"  # policy of what is promoted

    # Validation, samples, telemetry and checkpoints
    config.valid = ml_collections.ConfigDict()
    config.valid.fraction = 0.05  # fraction of the documents held out, by their hash
    config.valid.every = 100  # steps between validations; the last step always validates
    config.valid.batches = placeholder(int)  # of batch_size rows, of each source; None: all rows
    config.sample = ml_collections.ConfigDict()
    config.sample.every = placeholder(int)  # steps between text samples; None: no samples
    config.sample.prompt = ""  # text that a sample begins with
    config.sample.tokens = 128  # new tokens in a sample
    config.sample.temperature = 0.8  # temperature of the draws; 0: always the most likely token
    config.telemetry = ml_collections.ConfigDict()
    config.telemetry.every = placeholder(int)  # steps between samples of all casts; None: off
    config.telemetry.what_if = placeholder(str)  # policy to measure beside the run's; None: none
    config.checkpoint = ml_collections.ConfigDict()
    config.checkpoint.every = 100  # steps between checkpoints; the last step always saves
    config.checkpoint.keep = 2  # latest checkpoints that stay
    config.checkpoint.keep_best = 0  # checkpoints of the lowest validation loss that stay as well
    return config
