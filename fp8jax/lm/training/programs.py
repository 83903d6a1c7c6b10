"""A run's programs without its data: lowered and compiled from shapes, measured, dumped."""

import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fp8jax.lm.training.run import Run, Stage
from fp8jax.lm.training.step import StepNumbers


def device_bytes(tree: Any) -> int:
    """Bytes on each device of a tree of sharded arrays, abstract ones included."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def abstract_batch(run: Run, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a batch of lm/data/loader.py with that many rows, and the run's sharding."""

    def array(dtype: Any) -> jax.ShapeDtypeStruct:
        shape = rows, run.settings.seq_len
        return jax.ShapeDtypeStruct(shape, dtype, sharding=run.batch_sharding)

    ids = ("tokens", "targets", "segments", "positions")
    return {name: array(jnp.int32) for name in ids} | {"weights": array(jnp.float32)}


def abstract_numbers(run: Run, stage: Stage) -> StepNumbers:
    """The shapes of the numbers of a step, which every device has."""
    replicated = NamedSharding(run.mesh, PartitionSpec())
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated),
        jax.eval_shape(stage.programs.numbers, stage.state),
    )


def training_programs(stage: Stage) -> list[str]:
    """The fields of `Programs` that train a stage: `step`, and `seed_step` if histories are new.

    XLA compiles `step` for longest: it comes first.
    """
    return ["step", "seed_step"] if stage.seeds else ["step"]


def lower_program(run: Run, stage: Stage, name: str) -> Any:
    """The program `name`, a field of `Programs`, lowered for the shapes that the loop passes."""
    program: Any = getattr(stage.programs, name)
    with jax.set_mesh(run.mesh):
        if name == "initialize":
            return program.lower()
        settings = run.settings
        rows = settings.microbatch if name == "eval_step" else settings.batch_size
        trains = name in ("seed_step", "step", "repeat_step")
        numbers = (abstract_numbers(run, stage),) if trains else ()
        return program.lower(stage.state, abstract_batch(run, rows), *numbers)


class Compilation:
    """Programs of a stage that compile in threads, while a run prepares its start.

    Making it lowers them, each of which begins to compile at once. Lowering is Python, which holds
    Python's lock: beside other Python both take longer than one after the other. XLA does not hold
    it.
    """

    def __init__(self, run: Run, stage: Stage, names: list[str]):
        """Begins to compile the programs `names`, fields of `Programs`; raises as lowering does."""
        self._began = time.perf_counter()
        pool = ThreadPoolExecutor(len(names), "compilation")
        self._futures = {
            name: pool.submit(_compile, lower_program(run, stage, name)) for name in names
        }
        pool.shutdown(wait=False)  # the threads end with their work

    def result(self) -> tuple[dict[str, Any], float]:
        """Waits, and returns what `compile_programs` returns; raises what XLA raises."""
        done = {name: future.result() for name, future in self._futures.items()}
        programs = {name: program for name, (program, _) in done.items()}
        return programs, max(ended for _, ended in done.values()) - self._began


def _compile(lowered: Any) -> tuple[Any, float]:
    """Returns the compiled program, and when it was."""
    return lowered.compile(), time.perf_counter()


def compile_programs(run: Run, stage: Stage, names: list[str]) -> tuple[dict[str, Any], float]:
    """The compiled programs by name, and the seconds that tracing and compiling took.

    A call of such a program, with the state and batches of the loop, compiles nothing more.
    """
    return Compilation(run, stage, names).result()


def dump_hlo(run: Run, directory: str | os.PathLike[str]) -> list[Path]:
    """Writes every program of training and validation as text, before and after XLA.

    Args:
      run: from `build(config)`.
      directory: made if missing. Files of the same names are replaced.

    Returns:
      The files. NAME.stablehlo.txt is what JAX lowers, NAME.hlo.txt what XLA compiled for this
      device. NAME is step, eval_step, and seed_step where the first step is a program of its own;
      stage2_step and so on for later stages of the precision schedule.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for number, stage in enumerate(run.stages, start=1):
        prefix = "" if number == 1 else f"stage{number}_"
        for name in [*training_programs(stage), "eval_step"]:
            lowered = lower_program(run, stage, name)
            texts = {"stablehlo": lowered.as_text(), "hlo": lowered.compile().as_text()}
            for kind, text in texts.items():
                written.append(folder / f"{prefix}{name}.{kind}.txt")
                written[-1].write_text(text, encoding="utf-8")
    return written
