"""The training loop, from a config to a run's directory.

The loop dispatches step n and then reads the metrics of step n - 1, so that the device never waits
for the host. It therefore learns one step late that a step was rejected; the compiled step has
already selected the old state by then, and nothing is saved before its metrics were read. Only a
ladder that may repeat a step or roll back makes the loop wait for every step.

The loop counts batches. The state counts the steps that were not rejected, and the learning rate
follows the state.
"""

import contextlib
import dataclasses
import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from absl import logging
from jaxtyping import Array
from ml_collections import ConfigDict

from fp8jax.analysis.gemms import Summary, find_gemms, format_table, require_fp8, summarize
from fp8jax.analysis.size_gate import is_measured_here
from fp8jax.device import hardware, xla
from fp8jax.lm.data.corpus import Corpus
from fp8jax.lm.data.loader import Batch, TimedIterator, to_devices, train_batches
from fp8jax.lm.data.mixture import Position as DataPosition
from fp8jax.lm.data.rows import Row
from fp8jax.lm.interop.folders import keep_small_files, kept_differences
from fp8jax.lm.model.config import flops_per_token
from fp8jax.lm.model.transformer import count_params
from fp8jax.lm.records.checkpoint import Checkpointer, Restored, has_steps
from fp8jax.lm.records.events import Event
from fp8jax.lm.records.jsonl import read_jsonl
from fp8jax.lm.records.metrics import Metrics
from fp8jax.lm.records.run_checkpoint import CHECKPOINT_VERSION
from fp8jax.lm.records.sinks import Sink, open_sink
from fp8jax.lm.records.workdir_lock import lock_workdir
from fp8jax.lm.stability.faults import Faults
from fp8jax.lm.training.build import build
from fp8jax.lm.training.console import best_of, closing_line, labeled, start_lines
from fp8jax.lm.training.epochs import read_corpus, with_steps
from fp8jax.lm.training.initial_state import InitialState
from fp8jax.lm.training.memory import memory_by_kind
from fp8jax.lm.training.policy_switch import enter_policy
from fp8jax.lm.training.profile import Profile
from fp8jax.lm.training.programs import Compilation, compile_programs, training_programs
from fp8jax.lm.training.recovery import Recovery, rejection_cause
from fp8jax.lm.training.resume import (
    Position,
    as_begun,
    checkpoint_items,
    initial_position,
    read_checkpoint,
    refuse_conversion,
)
from fp8jax.lm.training.run import Run, Stage
from fp8jax.lm.training.stop_request import StopRequest
from fp8jax.lm.training.telemetry import Telemetry
from fp8jax.lm.training.validate import sample_text, validate
from fp8jax.lm.training.watch import LayerWatch

NO_FAULTS = Faults()

Scalars = dict[str, float | None]


