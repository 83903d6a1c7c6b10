"""What to look at first: the tensors that are out of line, in words, the first one first.

A tensor is one operand of one linear in one layer. It is out of line in a sampled step if

    not finite      its amax is infinite or NaN
    saturating      its delayed scale is less than half of the current one, and clipping took its
                    SQNR below 20 dB, where rounding to E5M2 alone leaves some 25 and to E4M3 31
    jumped          its amax is more than 16 times its largest in earlier samples. A gradient must
                    have grown 16 times more than the median of its peers since: when attention
                    begins to learn, gradients of all its queries and keys grow by more than that
    apart           its amax is more than 32 times the median of its peers (a gradient: 256 times,
                    since those of the first layer are often 50 times larger), and farther from it,
                    in powers of two, than six times their spread (the scaled MAD). Its peers are
                    the same linear's in all layers, or with fewer than three layers all of the
                    operand
    noise           its SQNR is below 3 dB: its error has half the energy of the tensor
    noisier         its SQNR is 10 dB below the median of its peers

A tensor is reported once, in the first step in which it is out of line. Steps come in order; within
one, weights first, then activations from the first layer on, then gradients from the last layer on,
the order in which the step computes them. Weights do not depend on the batch. So where a weight is
out of line, activations and gradients that are so too in that step count as its consequences: they
are said to follow it, and are not reported.
"""

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from fp8jax.telemetry.rows import NO_LAYER, Row

_JUMP = 4.0  # in powers of two
_APART = {"w": 5.0, "x": 5.0, "g": 8.0}
_SPREADS, _MAD = 6.0, 1.4826
_HALF_BEHIND, _CLIPPED_DB = -1.0, 20.0
_NOISE_DB, _NOISIER_DB = 3.0, 10.0
_ENOUGH = 3  # peers, for a median that one of them does not move

Key = tuple[int, str, str]  # layer, linear, operand


@dataclasses.dataclass(frozen=True)
class Finding:
    """A tensor that is out of line, since `step`, and why; `str` says it in a sentence.

    Attributes:
      step, layer, linear, operand: which tensor, as in `Row`.
      why: the reason, in words.
      followers: how many other tensors are out of line in that step because of it.

    Example:
      >>> print(fp8jax.telemetry.Finding(
      ...     step=50, layer=2, linear="layers/mlp/down", operand="w",
      ...     why="its amax 250 is 1000 times its largest before", followers=3,
      ... ))
      step 50: w of layers/mlp/down in layer 2: its amax 250 is 1000 times its largest before;
      3 other tensors follow
    """

    step: int
    layer: int
    linear: str
    operand: str
    why: str
    followers: int = 0

    def __str__(self) -> str:
        where = f"{self.operand} of {self.linear}"
        where += "" if self.layer == NO_LAYER else f" in layer {self.layer}"
        since = f"step {self.step}: " if self.step else ""
        more = ""
        if self.followers:
            more = "; 1 other tensor follows"
            if self.followers > 1:
                more = f"; {self.followers} other tensors follow"
        return f"{since}{where}: {self.why}{more}"


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """The casts of one tensor in one step, the worst of each number."""

    place: int  # in the order of the step's forward pass
    amax: float
    saturation: float
    delay: float
    sqnr_db: float

    @property
    def log2(self) -> float:
        return math.log2(self.amax) if 0 < self.amax < math.inf else math.nan


def out_of_line(rows: Sequence[Row]) -> list[Finding]:
    """Returns the tensors that are out of line, the first one first; [] if none is.

    The guide of telemetry has the rules: amaxes that are not finite, jumped or far from those of
    the same linear in other layers, clipped values, and noise.

    Args:
      rows: of the steps of one run, or of one call of `measure`; what-if casts are left out.

    Returns:
      A `Finding` for each tensor. Tensors that follow a weight are counted, not listed.

    Example:
      >>> layer = nn.Sequential([fp8jax.nn.Dense(4, "fp8_current"), nn.relu])
      >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 8)))
      >>> loss = lambda variables, x: layer.apply(variables, x).mean()
      >>> rows = fp8jax.telemetry.measure(loss, variables, jnp.ones((2, 8))).rows
      >>> fp8jax.telemetry.out_of_line(rows)
      []
      >>> rows = fp8jax.telemetry.measure(loss, variables, jnp.full((2, 8), jnp.inf)).rows
      >>> print(fp8jax.telemetry.out_of_line(rows)[0])
      x of layers_0: its amax is inf
    """
    findings: list[Finding] = []
    known: set[Key] = set()
    past: dict[Key, float] = {}  # the largest log2 of its amax so far
    steps: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        if not row.what_if:
            steps[row.step].append(row)
    for step in sorted(steps):
        tensors = _tensors(steps[step])
        reasons = _reasons(tensors, past)
        new = [key for key in sorted(reasons, key=_order(tensors)) if key not in known]
        weights = [key for key in new if key[2] == "w"]
        named = weights or new
        for key in named:
            followers = len(new) - len(named) if weights and key == named[0] else 0
            findings.append(Finding(step, *key, reasons[key], followers))
        known |= set(new)
        for key, tensor in tensors.items():
            if not math.isnan(tensor.log2):
                past[key] = max(tensor.log2, past[key]) if key in past else tensor.log2
    return findings


