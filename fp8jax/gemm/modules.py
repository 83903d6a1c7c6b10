"""Linen modules over `dot_general`.

`Dense` and `Einsum` have a float32 kernel and multiply in the activations' dtype. `Fp8DotGeneral`
quantizes modules that are not part of this library, such as::

    flax.linen.Dense(64, dot_general_cls=functools.partial(Fp8DotGeneral, "fp8_delayed"))

Each module stores its amax histories in the collection `HISTORIES` (amax_history.py); updates.py
carries them from step to step. A module may be called more than once in a step, or in a loop with
shared weights (shared_leaf.py). If these calls are under `nn.remat` or `nn.jit`, the model needs
`max_combining`.

Recipes that round stochastically take a key: the argument `key`, else the RNG stream `RNG` of
`apply(..., rngs={RNG: key})`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from fp8jax.gemm.arguments import check_sizes
from fp8jax.gemm.dot import dot_general, dot_general_together, einsum
from fp8jax.gemm.frozen import FrozenKernel, frozen_dot
from fp8jax.gemm.histories.amax_history import module_histories
from fp8jax.gemm.probe import module_probe
from fp8jax.gemm.sharding.gathered import Specs
from fp8jax.gemm.weight import Weight
from fp8jax.numerics.formats import check_float
from fp8jax.numerics.names import as_recipe
from fp8jax.numerics.recipe import Recipe

_INIT = nn.initializers.lecun_normal(dtype=jnp.float32)  # also with jax_enable_x64
_ZEROS = nn.initializers.constant(0.0, dtype=jnp.float32)

RNG = "fp8"  # the linen RNG stream of stochastic rounding
"""The linen RNG stream of stochastic rounding. Give it a new key in every step.

Example:
  >>> x = jnp.ones((16, 32))
  >>> layer = fp8jax.nn.Dense(16, "nvfp4")
  >>> variables = layer.init(jax.random.key(0), x)
  >>> y = jax.jit(layer.apply)(variables, x, rngs={fp8jax.nn.RNG: jax.random.key(1)})
  >>> y.shape
  (16, 16)
