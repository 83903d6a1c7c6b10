"""Benchmarks of training steps, beside BF16, the device's measured limits, and torch.

    measure_step        layers of a model, forward and backward, without an optimizer
    measure_training    whole steps of a config, with the program that training runs

Both run what training runs: `accumulate` of training/step.py on our own Transformer, which
quantizes float32 weights in every step, and `build` of training/build.py. A delayed policy starts
from the amax histories that its seeding step leaves: with empty histories, gradients would be
flushed to zeros, which draw less power. The limit of a row is the time of the step's matmuls at the
measured rate of their precision, plus the measured time of attention.

The figures of `measure_step` are for the shape d4096 unless their name has another shape:

    step_speedup/POLICY    speed of a step over bf16's
    step_memory/POLICY     temporaries of a step over bf16's, with the same rematerialization
    bf16_vs_torch          speed of our bf16 step over that of torch.compile

The figures of `measure_training`. With --figure=NAME, the first two have the names NAME_time and
NAME_memory for the first policy besides bf16:

    train_time/MODEL/POLICY      time of a training step over bf16's
    train_memory/MODEL/POLICY    all memory that XLA allocates for the step, over bf16's
    train_vs_bench               speed of the training step over that of its parts, the benchmark's
                                 step followed by the optimizer; the lowest of all policies
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from experiments.bench import torch_peers
from experiments.bench.operators import (
    Limits,
    attend,
    compiled,
    default_attention,
    documents,
    normal,
    policy_and_backend,
    sizes,
)
from experiments.bench.report import Report, Row
from experiments.bench.timing import Program, Timer, Timing
from fp8jax.data.loader import Batch, to_devices
from fp8jax.device import xla
from fp8jax.linear.amax_history import HISTORIES
from fp8jax.model.config import ModelConfig, flops_per_token
from fp8jax.model.transformer import Transformer, abstract_variables
from fp8jax.numerics.names import as_policy
from fp8jax.optim.config import OptimizerConfig
from fp8jax.optim.optimizers import make_optimizer
from fp8jax.stability.bad_steps import is_finite, select_if
from fp8jax.training.build import build
from fp8jax.training.policy_switch import enter_policy
from fp8jax.training.run import Run
from fp8jax.training.step import TrainState, accumulate


def _layers(d_model: int, n_layers: int, heads: int, kv: int, d_ff: int, size: int = 128):
    return ModelConfig(
        vocab_size=256, d_model=d_model, n_layers=n_layers, n_heads=heads, n_kv_heads=kv,
        d_ff=d_ff, head_dim=size,
    )  # fmt: skip


# name -> (model, rows, length of a row), with layers of Llama-3-8B, Qwen2.5-1.5B, a Llama of 1B and
# Llama-2-70B. The vocabulary is small, so that almost all time is spent in the layers.
STEPS = {
    "d4096": (_layers(4096, 4, 32, 8, 14_336), 4, 4096),
    "d1536": (_layers(1536, 8, 12, 2, 8960), 2, 8192),
    "d2048": (_layers(2048, 8, 16, 8, 8192), 8, 2048),
    "d8192": (_layers(8192, 2, 64, 8, 28_672), 4, 4096),
    "tiny": (_layers(128, 1, 4, 2, 256, 32), 2, 64),
}


def step_shape(name: str) -> tuple[ModelConfig, int, int]:
    """Returns (model, rows, length) of a shape: a key of `STEPS`, or KEY_ROWSxLENGTH.

    Raises:
      ValueError: an unknown key, or a wrong size.
    """
    key, _, size = name.partition("_")
    if key not in STEPS:
        raise ValueError(
            f"unknown shape {name!r}: use one of {', '.join(STEPS)}, or KEY_ROWSxLENGTH"
        )
    model, rows, length = STEPS[key]
    if size:
        rows, length = sizes(size, "ROWSxLENGTH")
    return model, rows, length


def _random_batch(
    dims: ModelConfig, rows: int, length: int, count: int = 1
) -> dict[str, np.ndarray]:
    """Returns rows of random tokens, in `count` documents of random lengths each."""
    tokens = np.random.default_rng(0).integers(dims.vocab_size, size=(2, rows, length))
    segments, places = np.asarray(documents(rows, length, count)), np.arange(length)
    begins = np.diff(segments, axis=1, prepend=0) > 0
    return {
        "tokens": tokens[0].astype(np.int32), "targets": tokens[1].astype(np.int32),
        "segments": segments,
        "positions": (places - np.maximum.accumulate(begins * places, axis=1)).astype(np.int32),
        "weights": np.ones((rows, length), np.float32),
    }  # fmt: skip


def _init_params(dims: ModelConfig) -> Any:
    ids, key = jnp.zeros((1, 1), jnp.int32), jax.random.key(0)
    init = lambda: Transformer(dims).init(key, ids, ids, ids, key)["params"]  # noqa: E731
    return linen.meta.unbox(jax.jit(init)())


def _seeded(model: Transformer, params: Any, batch: Batch) -> TrainState:
    """Returns the state after the seeding step. Its layers are not unrolled: it compiles faster."""
    shapes = abstract_variables(model)
    histories = shapes[HISTORIES] if HISTORIES in shapes else {}
    histories = jax.tree.map(lambda h: jnp.zeros(h.shape, h.dtype), linen.meta.unbox(histories))
    state = TrainState(
        step=jnp.int32(0), params=params, histories=histories, opt_state=(), key=jax.random.key(1)
    )
    if histories:
        seeding = model.clone(policy=as_policy(model.policy).seeding(), unroll=1)
        program = jax.jit(
            lambda state, batch: accumulate(seeding, state, batch, 1)[2],
            compiler_options=xla.compiler_options(),
        )
        state = dataclasses.replace(state, histories=program(state, batch))
    return state


def _step(model: Transformer, params: Any, batch: Batch) -> Callable[[], Program]:
    """Returns a function that prepares a training step without its optimizer."""

    def prepare() -> Program:
        state = _seeded(model, params, batch)
        return compiled(lambda s, b: accumulate(model, s, b, 1), state, batch)()

    return prepare


def step_floor(
    dims: ModelConfig, rows: int, length: int, attention: str, timed: Timer, limits: Limits,
    count: int = 1,
) -> dict[bool, dict[str, float]]:  # fmt: skip
    """Returns the least seconds of a step's matmuls and attention, by whether it quantizes.

    Rows hold `count` documents; the matmuls are those of one.
    """
    shape = (rows, length, dims.n_heads, dims.n_kv_heads, dims.head_dim, count)
    core = timed({attention: attend(attention, *shape)})[attention].seconds
    flops = flops_per_token(dims, length) * rows * length
    flops -= 6 * dims.n_layers * rows * length * length * dims.n_heads * dims.head_dim
    return {
        q: {"matmuls": flops / limits.matrix(q), "attention": dims.n_layers * core}
        for q in (False, True)
    }


def _quantizes(policy: str) -> bool:
    return any(recipe.casts for _, recipe in as_policy(policy_and_backend(policy)[0]).rules)


def measure_step(
    shapes: Sequence[str],
    policies: Sequence[str],
    timed: Timer,
    limits: Limits,
    *,
    attention: str,
    remat: str = "none",
    peers: bool,
) -> Report:
    """Measures forward and backward of a few unrolled layers under each policy.

    Args:
      shapes: as for `step_shape`.
      policies: POLICY or POLICY@BACKEND.
      timed: times contestants.
      limits: the device's.
      attention, remat: as for `Transformer`.
      peers: whether torch's contestants take part; only without rematerialization.

    Returns:
      The report. The memory of a row is that of its temporaries.
    """
    rows: list[Row] = []
    figures: dict[str, float] = {}
    quantized = {policy for policy in policies if _quantizes(policy)}
    quantized |= {f"torchao {recipe}" for recipe in torch_peers.TORCHAO}
    for shape in shapes:
        dims, size, length = step_shape(shape)
        floor = step_floor(dims, size, length, attention, timed, limits)
        contestants = _step_contestants(shape, policies, attention, remat)
        if peers and remat == "none":
            contestants |= torch_peers.steps(dims, size, length)
        found = timed(contestants)
        del contestants  # the parameters go before the next shape's are initialized
        flops = flops_per_token(dims, length) * size * length
        rows += [
            Row(case=shape, name=name, timing=timing, work=flops,
                limit=sum(floor[name in quantized].values()), parts=floor[name in quantized],
                baseline=found["bf16"].seconds if "bf16" in found else math.nan)
            for name, timing in found.items()
        ]  # fmt: skip
        suffix = "" if shape == "d4096" else f"_{shape}"
        suffix += "" if remat == "none" else f"_{remat}"
        figures |= _step_figures(suffix, policies, found)
    notes = [limits.note(), f"Attention {attention}, rematerialization {remat}; GiB: temporaries."]
    return Report(
        title="Steps without an optimizer", rate="TFLOP/s", rows=rows, figures=figures, notes=notes,
        limits=limits.by_name(),
    )  # fmt: skip


def _step_contestants(
    shape: str, policies: Sequence[str], attention: str, remat: str
) -> dict[str, Callable[[], Program]]:
    """Returns the step under each policy; all have the same parameters and batch."""
    dims, size, length = step_shape(shape)
    params = _init_params(dims)
    batch = jax.tree.map(jnp.asarray, _random_batch(dims, size, length))
    contestants = {}
    for policy in policies:
        name, backend = policy_and_backend(policy)
        model = Transformer(dims, name, backend, attention, remat, dims.n_layers)
        contestants[policy] = _step(model, params, batch)
    return contestants


def _step_figures(
    suffix: str, policies: Sequence[str], found: Mapping[str, Timing]
) -> dict[str, float]:
    """Returns the figures of one shape; none without bf16."""
    if "bf16" not in found:
        return {}
    figures = {}
    base = found["bf16"]
    if (torch := "torch.compile bf16") in found:
        figures[f"bf16_vs_torch{suffix}"] = found[torch].seconds / base.seconds
    for policy in policies:
        if policy != "bf16":
            figures[f"step_speedup{suffix}/{policy}"] = base.seconds / found[policy].seconds
            figures[f"step_memory{suffix}/{policy}"] = _ratio(found[policy].bytes, base.bytes)
    return figures


# Whole training steps -----------------------------------------------------------------------------


class _Training:
    """The runs of a config under several policies, which share one state.

    The state holds parameters and moments. Every call consumes it, as donated buffers, and returns
    the next one. Each policy has its own amax histories.
    """

    def __init__(self, config: ConfigDict, policies: Sequence[str], devices: int, count: int):
        """`devices` of this process train, as the config's mesh says, on `count` documents a row.

        Raises ValueError if there are not so many devices.
        """
        given = jax.local_devices()
        if devices > len(given):
            raise ValueError(f"--devices={devices}: this process has {len(given)}")
        self.config, self.runs = config, {}
        for policy in policies:
            one = config.copy_and_resolve_references()
            (one.precision, one.backend), one.precision_schedule = policy_and_backend(policy), ()
            self.runs[policy] = build(one, given[:devices])
        self.first: Run = next(iter(self.runs.values()))
        self.model = self.first.stages[0].model.config
        self.batch = _random_batch(self.model, config.batch_size, config.seq_len, count)
        self._state: TrainState | None = None
        self._histories: dict[str, Any] = {}
        self._seeded: set[str] = set()

    def state(self, policy: str) -> TrainState:
        """Returns the state with the policy's histories, for a call that it is donated to.

        The shared part is initialized again if a failed call has lost it.
        """
        if policy not in self._histories:
            raise RuntimeError("a call that failed has lost the histories of this policy")
        state, self._state = self._state, None
        if state is None:
            state = self.first.stages[0].programs.initialize()
        return dataclasses.replace(state, histories=self._histories.pop(policy))

    def keep(self, policy: str, state: TrainState) -> None:
        """Stores the state that a call has returned."""
        self._histories[policy] = state.histories
        self._state = dataclasses.replace(state, histories={})

    def prepare(self, policy: str, inner: Callable[["_Training", str], Program]) -> Program:
        """Returns the program of `inner`, prepared and called on the run's mesh, after seeding."""
        run = self.runs[policy]
        with jax.set_mesh(run.mesh):
            if policy not in self._seeded:
                self._seeded.add(policy)
                self._histories[policy] = {}
                (stage,) = run.stages
                state = enter_policy(self.state(policy), stage.state, frozenset())
                if stage.seeds:
                    batch = to_devices(self.batch, run.batch_sharding)
                    state, _ = stage.programs.seed_step(state, batch)
                self.keep(policy, state)
            program = inner(self, policy)

        def call() -> Any:
            with jax.set_mesh(run.mesh):
                return program.call()

        return dataclasses.replace(program, call=call)


