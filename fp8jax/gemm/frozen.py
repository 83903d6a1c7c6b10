"""Kernels that were quantized once, offline, for inference.

Training quantizes the float32 kernel of a linear in every call. A `FrozenKernel` holds what that
cast, `fwd_w` of the recipe, makes of it: codes and scales, in the layout of the backend. A linear
whose `kernel` is a `FrozenKernel` quantizes only its activations, by `fwd_x`, and multiplies with
the stored codes. The results have the bits of the same linear with the float32 kernel. Where a
recipe leaves activations in high precision (`fp8_block:only=fwd_w`), only the weights are narrow.
On GPUs, weights_only.py then multiplies most of them, and adds up in another order.

Frozen kernels have a forward only: differentiation raises. A cast that rounds weights
stochastically makes other codes in every call, so it cannot be frozen.

The linears of a stack of layers have frozen kernels whose leaves have a leading axis of layers, so
that `lax.scan` runs over them. Where a policy exempts the first or last layers, a `StackedKernel`
has one part for each stretch of layers: codes for one, high-precision kernels for the others.
"""

import bisect
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from fp8jax.gemm.backends.choice import choose_backend
from fp8jax.gemm.backends.operands import QuantizedOperand
from fp8jax.gemm.backends.weights_only import (
    contracting_last,
    multiplies_codes,
    weights_only_matmul,
)
from fp8jax.gemm.dot import gemm_settings
from fp8jax.gemm.probe import as_cotangent, deposit, peaks_by_max
from fp8jax.gemm.sharding.explicit_axes import is_explicit
from fp8jax.gemm.sharding.manual_axes import pooled_axes
from fp8jax.gemm.vjp import GemmSettings, forward, quantize_operand, shared_amax
from fp8jax.gemm.weight import Weight
from fp8jax.numerics.quantization import dequantize
from fp8jax.numerics.recipe import Recipe


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("operand",), meta_fields=("shape", "backend")
)
@dataclasses.dataclass(frozen=True)
class FrozenKernel:
    """A kernel [K, N] as the cast `fwd_w` of a recipe has made it.

    Attributes:
      operand: codes and scales; in a stack of layers, each leaf has a leading axis of layers.
      shape: (K, N), unpadded.
      backend: name of the backend that quantized it, and that reads its layout.
    """

    operand: QuantizedOperand
    shape: tuple[int, int]
    backend: str

    def dequantized(self, dtype: Any = jnp.float32) -> Float[Array, "K N"]:
        """Returns codes * scales [K, N], of one kernel without an axis of layers."""
        values_KN = dequantize(self.operand.q, dtype)
        if self.operand.axis == -1:
            values_KN = values_KN.T
        return values_KN[: self.shape[0], : self.shape[1]]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("parts",), meta_fields=("begins",)
)
@dataclasses.dataclass(frozen=True)
class StackedKernel:
    """The kernels of one linear in a stack of layers, with a part for each stretch of layers.

    Attributes:
      parts: arrays [layers, K, N], or `FrozenKernel`s with a leading axis of layers.
      begins: the first layer of each part, and the number of all layers.
    """

    parts: tuple[Any, ...]
    begins: tuple[int, ...]

    def part(self, begin: int, end: int) -> Any:
        """Returns the part of layers `begin` to `end` - 1; raises ValueError if there is none."""
        for part, first, following in zip(self.parts, self.begins, self.begins[1:], strict=False):
            if (first, following) == (begin, end):
                return part
        raise ValueError(
            f"layers {begin} to {end - 1} run in one recipe, but these kernels were frozen for a"
            f" policy whose recipes begin at the layers {list(self.begins[:-1])}: freeze for the"
            " model's own policy"
        )


def _is_node(tree: Any) -> bool:
    return isinstance(tree, FrozenKernel | StackedKernel)


def has_frozen(tree: Any) -> bool:
    """Whether a tree of variables has frozen kernels."""
    return any(map(_is_node, jax.tree.leaves(tree, is_leaf=_is_node)))


def take_layers(tree: Any, begin: int, end: int) -> Any:
    """Returns layers `begin` to `end` - 1 of a tree whose leaves have a leading axis of layers."""

    def take(node: Any) -> Any:
        if isinstance(node, StackedKernel):
            return node.part(begin, end)
        return jax.tree.map(lambda leaf: leaf[begin:end], node)

    return jax.tree.map(take, tree, is_leaf=_is_node)


def layer_of(tree: Any, index: int) -> Any:
    """Returns layer `index` of a tree whose leaves have a leading axis of layers."""

    def take(node: Any) -> Any:
        if isinstance(node, StackedKernel):
            at = bisect.bisect_right(node.begins, index) - 1
            return layer_of(node.parts[at], index - node.begins[at])
        # Not leaf[index]: that would compile a program for each index.
        return jax.tree.map(
            lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), node
        )

    return jax.tree.map(take, tree, is_leaf=_is_node)


# Freezing -----------------------------------------------------------------------------------------


