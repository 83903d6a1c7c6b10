"""Reads the GEMMs of a compiled program from its optimized HLO text (`compiled.as_text()`).

An instruction is a GEMM if it is one of these:

    library call    __cublas$lt$matmul$f8, __cublas$lt$matmul, …; not cuDNN's attention
    dot             on CPUs and inside fusions; its kernel is the Triton or cuDNN fusion around it
    convolution     if it has a role's name: TPUs turn GEMMs into convolutions
    Pallas kernel   if it has a role's name: the other Pallas kernels cast, transpose or attend

The name of a role is RECIPE.ROLE. gemm/vjp.py puts it around each GEMM of a linear, and JAX keeps
it in the path that HLO stores as `op_name`:

    jit(step)/transpose(jvp(Transformer))/…/while/body/…/Block/mlp/up/fp8_delayed.dgrad/dot_general

A GEMM inside a loop counts once for each iteration, if HLO knows the number of iterations.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from fp8jax.numerics.module_paths import MODULES

ROLES = ("fwd", "dgrad", "wgrad")


UNNAMED = "(unattributed)"


_LIBRARY = re.compile(
    r"__cublas\$(gemm|lt\$.*)|__cudnn\$blockScaledDot|__op\$block_scaled_dot|__onednn\$matmul"
)


_PALLAS = (
    "mosaic_gpu_v2",
    "mosaic_gpu",
    "__gpu$xla.gpu.triton",
    "triton_kernel_call_ffi",
    "triton_kernel_call",
    "tpu_custom_call",
)


_CUBLAS_FP8 = "__cublas$lt$matmul$f8"


# These multiply the operands that HLO shows, but not necessarily in a matrix unit.
BARE = ("dot", "scaled-dot", "convolution")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemm:
    """One GEMM of a compiled program.

    Attributes:
      module: path of the linear, as policies match it. For a GEMM that is not a linear's, the path
        where it stands; UNNAMED if HLO has lost the path.
      role: one of ROLES; None if the GEMM does not belong to a linear.
      recipe: name of the recipe; None if the GEMM does not belong to a linear.
      merged: further modules whose GEMM XLA merged into this one.
      operands, result: dtypes by their HLO names, such as "f8e4m3fn" and "bf16".
      shape: (M, K, N) on one device, with batch axes counted in M; None if unknown.
      kernel: target of the library call or Pallas kernel, or the kind of the fusion, or the name of
        the bare instruction.
      count: calls in one run of the program; for a missing GEMM, how many calls are missing.
      trips: iterations of the loops around it. None if HLO does not know the number of iterations
        of one of them, which then counts as one.
      fp8: whether both operands have 8 or 4 bits and a matrix unit multiplies them.
      accumulation: how a GEMM of FP8 codes adds up its products, an entry of `ACCUMULATIONS`; None
        if HLO does not say. It does for cuBLAS and Triton, but not for Pallas kernels.
      scaled: whether cuBLAS multiplies the sums of an FP8 GEMM by a scale before it rounds them.
        False if both of its scales are the constant 1, so that scales are multiplied into the
        rounded result; None if the GEMM is not cuBLAS's FP8 GEMM.
      reason: why `fp8` is False although the recipe casts both operands, which accumulation runs
        instead of the recipe's, or that a scale is rounded; else None.
    """

    module: str
    role: str | None
    recipe: str | None
    operands: tuple[str, ...]
    result: str
    kernel: str
    count: int
    shape: tuple[int, int, int] | None = None
    trips: int | None = 1
    merged: tuple[str, ...] = ()
    fp8: bool = False
    accumulation: str | None = None
    scaled: bool | None = None
    reason: str | None = None

    @property
    def modules(self) -> tuple[str, ...]:
        """`module` and `merged`, in the order of MODULES."""
        return tuple(sorted((self.module, *self.merged), key=module_position))

    @property
    def name(self) -> str:
        """All modules in one name, such as layers/attention/q+k+v."""
        return "+".join([self.modules[0], *(m.rpartition("/")[2] for m in self.modules[1:])])

    @property
    def precision(self) -> str:
        """The operands' dtypes, such as "f8e5m2 x f8e4m3fn", or one dtype if they are equal."""
        return " x ".join(dict.fromkeys(self.operands))

    @property
    def runs(self) -> str:
        """The kernel, its accumulation and where scales are multiplied, if known, such as
        "__cublas$lt$matmul$f8, fast, scaled after"."""
        after = "scaled after" if self.scaled is False else None
        return ", ".join(filter(None, (self.kernel, self.accumulation, after)))


def module_position(path: str) -> int:
    """Returns the index of a path in MODULES; unknown paths come last."""
    return MODULES.index(path) if path in MODULES else len(MODULES)


