"""The training loop, from a config to a run's directory.

The loop dispatches step n and then reads the metrics of step n - 1, so that the device never waits
for the host. It therefore learns one step late that a step was rejected; the compiled step has
already selected the old state by then, and nothing is saved before its metrics were read. Only a
ladder that may repeat a step or roll back makes the loop wait for every step.

The loop counts batches. The state counts the steps that were not rejected, and the learning rate
follows the state.
"""

import contextlib
import functools
import json
import os
import platform
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from absl import logging
from ml_collections import ConfigDict

from fp8jax.device import hardware, xla
from fp8jax.lm.corpus import Corpus
from fp8jax.lm.data.loader import TimedIterator, share_of_rows, train_batches
from fp8jax.lm.data.mixture import Position as DataPosition
from fp8jax.lm.data.rows import Row
from fp8jax.lm.data.token_rows import TokenData
from fp8jax.lm.data.urls import is_url
from fp8jax.lm.inference.memory_check import require_memory
from fp8jax.lm.interop.folders import keep_small_files, kept_differences
from fp8jax.lm.model.transformer import count_params
from fp8jax.lm.records.checkpoint import Checkpointer, newest_step
from fp8jax.lm.records.events import Event
from fp8jax.lm.records.jsonl import each_line
from fp8jax.lm.records.metrics import Metrics
from fp8jax.lm.records.sinks import open_sink
from fp8jax.lm.training import hooks
from fp8jax.lm.training.agree import (
    config_facts,
    data_facts,
    lock_together,
    run_facts,
    step_facts,
    together,
)
from fp8jax.lm.training.build import build
from fp8jax.lm.training.channel import SAVING_S, Channel
from fp8jax.lm.training.console import best_of, closing_line, labeled, start_lines
from fp8jax.lm.training.epochs import read_corpus, with_steps
from fp8jax.lm.training.faults import Faults
from fp8jax.lm.training.hooks import Dispatched, Now, Scalars, Tools
from fp8jax.lm.training.initial_state import InitialState
from fp8jax.lm.training.new_programs import NewPrograms, write_config, write_file
from fp8jax.lm.training.profile import Profile
from fp8jax.lm.training.programs import device_bytes
from fp8jax.lm.training.recovery import Recovery
from fp8jax.lm.training.resume import (
    as_begun,
    initial_position,
    read_checkpoint,
    refuse_conversion,
)
from fp8jax.lm.training.run import Run
from fp8jax.lm.training.stop_request import StopRequest
from fp8jax.lm.training.stored_run import StoredRun, stored_run
from fp8jax.lm.training.telemetry import Telemetry
from fp8jax.lm.training.watch import LayerWatch

NO_FAULTS = Faults()
_MOST_LINES = 5  # of damaged lines, and of gaps, that are said

# What happens besides, in this order. A hook that is not due does nothing.
BEFORE_A_STEP = (
    hooks.start_profile,
    hooks.write_step_before_compiling,
    hooks.enter_stage,
    hooks.compile_new_programs,
    hooks.measure_casts,
)
AFTER_A_STEP = (
    hooks.report_compilation,
    hooks.write_step_before,
    hooks.decide,
    hooks.end_profile,
    hooks.read_step_or_leave_it,
    hooks.validate_step,
    hooks.write_step,
    hooks.sample,
    hooks.save,
    hooks.inject_faults,
    hooks.restart_clock,
)


