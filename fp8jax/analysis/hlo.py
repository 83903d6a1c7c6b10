"""TODO docstring."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

from fp8jax.model.config import MODULES

ROLES = ("fwd", "dgrad", "wgrad")


UNNAMED = "(unattributed)"


_LIBRARY = re.compile(
    r"__cublas\$(gemm|lt\$.*)|__cudnn\$blockScaledDot|__op\$block_scaled_dot|__onednn\$matmul"
)


_PALLAS = (
    "mosaic_gpu_v2", "mosaic_gpu", "__gpu$xla.gpu.triton", "triton_kernel_call_ffi",
    "triton_kernel_call", "tpu_custom_call",
)  # fmt: skip


# These run on the operands that they show, but not for certain in a matrix unit.
BARE = ("dot", "scaled-dot", "convolution")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemm:
    """One GEMM of a compiled program.

    Attributes:
      module: the path that policies see; for other products where they stand, UNNAMED if lost.
      product, recipe: one of PRODUCTS and a recipe's name; None if it is no product of a linear.
      merged: further modules that it multiplies for.
      operands, result: dtypes by their names in HLO: "f8e4m3fn", "bf16".
      shape: (M, K, N) on one device, batch axes being part of M; None if not known.
      kernel: the library's or kernel's target, the kind of the fusion, or the bare instruction.
      count: calls in a run of the program; of a missing product, those that it lacks.
      trips: turns of the loops around it; None where HLO does not know, and they count as one.
      fp8: both operands have 8 or 4 bits, and a matrix unit multiplies them.
      reason: why not, where its recipe casts both; else None.
    """

    module: str
    product: str | None
    recipe: str | None
    operands: tuple[str, ...]
    result: str
    kernel: str
    count: int
    shape: tuple[int, int, int] | None = None
    trips: int | None = 1
    merged: tuple[str, ...] = ()
    fp8: bool = False
    reason: str | None = None

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(sorted((self.module, *self.merged), key=module_position))

    @property
    def name(self) -> str:
        """Such as layers/attention/q+k+v."""
        return "+".join([self.modules[0], *(m.rpartition("/")[2] for m in self.modules[1:])])

    @property
    def precision(self) -> str:
        return " x ".join(dict.fromkeys(self.operands))


def module_position(path: str) -> int:
    return MODULES.index(path) if path in MODULES else len(MODULES)


# Text ---------------------------------------------------------------------------------------------

_HEADER = re.compile(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$")


# Types stand before the opcode; in them no word follows a blank and precedes a parenthesis.
_OPCODE = re.compile(r" ([a-z][a-z0-9-]*)\(([^)]*)\)")


_TYPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")


_CALLED = re.compile(r"(?:calls|body|to_apply|\w+_computations?)=\{?((?:%[\w.-]+(?:, )?)+)")


_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


_KIND = re.compile(r'"kind":"(__[^"]+)"')


_OP_NAME = re.compile(r'op_name="([^"]*)"')


_TARGET = re.compile(r'custom_call_target="([^"]*)"')


_CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[=:][\[{]([^\]}]*)')


# Parts of an `op_name` that are not modules: what JAX calls its own control flow.
_CONTROL = {
    "while", "body", "cond", "scan", "checkpoint", "rematted_computation", "remat", "closed_call",
    "core_call", "eval_jaxpr", "pjit", "shard_map", "custom_vjp_call", "custom_jvp_call",
    "branch_0_fun", "branch_1_fun",
}  # fmt: skip


class _HloProgram:
    """HLO text: instructions by computation and name, and which computation calls which."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, str]] = {"": {}}  # name -> what follows its " = "
        # computation -> (caller, turns if it is a loop's, kind if it is a kernel of its own)
        self._calls: dict[str, list[tuple[str, int | None, str]]] = collections.defaultdict(list)
        self._runs: dict[str, tuple[int, int | None]] = {}
        name = ""
        for line in text.splitlines():
            if line.startswith(" "):
                left, _, right = line.partition(" = ")
                self.computations[name][left.strip().removeprefix("ROOT ").lstrip("%")] = right
                if "=%" in right or "computations={" in right:
                    self._note_calls(name, right)
            elif header := _HEADER.match(line):
                name = header[1]
                self.computations[name] = {}

    def _note_calls(self, caller: str, right: str) -> None:
        known, kind = _TRIPS.search(right), _KIND.search(right)
        trips = 1 if "body=%" not in right else int(known[1]) if known else None
        for names in _CALLED.findall(right):
            for callee in re.findall(r"%([\w.-]+)", names):
                self._calls[callee].append((caller, trips, kind[1] if kind else ""))

    def runs(self, computation: str) -> tuple[int, int | None]:
        """How often it runs in all, and the turns of the loops around it."""
        if computation not in self._runs:
            calls = [(*self.runs(caller), trips) for caller, trips, _ in self._calls[computation]]
            count = sum(outer * (trips or 1) for outer, _, trips in calls)
            turns = [(outer or 0) * (trips or 0) for _, outer, trips in calls] or [1]
            self._runs[computation] = (count if calls else 1, max(turns) if all(turns) else None)
        return self._runs[computation]

    def kernel(self, computation: str) -> str:
        """The kind of the fusion around it that is a kernel of its own, or "" for none."""
        for caller, _, kind in self._calls[computation][:1]:
            return kind or self.kernel(caller)
        return ""

    def type_of(self, computation: str, name: str) -> tuple[str, list[int]]:
        body = self.computations[computation]
        return _parse_type(body[name]) if name in body else ("?", [])


