"""Measured tables of training steps, beside BF16, the device's limits, and torch
(experiments/bench/operators.py).

    measure_step        layers of a model, forward and backward, without an optimizer
    measure_training    whole steps of a config, by the program that training runs

Both run what training runs: `step.accumulate` of our own Transformer, weights quantized from
float32 inside of the step, and `run.build`. A delayed policy has the histories that its seeding
step leaves: under others, gradients would be flushed to zeros, which draw less power. The limit of
a row is the time of its matrix products at the measured rate of their precision, plus attention's
own time. The figures, d4096 unless a shape is named:

    step_speedup/POLICY    speed of a step over bf16's
    step_memory/POLICY     its temporaries over bf16's, with the same rematerialization
    bf16_vs_torch          speed of our bf16 step over torch.compile's
    infir2_time            time of a training step in fp8_block over bf16's, Qwen2.5-1.5B, 2 x 8192
    infir2_memory          all that XLA allocates for it, over bf16's
    train_vs_bench         speed of training's own step over that of the benchmark's step followed
                           by the optimizer, the lowest of the policies
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
from experiments.bench.operators import Limits, attend, compiled, normal, policy_and_backend, sizes
from experiments.bench.report import Report, Row
from experiments.bench.timing import Program, Timer, Timing
from fp8jax.data.loader import Batch, to_devices
from fp8jax.device import xla
from fp8jax.linear.amax_history import HISTORIES
from fp8jax.model.config import ModelConfig, flops_per_token
from fp8jax.model.transformer import Transformer, abstract_variables
from fp8jax.numerics.policy_options import as_policy
from fp8jax.optim.config import OptimizerConfig
from fp8jax.optim.optimizers import make_optimizer
from fp8jax.stability.bad_steps import is_finite, select_if
from fp8jax.training.build import build
from fp8jax.training.policy_switch import enter_policy
from fp8jax.training.programs import program_bytes
from fp8jax.training.run import Run
from fp8jax.training.step import TrainState, accumulate


def _layers(d_model: int, n_layers: int, heads: int, kv: int, d_ff: int, size: int = 128):
    return ModelConfig(
        vocab_size=256, d_model=d_model, n_layers=n_layers, n_heads=heads, n_kv_heads=kv,
        d_ff=d_ff, head_dim=size,
    )  # fmt: skip


# Layers of Llama-3-8B, Qwen2.5-1.5B, a Llama of 1B and Llama-2-70B, with rows and their length. The
# vocabulary is small, so that only layers count.
STEPS = {
    "d4096": (_layers(4096, 4, 32, 8, 14_336), 4, 4096),
    "d1536": (_layers(1536, 8, 12, 2, 8960), 2, 8192),
    "d2048": (_layers(2048, 8, 16, 8, 8192), 8, 2048),
    "d8192": (_layers(8192, 2, 64, 8, 28_672), 4, 4096),
    "tiny": (_layers(128, 1, 4, 2, 256, 32), 2, 64),
}


def step_shape(name: str) -> tuple[ModelConfig, int, int]:
    """(model, rows, length) of a key of `STEPS`, or of such a name as d4096_16x1024."""
    key, _, size = name.partition("_")
    if key not in STEPS:
        raise ValueError(f"unknown shape {name!r}: one of {', '.join(STEPS)}, or with _ROWSxLENGTH")
    model, rows, length = STEPS[key]
    if size:
        rows, length = sizes(size, "ROWSxLENGTH")
    return model, rows, length


def _random_batch(dims: ModelConfig, rows: int, length: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(dims.vocab_size, size=(2, rows, length))
    return {
        "tokens": tokens[0].astype(np.int32), "targets": tokens[1].astype(np.int32),
        "segments": np.ones((rows, length), np.int32),
        "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        "weights": np.ones((rows, length), np.float32),
    }  # fmt: skip


def _init_params(dims: ModelConfig) -> Any:
    ids, key = jnp.zeros((1, 1), jnp.int32), jax.random.key(0)
    init = lambda: Transformer(dims).init(key, ids, ids, ids, key)["params"]  # noqa: E731
    return linen.meta.unbox(jax.jit(init)())


def _seeded(model: Transformer, params: Any, batch: Batch) -> TrainState:
    """The state after the seeding step, whose program is a loop: it compiles faster."""
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
    """Loss, gradients and histories: a training step without its optimizer."""

    def prepare() -> Program:
        state = _seeded(model, params, batch)
        return compiled(lambda s, b: accumulate(model, s, b, 1), state, batch)()

    return prepare


def step_floor(
    dims: ModelConfig, rows: int, length: int, attention: str, timed: Timer, limits: Limits
) -> dict[bool, float]:
    """quantized or not -> seconds of a step's matrix products and attention, and nothing else."""
    shape = (rows, length, dims.n_heads, dims.n_kv_heads, dims.head_dim)
    core = timed({attention: attend(attention, *shape)})[attention].seconds
    flops = flops_per_token(dims, length) * rows * length
    flops -= 6 * dims.n_layers * rows * length * length * dims.n_heads * dims.head_dim
    return {q: flops / limits.matrix(q) + dims.n_layers * core for q in (False, True)}


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
    """Forward and backward of a few layers under policies (POLICY or POLICY@BACKEND), the layers
    unrolled. The memory of a row is its temporaries."""
    rows: list[Row] = []
    figures: dict[str, float] = {}
    quantized = {policy for policy in policies if _quantizes(policy)}
    quantized |= {f"torchao {recipe}" for recipe in torch_peers.TORCHAO}
    for dims, size, length, shape in [(*step_shape(shape), shape) for shape in shapes]:
        floor = step_floor(dims, size, length, attention, timed, limits)
        params = _init_params(dims)
        batch = jax.tree.map(jnp.asarray, _random_batch(dims, size, length))
        entrants: dict[str, Callable[[], Program]] = {}
        for policy in policies:
            name, backend = policy_and_backend(policy)
            model = Transformer(dims, name, backend, attention, remat, dims.n_layers)
            entrants[policy] = _step(model, params, batch)
        if peers and remat == "none":
            entrants |= torch_peers.steps(dims, size, length)
        found = timed(entrants)
        del entrants, params
        flops = flops_per_token(dims, length) * size * length
        rows += [
            Row(case=shape, name=name, timing=timing, work=flops, limit=floor[name in quantized],
                baseline=found["bf16"].seconds if "bf16" in found else math.nan)
            for name, timing in found.items()
        ]  # fmt: skip
        suffix = ("" if shape == "d4096" else f"_{shape}") + (
            "" if remat == "none" else f"_{remat}"
        )
        if "bf16" not in found:
            continue
        base = found["bf16"]
        if (torch := "torch.compile bf16") in found:
            figures[f"bf16_vs_torch{suffix}"] = found[torch].seconds / base.seconds
        for policy in set(policies) - {"bf16"}:
            figures[f"step_speedup{suffix}/{policy}"] = base.seconds / found[policy].seconds
            figures[f"step_memory{suffix}/{policy}"] = _over(found[policy].bytes, base.bytes)
    notes = [limits.note(), f"Attention {attention}, rematerialization {remat}; GiB: temporaries."]
    return Report(
        title="Steps without an optimizer", rate="TFLOP/s", rows=rows, figures=figures, notes=notes
    )


