"""Training programs before the first step that runs them: compiled, and checked for FP8 GEMMs.

XLA takes a second or two to print a large program, in which the GEMMs are found. A thread does that
while the first steps run, unless the config requires FP8: then nothing is trained before.
"""

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fp8jax.analysis.gemms import format_table, require_fp8, summarize
from fp8jax.analysis.hlo import Gemm
from fp8jax.analysis.wire import (
    Transfer,
    find_transfers,
    format_transfers,
    gathered,
    require_fp8_gathers,
)
from fp8jax.device import xla
from fp8jax.lm.records.events import Event
from fp8jax.lm.records.metrics import Metrics
from fp8jax.lm.training.console import labeled
from fp8jax.lm.training.programs import Compilation, compile_programs, training_programs
from fp8jax.lm.training.resume import Position
from fp8jax.lm.training.run import Run, Stage
from fp8jax.lm.training.step_memory import memory_by_kind


class _Found(NamedTuple):
    """What the text of a stage's compiled step shows; transfers only on several devices."""

    stage: Stage
    gemms: list[Gemm]
    transfers: list[Transfer]


def _find(run: Run, stage: Stage, step: Any) -> _Found:
    text = step.as_text()
    return _Found(stage, stage.gemms(text), find_transfers(text) if run.mesh.size > 1 else [])


