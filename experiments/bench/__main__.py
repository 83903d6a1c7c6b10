"""Benchmarks: each command prints one table of contestants that are timed in turns.

    python -m experiments.bench gemm --output=docs/benchmarks     (also: quantize, attention,
                                                                   accumulation)
    python -m experiments.bench step --shapes=d4096,d1536 --policies=bf16,fp8_block,fp8_block@xla
    python -m experiments.bench step --config=configs/infir2/cpt_1_5b.py --config.KEY=VALUE
    python -m experiments.bench decode --policies=bf16,fp8_current,fp8_rowwise:only=fwd_w
    python -m experiments.bench telemetry --config=configs/lm_125m.py --config.num_steps=1000 \\
        --config.telemetry.every=50
    python -m experiments.bench start --config=configs/lm_125m.py --policies=bf16,fp8_delayed
    python -m experiments.bench mesh_compile --config=configs/lm_125m.py --config.mesh=fsdp \\
        --policies=fp8_delayed
    python -m experiments.bench gains --rounds=3 --seconds=0.05 --output=docs/benchmarks

With --config, `step` times whole training steps. --figure=NAME then names the figures of the first
policy besides bf16 NAME_time, NAME_memory and NAME_tokens_per_s instead of train_time/MODEL/POLICY
and so on. With --figure=infir2, for example, --policies=bf16,fp8_block,fp8_delayed
gives infir2_time of fp8_block, and train_time/MODEL/fp8_delayed. --devices=2 trains on two devices
of this process, as --config.mesh says, and --documents=8 packs eight documents into each row.
--settings='defaults;unroll=28;unroll=28,remat=dots' times each policy with the config as it is and
with other values of its keys; ratios are then between the best settings of both sides.

With --output, a command replaces its section of DIR/DEVICE_YEAR_MONTH.md, and merges its figures
into the .json file beside it. `gains` also writes DIR/DEVICE_gains.json.
`python -m experiments.bench NAME --help` says what one does and has its flags.
"""

import dataclasses
import datetime
import functools
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from experiments import subcommands
from experiments.bench import (
    accumulation,
    decoding,
    operators,
    size_gains,
    starts,
    steps,
    telemetry,
    timing,
    training_steps,
)
from experiments.bench.report import Report, write
from experiments.bench.timing import Timer
from experiments.config_keys import RUN_KEYS
from fp8jax.device import hardware, xla
from fp8jax.lm.cli import command

_SHAPES = flags.DEFINE_list(
    "shapes",
    None,
    "MxKxN (gemm, accumulation), MxK (quantize), BxLxNxKxH (attention), names like d4096 (step), "
    "MODEL_BxPxT (decode: requests, tokens of prompt, new tokens).",
)


_POLICIES = flags.DEFINE_string(
    "policies", "bf16,fp8_delayed,fp8_current,fp8_block", "POLICY or POLICY@BACKEND, with commas."
)


_ATTENTION = flags.DEFINE_list("attention", None, "Keys of ATTENTIONS; `step` takes one.")


_DOCUMENTS = flags.DEFINE_list(
    "documents",
    None,
    "Documents in a row. attention: several numbers, 1,8 without one; "
    "step --config: one number, 1 without one.",
)


_DEVICES = flags.DEFINE_integer(
    "devices", 1, "step --config: devices that train, as --config.mesh says.", lower_bound=1
)


_REMAT = flags.DEFINE_string("remat", "none", "What `step` rematerializes: a key of REMAT.")


_CONFIG = config_flags.DEFINE_config_file("config", None, "A file of configs/.", lock_config=True)


_FIGURE = flags.DEFINE_string(
    "figure", "", "step --config: name of the figures of the first policy besides bf16."
)


_SETTINGS = flags.DEFINE_string(
    "settings",
    "",
    "step --config: KEY=VALUE,KEY=VALUE;… to time each policy with; defaults for "
    "the config as it is.",
)


_KV_CACHE = flags.DEFINE_enum("kv_cache", "bf16", ["bf16", "fp8"], "decode: what it stores.")


_SWEEP = flags.DEFINE_bool("sweep", False, "gemm: time our kernel under several tunings instead.")


_PEERS = flags.DEFINE_bool("peers", True, "Also torch, torchao and flax where they are installed.")


_ROUNDS = flags.DEFINE_integer("rounds", 7, "Turns of each contestant.", lower_bound=1)


_SECONDS = flags.DEFINE_float("seconds", 0.2, "Length of a turn in seconds.")


_TINY = flags.DEFINE_bool("tiny", False, "Small shapes.")


_OUTPUT = flags.DEFINE_string("output", "", "Folder of the page and the figures; none if empty.")