def _tensors(rows: Sequence[Row]) -> dict[Key, _Tensor]:
    casts: dict[Key, list[Row]] = defaultdict(list)
    linears: dict[str, int] = {}
    for row in rows:
        if row.operand != "hidden":  # the same tensor as x of "down"
            casts[row.layer, row.linear, row.operand].append(row)
            linears.setdefault(row.linear, len(linears))

    def worst(pick: Callable[..., float], values: Sequence[float | None], none: float) -> float:
        return pick([v for v in values if v is not None and not math.isnan(v)], default=none)

    return {
        key: _Tensor(
            place=key[0] * len(linears) + linears[key[1]],
            amax=each[0].amax if math.isnan(each[0].amax) else max(row.amax for row in each),
            saturation=worst(max, [row.saturation for row in each], 0.0),
            delay=worst(min, [row.delay for row in each], 0.0),
            sqnr_db=worst(min, [row.sqnr_db for row in each], math.inf),
        )
        for key, each in casts.items()
    }


def _order(tensors: dict[Key, _Tensor]) -> Callable[[Key], tuple[int, int]]:
    def order(key: Key) -> tuple[int, int]:
        place = tensors[key].place
        return "wxg".index(key[2]), -place if key[2] == "g" else place

    return order


def _reasons(tensors: dict[Key, _Tensor], past: dict[Key, float]) -> dict[Key, str]:
    """Returns why each tensor that is out of line in one step is so."""
    growth = {
        key: tensor.log2 - past[key]
        for key, tensor in tensors.items()
        if key in past and not math.isnan(tensor.log2)
    }
    reasons = {}
    for keys, peers in _with_peers(tensors):
        among = [tensors[peer] for peer in peers]
        usual = statistics.median([growth[peer] for peer in peers if peer in growth] or [0.0])
        for key in keys:
            grown = growth[key] if key in growth else 0.0
            shared = max(usual, 0.0) if key[2] == "g" else 0.0
            alone = _why(tensors[key], grown, grown - shared)
            if why := alone or _why_among(key[2], tensors[key], among):
                reasons[key] = why
    return reasons


def _with_peers(tensors: dict[Key, _Tensor]) -> Iterator[tuple[list[Key], list[Key]]]:
    """Yields the keys of each linear's operand with their peers: themselves, or the same operand of
    all linears where they are too few for a median."""
    of_linear: dict[tuple[str, str], list[Key]] = defaultdict(list)
    of_operand: dict[str, list[Key]] = defaultdict(list)
    for key in tensors:
        of_linear[key[1:]].append(key)
        of_operand[key[2]].append(key)
    for (_, operand), keys in of_linear.items():
        yield keys, keys if len(keys) >= _ENOUGH else of_operand[operand]


def _why(tensor: _Tensor, grown: float, beyond: float) -> str | None:
    """Returns what is wrong with a tensor by itself, given by how much it has grown."""
    if not math.isfinite(tensor.amax):
        return f"its amax is {tensor.amax}"
    behind = tensor.saturation > 0 and tensor.delay < _HALF_BEHIND
    if behind and tensor.sqnr_db < _CLIPPED_DB:
        return (
            f"its delayed scale is {2**-tensor.delay:.3g} times too small for its amax"
            f" {tensor.amax:.3g}: clipping {tensor.saturation:.2g} of its elements leaves an SQNR"
            f" of {tensor.sqnr_db:.1f} dB"
        )
    if beyond > _JUMP:
        return f"its amax {tensor.amax:.3g} is {2**grown:.3g} times its largest before"
    if tensor.sqnr_db < _NOISE_DB:
        return f"its SQNR is {tensor.sqnr_db:.1f} dB: the cast leaves little of it"
    return None


def _why_among(operand: str, tensor: _Tensor, peers: Sequence[_Tensor]) -> str | None:
    """Returns how a tensor differs from its peers, itself among them."""
    if len(peers) < _ENOUGH:
        return None
    logs = [peer.log2 for peer in peers if not math.isnan(peer.log2)]
    if not math.isnan(tensor.log2):
        middle = statistics.median(logs)
        spread = _MAD * statistics.median(abs(log - middle) for log in logs)
        apart = tensor.log2 - middle
        if apart > max(_APART[operand], _SPREADS * spread):
            return f"its amax {tensor.amax:.3g} is {2**apart:.4g} times the median of its peers"
    usual = statistics.median(peer.sqnr_db for peer in peers)
    if math.isfinite(usual) and usual - tensor.sqnr_db > _NOISIER_DB:
        return f"its SQNR is {tensor.sqnr_db:.1f} dB, that of its peers {usual:.1f} dB"
    return None
