"""What a GEMM reads of an amax history, and how its answer becomes the next one.

A history has H amaxes. A GEMM needs two numbers of it, the newest and the largest, and answers with
one, the amax of this step. So it gets a `Summary`, and the derivative of `summarize` shifts the
history when the answer comes back, which is the cotangent of the summary:

    history [*L, H]        --summarize-->    Summary [*L]    --stored_amax-->    scales
    next history [*L, H]   <--its VJP---     answer [*L]     <--record------     amax

Both do many histories at once: a stack of layers summarizes those of all its layers before the
first one. Where each layer of an unrolled stack does it, XLA gets the same dozen operations on
sixteen numbers for each operand of each layer: a quarter of what a step of 12 layers takes to
compile (docs/results/mesh_compile.md).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from fp8jax.gemm.histories.amax_history import combine_max
from fp8jax.numerics.formats import nan_unless
from fp8jax.numerics.scales import Delayed
from fp8jax.numerics.tiles import tensor_amax


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("newest", "largest"), meta_fields=("length",)
)
@dataclasses.dataclass(frozen=True)
class Summary:
    """What a GEMM needs of an amax history; float32, or inside a model the max-combining dtype.

    Attributes:
      newest: the first entry of the history.
      largest: its maximum; NaN if an entry is NaN or negative.
      length: H.
    """

    newest: Any  # JAX makes summaries of placeholders, too
    largest: Any
    length: int


SHORT = 16  # entries of a history that is reduced without a reduction

Summaries = dict[str, Summary]  # operand "x", "w" or "g" -> the summary of its history


@jax.custom_vjp
def summarize(histories: Any) -> Any:
    """Returns the summaries [*L], in float32, of the histories [*L, H] of a tree.

    A summary's cotangent is the answer of a GEMM (`record`), the history's its next value: shifted
    by one entry, with the answer's newest amax in front. It is zeros where no GEMM ran.
    """
    return jax.tree.map(_summary, histories)


def _summary(history: Any) -> Summary:
    history = lax.convert_element_type(history, jnp.float32)  # from the max-combining dtype
    if history.shape[-1] > SHORT:
        largest, sound = jnp.max(history, axis=-1), jnp.all(history >= 0, axis=-1)
    else:
        largest, sound = _halved(jnp.maximum, history), _halved(jnp.minimum, history) >= 0
    return Summary(history[..., 0], nan_unless(sound, largest), history.shape[-1])


def _halved(pick: Callable[..., Array], history: Float[Array, "*L H"]) -> Float[Array, "*L"]:
    """Returns what `pick` leaves of each history, which is NaN if an entry is.

    The history is halved until one entry is left, which XLA fuses with what follows. A reduction
    would be a kernel of its own; entries compared one by one would be sixteen slices.
    """
    while (length := history.shape[-1]) > 1:
        half = (length + 1) // 2  # the halves share the entry in the middle, if there is one
        history = pick(history[..., :half], history[..., -half:])
    return history[..., 0]


def _shift(histories: Any, answers: Any) -> tuple[Any]:
    return (jax.tree.map(_shifted, histories, answers),)


def _shifted(old: Any, answer: Summary) -> Any:
    history = lax.convert_element_type(old, jnp.float32)
    # A GEMM that did not run answers with zeros, or with -inf under the max-combining dtype.
    answered = (answer.newest > 0) | (answer.largest > 0)
    shifted = jnp.concatenate([answer.newest[..., None], history[..., :-1]], axis=-1)
    return lax.convert_element_type(jnp.where(answered[..., None], shifted, 0), old.dtype)


summarize.defvjp(lambda histories: (summarize(histories), histories), _shift)


def stored_amax(summary: Summary, scale: Delayed) -> Float[Array, "*L"]:
    """Returns the amax that sets the scale of a delayed cast: the history's maximum or newest.

    A newest amax of 0, of a step of zeros, says nothing of the next: the maximum stands in.
    """
    if scale.amax == "max":
        return summary.largest
    return jnp.where(summary.newest == 0, summary.largest, summary.newest)


def self_seeded(summaries: Summaries, operand: str, amax: Float[Array, ""]) -> Summaries:
    """Returns the summaries to read scales from if the operand's history may be empty.

    An empty history is read as if it were full of `amax`, the operand's own in this step. A history
    with a negative or NaN entry is read as NaN, which makes the result of the GEMM NaN: something
    other than the update of histories has changed it, such as an optimizer.

    Costs a pass over the operand before its cast; without it, cast and amax share one pass.
    """
    if operand not in summaries:
        return summaries
    summary = summaries[operand]
    empty = summary.largest == 0
    newest = nan_unless(summary.largest >= 0, jnp.where(empty, amax, summary.newest))
    largest = jnp.where(empty, amax, summary.largest)
    return summaries | {operand: Summary(newest, largest, summary.length)}


def largest_of(summaries: tuple[Summaries, ...]) -> Summaries:
    """Returns those of the larger entries, for several weights that share one x.

    The histories of x are equal if the weights have always shared it.
    """
    return functools.reduce(combine_max, summaries)


def record(summaries: Summaries, operand: str, x: Array, amax: Array | None) -> Summaries:
    """Returns {operand: the answer of its GEMM}, or {} if the operand has no history.

    An amax that is not finite is replaced by the newest stored one.

    Args:
      x: the operand's array.
      amax: max|x| where a kernel computed it, or None to compute it here.
    """
    if operand not in summaries:
        return {}
    summary, amax = summaries[operand], tensor_amax(x) if amax is None else amax
    newest = jnp.where(jnp.isfinite(amax), amax, summary.newest)
    return {operand: dataclasses.replace(summary, newest=newest)}


def to_float32(summaries: Summaries) -> Summaries:
    """Returns the summaries in float32; inside a model they may have the max-combining dtype."""
    return jax.tree.map(lambda entry: lax.convert_element_type(entry, jnp.float32), summaries)


def as_cotangent(summaries: Summaries, answers: Summaries) -> Summaries:
    """Returns the cotangent of `summaries`: the answers of all operands, in the old dtypes."""
    return {
        operand: jax.tree.map(
            lambda old, new: lax.convert_element_type(new, old.dtype), summary, answers[operand]
        )
        for operand, summary in summaries.items()
    }