def _train(training: _Training, policy: str) -> Program:
    """Prepares what training/loop.py does in a step.

    It copies the rows to the device, dispatches the step, and reads the metrics of the step before.
    """
    run = training.runs[policy]
    batch = to_devices(training.batch, run.batch_sharding)
    (stage,) = run.stages
    # `Programs` types the step as a plain function, but it is a jitted one, which can be lowered.
    lowered = stage.programs.step.lower(stage.state, batch)  # type: ignore[attr-defined]
    size = xla.program_bytes(lowered.compile())
    last: list[Any] = []

    def call() -> Any:
        rows = to_devices(training.batch, run.batch_sharding)
        state, metrics = stage.programs.step(training.state(policy), rows)
        training.keep(policy, state)
        jax.device_get(last)
        last[:] = [metrics]
        return metrics

    return Program(call=call, bytes=size)


def _without_optimizer(training: _Training, policy: str) -> Program:
    """Prepares the step that `measure_step` times, with the config's model and the shared state."""
    run = training.runs[policy]
    batch, model = to_devices(training.batch, run.batch_sharding), run.stages[0].model
    program = jax.jit(
        lambda state, batch: accumulate(model, state, batch, training.config.grad_accum),
        compiler_options=xla.compiler_options(),
    )

    def call() -> Any:
        state = training.state(policy)
        training.keep(policy, state)
        return program(state, batch)

    return Program(call=call)


