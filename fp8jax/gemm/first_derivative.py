"""Refuses derivatives of what has been cast.

A cast is constant almost everywhere: JAX would differentiate it, and a second derivative would be
wrong, mostly zero, without a word. A custom VJP with casts passes `first_derivative_only`

    what it is given in the forward     whose derivative the gradient may have
    the gradient g in the backward      which depends on what lies behind
    the cotangents that it returns      which depend on what the forward saved
"""

from typing import Any

import jax


@jax.custom_jvp
def first_derivative_only(arrays: Any) -> Any:
    """Returns the arrays; whoever differentiates them is refused with NotImplementedError."""
    return arrays


@first_derivative_only.defjvp
def _refuse(primals, tangents):
    raise NotImplementedError(
        "what is cast to FP8 or FP4 has first derivatives only: JAX would differentiate the casts."
        " For second derivatives (a Hessian, a gradient penalty) use the recipe 'bf16', and no"
        " remat='fp8_inputs'"
    )
