"""Linen modules over `dot_general`: where the amax histories live.

`Dense` and `Einsum` hold a float32 kernel and multiply in the activations' dtype;
`Fp8DotGeneral` is for modules that are not ours, such as::

    flax.linen.Dense(64, dot_general_cls=functools.partial(Fp8DotGeneral, "fp8_delayed"))

Each keeps its histories, one leaf an operand, in flax's collection `_overwrite_with_gradient`,
whose convention is that the gradient of a leaf is its next value; flax's own `TrainState` follows
it. They must never reach clipping, weight decay or an optimizer.

When a module is called more than once in a step (reuse, a loop with shared weights), JAX adds the
cotangents of its histories, and the sum of two histories is not one. Wrapped as

    Model = fp8jax.nn.max_combining(Model)

the leaves are float32 outside the model and have flax's max-combining dtype inside it, converted
once at the door, so that calls combine by maximum. The rejected alternative, converting in each
product, is right only where a module is called once, since every call is back in float32 before
the sum. Max-combining arrays must not leave the model: orbax cannot save them, nor can JAX
differentiate with respect to them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float, Shaped

from fp8jax.linear.amax_history import Histories, module_histories
from fp8jax.linear.dot import dot_general, dot_general_shared, einsum
from fp8jax.numerics.recipe import Recipe
from fp8jax.numerics.recipes import as_recipe

_INIT = nn.initializers.lecun_normal()


class Fp8DotGeneral(nn.Module):
    """A drop-in for the `dot_general_cls` of flax's modules; see `fp8jax.dot_general`.

    Attributes:
      recipe: a key of `RECIPES` or a `Recipe`. A delayed one takes `recipe.seeding()` at its very
        first step, or that step's gradients are mostly flushed to zero.
      backend: a key of `BACKENDS`, or None for the fastest that can.
    """

    recipe: str | Recipe = "fp8_delayed"
    backend: str | None = None

    @nn.compact
    def __call__(
        self, lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, key=None
    ) -> Array:
        """[...] x [...] -> [...] in lhs's dtype; lhs holds the activations, rhs the weights.
        `key` is for recipes that round stochastically."""
        if precision is not None:
            raise ValueError(f"the recipe decides how a product is computed, got {precision=}")
        recipe = as_recipe(self.recipe)
        state = module_histories(self, recipe)
        return dot_general(
            lhs, rhs, dimension_numbers, recipe=recipe, state=state, key=key, backend=self.backend,
            preferred_element_type=preferred_element_type,
        )  # fmt: skip


class Dense(nn.Module):
    """y[..., N] = x[..., K] kernel[K, N] (+ bias[N]), quantized as `recipe` says.

    Attributes:
      features: N.
      recipe, backend: as in `Fp8DotGeneral`.
      use_bias: adds a bias, in x's dtype.
      kernel_init: initializer of the float32 kernel.
      kernel_axes: logical axis names of the kernel for sharding, () for none.
      preferred_element_type: dtype of y, None for x's.
    """

    features: int
    recipe: str | Recipe = "fp8_delayed"
    backend: str | None = None
    use_bias: bool = False
    kernel_init: Callable[..., Any] = _INIT
    kernel_axes: tuple[str | None, ...] = ()
    preferred_element_type: Any = None

    @nn.compact
    def variables_for(self, size: int) -> tuple[Any, Any, Histories]:
        """Its kernel [size, N], bias [N] or None, and histories; created where they are not yet."""
        init = _named(self.kernel_init, self.kernel_axes)
        kernel = self.param("kernel", init, (size, self.features))
        histories = module_histories(self, as_recipe(self.recipe))
        if not self.use_bias:
            return kernel, None, histories
        init = _named(nn.initializers.zeros, self.kernel_axes[-1:])
        return kernel, self.param("bias", init, (self.features,)), histories

    def __call__(
        self,
        x: Float[Array, "... K"],
        key: Shaped[Array, "..."] | None = None,
        input_scale: Float[Array, " K"] | None = None,
    ) -> Float[Array, "... N"]:
        """`key` is for recipes that round stochastically. Before both are quantized, x is divided
        by `input_scale`, powers of two, and the kernel's rows are multiplied: range moves from x to
        the kernel, of which a second one in float32 is kept for the backward."""
        return apply_together((self,), ("",), x, (key,), input_scale)[0]


def together(
    layers: Sequence[Dense],
    x: Float[Array, "... K"],
    keys: Sequence[Shaped[Array, "..."] | None],
    input_scale: Float[Array, " K"] | None = None,
) -> tuple[Float[Array, "... N"], ...]:
    """What each of the layers makes of x, bit for bit. Where their recipes are the same and none
    rounds x stochastically, x is quantized once for all of them, and kept once."""
    scopes = [str(layer.name) for layer in layers]
    alike = all(_as_one(layer) == _as_one(layers[0]) for layer in layers)
    if alike and as_recipe(layers[0].recipe).same_x:
        return apply_together(layers, scopes, x, keys, input_scale)
    return tuple(
        apply_together((layer,), (scope,), x, (key,), input_scale)[0]
        for layer, scope, key in zip(layers, scopes, keys, strict=True)
    )


def _as_one(layer: Dense) -> tuple[Any, ...]:
    """What layers have in common that can be computed together."""
    return as_recipe(layer.recipe), layer.backend, layer.preferred_element_type


def apply_together(
    layers: Sequence[Dense], scopes: Sequence[str], x: Array, keys: Sequence[Any], input_scale
) -> tuple[Array, ...]:
    first = layers[0]
    kernels, biases, states = zip(
        *(layer.variables_for(x.shape[-1]) for layer in layers), strict=True
    )
    if input_scale is not None:
        x = x / input_scale.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
        kernels = tuple(kernel * input_scale[:, None] for kernel in kernels)
    ys = dot_general_shared(
        x, kernels, (((x.ndim - 1,), (0,)), ((), ())), recipe=first.recipe, states=states,
        keys=keys, backend=first.backend, preferred_element_type=first.preferred_element_type,
        scopes=scopes,
    )  # fmt: skip
    return tuple(
        y if bias is None else y + bias.astype(y.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
        for y, bias in zip(ys, biases, strict=True)
    )


class Einsum(nn.Module):
    """`jnp.einsum(equation, x, kernel)` with the product quantized as `recipe` says.

    Attributes:
      equation: two operands, such as "bsd,dhk->bshk".
      shape: of the kernel.
      recipe, backend, kernel_init, kernel_axes: as in `Dense`.
    """

    equation: str
    shape: Sequence[int]
    recipe: str | Recipe = "fp8_delayed"
    backend: str | None = None
    kernel_init: Callable[..., Any] = _INIT
    kernel_axes: tuple[str | None, ...] = ()

    @nn.compact
    def __call__(
        self, x: Float[Array, "..."], key: Shaped[Array, "..."] | None = None
    ) -> Float[Array, "..."]:
        """x's dtype in and out; `key` is for recipes that round stochastically."""
        kernel = self.param("kernel", _named(self.kernel_init, self.kernel_axes), tuple(self.shape))
        recipe = as_recipe(self.recipe)
        return einsum(
            self.equation, x, kernel,
            recipe=recipe, state=module_histories(self, recipe), key=key, backend=self.backend,
        )  # fmt: skip


def _named(init: Callable[..., Any], axes: tuple[str | None, ...]) -> Callable[..., Any]:
    """`init` with logical axis names attached, where there are any."""
    return nn.with_logical_partitioning(init, axes) if axes else init
