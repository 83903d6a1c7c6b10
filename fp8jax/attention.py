"""Causal attention that stays inside a document.

Legend: B batch, T query length, S key length, N query heads, K key and value heads, H head size.

The core is never quantised: scores and their softmax are float32 inside, inputs and outputs in
the activations' dtype. Packed rows carry segment ids; a query sees the keys of its own segment
only, at its own position and before.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def dot_product_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    segments_BT: Int[Array, "B T"],
) -> Float[Array, "B T N H"]:
    """softmax(q k^T / sqrt(H)) v, causal and within segments; N is a multiple of K (GQA).

    Args:
      q_BTNH, k_BTKH, v_BTKH: one float dtype, which is also that of the result.
      segments_BT: document number of each position within its row; 0 is padding, and attends to
        padding.
    """
    same_BTT = segments_BT[:, :, None] == segments_BT[:, None, :]
    causal_TT = jnp.tril(jnp.ones((q_BTNH.shape[1],) * 2, bool))
    mask_B1TT = (same_BTT & causal_TT[None])[:, None]
    return jax.nn.dot_product_attention(q_BTNH, k_BTKH, v_BTKH, mask=mask_B1TT)
