"""One training step and one validation step, as pure functions.

    for each microbatch: loss, gradients, new amax histories     (a scan; histories by maximum)
    clip, AdamW, weight decay                                    (parameters only)
    the gate: if loss or gradient norm is not finite, nothing of it is kept

They know nothing of files, names or devices: train.py compiles them and calls them in a loop.
"""

from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float

from fp8jax.model import Transformer
from fp8jax.nn import HISTORIES
from fp8jax.recipe import as_policy
from fp8jax.scaling import merge_history
from fp8jax.sharding import constrain
from fp8jax.stability import gate, is_finite

Batch = dict[str, Array]  # tokens, targets, segments, positions, weights: [B, L] each


@flax.struct.dataclass
class TrainState:
    """Everything a run carries from step to step, or abstract arrays in their places.

    Attributes:
      step: int32 [], finished steps.
      params: float32 master weights.
      histories: float32 amax histories, {} if the policy delays nothing.
      opt_state: the optimizer's.
      key: the run's PRNG key; never changes, steps fold their number into it.
    """

    step: Any
    params: Any
    histories: Any
    opt_state: Any
    key: Any


def as_variables(params: Any, histories: Any) -> dict[str, Any]:
    """What `Transformer.apply` takes."""
    return {"params": params} | ({HISTORIES: histories} if histories else {})


def loss_sum(
    model: Transformer, params: Any, histories: Any, batch: Batch, key: Array | None
) -> Float[Array, ""]:
    """Sum of the weighted tokens' negative log-likelihoods, nats."""
    logits_BLV = model.apply(
        as_variables(params, histories), batch["tokens"], batch["segments"], batch["positions"], key
    )  # fmt: skip
    nll_BL = optax.softmax_cross_entropy_with_integer_labels(logits_BLV, batch["targets"])
    return jnp.sum(nll_BL * batch["weights"])


def accumulate(
    model: Transformer, state: TrainState, batch: Batch, grad_accum: int
) -> tuple[Float[Array, ""], Any, Any]:
    """Mean loss, its gradients and the new histories, over `grad_accum` microbatches.

    Microbatch j holds the rows j, j + grad_accum, …, so that a batch sharded over devices need not
    move. The loss is divided by the weights of the whole batch: gradients simply add up.
    Histories combine by maximum.
    """
    total = jnp.maximum(jnp.sum(batch["weights"]), 1.0)

    def microbatch_loss(params, histories, micro, index):
        key = None
        if as_policy(model.policy).stochastic:
            key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), index)
        return loss_sum(model, params, histories, micro, key) / total

    grad = jax.value_and_grad(microbatch_loss, argnums=(0, 1))
    if grad_accum == 1:
        loss, (grads, histories) = grad(state.params, state.histories, batch, 0)
        return loss, grads, histories

    def split(x):
        x = x.reshape(-1, grad_accum, *x.shape[1:]).swapaxes(0, 1)
        return constrain(x, None, "batch", "length")

    def body(carry, scanned):
        loss, grads, histories = carry
        micro_loss, (micro_grads, micro_histories) = grad(state.params, state.histories, *scanned)
        grads = jax.tree.map(jnp.add, grads, micro_grads)
        histories = jax.tree.map(jnp.maximum, histories, micro_histories)
        return (loss + micro_loss, grads, histories), None

    start = (
        jnp.zeros((), jnp.float32),
        jax.tree.map(jnp.zeros_like, state.params),
        jax.tree.map(lambda h: jnp.full_like(h, -jnp.inf), state.histories),
    )
    scanned = (jax.tree.map(split, batch), jnp.arange(grad_accum))
    return lax.scan(body, start, scanned)[0]


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    model: Transformer,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    grad_accum: int,
) -> tuple[TrainState, dict[str, Array]]:
    """One optimizer step, and loss (nats a token), grad_norm (before clipping), learning_rate."""
    loss, grads, histories = accumulate(model, state, batch, grad_accum)
    grad_norm = optax.tree.norm(grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    new = TrainState(
        step=state.step + 1,
        params=optax.apply_updates(state.params, updates),
        histories=jax.tree.map(merge_history, state.histories, histories),
        opt_state=opt_state,
        key=state.key,
    )
    metrics = {"loss": loss, "grad_norm": grad_norm, "learning_rate": schedule(state.step)}
    return gate(is_finite(loss, grad_norm), new, state), metrics


def eval_step(
    state: TrainState, batch: Batch, *, model: Transformer, token_bytes_V: Array
) -> dict[str, Array]:
    """Sums over one batch: nats, weights (predicted tokens) and bytes of text they stand for."""
    size = jnp.take(token_bytes_V, batch["targets"]) * batch["weights"]
    key = state.key if as_policy(model.policy).stochastic else None
    nats = loss_sum(model, state.params, state.histories, batch, key)
    return {"nats": nats, "tokens": jnp.sum(batch["weights"]), "bytes": jnp.sum(size)}
