"""Benchmarks of whole training steps of a config, with the program that training runs.

Limits and the first amax histories are as in experiments/bench/steps.py.

With --figure=NAME, the first three figures have the names NAME_time, NAME_memory and
NAME_tokens_per_s for the first policy besides bf16. With settings, each policy counts with the best
of them, time and memory by themselves:

    train_time/MODEL/POLICY          time of a training step over bf16's
    train_memory/MODEL/POLICY        all memory that XLA allocates for the step, over bf16's
    train_tokens_per_s/MODEL/POLICY  tokens in a second, of all devices
    defaults_vs_best/MODEL/POLICY/DEVICES
                                     time with the config as it is, over that of the best setting
    train_vs_bench                   speed of the training step over that of its parts, the
                                     benchmark's step followed by the optimizer; the lowest of all
                                     policies
"""

import ast
import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from experiments.bench.operators import (
    Limits,
    default_attention,
    normal,
    policy_and_backend,
)
from experiments.bench.report import Report, Row
from experiments.bench.steps import quantizes, random_batch, step_floor
from experiments.bench.timing import Program, Timer, Timing
from fp8jax.device import xla
from fp8jax.lm.data.loader import to_devices
from fp8jax.lm.model.config import flops_per_token
from fp8jax.lm.optim.config import OptimizerConfig
from fp8jax.lm.optim.optimizers import make_optimizer
from fp8jax.lm.records.config_keys import refuse_old_keys
from fp8jax.lm.stability.bad_steps import is_finite, select_if
from fp8jax.lm.training.build import build
from fp8jax.lm.training.layer_choice import memory_limit
from fp8jax.lm.training.policy_switch import enter_policy
from fp8jax.lm.training.programs import lower_program
from fp8jax.lm.training.run import Run
from fp8jax.lm.training.step import StepNumbers, TrainState, accumulate

DEFAULTS = "defaults"  # the setting that changes nothing in a config


@dataclasses.dataclass(frozen=True)
class _Case:
    """A contestant: a policy, and what differs from the config, "" for nothing."""

    policy: str
    setting: str = ""

    @property
    def name(self) -> str:
        return f"{self.policy}, {self.setting}" if self.setting else self.policy

    def config(self, config: ConfigDict) -> ConfigDict:
        """Returns the config of this contestant."""
        one = copy.deepcopy(config)
        (one.precision, one.backend), one.precision_schedule = policy_and_backend(self.policy), ()
        if self.setting not in ("", DEFAULTS):
            for assignment in self.setting.split(","):
                _assign(one, assignment)
        return one.copy_and_resolve_references()  # not before: keys without a value have types


def check_settings(config: ConfigDict, settings: Iterable[str]) -> None:
    """Raises ValueError for a setting that `measure_training` would refuse."""
    for setting in settings:
        _Case("bf16", setting).config(config)


def _assign(config: ConfigDict, assignment: str) -> None:
    """Sets a key, such as "unroll=28" or "mesh_axes.fsdp=2"; its value keeps its type."""
    key, equals, value = assignment.strip().partition("=")
    refuse_old_keys([key])
    *parents, last = key.split(".")
    node: Any = config
    for name in parents:
        node = node[name] if isinstance(node, ConfigDict) and name in node else None
    if not equals or not isinstance(node, ConfigDict) or last not in node:
        raise ValueError(f"--settings: {assignment!r} is not KEY=VALUE of a key of the config")
    try:
        value = ast.literal_eval(value)
    except (SyntaxError, ValueError):
        pass  # a string without quotes
    try:
        node[last] = value
    except TypeError as error:
        raise ValueError(f"--settings: {assignment!r}: {error}") from None


