"""One training step and one validation step, as pure functions.

    for each microbatch: loss, gradients, next amax histories     (a scan; histories by maximum)
    clip, optimizer, weight decay                                 (parameters only)
    select the new state, or the old one if the step is rejected  (not finite, or a spike)

They know nothing of files, config keys or devices: build.py jits them, loop.py calls them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float

from fp8jax.gemm.histories.amax_history import combine_max, empty_max
from fp8jax.gemm.histories.updates import next_histories
from fp8jax.lm.data.loader import Batch
from fp8jax.lm.mesh import constrain
from fp8jax.lm.model.chunked_loss import chunk_length, chunked_loss, token_losses
from fp8jax.lm.model.layer import AMAXES, HIDDEN
from fp8jax.lm.model.promotion import Promoter, Promotion, promoted_linears
from fp8jax.lm.model.transformer import Transformer
from fp8jax.lm.optim.master_weights import to_float32
from fp8jax.lm.stability.bad_steps import ACCEPTED, is_finite, select_if
from fp8jax.lm.stability.loss_scaling import LossScaling
from fp8jax.lm.stability.spikes import SpikeDetector, judge
from fp8jax.nn import HISTORIES, TELEMETRY
from fp8jax.numerics.names import as_policy
from fp8jax.telemetry.measure import combine


@flax.struct.dataclass
class TrainState:
    """Everything that a run carries from step to step. Leaves are arrays, or abstract ones.

    Attributes:
      step: int32 [], finished steps that were not rejected; with `initial_state` also those of
        the run before.
      params: master weights, float32 or bfloat16 (lm/optim/master_weights.py).
      histories: float32 amax histories, {} without delayed scaling.
      opt_state: the optimizer's.
      key: the run's PRNG key. It never changes: each step folds its number into it.
      spikes: what the spike detector remembers, {} without one.
      promoter: what the promoter of layers remembers, {} without one.
      loss_scale: a dynamic loss scale and its count, {} without one.
    """

    step: Any
    params: Any
    histories: Any
    opt_state: Any
    key: Any
    spikes: Any = dataclasses.field(default_factory=dict)
    promoter: Any = dataclasses.field(default_factory=dict)
    loss_scale: Any = dataclasses.field(default_factory=dict)


@flax.struct.dataclass
class StepNumbers:
    """The numbers of a training step that are inputs of its program, not constants.

    So a run with another learning rate, schedule, number of steps or threshold compiles no step
    anew.

    Attributes:
      learning_rate: float32 [].
      clip_norm: float32 [], the largest norm of the gradients.
      promoter: `Promoter.numbers`; None without a promoter.
    """

    learning_rate: Any
    clip_norm: Any
    promoter: Any


def as_variables(params: Any, histories: Any, probes: Any = None) -> dict[str, Any]:
    """The variables that `Transformer.apply` takes: all float32."""
    others = {HISTORIES: histories, TELEMETRY: probes}
    return {"params": to_float32(params)} | {k: tree for k, tree in others.items() if tree}


def loss_sum(
    model: Transformer,
    params: Any,
    histories: Any,
    batch: Batch,
    key: Array | None,
    promotion: Promotion | None = None,
    total: Any = 1.0,
    probes: Any = None,
) -> Float[Array, ""]:
    """The sum of the tokens' weighted negative log-likelihoods, in nats, divided by `total`."""
    return _loss(model, params, histories, batch, key, promotion, total, probes=probes)[0]


def _loss(
    model: Transformer,
    params: Any,
    histories: Any,
    batch: Batch,
    key: Array | None,
    promotion: Promotion | None,
    total: Any,
    watched: tuple[str, ...] = (),
    probes: Any = None,
) -> tuple[Float[Array, ""], Any]:
    """`loss_sum`, and the collections `watched` of the model.

    Logits that are larger than a chunk are computed chunk by chunk. A head that is quantized is
    not: its scales and histories are those of whole operands.
    """
    recipe = model.resolved_policy.recipe("lm_head")
    rows, length = batch["tokens"].shape
    positions = chunk_length(rows, length, model.config.vocab_size)
    whole = bool(recipe.casts) or positions == length
    inputs = batch["tokens"], batch["segments"], batch["positions"]
    out, seen = model.apply(
        as_variables(params, histories, probes),
        *inputs,
        key,
        promotion,
        head=whole,
        mutable=[*watched],
    )
    targets, weights = batch["targets"], batch["weights"]
    if whole:
        return jnp.sum(token_losses(out, targets) * weights) / total, seen
    total = jnp.asarray(total, jnp.float32)
    return chunked_loss(recipe, positions, *out, targets, weights, total), seen


def promotion_of(
    promoter: Promoter | None, model: Transformer, state: TrainState
) -> Promotion | None:
    """What runs in another policy in the next step; None without a promoter."""
    if promoter is None:
        return None
    linears = promoted_linears(promoter, model.config)
    return Promotion(as_policy(promoter.precision), state.promoter["promoted"], linears)


