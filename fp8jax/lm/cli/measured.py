"""What several precisions measured on the same items, as a table and as JSON."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fp8jax.lm.inference.accuracy import paired_difference
from fp8jax.lm.inference.paired import Estimate, Measured, difference
from fp8jax.text_table import aligned

BASELINE = "bf16"
ACCURACY = "accuracy"  # measured on problems, each of which is right or wrong

Numbers = dict[tuple[str, str], Measured]  # by task or source of text, and what is measured


def table(measured: Mapping[str, Numbers]) -> str:
    """Returns a table with one line for each number and precision.

    Args:
      measured: the numbers of each precision; all have those of `BASELINE`, which is the first.
    """
    baseline = measured[BASELINE]
    lines = [["of", "measured", "precision", "value", f"minus {BASELINE}"]]
    if any(what == ACCURACY for _, what in baseline):
        lines[0].append("loses at most")
    for key, own in baseline.items():
        for precision, numbers in measured.items():
            line = [*key, precision, _text(numbers[key].estimate)]
            if precision != BASELINE:
                line.append(_text(difference(numbers[key], own), "+"))
                if key[1] == ACCURACY:
                    line.append(f"{_most_lost(own, numbers[key]):.4f}")
            lines.append(line)
    return "\n".join(aligned(lines))


def _most_lost(baseline: Measured, other: Measured) -> float:
    """Returns the upper 95% bound of the baseline's accuracy minus the other's."""
    assert baseline.items is not None and other.items is not None
    return paired_difference(baseline.items == 1, other.items == 1).upper


def write_json(path: Path, source: str, measured: Mapping[str, Numbers]) -> None:
    """Writes every number with its items, and what it differs from the baseline's; all or nothing.

    Args:
      source: what was measured, a workdir or `hf:DIR`.
      measured: the numbers of each precision, with `BASELINE`.

    Raises:
      OSError: the file cannot be written.
    """
    rows = []
    for precision, numbers in measured.items():
        for key, own in numbers.items():
            row: dict[str, Any] = {"of": key[0], "measured": key[1], "precision": precision}
            row |= _json_number(own.estimate) | {"exponential": own.exponential}
            if precision != BASELINE:
                row[f"minus_{BASELINE}"] = _json_number(difference(own, measured[BASELINE][key]))
                if key[1] == ACCURACY:
                    row["loses_at_most"] = _most_lost(measured[BASELINE][key], own)
            row |= {"items": _json_items(own.items), "weights": _json_items(own.weights)}
            rows.append(row)
    text = json.dumps({"source": source, "baseline": BASELINE, "numbers": rows})
    half = path.with_name(path.name + ".tmp")
    half.write_text(text + "\n", encoding="utf-8")
    os.replace(half, path)


def _json_number(estimate: Estimate | None) -> dict[str, float | None]:
    """Returns value and error; None for what is unknown, since JSON has no NaN."""
    pairs = zip(("value", "error"), estimate or (math.nan, math.nan), strict=True)
    return {name: number if math.isfinite(number) else None for name, number in pairs}


def _json_items(items: np.ndarray | None) -> list[float] | None:
    """Returns the items; whole numbers, such as right and wrong, as integers."""
    if items is None:
        return None
    whole = np.array_equal(items, np.round(items))
    return (items.astype(np.int64) if whole else items).tolist()


def _text(estimate: Estimate | None, sign: str = "") -> str:
    """Returns "0.7500 ± 0.0217", with an error of two significant digits."""
    if estimate is None:
        return "?"
    value, error = estimate
    if not error > 0:  # zero, or unknown
        return f"{value:{sign}.5g}" + (" ± 0" if error == 0 else " ± ?")
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:{sign}.{digits}f} ± {error:.{digits}f}"
