"""What a run would cost, without running it: parameters, FLOPs, bytes on disk and on each device.

Everything here works on shapes. `make_plan` compiles the training step for the devices that there
are and asks the compiled program for its work space; no array of the model's size exists at any
time, so that a laptop plans for eight devices that it has not (and for their CPU programs):

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m experiments.train \\
        --config=configs/llama3_8b.py --dry_run

Weights, optimizer state, histories and batch are exact, from shapes and shardings. The total is
what XLA allocates for a step: its arguments, its temporaries, and those results that do not take
an argument's place. XLA does not say what a temporary holds. At the end of the backward all
gradients are among them, as float32 and sharded like the weights; the rest is shown as activations
and work space.

Under a precision schedule these figures are the first stage's. The later ones differ in the total
and the histories: their totals are compiled too, and count for the verdict on what fits.
"""

import dataclasses
import math
import os
import textwrap
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from fp8jax.analysis.gemms import find_gemms, format_table
from fp8jax.data.sources import parse_sources
from fp8jax.linear.backends import choose_backend
from fp8jax.model.config import flops_per_token
from fp8jax.model.transformer import count_params
from fp8jax.numerics.recipe import HIGH_PRECISION
from fp8jax.training.run import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The figures of one run. Those in bytes a device are for the fullest moment of a step, in the
    first stage of the precision schedule.

    Attributes:
      model, policy: as the config names them.
      later: (finished steps when it begins, policy, what XLA allocates on each device for a step)
        of each later stage of the precision schedule.
      sources: names of the sources of text.
      backends: recipe -> the backend that multiplies for it, for recipes that quantise, of all
        stages.
      device_kind, devices, mesh: the vendor's name, how many, and mesh axis -> devices along it.
      parameters: embedding and head included.
      flops_per_token: of training: forward and backward.
      rows_per_step, seq_len, steps: as the config says.
      checkpoint_bytes: of the arrays of one checkpoint on disk, before compression.
      weights_bytes, optimizer_bytes, histories_bytes, batch_bytes: on each device, exact.
      gradients_bytes: on each device, all of them in float32.
      activations_bytes: on each device, what total_bytes has beyond the above; at least 0.
      total_bytes: on each device, what XLA allocates for a step, the larger one of two programs.
      first_step_bytes: the same of the first step's program, where that is a program of its own
        (a delayed policy seeds its histories); else None.
      initialise_bytes: on each device, what XLA allocates to make the state of step 0.
      capacity_bytes: what JAX may use of a device, None where the device does not say.
      compile_seconds: of these programs, from the compilation cache where it has them.
      gemms: a table of the GEMMs of a step and their precisions (analysis/gemms.py), for each
      stage.
      gains: what the size gate says of each stage that quantises (analysis/size_gate.py).
    """

    model: str
    policy: str
    later: tuple[tuple[int, str, int], ...]
    sources: tuple[str, ...]
    backends: dict[str, str]
    device_kind: str
    devices: int
    mesh: dict[str, int]
    parameters: int
    flops_per_token: int
    rows_per_step: int
    seq_len: int
    steps: int
    checkpoint_bytes: int
    weights_bytes: int
    optimizer_bytes: int
    histories_bytes: int
    batch_bytes: int
    gradients_bytes: int
    activations_bytes: int
    total_bytes: int
    first_step_bytes: int | None
    initialise_bytes: int
    capacity_bytes: int | None
    compile_seconds: float
    gemms: tuple[str, ...]
    gains: tuple[str, ...]

    @property
    def tokens_per_step(self) -> int:
        return self.rows_per_step * self.seq_len

    @property
    def tokens(self) -> int:
        """Of all steps; text that is read again counts again."""
        return self.steps * self.tokens_per_step

    @property
    def flops(self) -> int:
        """Of training, on all devices; validation not counted."""
        return self.tokens * self.flops_per_token

    @property
    def peak_bytes(self) -> int:
        """On each device, the most that any program of the run allocates."""
        later = (size for _, _, size in self.later)
        return max(self.total_bytes, self.initialise_bytes, *later)

    def text(self) -> str:
        """The report, several lines: label, value and unit, then memory in GiB and in bytes."""
        lines = [f"{label:<{_LABEL}}{value}" for label, value in self._facts()]
        lines += ["", f"{'memory of each device':<{_LABEL}}{'GiB':>12}{'bytes':>24}"]
        lines += [_memory_line(*item) for item in self._memory()]
        lines.append(_memory_line("total", self.total_bytes))
        notes = [textwrap.fill(note, 100) for note in self._notes()]
        return "\n".join([*lines, "", *notes, "", *self.gemms, *self.gains])

    def _facts(self) -> list[tuple[str, str]]:
        mesh = " x ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        backends = ", ".join(f"{recipe}: {name}" for recipe, name in self.backends.items())
        checkpoint = f"{self.checkpoint_bytes / 2**30:,.3f} GiB, {self.checkpoint_bytes:,} bytes"
        return [
            ("model", self.model),
            ("parameters", f"{self.parameters:,}"),
            ("text from", ", ".join(self.sources)),
            ("a step", f"{self.rows_per_step:,} rows of {self.seq_len:,} tokens"
                       f" = {self.tokens_per_step:,} tokens"),
            ("all steps", f"{self.steps:,} steps = {self.tokens:,} tokens"),
            ("training FLOPs", f"{self.flops_per_token:.3e} a token, {self.flops:.3e} in all"),
            ("precision", f"policy {self.policy}"),
            ("backend", backends or "any: nothing is quantised"),
            ("devices", f"{self.devices} x {self.device_kind}, as {mesh}"),
            ("a checkpoint", f"{checkpoint}, before compression"),
            ("compile time", f"{self.compile_seconds:.1f} s, less if cached"),
        ]  # fmt: skip

    def _memory(self) -> list[tuple[str, int]]:
        return [
            ("weights", self.weights_bytes),
            ("optimizer state", self.optimizer_bytes),
            ("FP8 histories", self.histories_bytes),
            ("batch", self.batch_bytes),
            ("gradients", self.gradients_bytes),
            ("activations and work space", self.activations_bytes),
        ]

    def _notes(self) -> Iterable[str]:
        yield "Activations and work space: what the compiled step allocates beyond the lines above."
        if sum(size for _, size in self._memory()) > self.total_bytes:
            yield (
                "The lines add up to more than the total: XLA does not hold all gradients at once."
            )
        if self.first_step_bytes is not None:
            yield (
                "The first step seeds the histories in a program of its own, compiled too:"
                f" {self.first_step_bytes / 2**30:,.3f} GiB. The total is the larger of the two."
            )
        for begin, policy, size in self.later:
            yield f"After step {begin:,} policy {policy}: {size / 2**30:,.3f} GiB a step."
        if self.device_kind == "cpu":
            yield (
                "This is a CPU, and its programs were compiled: on a GPU activations and work"
                " space differ, and with them the total. The other lines are the same."
            )
        if self.initialise_bytes > self.total_bytes:
            yield (
                "Making the state of step 0 takes more than a step:"
                f" {self.initialise_bytes / 2**30:,.3f} GiB, not needed where a run is resumed."
            )
        if self.capacity_bytes is None:
            return
        share = self.peak_bytes / self.capacity_bytes
        verdict = "It fits" if share <= 1 else "It does not fit"
        yield f"{verdict}: {share:.0%} of the {self.capacity_bytes / 2**30:,.3f} GiB JAX may use."


_LABEL = 30  # width of the first column


def _memory_line(label: str, size: int) -> str:
    return f"{'  ' + label:<{_LABEL}}{size / 2**30:>12,.3f}{size:>24,}"


# Figures ------------------------------------------------------------------------------------------


def make_plan(run: Run, config: ConfigDict) -> Plan:
    """The figures of `run`, which `build(config)` gave. Compiles the programs of training, of all
    stages; allocates no array, and looks up the files of the sources without reading them.

    Raises:
      ValueError: a source of text that is unknown or has no files.
    """
    sources = tuple(source.name for source in parse_sources(config.data))
    compiled, seconds = _compile(run, config, ["initialise", *training_programs(run)])
    totals = {name: program_bytes(program) for name, program in compiled.items()}
    batch = abstract_batch(run, config.batch_size, config.seq_len)
    parts = [run.state.params, run.state.opt_state, run.state.histories, batch]
    weights, optimizer, histories, inputs = map(device_bytes, parts)
    initialise = totals.pop("initialise")
    total = max(totals.values())
    later, gemms = [], [_gemms(run, compiled["step"])]
    for begin, stage in run.later:
        programs, more = _compile(stage, config, training_programs(stage))
        later.append((begin, stage.policy.name, max(map(program_bytes, programs.values()))))
        gemms.append(_gemms(stage, programs["step"]))
        seconds += more
    rest = total - (weights + optimizer + histories + inputs + weights)
    return Plan(
        model=config.model, policy=config.precision, later=tuple(later), sources=sources,
        backends=_backends(run),
        device_kind=run.mesh.devices.flat[0].device_kind, devices=run.mesh.devices.size,
        mesh=dict(run.mesh.shape), parameters=count_params(run.model.config),
        flops_per_token=flops_per_token(run.model.config, config.seq_len),
        rows_per_step=config.batch_size, seq_len=config.seq_len, steps=config.num_steps,
        checkpoint_bytes=sum(math.prod(leaf.shape) * leaf.dtype.itemsize
                             for leaf in jax.tree.leaves(run.state)),
        weights_bytes=weights, optimizer_bytes=optimizer, histories_bytes=histories,
        batch_bytes=inputs, gradients_bytes=weights, activations_bytes=max(rest, 0),
        total_bytes=total,
        first_step_bytes=totals["seed_step"] if "seed_step" in totals else None,
        initialise_bytes=initialise, capacity_bytes=_memory_stat(run, "bytes_limit"),
        compile_seconds=seconds, gemms=tuple(gemms),
        gains=tuple(stage.gains for stage in _stages(run) if stage.gains),
    )  # fmt: skip


def _gemms(stage: Run, program: Any) -> str:
    paths, backend = stage.model.config.linears, stage.model.backend
    found = find_gemms(program.as_text(), stage.policy, paths, backend=backend, high=stage.high)
    return f"GEMMs of a training step, policy {stage.policy.name}:\n{format_table(found)}"


def device_bytes(tree: Any) -> int:
    """Bytes of a tree of (abstract) sharded arrays on each device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def bytes_in_use(run: Run) -> int | None:
    """The most bytes that were in use on a device since the start; None where it does not say."""
    return _memory_stat(run, "peak_bytes_in_use")