# Whole training steps -----------------------------------------------------------------------------


class _Training:
    """The programs of a config, and one state for all of them: parameters and moments, which every
    call gives away and gets back. Each policy keeps histories of its own."""

    def __init__(self, config: ConfigDict, policies: Sequence[str]):
        self.config, self.runs = config, {}
        for policy in policies:
            one = config.copy_and_resolve_references()
            (one.precision, one.backend), one.precision_schedule = policy_and_backend(policy), ()
            self.runs[policy] = build(one, jax.local_devices()[:1])
        self.first: Run = next(iter(self.runs.values()))
        self.model = self.first.model.config
        self.batch = _random_batch(self.model, config.batch_size, config.seq_len)
        self._state: TrainState | None = None
        self._histories: dict[str, Any] = {}
        self._seeded: set[str] = set()

    def state(self, policy: str) -> TrainState:
        """For a call that takes it away; made anew where a call that failed has lost it."""
        if policy not in self._histories:
            raise RuntimeError("its histories went with a call that failed")
        state, self._state = self._state, None
        if state is None:
            state = self.first.initialize()
        return dataclasses.replace(state, histories=self._histories.pop(policy))

    def keep(self, policy: str, state: TrainState) -> None:
        self._histories[policy] = state.histories
        self._state = dataclasses.replace(state, histories={})

    def prepare(self, policy: str, inner: Callable[["_Training", str], Program]) -> Program:
        """`inner`, on the run's mesh, with seeded histories; its calls run on that mesh too."""
        run = self.runs[policy]
        with jax.set_mesh(run.mesh):
            if policy not in self._seeded:
                self._seeded.add(policy)
                self._histories[policy] = {}
                state = enter_policy(self.state(policy), run.state, frozenset())
                if run.seeds:
                    state, _ = run.seed_step(state, to_devices(self.batch, run.batch_sharding))
                self.keep(policy, state)
            program = inner(self, policy)

        def call() -> Any:
            with jax.set_mesh(run.mesh):
                return program.call()

        return dataclasses.replace(program, call=call)


def _train(training: _Training, policy: str) -> Program:
    """What the loop of training/loop.py does a step: rows to the device, the step, the last
    metrics."""
    run = training.runs[policy]
    batch = to_devices(training.batch, run.batch_sharding)
    # `Run` types its step as a plain function; it is a jitted one, which can be lowered.
    size = program_bytes(run.step.lower(run.state, batch).compile())  # type: ignore[attr-defined]
    last: list[Any] = []

    def call() -> Any:
        rows = to_devices(training.batch, run.batch_sharding)
        state, metrics = run.step(training.state(policy), rows)
        training.keep(policy, state)
        jax.device_get(last)
        last[:] = [metrics]
        return metrics

    return Program(call=call, bytes=size)


