"""Telemetry: what FP8 and FP4 do to each tensor of each linear.

table = fp8jax.telemetry.measure(loss_of, variables, batch)        any linen or NNX model
table = fp8jax.telemetry.read(WORKDIR)                             a run with telemetry.every
print(*fp8jax.telemetry.out_of_line(table.rows), sep="\\n")           what to look at first
"""

from fp8jax.telemetry.files import read_rows as read
from fp8jax.telemetry.files import write_rows as write
from fp8jax.telemetry.measure import measure
from fp8jax.telemetry.outliers import Finding, out_of_line
from fp8jax.telemetry.rows import Row, Table

__all__ = [
    "Finding",
    "Row",
    "Table",
    "measure",
    "out_of_line",
    "read",
    "write",
]
