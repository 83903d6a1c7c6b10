"""Linen modules with quantized GEMMs, and tools for their amax histories, for your own models."""

from fp8jax.gemm.histories.amax_history import HISTORIES, max_combining, to_max_combining
from fp8jax.gemm.modules import RNG, Dense, Einsum, Fp8DotGeneral, keep_master, together
from fp8jax.gemm.probe import TELEMETRY

__all__ = [
    "HISTORIES",
    "RNG",
    "TELEMETRY",
    "Dense",
    "Einsum",
    "Fp8DotGeneral",
    "keep_master",
    "max_combining",
    "to_max_combining",
    "together",
]