_NAME = flags.DEFINE_string("name", "", "Of page and figures, instead of DEVICE_YEAR_MONTH.")


_SECTION = flags.DEFINE_string("section", "", "Of the page, instead of the command's name.")


def _policies() -> list[str]:
    return command.split_specs(_POLICIES.value)


def _limits(timed: Timer) -> operators.Limits:
    return operators.measure_limits(timed, 256 if _TINY.value else 8192)


def _gemm(shapes: Sequence[str], timed: Timer) -> Report:
    limits = _limits(timed)
    if _SWEEP.value:
        return operators.sweep_gemm(shapes, timed, limits)
    return operators.measure_gemm(shapes, _policies(), timed, limits, peers=_PEERS.value)


def _quantize(shapes: Sequence[str], timed: Timer) -> Report:
    return operators.measure_quantize(shapes, timed, _limits(timed))


def _accumulation(shapes: Sequence[str], timed: Timer) -> Report:
    return accumulation.measure_accumulation(shapes, timed, _limits(timed))


def _attention(shapes: Sequence[str], timed: Timer) -> Report:
    names = _ATTENTION.value or ["flash", "cudnn", "cudnn_causal", "xla"]
    limits, counts = _limits(timed), [int(count) for count in _DOCUMENTS.value or ["1", "8"]]
    return operators.measure_attention(
        shapes, names, timed, limits, counts=counts, peers=_PEERS.value
    )


def _step(shapes: Sequence[str], timed: Timer) -> Report:
    attention, *more = _ATTENTION.value or [operators.default_attention()]
    if more:
        raise ValueError(f"--attention={attention},{','.join(more)}: step takes one")
    return steps.measure_step(
        shapes,
        _policies(),
        timed,
        _limits(timed),
        attention=attention,
        remat=_REMAT.value,
        peers=_PEERS.value,
    )


def _decode(shapes: Sequence[str], timed: Timer) -> Report:
    return decoding.measure_decoding(
        shapes, _policies(), timed, _limits(timed), cache=_KV_CACHE.value
    )


def _training(shapes: Sequence[str], timed: Timer) -> Report:
    del shapes  # the config has them
    policies, figure = _policies(), _FIGURE.value
    if figure and set(policies) == {"bf16"}:
        raise ValueError(f"--figure={figure} names the figures of a policy besides bf16: add one")
    count, *more = [int(count) for count in _DOCUMENTS.value or ["1"]]
    if more:
        raise ValueError(f"--documents={count},{','.join(map(str, more))}: step takes one")
    settings = [one.strip() for one in _SETTINGS.value.split(";") if one.strip()]
    training_steps.check_settings(_CONFIG.value, settings)  # before the limits, which take a while
    return training_steps.measure_training(
        _CONFIG.value,
        policies,
        timed,
        _limits(timed),
        figure=figure,
        devices=_DEVICES.value,
        count=count,
        settings=settings,
    )


def _telemetry(shapes: Sequence[str], timed: Timer) -> Report:
    del shapes, timed  # the config has them, and two whole runs are timed
    return telemetry.measure_telemetry(_CONFIG.value)


def _config_arguments() -> list[str]:
    """Returns --config and its changes, for the processes that a benchmark starts."""
    return [word for word in sys.argv[1:] if word.lstrip("-").startswith("config")]


def _start(shapes: Sequence[str], timed: Timer) -> Report:
    del shapes, timed  # the config has them, and whole processes are timed
    return starts.measure_starts(_CONFIG.value, _config_arguments(), _policies())


