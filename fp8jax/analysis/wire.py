"""What the devices of a mesh send each other in one run of a compiled program, by kind and dtype.

XLA puts the collectives into a program when it partitions it. Whether FP8 saves anything between
devices is decided there: under FSDP a weight is all-gathered before each GEMM, as codes of one
byte, or wide, if what the GEMM reads was computed from the codes before they are gathered. So
`find_transfers` reads them from the optimized HLO.

What counts is the larger side of a collective on one device: what an all-gather gives, what a
reduce-scatter takes. With n devices (n - 1) / n of it cross the wire, twice in an all-reduce. XLA
combines collectives, and keeps one name for many arrays: their sizes tell whose they are.

XLA for CPUs widens FP8 arrays before it moves them, and its HLO says so.
"""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping

from fp8jax.analysis.hlo import HloProgram
from fp8jax.numerics.policy import Policy
from fp8jax.text_table import aligned

_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
_COLLECTIVE = re.compile(rf"^(.*?) ({_KINDS})(-start)?\(([^)]*)\)")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")


class WideGatherError(ValueError):
    """The weight of a linear whose recipe casts it to 8 bits or less is gathered in more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """One array of a collective.

    Attributes:
      kind: HLO's name of the collective, such as "all-gather".
      dtype: by its HLO name, such as "f8e4m3fn".
      shape: of its larger side, on one device.
      count: how often it runs in one run of the program. A loop whose iterations HLO does not know
        counts as one.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    count: int

    @property
    def bits(self) -> int:
        """Bits of an element; a boolean has a byte."""
        digits = _BITS.search(self.dtype)
        return int(digits[0]) if digits else 8

    @property
    def bytes(self) -> int:
        """Bytes of the larger side, of all runs."""
        return math.prod(self.shape) * self.bits * self.count // 8


def find_transfers(text: str) -> list[Transfer]:
    """Returns what the devices send each other, array by array.

    Args:
      text: `compiled.as_text()`.
    """
    return list(_transfers(HloProgram(text)))


def _transfers(program: HloProgram) -> Iterator[Transfer]:
    for computation, body in program.computations.items():
        for right in body.values():
            if found := _COLLECTIVE.match(right):
                results, kind, start, operands = found.groups()
                given = [
                    program.type_of(computation, each)
                    for each in re.findall(r"%([\w.-]+)", operands)
                ]
                taken = _types(results)
                if start:  # its result holds the operands, too, and may hold more after both
                    taken = taken[len(given) : 2 * len(given)] or taken
                count = program.runs(computation).count
                for dtype, shape in given if kind == "reduce-scatter" else taken:
                    yield Transfer(kind=kind, dtype=dtype, shape=tuple(shape), count=count)


def _types(text: str) -> list[tuple[str, list[int]]]:
    return [
        (dtype, [int(size) for size in sizes.split(",") if size])
        for dtype, sizes in _ARRAY.findall(text)
    ]


def require_fp8_gathers(
    transfers: Iterable[Transfer],
    policy: Policy,
    linears: Mapping[str, tuple[int, int]],
    n_layers: int,
    parts: int = 1,
) -> None:
    """Raises WideGatherError if a weight that is cast to 8 bits or less is gathered in more.

    A weight is recognized by its number of elements. An activation that has exactly as many cannot
    be told from it.

    Args:
      transfers: those of a training step.
      policy: the model's policy.
      linears: path -> (inputs, outputs), such as `ModelConfig.linears`.
      n_layers: layers that a gather of a stack has.
      parts: parts of a weight that a tensor axis leaves on different devices.

    Raises:
      ValueError: the policy leaves whole layers in BF16, whose gathers have the same sizes.
    """
    if any(policy.exempt(n_layers)):
        raise ValueError(
            f"require_fp8_gathers: policy {policy.name} leaves layers in bf16, which are gathered"
            " in 16 bits; the gathers of the others cannot be told from theirs"
        )
    sizes = {}
    for path, (inputs, outputs) in linears.items():
        recipe = policy.recipe(path)
        if recipe.fwd_w is not None and recipe.dgrad_w is not None:
            for layers, part in itertools.product((1, n_layers), (1, parts)):
                sizes[inputs * outputs * layers // part] = path
    wide = collections.Counter[str]()
    for each in transfers:
        if each.kind == "all-gather" and each.bits > 8 and math.prod(each.shape) in sizes:
            name = sizes[math.prod(each.shape)]
            wide[f"{name}, or what is as large: {each.dtype}{list(each.shape)}"] += each.count
    if wide:
        lines = [f"{each}, {count} times" for each, count in wide.items()]
        raise WideGatherError(
            "a step gathers weights in more than the 8 bits that their recipes cast them to:\n  "
            + "\n  ".join(lines)
        )


def format_transfers(transfers: Iterable[Transfer]) -> str:
    """Returns a text table: a line for each kind of collective and dtype, the most bytes first."""
    arrays, sizes = collections.Counter[tuple[str, str]](), collections.Counter[tuple[str, str]]()
    for each in transfers:
        arrays[each.kind, each.dtype] += each.count
        sizes[each.kind, each.dtype] += each.bytes
    rows = [("collective", "dtype", "arrays", "MiB")]
    for (kind, dtype), size in sizes.most_common():
        rows.append((kind, dtype, f"{arrays[kind, dtype]:,}", f"{size / 2**20:,.2f}"))
    return "\n".join(aligned(rows, right=(2, 3)))


def gathered(transfers: Iterable[Transfer]) -> str:
    """Returns what is gathered in words, such as "162.0 MiB of f8e4m3fn, 1.4 MiB of bf16"."""
    sizes = collections.Counter[str]()
    for each in transfers:
        if each.kind == "all-gather":
            sizes[each.dtype] += each.bytes
    parts = [f"{size / 2**20:,.1f} MiB of {dtype}" for dtype, size in sizes.most_common()]
    return ", ".join(parts) or "nothing"
