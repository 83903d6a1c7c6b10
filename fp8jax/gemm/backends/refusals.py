"""Which recipes each backend can run, on which device, and why not.

A refusal is the rest of a sentence that starts with the backend's name. It names the GEMM and what
the backend lacks.
"""

import dataclasses

import jax.numpy as jnp

from fp8jax.device.hardware import Device
from fp8jax.kernels import requirements
from fp8jax.numerics.recipe import Cast, GemmCasts, Recipe
from fp8jax.numerics.scales import E8M0, Fp32, Mse, NvFp4, Outer128, Pow2
from fp8jax.numerics.tiles import BLOCK128, ROW, TENSOR, TILE128

# The FP8 formats that matrix units multiply here. (AMD's multiply e4m3fnuz; none was ever tried.)
_NATIVE_FP8 = ("e4m3", "e5m2")
_FP8_NAMES = " and ".join(_NATIVE_FP8)
# The kernels take e2m1 in tiles of 128, too: its codes are e4m3 codes.
_KERNEL_FORMATS = (*_NATIVE_FP8, "e2m1")

# The (lhs, rhs) tiles that kernels/block_gemm.py multiplies.
_BLOCK_GEMM_TILES = ((TILE128, BLOCK128), (TILE128, TILE128))


def can_fuse_swiglu(gate_up: Recipe, down: Recipe) -> bool:
    """Whether the SwiGLU kernels can quantize h and the gradients of its factors.

    They compute these arrays tile by tile, so the scales must be known beforehand (delayed scaling)
    or belong to a tile. Both casts of each array must be the same, but the gradients may have tiles
    in dgrad and blocks in wgrad.

    Args:
      gate_up: the recipe of the gate and up projections, the factors of h.
      down: the recipe of the down projection, whose x is h.
    """
    x, g, wgrad_g = down.fwd_x, gate_up.dgrad_g, gate_up.wgrad_g
    if x is None or g is None or wgrad_g is None or x != down.wgrad_x:
        return False
    if wgrad_g.tile == BLOCK128 and g.tile == TILE128:
        wgrad_g = dataclasses.replace(wgrad_g, tile=TILE128)
    if g != wgrad_g:
        return False
    if x.tile == g.tile == TENSOR:
        return x.delayed and g.delayed
    alike = (x.tile, x.format, x.scale) == (g.tile, g.format, g.scale)
    return x.tile == TILE128 and alike and has_tile_kernel(x) and has_tile_kernel(g)


def has_tile_kernel(cast: Cast) -> bool:
    """Whether the kernels that quantize tiles and blocks of 128 do as this cast of such a tile."""
    return (
        (cast.rounding, cast.hadamard) == ("nearest", 1)
        and cast.format.name in _KERNEL_FORMATS
        and _has_kernel_rule(cast)
    )


def _has_kernel_rule(cast: Cast) -> bool:
    return isinstance(cast.rule, Fp32 | Pow2) or cast.rule == E8M0()


def is_block_scaled(lhs: Cast, rhs: Cast) -> bool:
    """Whether both operands are MXFP8 or both are NVFP4, which Blackwell multiplies natively."""
    casts = (lhs, rhs)
    mxfp8 = all(c.tile.contract == 32 and isinstance(c.rule, E8M0) for c in casts)
    # Outer128 has no E4M3 scales beside one scale for the tensor.
    nvfp4 = all(
        c.tile.contract == 16 and isinstance(c.rule, NvFp4) and not isinstance(c.rule, Outer128)
        for c in casts
    )
    return nvfp4 or (mxfp8 and all(c.format.name in _NATIVE_FP8 for c in casts))


def exact_in_bf16(lhs: Cast, rhs: Cast) -> bool:
    """Whether the scales of both operands change along the contracting axis and bfloat16 holds
    their numbers: then a BF16 GEMM is exact, and Hopper has none that is faster."""
    return all(not c.separable and c.exact_in(jnp.bfloat16) for c in (lhs, rhs))


def emulated_refuses(recipe: Recipe, device: Device) -> str | None:
    """Returns None: `emulated` runs every recipe on every device."""
    return None