def _memory_stat(run: Run, name: str) -> int | None:
    stats = [device.memory_stats() for device in run.mesh.local_devices]
    known = [stat[name] for stat in stats if stat is not None and name in stat]
    # The device that limits: the smallest capacity, the highest use.
    return None if not known else min(known) if name == "bytes_limit" else max(known)


def program_bytes(program: Any) -> int:
    """What XLA allocates on each device for one call of a compiled program, arguments included.

    Not `peak_memory_in_bytes`: XLA allocates all temporaries as one block, whose size exceeds what
    is alive in it at any time; and on CPUs that figure leaves them out.
    """
    memory = program.memory_analysis()
    allocated = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return allocated + memory.temp_size_in_bytes - memory.alias_size_in_bytes


def _stages(run: Run) -> list[Run]:
    return [run, *(stage for _, stage in run.later)]


def _backends(run: Run) -> dict[str, str]:
    paths = run.model.config.modules
    recipes = [stage.policy.recipe(path) for stage in _stages(run) for path in paths]
    return {
        recipe.name: choose_backend(run.model.backend, recipe).name
        for recipe in recipes
        if recipe.casts
    }


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


def _lower(run: Run, config: ConfigDict, name: str) -> Any:
    """The program in that field of `run`, traced for the shapes that the loop gives it."""
    if name == "initialise":
        return run.initialise.lower()  # type: ignore[attr-defined]  # build gives jitted functions
    micro = config.batch_size // config.grad_accum
    rows = micro if name == "eval_step" else config.batch_size
    with jax.set_mesh(run.mesh):
        return getattr(run, name).lower(run.state, abstract_batch(run, rows, config.seq_len))


