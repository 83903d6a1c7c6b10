"""Measures what FP8 gains over BF16 by size: small linears lose, large ones gain.

`measure_gains` times one linear in each kind of recipe and in BF16, at every shape. `write` stores
the times in a file like docs/benchmarks/h200_gains.json: microseconds of forward, the gradients of
input and weight, and the quantization of x and g from bfloat16 and of w from float32, with the
fastest backend. A linear and its transpose run the same three GEMMs, so the shapes have K <= N.

All programs are compiled first, several at a time, so that no compilation runs beside a
measurement. They are compiled from shapes alone. Then the contestants of one shape after the other
are timed, on arrays that are freed before the next shape: the arrays of all large shapes together
would not fit into memory. A program runs a small linear several times, since one run may take less
time than the dispatch of a program.
"""

import concurrent.futures
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from experiments.bench.operators import linear, normal, sizes
from experiments.bench.report import Report, Row, versions
from experiments.bench.timing import Program, Timer, Timing
from fp8jax.device import hardware, xla

COLUMNS = ("recipe kind", "m", "k", "n", "bf16_us", "us")

KINDS = {  # kind -> the recipe that is measured
    "delayed": "fp8_delayed",
    "current": "fp8_current",
    "block": "fp8_block",
    "row": "fp8_rowwise",
}

_ROWS, _SIDES = (1024, 4096, 16384), (1024, 2048, 4096, 8192)
SHAPES = [f"{m}x{k}x{n}" for m in _ROWS for k in _SIDES for n in _SIDES if k <= n]

CONTESTANTS = ("bf16", *KINDS.values())


_THREADS = 8


_LEAST_WORK = 3e11  # FLOPs of a program; they take half a millisecond in BF16 on an H200


def _repeats(m: int, k: int, n: int) -> int:
    """Returns how often a program runs its linear."""
    return max(1, min(16, round(_LEAST_WORK / (6 * m * k * n))))


def _compile(policy: str, m: int, k: int, n: int) -> Any:
    """Returns a compiled program that runs a linear `_repeats` times, forward and backward."""
    once, histories = linear(policy)

    def products(*arrays):
        # Without the barrier, XLA would move the work out of the loop: it is the same each time.
        again = lambda _, out: once(*lax.optimization_barrier((arrays, out))[0])  # noqa: E731
        empty = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(once, *arrays))
        return lax.fori_loop(0, _repeats(m, k, n), again, empty)

    x, g = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, k), (m, n)))
    w = jax.ShapeDtypeStruct((k, n), jnp.float32)
    state = jax.eval_shape(histories, x, w, g)
    jitted = jax.jit(products, compiler_options=xla.compiler_options())
    return jitted.lower(x, w, g, state).compile()


def _time_shape(
    m: int, k: int, n: int, programs: Mapping[str, concurrent.futures.Future], timed: Timer
) -> dict[str, Timing]:
    """Returns policy -> timing of its program, on arrays that are freed at the end of the call."""
    x, w, g = normal(0, (m, k)), normal(1, (k, n), jnp.float32), normal(2, (m, n))

    def prepare(policy: str) -> Program:
        program, state = programs[policy].result(), linear(policy)[1](x, w, g)
        return Program(call=lambda: program(x, w, g, state), items=_repeats(m, k, n))

    return timed({policy: functools.partial(prepare, policy) for policy in programs})


def measure_gains(shapes: Sequence[str], timed: Timer) -> Report:
    """Measures linears forward and backward, with x and g in bfloat16 and w in float32.

    Args:
      shapes: such as "1024x2048x4096", M x K x N.
      timed: times contestants.
    """
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        compiling = {
            shape: {p: pool.submit(_compile, p, *sizes(shape, "MxKxN")) for p in CONTESTANTS}
            for shape in shapes
        }
    rows = []
    for shape, programs in compiling.items():
        m, k, n = sizes(shape, "MxKxN")
        found = _time_shape(m, k, n, programs, timed)
        rows += [
            Row(
                case=shape,
                name=name,
                timing=timing,
                work=6 * m * k * n,
                baseline=found["bf16"].seconds,
            )
            for name, timing in found.items()
        ]
    return Report(title="Linears by size", rate="TFLOP/s", rows=rows, figures={})


def write(path: Path, report: Report, command: str) -> None:
    """Writes the times of `measure_gains` to `path`, a row of `COLUMNS` for each kind and shape.

    A kind that failed at a shape is left out. The report has the reasons.
    """
    rows: list[str] = []
    for kind, policy in KINDS.items():
        of_kind = [row for row in report.rows if row.name == policy]
        # A contestant that failed has a time of NaN, which is not positive.
        if all(row.baseline > 0 and row.timing.seconds > 0 for row in of_kind):
            rows += [
                json.dumps(
                    [
                        kind,
                        *sizes(row.case, "MxKxN"),
                        *(round(1e6 * t, 2) for t in (row.baseline, row.timing.seconds)),
                    ]
                )
                for row in of_kind
            ]
    facts = {"device": hardware.device_kind(), "versions": versions(), "command": command}
    lines = [
        f" {json.dumps(k)}: {json.dumps(v)}" for k, v in (facts | {"columns": COLUMNS}).items()
    ]
    # One row a line, for readable diffs.
    lines.append(' "rows": [\n  ' + ",\n  ".join(rows) + "\n ]")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
