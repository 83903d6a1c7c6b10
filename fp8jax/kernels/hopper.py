"""Launching Pallas kernels on Hopper, and helpers for the memory and registers of their tiles.

The kernels are for compute capability 9.0: the tensor memory accelerator (TMA) copies tiles to
shared memory, and `wgmma` multiplies them from there. They are written in Pallas' Mosaic GPU, which
is experimental; jax 0.11 is the first version with all they use. requirements.py refuses older
versions and other devices with an error. The tests run the same kernels on CPUs, in Pallas'
interpreter (tests/support/interpreter.py).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fp8jax.kernels.kernel_text import remove_dump_names
from fp8jax.kernels.requirements import require
from fp8jax.numerics.formats import FORMATS, Format

remove_dump_names()

# Rows and columns of a tile. Also the number of elements that share a scale in block recipes.
BLOCK = 128


def launch(
    body: Callable[..., None],
    *operands: jax.Array,
    out: Any,
    approximate: bool = False,
    **grid: Any,
) -> Any:
    """Runs `body` as a Mosaic GPU kernel, with lane semantics: the kernel sets register layouts.

    Args:
      body: called with references to the operands, then to the results.
      *operands: the arrays.
      out: ShapeDtypeStructs of the results.
      approximate: use the hardware's exponential; its error is up to 2^-22 + |x| 2^-24.
      **grid: the arguments of `plgpu.kernel` that describe the grid.

    Raises:
      NotImplementedError: the kernels cannot run here.
    """
    require()
    params = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=approximate
    )
    return plgpu.kernel(body, out_type=out, compiler_params=params, interpret=None, **grid)(
        *operands
    )


def num_cores() -> int:
    """Returns the number of streaming multiprocessors (SMs), called cores in the kernels."""
    return jax.local_devices()[0].core_count


def swizzled(dtype: Any, columns: int) -> tuple[Any, ...]:
    """Returns the layout of a tile in shared memory whose rows have `columns` elements.

    It divides the tile into pieces of 8 rows with up to 128 bytes each, and permutes the 16-byte
    words in a piece. So neither reading a row nor reading a column has bank conflicts.
    """
    swizzle = plgpu.find_swizzle(columns * jnp.dtype(dtype).itemsize * 8)
    elements = swizzle // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, elements)), plgpu.SwizzleTransform(swizzle)


def scoped(**allocations: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that calls the function at once, with these allocations as keyword arguments."""
    return lambda body: pl.run_scoped(body, **allocations)


def pad_to_blocks(x: jax.Array) -> jax.Array:
    """Returns `x` [rows, columns] padded with zeros to multiples of `BLOCK`."""
    padding = [(0, -size % BLOCK) for size in x.shape]
    return jnp.pad(x, padding) if any(after for _, after in padding) else x


def stored(fmt: Format) -> jnp.dtype:
    """Returns the dtype in which kernels store codes: e4m3 for e2m1, of which it has all values."""
    return FORMATS["e4m3"].dtype if fmt.bits == 4 else fmt.dtype


def load(ref: Any, layout: Any, *, optimized: bool = True) -> jax.Array:
    """Loads a reference into registers.

    Args:
      ref: a reference to shared or global memory.
      layout: the register layout.
      optimized: False allows layouts whose loads have bank conflicts.
    """
    read: Any = plgpu.load
    return read(ref, layout=layout, optimized=optimized)


def saturated(x: jax.Array, limit: float) -> jax.Array:
    """Returns `x` for a conversion to float8 that must saturate at `limit`: `x` unchanged.

    PTX's conversions always saturate (cvt.rn.satfinite). An explicit minimum and maximum would be a
    sixth of the instructions of swiglu_quantize.py. The interpreter of the tests does not saturate:
    tests/support/interpreter.py replaces this function by a clip.
    """
    return x
