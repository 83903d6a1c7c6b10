"""What happens around a training step, as functions; loop.py lists them in their order.

A hook takes what the run has open, and where the loop is. It looks itself whether it is due.
"""

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fp8jax.device import hardware
from fp8jax.lm.corpus import Corpus
from fp8jax.lm.data.loader import Batch, to_devices
from fp8jax.lm.data.mixture import Position as DataPosition
from fp8jax.lm.data.rows import Row
from fp8jax.lm.interop.trained import refuse_not_finite
from fp8jax.lm.model.config import flops_per_token
from fp8jax.lm.records.checkpoint import Checkpointer
from fp8jax.lm.records.events import Event
from fp8jax.lm.records.metrics import Metrics
from fp8jax.lm.records.run_checkpoint import CHECKPOINT_VERSION, PARAMS
from fp8jax.lm.training.channel import Channel
from fp8jax.lm.training.faults import Faults
from fp8jax.lm.training.new_programs import NewPrograms
from fp8jax.lm.training.policy_switch import enter_policy
from fp8jax.lm.training.profile import Profile
from fp8jax.lm.training.recovery import NonFiniteError, Recovery, overflowed, rejection_cause
from fp8jax.lm.training.resume import Position, checkpoint_items
from fp8jax.lm.training.run import Run
from fp8jax.lm.training.stop_request import StopRequest
from fp8jax.lm.training.telemetry import Telemetry
from fp8jax.lm.training.validate import sample_text, validate
from fp8jax.lm.training.watch import LayerWatch

