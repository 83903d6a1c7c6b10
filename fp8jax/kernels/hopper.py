"""What the kernels of this folder share: where Pallas' Mosaic GPU compiler runs them, and how.

They are for Hopper (compute capability 9.0): the tensor memory accelerator (TMA) copies tiles to
shared memory, and `wgmma` multiplies them from there. Pallas' Mosaic GPU is experimental: what the
kernels ask of it is there from jax 0.11 on. An older jax and any other device are refused with a
sentence. In tests the same kernels run on CPUs, in Pallas' interpreter (tests/kernels.py).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fp8jax.kernels.requirements import require

BLOCK = 128  # rows and columns of a tile; also the elements that share a scale in block recipes


def launch(
    body: Callable[..., None],
    *operands: jax.Array,
    out: Any,
    approximate: bool = False,
    **grid: Any,
) -> Any:
    """`plgpu.kernel` of `body`, called with the operands: references to them and to the results.

    Lane semantics: registers are laid out as the kernel says, not as the compiler infers.
    `approximate` takes the chip's own exponential, off by up to 2^-22 + |x| 2^-24.
    """
    require()
    params = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=approximate
    )
    return plgpu.kernel(body, out_type=out, compiler_params=params, interpret=None, **grid)(
        *operands
    )


def num_cores() -> int:
    """Streaming multiprocessors of the device, for kernels that start one block on each."""
    return jax.local_devices()[0].core_count


def swizzled(dtype: Any, columns: int) -> tuple[Any, ...]:
    """How a tile with rows of so many elements lies in shared memory: pieces of 8 rows of up to 128
    bytes whose 16-byte words are permuted, so that neither rows nor columns meet in one bank."""
    swizzle = plgpu.find_swizzle(columns * jnp.dtype(dtype).itemsize * 8)
    elements = swizzle // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, elements)), plgpu.SwizzleTransform(swizzle)


def scoped(**allocations: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: calls the function at once, with these allocations by name."""
    return lambda body: pl.run_scoped(body, **allocations)


def pad_to_blocks(x: jax.Array) -> jax.Array:
    """`x` [rows, columns] filled up with zeros to whole blocks."""
    padding = [(0, -size % BLOCK) for size in x.shape]
    return jnp.pad(x, padding) if any(after for _, after in padding) else x


def load(ref: Any, layout: Any, *, optimized: bool = True) -> jax.Array:
    """Registers of a reference's elements, laid out as said; not `optimized` allows layouts for
    which shared memory answers in several turns."""
    read: Any = plgpu.load
    return read(ref, layout=layout, optimized=optimized)


def saturated(x: jax.Array, limit: float) -> jax.Array:
    """What is converted to float8 next, and stays within its limits: x as it is, since PTX has only
    conversions that saturate (cvt.rn.satfinite). A minimum and a maximum before each would be a
    sixth of the instructions of swiglu_quantize.py. The interpreter of the tests does not
    saturate, and
    has them (tests/kernels.py)."""
    return x
