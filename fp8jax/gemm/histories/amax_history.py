"""Amax histories: the life of the state of delayed scaling.

A history is a float32 array [H] of one operand ("x", "w" or "g") of one linear layer: its amaxes of
the last H steps, newest first. `Histories` maps a layer's operands to their histories.

created    Zeros: `init_state` for `dot_general`, `module_histories` for a linen module. A module
           stores each history as one leaf of flax's collection `_overwrite_with_gradient`
           (`HISTORIES`).
read       `summarize` takes from it what a GEMM reads (summary.py). A delayed cast computes its
           scale from `stored_amax`, the maximum or the newest amax. Weights that share one x use
           the largest of their histories of x (`largest_of`).
recorded   The GEMM answers with this step's amax (`record`). The forward records x and w; the
           backward records g. The derivative of `summarize` puts it in front of the history.
returned   The new histories are the *cotangent* of the old ones: the collection's convention is
           that the gradient of a leaf is its next value, and flax's own `TrainState` follows it.
           Histories must never reach clipping, weight decay or an optimizer.
combined   JAX adds the cotangents of a leaf that is used more than once in a step (a module that is
           called twice, a loop with shared weights), but the sum of two histories is not a history.
           So each history is converted, once, to flax's max-combining dtype, whose addition is the
           maximum (shared_leaf.py). Where each call is under `nn.remat` or `nn.jit`, that is not
           once: `Model = fp8jax.nn.max_combining(Model)` then converts where they enter the model.
           Max-combining arrays must not leave the model: Orbax cannot save them, and JAX cannot
           differentiate with respect to them. Over microbatches, `empty_max` and `combine_max`
           compute the maximum outside the model.
merged     Between two steps, `merge_history` chooses the new history, or keeps the old one of an
           operand that recorded nothing.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT, fm32
from jax import lax
from jaxtyping import Array, Float

from fp8jax.hidden_jax import is_eager
from fp8jax.numerics.names import as_recipe
from fp8jax.numerics.recipe import Recipe

Histories = dict[str, Array]  # operand "x", "w" or "g" -> its amax history [H]

# The collection of amax histories, by flax's name for it.
HISTORIES = OVERWRITE_WITH_GRADIENT
"""The collection of amax histories in linen variables, by flax's name for it.

The gradient of a leaf of this collection is its next value.

Example:
  >>> variables = fp8jax.nn.Dense(4, "fp8_delayed").init(jax.random.key(0), jnp.ones((2, 8)))
  >>> jax.tree.map(jnp.shape, variables[fp8jax.nn.HISTORIES])
  {'g_amax_history': (16,), 'w_amax_history': (16,), 'x_amax_history': (16,)}