"""


def rounding_key(module: nn.Module, recipe: Recipe, key: Any) -> Any:
    """Returns the key for stochastic rounding: the given one, or one of the module's stream `RNG`.

    Raises ValueError if the recipe needs a key and there is none; `init` needs none.
    """
    if key is not None or not recipe.stochastic:
        return key
    if module.has_rng(RNG):
        return module.make_rng(RNG)
    if module.is_initializing():  # the results of `init` are thrown away
        return jax.random.key(0)
    raise ValueError(
        f"recipe {recipe.name!r} rounds stochastically and needs a key: pass the RNG stream"
        f" {RNG!r}, as in model.apply(variables, x, rngs={{{RNG!r}: key}}), a new key every step;"
        f" under nn.scan or nn.vmap, name it in split_rngs={{{RNG!r}: True}}"
    )


def keep_master(inputs, kernel, bias, *, dtype=None) -> tuple[Any, Any, Any]:
    """Returns inputs and bias in `dtype` and the kernel as it is: a `promote_dtype=` for flax.

    Flax's own function rounds the kernel to `dtype` before the GEMM, and so the kernel's gradient
    to `dtype` on its way back. A quantized GEMM takes a float32 kernel as it is, and returns its
    gradient in float32. Use it with `dot_general_cls=` or `dot_general=`.

    Args:
      inputs: the activations, an array or what `jnp.asarray` takes.
      kernel: returned as it is.
      bias: an array or None.
      dtype: of the returned inputs and bias; None for the inputs' own.

    Returns:
      (inputs, kernel, bias).

    Raises:
      TypeError: for inputs that are no array.

    Example:
      >>> x, kernel, bias = jnp.ones((2, 8)), jnp.ones((8, 4)), jnp.zeros(4)
      >>> arrays = fp8jax.nn.keep_master(x, kernel, bias, dtype=jnp.bfloat16)
      >>> [a.dtype.name for a in arrays]
      ['bfloat16', 'float32', 'bfloat16']
    """
    dtype = jnp.asarray(inputs).dtype if dtype is None else dtype
    return (jnp.asarray(inputs, dtype), kernel, None if bias is None else jnp.asarray(bias, dtype))


class Fp8DotGeneral(nn.Module):
    """`fp8jax.dot_general` as the `dot_general_cls` of flax's modules.

    Attributes:
      recipe: a `Recipe` or the name of one, with options if any ("fp8_delayed:history=4").
      backend: a key of `BACKENDS`, or None for the fastest that can run the recipe.
      seeded: whether no history is empty. By default empty ones seed themselves, which costs a pass
        over each operand in every step: as much as current scaling. With True they are read as they
        are; fill them with `fp8jax.histories.seed` before the first step, since empty ones flush
        most gradients to zero.

    Example:
      >>> layer = nn.Dense(
      ...     4, dot_general_cls=functools.partial(fp8jax.nn.Fp8DotGeneral, "fp8_delayed"),
      ...     promote_dtype=fp8jax.nn.keep_master,
      ... )
      >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 8)))
      >>> jax.tree.map(jnp.shape, variables[fp8jax.nn.HISTORIES])
      {'Fp8DotGeneral_0':
       {'g_amax_history': (16,), 'w_amax_history': (16,), 'x_amax_history': (16,)}}
    """

    recipe: str | Recipe = "fp8_delayed"
    backend: str | None = None
    seeded: bool = False

    @nn.compact
    def __call__(
        self,
        lhs,
        rhs,
        dimension_numbers,
        *positional,
        precision=None,
        preferred_element_type=None,
        out_sharding=None,
        key=None,
    ) -> Array:
        """Returns `dot_general` of activations lhs and weights rhs, by default in lhs's dtype.

        Arguments and errors are those of `fp8jax.dot_general`; recipes that round stochastically
        need `key` or the RNG stream `RNG`.
        """
        recipe = as_recipe(self.recipe)
        histories = module_histories(self, recipe)
        return dot_general(
            lhs,
            rhs,
            dimension_numbers,
            *positional,
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
            recipe=recipe,
            state=histories,
            key=rounding_key(self, recipe, key),
            backend=self.backend,
            seeded=self.seeded,
            probe=module_probe(self),
        )


class Dense(nn.Module):
    """y[..., N] = x[..., K] kernel[K, N] (+ bias[N]), quantized by `recipe`.

    The variables may hold a `FrozenKernel` of the recipe in place of the kernel (frozen.py).

    Attributes:
      features: N, the size of y's last axis.
      recipe, backend, seeded: as in `Fp8DotGeneral`.
      use_bias: whether to add a bias, in y's dtype.
      kernel_init: initializer of the float32 kernel.
      kernel_axes: logical axis names of the kernel, for sharding; () for none.
      preferred_element_type: dtype of y; None for x's.
      recompute_codes: whether the backward quantizes x again, to the same codes, instead of keeping
        them since the forward. That needs less memory if x is kept anyway, for the backward of
        what made it; else it needs more.
      gathered: how the mesh of `jax.set_mesh` shards the kernel, and how where a GEMM reads it,
        such as `(P("fsdp", "tensor"), P(None, "tensor"))`. An emulated GEMM then gathers its codes,
        and not the wider numbers that it multiplies. None leaves it to XLA.

    Example:
      >>> x = jnp.ones((2, 8), jnp.bfloat16)
      >>> layer = fp8jax.nn.Dense(4, "fp8_block", use_bias=True)
      >>> y, variables = jax.jit(layer.init_with_output)(jax.random.key(0), x)
      >>> y.shape, y.dtype.name
      ((2, 4), 'bfloat16')
      >>> jax.tree.map(lambda p: (p.shape, p.dtype.name), variables["params"])
      {'bias': ((4,), 'float32'), 'kernel': ((8, 4), 'float32')}
    """

    features: int
    recipe: str | Recipe = "fp8_delayed"
    backend: str | None = None
    use_bias: bool = False
    kernel_init: Callable[..., Any] = _INIT
    kernel_axes: tuple[str | None, ...] = ()
    preferred_element_type: Any = None
    seeded: bool = False
    recompute_codes: bool = False
    gathered: Specs | None = None

    @nn.compact
    def variables_for(self, size: int, key: Any = None, scope: str = "") -> tuple[Weight, Any]:
        """Returns the layer's weight [size, N], and its bias [N] or None.

        Variables that do not exist yet are created.

        Args:
          key: the PRNG key of the weight.
          scope: the layer's name in the compiled program; "" if this is in its own `__call__`.
        """
        check_sizes("features", (self.features,), self.features)
        init = _named(self.kernel_init, self.kernel_axes)
        kernel = _kernel(self, init, (size, self.features))
        histories = module_histories(self, as_recipe(self.recipe))
        weight = Weight(kernel, histories, key, module_probe(self), scope, self.gathered)
        if not self.use_bias:
            return weight, None
        init = _named(_ZEROS, self.kernel_axes[-1:])
        return weight, self.param("bias", init, (self.features,))

    def __call__(
        self,
        x: Float[Array, "... K"],
        key: Shaped[Array, "..."] | None = None,
        input_scale: Float[Array, " K"] | None = None,
    ) -> Float[Array, "... N"]:
        """Returns y in x's dtype, or in `preferred_element_type`.

        Args:
          x: the activations.
          key: a PRNG key, for recipes that round stochastically; None for the RNG stream `RNG`.
          input_scale: powers of two. Before quantization, x is divided by them and the kernel's
            rows are multiplied by them, which moves range from x to the kernel. The scaled float32
            kernel is saved for the backward.
        """
        key = rounding_key(self, as_recipe(self.recipe), key)
        return apply_together((self,), ("",), x, (key,), input_scale)[0]


def together(
    layers: Sequence[Dense],
    x: Float[Array, "... K"],
    keys: Sequence[Shaped[Array, "..."] | None],
    input_scale: Float[Array, " K"] | None = None,
) -> tuple[Float[Array, "... N"], ...]:
    """Applies several layers to one x; the results equal separate calls, bit for bit.

    If the layers have the same settings and `Recipe.quantizes_x_once`, x is quantized once for all
    of them and saved once for the backward. Two kinds differ from separate calls: where a recipe
    shares scales, the weights have one scale, and so have the gradients of the results; where it
    draws signs (`quartet2`, `tetrajet2`), all gradients of kernels have the first layer's.

    Args:
      layers: the layers, bound to their parent module.
      x: the activations.
      keys: one PRNG key per layer, or None for recipes that do not round stochastically.
      input_scale: as in `Dense`.

    Returns:
      One result per layer, [..., features], in x's dtype or the layer's `preferred_element_type`.

    Raises:
      TypeError: for an x that is no array of a float dtype of 16 or more bits.
      ValueError: without layers or with another number of keys, and for layers that share scales
        that have other settings than the rest or round x stochastically.

    Example:
      >>> class Projections(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         layers = [fp8jax.nn.Dense(4, "fp8_block", name=name) for name in "qkv"]
      ...         return fp8jax.nn.together(layers, x, [None] * 3)
      >>> results, _ = Projections().init_with_output(jax.random.key(0), jnp.ones((2, 8)))
      >>> [y.shape for y in results]
      [(2, 4), (2, 4), (2, 4)]
    """
    if not layers or len(keys) != len(layers):
        raise ValueError(
            f"together needs layers and one key (or None) for each, got {len(layers)} layers and"
            f" {len(keys)} keys"
        )
    scopes = [str(layer.name) for layer in layers]
    keys = [
        rounding_key(layer, as_recipe(layer.recipe), key)
        for layer, key in zip(layers, keys, strict=True)
    ]
    same_settings = all(_settings(layer) == _settings(layers[0]) for layer in layers)
    if same_settings and as_recipe(layers[0].recipe).quantizes_x_once:
        return apply_together(layers, scopes, x, keys, input_scale)
    if any(as_recipe(layer.recipe).shares_scales for layer in layers):
        raise ValueError(
            f"layers {', '.join(scopes)} cannot share scales: they need equal settings, and a"
            " recipe that does not round x stochastically"
        )
    return tuple(
        apply_together((layer,), (scope,), x, (key,), input_scale)[0]
        for layer, scope, key in zip(layers, scopes, keys, strict=True)
    )


def _settings(layer: Dense) -> tuple[Any, ...]:
    """Returns the settings that must be equal for layers to share a quantized x."""
    recipe, dtype = as_recipe(layer.recipe), layer.preferred_element_type
    return recipe, layer.backend, dtype, layer.seeded, layer.recompute_codes


def apply_together(
    layers: Sequence[Dense], scopes: Sequence[str], x: Array, keys: Sequence[Any], input_scale
) -> tuple[Array, ...]:
    """Applies layers of equal settings to x, which is quantized once; arguments as in `together`.

    `scopes` are the layers' names in the compiled program.
    """
    first = layers[0]
    check_float("x", x)
    if x.ndim == 0:
        raise ValueError("x is a scalar: a Dense layer takes [..., features]")
    each = zip(layers, keys, scopes, strict=True)
    weights, biases = zip(
        *(layer.variables_for(x.shape[-1], key, scope) for layer, key, scope in each), strict=True
    )
    settings: dict[str, Any] = dict(
        recipe=as_recipe(first.recipe),
        backend=first.backend,
        preferred_element_type=first.preferred_element_type,
        seeded=first.seeded,
    )
    if any(isinstance(weight.value, FrozenKernel) for weight in weights):
        if input_scale is not None:
            raise ValueError(
                "an input scale multiplies the kernel in every call, and this kernel is frozen"
            )
        ys = frozen_dot(x, weights, **settings)
        return tuple(add_bias(y, bias) for y, bias in zip(ys, biases, strict=True))
    if input_scale is not None:
        x = x / input_scale.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
        weights = tuple(
            dataclasses.replace(weight, value=weight.value * input_scale[:, None])
            for weight in weights
        )
    matmul = (((x.ndim - 1,), (0,)), ((), ()))
    ys = dot_general_together(x, weights, matmul, recompute_codes=first.recompute_codes, **settings)
    return tuple(add_bias(y, bias) for y, bias in zip(ys, biases, strict=True))


def add_bias(y: Float[Array, "... N"], bias: Float[Array, " N"] | None) -> Float[Array, "... N"]:
    """Returns y + bias in y's dtype; y itself if the bias is None."""
    if bias is None:
        return y
    return y + bias.astype(y.dtype).reshape((1,) * (y.ndim - 1) + (-1,))


class Einsum(nn.Module):
    """`jnp.einsum(equation, x, kernel)` with both operands quantized by `recipe`.

    Attributes:
      equation: two operands, such as "bsd,dhk->bshk".
      shape: the kernel's shape.
      recipe, backend, kernel_init, kernel_axes, seeded: as in `Dense`.

    Example:
      >>> layer = fp8jax.nn.Einsum("bsd,dhk->bshk", shape=(8, 2, 4), recipe="fp8_rowwise")
      >>> init = jax.jit(layer.init_with_output)
      >>> init(jax.random.key(0), jnp.ones((1, 3, 8)))[0].shape
      (1, 3, 2, 4)
    """

    equation: str
    shape: Sequence[int]
    recipe: str | Recipe = "fp8_delayed"
    backend: str | None = None
    kernel_init: Callable[..., Any] = _INIT
    kernel_axes: tuple[str | None, ...] = ()
    seeded: bool = False

    @nn.compact
    def __call__(
        self, x: Float[Array, "..."], key: Shaped[Array, "..."] | None = None
    ) -> Float[Array, "..."]:
        """Returns the result in x's dtype; recipes that round stochastically need a key."""
        check_sizes("shape", self.shape, self.shape)
        recipe = as_recipe(self.recipe)
        init = _named(self.kernel_init, self.kernel_axes)
        kernel = _kernel(self, init, tuple(self.shape))
        return einsum(
            self.equation,
            x,
            kernel,
            recipe=recipe,
            state=module_histories(self, recipe),
            key=rounding_key(self, recipe, key),
            backend=self.backend,
            seeded=self.seeded,
            probe=module_probe(self),
        )


def _kernel(module: nn.Module, init: Callable[..., Any], shape: tuple[int, ...]) -> Any:
    """Returns the module's kernel; raises ValueError if the variables hold one of another shape."""
    if module.has_variable("params", "kernel"):
        kernel: Any = module.get_variable("params", "kernel")
        frozen = isinstance(kernel, FrozenKernel)
        # Not nn.meta.unbox: it adds a sharding constraint to the program.
        (given,) = [kernel.shape] if frozen else map(jnp.shape, jax.tree.leaves(kernel))
        if given != shape:
            raise ValueError(
                f"module {'/'.join(module.path) or '(the outermost)'!r}: these inputs need a kernel"
                f" of shape {shape}, but the variables hold {given}"
            )
        if frozen:
            return kernel
    return module.param("kernel", init, shape)


def _named(init: Callable[..., Any], axes: tuple[str | None, ...]) -> Callable[..., Any]:
    """Returns `init` with the logical axis names attached, if there are any."""
    return nn.with_logical_partitioning(init, axes) if axes else init