def train_and_evaluate(
    config: ConfigDict,
    workdir: str,
    *,
    data: TokenData | None = None,
    profile: tuple[int, int] | None = None,
    faults: Faults = NO_FAULTS,
    defaults: ConfigDict | None = None,
    channel: Channel | None = None,
) -> Scalars:
    """Trains as `config` says; resumes by itself from what `workdir` holds.

    Args:
      config: all keys of `fp8jax.base_config()`.
      workdir: the run's directory: config.json, data.txt, precision.txt, metrics.jsonl,
        samples.jsonl, events.jsonl, checkpoints/, tensorboard/, telemetry/, profile/; hugging_face/
        with the files of a model or tokenizer that the config names by path. `s3://BUCKET/NAME` and
        `gs://BUCKET/NAME` are uploaded at each checkpoint (stored_run.py).
      data: rows of your own in place of `config.data`, such as a `grain.MapDataset`: element i is
        an array [seq_len + 1] of ids of `config.tokenizer`, one document. The last `valid.fraction`
        of them validate. A run that is resumed needs the same ones.
      profile: first and last step of a trace for xprof, None for none.
      faults: faults to inject (lm/training/faults.py).
      defaults: the console shows which keys of the config differ from these; None for no keys.
      channel: that the processes of the run have opened since they joined. None opens one, if there
        are several.

    Returns:
      The scalars of the last step written, validation included.

    Raises:
      ValueError, NotImplementedError: a config that cannot be honored; before anything is trained.
      OSError: the workdir cannot be written, or another program trains in it (BlockingIOError).
      KeyboardInterrupt: after Ctrl-C, once the state is saved. SIGTERM saves and returns.
      SystemExit: in a run of several processes, with the status `channel.RUN_AGAIN`, after either.
        Any other exception ends such a process soon, as it ends the others.
      StoppedError: a step was rejected and no rung of the ladder was left: NonFiniteError for a
        loss or gradient that is not finite, else for a spike.

    Example:
      A step on rows of one's own, into a new folder:

      >>> config = fp8jax.base_config()
      >>> config.update(precision="fp8_block", num_steps=1, seq_len=16, batch_size=2)
      >>> config.model_overrides.n_layers = 1
      >>> rows = [np.arange(i, i + 17) for i in range(40)]
      >>> scalars = fp8jax.train_and_evaluate(config, tempfile.mkdtemp(), data=rows)
      >>> round(scalars["valid_loss"])
      6
    """
    if not workdir:
        raise ValueError("workdir is empty: name the run's directory")
    if not is_url(workdir):
        return _train_in(workdir, None, config, data, profile, faults, defaults, channel)
    with stored_run(workdir) as stored:
        copy = str(stored.folder)
        return _train_in(copy, stored, config, data, profile, faults, defaults, channel)