"""

# `seed` (updates.py) runs a model with histories that are longer by this many entries. To modules
# that skip self-seeding (`seeded=True`) the length says that these histories are empty.
SEED_ENTRIES = 1


# Created ------------------------------------------------------------------------------------------


def init_state(recipe: str | Recipe) -> Histories:
    """Returns empty histories for `dot_general`: operand -> float32 zeros [H].

    Args:
      recipe: a `Recipe` or the name of one, with options if any.

    Returns:
      A dict of the operands "x", "w" and "g" that the recipe scales by past amaxes; {} if none.
      For `fp8jax.update` it must lie under the key `fp8jax.nn.HISTORIES`: other leaves of the tree
      are parameters, which the optimizer moves.

    Raises:
      TypeError: for what is neither a recipe nor a name.
      ValueError: for an unknown name or option.

    Example:
      >>> {k: (h.shape, h.dtype.name) for k, h in fp8jax.init_state("fp8_delayed").items()}
      {'x': ((16,), 'float32'), 'w': ((16,), 'float32'), 'g': ((16,), 'float32')}
      >>> fp8jax.init_state("fp8_block")
      {}
    """
    return {k: jnp.zeros(n, jnp.float32) for k, n in as_recipe(recipe).histories.items()}


def module_histories(module: nn.Module, recipe: Recipe) -> dict[str, Any]:
    """Returns the module's histories, operand -> [H]; creates them, empty, in `init`.

    In a layer of a stack they are summaries (summary.py).

    Raises ValueError in `apply` if the variables have no histories for this module.
    """
    names = {operand: f"{operand}_amax_history" for operand in recipe.histories}
    if not module.is_mutable_collection(HISTORIES):
        missing = [name for name in names.values() if not module.has_variable(HISTORIES, name)]
        if missing:
            raise ValueError(_no_histories("/".join(module.path), recipe.name, missing))
    return {
        operand: module.variable(HISTORIES, names[operand], jnp.zeros, (length,), jnp.float32).value
        for operand, length in recipe.histories.items()
    }


def _no_histories(path: str, recipe: str, missing: list[str]) -> str:
    return (
        f"module {path or '(the outermost)'!r} runs {recipe!r} and has no {', '.join(missing)} in"
        f" the variables: pass the collection {HISTORIES!r} of `init` to `apply` next to 'params',"
        " also with parameters from a BF16 checkpoint; under nn.scan or nn.vmap, name the"
        " collection in variable_axes or variable_broadcast"
    )


# Combined -----------------------------------------------------------------------------------------


def to_max_combining(histories: Any) -> Any:
    """Converts a tree's float32 histories to the dtype in which addition is the maximum.

    Args:
      histories: any tree of arrays; leaves of other dtypes than float32 stay as they are.

    Returns:
      A tree of the same structure and shapes. JAX cannot differentiate with respect to it, nor can
      Orbax save it.

    Example:
      >>> histories = fp8jax.nn.to_max_combining({"x": jnp.array([3.0, 1.0])})
      >>> histories["x"].dtype == jnp.float32
      False
      >>> jax.lax.convert_element_type(histories["x"], jnp.float32)
      Array([3., 1.], dtype=float32)
    """
    return jax.tree.map(
        lambda h: lax.convert_element_type(h, fm32) if h.dtype == jnp.float32 else h, histories
    )


def max_combining(module: type[nn.Module]) -> Callable[..., nn.Module]:
    """Returns `module` with histories that combine by maximum over several calls of a submodule.

    Only needed for modules that are called more than once under `nn.remat` or `nn.jit`
    (shared_leaf.py). The histories are converted on the way in and out. Parameters and the tree of
    variables do not change, nor do initial values if the returned module is the outermost one.

    Args:
      module: a class of linen modules.

    Returns:
      A class that is constructed and called as `module`.

    Raises:
      ValueError: when the model is differentiated outside `jax.jit`.

    Example:
      >>> Model = fp8jax.nn.max_combining(fp8jax.nn.Dense)
      >>> variables = Model(4).init(jax.random.key(0), jnp.ones((2, 8)))
      >>> jax.tree.map(jnp.shape, variables["params"])
      {'kernel': (8, 4)}
      >>> loss = lambda variables: Model(4).apply(variables, jnp.ones((2, 8))).sum()
      >>> gradients = jax.jit(jax.grad(loss))(variables)
      >>> gradients[fp8jax.nn.HISTORIES]["x_amax_history"][:3]
      Array([1., 0., 0.], dtype=float32)
    """

    def into_max_combining(histories: Any) -> Any:
        if any(isinstance(h, jax.core.Tracer) and is_eager(h) for h in jax.tree.leaves(histories)):
            raise ValueError(
                "max_combining is differentiated outside jax.jit, where JAX can only add histories:"
                " put jax.jit around jax.grad"
            )
        return to_max_combining(histories)

    def from_max_combining(histories: Any) -> Any:
        return jax.tree.map(lambda h: lax.convert_element_type(h, jnp.float32), histories)

    mapped: Any = nn.map_variables(
        module,
        HISTORIES,
        trans_in_fn=into_max_combining,
        trans_out_fn=from_max_combining,
        init=True,
        mutable=True,
    )

    class MaxCombining(mapped):  # flax's random keys depend on the lifted transformations around
        def init_with_output(self, *args: Any, **kwargs: Any) -> Any:
            names = [f.name for f in dataclasses.fields(self) if f.init]
            plain = {name: getattr(self, name) for name in names if name not in ("parent", "name")}
            return module(**plain, parent=None).init_with_output(*args, **kwargs)

    MaxCombining.__name__ = f"MaxCombining{module.__name__}"
    return MaxCombining


def empty_max(histories: Any) -> Any:
    """Returns a tree like `histories` full of -inf, the neutral element of `combine_max`."""
    return jax.tree.map(lambda h: jnp.full_like(h, -jnp.inf), histories)


def combine_max(a: Any, b: Any) -> Any:
    """Returns the elementwise maximum of two trees of float32 histories, or of their summaries."""
    return jax.tree.map(jnp.maximum, a, b)


# Merged -------------------------------------------------------------------------------------------


def merge_history(old: Float[Array, "*L H"], new: Float[Array, "*L H"]) -> Float[Array, "*L H"]:
    """Returns `new` where it recorded an amax, else `old`; each history (last axis) by itself.

    A GEMM that did not run returns a cotangent that is not a history: zeros if the GEMM was never
    traced, -inf if it was in the branch not taken (under the max-combining dtype). A new history of
    zeros only is also ignored: any scale fits a tensor of zeros, so the old history does too.
    """
    recorded = jnp.any(new > 0, axis=-1, keepdims=True) & jnp.all(
        jnp.isfinite(new), axis=-1, keepdims=True
    )
    return jnp.where(recorded, new, old)