def scale_of(scaling: LossScaling | None, state: TrainState) -> Any:
    """What the loss of the next step is multiplied by; None without scaling."""
    return None if scaling is None else scaling.scale(state.loss_scale)


def _scaled(loss: Array, scale: Any) -> Array:
    return loss if scale is None else loss * scale


def accumulate(
    model: Transformer,
    state: TrainState,
    batch: Batch,
    grad_accum: int,
    promotion: Promotion | None = None,
    scale: Any = None,
) -> tuple[Float[Array, ""], Any, Any]:
    """Mean loss, its float32 gradients and the next histories, over `grad_accum` microbatches.

    Microbatch j holds the rows j, j + grad_accum, …: a batch that is sharded over devices stays
    where it is. Each microbatch's loss is divided by the weights of the whole batch, so that
    gradients add up. Histories combine by maximum.

    With a `scale` the backward pass starts from it instead of 1 (lm/stability/loss_scaling.py). It
    is a power of two: to divide loss and gradients by it here changes no digit.
    """
    total = jnp.maximum(jnp.sum(batch["weights"]), 1.0)
    params = to_float32(state.params)  # here, so that gradients are not rounded to bfloat16

    def microbatch_loss(params, histories, micro, index):
        key = _microbatch_key(model, state, index)
        return _scaled(loss_sum(model, params, histories, micro, key, promotion, total), scale)

    def unscaled(loss, grads, histories):
        if scale is not None:
            loss, grads = jax.tree.map(lambda x: x / scale, (loss, grads))
        return loss, grads, histories

    grad = jax.value_and_grad(microbatch_loss, argnums=(0, 1))
    if grad_accum == 1:
        loss, (grads, histories) = grad(params, state.histories, batch, 0)
        return unscaled(loss, grads, histories)

    def body(carry, scanned):
        loss, grads, histories = carry
        micro_loss, (micro_grads, micro_histories) = grad(params, state.histories, *scanned)
        grads = jax.tree.map(jnp.add, grads, micro_grads)
        histories = combine_max(histories, micro_histories)
        return (loss + micro_loss, grads, histories), None

    start = (
        jnp.zeros((), jnp.float32),
        jax.tree.map(jnp.zeros_like, params),
        empty_max(state.histories),
    )
    return unscaled(*lax.scan(body, start, _microbatches(batch, grad_accum))[0])


def _microbatch_key(model: Transformer, state: TrainState, index: Any) -> Array | None:
    """The key of a microbatch's casts; None if none rounds stochastically."""
    if not model.resolved_policy.stochastic:
        return None
    return jax.random.fold_in(jax.random.fold_in(state.key, state.step), index)


def _microbatches(batch: Batch, grad_accum: int) -> tuple[Batch, Array]:
    """All microbatches on a leading axis, and their indices."""

    def split(x):
        x = x.reshape(-1, grad_accum, *x.shape[1:]).swapaxes(0, 1)
        return constrain(x, None, "batch", "length")

    return jax.tree.map(split, batch), jnp.arange(grad_accum)


def telemetry_step(
    state: TrainState,
    batch: Batch,
    *,
    model: Transformer,
    grad_accum: int,
    probes: Any,
    promoter: Promoter | None = None,
    scaling: LossScaling | None = None,
) -> tuple[Any, Promotion | None]:
    """The statistics of every cast in the training step of this state and batch.

    It computes the step's loss and gradients as `train_step` does, and changes nothing. Parts of a
    batch combine as gemm/probe.py says. Clipping, the optimizer and weight gradients are left
    out.

    Args:
      probes: zeros (lm/model/probes.py).
      promoter, scaling: as in `train_step`.

    Returns:
      A tree like `probes`; and which layers ran in another policy.
    """
    total = jnp.maximum(jnp.sum(batch["weights"]), 1.0)
    params, promotion = to_float32(state.params), promotion_of(promoter, model, state)
    scale = scale_of(scaling, state)

    def microbatch_loss(probes, micro, index):
        key = _microbatch_key(model, state, index)
        loss = loss_sum(model, params, state.histories, micro, key, promotion, total, probes)
        return _scaled(loss, scale)

    grad = jax.grad(microbatch_loss)
    if grad_accum == 1:
        return grad(probes, batch, 0), promotion

    def body(statistics, scanned):
        return combine(statistics, grad(probes, *scanned)), None

    return lax.scan(body, probes, _microbatches(batch, grad_accum))[0], promotion


