"""A weight with what belongs to it, and what the casts of a GEMM observe.

A `Weight` is what a module hands to a GEMM. Its cotangent is a `Weight`, too:

    value      the gradient
    histories  their next value (histories/amax_history.py), of summaries the answer (summary.py)
    probe      the statistics of the casts (probe.py)
    key        None

Casts make operands for the GEMMs, and an `Observed` beside them: the answers to the histories of
their arrays and the rows of a probe. The forward observes x and w, the backward w again and g, and
`cotangent` makes the cotangent of the weight from it, combined over the devices of a `shard_map`.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from fp8jax.gemm.backends.operands import Operand
from fp8jax.gemm.histories import summary
from fp8jax.gemm.histories.shared_leaf import check_vmap, combining_by_max
from fp8jax.gemm.histories.summary import Summaries, Summary, record, summarize, to_float32
from fp8jax.gemm.probe import Statistics, measure, peaks_by_max, repeated
from fp8jax.gemm.probe import as_cotangent as probe_cotangent
from fp8jax.gemm.sharding.gathered import Specs
from fp8jax.gemm.sharding.manual_axes import largest_like, summed_like, varying
from fp8jax.numerics.recipe import Recipe


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("value", "histories", "key", "probe"),
    meta_fields=("scope", "gathered"),
)
@dataclasses.dataclass(frozen=True)
class Weight:
    """One of the weights that are multiplied with one x.

    Attributes:
      value: [..., K, N]; or what the cast fwd_w has made of it (frozen.py).
      histories: the amax histories of its linear, operand -> [H], or their summaries, as GEMMs
        read them; inside a model they may have the max-combining dtype.
      key: a PRNG key, for casts that round stochastically, else None.
      probe: where the statistics of the casts go; None measures nothing.
      scope: name of its module in the compiled program; "" adds none.
      gathered: how the mesh shards the codes of [K, N], and how where GEMMs read them
        (sharding/gathered.py); None leaves it to XLA.
    """

    value: Any  # JAX makes weights of placeholders, too
    histories: Any = dataclasses.field(default_factory=dict)
    key: Any = None
    probe: Any = None
    scope: str = ""
    gathered: Specs | None = None

    def summarized(self) -> "Weight":
        """Returns the weight with summaries of its histories, as GEMMs take them."""
        if all(isinstance(history, Summary) for history in self.histories.values()):
            return self
        return dataclasses.replace(self, histories=summarize(self.histories))

    def histories_of(self, operand: str) -> Summaries:
        """Returns {operand: the summary of its history in float32}, {} if it has none."""
        return to_float32({k: v for k, v in self.histories.items() if k == operand})


class Observed(NamedTuple):
    """What the casts of some arrays leave behind.

    Attributes:
      histories: operand -> the answer to its history, of those that have one.
      statistics: by the names of casts, {} without a probe.
    """

    histories: Summaries
    statistics: Statistics

    def also(self, other: "Observed") -> "Observed":
        """Returns both."""
        histories = self.histories | other.histories
        return Observed(histories, self.statistics | other.statistics)


def observe(
    weight: Weight,
    x: jax.Array,
    amax: jax.Array | None,
    operands: Mapping[str, Operand],
    casts: dict[str, int],
) -> Observed:
    """Returns what the casts of one array leave behind for one weight.

    Args:
      x: the array [..., rows, columns], which is x, w or g.
      amax: max|x| where a kernel computed it, or None to compute it here.
      operands: what the casts have made of x, by their names.
      casts: name of the cast -> contracting axis, all of one operand.
    """
    (operand,) = {name[-1] for name in casts}
    answer = record(weight.histories_of(operand), operand, x, amax)
    return Observed(answer, measure(weight.probe, x, operands, casts, weight.key))


def cotangent(weight: Weight, dw: jax.Array, observed: Observed, recipe: Recipe) -> Weight:
    """Returns the cotangent of a weight from its gradient and what was observed of x, w and g."""
    answers = {operand: observed.histories[operand] for operand in weight.histories}
    answers = jax.tree.map(
        lambda answer, entry: largest_like(answer, varying(entry)), answers, weight.histories
    )
    statistics = observed.statistics
    if weight.probe is not None:  # XLA then drops what the forward measured of the same codes
        statistics = statistics | repeated(recipe, weight.probe.what_if, statistics)
    return dataclasses.replace(
        weight,
        value=summed_like(dw, varying(weight.value)),
        histories=summary.as_cotangent(weight.histories, answers),
        probe=probe_cotangent(weight.probe, statistics),
        key=None,
    )


def for_several_uses(x: jax.Array, weight: Weight) -> Weight:
    """Returns a weight whose cotangents combine over several uses: maxima of histories and peaks.

    All else is added.

    Raises ValueError where `jax.vmap` maps x and not the histories (shared_leaf.py).
    """
    for leaf in jax.tree.leaves((weight.histories, weight.probe)):
        check_vmap(x, leaf)
    histories = {k: jax.tree.map(combining_by_max, v) for k, v in weight.histories.items()}
    return dataclasses.replace(weight, histories=histories, probe=peaks_by_max(weight.probe))
