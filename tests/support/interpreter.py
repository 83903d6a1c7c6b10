"""The kernels of fp8jax/kernels/ without a GPU: Pallas' interpreter, or the compiler's first half.

The interpreter runs warpgroups as threads and knows barriers and asynchronous copies: what is read
before it was written is NaN, and a kernel that deadlocks on a GPU deadlocks here. The lowering to
CUDA finds errors of shapes and register layouts, which the interpreter does not look at.
"""

import contextlib
import dataclasses
import faulthandler
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from fp8jax.kernels import block_gemm, quantize, requirements, row_gemm

TOO_OLD = requirements.jax_too_old()
needs_pallas = pytest.mark.skipif(TOO_OLD is not None, reason=str(TOO_OLD))

PATIENCE = 90  # seconds; a call takes one or two


@contextlib.contextmanager
def allowed(cores: int):
    """Kernels are traced on any device, for one of so many cores."""
    with (
        mock.patch.object(requirements, "refuses", lambda device: None),
        mock.patch.object(block_gemm, "num_cores", lambda: cores),
        # The interpreter does not get on with three multiplying warpgroups, nor with clusters.
        mock.patch.object(block_gemm, "_BY_BLOCK", block_gemm._BY_BLOCK[1:]),
        mock.patch.object(row_gemm, "TUNING", dataclasses.replace(row_gemm.TUNING, cluster=1)),
    ):
        yield


def _saturating():
    """Conversions to float8 as PTX has them; the interpreter's give NaN or infinity."""
    return mock.patch.object(quantize, "saturated", lambda x, limit: jnp.clip(x, -limit, limit))


def interpret(f, *args, cores: int = 1):
    """f(*args) with its kernels in the interpreter."""
    # A deadlock ends this process, which pytest-xdist reports as a failure of the test.
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    try:
        with (
            allowed(cores),
            _saturating(),
            plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()),
        ):
            return jax.block_until_ready(f(*args))
    finally:
        faulthandler.cancel_dump_traceback_later()


def lower(f, *args) -> str:
    """f with such arguments (or shapes), lowered for an H200."""
    with allowed(cores=132):
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