Scalars = dict[str, float | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tools:
    """What a run has open.

    Attributes:
      rows: this process's rows of each step, read ahead.
      start: finished steps when the run began.
      data_position: in the data when the run began.
    """

    checkpoints: Path
    corpus: Corpus
    rows: Iterator[Row]
    start: int
    data_position: DataPosition
    checkpointer: Checkpointer
    metrics: Metrics
    telemetry: Telemetry
    programs: NewPrograms
    recovery: Recovery
    watch: LayerWatch
    profile: Profile
    stop: StopRequest | Channel
    faults: Faults


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dispatched:
    """A dispatched step; its results may not be ready.

    Attributes:
      out: its metrics, on the device.
      seeded: whether it seeded amax histories.
      telemetry: what measured its casts, None if it was not sampled.
      timed: whether its seconds are known. The first call of a program returns late, sometimes
        only when the step is done.
    """

    step: int
    out: dict[str, Array]
    batch: Batch
    seeded: bool
    telemetry: Any
    timed: bool = True


@dataclasses.dataclass(kw_only=True)
class Now:
    """Where the loop is. Hooks share this, and nothing else changes under two of them.

    Attributes:
      run: what trains; another one where compiled programs take too much memory.
      position: stage and state, after the newest dispatched step.
      step: the one that is taken, counted from 1.
      finished: the newest step whose metrics are written.
      clock: when the newest step ended whose metrics were read, and what followed it.
      batch: of the step.
      measuring: what telemetry has dispatched of the step.
      dispatched: the step.
      pending: the step before, until its metrics are read.
      scalars: of the newest step that the loop has waited for.
      validates, samples, saves: whether that is due after the step.
      waits: whether the loop waits for the step before it begins the next one.
      stopping: whether a signal asks to stop.
    """

    run: Run
    position: Position
    step: int
    finished: int
    clock: float
    batch: Any = None
    measuring: Any = None
    dispatched: Any = None
    pending: Dispatched | None = None
    scalars: Scalars = dataclasses.field(default_factory=dict)
    validates: bool = False
    samples: bool = False
    saves: bool = False
    waits: bool = False
    stopping: bool = False


def next_batch(tools: Tools, now: Now) -> Batch:
    """The batch of the step on the devices.

    If the data fails, the step before is saved. One of several processes does not save alone: the
    others have begun the step, and wait.
    """
    try:
        return to_devices(next(tools.rows), now.run.batch_sharding)
    except Exception as error:
        if jax.process_count() > 1:
            raise
        write_step_before(tools, now)
        tools.metrics.event(now.step - 1, Event.DATA_FAILED, reason=str(error))
        if now.step - 1 > tools.start:
            _save(tools, now, now.step - 1, None)
        raise


# Before the step ----------------------------------------------------------------------------------


def start_profile(tools: Tools, now: Now) -> None:
    tools.profile.start_if_due(now.step, now.position.state)


def write_step_before_compiling(tools: Tools, now: Now) -> None:
    """Keeps compilation out of the step time of the step before."""
    if tools.programs.needed(now.run, now.step, now.position):
        write_step_before(tools, now)


def enter_stage(tools: Tools, now: Now) -> None:
    """Switches the policy where the precision schedule says so."""
    before, following = now.position.stage, now.run.at(now.step)
    if following is before:
        return
    # A rollback may have gone to before the last stage: what a stage carries is that of the one
    # before it, and a stage without a step has seeded nothing.
    state = now.position.state
    passed = [s for s in now.run.stages if before.begins < s.begins <= following.begins]
    for stage in passed:
        state = enter_policy(state, stage.state, stage.carried)
    seeding = bool(jax.tree.leaves(following.state.histories)) and any(
        stage.seeds for stage in passed
    )
    now.position = Position(stage=following, state=state, seeding=seeding)
    names = {"from": before.policy.name, "to": following.policy.name}
    tools.metrics.event(now.step - 1, Event.PRECISION_SWITCH, **names, seeding=seeding)
    settings = now.run.settings
    if not (settings.require_fp8_gemms or settings.require_fp8_gathers):
        tools.programs.unchecked = [following]


def compile_new_programs(tools: Tools, now: Now) -> None:
    if tools.programs.needed(now.run, now.step, now.position):
        now.run = tools.programs.compile(now.run, now.step, now.position)
        tools.recovery.run = now.run


def measure_casts(tools: Tools, now: Now) -> None:
    now.measuring = tools.telemetry.dispatch(now.step, now.position, now.batch)


# After the step -----------------------------------------------------------------------------------


def report_compilation(tools: Tools, now: Now) -> None:
    """Says how long the program of the step compiled, where it is new, and what runs."""
    if (end := tools.programs.report(now.step)) is not None:
        now.clock = end
        now.dispatched = dataclasses.replace(now.dispatched, timed=False)
    tools.programs.report_precision(now.run, now.step - 1)


def write_step_before(tools: Tools, now: Now) -> None:
    """Waits for the step before, if it was not read yet, and writes its metrics.

    After a step, the device computes that one meanwhile.
    """
    if now.pending is not None:
        tools.metrics.write(now.pending.step, _read(tools, now, now.pending))
        now.finished, now.pending = now.pending.step, None


def decide(tools: Tools, now: Now) -> None:
    """Decides what is due after the step, and whether the loop stops there."""
    settings = now.run.settings
    last = now.step == settings.num_steps
    now.validates = now.step % settings.valid_every == 0 or last
    now.samples = settings.sample_every is not None and now.step % settings.sample_every == 0
    now.saves = tools.checkpointer.should_save(now.step) or last
    now.stopping = tools.stop.reached(now.step)
    now.saves |= now.stopping
    waits = now.run.ladder.waits or now.dispatched.seeded
    now.waits = now.validates or now.samples or now.saves or waits


def end_profile(tools: Tools, now: Now) -> None:
    if tools.profile.ends_with(now.step):
        tools.profile.stop(now.position.state)
        tools.metrics.event(now.step, Event.PROFILED, directory=tools.profile.directory)


def read_step_or_leave_it(tools: Tools, now: Now) -> None:
    """Waits for the step where that is due; otherwise it is read once the next one runs."""
    if now.waits:
        now.scalars = _read(tools, now, now.dispatched)
    else:
        now.pending = now.dispatched


def validate_step(tools: Tools, now: Now) -> None:
    """Adds validation scalars, and how many rows each source has given."""
    if not now.validates:
        return
    scalars, amaxes = validate(now.run, now.position.stage, now.position.state, tools.corpus)
    if now.step > now.run.settings.warmup_steps:
        tools.watch.validated(now.step, amaxes)
    counts = tools.corpus.train.counts(tools.data_position, _rows_read(tools, now, now.step))
    now.scalars |= scalars | {f"rows/{name}": count for name, count in counts.items()}


def write_step(tools: Tools, now: Now) -> None:
    if now.waits:
        tools.metrics.write(now.step, now.scalars)
        now.finished = now.step


def sample(tools: Tools, now: Now) -> None:
    if now.samples:
        text = sample_text(now.run, now.position.stage, now.position.state)
        tools.metrics.sample(now.step, text)


def save(tools: Tools, now: Now) -> None:
    if now.saves:
        _save(tools, now, now.step, now.scalars["valid_loss"] if now.validates else None)


def inject_faults(tools: Tools, now: Now) -> None:
    tools.faults.after(now.step, tools.checkpoints, tools.checkpointer.wait)


def restart_clock(tools: Tools, now: Now) -> None:
    """Validation and saving are no part of a step."""
    if now.waits:
        now.clock = time.perf_counter()


# What several hooks do ----------------------------------------------------------------------------


def _read(tools: Tools, now: Now, dispatched: Dispatched) -> Scalars:
    """Waits for a step and returns its scalars. If it was rejected, climbs the ladder."""
    step, host = dispatched.step, jax.device_get(dispatched.out)
    tools.telemetry.write(step, dispatched.telemetry)  # also of a step that ends the run
    scalars = tools.watch.stepped(step, host)
    end = time.perf_counter()
    step_s, now.clock = end - now.clock, end
    if overflowed(scalars):
        tools.metrics.event(step, Event.OVERFLOW, loss_scale=scalars["loss_scale"])
    if rejection_cause(scalars):
        # A seeding step that was rejected has seeded nothing: the next one seeds.
        now.position.seeding = dispatched.seeded
        scalars = tools.recovery.settle(step, scalars, now.position, dispatched.batch)
    speed = _speed(now.run, step_s if dispatched.timed else None)
    return {**scalars, **speed, "peak_memory_bytes": hardware.peak_memory()}


def _speed(run: Run, step_s: float | None) -> Scalars:
    """step_s (seconds), tokens_per_s (all devices), mfu (a fraction of 1); None if unknown."""
    if step_s is None:
        return {"step_s": None, "tokens_per_s": None, "mfu": None}
    tokens, seq_len = run.settings.tokens_per_step, run.settings.seq_len
    flops = tokens * flops_per_token(run.stages[0].model.config, seq_len)
    peak = hardware.peak_flops(hardware.device_kind())
    mfu = None if peak is None else flops / step_s / (peak * run.mesh.devices.size)
    return {"step_s": step_s, "tokens_per_s": tokens / step_s, "mfu": mfu}


def _rows_read(tools: Tools, now: Now, step: int) -> int:
    """Rows that this process's run has read since it began, in all processes together.

    Without the empty ones that fill up the last batch of a run of `num_epochs`.
    """
    rows = (step - tools.start) * now.run.settings.batch_size
    if now.run.settings.num_epochs is None:
        return rows
    before = sum(tools.corpus.train.counts(tools.data_position).values())
    return min(rows, now.run.settings.num_epochs * len(tools.corpus.train) - before)


def _save(tools: Tools, now: Now, step: int, valid_loss: float | None) -> None:
    tools.telemetry.finish()  # a run that resumes here does not sample earlier steps again
    meta = {
        "version": CHECKPOINT_VERSION,
        "config": now.run.settings.record,
        "data": tools.corpus.fingerprint,
        "recovery": tools.recovery.spent,
        "amaxes": tools.watch.amaxes,
        "seeding": now.position.seeding,
        "position": tools.data_position.advanced(_rows_read(tools, now, step)).to_json(),
    }
    items = checkpoint_items(now.run, now.position.state)
    optimizer = now.run.settings.record["optimizer"]["name"]
    if ":" in optimizer:
        _refuse_not_finite(optimizer, step, items)
    tools.checkpointer.save(step, items, meta, valid_loss)
    tools.metrics.event(step, Event.CHECKPOINT, path=str(tools.checkpoints / str(step)))


def _refuse_not_finite(optimizer: str, step: int, items: dict[str, Any]) -> None:
    """Raises NonFiniteError if a user's optimizer has made NaN or infinities of finite gradients.

    Those of this package do not. A rejected step has changed nothing.
    """

    def without_infinities(leaf: Array) -> Array | None:
        """Returns a float array of the state, where a bound may be infinite from the start."""
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.where(jnp.isinf(leaf), 0, leaf) if is_float else None

    state = jax.tree.map(without_infinities, items["state"]["opt_state"])
    try:
        where = f"the state after step {step}"
        refuse_not_finite({"params": items[PARAMS], "opt_state": state}, where)
    except ValueError as error:
        raise NonFiniteError(
            f"{error}, by optimizer {optimizer}: a step with a loss or gradient that is not finite"
            " changes nothing. It was not saved"
        ) from error
