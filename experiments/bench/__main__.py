"""Benchmarks: each command prints one table of contestants timed in turns.

    python -m experiments.bench gemm --output=docs/benchmarks     (quantize, attention: likewise)
    python -m experiments.bench step --shapes=d4096,d1536 --policies=bf16,fp8_block,fp8_block@xla
    python -m experiments.bench step --config=configs/infir2.py:qwen2.5_1.5b --config.KEY=VALUE
    python -m experiments.bench gains --rounds=3 --seconds=0.05 --output=docs/benchmarks

`step` with a config times whole training steps. With --output, the command's section of
DIR/DEVICE_YEAR_MONTH.md is replaced, and the figures are merged into the .json beside it; `gains`
also writes DIR/DEVICE_gains.json, the table of the size gate.
"""

import datetime
import functools
import logging as python_logging
import re
import shlex
import sys
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

from experiments.bench import operators, size_gains, steps, timing
from experiments.bench.report import Report, write
from fp8jax.device import hardware, xla

_SHAPES = flags.DEFINE_list(
    "shapes", None, "MxKxN (gemm), MxK (quantize), BxLxNxKxH (attention), names like d4096 (step)."
)


_POLICIES = flags.DEFINE_string(
    "policies", "bf16,fp8_delayed,fp8_current,fp8_block", "POLICY or POLICY@BACKEND, with commas."
)


_ATTENTION = flags.DEFINE_list("attention", None, "Keys of ATTENTIONS; `step` takes one.")


_REMAT = flags.DEFINE_string("remat", "none", "What `step` recomputes: a key of REMAT.")


_CONFIG = config_flags.DEFINE_config_file("config", None, "A file of configs/.", lock_config=True)


_SWEEP = flags.DEFINE_bool("sweep", False, "gemm: our kernel under several tunings instead.")


_PEERS = flags.DEFINE_bool("peers", True, "Also torch, torchao and flax where they are installed.")


_ROUNDS = flags.DEFINE_integer("rounds", 7, "Turns of each contestant.", lower_bound=1)


_SECONDS = flags.DEFINE_float("seconds", 0.2, "Length of a turn.")


_TINY = flags.DEFINE_bool("tiny", False, "Small shapes.")


_OUTPUT = flags.DEFINE_string("output", "", "Folder of the page and the figures; none if empty.")


_NAME = flags.DEFINE_string("name", "", "Of page and figures, instead of DEVICE_YEAR_MONTH.")


_SECTION = flags.DEFINE_string("section", "", "Of the page, instead of the command's name.")


_LLAMA = (4096, 4096), (4096, 14_336), (14_336, 4096), (8192, 8192), (8192, 28_672)


_COMMANDS = {  # command -> its shapes, tiny ones, and the flags that it takes besides
    "gemm": ([f"8192x{k}x{n}" for k, n in _LLAMA], "256x128x128", "shapes policies peers sweep"),
    "quantize": (["16384x4096", "16384x14336"], "256x128", "shapes"),
    "attention": (["4x4096x32x8x128"], "2x64x4x2x32", "shapes attention peers"),
    "step": (["d4096"], "tiny", "shapes policies peers attention remat"),
    "gains": (size_gains.SHAPES, "64x128x128,64x128x256,64x256x256", ""),
    "training": ([], "", "policies config"),  # what step is with a config
}


def _measure(command: str) -> Report:
    default, tiny, taken = _COMMANDS[command]
    for name in {name for *_, names in _COMMANDS.values() for name in names.split()}:
        if flags.FLAGS[name].present and name not in taken.split():
            raise ValueError(f"--{name} is not for {command}")
    # Programs made at a time. Steps fill the memory; whole training steps share one state.
    threads = 1 if command == "training" else 4 if command == "step" else 8
    timed = functools.partial(
        timing.time_in_turns, rounds=_ROUNDS.value, seconds=_SECONDS.value, threads=threads
    )
    shapes = _SHAPES.value or (tiny.split(",") if _TINY.value else default)
    if command == "gains":
        return size_gains.measure_gains(shapes, timed)
    limits = operators.measure_limits(timed, 256 if _TINY.value else 8192)
    policies, peers = (
        re.split(r",(?![^,:]*=)", _POLICIES.value),
        _PEERS.value,
    )  # options have commas
    if command == "quantize":
        return operators.measure_quantize(shapes, timed, limits)
    if command == "attention":
        names = _ATTENTION.value or ["xla", "cudnn", "cudnn_causal"]
        return operators.measure_attention(shapes, names, timed, limits, peers=peers)
    if command == "gemm" and _SWEEP.value:
        return operators.sweep_gemm(shapes, timed, limits)
    if command == "gemm":
        return operators.measure_gemm(shapes, policies, timed, limits, peers=peers)
    if command == "training":
        return steps.measure_training(_CONFIG.value, policies, timed, limits)
    attention, *more = _ATTENTION.value or [operators.default_attention()]
    if more:
        raise ValueError(f"--attention={attention},{','.join(more)}: step takes one")
    return steps.measure_step(
        shapes, policies, timed, limits, attention=attention, remat=_REMAT.value, peers=peers
    )


def _run(command: str) -> None:
    operators.share_device()
    xla.set_compilation_cache()
    command = "training" if command == "step" and flags.FLAGS["config"].present else command
    report = _measure(command)
    words = shlex.join(["python", "-m", "experiments.bench", *sys.argv[1:]])
    print(report.section(words))
    if _OUTPUT.value:
        device = hardware.device_kind().split()[-1].lower()
        name = _NAME.value or f"{device}_{datetime.date.today():%Y_%m}"
        write(Path(_OUTPUT.value, name), _SECTION.value or command, report, words)
        if command == "gains":
            size_gains.write(Path(_OUTPUT.value, f"{device}_gains.json"), report, words)


def main(argv: list[str]) -> None:
    names = list(_COMMANDS)[:-1]
    if len(argv) != 2 or argv[1] not in names:
        raise app.UsageError(f"first comes one of {', '.join(names)}; got {argv[1:]}")
    try:
        _run(argv[1])
    except (ValueError, NotImplementedError, OSError) as error:
        logging.debug("", exc_info=True)
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    logging.set_verbosity(logging.WARNING)
    python_logging.getLogger("jax").setLevel(python_logging.WARNING)
    app.run(main)