def _compile(run: Run, config: ConfigDict, names: list[str]) -> tuple[dict[str, Any], float]:
    """The compiled programs by name, and the seconds that tracing and compiling took."""
    begin = time.perf_counter()
    compiled = {name: _lower(run, config, name).compile() for name in names}
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
    for number, stage in enumerate(_stages(run), start=1):
        prefix = "" if number == 1 else f"stage{number}_"
        for name in [*training_programs(stage), "eval_step"]:
            lowered = _lower(stage, config, name)
            texts = {"stablehlo": lowered.as_text(), "hlo": lowered.compile().as_text()}
            for kind, text in texts.items():
                written.append(folder / f"{prefix}{name}.{kind}.txt")
                written[-1].write_text(text, encoding="utf-8")
    return written


# Parameters ---------------------------------------------------------------------------------------


def parameter_table(run: Run) -> str:
    """One line a parameter: path, shape, dtype, mesh axes of its dimensions, bytes on each device,
    and the recipe of the linear that multiplies by it ("-" for biases, norms and look-ups), in each
    stage of the precision schedule."""
    begins = [f"after step {begin}" for begin, _ in run.later]
    rows = [("parameter", "shape", "dtype", "sharding", "bytes a device", "recipe", *begins)]
    for path, leaf in jax.tree_util.tree_leaves_with_path(run.state.params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        shape = "x".join(map(str, leaf.shape))
        sharding = str(leaf.sharding.spec)
        size = f"{device_bytes(leaf):,}"
        recipes = [_recipe_name(stage, name) for stage in _stages(run)]
        rows.append((name, shape, str(leaf.dtype), sharding, size, *recipes))
    sizes = f"{device_bytes(run.state.params):,}"
    rows.append(("total", "", "", "", sizes, *("" for _ in _stages(run))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if i == 4 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, *_exempt_notes(run)])


def _recipe_name(run: Run, parameter: str) -> str:
    module, _, leaf = parameter.rpartition("/")
    if run.model.config.tie_embeddings and parameter == "embedding":
        module, leaf = "lm_head", "kernel"  # multiplies by the embedding
    read_by_linear = leaf == "kernel" and module in run.model.config.modules
    return run.policy.recipe(module).name if read_by_linear else "-"


def _exempt_notes(run: Run) -> Iterable[str]:
    n_layers = run.model.config.n_layers
    for begin, stage in [(0, run), *run.later]:
        first, last = stage.policy.exempt(n_layers)
        if first + last:
            when = f"After step {begin:,}, of" if begin else "Of"
            yield (
                f"{when} the {n_layers} stacked layers, the first {first} and the last {last} run"
                f" in {HIGH_PRECISION.name}, whatever their recipe."
            )


# Flags --------------------------------------------------------------------------------------------


def parse_profile(text: str) -> tuple[int, int]:
    """The steps A to B to trace, of "A:B".

    Raises:
      ValueError: anything but two whole numbers with 1 <= A <= B.
    """
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise ValueError(f"profile={text!r}: give the first and last step as A:B, 1 <= A <= B")
    return int(first), int(last)