def train_step(
    state: TrainState,
    batch: Batch,
    numbers: StepNumbers,
    *,
    model: Transformer,
    optimizer: optax.GradientTransformationExtraArgs,
    grad_accum: int,
    detector: SpikeDetector | None = None,
    promoter: Promoter | None = None,
    scaling: LossScaling | None = None,
    inject: Callable[[Any, Batch], Any] | None = None,
) -> tuple[TrainState, dict[str, Array]]:
    """Takes one optimizer step; a rejected step returns the old state, bit for bit.

    Args:
      detector: judges loss spikes; without one only steps that are not finite are rejected.
      promoter: chooses what runs in another policy in the next step, None for nothing.
      scaling: of the loss in the backward pass, None for none.
      inject: changes the gradients where a batch asks for a fault (lm/training/faults.py).

    Returns:
      The next state, and scalars: loss (nats a token), grad_norm (before clipping) and
      learning_rate; verdict with a detector; promoted, bool [layers] or [layers, linears], with a
      promoter; loss_scale and overflow with a dynamic loss scale.
    """
    promotion, scale = promotion_of(promoter, model, state), scale_of(scaling, state)
    loss, grads, histories = accumulate(model, state, batch, grad_accum, promotion, scale)
    if inject is not None:
        grads = inject(grads, batch)
    grad_norm = optax.tree.norm(grads)
    updates, opt_state = optimizer.update(
        grads,
        state.opt_state,
        state.params,
        learning_rate=numbers.learning_rate,
        clip_norm=numbers.clip_norm,
    )
    new = TrainState(
        step=state.step + 1,
        params=optax.apply_updates(state.params, updates),  # a float32 sum, rounded once
        histories=next_histories(state.histories, histories),
        opt_state=opt_state,
        key=state.key,
        spikes=state.spikes,
        promoter=state.promoter,
        loss_scale=state.loss_scale,
    )
    metrics = {"loss": loss, "grad_norm": grad_norm, "learning_rate": numbers.learning_rate}
    if promoter is not None:
        norms = unit_norms(grads, promoted_linears(promoter, model.config))
        seen = promoter.update(state.promoter, norms, state.key, numbers.promoter)
        new = dataclasses.replace(new, promoter=seen)
        metrics["promoted"] = state.promoter["promoted"]
    return _settled(state, new, metrics, detector, scaling)


def _settled(
    state: TrainState,
    new: TrainState,
    metrics: dict[str, Array],
    detector: SpikeDetector | None,
    scaling: LossScaling | None,
) -> tuple[TrainState, dict[str, Array]]:
    """The new state, or the old one if it is rejected; what judges steps has seen this one."""
    loss, grad_norm = metrics["loss"], metrics["grad_norm"]
    if detector is None:
        accepted = is_finite(loss, grad_norm)
        settled = select_if(accepted, new, state)
    else:
        verdict, spikes = judge(detector, state.spikes, loss, grad_norm)
        accepted = verdict == ACCEPTED
        settled = dataclasses.replace(select_if(accepted, new, state), spikes=spikes)
        metrics = metrics | {"verdict": verdict}
    if scaling is None or not state.loss_scale:
        return settled, metrics
    overflow = scaling.overflows(state.loss_scale, loss, grad_norm)
    seen = scaling.update(state.loss_scale, overflow, accepted)
    scales = {"loss_scale": state.loss_scale["scale"], "overflow": overflow}
    return dataclasses.replace(settled, loss_scale=seen), metrics | scales


def unit_norms(grads: Any, linears: Sequence[str]) -> Float[Array, "layers *linears"]:
    """The norm of the gradients of each layer; of each of the linears in it, if there are any."""
    if not linears:
        return layer_norms(grads["layers"])
    parts = [path.split("/") for path in linears]
    norms = [layer_norms(grads[group][part][name]) for group, part, name in parts]
    return jnp.stack(norms, axis=-1)


def layer_norms(grads: Any) -> Float[Array, " layers"]:
    """The norm of each layer's part of a tree of gradients [layers, ...]."""
    squares = [jnp.sum(jnp.square(g), axis=tuple(range(1, g.ndim))) for g in jax.tree.leaves(grads)]
    return jnp.sqrt(sum(squares))


def repeat_step(
    state: TrainState, batch: Batch, numbers: StepNumbers, **settings: Any
) -> tuple[TrainState, dict]:
    """`train_step` without amax histories and a promoter; what the state has of both stays."""
    new, metrics = train_step(dataclasses.replace(state, histories={}), batch, numbers, **settings)
    return dataclasses.replace(new, histories=state.histories), metrics


def eval_step(
    state: TrainState,
    batch: Batch,
    *,
    model: Transformer,
    token_bytes_V: Array,
    promoter: Promoter | None = None,
) -> dict[str, Array]:
    """Sums over one batch: nats, tokens (predicted ones) and bytes (of text, of these tokens); and
    hidden, float32 [layers], the largest magnitude of the input of each layer's mlp/down.

    Args:
      token_bytes_V: bytes of UTF-8 text that each token stands for.
      promoter: as in `train_step`.
    """
    size = jnp.take(token_bytes_V, batch["targets"]) * batch["weights"]
    key = state.key if model.resolved_policy.stochastic else None
    promotion = promotion_of(promoter, model, state)
    nats, watched = _loss(
        model, state.params, state.histories, batch, key, promotion, 1.0, (AMAXES,)
    )
    (hidden,) = watched[AMAXES]["layers"]["mlp"][HIDDEN]
    return {
        "nats": nats,
        "tokens": jnp.sum(batch["weights"]),
        "bytes": jnp.sum(size),
        "hidden": hidden,
    }
