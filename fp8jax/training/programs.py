"""TODO docstring."""

import math
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from fp8jax.training.run import Run


def device_bytes(tree: Any) -> int:
    """Bytes of a tree of (abstract) sharded arrays on each device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def program_bytes(program: Any) -> int:
    """What XLA allocates on each device for one call of a compiled program, arguments included.

    Not `peak_memory_in_bytes`: XLA allocates all temporaries as one block, whose size exceeds what
    is alive in it at any time; and on CPUs that figure leaves them out.
    """
    memory = program.memory_analysis()
    allocated = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return allocated + memory.temp_size_in_bytes - memory.alias_size_in_bytes


def all_stages(run: Run) -> list[Run]:
    return [run, *(stage for _, stage in run.later)]


# Programs -----------------------------------------------------------------------------------------


def abstract_batch(run: Run, rows: int, seq_len: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a batch as data/loader.py makes it, sharded as the run takes it."""

    def array(dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, seq_len), dtype, sharding=run.batch_sharding)

    ids = ("tokens", "targets", "segments", "positions")
    return {name: array(jnp.int32) for name in ids} | {"weights": array(jnp.float32)}


def training_programs(run: Run) -> list[str]:
    """The fields of `run` that training steps use: `step`, where there are new histories after one
    of `seed_step`."""
    return ["seed_step", "step"] if run.seeds else ["step"]


def lower_program(run: Run, config: ConfigDict, name: str) -> Any:
    """The program in that field of `run`, traced for the shapes that the loop gives it."""
    if name == "initialize":
        return run.initialize.lower()  # type: ignore[attr-defined]  # build gives jitted functions
    micro = config.batch_size // config.grad_accum
    rows = micro if name == "eval_step" else config.batch_size
    with jax.set_mesh(run.mesh):
        return getattr(run, name).lower(run.state, abstract_batch(run, rows, config.seq_len))


def compile_programs(
    run: Run, config: ConfigDict, names: list[str]
) -> tuple[dict[str, Any], float]:
    """The compiled programs by name, and the seconds that tracing and compiling took."""
    begin = time.perf_counter()
    compiled = {name: lower_program(run, config, name).compile() for name in names}
    return compiled, time.perf_counter() - begin


def dump_hlo(run: Run, config: ConfigDict, directory: str | os.PathLike[str]) -> list[Path]:
    """Writes every program of training and validation as text, before and after XLA.

    Those of later stages of the precision schedule have the number of the stage before their name.

    Args:
      run: what `build(config)` gave.
      config: all keys of configs/base.py.
      directory: made if missing. Files of the same names are replaced.

    Returns:
      The files: NAME.stablehlo.txt is what JAX asks for, NAME.hlo.txt what XLA made of it for this
      device; NAME is step, eval_step, and seed_step where the first step is a program of its own;
      stage2_step and so on for the second stage of the precision schedule.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for number, stage in enumerate(all_stages(run), start=1):
        prefix = "" if number == 1 else f"stage{number}_"
        for name in [*training_programs(stage), "eval_step"]:
            lowered = lower_program(stage, config, name)
            texts = {"stablehlo": lowered.as_text(), "hlo": lowered.compile().as_text()}
            for kind, text in texts.items():
                written.append(folder / f"{prefix}{name}.{kind}.txt")
                written[-1].write_text(text, encoding="utf-8")
    return written