def freeze_kernels(
    weights: Sequence[Weight],
    recipe: Recipe,
    *,
    backend: str | None = None,
    seeded: bool = True,
) -> tuple[FrozenKernel, ...]:
    """Quantizes the kernels of weights that are multiplied with one x, as their forward does.

    Args:
      weights: [K, N] each, in float32, or in the dtype of the master weights. Their histories are
        only read.
      recipe: has a cast `fwd_w`.
      backend, seeded: as in `dot_general`.

    Raises:
      ValueError: `fwd_w` rounds stochastically, or leaves weights in high precision.
      NotImplementedError: the backend cannot run the recipe.
    """
    if recipe.fwd_w is None:
        raise ValueError(f"recipe {recipe.name!r} leaves weights in high precision: nothing to do")
    if recipe.fwd_w.random:
        raise ValueError(
            f"recipe {recipe.name!r} rounds weights stochastically, anew in every call: it cannot"
            " be frozen (rounding=nearest can)"
        )
    chosen = choose_backend(backend, recipe)
    dtype = jnp.dtype(jnp.float32)  # of x, which is not there
    settings = GemmSettings(recipe, chosen, dtype, dtype, seeded)
    joint = shared_amax(settings, ("fwd_w",), [weight.value for weight in weights])
    frozen = []
    for weight in weights:
        kernel = weight.value
        operands, _ = quantize_operand(settings, kernel, {"fwd_w": -2}, weight.summarized(), joint)
        operand = operands["fwd_w"]
        assert isinstance(operand, QuantizedOperand)  # fwd_w is a cast
        if multiplies_codes(recipe):
            operand = contracting_last(operand)
        frozen.append(FrozenKernel(operand, (kernel.shape[0], kernel.shape[1]), chosen.name))
    return tuple(frozen)


# Multiplying --------------------------------------------------------------------------------------


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _frozen_matmuls(
    settings: GemmSettings, x, weights: tuple[Weight, ...]
) -> tuple[jax.Array, ...]:
    """Multiplies x [M, K] by each frozen weight [K, N]; quantizes x once for all."""
    return forward(settings, x, weights, {"fwd_x": -1})[0]


def _measured_matmuls(
    settings: GemmSettings, x, weights: tuple[Weight, ...]
) -> tuple[jax.Array, ...]:
    """`_frozen_matmuls`, whose results leave the statistics of x in the cotangents of probes."""
    probes = tuple(peaks_by_max(weight.probe) for weight in weights)
    ys, _, observed = forward(settings, *lax.stop_gradient((x, weights)), {"fwd_x": -1})
    statistics = [each.statistics for each in observed]
    return deposit(x, ys, probes, tuple(map(as_cotangent, probes, statistics)))


@_frozen_matmuls.defjvp
def _refuse_derivative(settings: GemmSettings, primals, tangents):
    raise NotImplementedError(
        "frozen kernels have a forward only: differentiate a model with its float32 kernels"
    )


def frozen_dot(
    x: Float[Array, "*rows K"],
    weights: Sequence[Weight],
    *,
    recipe: Recipe,
    backend: str | None = None,
    preferred_element_type: Any = None,
    seeded: bool = False,
) -> tuple[Float[Array, "*rows _"], ...]:
    """Returns x times each weight, as `dot_general_together` with the kernels that were frozen.

    Other arguments are as there. Amax histories are read and not updated.

    Args:
      weights: their values are `FrozenKernel`s, without an axis of layers.

    Raises:
      ValueError: a kernel was frozen by another cast or for another backend, only some of the
        kernels are frozen, and as `dot_general` does.
      NotImplementedError: where it is differentiated, and for arrays on a mesh with explicit axes.
    """
    settings = gemm_settings(
        recipe,
        weights,
        x.dtype,
        backend=backend,
        whole=bool(x.size),
        preferred_element_type=preferred_element_type,
        seeded=seeded,
    )
    for weight in weights:
        _check_kernel(weight.value, settings)
    operands = tuple(weight.value.operand for weight in weights)
    codes = [operand.q.values for operand in operands]
    if any(map(is_explicit, (x, *codes))):
        raise NotImplementedError(
            "frozen kernels run on meshes with automatic axes: make the mesh with AxisType.Auto"
        )
    settings = dataclasses.replace(settings, pooled=pooled_axes(x, codes))
    *rows, k = x.shape
    rows_MK = x.reshape(math.prod(rows), k)
    if multiplies_codes(settings.recipe) and (matmul := weights_only_matmul(rows_MK, operands)):
        multiplying = dataclasses.replace(settings.backend, matmul=matmul)
        settings = dataclasses.replace(settings, backend=multiplying)
    frozen = tuple(
        dataclasses.replace(weight, value=operand).summarized()
        for weight, operand in zip(weights, operands, strict=True)
    )
    measured = any(weight.probe is not None for weight in weights)
    ys = (_measured_matmuls if measured else _frozen_matmuls)(settings, rows_MK, frozen)
    return tuple(y.reshape(*rows, y.shape[-1]) for y in ys)


def _check_kernel(kernel: Any, settings: GemmSettings) -> None:
    """Raises ValueError unless the kernel was frozen for the settings' recipe and backend."""
    if not isinstance(kernel, FrozenKernel):
        raise ValueError("some of the kernels that share one input are frozen: freeze all or none")
    if kernel.operand.cast != settings.recipe.fwd_w:
        raise ValueError(
            f"a kernel was frozen by {kernel.operand.cast}, and recipe {settings.recipe.name!r}"
            f" casts weights by {settings.recipe.fwd_w}: freeze for the policy that the model runs"
        )
    if kernel.backend != settings.backend.name:
        raise ValueError(
            f"a kernel was frozen for backend {kernel.backend!r}, and runs in"
            f" {settings.backend.name!r}: freeze with the model's own backend"
        )
