"""Telemetry of a run: when it is sampled, and where it goes.

A program of its own measures the state and the batch of a step before that step trains on them, so
the step's own program is the same with telemetry and without. The program compiles in a thread
beside the step's. Its results stay on the device until the loop reads the step's metrics. Another
thread makes their rows and the file, while the loop waits for the next step.
"""

import importlib
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from absl import logging

from fp8jax.lm.data.loader import Batch
from fp8jax.lm.records.events import Event
from fp8jax.lm.records.metrics import Metrics
from fp8jax.lm.training.programs import abstract_batch
from fp8jax.lm.training.resume import Position
from fp8jax.lm.training.run import Run, Stage
from fp8jax.telemetry.files import StepFiles
from fp8jax.telemetry.summary import summary

_Key = tuple[int, bool]  # when the stage begins, and whether the step seeds


class Telemetry:
    """Samples the casts of every n-th step; a context manager."""

    def __init__(self, workdir: str, run: Run, metrics: Metrics, start_step: int):
        """Drops what a killed run has written of steps after `start_step`, and begins to compile.

        A run without `telemetry.every` does neither, and samples nothing.
        """
        self._run, self._metrics, self._every = run, metrics, run.settings.telemetry_every
        self._compiler = ThreadPoolExecutor(1, "telemetry-compiler")
        self._writer = ThreadPoolExecutor(1, "telemetry-writer")
        self._writing: tuple[int, Future] | None = None  # the step, and its scalars
        self._programs: dict[_Key, Future] = {}
        self._told: list[Future] = []  # of whose compilation there is an event
        if self._every is None:
            return
        if jax.process_index() == 0:
            self._files = StepFiles(workdir, start_step)
            # The first import takes longer than a step, and the first write would wait for it.
            self._writer.submit(importlib.import_module, "pyarrow.parquet")
        first = (start_step // self._every + 1) * self._every
        if first <= run.settings.num_steps:
            stage = run.at(first)
            self._compile(stage, seeding=stage.seeds and first == stage.begins + 1)

    def __enter__(self) -> "Telemetry":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.finish()
        except Exception as error:
            if kind is None:
                raise
            logging.warning("the last telemetry is not written: %s", error)  # `kind` is raised
        finally:
            self._writer.shutdown()
            self._compiler.shutdown(cancel_futures=True)

    def _compile(self, stage: Stage, *, seeding: bool) -> Future:
        key = stage.begins, seeding
        if key not in self._programs:
            self._programs[key] = self._compiler.submit(_compiled, self._run, stage, seeding)
        return self._programs[key]

    def dispatch(self, step: int, position: Position, batch: Batch) -> Any:
        """Measures the step, counted from 1, that `position` and `batch` begin.

        Returns what `write` takes; None if the step is not sampled.
        """
        if self._every is None or step % self._every:
            return None
        future = self._compile(position.stage, seeding=position.seeding)
        program, names, seconds = future.result()
        if future not in self._told:
            self._told.append(future)
            self._metrics.event(step - 1, Event.TELEMETRY, compile_s=round(seconds, 2))
        return program(position.state, {name: batch[name] for name in names}), position.stage

    def write(self, step: int, dispatched: Any) -> None:
        """Begins to write what `dispatch` has returned, in the first process only.

        First ends what an earlier call has begun: call it for every step, before the step's metrics
        are written, so that curves are written in the order of steps.
        """
        self.finish()
        if dispatched is not None and jax.process_index() == 0:
            self._writing = step, self._writer.submit(self._write_file, step, *dispatched)

    def finish(self) -> None:
        """Returns when all that `write` has begun is written; raises its error."""
        if self._writing is not None:
            (step, scalars), self._writing = self._writing, None
            self._metrics.curves(step, scalars.result())

    def _write_file(self, step: int, measured: Any, stage: Stage) -> dict[str, float]:
        """Writes the rows of a step, in the writer's thread; returns its scalars."""
        statistics, promotion = jax.device_get(measured)
        rows = stage.model.telemetry_rows(statistics, step=step, promotion=promotion)
        self._files.write(step, rows)
        return summary(rows)


def _compiled(run: Run, stage: Stage, seeding: bool) -> tuple[Any, list[str], float]:
    """The program of a stage, the names of the arrays of a batch that it takes, and the seconds."""
    begin = time.perf_counter()
    program: Any = stage.programs.seed_telemetry if seeding else stage.programs.telemetry
    batch = abstract_batch(run, run.settings.batch_size)
    with jax.set_mesh(run.mesh):
        compiled = program.lower(stage.state, batch).compile()
    return compiled, list(batch), time.perf_counter() - begin
