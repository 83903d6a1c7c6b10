"""Linen modules with quantized GEMMs, and tools for their amax histories, for your own models."""

from fp8jax.linear.amax_history import HISTORIES, max_combining, to_max_combining
from fp8jax.linear.modules import Dense, Einsum, Fp8DotGeneral, together

__all__ = [
    "HISTORIES", "Dense", "Einsum", "Fp8DotGeneral", "max_combining", "to_max_combining",
    "together",
]  # fmt: skip
