"""What a run would cost, without running it: parameters, FLOPs, bytes on disk and on each device.

Everything here works on shapes. `make_plan` compiles the training step for the devices of this
process and asks the compiled program for its memory. No array of the model's size exists at any
time, so a laptop can plan for eight devices (and for their CPU programs):

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m experiments.train \\
        --config=configs/llama3_8b.py --dry_run

Weights, optimizer state, histories and batch are exact, from shapes and shardings. The total is
what XLA allocates for a step: arguments, temporaries, and the results that do not reuse an
argument's memory. XLA does not say what a temporary holds. At the end of the backward pass all
gradients are among the temporaries, in float32 and sharded like the weights; the rest is shown as
activations and work space, which includes the float32 copies of bfloat16 master weights.

Under a precision schedule these figures are those of the first stage. Later stages differ in the
total and in the histories: their totals are compiled too, and count for the verdict on what fits.
"""

import dataclasses
import math
import textwrap
from collections.abc import Iterable
from typing import Any

import jax

from fp8jax.analysis.gemms import format_table
from fp8jax.device import hardware, xla
from fp8jax.lm.model.config import flops_per_token
from fp8jax.lm.model.transformer import count_params
from fp8jax.lm.sources import parse_sources
from fp8jax.lm.training.programs import (
    compile_programs,
    training_programs,
)
from fp8jax.lm.training.run import Run, Stage
from fp8jax.lm.training.step_memory import memory_by_kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The figures of one run. Those in bytes a device are for the fullest moment of a step, in the
    first stage of the precision schedule.

    Attributes:
      model, policy: as the config names them.
      later: (finished steps when it begins, policy, what XLA allocates on each device for a step)
        of each later stage of the precision schedule.
      sources: names of the sources of text.
      backends: recipe -> the backend that multiplies for it, for recipes that quantize, of all
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
      telemetry_bytes: the same of the program that measures every `telemetry.every`-th step, before
        that step runs; None without telemetry.
      initialize_bytes: on each device, what XLA allocates to make the state of step 0.
      capacity_bytes: what JAX may use of a device, None where the device does not say.
      compile_seconds: of these programs, from the compilation cache where it has them.
      gemms: a table of the GEMMs of a step and their precisions (analysis/gemms.py), for each
      stage.
      remat, unroll: what the backward recomputes, and layers in an iteration of their loop.
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
    telemetry_bytes: int | None
    initialize_bytes: int
    capacity_bytes: int | None
    compile_seconds: float
    gemms: tuple[str, ...]
    remat: str
    unroll: int

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
        return max(self.total_bytes, self.initialize_bytes, self.telemetry_bytes or 0, *later)

    def text(self) -> str:
        """The report, several lines: label, value and unit, then memory in GiB and in bytes."""
        lines = [f"{label:<{_LABEL}}{value}" for label, value in self._facts()]
        lines += ["", f"{'memory of each device':<{_LABEL}}{'GiB':>12}{'bytes':>24}"]
        lines += [_memory_line(*item) for item in self._memory()]
        lines.append(_memory_line("total", self.total_bytes))
        notes = [textwrap.fill(note, 100) for note in self._notes()]
        return "\n".join([*lines, "", *notes, "", *self.gemms])

    def _facts(self) -> list[tuple[str, str]]:
        mesh = " x ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        backends = ", ".join(f"{recipe}: {name}" for recipe, name in self.backends.items())
        checkpoint = f"{self.checkpoint_bytes / 2**30:,.3f} GiB, {self.checkpoint_bytes:,} bytes"
        return [
            ("model", self.model),
            ("parameters", f"{self.parameters:,}"),
            ("text from", ", ".join(self.sources)),
            (
                "a step",
                f"{self.rows_per_step:,} rows of {self.seq_len:,} tokens"
                f" = {self.tokens_per_step:,} tokens",
            ),
            ("all steps", f"{self.steps:,} steps = {self.tokens:,} tokens"),
            ("training FLOPs", f"{self.flops_per_token:.3e} a token, {self.flops:.3e} in all"),
            ("precision", f"policy {self.policy}"),
            ("layers", f"remat={self.remat}, unroll={self.unroll}"),
            ("backend", backends or "any: nothing is quantized"),
            ("devices", f"{self.devices} x {self.device_kind}, as {mesh}"),
            ("a checkpoint", f"{checkpoint}, before compression"),
            ("compile time", f"{self.compile_seconds:.1f} s, less if cached"),
        ]

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
        if self.telemetry_bytes is not None:
            yield (
                "Telemetry measures a step in a program of its own, before the step runs:"
                f" {self.telemetry_bytes / 2**30:,.3f} GiB."
            )
        for begin, policy, size in self.later:
            yield f"After step {begin:,} policy {policy}: {size / 2**30:,.3f} GiB a step."
        if self.device_kind == "cpu":
            yield (
                "This is a CPU, and its programs were compiled: on a GPU activations and work"
                " space differ, and with them the total. The other lines are the same."
            )
        if self.initialize_bytes > self.total_bytes:
            yield (
                "Making the state of step 0 takes more than a step:"
                f" {self.initialize_bytes / 2**30:,.3f} GiB, not needed where a run is resumed."
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


def make_plan(run: Run) -> Plan:
    """The figures of `run`.

    Compiles the training programs of all stages; allocates no array, and looks for the files of
    the sources without reading them. Where they take too much memory, the figures are those of the
    fallback that training would go on with.

    Raises:
      ValueError: a source of text that is unknown or has no files.
    """
    settings = run.settings
    sources = tuple(source.name for source in parse_sources(settings.data))
    first, *later = run.stages
    measuring = ["telemetry"] if first.programs.telemetry is not None else []
    names = ["initialize", *training_programs(first), *measuring]
    compiled, seconds = compile_programs(run, first, names)
    if (smaller := run.smaller(compiled[name] for name in training_programs(first))) is not None:
        return make_plan(smaller)
    totals = {name: xla.program_bytes(program) for name, program in compiled.items()}
    initialize = totals.pop("initialize")
    telemetry = totals.pop("telemetry") if measuring else None
    total = max(totals.values())
    later_totals, gemms = [], [_gemms(first, compiled["step"])]
    for stage in later:
        programs, more = compile_programs(run, stage, training_programs(stage))
        if (smaller := run.smaller(programs.values())) is not None:
            return make_plan(smaller)
        most = max(map(xla.program_bytes, programs.values()))
        later_totals.append((stage.begins, stage.policy.name, most))
        gemms.append(_gemms(stage, programs["step"]))
        seconds += more
    memory = memory_by_kind(run, first, total)
    return Plan(
        model=settings.model, policy=settings.precision, later=tuple(later_totals), sources=sources,
        backends=_backends(run),
        device_kind=run.mesh.devices.flat[0].device_kind, devices=run.mesh.devices.size,
        mesh=dict(run.mesh.shape), parameters=count_params(first.model.config),
        flops_per_token=flops_per_token(first.model.config, settings.seq_len),
        rows_per_step=settings.batch_size, seq_len=settings.seq_len, steps=settings.num_steps,
        checkpoint_bytes=sum(math.prod(leaf.shape) * leaf.dtype.itemsize
                             for leaf in jax.tree.leaves(first.state)),
        weights_bytes=memory["weights"], optimizer_bytes=memory["optimizer"],
        histories_bytes=memory["histories"], batch_bytes=memory["batch"],
        gradients_bytes=memory["gradients"], activations_bytes=memory["activations"],
        total_bytes=total,
        first_step_bytes=totals["seed_step"] if "seed_step" in totals else None,
        telemetry_bytes=telemetry, initialize_bytes=initialize,
        capacity_bytes=hardware.memory_limit(run.mesh.local_devices),
        compile_seconds=seconds, gemms=tuple(gemms),
        remat=run.layers.remat, unroll=run.layers.unroll,
    )  # fmt: skip


def _gemms(stage: Stage, program: Any) -> str:
    table = format_table(stage.gemms(program.as_text()))
    return f"GEMMs of a training step, policy {stage.policy.name}:\n{table}"


def bytes_in_use(run: Run) -> int | None:
    """The most bytes in use on a device since the start; None where the device does not say."""
    stats = [device.memory_stats() for device in run.mesh.local_devices]
    name = "peak_bytes_in_use"
    return max((stat[name] for stat in stats if stat is not None and name in stat), default=None)


def _backends(run: Run) -> dict[str, str]:
    model = run.stages[0].model
    recipes = [stage.policy.recipe(path) for stage in run.stages for path in model.config.modules]
    return {recipe.name: model.backend_of(recipe) for recipe in recipes if recipe.casts}
