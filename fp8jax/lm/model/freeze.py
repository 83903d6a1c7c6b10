"""Weights that are quantized once, for inference.

`freeze` replaces the kernels of a model by what the recipes of its policy make of them
(gemm/frozen.py). `Transformer.apply` takes the result as it takes trained variables, and returns
the same logits, bit for bit. The float32 weights are no longer needed: kernels that the policy
leaves in high precision, and the embedding, are stored in the dtype of the activations, in which
the model reads them.

A tied head that the policy quantizes has codes of its own beside the embedding, which the look-up
still reads in high precision.

Weights only: `fp8_block:only=fwd_w` leaves the activations in bfloat16.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
from jax import lax

from fp8jax.gemm.frozen import FrozenKernel, StackedKernel, freeze_kernels, has_frozen
from fp8jax.gemm.weight import Weight
from fp8jax.lm.model.config import MLPS
from fp8jax.lm.model.stretches import Stretch, stretches
from fp8jax.lm.model.transformer import Transformer
from fp8jax.nn import HISTORIES
from fp8jax.numerics.policy import Policy
from fp8jax.numerics.recipe import Recipe

# Linears of a layer that are multiplied with one x, and so may share a scale.
GROUPS = {"attention": (("q", "k", "v"), ("o",)), "mlp": (("gate", "up"), ("down",))}
_TABLES = ("embedding", "position_embedding")


def freeze(model: Transformer, variables: Any) -> dict[str, Any]:
    """Returns the variables with every kernel that the model's policy casts quantized once.

    Kernels are quantized one after the other, on the mesh on which they lie; drop the given
    variables afterwards to free them.

    Args:
      model: the model that will run, with its policy and backend.
      variables: parameters, float32 or as the run stored them, and amax histories if the policy has
        delayed scaling. Histories are kept, since activations are scaled by them.

    Returns:
      Variables that `model.apply` and generation take in place of those.

    Raises:
      ValueError: the variables are frozen already, histories are missing, weights are rounded
        stochastically, or the model has Smooth-SwiGLU, which scales the kernel of `down` by each
        batch.
      NotImplementedError: the model's backend cannot run a recipe.

    Example:
      >>> from fp8jax.lm.model.freeze import freeze
      >>> config = dataclasses.replace(fp8jax.MODELS["llama_tiny"], n_layers=1)
      >>> model = fp8jax.Transformer(config, "fp8_rowwise")
      >>> tokens = jnp.arange(8)[None]
      >>> ones = jnp.ones_like(tokens)
      >>> variables = jax.jit(model.init)(jax.random.key(0), tokens, ones, tokens)
      >>> frozen = freeze(model, variables)
      >>> both = [jax.jit(model.apply)(each, tokens, ones, tokens) for each in (variables, frozen)]
      >>> bool((both[0] == both[1]).all())
      True
    """
    policy, c = model.resolved_policy, model.config
    policy.check(c.modules, c.n_layers)
    variables = nn.meta.unbox(dict(variables))
    if has_frozen(variables):
        raise ValueError("these variables are frozen already")
    if MLPS[c.mlp].smooth and policy.recipe("layers/mlp/down").fwd_w is not None:
        raise ValueError(
            f"mlp={c.mlp!r} scales the kernel of layers/mlp/down by each batch, so it cannot be"
            f" frozen in {policy.name!r}: give layers/mlp/down a recipe without fwd_w"
        )
    histories = variables[HISTORIES] if HISTORIES in variables else {}
    params = dict(variables["params"])
    for name in _TABLES:
        if name in params:
            params[name] = params[name].astype(model.dtype)
    head = _frozen_head(model, policy, variables["params"], histories)
    if head is not None:
        params["lm_head"] = {"kernel": head}
    params["layers"] = _frozen_layers(model, policy, params["layers"], histories)
    return {**variables, "params": params}


def _frozen_head(model: Transformer, policy: Policy, params: Any, histories: Any) -> Any:
    """Returns the kernel of the head; None if the embedding stays the kernel."""
    recipe, tied = policy.recipe("lm_head"), model.config.tie_embeddings
    if tied and recipe.fwd_w is None:
        return None
    kernel = params["embedding"].T if tied else params["lm_head"]["kernel"]
    if recipe.fwd_w is None:
        return kernel.astype(model.dtype)
    state = _histories(recipe, histories, "lm_head")

    @jax.jit
    def frozen(kernel, state):
        weights = (Weight(kernel, state),)
        return freeze_kernels(weights, recipe, backend=model.backend, seeded=model.seeded)[0]

    return frozen(kernel, state)


def _frozen_layers(model: Transformer, policy: Policy, layers: Any, histories: Any) -> Any:
    """Returns the parameters of the stack of layers with frozen kernels."""
    parts = stretches(policy, model.config.n_layers)
    begins = (*(stretch.begin for stretch in parts), model.config.n_layers)
    frozen = dict(layers)
    for part, groups in GROUPS.items():
        frozen[part] = dict(layers[part])
        for group in groups:
            paths = {name: f"layers/{part}/{name}" for name in group if name in layers[part]}
            made = [
                _frozen_group(model, stretch, paths, layers[part], histories) for stretch in parts
            ]
            for name in paths:
                kernels = tuple(one[name] for one in made)
                kernel = kernels[0] if len(parts) == 1 else StackedKernel(kernels, begins)
                frozen[part][name] = {**layers[part][name], "kernel": kernel}
    return frozen


def _frozen_group(
    model: Transformer, stretch: Stretch, paths: dict[str, str], params: Any, histories: Any
) -> dict[str, Any]:
    """Returns the kernels of linears that are multiplied with one x, in the layers of a stretch.

    Args:
      paths: the linears' names and their paths.
      params: of that part of the layers, by the linears' names; leaves have an axis of layers.
    """
    recipes = {name: stretch.policy.recipe(path) for name, path in paths.items()}
    begin, end = stretch.begin, stretch.end
    kernels = {name: params[name]["kernel"][begin:end] for name in paths}
    cast = [name for name, recipe in recipes.items() if recipe.fwd_w is not None]
    plain = {name: kernels[name].astype(model.dtype) for name in paths if name not in cast}
    if not cast:
        return plain
    states = {name: _histories(recipes[name], histories, paths[name]) for name in cast}
    states = jax.tree.map(lambda history: history[begin:end], states)
    # A shared scale comes from all weights of the group, which then have one recipe.
    shared = recipes[cast[0]].shares_scales

    def layer(arguments) -> dict[str, FrozenKernel]:
        kernels, states = arguments
        frozen: dict[str, FrozenKernel] = {}
        for names in (cast,) if shared else [(name,) for name in cast]:
            weights = [Weight(kernels[name], states[name]) for name in names]
            made = freeze_kernels(
                weights, recipes[names[0]], backend=model.backend, seeded=model.seeded
            )
            frozen |= zip(names, made, strict=True)
        return frozen

    # A loop over layers, so that each is quantized by the program that quantizes one kernel.
    of_layers = jax.jit(functools.partial(lax.map, layer))
    return plain | of_layers(({name: kernels[name] for name in cast}, states))


def _histories(recipe: Recipe, histories: Any, path: str) -> dict[str, Any]:
    """Returns a linear's amax histories by operand; raises ValueError if some are missing."""
    for name in path.split("/"):
        histories = histories[name] if name in histories else {}
    missing = [
        f"{k}_amax_history" for k in recipe.histories if f"{k}_amax_history" not in histories
    ]
    if missing:
        raise ValueError(
            f"{path} runs {recipe.name!r} and has no {', '.join(missing)} in the"
            f" variables: pass the collection {HISTORIES!r} of the run next to 'params'"
        )
    return {k: histories[f"{k}_amax_history"] for k in recipe.histories}