class _Training:
    """The runs of a config, one for each case, which share one state.

    The state holds parameters and moments. Every call consumes it, as donated buffers, and returns
    the next one. Each policy has its own amax histories.
    """

    def __init__(self, config: ConfigDict, cases: Sequence[_Case], devices: int, count: int):
        """`devices` of this process train, as the config's mesh says, on `count` documents a row.

        Raises ValueError if there are not so many devices, or for a setting of an unknown key.
        """
        given = jax.local_devices()
        if devices > len(given):
            raise ValueError(f"--devices={devices}: this process has {len(given)}")
        self.configs: dict[_Case, ConfigDict] = {}
        self.runs: dict[_Case, Run] = {}
        for case in cases:
            self.configs[case] = case.config(config)
            self.runs[case] = build(self.configs[case], given[:devices])
        self.first: Run = next(iter(self.runs.values()))
        self.model = self.first.stages[0].model.config
        self._count = count
        self._states: dict[Any, TrainState] = {}  # by the tree of the optimizer's state
        self._histories: dict[str, Any] = {}

    def batch(self, case: _Case) -> dict[str, np.ndarray]:
        """Returns random rows of the case's size."""
        config = self.configs[case]
        return random_batch(self.model, config.batch_size, config.seq_len, self._count)

    def state(self, case: _Case) -> TrainState:
        """Returns the state with the policy's histories, for a call that it is donated to.

        What is not there, or was lost by a call that failed, is made: call it on the run's mesh.
        """
        if case.policy not in self._histories:
            self._seed(case)
        return self._shared(case, self._histories.pop(case.policy))

    def _shared(self, case: _Case, histories: Any) -> TrainState:
        """The state that all cases of one optimizer share, with the histories of one policy."""
        tree: Any = jax.tree.structure(self.runs[case].stages[0].state.opt_state)
        if tree in self._states:
            return dataclasses.replace(self._states.pop(tree), histories=histories)
        first = jax.tree.structure(self.first.stages[0].state.opt_state)
        run = self.first if first == tree else self.runs[case]
        return dataclasses.replace(run.stages[0].programs.initialize(), histories=histories)

    def _seed(self, case: _Case) -> None:
        run = self.runs[case]
        (stage,) = run.stages
        state = enter_policy(self._shared(case, {}), stage.state, frozenset())
        if stage.seeds:
            batch = to_devices(self.batch(case), run.batch_sharding)
            state, _ = stage.programs.seed_step(state, batch, stage.programs.numbers(state))
        self.keep(case.policy, state)

    def keep(self, policy: str, state: TrainState) -> None:
        """Stores the state that a call has returned."""
        self._histories[policy] = state.histories
        tree = jax.tree.structure(state.opt_state)
        self._states[tree] = dataclasses.replace(state, histories={})

    def prepare(self, case: _Case, inner: Callable[["_Training", _Case], Program]) -> Program:
        """Returns the program of `inner`, prepared and called on the run's mesh, after seeding."""
        mesh = self.runs[case].mesh
        with jax.set_mesh(mesh):
            program = inner(self, case)
            self.keep(case.policy, self.state(case))  # seeded before anything is timed

        def call() -> Any:
            with jax.set_mesh(mesh):
                return program.call()

        return dataclasses.replace(program, call=call)


def _train(training: _Training, case: _Case) -> Program:
    """Prepares what lm/training/loop.py does in a step.

    It copies the rows to the device, dispatches the step, and reads the metrics of the step before.

    Raises MemoryError for a step that takes more memory than there is; nothing is lost by it.
    """
    run, rows = training.runs[case], training.batch(case)
    compiled = lower_program(run, run.stages[0], "step").compile()
    if (smaller := run.smaller([compiled])) is not None:  # as training does
        run = training.runs[case] = smaller
        compiled = lower_program(run, run.stages[0], "step").compile()
    (stage,), size, limit = run.stages, xla.program_bytes(compiled), memory_limit(run.mesh)
    if limit is not None and size > limit:
        raise MemoryError(f"does not fit: {size / 2**30:.2f} of {limit / 2**30:.2f} GiB")
    last: list[Any] = []

    def call() -> Any:
        batch = to_devices(rows, run.batch_sharding)
        state = training.state(case)
        state, metrics = stage.programs.step(state, batch, stage.programs.numbers(state))
        training.keep(case.policy, state)
        jax.device_get(last)
        last[:] = [metrics]
        return metrics

    return Program(call=call, bytes=size)