def train_and_evaluate(
    config: ConfigDict,
    workdir: str,
    *,
    profile: tuple[int, int] | None = None,
    faults: Faults = NO_FAULTS,
    defaults: ConfigDict | None = None,
) -> Scalars:
    """Trains as `config` says; resumes by itself from what `workdir` holds.

    Args:
      config: all keys of configs/base.py.
      workdir: the run's directory: config.json, data.txt, precision.txt, metrics.jsonl,
        samples.jsonl, events.jsonl, checkpoints/, tensorboard/, telemetry/, profile/; hugging_face/
        with the files of a model or tokenizer that the config names by path.
      profile: first and last step of a trace for xprof, None for none.
      faults: faults to inject (lm/stability/faults.py).
      defaults: the console shows which keys of the config differ from these; None for no keys.

    Returns:
      The scalars of the last step written, validation included.

    Raises:
      ValueError, NotImplementedError: a config that cannot be honored; before anything is trained.
      OSError: the workdir cannot be written, or another program trains in it (BlockingIOError).
      KeyboardInterrupt: after Ctrl-C, once the state is saved. SIGTERM saves and returns.
      StoppedError: a step was rejected and no rung of the ladder was left: NonFiniteError for a
        loss or gradient that is not finite, else for a spike.

    Example:
      What the command `python -m experiments.train` does, with a config of `configs/`:

      >>> from configs import smoke
      >>> config = smoke.get_config()
      >>> config.precision = "fp8_blocks"
      >>> fp8jax.train_and_evaluate(config, workdir="runs/smoke")
      Traceback (most recent call last):
          ...
      ValueError: unknown policy 'fp8_blocks'; did you mean 'fp8_block' or ...
    """
    if not workdir:
        raise ValueError("workdir is empty: name the run's directory")
    xla.set_compilation_cache()
    config, corpus = with_steps(config)
    run = build(as_begun(config, Path(workdir)))
    settings = run.settings
    # Refused before the lock, whose file would be left.
    refuse_conversion(Path(workdir))
    if not has_steps(Path(workdir, "checkpoints")):
        if run.initial_weights is not None:
            run.initial_weights.check()
        if (initial_state := _initial_state(run)) is not None:
            initial_state.check(run)
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock_workdir(workdir))  # before anything is written there
        changes = _model_changes(run, workdir)
        if corpus is None:
            corpus = read_corpus(settings, run.tokenizer)
        stack.enter_context(jax.set_mesh(run.mesh))
        stop = stack.enter_context(StopRequest())
        checkpointer = stack.enter_context(
            Checkpointer(
                Path(workdir, "checkpoints"),
                every=settings.checkpoint_every,
                keep=settings.checkpoint_keep,
                keep_best=settings.checkpoint_keep_best,
            )
        )
        loop = _Loop(workdir, run, corpus, checkpointer, stop, profile, faults, stack, changes)
        loop.begin(None if defaults is None else defaults.to_dict())
        stack.push(loop.end)
        return loop.train()


def _initial_state(run: Run) -> InitialState | None:
    """The checkpoint of another run that step 0 starts from; None for a fresh state."""
    spec = run.settings.initial_state
    return InitialState.parse(spec) if spec else None


def _first_compilation(run: Run) -> Compilation | None:
    """Begins to compile the training programs of a fresh run; None in a run of several processes.

    Those compile when all of them need the program, so that none waits for another in between.
    """
    if jax.process_count() > 1:
        return None
    return Compilation(run, run.stages[0], training_programs(run.stages[0]))


def _model_changes(run: Run, workdir: str) -> list[str]:
    """Returns how the model `hf:DIR` has changed since the workdir began; warns of it.

    Raises ValueError if it has, while `resume_with_changes` is False.
    """
    model = run.settings.model
    lines = kept_differences(run.settings.record, Path(workdir))
    if lines and not run.settings.resume_with_changes:
        raise ValueError(
            f"{model} is no longer the model that this workdir began with: {'; '.join(lines)}. "
            "Take another --workdir, or ask for it with --config.resume_with_changes=True"
        )
    changes = [f"{model}: {line}" for line in lines]
    for change in changes:
        logging.warning("resuming with a change: %s", change)
    return changes


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Dispatched:
    """A dispatched step; its results may not be ready.

    Attributes:
      out: its metrics, on the device.
      seeded: whether it seeded amax histories.
      telemetry: what measured its casts, None if it was not sampled.
    """

    step: int
    out: dict[str, Array]
    batch: Batch
    seeded: bool
    telemetry: Any


