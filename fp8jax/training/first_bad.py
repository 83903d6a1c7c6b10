"""Which layer and tensor of a step went bad first, for the report of a run that stops.

    find_bad     compiled: flags of weights, outputs and gradients, of every layer
    first_bad    words: the first of them in the order of the computation

The step itself is not watched: it costs nothing. A bad step was not applied, so it can be computed
again from the same state and batch, once, by a program of its own. Weights come first, then the
outputs of the forward pass from the first layer up, then gradients from the last layer down, since
what is not finite spreads in these directions. Within a layer the outputs of attention, MLP and
norms, and the MLP's hidden units, are known; single linears only by the gradients of their kernels.
"""

import math
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fp8jax.data.loader import Batch
from fp8jax.model.layer import AMAXES
from fp8jax.model.transformer import Transformer
from fp8jax.numerics.policy_options import as_policy
from fp8jax.stability.faults import inject_gradient
from fp8jax.training.policy_switch import leaves_by_path
from fp8jax.training.step import TrainState, accumulate, as_variables

_ORDER = (
    "attention_norm", "attention/q_norm", "attention/k_norm", "attention/q/", "attention/k/",
    "attention/v/", "attention/o/", "attention", "mlp_norm", "mlp/gate/", "mlp/up/", "mlp/hidden",
    "mlp/down/", "mlp",
)  # fmt: skip


def find_bad(
    model: Transformer, state: TrainState, batch: Batch, grad_accum: int
) -> dict[str, dict[str, Array]]:
    """What of a step is not finite: kind -> name -> bool [] or, of layers, [n_layers].

    The kinds are "weight", "output" (of a part of a layer) and "gradient".
    """
    loss, grads, _ = accumulate(model, state, batch, grad_accum)
    grads = inject_gradient(grads, batch)
    key = state.key if as_policy(model.policy).stochastic else None
    _, watched = model.apply(
        as_variables(state.params, state.histories), batch["tokens"], batch["segments"],
        batch["positions"], key, mutable=[AMAXES],
    )  # fmt: skip

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
    """layers/mlp of layers/mlp/__call__/0, as flax captures outputs; layers/output of a block, and
    layers/mlp/hidden of layers/mlp/hidden/0."""
    short = re.sub(r"(/__call__)?/\d+$", "", name)
    return "layers/output" if short == "layers" else short


def first_bad(found: dict[str, dict[str, Any]]) -> str:
    """In the order of the computation the first that is not finite of what `find_bad` gave, in
    words; "" if all is."""
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
    """Of a tensor within its layer, or of one outside beside the layers' numbers, in the order of
    the forward pass."""
    if not name.startswith("layers/"):
        return -1.0 if "embedding" in name else math.inf
    short = name.removeprefix("layers/")
    places = (float(i) for i, part in enumerate(_ORDER) if short.startswith(part))
    return next(places, float(len(_ORDER)))