def _train_in(
    workdir: str,
    stored: StoredRun | None,
    config: ConfigDict,
    data: TokenData | None,
    profile: tuple[int, int] | None,
    faults: Faults,
    defaults: ConfigDict | None,
    channel: Channel | None,
) -> Scalars:
    """Trains in a folder of this machine, which may be the copy of a workdir in a store."""
    url = None if stored is None else stored.url
    shown = url or workdir
    together("config", lambda: None, lambda _: config_facts(config))
    xla.set_compilation_cache()
    config, corpus = together("num_steps", lambda: with_steps(config, data))
    # Before the workdir decides what is built; whether it is shared, its lock says later.
    checkpoints = Path(workdir, "checkpoints")
    newest = together("checkpoints", lambda: newest_step(checkpoints), step_facts)
    run = together("run", lambda: _built(as_begun(config, Path(workdir))), run_facts)
    settings = run.settings
    # Refused before the lock, whose file would be left.
    refuse_conversion(Path(workdir))
    initial_state = None
    if newest is None:
        if run.initial_weights is not None:
            run.initial_weights.check(run.tokenizer)
        if settings.initial_state:
            initial_state = InitialState.parse(settings.initial_state)
            initial_state.check(run)
    with contextlib.ExitStack() as stack:
        if channel is None and jax.process_count() > 1:
            channel = stack.enter_context(Channel())
        lock_together(stack, workdir)  # before anything is written there
        if stored is not None:
            stored.claim()
        model_changes = _model_changes(run, workdir)
        corpus = together(
            "data", lambda: corpus or read_corpus(settings, run.tokenizer), data_facts
        )
        stack.enter_context(jax.set_mesh(run.mesh))
        stop = channel or stack.enter_context(StopRequest())
        checkpointer = stack.enter_context(
            Checkpointer(
                checkpoints,
                every=settings.checkpoint_every,
                keep=settings.checkpoint_keep,
                keep_best=settings.checkpoint_keep_best,
                on_commit=None if stored is None else stored.upload,
            )
        )
        # Before the compilation begins, whose seconds are a part of the run's.
        began = time.perf_counter()
        restored, changed = read_checkpoint(checkpointer, run, corpus)
        changes = None if restored is None else [*model_changes, *changed]
        if restored is None and initial_state is not None:
            restored = initial_state.read(run)
        meta: dict[str, Any] = {"position": None, "recovery": {}, "amaxes": []}
        start = 0
        if restored is not None:
            start, meta = restored.step, restored.meta
        # The rows read so far say where the data goes on, also if batch size or mixture changed.
        data_position = corpus.train.start(meta["position"])
        traced = Profile(profile, workdir)
        traced.require_within(start, settings.num_steps)
        stack.callback(traced.stop)
        first = jax.process_index() == 0
        sink = open_sink(settings.log_to, workdir, settings.record, url) if first else None
        last = max(settings.num_steps, start)
        metrics = stack.enter_context(Metrics(workdir, num_steps=last, start_step=start, sink=sink))
        telemetry = stack.enter_context(Telemetry(workdir, run, metrics, start))
        programs = NewPrograms(workdir, run, metrics, start, fresh=restored is None)
        position = initial_position(run, restored)
        tools = Tools(
            checkpoints=checkpoints,
            corpus=corpus,
            rows=_read_ahead(stack, run, corpus, data_position, faults, start),
            start=start,
            data_position=data_position,
            checkpointer=checkpointer,
            metrics=metrics,
            telemetry=telemetry,
            programs=programs,
            recovery=Recovery(run, checkpointer, metrics, meta["recovery"]),
            watch=LayerWatch(metrics, meta["amaxes"], run.stages[0].promoted_linears),
            profile=traced,
            stop=stop,
            faults=faults,
        )
        now = Now(run=run, position=position, step=start, finished=start, clock=began)
        _report_start(
            tools, now, workdir, shown, changes, None if defaults is None else defaults.to_dict()
        )
        stack.push(functools.partial(_report_end, tools, now, workdir, shown, began))
        # Before the end is reported, which says so if it fails.
        stack.callback(lambda: programs.report_precision(now.run, now.finished, wait=True))
        if channel is not None:
            channel.trains(
                workdir,
                lambda: now.step,
                lambda: checkpointer.failure,
                functools.partial(_leave, tools, now),
            )
            stack.push(channel.fail)  # before anything is closed
        _train(tools, now)
        checkpointer.wait()  # a run whose last save fails has not finished
        return now.scalars


def _built(config: ConfigDict) -> Run:
    """Returns the run of a config, and wakes its devices.

    Raises:
      ValueError: their memory does not hold its state.
    """
    run = build(config)
    state = max(device_bytes(stage.state) for stage in run.stages)
    require_memory(
        state, f"the state of {run.settings.model}", "take smaller sizes, or shard it (mesh=fsdp)"
    )
    hardware.wake(run.mesh.local_devices)  # used once data is read and programs are lowered
    return run


def _train(tools: Tools, now: Now) -> None:
    """Trains to the last step, or until a signal asks to stop."""
    for step in range(tools.start + 1, now.run.settings.num_steps + 1):
        now.step = step
        now.batch = hooks.next_batch(tools, now)
        for hook in BEFORE_A_STEP:
            hook(tools, now)
        now.dispatched = _dispatch(now)
        for hook in AFTER_A_STEP:
            hook(tools, now)
        if jax.process_count() == 1:  # of several, the channel says so to all
            tools.checkpointer.require_saved()
        if now.stopping:
            tools.metrics.event(step, Event.STOPPED, signal=tools.stop.signal)
            break
    if now.run.settings.checkpoint_keep_best and (best := tools.checkpointer.best()) is not None:
        tools.metrics.event(best[0], Event.BEST_CHECKPOINT, valid_loss=best[1])


def _dispatch(now: Now) -> Dispatched:
    """Takes the step, and does not wait for it."""
    position, programs = now.position, now.position.stage.programs
    seeded = position.seeding
    run_step = programs.seed_step if seeded else programs.step
    numbers = programs.numbers(position.state)  # before the step donates it
    position.state, out = run_step(position.state, now.batch, numbers)
    position.seeding = False
    return Dispatched(
        step=now.step, out=out, batch=now.batch, seeded=seeded, telemetry=now.measuring
    )


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