def _mesh_compile(shapes: Sequence[str], timed: Timer) -> Report:
    del shapes, timed  # as above
    policy, *more = _policies()
    if more:
        raise ValueError(f"--policies={_POLICIES.value}: mesh_compile takes one")
    return starts.measure_mesh_compile(_CONFIG.value, _config_arguments(), policy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Benchmark(subcommands.Command):
    """A command and what it measures.

    Attributes:
      measure: (shapes, what times contestants) -> the report.
      shapes, tiny_shapes: the default of --shapes, without and with --tiny.
      threads: how many programs are compiled at a time.
    """

    measure: Callable[[Sequence[str], Timer], Report]
    shapes: Sequence[str] = ()
    tiny_shapes: Sequence[str] = ()
    threads: int = 8


_LLAMA = (4096, 4096), (4096, 14_336), (14_336, 4096), (8192, 8192), (8192, 28_672)


_COMMANDS = (
    _Benchmark(
        name="gemm",
        about=(
            "Times GEMMs of a linear layer in each policy, quantization included, and torch's "
            "and torchao's."
        ),
        measure=_gemm,
        takes=["shapes", "policies", "peers", "sweep"],
        shapes=[f"8192x{k}x{n}" for k, n in _LLAMA],
        tiny_shapes=["256x128x128"],
    ),
    _Benchmark(
        name="quantize",
        about="Times the kernels that quantize, in bytes a second.",
        measure=_quantize,
        takes=["shapes"],
        shapes=["16384x4096", "16384x14336"],
        tiny_shapes=["256x128"],
    ),
    _Benchmark(
        name="accumulation",
        about="Measures what split sums of FP8 GEMMs cost, and how much better they are.",
        measure=_accumulation,
        takes=["shapes"],
        shapes=["16384x2048x8192", "16384x4096x14336", "16384x8192x28672"],
        tiny_shapes=["256x128x384"],
    ),
    _Benchmark(
        name="attention",
        about="Times attention, forward and backward.",
        measure=_attention,
        takes=["shapes", "attention", "documents", "peers"],
        shapes=["4x4096x32x8x128"],
        tiny_shapes=["2x64x4x2x32"],
    ),
    _Benchmark(
        name="step",
        about=(
            "Times forward and backward of layers in each policy; with --config, whole training "
            "steps."
        ),
        measure=_step,
        takes=["shapes", "policies", "peers", "attention", "remat"],
        shapes=["d4096"],
        tiny_shapes=["tiny"],
        threads=4,  # a step fills much of the memory
    ),
    _Benchmark(
        name="start",
        about=(
            "Times a run from the start of its process to its third step, without and with "
            "compiled programs in the cache."
        ),
        measure=_start,
        needs=["config"],
        takes=["policies"],
    ),
    _Benchmark(
        name="mesh_compile",
        about="Times the compilation of a step on a mesh, cold and in a second process.",
        measure=_mesh_compile,
        needs=["config"],
        takes=["policies"],
    ),
    _Benchmark(
        name="telemetry",
        about="Times whole runs of a config with telemetry and without.",
        measure=_telemetry,
        needs=["config"],
    ),
    _Benchmark(
        name="decode",
        about="Times prefill and decoding of requests in each policy.",
        measure=_decode,
        takes=["shapes", "policies", "kv_cache"],
        shapes=[
            f"{model}_{batch}x1024x256"
            for model in ("llama_125m", "qwen2.5_1.5b", "llama3_8b")
            for batch in (1, 8, 64)
        ],
        tiny_shapes=["llama_tiny_2x16x4"],
        threads=4,  # each prepares weights of its own
    ),
    _Benchmark(
        name="gains",
        about="Times one linear in each kind of recipe and in BF16, at every shape.",
        measure=size_gains.measure_gains,
        shapes=size_gains.SHAPES,
        tiny_shapes=["64x128x128", "64x128x256", "64x256x256"],
    ),
)


# `step` runs this one if --config is given.
_TRAINING = _Benchmark(
    name="training",
    about="Times whole training steps of a config.",
    measure=_training,
    takes=["policies", "config", "figure", "devices", "documents", "settings"],
    threads=1,  # all programs share one state
)


def main(arguments: Sequence[str]) -> None:
    benchmark = subcommands.choose(_COMMANDS, arguments)
    operators.share_device()
    xla.set_compilation_cache()
    if benchmark.name == "step" and flags.FLAGS["config"].present:
        benchmark = _TRAINING
    subcommands.check_flags(benchmark, (*_COMMANDS, _TRAINING))
    timed = functools.partial(
        timing.time_in_turns,
        rounds=_ROUNDS.value,
        seconds=_SECONDS.value,
        threads=benchmark.threads,
    )
    default = benchmark.tiny_shapes if _TINY.value else benchmark.shapes
    report = benchmark.measure(_SHAPES.value or default, timed)
    words = shlex.join(["python", "-m", "experiments.bench", *sys.argv[1:]])
    print(report.section(words))
    if _OUTPUT.value:
        _write(benchmark.name, report, words)


def _write(name: str, report: Report, words: str) -> None:
    """Writes the report's section and figures; for `gains`, also the times by size."""
    device = hardware.device_kind().split()[-1].lower()
    page = _NAME.value or f"{device}_{datetime.date.today():%Y_%m}"
    write(Path(_OUTPUT.value, page), _SECTION.value or name, report, words)
    if name == "gains":
        size_gains.write(Path(_OUTPUT.value, f"{device}_gains.json"), report, words)


def _shown(benchmark: _Benchmark) -> _Benchmark:
    """Returns a command as its help has it: `step` takes what `_TRAINING` does, too."""
    if benchmark.name != "step":
        return benchmark
    return dataclasses.replace(benchmark, takes=[*benchmark.takes, *_TRAINING.takes])


if __name__ == "__main__":
    subcommands.show_help(list(map(_shown, _COMMANDS)), "python -m experiments.bench")
    command.run(main, config=RUN_KEYS)