def parse_gemms(text: str) -> Iterator[Gemm]:
    """Yields every GEMM of an HLO program, with `merged`, `fp8` and `reason` not filled in yet."""
    program = HloProgram(text)
    for computation, body in program.computations.items():
        for right in body.values():
            if "dot(" in right or "custom-call" in right or "convolution(" in right:
                gemm = _parse_gemm(program, computation, right)
                if gemm is not None:
                    yield gemm


# HLO text -----------------------------------------------------------------------------------------

_HEADER = re.compile(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$")


# The type stands before the opcode, and contains no blank followed by a word and a parenthesis.
_OPCODE = re.compile(r" ([a-z][a-z0-9-]*)\(([^)]*)\)")


# What a Pallas kernel ends with: hundreds of kilobytes of its own code.
_KERNEL = ", backend_config={kernel_hash"


_TYPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")


_CALLED = re.compile(r"(?:calls|body|to_apply|\w+_computations?)=\{?((?:%[\w.-]+(?:, )?)+)")


_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


_KIND = re.compile(r'"kind":"(__[^"]+)"')


_OP_NAME = re.compile(r'op_name="([^"]*)"')


_TARGET = re.compile(r'custom_call_target="([^"]*)"')


_PRECISION = re.compile(r'"operand_precision":\[([^\]]*)\]')


_CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[=:][\[{]([^\]}]*)')


# Parts of an `op_name` that are not modules: JAX's names for its own control flow.
_CONTROL = {
    "while",
    "body",
    "cond",
    "scan",
    "checkpoint",
    "rematted_computation",
    "remat",
    "closed_call",
    "core_call",
    "eval_jaxpr",
    "pjit",
    "shard_map",
    "custom_vjp_call",
    "custom_jvp_call",
    "branch_0_fun",
    "branch_1_fun",
}


class _Call(NamedTuple):
    """One place where a computation is called.

    `trips` is the number of iterations if the computation is a loop's body: None if unknown; 1 for
    other calls. `kind` is the kind of a fusion that is a kernel of its own, else "".
    """

    caller: str
    trips: int | None
    kind: str


@dataclasses.dataclass(frozen=True)
class _Runs:
    """How often a computation runs in all, and the iterations of the loops around it.

    `trips` is None if HLO does not know the iterations of one of these loops. `count` then counts
    that loop as one iteration.
    """

    count: int
    trips: int | None


class HloProgram:
    """HLO text: the instructions by computation and name, and the calls between computations."""

    def __init__(self, text: str):
        # computation -> instruction -> the text after its " = "
        self.computations: dict[str, dict[str, str]] = {"": {}}
        # computation -> where it is called
        self._calls: dict[str, list[_Call]] = collections.defaultdict(list)
        self._runs: dict[str, _Runs] = {}
        name = ""
        for line in text.splitlines():
            if line.startswith(" "):
                left, _, right = line.partition(" = ")
                right, _, _ = right.partition(_KERNEL)
                self.computations[name][left.strip().removeprefix("ROOT ").lstrip("%")] = right
                if "=%" in right or "computations={" in right:
                    self._add_calls(name, right)
            elif header := _HEADER.match(line):
                name = header[1]
                self.computations[name] = {}

    def _add_calls(self, caller: str, right: str) -> None:
        """Records which computations an instruction of `caller` calls."""
        trips: int | None = 1
        if "body=%" in right:
            known = _TRIPS.search(right)
            trips = int(known[1]) if known else None
        kind = _KIND.search(right)
        for names in _CALLED.findall(right):
            for callee in re.findall(r"%([\w.-]+)", names):
                self._calls[callee].append(_Call(caller, trips, kind[1] if kind else ""))

    def runs(self, computation: str) -> _Runs:
        """Returns how often a computation runs in one run of the program."""
        if computation not in self._runs:
            self._runs[computation] = self._count_runs(computation)
        return self._runs[computation]

    def _count_runs(self, computation: str) -> _Runs:
        calls = self._calls[computation]
        if not calls:  # the entry
            return _Runs(1, 1)
        count, trips, known = 0, 0, True
        for call in calls:
            outer = self.runs(call.caller)
            count += outer.count * (call.trips or 1)
            if outer.trips and call.trips:
                trips = max(trips, outer.trips * call.trips)
            else:
                known = False
        return _Runs(count, trips if known else None)

    def kernel(self, computation: str) -> str:
        """Returns the kind of the surrounding fusion that is a kernel of its own, or ""."""
        for call in self._calls[computation][:1]:
            return call.kind or self.kernel(call.caller)
        return ""

    def type_of(self, computation: str, name: str) -> tuple[str, list[int]]:
        """Returns dtype and dimensions of an instruction's result; "?" if it is not known."""
        body = self.computations[computation]
        return _parse_type(body[name]) if name in body else ("?", [])


def _parse_type(right: str) -> tuple[str, list[int]]:
    """Returns dtype and dimensions; for a tuple, those of its first element."""
    match = _TYPE.search(right)
    return (match[1], [int(n) for n in match[2].split(",") if n]) if match else ("?", [])


class _OpName(NamedTuple):
    """Module path, recipe and role in an `op_name`; the latter two are None without a role."""

    module: str
    recipe: str | None
    role: str | None


def parse_op_name(op_name: str) -> _OpName:
    parts = op_name.split("/")
    scopes = [i for i, part in enumerate(parts) if part.rpartition(".")[2] in ROLES]
    end = scopes[-1] if scopes else len(parts) - 1  # the last part is the operation
    # Transformations contain parentheses, methods a dot. lm/model/layer.py calls a layer `Block`.
    modules = [part for part in parts[:end] if part.isidentifier() and part not in _CONTROL]
    path = "/".join("layers" if part == "Block" else part for part in modules) or UNNAMED
    if not scopes:
        return _OpName(path, None, None)
    recipe, _, role = parts[end].rpartition(".")
    return _OpName(path, recipe, role)


def _parse_gemm(program: HloProgram, computation: str, right: str) -> Gemm | None:
    """Returns the GEMM that an instruction computes, or None if it computes none."""
    instruction = _OPCODE.search(right)
    opcode = instruction[1].removesuffix("-start") if instruction else ""
    if instruction is None or opcode not in (*BARE, "custom-call"):
        return None
    op_name, target = _OP_NAME.search(right), _TARGET.search(right)
    name = parse_op_name(op_name[1] if op_name else "")
    kernel = target[1] if target else program.kernel(computation) or opcode
    if opcode == "custom-call" and not _LIBRARY.fullmatch(kernel):
        if kernel not in _PALLAS or not name.role:
            return None
    if opcode == "convolution" and not name.role:
        return None
    names = re.findall(r"%([\w.-]+)", instruction[2])[:2]
    operands = [program.type_of(computation, operand) for operand in names]
    result, dims = _parse_type(right)
    runs, dtypes = program.runs(computation), tuple(dtype for dtype, _ in operands)
    return Gemm(
        module=name.module,
        role=name.role,
        recipe=name.recipe,
        operands=dtypes,
        result=result,
        accumulation=_accumulation(right, kernel, dtypes),
        shape=_shape(right, operands[0][1] if operands else [], dims),
        kernel=kernel,
        count=runs.count,
        trips=runs.trips,
        scaled=_scaled(program, computation, instruction[2]) if kernel == _CUBLAS_FP8 else None,
    )


def _accumulation(right: str, kernel: str, operands: tuple[str, ...]) -> str | None:
    """Returns how a GEMM of FP8 codes adds up its products, None if HLO does not say.

    XLA turns cuBLAS's fast accumulation on where both operands have the precision DEFAULT. Its
    Triton GEMMs ignore the precision: they always keep the sum in the matrix unit.
    """
    if not all(dtype.startswith("f8") for dtype in operands):
        return None
    if kernel.startswith("__triton"):
        return "fast"
    precision = _PRECISION.search(right)
    if kernel != _CUBLAS_FP8 or precision is None:
        return None
    return "fast" if set(re.findall(r"\w+", precision[1])) == {"DEFAULT"} else "split"


def _scaled(program: HloProgram, computation: str, operands: str) -> bool:
    """Returns whether one of the scales of cuBLAS's FP8 GEMM is not the constant 1.

    Its operands are two matrices, a third one if it adds that to the result, and two scalars.
    """
    body = program.computations[computation]
    scalars = [body[name] for name in re.findall(r"%([\w.-]+)", operands)[2:] if name in body]
    return not all("constant(1)" in each for each in scalars if each.startswith("f32[] "))


def _shape(right: str, lhs: list[int], result: list[int]) -> tuple[int, int, int] | None:
    """Returns (M, K, N), or None if a side is unknown or empty.

    An instruction without dimension numbers has a result [..., M, N].
    """
    size, contracted = math.prod(lhs), _CONTRACTED.search(right)
    if not lhs or not result or 0 in (*lhs, *result):
        return None
    if contracted is None:
        M = math.prod(result[:-1])
        return M, size // M, result[-1]
    K = math.prod(lhs[int(axis)] for axis in re.findall(r"\d+", contracted[1]))
    return size // K, K, math.prod(result) * K // size