def _without_optimizer(training: _Training, policy: str) -> Program:
    """The step that `measure_step` times, on the config's model, from the same state."""
    run = training.runs[policy]
    batch = to_devices(training.batch, run.batch_sharding)
    program = jax.jit(
        lambda state, batch: accumulate(run.model, state, batch, training.config.grad_accum),
        compiler_options=xla.compiler_options(),
    )

    def call() -> Any:
        state = training.state(policy)
        training.keep(policy, state)
        return program(state, batch)

    return Program(call=call)


def _optimizer(training: _Training, policy: str) -> Program:
    """All that a step does after its gradients."""
    config = training.config
    fields = {f.name for f in dataclasses.fields(OptimizerConfig)} - {"name"}
    optimizer, _ = make_optimizer(
        OptimizerConfig(name=config.optimizer, **{name: config[name] for name in fields})
    )

    def update(state: TrainState, grads: Any) -> TrainState:
        norm = optax.tree.norm(grads)
        updates, moments = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        new = dataclasses.replace(state, step=state.step + 1, params=params, opt_state=moments)
        return select_if(is_finite(norm, norm), new, state)

    program = jax.jit(update, donate_argnums=0, compiler_options=xla.compiler_options())
    params = training.first.state.params
    random = lambda: jax.tree.map(lambda leaf: normal(0, leaf.shape, leaf.dtype), params)  # noqa: E731
    grads = jax.jit(random)()

    def call() -> Any:
        state = program(training.state(policy), grads)
        training.keep(policy, state)
        return state.step

    return Program(call=call)


def measure_training(
    config: ConfigDict, policies: Sequence[str], timed: Timer, limits: Limits
) -> Report:
    """Whole steps of a config on one device and random tokens, by `run.build`; and, to compare,
    the benchmark's step and the optimizer alone. The memory of a row is all that XLA allocates."""
    quantized = {policy for policy in policies if _quantizes(policy)}
    training = _Training(config, policies)
    model, attention = training.model, config.attention or "xla"
    case = f"{config.model} {config.batch_size}x{config.seq_len}"
    parts = {"": _train, ", no optimizer": _without_optimizer}
    entrants = {
        f"{policy}{part}": functools.partial(training.prepare, policy, inner)
        for policy in policies
        for part, inner in parts.items()
    }
    entrants["optimizer"] = functools.partial(training.prepare, policies[0], _optimizer)
    found = timed(entrants)
    micro = config.batch_size // config.grad_accum
    floor = step_floor(model, micro, config.seq_len, attention, timed, limits)
    flops = flops_per_token(model, config.seq_len) * config.batch_size * config.seq_len
    rows = []
    for name, timing in found.items():
        policy, _, part = name.partition(", ")
        known = name != "optimizer"
        base = f"bf16, {part}" if part else "bf16"
        rows.append(
            Row(case=case, name=name, timing=timing, work=flops if known else math.nan,
                limit=config.grad_accum * floor[policy in quantized] if known else math.nan,
                baseline=found[base].seconds if known and base in found else math.nan)
        )  # fmt: skip
    notes = [limits.note(), "GiB: arguments, temporaries and results of the training step."]
    return Report(
        title=f"Training steps of {case}", rate="TFLOP/s", rows=rows,
        figures=_training_figures(config, policies, found), notes=notes,
    )  # fmt: skip


def _training_figures(
    config: ConfigDict, policies: Sequence[str], found: Mapping[str, Timing]
) -> dict[str, float]:
    """Whole steps against bf16's, and against the sum of their parts."""
    sums = [
        (found[f"{policy}, no optimizer"].seconds + found["optimizer"].seconds)
        / found[policy].seconds
        for policy in policies
    ]
    figures = {"train_vs_bench": min((s for s in sums if s > 0), default=math.nan)}
    infir2 = (config.model, config.batch_size // config.grad_accum, config.seq_len)
    for policy in policies:
        if policy == "bf16" or "bf16" not in policies:
            continue
        ours, theirs = found[policy], found["bf16"]
        paper = infir2 == ("qwen2.5_1.5b", 2, 8192) and policy == "fp8_block"
        end = "" if paper else f"/{config.model}/{policy}"
        kind = "infir2" if paper else "train"
        figures[f"{kind}_time{end}"] = ours.seconds / theirs.seconds
        figures[f"{kind}_memory{end}"] = _over(ours.bytes, theirs.bytes)
    return figures


def _over(bytes_: int | None, baseline: int | None) -> float:
    return math.nan if bytes_ is None or not baseline else bytes_ / baseline
