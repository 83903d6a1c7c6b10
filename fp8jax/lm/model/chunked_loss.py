"""The LM head and its cross-entropy, some positions at a time.

The float32 logits of a batch are often the largest arrays of a training step: 9.3 GiB for 16,384
tokens and a vocabulary of 151,936, and the cross-entropy and its gradient need several such arrays
at once. `chunked_loss` never has more than one chunk of them. It computes the gradients of x and of
the head's weight in the forward, while a chunk's logits exist, and saves only these for the
backward:

    for each chunk of positions:                          (a loop; all rows of the batch)
        logits = x w                                      (fwd)
        nll    = cross-entropy(logits)
        g      = gradient of the loss with respect to logits
        dx     = g w^T                                    (dgrad)
        dw    += x^T g                                    (wgrad)

The backward multiplies both by the loss's cotangent, which is 1 in training. The alternative, to
compute each chunk's logits again in the backward, was rejected: it needs a fourth GEMM.

Operands and results of each GEMM have the dtypes that the head's own GEMMs have (gemm/vjp.py) if
its recipe casts nothing. So the losses of the tokens and dx are those of the whole logits, as far
as a GEMM computes a row in the same way in a batch of another size. The sum for dw is split over
the chunks: it is a float32 sum in another order.

On a mesh each device keeps its rows of the batch and sums its own part of dw. These parts are added
once, after the loop. The weight is gathered over fsdp once, before the loop, in x's dtype.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from fp8jax.gemm.backends.operands import PlainOperand
from fp8jax.gemm.dot import gemm_settings
from fp8jax.gemm.vjp import GemmSettings, named_matmul
from fp8jax.lm.mesh import batch_axes, constrain, local_shape
from fp8jax.numerics.recipe import Recipe

# Float32 logits of one chunk on one device. Each chunk reads and writes the whole dw: chunks of 512
# MiB cost a step of Qwen2.5-1.5B 2% more, and save nothing at the step's peak of memory.
CHUNK_BYTES = 2**31


def chunk_length(rows: int, length: int, vocab: int) -> int:
    """Returns the positions of one chunk for logits [rows, length, vocab]; `length` for one chunk.

    There are as few chunks as keep a chunk's float32 logits within `CHUNK_BYTES` on each device of
    the mesh of `jax.set_mesh`, and they are about equally long. A chunk has a multiple of 8 tokens
    on each device, as matrix units need it; the last one is padded. It has at least 8 tokens,
    whatever their size.
    """
    rows, _, vocab = local_shape((rows, length, vocab), "batch", "length", "vocab")
    position_bytes = 4 * rows * vocab
    if length * position_bytes <= CHUNK_BYTES:
        return length
    step = 8 // math.gcd(8, rows)
    most = max(CHUNK_BYTES // position_bytes // step * step, step)
    chunks = -(-length // most)
    return min(-(-length // (chunks * step)) * step, length)


def token_losses(
    logits_BLV: Float[Array, "B L V"], targets_BL: Int[Array, "B L"]
) -> Float[Array, "B L"]:
    """Returns the negative log-likelihood of each target, in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits_BLV, targets_BL)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def chunked_loss(
    recipe: Recipe,
    positions: int,
    x_BLD: Float[Array, "B L D"],
    w_DV: Float[Array, "D V"],
    targets_BL: Int[Array, "B L"],
    weights_BL: Float[Array, "B L"],
    total: Float[Array, ""],
) -> Float[Array, ""]:
    """Returns sum(weights_BL * nll_BL) / total in nats, with the logits x_BLD w_DV in float32.

    Args:
      recipe: of the head. It casts nothing; its name is the GEMMs' in the compiled program.
      positions: of one chunk, from `chunk_length`.
      x_BLD: the input of the head.
      w_DV: the weight of the head, in any float dtype; its gradient is summed in float32.
      targets_BL: the ids of the next tokens.
      weights_BL: the weights of the tokens.
      total: what the sum is divided by. It is divided before gradients are rounded to x's dtype.

    Raises:
      ValueError: `recipe` casts an operand.
    """
    w = _gathered(w_DV, x_BLD.dtype)

    def chunk(_, scanned):
        x_BCD, targets_BC = scanned
        return None, token_losses(_logits(recipe, x_BCD, w), targets_BC)

    _, nll = lax.scan(
        chunk, None, (split_chunks(x_BLD, positions), split_chunks(targets_BL, positions))
    )
    return jnp.sum(join_chunks(nll, targets_BL.shape[1]) * weights_BL) / total


def _forward(recipe: Recipe, positions: int, x_BLD, w_DV, targets_BL, weights_BL, total):
    w = _gathered(w_DV, x_BLD.dtype)
    devices = x_BLD.shape[0] // local_shape(x_BLD.shape, "batch", "length", "residual")[0]

    def chunk(dw, scanned):
        x_BCD, targets_BC, scale_BC = scanned
        nll_BC, g_BCV = _loss_and_gradient(_logits(recipe, x_BCD, w), targets_BC, scale_BC)
        g_BCV = constrain(g_BCV, "batch", "length", "vocab").astype(x_BCD.dtype)
        dx_BCD = _input_gradient(recipe, g_BCV, w)
        return dw + _weight_gradient(recipe, x_BCD, g_BCV), (nll_BC, dx_BCD)

    # The gradient of the loss with respect to the tokens' own losses, as JAX computes it.
    scale_BL = (1.0 / total) * weights_BL
    split = tuple(split_chunks(array, positions) for array in (x_BLD, targets_BL, scale_BL))
    start = constrain(jnp.zeros((devices, *w_DV.shape), jnp.float32), "batch", None, "vocab")
    dw, (nll, dx) = lax.scan(chunk, start, split)
    length = targets_BL.shape[1]
    nll_BL, dx_BLD = join_chunks(nll, length), join_chunks(dx, length)
    # Here the devices' parts are added.
    dw_DV = constrain(jnp.sum(dw, axis=0), "embed", "vocab").astype(w_DV.dtype)
    loss = jnp.sum(nll_BL * weights_BL) / total
    return loss, (dx_BLD, dw_DV, nll_BL, loss, total)