def _without_optimizer(training: _Training, case: _Case) -> Program:
    """Prepares the step that `measure_step` times, with the config's model and the shared state."""
    run, microbatches = training.runs[case], training.configs[case].grad_accum
    batch, model = to_devices(training.batch(case), run.batch_sharding), run.stages[0].model
    program = jax.jit(
        lambda state, batch: accumulate(model, state, batch, microbatches),
        compiler_options=xla.compiler_options(layer_loop=model.has_layer_loop),
    )

    def call() -> Any:
        state = training.state(case)
        training.keep(case.policy, state)
        return program(state, batch)

    return Program(call=call)


def _optimizer(training: _Training, case: _Case) -> Program:
    """Prepares everything that a step does after it has computed the gradients."""
    optimizer, _ = make_optimizer(OptimizerConfig.from_config(training.configs[case]))

    def update(state: TrainState, grads: Any, numbers: StepNumbers) -> TrainState:
        norm = optax.tree.norm(grads)
        updates, moments = optimizer.update(
            grads,
            state.opt_state,
            state.params,
            learning_rate=numbers.learning_rate,
            clip_norm=numbers.clip_norm,
        )
        params = optax.apply_updates(state.params, updates)
        new = dataclasses.replace(state, step=state.step + 1, params=params, opt_state=moments)
        return select_if(is_finite(norm, norm), new, state)

    program = jax.jit(update, donate_argnums=0, compiler_options=xla.compiler_options())
    params = training.first.stages[0].state.params
    random = lambda: jax.tree.map(lambda leaf: normal(0, leaf.shape, jnp.float32), params)  # noqa: E731
    grads = jax.jit(random, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, params))()

    def call() -> Any:
        state = training.state(case)
        state = program(state, grads, training.runs[case].stages[0].programs.numbers(state))
        training.keep(case.policy, state)
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
    settings: Sequence[str] = (),
) -> Report:
    """Measures whole training steps of a config on random tokens.

    Without `settings`, the benchmark's own step and the optimizer alone are measured, too.

    Args:
      config: its precision and backend are replaced.
      policies: POLICY or POLICY@BACKEND.
      timed: times contestants.
      limits: the device's.
      figure: names the figures of the first policy besides bf16, unless it is empty.
      devices: how many of this process train, as the config's mesh says.
      count: documents in a row, of random lengths.
      settings: KEY=VALUE,… for the config; each policy runs with each of them, and figures compare
        the best of each policy. `DEFAULTS` changes nothing.

    Returns:
      The report. FLOPs, limits and the memory of a row are those of each device; the memory is all
      that XLA allocates for the training step.

    Raises:
      ValueError: this process has fewer devices, or they do not divide the rows; a setting is not
        KEY=VALUE, or not of a key of the config and its type.
    """
    cases = [_Case(policy, setting) for policy in policies for setting in settings or ("",)]
    training = _Training(config, cases, devices, count)
    found = timed(_training_contestants(training, cases, parts=not settings))
    title = f"{config.model} {config.batch_size}x{config.seq_len}"
    title += f", {count} documents a row" if count > 1 else ""
    title += f", {devices} devices" if devices > 1 else ""
    floor = functools.cache(functools.partial(step_floor, timed=timed, limits=limits, count=count))
    work = {case: _work(training, case, floor, devices) for case in cases}
    notes = [limits.note(), "GiB: arguments, temporaries and results of the training step."]
    notes += [
        f"{case.name}: remat={run.layers.remat}, unroll={run.layers.unroll}."
        for case, run in training.runs.items()
        if case.setting in ("", DEFAULTS)
    ]
    rows = _training_rows(title, found, work)
    figures = _training_figures(config.model, found, work, devices, figure)
    if not settings:
        rows.append(Row(case=title, name="optimizer", timing=found["optimizer"]))
        figures["train_vs_bench"] = _against_parts(policies, found)
    return Report(
        title=f"Training steps of {title}", rate="TFLOP/s", rows=rows, figures=figures,
        notes=notes, limits=limits.by_name(),
    )  # fmt: skip


