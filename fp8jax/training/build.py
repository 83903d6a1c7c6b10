"""TODO docstring."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array
from ml_collections import ConfigDict

from fp8jax.analysis.size_gate import size_gate
from fp8jax.data.byte_tokenizer import Tokenizer
from fp8jax.data.tokenizers import tokenizer
from fp8jax.device import xla
from fp8jax.device.mesh import check_batch, make_mesh, mesh_axes, spec, tree_shardings
from fp8jax.linear.amax_history import HISTORIES
from fp8jax.model.attention import choose_attention
from fp8jax.model.generate import generate
from fp8jax.model.models import model_config
from fp8jax.model.transformer import Transformer
from fp8jax.numerics.policy import Policy
from fp8jax.numerics.policy_options import as_policy
from fp8jax.numerics.schedule import as_schedule
from fp8jax.optim.config import OptimizerConfig
from fp8jax.optim.optimizers import make_optimizer
from fp8jax.stability.gnmr import Gnmr
from fp8jax.stability.ladder import Ladder
from fp8jax.stability.spikes import SpikeDetector
from fp8jax.training.policy_switch import kept_histories
from fp8jax.training.run import Run
from fp8jax.training.step import TrainState, as_variables, eval_step, repeat_step, train_step


def _check_config(config: ConfigDict) -> None:
    names = (
        "num_steps", "batch_size", "seq_len", "grad_accum", "unroll", "valid_every",
        "valid_batches", "sample_every", "sample_tokens", "checkpoint_every", "checkpoint_keep",
    )  # fmt: skip
    for name in names:
        if config[name] is not None and config[name] < 1:
            raise ValueError(f"{name}={config[name]} must be at least 1")
    if config.sample_prompt and config.sample_every is None:
        raise ValueError(f"sample_prompt={config.sample_prompt!r} is for samples: set sample_every")
    if config.checkpoint_keep_best and config.checkpoint_every % config.valid_every:
        raise ValueError(
            f"checkpoint_keep_best={config.checkpoint_keep_best} compares validation losses: "
            f"checkpoint_every={config.checkpoint_every} must be a multiple of "
            f"valid_every={config.valid_every}"
        )


def _model(config: ConfigDict, policy: Policy, words: int, mesh: Mesh) -> tuple[Transformer, str]:
    """The model, its policy gated by size if the config says so, and the report on the gains."""
    rows = check_batch(config.batch_size, config.grad_accum, mesh)
    shape = model_config(config.model, dict(config.model_overrides))
    shape.check_mesh(mesh.shape["tensor"])
    shape.check_length(config.seq_len)
    if shape.vocab_size < words:
        raise ValueError(f"vocab_size={shape.vocab_size} is less than the tokenizer's {words}")
    queries = (config.batch_size, config.seq_len, shape.n_heads, shape.head_dim)
    attention = choose_attention(
        config.attention, jax.ShapeDtypeStruct(queries, Transformer.dtype),
        beta=config.attention_beta, tolerance=config.attention_tie_tolerance,
    )  # fmt: skip
    policy, gains = size_gate(
        policy, shape, tokens=rows * config.seq_len, tensor=mesh.shape["tensor"],
        backend=config.backend, leave=config.size_gate,
    )  # fmt: skip
    return Transformer(shape, policy, config.backend, attention, config.remat, config.unroll), gains


def build(config: ConfigDict, devices: list[jax.Device] | None = None) -> Run:
    """Resolves every name of the config, for all devices or those given; allocates nothing.

    Raises:
      ValueError: unknown names, and sizes that do not fit together, with the numbers.
      NotImplementedError: a backend that cannot run the policy of some stage.
    """
    _check_config(config)
    schedule = as_schedule(config.precision, config.precision_schedule)
    begins = schedule.begins(config.num_steps)
    mesh = make_mesh(mesh_axes(config.mesh, dict(config.mesh_axes)), devices)
    tokens = tokenizer(config.tokenizer)
    stages: list[Run] = []
    for policy in schedule.policies:
        before = stages[-1] if stages else None
        stages.append(_stage(config, policy, before, tokens, mesh))
    return dataclasses.replace(stages[0], later=tuple(zip(begins[1:], stages[1:], strict=True)))


def _stage(
    config: ConfigDict, policy: Policy, before: Run | None, tokens: Tokenizer, mesh: Mesh
) -> Run:
    """What trains in `policy`, after the stage `before`."""
    model, gains = _model(config, policy, tokens.vocab_size, mesh)
    fields = {f.name for f in dataclasses.fields(OptimizerConfig)} - {"name"}
    optimizer, schedule = make_optimizer(
        OptimizerConfig(name=config.optimizer, **{name: config[name] for name in fields})
    )
    ladder, detector = _recovery(config)
    gnmr = _gnmr(config)
    model = model if gnmr is None else model.clone(high=config.gnmr_precision)

    def remembered() -> dict[str, Any]:
        return {
            "seen": {} if detector is None else detector.init(),
            "gnmr": {} if gnmr is None else gnmr.init(model.config.n_layers),
        }

    initial = _initial_state(model, optimizer, config.seed, remembered)
    boxed = jax.eval_shape(initial)
    shardings = tree_shardings(boxed, mesh)
    state = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        linen.meta.unbox(boxed), shardings,
    )  # fmt: skip

    def compiled(model: Transformer, kind: Callable[..., Any] = train_step):
        def step(state, batch):
            return kind(
                state, batch, model=model, optimizer=optimizer, schedule=schedule,
                grad_accum=config.grad_accum, detector=detector,
                gnmr=gnmr if kind is train_step else None,
            )  # fmt: skip

        return jax.jit(
            step, donate_argnums=0, out_shardings=(shardings, None), compiler_options=options
        )

    options = xla.compiler_options()
    bytes_V = np.zeros(model.config.vocab_size, np.float32)
    bytes_V[: tokens.vocab_size] = tokens.token_bytes
    return Run(
        model=model, mesh=mesh, tokenizer=tokens, state=state,
        initialize=jax.jit(lambda: linen.meta.unbox(initial()), out_shardings=shardings),
        seed_step=compiled(model.clone(policy=as_policy(model.policy).seeding())),
        step=compiled(model), gains=gains, ladder=ladder, remembered=remembered,
        repeat_step=compiled(
            model.clone(policy=config.recovery_precision, high=None), repeat_step
        ),
        eval_step=jax.jit(
            lambda s, b: eval_step(s, b, model=model, token_bytes_V=jnp.asarray(bytes_V)),
            compiler_options=options,
        ),
        sample=None if config.sample_every is None else _sampler(config, model, tokens, mesh),
        batch_sharding=NamedSharding(mesh, spec("batch", "length")),
        kept=kept_histories(before.model, before.state, model, state) if before else frozenset(),
    )  # fmt: skip


def _recovery(config: ConfigDict) -> tuple[Ladder, SpikeDetector | None]:
    """What is done about bad steps, and which count as bad besides those that are not finite."""
    if as_policy(config.recovery_precision).delayed:
        raise ValueError(
            f"recovery_precision={config.recovery_precision!r} keeps amax histories, and a step"
            " that is repeated has none: take bf16 or a policy with current scales"
        )
    ladder = Ladder.parse(config.recovery)
    if config.spike_window is None:
        return ladder, None
    return ladder, SpikeDetector(window=config.spike_window, deviations=config.spike_deviations)


def _gnmr(config: ConfigDict) -> Gnmr | None:
    """The controller of promotions, None without thresholds."""
    if not config.gnmr_alpha:
        if config.gnmr_random is not None:
            raise ValueError(f"gnmr_random={config.gnmr_random} needs a gnmr_alpha: GNMR is off")
        return None
    if as_policy(config.gnmr_precision).delayed:
        raise ValueError(
            f"gnmr_precision={config.gnmr_precision!r} keeps amax histories: take one without"
        )
    if not 0 <= config.gnmr_first <= 1:
        raise ValueError(f"gnmr_first={config.gnmr_first} does not lie in [0, 1]")
    return Gnmr(
        alpha=tuple(config.gnmr_alpha), beta=config.gnmr_beta, most=config.gnmr_most,
        first_steps=round(config.gnmr_first * config.num_steps), lock=config.gnmr_lock,
        window=config.gnmr_window, random=config.gnmr_random,
    )  # fmt: skip


def _sampler(
    config: ConfigDict, model: Transformer, tokens: Tokenizer, mesh: Mesh
) -> Callable[[TrainState], Array]:
    """A compiled function from a state to the tokens of a text, prompt included."""
    prompt = np.append(tokens.bos, tokens.encode(config.sample_prompt)).astype(np.int32)
    if len(prompt) + config.sample_tokens > config.seq_len:
        raise ValueError(
            f"a sample of {len(prompt)} tokens of prompt and sample_tokens={config.sample_tokens} "
            f"is longer than seq_len={config.seq_len}"
        )
    if config.sample_temperature < 0:
        raise ValueError(f"sample_temperature={config.sample_temperature} is negative")

    # Whatever attention trains: not every one takes rows of this length.
    model = model.clone(attention=None)

    def sample(state: TrainState) -> Array:
        variables = as_variables(state.params, state.histories)
        return generate(
            model, variables, jnp.asarray(prompt), num_tokens=config.sample_tokens,
            temperature=config.sample_temperature, num_words=tokens.vocab_size,
            key=jax.random.fold_in(state.key, state.step),
        )  # fmt: skip

    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(sample, out_shardings=everywhere, compiler_options=xla.compiler_options())


def _initial_state(
    model: Transformer, optimizer: optax.GradientTransformation, seed: int,
    remembered: Callable[[], dict[str, Any]],
) -> Callable[[], TrainState]:  # fmt: skip
    """A function that makes the state of step 0, boxed with logical axis names."""
    key = jax.random.key(seed)

    def initial() -> TrainState:
        tokens = jnp.zeros((1, 1), jnp.int32)
        variables = model.init(jax.random.fold_in(key, 0), tokens, tokens, tokens, key)
        params = variables["params"]
        histories = variables[HISTORIES] if HISTORIES in variables else {}
        return TrainState(
            step=jnp.zeros((), jnp.int32), params=params, histories=histories,
            opt_state=optimizer.init(params), key=jax.random.fold_in(key, 1),
            **remembered(),
        )  # fmt: skip

    return initial