def _read_ahead(
    stack: contextlib.ExitStack,
    run: Run,
    corpus: Corpus,
    position: DataPosition,
    faults: Faults,
    start: int,
) -> Iterator[Row]:
    """This process's rows, read ahead, each waited for `data_timeout` seconds at most."""
    share, shares = share_of_rows(run.batch_sharding, run.settings.batch_size)
    batches = train_batches(
        corpus.train,
        seed=run.settings.seed,
        batch_size=run.settings.batch_size,
        position=position,
        num_epochs=run.settings.num_epochs,
        process_index=share,
        process_count=shares,
    )
    stack.callback(batches.close)
    timed = TimedIterator(faults.batches(batches, start + 1), run.settings.data_timeout)
    stack.callback(timed.close)
    return timed


def _report_start(
    tools: Tools,
    now: Now,
    workdir: str,
    shown: str,
    changes: list[str] | None,
    defaults: dict[str, Any] | None,
) -> None:
    """Says and records what starts.

    Args:
      shown: the workdir as the user named it.
      changes: since the checkpoint that the run resumes from; None for a fresh run.
    """
    run, metrics, start = now.run, tools.metrics, tools.start
    if start < run.settings.num_steps:  # else nothing is trained with it
        write_config(workdir, run)
    metrics.describe(start, "config", json.dumps(run.settings.record, indent=2, sort_keys=True))
    write_file(workdir, "data.txt", tools.corpus.summary())
    if jax.process_index() == 0:
        keep_small_files(run.settings.record, Path(workdir))
    for line in [*labeled("workdir", shown), *start_lines(run, tools.corpus, defaults)]:
        metrics.say(line)
    metrics.event(
        start,
        Event.START,
        jax=jax.__version__,
        python=platform.python_version(),
        devices=f"{run.mesh.devices.size} x {hardware.device_kind()}",
        mesh=dict(run.mesh.shape),
        processes=jax.process_count(),
        parameters=count_params(run.stages[0].model.config),
        policies=run.policies,
    )
    for file, lines in metrics.damaged.items():
        said = [*lines[:_MOST_LINES], *(["…"] if len(lines) > _MOST_LINES else [])]
        metrics.event(start, Event.DAMAGED_LINES, file=file, lines=said)
    if metrics.missing:
        metrics.event(start, Event.MISSING_STEPS, steps=metrics.missing[:_MOST_LINES])
    for step, reason in tools.checkpointer.rejected:
        metrics.event(step, Event.DAMAGED_CHECKPOINT, reason=reason)
    if changes is not None:
        metrics.event(start, Event.RESUME, seeding=now.position.seeding, changes=changes)
    if start >= run.settings.num_steps:
        metrics.event(start, Event.ALREADY_FINISHED, num_steps=run.settings.num_steps)


def _leave(tools: Tools, now: Now, failures: list[str]) -> None:
    """Records the failures of other processes; waits a while for a save that has begun."""

    def wait() -> None:
        with contextlib.suppress(Exception):  # which another process has, too
            tools.checkpointer.wait()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(SAVING_S)
    with contextlib.suppress(OSError, ValueError):  # a full disk, or closed by the loop meanwhile
        for failure in failures:
            tools.metrics.event(now.finished, Event.FAILED, reason=failure)
        tools.metrics.close()


def _report_end(
    tools: Tools,
    now: Now,
    workdir: str,
    shown: str,
    began: float,
    kind: type[BaseException] | None,
    *_: Any,
) -> None:
    """Says and records how the run ended, also if an exception of that class ended it."""
    reason = (tools.stop.signal or "finished") if kind is None else kind.__name__
    seconds = time.perf_counter() - began
    if jax.process_index() != 0:
        return
    last, validated = None, []
    for last in each_line(os.path.join(workdir, "metrics.jsonl")):
        if "valid_loss" in last:
            validated.append(last)
    best = best_of(validated)
    tools.metrics.event(
        now.finished,
        Event.END,
        reason=reason,
        seconds=round(seconds, 1),
        loss=None if last is None else last["loss"],
        best_valid_loss=None if best is None else best["valid_loss"],
        best_step=None if best is None else best["step"],
    )
    tools.metrics.say_last(closing_line(reason, now.finished, seconds, validated, shown))
