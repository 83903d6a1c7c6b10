"""The cost and the error of split sums of FP8 GEMMs (fp8jax/numerics/accumulation.py).

A shape M x K x N is a linear of M tokens, K inputs and N outputs. It has three GEMMs:

    fwd     y  [M, N]   contracts K   e4m3 by e4m3   bfloat16
    dgrad   dx [M, K]   contracts N   e5m2 by e4m3   bfloat16
    wgrad   dw [K, N]   contracts M   e4m3 by e5m2   float32

Operands are random and already quantized, with one scale for the tensor and the contracting axis
last, so that a row times one GEMM of cuBLAS and nothing else.

The error is the relative Frobenius norm of the difference to the products of the same codes in
float64, in a corner of the result. It is that of a result in float32, where it is not hidden behind
the rounding to bfloat16. Normal operands have sums around zero. Positive operands, the magnitudes
of normal numbers, have sums that grow with the contracting axis, which is the worst case. The
figures:

    accumulation_cost/GEMM        time of split over fast, geometric mean over the shapes
    accumulation_error/GEMM/HOW   error with normal operands, the largest of the shapes
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.bench.operators import NT, Limits, compiled, normal, sizes
from experiments.bench.report import Report, Row, mean_ratio
from experiments.bench.timing import Timer
from fp8jax.analysis.any_program import gemms
from fp8jax.gemm.backends.emulated import quantize_each
from fp8jax.gemm.backends.operands import CastRequest, QuantizedOperand
from fp8jax.gemm.backends.xla import matmul_xla
from fp8jax.numerics.accumulation import ACCUMULATIONS
from fp8jax.numerics.recipe import Cast
from fp8jax.numerics.recipes import RECIPES

CORNER = (128, 1024)  # rows and columns of the result whose error is measured


@functools.partial(jax.jit, static_argnums=1)
def _quantize(x: jax.Array, cast: Cast) -> QuantizedOperand:
    ((operand,), _) = quantize_each(x, (CastRequest(cast, -1, None, None),))
    return operand


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Gemm:
    """One GEMM of a linear: result [rows, columns] in `dtype`, and the casts of both operands."""

    rows: int
    columns: int
    contracted: int
    lhs: Cast
    rhs: Cast
    dtype: Any

    def sources(self, positive: bool = False) -> tuple[jax.Array, jax.Array]:
        """Returns the operands in bfloat16, with the contracting axis last."""
        pair = (normal(i, (n, self.contracted)) for i, n in enumerate((self.rows, self.columns)))
        left, right = map(jnp.abs, pair) if positive else pair
        return left, right

    def quantized(self, positive: bool = False) -> list[QuantizedOperand]:
        """Returns the quantized operands."""
        left, right = self.sources(positive)
        return [_quantize(x, cast) for x, cast in ((left, self.lhs), (right, self.rhs))]


def _gemms_of(m: int, k: int, n: int) -> dict[str, _Gemm]:
    e4m3, e5m2 = (getattr(RECIPES["fp8_current"], name) for name in ("fwd_x", "dgrad_g"))
    narrow, wide = jnp.bfloat16, jnp.float32
    return {
        "fwd": _Gemm(rows=m, columns=n, contracted=k, lhs=e4m3, rhs=e4m3, dtype=narrow),
        "dgrad": _Gemm(rows=m, columns=k, contracted=n, lhs=e5m2, rhs=e4m3, dtype=narrow),
        "wgrad": _Gemm(rows=k, columns=n, contracted=m, lhs=e4m3, rhs=e5m2, dtype=wide),
    }


def _multiply(
    operands: Sequence[QuantizedOperand], dtype: Any, how: str
) -> tuple[Callable[..., jax.Array], list[jax.Array]]:
    """Returns the GEMM of two quantized operands as a function of arrays, and these arrays."""
    leaves, tree = jax.tree.flatten(tuple(operands))

    def f(*leaves: jax.Array) -> jax.Array:
        a, b = jax.tree.unflatten(tree, leaves)
        return matmul_xla(a, b, dtype, how)

    return f, leaves


def _exact(a: QuantizedOperand, b: QuantizedOperand) -> np.ndarray:
    """Returns the corner of the product of two quantized operands, in float64."""
    left, right = (
        np.asarray(operand.q.values[:size]).astype(np.float64)
        * np.asarray(operand.q.float_scale(), np.float64)
        for operand, size in zip((a, b), CORNER, strict=True)
    )
    return left @ right.T


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sums:
    """How a compiled GEMM adds up its products, and how well.

    Attributes:
      shown: the accumulation that its HLO shows, "not shown" if it does not.
      error: relative Frobenius error with normal operands.
      positive: the same with positive operands.
    """

    shown: str = ""
    error: float = math.nan
    positive: float = math.nan

    def note(self) -> str:
        return f"{self.shown}; {self.error:.1e}, positive {self.positive:.1e}" if self.shown else ""


def _sums_of(gemm: _Gemm, how: str) -> _Sums:
    """Compiles the GEMM with a float32 result, and compares it with float64."""
    f, arrays = _multiply(gemm.quantized(), jnp.float32, how)
    program = jax.jit(f).lower(*arrays).compile()
    found = {g.accumulation for g in gemms(program)} - {None}
    error, positive = (_error(program, *gemm.quantized(positive)) for positive in (False, True))
    return _Sums(shown=", ".join(map(str, found)) or "not shown", error=error, positive=positive)


def _error(program: Callable[..., jax.Array], a: QuantizedOperand, b: QuantizedOperand) -> float:
    """Returns the relative Frobenius error of a compiled GEMM in the corner of the result.

    The corner is cut off outside of the program: XLA would compute nothing else.
    """
    y = program(*jax.tree.leaves((a, b)))
    corner, exact = np.asarray(y[: CORNER[0], : CORNER[1]], np.float64), _exact(a, b)
    return float(np.linalg.norm(corner - exact) / np.linalg.norm(exact))


def measure_accumulation(shapes: Sequence[str], timed: Timer, limits: Limits) -> Report:
    """Measures the GEMMs of linears in bfloat16, and in FP8 with fast and with split sums.

    Args:
      shapes: such as "16384x4096x14336", M x K x N.
      timed: times contestants.
      limits: the device's.
    """
    rows: list[Row] = []
    seconds: dict[tuple[str, str], list[float]] = {}
    errors: dict[tuple[str, str], list[float]] = {}
    for shape in shapes:
        for name, gemm in _gemms_of(*sizes(shape, "MxKxN")).items():
            found = _rows_of(f"{name} {shape}", gemm, timed, limits)
            for how, (row, error) in found.items():
                rows.append(row)
                seconds.setdefault((name, how), []).append(row.timing.seconds)
                errors.setdefault((name, how), []).append(error)
    names = dict.fromkeys(name for name, _ in seconds)
    figures = {
        f"accumulation_cost/{name}": mean_ratio(
            zip(seconds[name, "split"], seconds[name, "fast"], strict=True)
        )
        for name in names
    } | {
        f"accumulation_error/{name}/{how}": max(errors[name, how])
        for name in names
        for how in ACCUMULATIONS
    }
    return Report(
        title="Fast and split sums",
        rate="TFLOP/s",
        rows=rows,
        figures=figures,
        notes=[limits.note(), _LEGEND],
    )


_LEGEND = (
    "Notes: the accumulation that the compiled program shows; the relative error of a float32"
    " result against float64, with normal operands and with positive ones. Rounding a result to"
    " bfloat16 alone has an error of about 1.7e-3."
)


def _rows_of(case: str, gemm: _Gemm, timed: Timer, limits: Limits) -> dict[str, tuple[Row, float]]:
    """Returns for "bf16" and for each accumulation its row, and its error with normal operands."""
    quantized = gemm.quantized()
    plain = lambda a, b: lax.dot_general(a, b, NT, preferred_element_type=gemm.dtype)  # noqa: E731
    contestants = {"bf16": compiled(plain, *gemm.sources())}
    for how in ACCUMULATIONS:
        f, arrays = _multiply(quantized, gemm.dtype, how)
        contestants[how] = compiled(f, *arrays)
    found = timed(contestants)
    work = 2 * gemm.rows * gemm.columns * gemm.contracted
    result = {}
    for how, timing in found.items():
        sums = _Sums() if how == "bf16" or timing.reason else _sums_of(gemm, how)
        row = Row(
            case=case,
            name=how,
            timing=timing,
            work=work,
            note=sums.note(),
            limit=work / limits.matrix(how != "bf16"),
            baseline=found["bf16"].seconds,
        )
        result[how] = row, sums.error
    return result