def _training_contestants(
    training: _Training, cases: Sequence[_Case], *, parts: bool
) -> dict[str, Callable[[], Program]]:
    """Returns the training step of each case; with `parts`, also the parts that it consists of."""
    contestants: dict[str, Callable[[], Program]] = {}
    for case in cases:
        contestants[case.name] = functools.partial(training.prepare, case, _train)
        if parts:
            contestants[f"{case.name}, no optimizer"] = functools.partial(
                training.prepare, case, _without_optimizer
            )
    if parts:
        contestants["optimizer"] = functools.partial(training.prepare, cases[0], _optimizer)
    return contestants


class _Work(NamedTuple):
    """What a step of a case has to do.

    Attributes:
      tokens: of all devices.
      flops: of one device.
      limit: its parts, in seconds.
    """

    tokens: int
    flops: float
    limit: dict[str, float]


def _work(training: _Training, case: _Case, floor: Callable[..., Any], devices: int) -> _Work:
    config = training.configs[case]
    micro = config.batch_size // config.grad_accum
    attention = config.attention or default_attention()
    parts = floor(training.model, micro, config.seq_len, attention)[quantizes(case.policy)]
    tokens = config.batch_size * config.seq_len
    return _Work(
        tokens=tokens,
        flops=flops_per_token(training.model, config.seq_len) * tokens / devices,
        limit={k: config.grad_accum * v / devices for k, v in parts.items()},
    )


def _training_rows(
    title: str, found: Mapping[str, Timing], work: Mapping[_Case, _Work]
) -> list[Row]:
    """Returns the rows of training steps, and of those without optimizer that were timed."""
    rows = []
    for case, (tokens, flops, parts) in work.items():
        for part in ("", ", no optimizer"):
            if (name := f"{case.name}{part}") not in found:
                continue
            timing, rated = found[name], not part and found[name].seconds > 0
            base = [
                found[f"{other.name}{part}"].seconds
                for other in work
                if other.policy == "bf16" and work[other].tokens == tokens
            ]
            rows.append(
                Row(
                    case=title,
                    name=name,
                    timing=timing,
                    work=flops,
                    limit=sum(parts.values()),
                    parts=parts,
                    baseline=_least(base),
                    note=f"{tokens / timing.seconds:,.0f} tokens/s" if rated else "",
                )
            )
    return rows


def _least(numbers: Iterable[float]) -> float:
    """Returns the least of those that are not NaN; NaN for none."""
    return min((number for number in numbers if not math.isnan(number)), default=math.nan)


def _against_parts(policies: Sequence[str], found: Mapping[str, Timing]) -> float:
    """Returns the lowest speed of a training step over that of its parts."""
    speeds = []
    for policy in policies:
        parts = found[f"{policy}, no optimizer"].seconds + found["optimizer"].seconds
        speeds.append(parts / found[policy].seconds)
    return min((s for s in speeds if s > 0), default=math.nan)


def _training_figures(
    model: str,
    found: Mapping[str, Timing],
    work: Mapping[_Case, _Work],
    devices: int,
    figure: str = "",
) -> dict[str, float]:
    """Returns the figures of training steps, each policy with the best of its settings.

    Time is that of a token, so that settings may differ in the size of the batch.
    """
    times: dict[str, float] = {}
    memories: dict[str, float] = {}
    figures = {}
    for policy in dict.fromkeys(case.policy for case in work):
        own = {case: found[case.name] for case in work if case.policy == policy}
        of_token = {case.setting: t.seconds / work[case].tokens for case, t in own.items()}
        times[policy] = _least(of_token.values())
        memories[policy] = _least(t.bytes for t in own.values() if t.bytes is not None)
        if DEFAULTS in of_token:
            name = f"defaults_vs_best/{model}/{policy}/{devices}"
            figures[name] = of_token[DEFAULTS] / times[policy]
    named = next((policy for policy in times if policy != "bf16"), None) if figure else None
    for policy, time in times.items():
        place = f"/{model}/{policy}"
        names = {kind: f"train_{kind}{place}" for kind in ("time", "memory", "tokens_per_s")}
        if policy == named:
            names = {kind: f"{figure}_{kind}" for kind in names}
        figures[names["tokens_per_s"]] = 1 / time if time > 0 else math.nan
        if "bf16" in times and policy != "bf16":
            figures[names["time"]] = time / times["bf16"]
            figures[names["memory"]] = memories[policy] / memories["bf16"]
    return figures
