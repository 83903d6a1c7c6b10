"""A model and its weights, made ready for inference."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fp8jax.device import xla
from fp8jax.gemm.frozen import layer_of
from fp8jax.lm.model.stretches import stretches
from fp8jax.lm.model.transformer import Transformer
from fp8jax.nn import HISTORIES
from fp8jax.numerics.module_paths import MODULES
from fp8jax.numerics.policy import Policy


def inference_model(model: Transformer) -> Transformer:
    """Returns the model without what only training has, and with zeros in padding."""
    return model.clone(remat="none", zero_padding=True)


def compiler_options(model: Transformer) -> dict[str, bool | int]:
    """Returns the options for `jax.jit(compiler_options=…)` of the model's inference."""
    recipes = (recipe for _, recipe in model.resolved_policy.rules)
    weights_only = any(each.fwd_w is not None and each.fwd_x is None for each in recipes)
    return xla.compiler_options(weights_only=weights_only)


def prepare(model: Transformer, variables: Any, *, unrolled: bool) -> dict[str, Any]:
    """Returns the variables as a loop over tokens reads them: no bit of a result changes.

    Weights that no recipe quantizes are rounded to the model's dtype once, and not in each step.
    Those that one quantizes stay as they are: either float32, and quantized anew in each step, or
    frozen (lm/model/freeze.py).

    Args:
      variables: parameters, and amax histories if the policy has delayed scaling.
      unrolled: whether the layers become a tuple, one tree for each. This copies them all.
    """
    policy = model.resolved_policy
    params = dict(nn.meta.unbox(variables["params"]))
    head = policy.recipe("lm_head").fwd_w
    if head is None or not model.config.tie_embeddings:
        params["embedding"] = params["embedding"].astype(model.dtype)
    if "lm_head" in params and head is None:
        params["lm_head"] = _rounded(params["lm_head"], model.dtype)
    params["layers"] = _layers(model, policy, params["layers"], unrolled)
    histories = {HISTORIES: variables[HISTORIES]} if HISTORIES in variables else {}
    return {"params": params} | histories


def _layers(model: Transformer, policy: Policy, stack: Any, unrolled: bool) -> Any:
    if not unrolled:
        return _layer(model, policy.without_exemptions(), stack)
    layers = []
    for stretch in stretches(policy, model.config.n_layers):
        for index in range(stretch.begin, stretch.end):
            layers.append(_layer(model, stretch.policy, layer_of(stack, index)))
    return tuple(layers)


def _layer(model: Transformer, policy: Policy, layer: Any) -> Any:
    """Returns the parameters of a layer, or of the stack, with their plain kernels rounded."""
    layer = {part: dict(tree) for part, tree in layer.items()}
    for path in MODULES:
        group, _, rest = path.partition("/")
        part, _, name = rest.partition("/")
        if group != "layers" or name not in layer[part]:
            continue
        if policy.recipe(path).fwd_w is None:
            layer[part][name] = _rounded(layer[part][name], model.dtype)
    return layer


def _rounded(linear: Any, dtype: Any) -> dict[str, Any]:
    """Returns the parameters of a linear, with its kernel in `dtype` unless it is frozen."""
    kernel = linear["kernel"]
    if not isinstance(kernel, jax.Array | jnp.ndarray):
        return linear
    return dict(linear) | {"kernel": kernel.astype(dtype)}
