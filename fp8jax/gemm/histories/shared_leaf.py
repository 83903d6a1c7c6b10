"""Histories that several calls read: their cotangents combine by maximum, without a wrapper.

JAX adds the cotangents of an array that is used more than once. For histories that sum is wrong
(amax_history.py), so each history is converted to flax's max-combining dtype, whose addition is the
maximum. The conversion must happen once, before the uses: converted in each call, the cotangents
would be float32 again when they are added. So a history's first use converts it *in the trace that
it comes from*, and later uses find the converted array:

    module called twice       both calls get one tracer as their history, and share its conversion
    nn.scan, shared weights   the body gets the tracer from outside the scan; so the conversion is
                              outside, and the scan's backward adds with the maximum

Out of reach is a transformation that hands each call a tracer of its own: a module called more than
once, each time under `nn.remat` or `nn.jit`. `max_combining` is for those; without it the histories
add up, which `update` reports (updates.py).

Which trace an array comes from is not public in JAX: hidden_jax.py.
"""

import weakref
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import fm32
from jax import lax
from jaxtyping import Array

from fp8jax import hidden_jax


class _Conversion(NamedTuple):
    """The conversion of one history.

    Attributes:
      converted: () -> the history in the max-combining dtype, None once that is gone.
      direct: whether a call in the history's own trace has used it.
    """

    converted: Callable[[], Array | None]
    direct: bool


_CONVERSIONS: hidden_jax.OfTracers[_Conversion] = hidden_jax.OfTracers()


def combining_by_max(history: Array) -> Array:
    """Returns a history whose cotangents combine by maximum; other arrays are returned as they are.

    Raises ValueError for the second use of a history outside `jax.jit`, where JAX cannot take the
    maximum.
    """
    if not isinstance(history, jax.core.Tracer) or history.dtype != jnp.float32:
        return history
    direct = hidden_jax.is_of_current_trace(history)
    known = _CONVERSIONS.find(history)
    converted = None
    if known is not None:
        converted = known.converted()
        if (direct or known.direct) and hidden_jax.is_eager(history):
            raise ValueError(
                "a module with amax histories is called more than once outside jax.jit, where JAX"
                " can only add histories: put jax.jit around jax.grad"
            )
        direct = direct or known.direct
    if converted is None:
        with hidden_jax.in_trace_of(history):
            converted = lax.convert_element_type(history, fm32)
    _CONVERSIONS.keep(history, _Conversion(_held(converted), direct))
    return converted


def check_vmap(x: Array, history: Array) -> None:
    """Raises ValueError if `jax.vmap`, inside of `jax.grad`, maps x and not the history.

    Neither a sum nor a maximum over the mapped axis is possible there: JAX only adds.
    """
    if hidden_jax.is_mapped_inside(x, history):
        raise ValueError(
            "jax.vmap maps the input of a module and not its amax histories, whose gradient"
            " would be a sum: give each instance its own histories (nn.vmap with"
            " variable_axes={fp8jax.nn.HISTORIES: 0}), or call the module on the whole batch"
        )


def _held(converted) -> Callable[[], Array | None]:
    """Returns how to get a converted history again.

    The tracer of a jaxpr refers to the history that it comes from: held here, neither would ever be
    freed. An equation that uses it holds it; one that nothing uses has no cotangent. Other tracers
    do not refer to the history, and nothing else holds them.
    """
    if hidden_jax.refers_to_operands(converted):
        return weakref.ref(converted)
    return lambda: converted