def _optimizer(training: _Training, policy: str) -> Program:
    """Prepares everything that a step does after it has computed the gradients."""
    optimizer, _ = make_optimizer(OptimizerConfig.from_config(training.config))

    def update(state: TrainState, grads: Any) -> TrainState:
        norm = optax.tree.norm(grads)
        updates, moments = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        new = dataclasses.replace(state, step=state.step + 1, params=params, opt_state=moments)
        return select_if(is_finite(norm, norm), new, state)

    program = jax.jit(update, donate_argnums=0, compiler_options=xla.compiler_options())
    params = training.first.stages[0].state.params
    random = lambda: jax.tree.map(lambda leaf: normal(0, leaf.shape, jnp.float32), params)  # noqa: E731
    grads = jax.jit(random, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, params))()

    def call() -> Any:
        state = program(training.state(policy), grads)
        training.keep(policy, state)
        return state.step

    return Program(call=call)


def measure_training(
    config: ConfigDict,
    policies: Sequence[str],
    timed: Timer,
    limits: Limits,
    *,
    figure: str = "",
    devices: int = 1,
    count: int = 1,
) -> Report:
    """Measures whole training steps of a config on random tokens.

    The benchmark's own step and the optimizer alone are measured, too, for comparison.

    Args:
      config: its precision and backend are replaced.
      policies: POLICY or POLICY@BACKEND.
      timed: times contestants.
      limits: the device's.
      figure: names the figures of the first policy besides bf16, unless it is empty.
      devices: how many of this process train, as the config's mesh says.
      count: documents in a row, of random lengths.

    Returns:
      The report. FLOPs, limits and the memory of a row are those of each device; the memory is all
      that XLA allocates for the training step.

    Raises:
      ValueError: this process has fewer devices, or they do not divide the rows.
    """
    training = _Training(config, policies, devices, count)
    contestants = {}
    for policy in policies:
        contestants[policy] = functools.partial(training.prepare, policy, _train)
        contestants[f"{policy}, no optimizer"] = functools.partial(
            training.prepare, policy, _without_optimizer
        )
    contestants["optimizer"] = functools.partial(training.prepare, policies[0], _optimizer)
    found = timed(contestants)
    case = f"{config.model} {config.batch_size}x{config.seq_len}"
    case += f", {count} documents a row" if count > 1 else ""
    case += f", {devices} devices" if devices > 1 else ""
    micro = config.batch_size // config.grad_accum
    attention = config.attention or default_attention()
    floor = step_floor(training.model, micro, config.seq_len, attention, timed, limits, count)
    limit = {
        policy: {k: config.grad_accum * v / devices for k, v in floor[_quantizes(policy)].items()}
        for policy in policies
    }
    tokens = config.batch_size * config.seq_len
    flops = flops_per_token(training.model, config.seq_len) * tokens / devices
    rows = _training_rows(case, found, limit, tokens, flops)
    notes = [limits.note(), "GiB: arguments, temporaries and results of the training step."]
    return Report(
        title=f"Training steps of {case}", rate="TFLOP/s", rows=rows,
        figures=_training_figures(config, policies, found, figure), notes=notes,
        limits=limits.by_name(),
    )  # fmt: skip


