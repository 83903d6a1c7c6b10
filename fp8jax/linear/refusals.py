"""TODO docstring."""

from fp8jax.device.hardware import Device
from fp8jax.kernels import requirements
from fp8jax.numerics.recipe import Cast, Recipe
from fp8jax.numerics.scales import E8M0, Fp32, NvFp4, Pow2
from fp8jax.numerics.tiles import BLOCK128, ROW, TENSOR, TILE128


def can_fuse_swiglu(factor: Recipe, product: Recipe) -> bool:
    """Whether an operand x of `product`, made of results of `factor`, and the gradients of those
    can be quantized as they are made: by casts with scales that are known before, or of tiles."""
    (x, again), (g, other) = (product.fwd_x, product.wgrad_x), (factor.dgrad_g, factor.wgrad_g)
    if x is None or g is None or x != again or g != other:
        return False
    if x.tile == g.tile == TENSOR:
        return x.timing == g.timing == "delayed"
    return x.tile == TILE128 and (x.tile, x.format, x.scale) == (g.tile, g.format, g.scale)


def is_block_scaled(lhs: Cast, rhs: Cast) -> bool:
    """Whether this is MXFP8 or NVFP4 on both sides, the products that Blackwell has a unit for."""
    casts = (lhs, rhs)
    mxfp8 = all(c.tile.contract == 32 and isinstance(c.scale, E8M0) for c in casts)
    nvfp4 = all(c.tile.contract == 16 and isinstance(c.scale, NvFp4) for c in casts)
    return nvfp4 or (mxfp8 and all(c.format.bits == 8 for c in casts))


# The table ----------------------------------------------------------------------------------------


def emulated_refuses(recipe: Recipe, device: Device) -> str | None:
    return None


def xla_refuses(recipe: Recipe, device: Device) -> str | None:
    """Why `xla` cannot run a recipe on such a device, or None."""
    for name, (lhs, rhs) in recipe.gemms.items():
        if lhs is None and rhs is None:
            continue
        if lhs is None or rhs is None:
            return f"{name} has one quantized and one high-precision operand"
        if is_block_scaled(lhs, rhs):
            if not device.block_scaled:
                return f"{name} has a scale for every {lhs.tile.contract} numbers: no unit for that"
            continue
        for cast in (lhs, rhs):
            if cast.format.bits != 8:
                return f"{name} has an operand in {cast.format.name}: XLA has no such 4-bit product"
            if not cast.separable:
                return (
                    f"{name} has scales that change along the contraction ({cast.tile}): XLA "
                    "multiplies scales only after the product"
                )
        if lhs.format.name == rhs.format.name == "e5m2":
            return f"{name} multiplies e5m2 by e5m2: no GPU does"
    if recipe.casts and device.platform != "cpu" and not device.fp8:
        return f"{device.kind} has no FP8 matrix unit: XLA would widen to 16 bits"
    return None


# (lhs, rhs) tiles of the products in kernels/block_gemm.py.
_BLOCK_PRODUCTS = ((TILE128, BLOCK128), (TILE128, TILE128))


def pallas_refuses(recipe: Recipe, device: Device) -> str | None:
    """Why `pallas` cannot run a recipe on such a device, or None."""
    for name, (lhs, rhs) in recipe.gemms.items():
        if lhs is None or rhs is None:
            if lhs is None and rhs is None:
                continue
            return f"{name} has one quantized and one high-precision operand"
        casts = (lhs, rhs)
        if any(c.format.bits != 8 for c in casts):
            return f"{name} has an operand in {[c.format.name for c in casts]}: no such kernel"
        if any(c.rounding != "nearest" or c.hadamard > 1 for c in casts):
            return f"{name} rounds stochastically or rotates an operand: no such kernel"
        if {lhs.tile, rhs.tile} <= {TENSOR, ROW}:
            if lhs.format.name == rhs.format.name == "e5m2":
                return f"{name} multiplies e5m2 by e5m2: no GPU does"
            continue
        if (lhs.tile, rhs.tile) not in _BLOCK_PRODUCTS:
            return f"{name} multiplies tiles of {lhs.tile} by {rhs.tile}: no such kernel"
        if any(c.format.name != "e4m3" for c in casts):
            return f"{name} has scales for blocks: the kernel multiplies e4m3 by e4m3"
        if not all(isinstance(c.scale, Fp32 | Pow2) or c.scale == E8M0() for c in casts):
            return f"{name} has a scale rule that the kernel does not: {[c.scale for c in casts]}"
    return requirements.refuses(device) if recipe.casts else None
