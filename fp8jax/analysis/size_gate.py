"""The size gate: predicts which linears a recipe speeds up, and can leave the others in BF16.

A linear with K inputs and N outputs multiplies in proportion to M K N, where M is the number of
tokens on a device and in a microbatch. It quantizes in proportion to M K + K N + M N. So large
linears gain, and small ones lose: their casts and launches take longer than the matrix unit saves.
Only a measurement says where the border lies. The size gate takes it from a table measured on an
H200 (gains_table.py).

The prediction is for one linear alone. It ignores that linears share work (queries, keys and values
share one quantized x), and it ignores the time spent waiting for other devices.

By default the size gate only prints its prediction and changes nothing: the bits of a config must
not depend on the device, and a policy named fp8 must be fp8. `size_gate=True` leaves the linears
that are predicted to lose in BF16. Studies that compare precisions refuse it
(experiments/study/loss_curves.py).

Timing the linears at the start of each run was rejected: the numerics would depend on the noise of
a clock.
"""

import dataclasses
import textwrap
from collections.abc import Mapping
from typing import NamedTuple

from fp8jax.analysis.gains_table import Gain, Table, shipped_table
from fp8jax.device import hardware
from fp8jax.numerics.policy import Policy
from fp8jax.numerics.recipes import HIGH_PRECISION
from fp8jax.text_table import aligned

_DEVICES = ("H100", "H200")  # the same chip with different memory


# Linears whose inputs are sharded over the mesh axis `tensor`; others have their outputs sharded.
_SHARDED_INPUTS = ("layers/attention/o", "layers/mlp/down")


class Gated(NamedTuple):
    """The policy that a stage trains with, and what the table predicts, for people.

    Attributes:
      report: the gain of each linear; "" if the policy quantizes nothing.
      slower: the report's last line, which linears lose; "" if none does.
    """

    policy: Policy
    report: str
    slower: str


def size_gate(
    policy: Policy,
    linears: Mapping[str, tuple[int, int]],
    *,
    tokens: int,
    tensor: int,
    backend: str | None,
    leave: bool,
    table: Table | None = None,
) -> Gated:
    """Returns the policy; if `leave`, linears with a predicted gain below 1 stay in BF16.

    Args:
      policy: the policy of one stage. Recipes that the table does not have stay as they are.
      linears: the sizes [K, N] of each linear's kernel by its path: `ModelConfig.linears`.
      tokens: tokens on one device and in one microbatch.
      tensor: devices on the mesh axis that shards heads and hidden units.
      backend: the run's. The table holds only times of the default, None: the fastest backend.
      leave: whether linears that are predicted to lose stay in BF16, or are only reported.
      table: None for the shipped table.

    Raises:
      ValueError: `leave`, and the table is empty or was measured on another kind of device.
    """
    table = shipped_table() if table is None else table
    if leave:
        _require_usable(table)
    rows, losers = [], []
    for path, (k, n) in linears.items():
        recipe = policy.recipe(path)
        if not recipe.casts:
            continue
        k, n = (k // tensor, n) if path in _SHARDED_INPUTS else (k, n // tensor)
        gain = table.gain(recipe, (tokens, k, n)) if backend is None else None
        rows.append((path, recipe.name, f"{tokens} x {k} x {n}", _gain_text(gain)))
        if gain is not None and gain.value < 1:
            losers.append(path)
    if not rows:
        return Gated(policy, "", "")
    lines = [f"Gains over BF16, policy {policy.name}, of a linear alone on {table.device}:"]
    lines += [f"  {line}" for line in aligned(rows)]
    verdict = ""
    if leave:
        verdict = f"Left in BF16: {', '.join(losers) or 'none'}."
        rules = (*((path, HIGH_PRECISION) for path in losers), *policy.rules)
        policy = dataclasses.replace(policy, rules=rules, name=f"{policy.name} (gated)")
    elif losers:
        verdict = (
            f"Slower than BF16: {', '.join(losers)}. --config.size_gate=True leaves them in BF16."
        )
    return Gated(policy, "\n".join([*lines, *textwrap.wrap(verdict, 100)]), verdict)


def _gain_text(gain: Gain | None) -> str:
    if gain is None:
        return "not in the table"
    return f"{gain.value:.3f}x" + (", beyond the table: its edge" if gain.beyond else "")


def is_measured_here() -> bool:
    """Returns whether this process runs on the kind of chip that the shipped table is for."""
    return any(name in hardware.device().kind for name in _DEVICES)


def _require_usable(table: Table) -> None:
    """Raises ValueError if the table cannot decide for this device."""
    here = hardware.device().kind
    if not is_measured_here():
        raise ValueError(
            f"size_gate=True decides by times measured on {table.device}, which say nothing about"
            f" this device, {here}: leave it False"
        )
    if not table.gains:
        raise ValueError(
            "size_gate=True: h200_gains.json is empty, so that no gain is known: leave it False"
        )
