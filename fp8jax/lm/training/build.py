"""From a config to a `Run`: every name is resolved here, and the config goes no further.

The first step of a delayed policy runs a program of its own, in which empty histories seed
themselves (`seeded=False`), so that the steady step pays nothing for it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array
from ml_collections import ConfigDict

from fp8jax.device import xla
from fp8jax.gemm.histories.amax_history import HISTORIES
from fp8jax.lm.data.byte_tokenizer import Tokenizer
from fp8jax.lm.data.loader import Batch
from fp8jax.lm.inference.decoding import Requests, complete
from fp8jax.lm.inference.sampling import Sampling
from fp8jax.lm.interop.folders import shape_of_model, warn_of_unknown_keys
from fp8jax.lm.interop.initial_weights import InitialWeights
from fp8jax.lm.mesh import check_batch, make_mesh, mesh_axes, spec, tree_shardings
from fp8jax.lm.model.attention import choose_attention
from fp8jax.lm.model.config import ModelConfig
from fp8jax.lm.model.promotion import Promoter, promoted_linears
from fp8jax.lm.model.transformer import REMAT, Transformer
from fp8jax.lm.optim.config import OptimizerConfig
from fp8jax.lm.optim.master_weights import MASTER_WEIGHTS, to_master
from fp8jax.lm.optim.optimizers import make_optimizer, schedule_steps
from fp8jax.lm.stability.gnmr import Gnmr
from fp8jax.lm.stability.loss_scaling import LossScaling
from fp8jax.lm.stability.spikes import SpikeDetector
from fp8jax.lm.training.epochs import tokenizer_of_run
from fp8jax.lm.training.faults import inject_gradient
from fp8jax.lm.training.ladder import Ladder
from fp8jax.lm.training.layer_choice import (
    LayerChoice,
    Sizes,
    choose_layers,
    memory_limit,
    sizes_of,
)
from fp8jax.lm.training.optional_state import (
    OptionalState,
    histories_key,
    loss_scale_key,
    spikes_key,
)
from fp8jax.lm.training.policy_switch import carried_histories
from fp8jax.lm.training.programs import device_bytes
from fp8jax.lm.training.run import Programs, Run, Stage
from fp8jax.lm.training.settings import Settings, check_numbers
from fp8jax.lm.training.step import (
    StepNumbers,
    TrainState,
    as_variables,
    eval_step,
    repeat_step,
    telemetry_step,
    train_step,
)
from fp8jax.lm.training.step_memory import gradient_bytes
from fp8jax.lookup import lookup
from fp8jax.numerics.names import as_policy
from fp8jax.numerics.policy import Policy
from fp8jax.numerics.schedule import PrecisionSchedule, as_schedule

# Layers in one iteration of the seeding step's loop (docs/results/steps_and_memory.md).
_SEEDING_UNROLL = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shared:
    """What all stages of a run share."""

    mesh: Mesh
    shape: ModelConfig
    tokenizer: Tokenizer
    optimizer: optax.GradientTransformationExtraArgs
    numbers: Callable[[TrainState], StepNumbers]
    master_weights: jnp.dtype
    detector: SpikeDetector | None
    promoter: Promoter | None
    scaling: LossScaling | None
    optional_state: tuple[OptionalState, ...]
    initial_weights: InitialWeights | None


def build(config: ConfigDict, devices: list[jax.Device] | None = None) -> Run:
    """Resolves every name of the config, for all devices or those given. Allocates no array, but
    for the rates of a schedule of the user's own.

    In a run of several processes all of them must call this.

    Raises:
      ValueError: unknown names, and sizes that do not fit together, with the numbers.
      NotImplementedError: a backend that cannot run the policy of some stage.
    """
    check_numbers(config)
    precision = as_schedule(config.precision, config.precision_schedule)
    mesh = make_mesh(mesh_axes(config.mesh, dict(config.mesh_axes)), devices)
    ladder, detector = _recovery(config)
    promoter = _promoter(config, precision)
    scaling = _loss_scaling(config, precision)
    shape = shape_of_model(config.model, dict(config.model_overrides))
    warn_of_unknown_keys(config.model)
    weights = InitialWeights(config.initial_weights, shape) if config.initial_weights else None
    optimizing = OptimizerConfig.from_config(config)
    optimizer, schedule = make_optimizer(optimizing)
    if ":" in config.optimizer.schedule:  # the user's own; those here are finite
        _require_finite_rates(schedule, config)
    if optimizing.warmup < optimizing.asked_warmup:
        logging.warning(
            "warmup_steps=%d do not fit into num_steps=%d with the schedule %s: the run warms up "
            "over %d steps", optimizing.asked_warmup, config.num_steps, config.optimizer.schedule,
            optimizing.warmup,
        )  # fmt: skip
    shared = _Shared(
        mesh=mesh, shape=shape, tokenizer=tokenizer_of_run(config), optimizer=optimizer,
        numbers=_numbers(config, optimizing, schedule, promoter, mesh),
        master_weights=lookup("master weights", config.optimizer.master_weights, MASTER_WEIGHTS),
        detector=detector, promoter=promoter, scaling=scaling, initial_weights=weights,
        optional_state=_optional_state(detector, promoter, scaling, shape),
    )  # fmt: skip
    drafts = [_draft(config, shared, policy) for policy in precision.policies]
    layers = choose_layers(
        config.remat, config.unroll, [draft.sizes for draft in drafts], memory_limit(mesh)
    )
    config = _with_layers(config, layers.remat, layers.unroll)
    stages: list[Stage] = []
    for begins, draft in zip(precision.begins(config.num_steps), drafts, strict=True):
        before = stages[-1] if stages else None
        stages.append(_stage(config, shared, draft, layers, begins, before))
    settings = Settings.from_config(config, warmup_steps=optimizing.warmup)
    return Run(
        settings=settings, stages=tuple(stages), mesh=mesh, tokenizer=shared.tokenizer,
        batch_sharding=NamedSharding(mesh, spec("batch", "length")), ladder=ladder,
        scaling=scaling, optional_state=shared.optional_state,
        initial_weights=shared.initial_weights, layers=layers,
        with_layers=lambda remat, unroll: build(_with_layers(config, remat, unroll), devices),
    )  # fmt: skip


def _require_finite_rates(schedule: optax.Schedule, config: ConfigDict) -> None:
    """Raises ValueError for a learning rate that is not finite: it would ruin the weights."""
    last = config.num_steps - 1
    steps = np.linspace(0, last, min(last + 1, 2**20), dtype=np.int64)  # all of most runs
    rates = np.broadcast_to(jax.jit(jax.vmap(schedule))(steps.astype(np.int32)), steps.shape)
    if not np.isfinite(rates).all():
        bad = int(np.argmin(np.isfinite(rates)))
        raise ValueError(
            f"optimizer.schedule={config.optimizer.schedule}: the learning rate of step"
            f" {steps[bad] + 1} is {rates[bad]}"
        )


def _with_layers(config: ConfigDict, remat: str, unroll: int) -> ConfigDict:
    """Returns the config with these values, as the run records it."""
    said = config.copy_and_resolve_references()
    said.update(remat=remat, unroll=unroll)
    return said


def _numbers(
    config: ConfigDict,
    optimizing: OptimizerConfig,
    schedule: optax.Schedule,
    promoter: Promoter | None,
    mesh: Mesh,
) -> Callable[[TrainState], StepNumbers]:
    """The numbers of a step, from a program of their own: the schedule is compiled there alone."""

    def of_count(count: Array) -> StepNumbers:
        return StepNumbers(
            learning_rate=jnp.asarray(schedule(count), jnp.float32),
            clip_norm=jnp.asarray(optimizing.clip_norm, jnp.float32),
            promoter=None if promoter is None else promoter.numbers(config.num_steps),
        )

    program = jax.jit(of_count, out_shardings=NamedSharding(mesh, PartitionSpec()))
    return lambda state: program(schedule_steps(state.opt_state))


def _optional_state(
    detector: SpikeDetector | None,
    promoter: Promoter | None,
    scaling: LossScaling | None,
    shape: ModelConfig,
) -> tuple[OptionalState, ...]:
    def fresh_promoter() -> Any:
        if promoter is None:
            return {}
        linears = promoted_linears(promoter, shape)
        return promoter.init((shape.n_layers, len(linears)) if linears else (shape.n_layers,))

    return (
        OptionalState(field="histories", item="histories", key=histories_key, fresh=None),
        OptionalState(
            field="spikes",
            item="spikes",
            key=spikes_key,
            fresh=dict if detector is None else detector.init,
        ),
        OptionalState(
            field="promoter",
            item="gnmr",
            key=lambda config, step: config["gnmr"],  # it remembers what they gave
            fresh=fresh_promoter,
        ),
        OptionalState(
            field="loss_scale",
            item="loss_scale",
            key=loss_scale_key,
            fresh=dict if scaling is None else scaling.init,
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Draft:
    """A stage before it is known how its layers run, which does not change its state.

    Attributes:
      model: without remat and unroll.
      initial: makes the state of step 0, boxed.
      state: abstract arrays with shardings.
      sizes: what the memory of a step depends on.
    """

    model: Transformer
    initial: Callable[..., TrainState]
    state: TrainState
    sizes: Sizes


def _draft(config: ConfigDict, shared: _Shared, policy: Policy) -> _Draft:
    """The draft of the stage that trains in `policy`."""
    vocab_size = shared.tokenizer.vocab_size
    model = _model(config, shared.shape, policy, vocab_size, shared.mesh)
    initial = jax.jit(_initial_state(model, shared, config.seed))
    with jax.set_mesh(shared.mesh):  # as where its program is traced, which has this trace, too
        boxed = initial.eval_shape()
    state = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        linen.meta.unbox(boxed),
        tree_shardings(boxed, shared.mesh),
    )
    copies = config.optimizer.master_weights != "float32"
    sizes = sizes_of(
        model,
        shared.mesh,
        rows=check_batch(config.batch_size, config.grad_accum, shared.mesh),
        seq_len=config.seq_len,
        state=device_bytes(state),
        gradients=gradient_bytes(state.params),
        masters=gradient_bytes(state.params) if copies else 0,
        accumulates=config.grad_accum > 1,
        seeds=bool(jax.tree.leaves(state.histories)),
        promotes=shared.promoter is not None,
    )
    return _Draft(model=model, initial=initial, state=state, sizes=sizes)


def _stage(
    config: ConfigDict,
    shared: _Shared,
    draft: _Draft,
    layers: LayerChoice,
    begins: int,
    before: Stage | None,
) -> Stage:
    """The stage of a draft, after the stage `before`."""
    model, state = draft.model.clone(remat=layers.remat, unroll=layers.unroll), draft.state
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    carried: frozenset[str] = frozenset()
    if before is not None:
        carried = carried_histories(before.model, before.state, model, state)
    return Stage(
        begins=begins,
        model=model,
        state=state,
        carried=carried,
        promoter=shared.promoter,
        programs=_programs(config, shared, model, draft.initial, state, shardings),
    )


def _programs(
    config: ConfigDict,
    shared: _Shared,
    model: Transformer,
    initial: Callable[..., TrainState],
    state: TrainState,
    shardings: Any,
) -> Programs:
    def compiled(model: Transformer, kind: Callable[..., Any] = train_step):
        def step(state, batch, numbers):
            return kind(
                state,
                batch,
                numbers,
                model=model,
                optimizer=shared.optimizer,
                grad_accum=config.grad_accum,
                detector=shared.detector,
                promoter=shared.promoter if kind is train_step else None,
                scaling=shared.scaling,
                inject=inject_gradient,
            )

        return jax.jit(
            step,
            donate_argnums=0,
            out_shardings=(shardings, None),
            compiler_options=xla.compiler_options(layer_loop=model.has_layer_loop),
        )

    bytes_V = np.zeros(model.config.vocab_size, np.float32)
    bytes_V[: shared.tokenizer.vocab_size] = shared.tokenizer.token_bytes
    # It runs once: what counts is its compile time, which a loop over the layers shortens.
    seeding = model.clone(seeded=False, unroll=min(model.unroll, _SEEDING_UNROLL))
    repeating = model.clone(policy=config.recovery.precision)
    # They run seldom. A loop compiles fastest, and computes the same.
    measured, measured_seeding = model.clone(unroll=1), seeding.clone(unroll=1)
    return Programs(
        initialize=_initialize(shared, initial, state, shardings),
        numbers=shared.numbers,
        seed_step=compiled(seeding),
        step=compiled(model),
        repeat_step=compiled(repeating, repeat_step),
        eval_step=jax.jit(
            lambda s, b: eval_step(
                s, b, model=model, token_bytes_V=jnp.asarray(bytes_V), promoter=shared.promoter
            ),
            compiler_options=xla.compiler_options(layer_loop=model.has_layer_loop),
        ),
        telemetry=_telemetry(config, shared, measured),
        seed_telemetry=_telemetry(config, shared, measured_seeding),
        sample=None if config.sample.every is None else _sampler(config, shared, model),
    )


def _telemetry(
    config: ConfigDict, shared: _Shared, model: Transformer
) -> Callable[[TrainState, Batch], Any] | None:
    if config.telemetry.every is None:
        return None
    what_if = None if config.telemetry.what_if is None else as_policy(config.telemetry.what_if)
    if what_if is not None:
        what_if.check(model.config.modules, model.config.n_layers)

    def measured(state, batch):
        probes = model.telemetry_probes(what_if)
        return telemetry_step(
            state,
            batch,
            model=model,
            grad_accum=config.grad_accum,
            probes=probes,
            promoter=shared.promoter,
            scaling=shared.scaling,
        )

    return jax.jit(
        measured,
        out_shardings=NamedSharding(shared.mesh, PartitionSpec()),
        compiler_options=xla.compiler_options(),
    )


@dataclasses.dataclass(frozen=True)
class _FromWeights:
    """Makes the state of step 0 with given parameters, which are read when it is called."""

    program: Any  # jitted, parameters -> state
    weights: InitialWeights
    params: Any  # abstract

    def __call__(self) -> TrainState:
        return self.program(self.weights.read(self.params))

    def lower(self) -> Any:
        return self.program.lower(self.params)


def _initialize(
    shared: _Shared, initial: Callable[..., TrainState], state: TrainState, shardings: Any
) -> Any:
    """What makes the state of step 0 when it is called, and has `lower` as jitted functions do."""
    if shared.initial_weights is None:
        return jax.jit(lambda: linen.meta.unbox(initial()), out_shardings=shardings)
    program = jax.jit(
        lambda params: linen.meta.unbox(initial(params)), donate_argnums=0, out_shardings=shardings
    )
    return _FromWeights(program, shared.initial_weights, state.params)


def _initial_state(model: Transformer, shared: _Shared, seed: int) -> Callable[..., TrainState]:
    """A function that makes the state of step 0, boxed with logical axis names.

    It takes the parameters, not boxed, or nothing: then they are random.
    """

    def initial(given: Any = None) -> TrainState:
        key = jax.random.key(seed)  # outside it would be an array, for which a GPU takes seconds
        tokens = jnp.zeros((1, 1), jnp.int32)
        variables = model.init(jax.random.fold_in(key, 0), tokens, tokens, tokens, key)
        params = to_master(variables["params"], shared.master_weights)
        if given is not None:
            params = linen.meta.replace_boxed(params, given)
        histories = variables[HISTORIES] if HISTORIES in variables else {}
        fresh = {p.field: p.fresh() for p in shared.optional_state if p.fresh is not None}
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            histories=histories,
            opt_state=shared.optimizer.init(params),
            key=jax.random.fold_in(key, 1),
            **fresh,
        )

    return initial


def _model(
    config: ConfigDict, shape: ModelConfig, policy: Policy, vocab_size: int, mesh: Mesh
) -> Transformer:
    check_batch(config.batch_size, config.grad_accum, mesh)
    shape.check_mesh(mesh.shape["tensor"])
    shape.check_length(config.seq_len)
    if config.remat is not None:
        lookup("remat policy", config.remat, REMAT)
    if config.unroll is not None and config.unroll > shape.n_layers:
        raise ValueError(f"unroll={config.unroll} is more than the model's {shape.n_layers} layers")
    if shape.vocab_size < vocab_size:
        raise ValueError(
            f"vocab_size={shape.vocab_size} is less than the tokenizer's {vocab_size}: set"
            f" config.model_overrides.vocab_size={vocab_size}"
        )
    queries = (config.batch_size, config.seq_len, shape.n_heads, shape.head_dim)
    attention = choose_attention(
        config.attention,
        jax.ShapeDtypeStruct(queries, Transformer.dtype),
        beta=config.attention_beta,
        tolerance=config.attention_tie_tolerance,
    )
    return Transformer(shape, policy, config.backend, attention)


def _recovery(config: ConfigDict) -> tuple[Ladder, SpikeDetector | None]:
    """What is tried on a rejected step, and the detector of loss spikes, None without one."""
    _refuse_delayed(config, "recovery", "a repeated step")
    ladder = Ladder.parse(config.recovery.ladder)
    if config.recovery.spike_window is None:
        return ladder, None
    window, deviations = config.recovery.spike_window, config.recovery.spike_deviations
    return ladder, SpikeDetector(window=window, deviations=deviations)


def _promoter(config: ConfigDict, precision: PrecisionSchedule) -> Promoter | None:
    """What chooses the layers that run in `gnmr.precision`; None without one."""
    _refuse_delayed(config, "gnmr", "a promoted layer")
    promoter = Gnmr.from_config(config.gnmr)
    casts = any(recipe.casts for policy in precision.policies for _, recipe in policy.rules)
    if promoter is not None and not casts:
        raise ValueError(
            f"gnmr.alpha={config.gnmr.alpha} promotes layers of a policy with casts, and"
            f" precision={config.precision} has none: set gnmr.alpha=()"
        )
    return promoter


def _refuse_delayed(config: ConfigDict, group: str, what: str) -> None:
    """Raises ValueError if the policy `precision` of a group of the config has delayed scaling."""
    precision = config[group].precision
    if as_policy(precision).delayed:
        raise ValueError(
            f"{group}.precision={precision!r} uses delayed scaling, and {what} has no amax"
            " histories: take bf16 or a policy with current scaling"
        )


def _loss_scaling(config: ConfigDict, precision: PrecisionSchedule) -> LossScaling | None:
    """What the loss is multiplied by; None for 1."""
    scaling = LossScaling.parse(config.optimizer.loss_scale, config.optimizer.loss_scale_window)
    delayed = [policy.name for policy in precision.policies if policy.delayed]
    if scaling is not None and scaling.static is None and delayed:
        raise ValueError(
            f"optimizer.loss_scale=dynamic changes the size of all gradients at once, and the amax"
            f" histories of {delayed[0]} would clip them for a step: take a power of two, or a"
            " policy with current scaling"
        )
    others = (as_policy(config.gnmr.precision), as_policy(config.recovery.precision))
    constant = [each.name for each in (*precision.policies, *others) if each.constant_gradients]
    if scaling is None and constant:
        logging.warning(
            "%s has a constant scale for gradients. Those of a mean over %d tokens may be too small"
            " for it. A power of two as optimizer.loss_scale, or option margin=-12, may make up for"
            " that (docs/results/cscale_bias.md)",
            constant[0],
            config.batch_size * config.seq_len,
        )
    return scaling


def _sampler(
    config: ConfigDict, shared: _Shared, model: Transformer
) -> Callable[[TrainState], Array]:
    """A jitted function from a state to the tokens of a generated text, prompt included.

    Places behind its end hold `NO_TOKEN`.
    """
    tokens = shared.tokenizer
    prompt = np.append(tokens.bos, tokens.encode(config.sample.prompt)).astype(np.int32)
    if len(prompt) + config.sample.tokens > config.seq_len:
        raise ValueError(
            f"a sample of {len(prompt)} tokens of prompt and sample.tokens={config.sample.tokens} "
            f"is longer than seq_len={config.seq_len}"
        )

    # Not the attention of training: cuDNN's refuses rows of an odd length, for example.
    model = model.clone(attention=None)

    def sample(state: TrainState) -> Array:
        variables = as_variables(state.params, state.histories)
        requests = Requests(
            keys_B=jax.random.fold_in(state.key, state.step)[None],
            limits_B=jnp.array([config.sample.tokens]),
            stops=jnp.array([tokens.eos]),
            rule=Sampling(temperature=config.sample.temperature).rule(),
            vocab_size=tokens.vocab_size,
        )
        new_1T = complete(
            model,
            variables,
            jnp.asarray(prompt)[None],
            jnp.array([len(prompt)]),
            requests,
            tokens=config.sample.tokens,
        )
        return jnp.concatenate([jnp.asarray(prompt), new_1T[0]])

    everywhere = NamedSharding(shared.mesh, PartitionSpec())
    return jax.jit(sample, out_shardings=everywhere, compiler_options=xla.compiler_options())