def _training_rows(
    case: str,
    found: Mapping[str, Timing],
    limit: Mapping[str, Mapping[str, float]],
    tokens: int,
    flops: float,
) -> list[Row]:
    """Returns the rows of training steps, with and without optimizer, and of the optimizer.

    Args:
      found: the times of all contestants.
      limit: the parts of the limit of each policy, in seconds.
      tokens, flops: of a step; the FLOPs are those of one device.
    """
    rows = []
    for policy, parts in limit.items():
        for part in ("", ", no optimizer"):
            name, base = f"{policy}{part}", f"bf16{part}"
            timing, rated = found[name], not part and found[name].seconds > 0
            rows.append(
                Row(case=case, name=name, timing=timing, work=flops,
                    limit=sum(parts.values()), parts=parts,
                    baseline=found[base].seconds if base in found else math.nan,
                    note=f"{tokens / timing.seconds:,.0f} tokens/s" if rated else "")
            )  # fmt: skip
    return [*rows, Row(case=case, name="optimizer", timing=found["optimizer"])]


def _training_figures(
    config: ConfigDict, policies: Sequence[str], found: Mapping[str, Timing], figure: str = ""
) -> dict[str, float]:
    """Returns the figures of training steps: against those in bf16, and against their parts."""
    speeds = []
    for policy in policies:
        parts = found[f"{policy}, no optimizer"].seconds + found["optimizer"].seconds
        speeds.append(parts / found[policy].seconds)
    figures = {"train_vs_bench": min((s for s in speeds if s > 0), default=math.nan)}
    if "bf16" not in policies:
        return figures
    base = found["bf16"]
    others = [policy for policy in policies if policy != "bf16"]
    for policy in others:
        place = f"/{config.model}/{policy}"
        time, memory = f"train_time{place}", f"train_memory{place}"
        if figure and policy == others[0]:
            time, memory = f"{figure}_time", f"{figure}_memory"
        figures[time] = found[policy].seconds / base.seconds
        figures[memory] = _ratio(found[policy].bytes, base.bytes)
    return figures


def _ratio(size: int | None, baseline: int | None) -> float:
    """Returns size / baseline in bytes; NaN if one is unknown, or the baseline is zero."""
    return math.nan if size is None or not baseline else size / baseline