class _Loop:
    """Everything that the loop needs between two steps."""

    def __init__(
        self,
        workdir: str,
        run: Run,
        corpus: Corpus,
        checkpointer: Checkpointer,
        stop: StopRequest,
        profile: tuple[int, int] | None,
        faults: Faults,
        stack: contextlib.ExitStack,
        model_changes: list[str],
    ):
        """Reads the checkpoint, if there is one, and opens the run's files on `stack`."""
        # Before the compilation begins, whose seconds are a part of the run's.
        self.began = self.clock = time.perf_counter()
        self.run, self.settings, self.corpus, self.workdir = run, run.settings, corpus, workdir
        self.checkpointer, self.stop, self.faults = checkpointer, stop, faults
        num_steps = run.settings.num_steps
        restored, changes = read_checkpoint(checkpointer, run, corpus)
        self.resumed = restored is not None
        if restored is None and (initial_state := _initial_state(run)) is not None:
            restored = initial_state.read(run)
        self.start = 0 if restored is None else restored.step
        # The rows read so far say where the data goes on, also if batch size or mixture changed.
        self.data_position = corpus.train.start(
            None if restored is None else restored.meta["position"]
        )
        self.profile = Profile(profile, workdir)
        self.profile.require_within(self.start, num_steps)
        stack.callback(self.profile.stop)
        self.metrics = stack.enter_context(
            Metrics(
                workdir,
                num_steps=max(num_steps, self.start),
                start_step=self.start,
                sink=self._sink(),
            )
        )
        self.telemetry = stack.enter_context(Telemetry(workdir, run, self.metrics, self.start))
        self.compilation = None if restored is not None else _first_compilation(run)
        self.position = initial_position(run, restored)
        self.step = self.start  # finished steps
        self._restore_counts(restored)
        self.changes = [*model_changes, *changes]
        self.rows = self._read_ahead(stack)
        self.checkpoints = Path(workdir, "checkpoints")
        # Stages whose compiled step is still to be checked for FP8 GEMMs.
        self.unchecked = [run.at(self.start + 1)]
        if run.settings.require_fp8_gemms:
            self.unchecked += [stage for stage in run.stages if stage.begins > self.start]
        self.compiled: set[tuple[int, bool]] = set()  # (begin of the stage, whether it seeds)
        self.precision: list[str] = []  # of precision.txt

    def _restore_counts(self, restored: Restored | None) -> None:
        spent, amaxes = (
            ({}, []) if restored is None else (restored.meta["recovery"], restored.meta["amaxes"])
        )
        self.recovery = Recovery(self.run, self.checkpointer, self.metrics, spent)
        self.watch = LayerWatch(self.metrics, amaxes)

    def _sink(self) -> Sink | None:
        if jax.process_index() != 0:
            return None
        return open_sink(self.settings.log_to, self.workdir, self.settings.record)

    # Start and end --------------------------------------------------------------------------------

    def begin(self, defaults: dict[str, Any] | None) -> None:
        """Says and records what starts."""
        run = self.run
        self._write_file("config.json", json.dumps(run.settings.record, indent=2, sort_keys=True))
        self._write_file("data.txt", self.corpus.summary())
        if jax.process_index() == 0:
            keep_small_files(run.settings.record, Path(self.workdir))
        for line in [*labeled("workdir", self.workdir), *start_lines(run, self.corpus, defaults)]:
            self.metrics.say(line)
        self.metrics.event(
            self.start,
            Event.START,
            jax=jax.__version__,
            python=platform.python_version(),
            devices=f"{run.mesh.devices.size} x {hardware.device_kind()}",
            mesh=dict(run.mesh.shape),
            processes=jax.process_count(),
            parameters=count_params(run.stages[0].model.config),
            policies=run.policies,
        )
        for step, reason in self.checkpointer.rejected:
            self.metrics.event(step, Event.DAMAGED_CHECKPOINT, reason=reason)
        if self.resumed:
            seeding = self.position.seeding
            self.metrics.event(self.start, Event.RESUME, seeding=seeding, changes=self.changes)
        num_steps = self.settings.num_steps
        if self.start >= num_steps:
            self.metrics.event(self.start, Event.ALREADY_FINISHED, num_steps=num_steps)

    def end(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Says and records how the run ended, also if an exception of that class ended it."""
        if kind is not None:
            reason = kind.__name__
        else:
            reason = self.stop.signal or "finished"
        seconds = time.perf_counter() - self.began
        if jax.process_index() != 0:
            return
        lines = read_jsonl(os.path.join(self.workdir, "metrics.jsonl"))
        best = best_of(lines)
        self.metrics.event(
            self.step,
            Event.END,
            reason=reason,
            seconds=round(seconds, 1),
            loss=lines[-1]["loss"] if lines else None,
            best_valid_loss=None if best is None else best["valid_loss"],
            best_step=None if best is None else best["step"],
        )
        self.metrics.say(closing_line(reason, self.step, seconds, lines, self.workdir))

    def _write_file(self, name: str, text: str) -> None:
        """Writes a file of the workdir, in the first process only."""
        if jax.process_index() == 0:
            Path(self.workdir, name).write_text(text + "\n", encoding="utf-8")

    def _read_ahead(self, stack: contextlib.ExitStack) -> Iterator[Row]:
        """This process's rows, read ahead, each waited for `data_timeout` seconds at most."""
        batches = train_batches(
            self.corpus.train,
            seed=self.settings.seed,
            batch_size=self.settings.batch_size,
            position=self.data_position,
            num_epochs=self.settings.num_epochs,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )
        stack.callback(batches.close)
        rows = self.faults.batches(batches, self.start + 1)
        timed = TimedIterator(rows, self.settings.data_timeout)
        stack.callback(timed.close)
        return timed

    # One step -------------------------------------------------------------------------------------

    def train(self) -> Scalars:
        """Trains to the last step, or until a signal asks to stop."""
        settings, pending, written = self.settings, None, {}
        for step in range(self.start + 1, settings.num_steps + 1):
            batch = self._next_batch(step, pending)
            self.profile.start_if_due(step, self.position.state)
            if self._compiles(step) and pending is not None:
                # Keep compilation out of its step time.
                self._write(pending)
                pending = None
            self._enter_stage(step)
            dispatched = self._start_step(step, batch)
            if pending is not None:
                self._write(pending)
            pending = dispatched
            last = step == settings.num_steps
            valid_due = step % settings.valid_every == 0 or last
            save_due = self.checkpointer.should_save(step) or last
            stopping = self._stopping(waits=valid_due or save_due)
            save_due = save_due or stopping
            sample_every = settings.sample_every
            sample_due = sample_every is not None and step % sample_every == 0
            if self.profile.ends_with(step):
                self.profile.stop(self.position.state)
                self.metrics.event(step, Event.PROFILED, directory=self.profile.directory)
            waits = self.run.ladder.waits or dispatched.seeded
            if not (valid_due or save_due or sample_due or waits):
                self.faults.after(step, self.checkpoints, self.checkpointer.wait)
                continue
            written, pending = self._read(dispatched), None
            if valid_due:
                written |= self._validate(step)
            self.metrics.write(step, written)
            self.step = step
            if sample_due:
                text = sample_text(self.run, self.position.stage, self.position.state)
                self.metrics.sample(step, text)
            if save_due:
                self._save(step, written["valid_loss"] if valid_due else None)
            self.faults.after(step, self.checkpoints, self.checkpointer.wait)
            self.clock = time.perf_counter()  # validation and saving are no part of a step
            if stopping:
                self.metrics.event(step, Event.STOPPED, signal=self.stop.signal)
                break
        self._report_best()
        return written

    def _stopping(self, *, waits: bool) -> bool:
        """Whether a signal asks to stop. Several processes agree where the loop waits anyway."""
        if jax.process_count() == 1:
            return self.stop.signal is not None
        if not waits:
            return False
        self.stop.agree()
        return self.stop.signal is not None

    def _next_batch(self, step: int, pending: _Dispatched | None) -> Batch:
        """The batch of a step on the devices. If the data fails, the step before is saved."""
        try:
            return to_devices(next(self.rows), self.run.batch_sharding)
        except Exception as error:
            if pending is not None:
                self._write(pending)
            self.metrics.event(step - 1, Event.DATA_FAILED, reason=str(error))
            if step - 1 > self.start:
                self._save(step - 1, None)
            raise

    def _enter_stage(self, step: int) -> None:
        """Switches the policy where the precision schedule says so."""
        before, following = self.position.stage, self.run.at(step)
        if following is before:
            return
        state = enter_policy(self.position.state, following.state, following.carried)
        self.position = Position(stage=following, state=state, seeding=following.seeds)
        names = {"from": before.policy.name, "to": following.policy.name}
        self.metrics.event(step - 1, Event.PRECISION_SWITCH, **names, seeding=following.seeds)
        if not self.settings.require_fp8_gemms:
            self.unchecked = [following]

    def _compiles(self, step: int) -> bool:
        """Whether the training program of a step is to be compiled first."""
        stage = self.run.at(step)
        entering = stage is not self.position.stage
        seeding = stage.seeds if entering else self.position.seeding
        return (stage.begins, seeding) not in self.compiled

    def _start_step(self, step: int, batch: Batch) -> _Dispatched:
        """Dispatches a step. Where its program is new, says how long it compiled, and what runs."""
        if not self._compiles(step):
            return self._dispatch(step, batch)
        self.metrics.say("compiling the training step…")
        checked, seconds = self._check_gemms(step)
        begin = time.perf_counter()
        dispatched = self._dispatch(step, batch)
        self.clock = time.perf_counter()
        seconds += self.clock - begin
        self.compiled.add((self.position.stage.begins, dispatched.seeded))
        self.metrics.say(f"compiled it in {seconds:.1f} s")
        for stage, summary, memory in checked:
            named = f"policy {stage.policy.name}: " if len(self.run.stages) > 1 else ""
            details = "; see precision.txt" if summary.cast else ""
            for line in labeled("precision", f"{named}{summary}{details}"):
                self.metrics.say(line)
            self.metrics.event(
                step - 1,
                Event.STAGE,
                policy=stage.policy.name,
                fp8_gemms=summary.fp8,
                cast_gemms=summary.cast,
                compile_s=round(seconds, 2),
                memory=memory,
            )
            if stage.slower and is_measured_here():
                for line in labeled("size gate", stage.slower):
                    self.metrics.say(line)
        return dispatched

    def _check_gemms(self, step: int) -> tuple[list[tuple[Stage, Summary, dict[str, int]]], float]:
        """Finds the GEMMs of each new stage's step, and its memory by kind.

        Returns them, and the seconds in which the programs compiled. Raises if FP8 is required and
        a GEMM is not.
        """
        checked, compiling = [], 0.0
        while self.unchecked and (step == self.start + 1 or not self.position.seeding):
            stage: Stage = self.unchecked.pop(0)
            seeds = stage is self.position.stage and self.position.seeding
            names = training_programs(stage) if seeds else ["step"]
            compiled, seconds = self._compiled(stage, names)
            compiling += seconds
            if (smaller := self.run.smaller(compiled.values())) is not None:
                self._go_on_with(smaller, stage)
                continue
            gemms = find_gemms(
                compiled["step"].as_text(),
                stage.policy,
                stage.model.config.linears,
                backend=stage.model.backend,
                high=stage.high,
            )
            self.compiled.add((stage.begins, False))
            title = f"GEMMs of a training step, policy {stage.policy.name}:"
            self.precision += [title, format_table(gemms), ""]
            if stage.gains and is_measured_here():
                self.precision += [stage.gains, ""]
            self._write_file("precision.txt", "\n".join(self.precision[:-1]))
            if self.settings.require_fp8_gemms:
                require_fp8(gemms)
            memory = memory_by_kind(self.run, stage, xla.program_bytes(compiled["step"]))
            checked.append((stage, summarize(gemms), memory))
        return checked, compiling

    def _go_on_with(self, run: Run, stage: Stage) -> None:
        """Takes a run of the same state, since the programs of `stage` take too much memory."""
        layers = run.layers
        for line in labeled(
            "layers",
            f"the compiled step takes more than {self.run.layers.most / 2**30:,.1f} GiB: now"
            f" remat={layers.remat} and unroll={layers.unroll}",
        ):
            self.metrics.say(line)
        self.unchecked = [run.at(one.begins + 1) for one in (stage, *self.unchecked)]
        self.run, self.settings, self.recovery.run = run, run.settings, run
        self.position.stage = run.at(self.position.stage.begins + 1)
        self._write_file("config.json", json.dumps(run.settings.record, indent=2, sort_keys=True))

    def _compiled(self, stage: Stage, names: list[str]) -> tuple[dict[str, Any], float]:
        """What `compile_programs` returns, which a fresh run has begun when the loop was made."""
        begun, self.compilation = self.compilation, None  # programs stay with `stage` alone
        if begun is not None and begun.stage is stage and begun.names == names:
            return begun.result()
        return compile_programs(self.run, stage, names)

    def _dispatch(self, step: int, batch: Batch) -> _Dispatched:
        position, programs = self.position, self.position.stage.programs
        telemetry = self.telemetry.dispatch(step, position, batch)  # the step donates its state
        seeded = position.seeding
        run_step = programs.seed_step if seeded else programs.step
        numbers = programs.numbers(position.state)  # before the step donates it
        position.state, out = run_step(position.state, batch, numbers)
        position.seeding = False
        return _Dispatched(step=step, out=out, batch=batch, seeded=seeded, telemetry=telemetry)

    def _read(self, dispatched: _Dispatched) -> Scalars:
        """Waits for a step and returns its scalars. If it was rejected, climbs the ladder."""
        host: dict[str, Any] = jax.device_get(dispatched.out)
        step = dispatched.step
        self.telemetry.write(step, dispatched.telemetry)  # also of a step that ends the run
        if "promoted" in host:
            host["promoted"] = self.watch.promoted(step, host["promoted"])
        scalars = {name: float(value) for name, value in host.items()}
        now = time.perf_counter()
        step_s, self.clock = now - self.clock, now
        if rejection_cause(scalars):
            # A seeding step that was rejected has seeded nothing: the next one seeds.
            self.position.seeding = dispatched.seeded
            scalars = self.recovery.settle(step, scalars, self.position, dispatched.batch)
        return {**scalars, **self._speed(step_s), "peak_memory_bytes": hardware.peak_memory()}

    def _speed(self, step_s: float) -> Scalars:
        """step_s (seconds), tokens_per_s (all devices), mfu (a fraction of 1, None if unknown)."""
        tokens, seq_len = self.settings.tokens_per_step, self.settings.seq_len
        flops = tokens * flops_per_token(self.run.stages[0].model.config, seq_len)
        peak = hardware.peak_flops(hardware.device_kind())
        mfu = None if peak is None else flops / step_s / (peak * self.run.mesh.devices.size)
        return {"step_s": step_s, "tokens_per_s": tokens / step_s, "mfu": mfu}

    # What is written ------------------------------------------------------------------------------

    def _write(self, dispatched: _Dispatched) -> None:
        self.metrics.write(dispatched.step, self._read(dispatched))
        self.step = dispatched.step

    def _rows_read(self, step: int) -> int:
        """Rows that this process's run has read since it began, in all processes together.

        Without the empty ones that fill up the last batch of a run of `num_epochs`.
        """
        rows = (step - self.start) * self.settings.batch_size
        if self.settings.num_epochs is None:
            return rows
        before = sum(self.corpus.train.counts(self.data_position).values())
        return min(rows, self.settings.num_epochs * len(self.corpus.train) - before)

    def _validate(self, step: int) -> Scalars:
        """Validation scalars, and how many rows each source has given."""
        stage, state = self.position.stage, self.position.state
        scalars, amaxes = validate(self.run, stage, state, self.corpus)
        if step > self.settings.warmup_steps:
            self.watch.validated(step, amaxes)
        counts = self.corpus.train.counts(self.data_position, self._rows_read(step))
        return {**scalars, **{f"rows/{name}": count for name, count in counts.items()}}

    def _save(self, step: int, valid_loss: float | None) -> None:
        self.telemetry.finish()  # a run that resumes here does not sample earlier steps again
        data_position: DataPosition = self.data_position.advanced(self._rows_read(step))
        meta = {
            "version": CHECKPOINT_VERSION,
            "config": self.settings.record,
            "data": self.corpus.fingerprint,
            "recovery": self.recovery.spent,
            "amaxes": self.watch.amaxes,
            "position": data_position.to_json(),
        }
        items = checkpoint_items(self.run, self.position.state)
        self.checkpointer.save(step, items, meta, valid_loss)
        self.metrics.event(step, Event.CHECKPOINT, path=str(self.checkpoints / str(step)))

    def _report_best(self) -> None:
        if self.settings.checkpoint_keep_best and (best := self.checkpointer.best()) is not None:
            self.metrics.event(best[0], Event.BEST_CHECKPOINT, valid_loss=best[1])