def _loss_and_gradient(logits_BCV, targets_BC, scale_BC) -> tuple[Array, Array]:
    """Returns `token_losses` and their gradient times `scale_BC`, with the bits of JAX's own.

    JAX subtracts the scale at the target by a scatter, between two passes over the logits. A
    comparison with the target is fused into one pass, which also rounds the gradient.
    """
    targets_BC1, scale_BC1 = targets_BC[..., None], scale_BC[..., None]
    logsumexp_BC, pull = jax.vjp(lambda x: jax.nn.logsumexp(x, axis=-1), logits_BCV)
    nll_BC = logsumexp_BC - jnp.take_along_axis(logits_BCV, targets_BC1, axis=-1)[..., 0]
    g_BCV = pull(scale_BC)[0]
    is_target = lax.broadcasted_iota(targets_BC.dtype, g_BCV.shape, 2) == targets_BC1
    return nll_BC, jnp.where(is_target, g_BCV - scale_BC1, g_BCV)


def _backward(recipe: Recipe, positions: int, saved, cotangent):
    dx_BLD, dw_DV, nll_BL, loss, total = saved
    dx_BLD = (dx_BLD.astype(jnp.float32) * cotangent).astype(dx_BLD.dtype)
    dw_DV = (dw_DV.astype(jnp.float32) * cotangent).astype(dw_DV.dtype)
    return dx_BLD, dw_DV, None, nll_BL * (cotangent / total), -loss * (cotangent / total)


chunked_loss.defvjp(_forward, _backward)


# The three GEMMs; C counts the positions of a chunk -----------------------------------------------


def _settings(recipe: Recipe, dtype: Any) -> GemmSettings:
    if recipe.casts:
        raise ValueError(f"chunked_loss quantizes nothing, and recipe {recipe.name!r} does")
    return gemm_settings(recipe, (), dtype, backend=None, whole=True)


def _multiply(recipe: Recipe, role: str, a: PlainOperand, b: PlainOperand, dtype) -> Array:
    """Computes one GEMM, under the names that `Transformer`'s own head has."""
    return named_matmul(_settings(recipe, a.x.dtype), role, "lm_head", a, b, dtype)


def _gathered(w_DV: Array, dtype: Any) -> Array:
    """Returns the weight in `dtype`, whole along D on each device."""
    # With the second constraint alone, XLA would gather first and then cast.
    return constrain(constrain(w_DV.astype(dtype), "embed", "vocab"), "residual", "vocab")


def _logits(recipe: Recipe, x_BCD: Array, w_DV: Array) -> Array:
    x = PlainOperand(x_BCD.reshape(-1, x_BCD.shape[-1]), -1)
    y = _multiply(recipe, "fwd", x, PlainOperand(w_DV, -2), jnp.float32)
    return constrain(y.reshape(*x_BCD.shape[:2], -1), "batch", "length", "vocab")


def _input_gradient(recipe: Recipe, g_BCV: Array, w_DV: Array) -> Array:
    g = PlainOperand(g_BCV.reshape(-1, g_BCV.shape[-1]), -1)
    dx = _multiply(recipe, "dgrad", g, PlainOperand(w_DV, -1), g_BCV.dtype)
    return constrain(dx.reshape(*g_BCV.shape[:2], -1), "batch", "length", "residual")


def _weight_gradient(recipe: Recipe, x_BCD: Array, g_BCV: Array) -> Array:
    """Returns float32 [devices, D, V]: the sum over the rows of each device."""

    def own(x_BCD, g_BCV):
        x, g = (PlainOperand(a.reshape(-1, a.shape[-1]), -2) for a in (x_BCD, g_BCV))
        return _multiply(recipe, "wgrad", x, g, jnp.float32)[None]

    axes = batch_axes(x_BCD.shape[0])
    if not axes:
        return own(x_BCD, g_BCV)
    # A GEMM with a batch axis of devices would do the same, but XLA drops its name when it finds
    # that the axis has size 1 on each device.
    rows = PartitionSpec(axes)
    dw = jax.shard_map(own, in_specs=(rows, rows), out_specs=rows, axis_names={*axes})(x_BCD, g_BCV)
    return constrain(dw, "batch", None, "vocab")


# Chunks -------------------------------------------------------------------------------------------


def split_chunks(x_BL: Array, positions: int) -> Array:
    """Returns [chunks, B, positions, ...], with zeros behind the last position."""
    batch, length, *rest = x_BL.shape
    chunks = -(-length // positions)
    padding = [(0, 0), (0, chunks * positions - length), *((0, 0) for _ in rest)]
    x_BL = jnp.pad(x_BL, padding).reshape(batch, chunks, positions, *rest)
    return constrain(x_BL.swapaxes(0, 1), None, "batch", "length", *("residual" for _ in rest))


def join_chunks(x: Array, length: int) -> Array:
    """The inverse of `split_chunks` for rows of `length` positions."""
    chunks, batch, positions, *rest = x.shape
    return x.swapaxes(0, 1).reshape(batch, chunks * positions, *rest)[:, :length]
