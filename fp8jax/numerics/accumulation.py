"""How FP8 GEMMs add up their products: an option behind the name of a recipe or policy.

    fp8_delayed:accumulation=split
    fp8_delayed:dgrad_accumulation=split,wgrad_accumulation=split    (as in TransformerEngine)

Hopper's matrix unit keeps about 14 bits of a sum of FP8 products (arXiv 2412.19437, 3.3.2).

    fast    One sum over the whole contracting axis stays in the matrix unit. This is the default.
    split   Sums over short pieces of the contracting axis leave the matrix unit and are added in
            float32.

The option says how much of the sum may be lost, not how it is rounded: `fast` allows what the
fastest kernel does, and a backend that sums in float32 runs both alike. Only FP8 GEMMs with scales
that are constant along the contracting axis have this choice. Where scales change along it, each
tile is scaled and added by itself; GEMMs in high precision sum in float32.
"""

from typing import NamedTuple

from fp8jax.lookup import unknown

ACCUMULATIONS = ("fast", "split")


class Accumulation(NamedTuple):
    """How each GEMM of a recipe adds up its FP8 products.

    "fast" leaves the sum in the matrix unit, which keeps about 14 bits of it on Hopper (arXiv
    2412.19437, 3.3.2). "split" adds up short pieces in float32. A `Recipe` checks the names.

    Attributes:
      fwd, dgrad, wgrad: "fast" or "split" for each GEMM.

    Example:
      >>> recipe = fp8jax.RECIPES["fp8_current"]
      >>> dataclasses.replace(recipe, accumulation=fp8jax.Accumulation(wgrad="split")).accumulation
      Accumulation(fwd='fast', dgrad='fast', wgrad='split')
      >>> recipe.with_accumulation("split", ("dgrad", "wgrad")).accumulation
      Accumulation(fwd='fast', dgrad='split', wgrad='split')
    """

    fwd: str = "fast"
    dgrad: str = "fast"
    wgrad: str = "fast"


# Option -> the GEMMs that it sets, and its line in docs/recipes.md.
ACCUMULATION_OPTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "accumulation": (
        Accumulation._fields,
        "`split` adds up the FP8 products of all GEMMs in float32, not in the matrix unit (`fast`)",
    ),
    **{
        f"{gemm}_accumulation": ((gemm,), f"the same for {gemm} only")
        for gemm in Accumulation._fields
    },
}


def parse_accumulation(text: str) -> str:
    """Returns `text`, an entry of `ACCUMULATIONS`; raises ValueError for another."""
    if text not in ACCUMULATIONS:
        raise unknown("accumulation", text, ACCUMULATIONS)
    return text
