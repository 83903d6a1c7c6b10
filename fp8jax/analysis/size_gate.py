"""Which linears gain by a recipe at their size, predicted from a table measured on an H200.

A linear of K inputs and N outputs multiplies in proportion to M K N, M being the tokens of a device
and microbatch, and quantizes in proportion to M K + K N + M N. So large ones gain, and small ones
lose: their casts and launches take longer than the matrix unit saves. Where the border lies, only a
clock says. `h200_gains.json` has times in microseconds of one linear alone: forward, gradients of
input and weight, and the quantization of x and g from bfloat16 and of w from float32, by the
fastest backend, each beside BF16 in the same process (experiments/bench/size_gains.py measures it
anew).

Between the measured sizes the logarithm of a time is linear in the logarithms of M, K and N. Any
power law is met exactly, so both ends are: time in proportion to the work, and none but launches.
So is the gain t_bf16 / t, both times being of the same points. Beyond the table its edge counts,
which flatters what is smaller, and the print says so. A linear and its transpose do the same three
products with forward and input gradient exchanged: the table has K <= N only. It knows nothing of
neighbors (queries, keys and values share one quantized x) or of waiting for other devices.

A formula from the peak rates was rejected: it needs as many fitted constants as the table has
columns, and cannot know what a launch costs. Timing at the start of a run was rejected, too: its
numerics would hang on the noise of a clock.

By default nothing is changed, only printed: a config's bits must not depend on the device, and a
policy named fp8 must be fp8. `size_gate=True` leaves the losers in BF16; what compares precisions
refuses it (experiments/study/studies.py).
"""

import dataclasses
import textwrap
from typing import NamedTuple

from fp8jax.analysis.gains_table import Gain, Table, shipped_table
from fp8jax.device import hardware
from fp8jax.model.config import ModelConfig
from fp8jax.numerics.policy import Policy
from fp8jax.numerics.recipes import HIGH_PRECISION

_DEVICES = ("H100", "H200")  # the same chip, but for its memory


_CUTS_INPUTS = ("layers/attention/o", "layers/mlp/down")  # over `tensor` devices; others: outputs


# The gate -----------------------------------------------------------------------------------------


class Gated(NamedTuple):
    """What a stage trains, and for people what the table says of it, "" if nothing is quantized."""

    policy: Policy
    report: str


def size_gate(
    policy: Policy,
    config: ModelConfig,
    *,
    tokens: int,
    tensor: int,
    backend: str | None,
    leave: bool,
    table: Table | None = None,
) -> Gated:
    """The policy, with the linears that are predicted to gain less than 1 in BF16 if `leave`.

    Args:
      policy: of one stage; recipes that the table does not have are left alone.
      config: shapes of the model.
      tokens: of a device and microbatch.
      tensor: devices that share heads and hidden units.
      backend: the run's; the table has the fastest, which is None.
      leave: whether losers stay in BF16, or are only named.
      table: None for the one that is shipped.

    Raises:
      ValueError: `leave` on a device that the table is not of, or with an empty table.
    """
    table = shipped_table() if table is None else table
    if leave:
        _require(table)
    rows, losers = [], []
    for path, (k, n) in config.linears.items():
        recipe = policy.recipe(path)
        if not recipe.casts:
            continue
        k, n = (k // tensor, n) if path in _CUTS_INPUTS else (k, n // tensor)
        gain = table.gain(recipe, (tokens, k, n)) if backend is None else None
        rows.append((path, recipe.name, f"{tokens} x {k} x {n}", _said(gain)))
        if gain is not None and gain.value < 1:
            losers.append(path)
    if not rows:
        return Gated(policy, "")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"Gains over BF16, policy {policy.name}, of a linear alone on {table.device}:"]
    lines += ["  ".join(("", *map(str.ljust, row, widths))).rstrip() for row in rows]
    named, verdict = ", ".join(losers) or "none", ""
    if leave:
        verdict = f"Left in BF16: {named}."
        rules = (*((path, HIGH_PRECISION) for path in losers), *policy.rules)
        policy = dataclasses.replace(policy, rules=rules, name=f"{policy.name} (gated)")
    elif losers:
        verdict = f"Slower than BF16: {named}. --config.size_gate=True leaves them in BF16."
    return Gated(policy, "\n".join([*lines, *textwrap.wrap(verdict, 100)]))


def _said(gain: Gain | None) -> str:
    if gain is None:
        return "not in the table"
    return f"{gain.value:.3f}x" + (", beyond the table: its edge" if gain.beyond else "")


def is_measured_here() -> bool:
    """Whether this process runs on the chip that the shipped table is of."""
    return any(name in hardware.device().kind for name in _DEVICES)


def _require(table: Table) -> None:
    """Raises ValueError where the table cannot decide for this device."""
    here = hardware.device().kind
    if not is_measured_here():
        raise ValueError(
            f"size_gate=True decides by times of {table.device}, and this is {here}: they say"
            " nothing of it"
        )
    if not table.gains:
        raise ValueError("size_gate=True: the table h200_gains.json is empty, nothing was measured")
