"""A few scalars of one sampled step, for curves: the worst casts of each group of layers.

The layers are cut into at most `GROUPS` groups of equal size. Names are such as
`telemetry/layers_0-5/x/underflow`.
"""

import math
from collections.abc import Sequence

from fp8jax.telemetry.rows import NO_LAYER, Row

GROUPS = 4


def layer_groups(layers: Sequence[int]) -> dict[int, str]:
    """Returns layer -> the name of its group; linears outside the stack are the group "other"."""
    stacked = sorted({layer for layer in layers if layer != NO_LAYER})
    size = max(1, math.ceil(len(stacked) / GROUPS))
    names: dict[int, str] = {}
    for begin in range(0, len(stacked), size):
        group = stacked[begin : begin + size]
        name = f"layers_{group[0]}" + (f"-{group[-1]}" if len(group) > 1 else "")
        names |= dict.fromkeys(group, name)
    return names | {NO_LAYER: "other"}


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Returns scalars by name, of the casts that ran: for each group of layers and each operand

    amax, underflow and saturation, the largest; sqnr_db and delay, the smallest. For "hidden", the
    output of SwiGLU, amax alone. Numbers that do not exist or are not finite are left out.
    """
    groups = layer_groups([row.layer for row in rows])
    scalars: dict[str, float] = {}
    for row in rows:
        if row.what_if:
            continue
        for name, worse in _WORSE.items():
            value = getattr(row, name)
            if value is None or not math.isfinite(value):
                continue
            tag = f"telemetry/{groups[row.layer]}/{row.operand}/{name}"
            scalars[tag] = worse(scalars[tag], value) if tag in scalars else value
    return scalars


_WORSE = {"amax": max, "underflow": max, "saturation": max, "sqnr_db": min, "delay": min}