def xla_refuses(recipe: Recipe, device: Device) -> str | None:
    """Returns why `xla` cannot run the recipe on the device, or None if it can."""
    for name, casts in recipe.gemms.items():
        reason = _xla_gemm_refuses(casts, device)
        if reason is not None:
            return f"{name} {reason}"
    if recipe.casts and device.platform != "cpu" and not device.fp8:
        return f"{device.kind} has no FP8 matrix unit: XLA would widen the operands to 16 bits"
    return None


def _xla_gemm_refuses(casts: GemmCasts, device: Device) -> str | None:
    lhs, rhs = casts
    if lhs is None and rhs is None:
        return None
    if lhs is None or rhs is None:
        return "has one quantized and one high-precision operand"
    if is_block_scaled(lhs, rhs):
        if device.block_scaled:
            return None
        return (
            f"has operands with one scale per {lhs.tile.contract} elements: only data-center"
            " Blackwell multiplies those"
        )
    for cast in (lhs, rhs):
        if cast.format.bits != 8:
            return (
                f"has an operand in {cast.format.name}: XLA has no GEMM for this"
                f" {cast.format.bits}-bit format"
            )
        if cast.format.name not in _NATIVE_FP8:
            return f"has an operand in {cast.format.name}: matrix units take {_FP8_NAMES}"
        if not cast.separable:
            return (
                f"has scales that change along the contracting axis ({cast.tile}): XLA applies "
                "scales only to the result"
            )
    if lhs.format.name == rhs.format.name == "e5m2":
        return "multiplies e5m2 by e5m2: no GPU does"
    return None


def pallas_refuses(recipe: Recipe, device: Device) -> str | None:
    """Returns why `pallas` cannot run the recipe on the device, or None if it can."""
    rotates = any(cast.hadamard > 1 for cast in recipe.casts)
    for name, casts in recipe.gemms.items():
        reason = _pallas_gemm_refuses(casts, getattr(recipe.accumulation, name), rotates)
        if reason is not None:
            return f"{name} {reason}"
    return requirements.refuses(device) if recipe.casts else None


def _pallas_gemm_refuses(casts: GemmCasts, accumulation: str, rotates: bool) -> str | None:
    lhs, rhs = casts
    if lhs is None and rhs is None:
        return None
    if lhs is None or rhs is None:
        # Beside another GEMM's Hadamard transform, which has a kernel: XLA's own compiles for
        # minutes. The product itself is the one of `emulated`.
        cast = lhs or rhs
        if rotates and cast is not None and exact_in_bf16(cast, cast):
            return None
        return "has one quantized and one high-precision operand"
    return None if exact_in_bf16(lhs, rhs) else kernels_refuse(lhs, rhs, accumulation)


def kernels_refuse(lhs: Cast, rhs: Cast, accumulation: str) -> str | None:
    """Returns why the FP8 kernels cannot multiply operands of these casts, or None if they can."""
    both = (lhs, rhs)
    formats = f"{lhs.format.name} by {rhs.format.name}"
    if any(c.format.name not in _KERNEL_FORMATS for c in both):
        return f"multiplies {formats}: the kernels take {_FP8_NAMES}"
    if any(isinstance(c.rule, Mse) for c in both):
        return "has scales of least squared error: the kernels take scales of amaxes"
    if any(c.rounding != "nearest" or c.hadamard > 1 for c in both):
        return "rounds stochastically or has a Hadamard transform: the kernels do neither"
    if {lhs.tile, rhs.tile} <= {TENSOR, ROW}:
        if any(c.format.bits == 4 for c in both):
            return f"multiplies {formats} with scales of rows: the kernels take {_FP8_NAMES}"
        if lhs.format.name == rhs.format.name == "e5m2":
            return "multiplies e5m2 by e5m2: no GPU does"
        if accumulation != "fast" and ROW in (lhs.tile, rhs.tile):
            return f"asks for {accumulation} accumulation: the kernel for scales of rows has none"
        return None
    if (lhs.tile, rhs.tile) not in _BLOCK_GEMM_TILES:
        return f"multiplies {lhs.tile} by {rhs.tile}: there is no kernel for these tiles"
    if any(c.format.name not in ("e4m3", "e2m1") for c in both):
        return "has one scale per tile: that kernel multiplies e4m3 and e2m1 only"
    if not all(map(_has_kernel_rule, both)):
        return f"uses scale rules that the kernel does not have: {[c.rule for c in both]}"
    return None