def _parse_type(right: str) -> tuple[str, list[int]]:
    """dtype and dimensions, of a tuple those of its first part."""
    found = _TYPE.search(right)
    return (found[1], [int(n) for n in found[2].split(",") if n]) if found else ("?", [])


def _parse_name(op_name: str) -> tuple[str, str | None, str | None]:
    """(module, recipe, product)."""
    parts = op_name.split("/")
    scopes = [i for i, part in enumerate(parts) if part.rpartition(".")[2] in ROLES]
    end = scopes[-1] if scopes else len(parts) - 1  # the last part is the operation
    # Transformations have parentheses, methods a dot; model/transformer.py calls a layer `Block`.
    modules = [part for part in parts[:end] if part.isidentifier() and part not in _CONTROL]
    path = "/".join("layers" if part == "Block" else part for part in modules) or UNNAMED
    recipe, _, product = parts[end].rpartition(".")
    return (path, recipe, product) if scopes else (path, None, None)


def _gemm(program: _HloProgram, computation: str, right: str) -> Gemm | None:
    """The GEMM that an instruction is, not yet judged; None for all others."""
    instruction = _OPCODE.search(right)
    opcode = instruction[1].removesuffix("-start") if instruction else ""
    if instruction is None or opcode not in (*BARE, "custom-call"):
        return None
    found, target = _OP_NAME.search(right), _TARGET.search(right)
    module, recipe, product = _parse_name(found[1] if found else "")
    kernel = target[1] if target else program.kernel(computation) or opcode
    if opcode == "custom-call" and not _LIBRARY.fullmatch(kernel):
        if kernel not in _PALLAS or not product:
            return None
    if opcode == "convolution" and not product:
        return None
    names = re.findall(r"%([\w.-]+)", instruction[2])[:2]
    operands = [program.type_of(computation, name) for name in names]
    result, dims = _parse_type(right)
    count, trips = program.runs(computation)
    return Gemm(
        module=module, product=product, recipe=recipe, operands=tuple(d for d, _ in operands),
        result=result, shape=_shape(right, operands[0][1] if operands else [], dims),
        kernel=kernel, count=count, trips=trips,
    )  # fmt: skip


def _shape(right: str, lhs: list[int], result: list[int]) -> tuple[int, int, int] | None:
    """(M, K, N), from the dimension numbers or, without, taking the result for [..., M, N]."""
    size, contracted = math.prod(lhs), _CONTRACTED.search(right)
    if not lhs or not result or 0 in (*lhs, *result):
        return None
    if contracted is None:
        M = math.prod(result[:-1])
        return M, size // M, result[-1]
    K = math.prod(lhs[int(axis)] for axis in re.findall(r"\d+", contracted[1]))
    return size // K, K, math.prod(result) * K // size


def parse_gemms(text: str) -> Iterator[Gemm]:
    program = _HloProgram(text)
    for computation, body in program.computations.items():
        for right in body.values():
            if "dot(" in right or "custom-call" in right or "convolution(" in right:
                gemm = _gemm(program, computation, right)
                if gemm is not None:
                    yield gemm