class NewPrograms:
    """Compiles what a step is the first to run, and then says how long it took, and what runs.

    Attributes:
      unchecked: stages whose compiled step is still to be checked for FP8 GEMMs.
    """

    def __init__(self, workdir: str, run: Run, metrics: Metrics, start: int, *, fresh: bool):
        """Begins to compile the programs of a fresh run in threads, which `compile` waits for.

        Those of several processes compile when all of them need the program, so that none waits for
        another in between.
        """
        self._workdir, self._metrics, self._first = workdir, metrics, start + 1
        self._begun: Compilation | None = None
        if fresh and jax.process_count() == 1:
            self._begun = Compilation(run, run.stages[0], training_programs(run.stages[0]))
        self.unchecked = [run.at(start + 1)]
        if run.settings.require_fp8_gemms or run.settings.require_fp8_gathers:
            self.unchecked += [stage for stage in run.stages if stage.begins > start]
        self._compiled: set[tuple[int, bool]] = set()  # (begin of the stage, whether it seeds)
        self._precision: list[str] = []  # of precision.txt
        self._searches: list[Future[_Found]] = []  # whose findings are still to be said
        self._memory: list[tuple[Stage, dict[str, int]]] = []  # to be reported
        self._began: float | None = None  # the compilation that is still to be reported

    def needed(self, run: Run, step: int, position: Position) -> bool:
        """Whether the training program of a step is to be compiled first."""
        stage = run.at(step)
        seeding = position.seeding if stage is position.stage else stage.seeds
        return (stage.begins, seeding) not in self._compiled

    def compile(self, run: Run, step: int, position: Position) -> Run:
        """Compiles the programs of a step, and finds the GEMMs of each new stage's step.

        Returns the run to go on with: one of the same state if the programs take too much memory;
        then `position` has its stage. Raises if FP8 is required and a GEMM is not.
        """
        self._metrics.say("compiling the training step…")
        compiling = 0.0
        while self.unchecked and (step == self._first or not position.seeding):
            stage = self.unchecked.pop(0)
            seeds = stage is position.stage and position.seeding
            names = training_programs(stage) if seeds else ["step"]
            # What was begun is the first that is asked for.
            begun, self._begun = self._begun, None
            programs, seconds = (
                compile_programs(run, stage, names) if begun is None else begun.result()
            )
            compiling += seconds
            if (smaller := run.smaller(programs.values())) is not None:
                most, run = run.layers.most, smaller
                self._say(
                    "layers",
                    f"the compiled step takes more than {most / 2**30:,.1f} GiB: now"
                    f" remat={run.layers.remat} and unroll={run.layers.unroll}",
                )
                self.unchecked = [run.at(one.begins + 1) for one in (stage, *self.unchecked)]
                position.stage = run.at(position.stage.begins + 1)
                write_config(self._workdir, run)
                continue
            self._check(run, stage, programs["step"], step - 1)
        self._compiled.add((position.stage.begins, position.seeding))
        self._began = time.perf_counter() - compiling
        return run

    def report(self, step: int) -> float | None:
        """Says what the dispatch of a step has compiled; returns when that ended, None for nothing.

        The first call of a program that `compile` has not compiled compiles it.
        """
        if self._began is None:
            return None
        now = time.perf_counter()
        seconds, self._began = now - self._began, None
        self._metrics.say(f"compiled it in {seconds:.1f} s")
        for stage, memory in self._memory:
            self._metrics.event(
                step - 1,
                Event.STAGE,
                policy=stage.policy.name,
                compile_s=round(seconds, 2),
                memory=memory,
            )
        self._memory = []
        return now

    def report_precision(self, run: Run, step: int, *, wait: bool = False) -> None:
        """Says and writes which GEMMs the compiled programs run, as far as they are found.

        Args:
          step: finished steps.
          wait: for those that are not found yet.
        """
        while self._searches and (wait or self._searches[0].done()):
            stage, gemms, transfers = self._searches.pop(0).result()
            self._precision += [
                f"GEMMs of a training step, policy {stage.policy.name}:",
                format_table(gemms),
                "",
            ]
            if transfers:
                title = f"Sent between devices in a training step, policy {stage.policy.name}:"
                self._precision += [title, format_transfers(transfers), ""]
            write_file(self._workdir, "precision.txt", "\n".join(self._precision[:-1]))
            summary = summarize(gemms)
            named = f"policy {stage.policy.name}: " if len(run.stages) > 1 else ""
            sent = f"; devices gather {gathered(transfers)}" if transfers else ""
            details = "; see precision.txt" if summary.cast else ""
            self._say("precision", f"{named}{summary}{sent}{details}")
            self._metrics.event(
                step,
                Event.PRECISION,
                policy=stage.policy.name,
                fp8_gemms=summary.fp8,
                cast_gemms=summary.cast,
            )

    def _check(self, run: Run, stage: Stage, program: Any, finished: int) -> None:
        """Begins to find the GEMMs of a stage's compiled step; finds its memory by kind.

        Where FP8 is required, it waits, and raises if something is not in FP8.
        """
        self._compiled.add((stage.begins, False))
        pool = ThreadPoolExecutor(1, "precision")
        search = pool.submit(_find, run, stage, program)
        pool.shutdown(wait=False)  # the thread ends with its work
        self._searches.append(search)
        self._memory.append((stage, memory_by_kind(run, stage, xla.program_bytes(program))))
        settings = run.settings
        if settings.require_fp8_gemms or settings.require_fp8_gathers:
            self.report_precision(run, finished, wait=True)
        if settings.require_fp8_gemms:
            require_fp8(search.result().gemms)
        if settings.require_fp8_gathers:
            model, parts = stage.model.config, run.mesh.shape["tensor"]
            transfers = search.result().transfers
            require_fp8_gathers(transfers, stage.policy, model.linears, model.n_layers, parts)

    def _say(self, label: str, text: str) -> None:
        for line in labeled(label, text):
            self._metrics.say(line)


def write_config(workdir: str, run: Run) -> None:
    """Writes config.json: the run's config, with how its layers run."""
    text = json.dumps(run.settings.record, indent=2, sort_keys=True)
    write_file(workdir, "config.json", text)


def write_file(workdir: str, name: str, text: str) -> None:
    """Writes a file of the workdir, in the first process only."""
    if jax.process_index() == 0:
        Path(workdir, name).write_text(text + "\n", encoding="utf-8")
