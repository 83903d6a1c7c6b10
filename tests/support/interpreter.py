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
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fp8jax.kernels import (
    block_gemm,
    quantize,
    requirements,
    row_gemm,
)
from fp8jax.lm.flash import backward, forward, tiles

TOO_OLD = requirements.jax_too_old()
needs_pallas = pytest.mark.skipif(TOO_OLD is not None, reason=str(TOO_OLD))

PATIENCE = 90  # seconds; a call takes one or two


@contextlib.contextmanager
def allowed(cores: int):
    """Kernels are traced on any device, for one of so many cores."""
    with (
        mock.patch.object(requirements, "refuses", lambda device: None),
        mock.patch.object(block_gemm, "num_cores", lambda: cores),
        mock.patch.object(row_gemm, "num_cores", lambda: cores),
        # The interpreter does not get on with three multiplying warpgroups, nor with clusters.
        mock.patch.object(block_gemm, "_BY_BLOCK", block_gemm._BY_BLOCK[1:]),
        mock.patch.object(row_gemm, "TUNING", dataclasses.replace(row_gemm.TUNING, cluster=1)),
    ):
        yield


def _saturating():
    """Conversions to float8 as PTX has them; the interpreter's give NaN or infinity."""
    return mock.patch.object(quantize, "saturated", lambda x, limit: jnp.clip(x, -limit, limit))


class _Staged:
    """Products of registers by way of shared memory, since the interpreter has none of registers.

    Stands in for `scoped` of the attention kernels, which then allocate some more memory, and for
    the two functions of lm/flash/tiles.py.
    """

    def scoped(self, **allocations):
        shape = (tiles.GROUPS, tiles.ROWS, 128)

        def run(body):
            def with_memory(staged, **shared):
                self.memory = staged
                return body(**shared)

            staged = plgpu.SMEM(shape, jnp.bfloat16)
            return pl.run_scoped(with_memory, staged=staged, **allocations)

        return run

    def add_product(self, accumulator, left, right):
        staged = self.memory.at[jax.lax.axis_index("group"), :, pl.ds(0, left.shape[1])]
        staged[...] = left
        plgpu.commit_smem()
        plgpu.wgmma(accumulator, staged, right)

    def plus_product(self, y, left, right, meanwhile):
        def run(accumulator):
            self.add_product(accumulator, left, right)
            meanwhile()
            return accumulator[...]

        return y + pl.run_scoped(run, plgpu.ACC(y.shape, jnp.float32))


@contextlib.contextmanager
def _products_of_registers():
    staged = _Staged()
    with (
        mock.patch.multiple(
            tiles, add_product=staged.add_product, plus_product=staged.plus_product
        ),
        mock.patch.object(forward, "scoped", staged.scoped),
        mock.patch.object(backward, "scoped", staged.scoped),
    ):
        yield


@contextlib.contextmanager
def interpreting(cores: int = 1):
    """Kernels that are traced in this context run in the interpreter."""
    # A deadlock ends this process, which pytest-xdist reports as a failure of the test.
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    try:
        with (
            allowed(cores),
            _saturating(),
            _products_of_registers(),
            plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()),
        ):
            yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def interpret(f, *args, cores: int = 1):
    """f(*args) with its kernels in the interpreter."""
    with interpreting(cores):
        return jax.block_until_ready(f(*args))


def lower(f, *args) -> str:
    """f with such arguments (or shapes), lowered for an H200."""
    with allowed(cores=132):
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
