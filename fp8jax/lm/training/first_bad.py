"""Which layer and tensor of a rejected step was first not finite.

    find_bad     compiled: flags of weights, outputs and gradients, of every layer
    first_bad    words: the first of them in the order of the computation

Watching costs the training step nothing: a rejected step was not applied, so that the same state
and batch compute it once more, in a program of its own. Weights come first, then the outputs of the
forward pass from the first layer up, then gradients from the last layer down: what is not finite
spreads in these directions. Within a layer, the outputs of attention, MLP and norms and the MLP's
hidden units are known; a single linear only by the gradient of its kernel.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fp8jax.lm.data.loader import Batch
from fp8jax.lm.model.layer import AMAXES
from fp8jax.lm.model.promotion import Promotion
from fp8jax.lm.model.transformer import Transformer
from fp8jax.lm.training.policy_switch import leaves_by_path
from fp8jax.lm.training.step import TrainState, accumulate, as_variables

_ORDER = (
    "attention_norm",
    "attention/q_norm",
    "attention/k_norm",
    "attention/q/",
    "attention/k/",
    "attention/v/",
    "attention/o/",
    "attention",
    "attention_post_norm",
    "mlp_norm",
    "mlp/gate/",
    "mlp/up/",
    "mlp/hidden",
    "mlp/down/",
    "mlp",
    "mlp_post_norm",
)


def find_bad(
    model: Transformer,
    state: TrainState,
    batch: Batch,
    grad_accum: int,
    promotion: Promotion | None = None,
    *,
    scale: Any = None,
    inject: Callable[[Any, Batch], Any] | None = None,
) -> dict[str, dict[str, Array]]:
    """Flags of the tensors that are not finite: kind -> name -> bool [], or [n_layers] in layers.

    The kinds are "weight", "output" (of a part of a layer) and "gradient".

    Args:
      promotion: of the step.
      scale: of its loss, None for none.
      inject: as in `train_step`.
    """
    loss, grads, _ = accumulate(model, state, batch, grad_accum, promotion, scale)
    if inject is not None:
        grads = inject(grads, batch)
    key = state.key if model.resolved_policy.stochastic else None
    _, watched = model.apply(
        as_variables(state.params, state.histories),
        batch["tokens"],
        batch["segments"],
        batch["positions"],
        key,
        mutable=[AMAXES],
    )

    def bad(tree: Any) -> dict[str, Array]:
        def leaf(name: str, x: Array) -> Array:
            axes = range(1 if name.startswith("layers/") else 0, x.ndim)
            return ~jnp.all(jnp.isfinite(x), axis=tuple(axes))

        return {name: leaf(name, x) for name, x in leaves_by_path(tree).items()}

    outputs = {
        _module(n): ~jnp.isfinite(amax) for n, amax in leaves_by_path(watched[AMAXES]).items()
    }
    outputs["loss"] = ~jnp.isfinite(loss)
    return {"weight": bad(state.params), "output": outputs, "gradient": bad(grads)}


def _module(name: str) -> str:
    """The module's path in a name that flax captured: "layers/mlp/__call__/0" -> "layers/mlp". The
    output of a whole layer is "layers/output"."""
    short = re.sub(r"(/__call__)?/\d+$", "", name)
    return "layers/output" if short == "layers" else short


def first_bad(found: dict[str, dict[str, Any]]) -> str:
    """The first tensor, in the order of the computation, that `find_bad` flags, in words such as
    "layer 3, gradient of mlp/down/kernel"; "" if everything is finite."""
    for kind in ("weight", "output", "gradient"):
        backward = kind == "gradient"
        bad: list[tuple[float, float, str]] = []  # layer, place within it
        for name, flags in found[kind].items():
            if not np.any(flags):
                continue
            inside = name.startswith("layers/")
            layers = np.flatnonzero(flags)
            layer = float(layers[-1] if backward else layers[0]) if inside else _place(name)
            bad.append((layer, _place(name) if inside else 0, name))
        if bad:
            layer, _, name = max(bad) if backward else min(bad)
            short = name.removeprefix("layers/")
            return (
                f"layer {int(layer)}, {kind} of {short}" if short != name else f"{kind} of {name}"
            )
    return ""


def _place(name: str) -> float:
    """The place of a tensor in the order of the forward pass: within its layer, or, for one outside
    the layers, before (-1) or after (inf) all layers."""
    if not name.startswith("layers/"):
        return -1.0 if "embedding" in name else math.inf
    short = name.removeprefix("layers/")
    places = {part: float(i) for i, part in enumerate(_ORDER) if short.startswith(part)}
    return places[max(places, key=len)] if places else float(len(_ORDER))
