"""Casts and recipes in words: what `repr` and `table()` of recipe.py and policy.py print."""

from typing import Any

from fp8jax.numerics.accumulation import Accumulation
from fp8jax.numerics.scales import SCALES, ScaleRule
from fp8jax.text_table import aligned

HEADER = ("cast", "format", "tile", "scale", "timing", "rounding", "Hadamard")


def scale_name(rule: ScaleRule) -> str:
    """Returns the rule's key in `SCALES`, or the rule as it is written."""
    return next((name for name, known in SCALES.items() if known == rule), repr(rule))


def timing_name(cast: Any) -> str:
    """Returns a cast's timing, with its history: "delayed, max of 16"."""
    return f"delayed, {cast.scale.amax} of {cast.history}" if cast.delayed else cast.timing


def tile_name(cast: Any) -> str:
    """Returns a cast's tile, and whether several weights share its scale: "tensor, shared"; or
    whether it tiles what the forward multiplied: "nv16, again"."""
    how = ", shared" if cast.shared_scale else ", again" if cast.requantizes else ""
    return f"{cast.tile}{how}"


def cast_words(cast: Any) -> str:
    """Returns a cast in a few words: "e4m3 tile128 fp32 current"."""
    words = [cast.format.name, tile_name(cast), scale_name(cast.rule), timing_name(cast)]
    if cast.rounding != "nearest":
        words.append(cast.rounding)
    if cast.hadamard > 1:
        words.append(f"H{hadamard_name(cast)}")
    return " ".join(words)


def hadamard_name(cast: Any) -> str:
    """Returns the size of a cast's transform, and whether it draws its signs: "32, drawn"."""
    return f"{cast.hadamard}, drawn" if cast.redrawn else str(cast.hadamard)


def recipe_words(casts: dict[str, Any], accumulation: Accumulation) -> str:
    """Returns a recipe in a line: its casts by name, equal ones once, and its split sums if any."""
    names: dict[Any, list[str]] = {}
    for name, cast in casts.items():
        names.setdefault(cast, []).append(name)
    if list(names) == [None]:
        return "high precision"
    parts = [
        f"{'+'.join(of)}: {'high precision' if cast is None else cast_words(cast)}"
        for cast, of in names.items()
    ]
    if split := split_gemms(accumulation):
        parts.append(f"accumulation: {split}")
    return "; ".join(parts)


def split_gemms(accumulation: Accumulation) -> str:
    """Returns which GEMMs split their sums: "dgrad+wgrad split"; "" if none does."""
    names = [name for name, how in accumulation._asdict().items() if how == "split"]
    return f"{'+'.join(names)} split" if names else ""


def recipe_rows(casts: dict[str, Any], accumulation: Accumulation) -> list[tuple[str, ...]]:
    """Returns one row of cells for each cast, under `HEADER`, and one for split sums if any."""
    rows: list[tuple[str, ...]] = []
    for name, cast in casts.items():
        if cast is None:
            rows.append((name, "high precision"))
            continue
        rows.append(
            (
                name,
                cast.format.name,
                tile_name(cast),
                scale_name(cast.rule),
                timing_name(cast),
                cast.rounding,
                "-" if cast.hadamard == 1 else hadamard_name(cast),
            )
        )
    if split := split_gemms(accumulation):
        rows.append(("accumulation", split))
    return rows


def table(rows: list[tuple[str, ...]], header: tuple[str, ...] = HEADER) -> str:
    """Returns rows of cells as a text table."""
    return "\n".join(aligned([header, *rows]))
