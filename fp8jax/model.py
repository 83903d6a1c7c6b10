"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Legend: B batch, L length, D residual width, N query heads, K key and value heads, H head size,
F hidden width, V vocabulary.

Parameters are float32 and do not depend on precision, rematerialisation or unrolling: all layers
are one stack, every leaf under "layers" having a leading axis of layers. They run as `lax.scan`s
over static slices of it, one slice for each stretch of layers with the same recipes (the first
and last ones may be exempt). So a checkpoint of one precision loads under any other. One
`nn.scan` a stretch, the usual spelling, would have made the tree depend on the policy.

Which product is quantised how is decided by the policy, by module path (`MODULES`).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from fp8jax.attention import dot_product_attention
from fp8jax.names import lookup
from fp8jax.nn import HISTORIES, Dense, to_max_combining
from fp8jax.recipe import HIGH_PRECISION, Policy, as_policy
from fp8jax.sharding import constrain

# The linears, by the paths that a policy's patterns see.
MODULES = (
    "layers/attention/q",
    "layers/attention/k",
    "layers/attention/v",
    "layers/attention/o",
    "layers/mlp/gate",
    "layers/mlp/up",
    "layers/mlp/down",
    "lm_head",
)

# What is kept of a layer for its backward; the rest is computed again. Quantised operands and
# histories are recomputed bit for bit, casts being deterministic.
REMAT: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a Transformer.

    Attributes:
      vocab_size: V, of embedding and head; may exceed the tokenizer's.
      d_model, n_layers, n_heads, n_kv_heads, d_ff: D, number of layers, N, K, F.
      head_dim: H.
      rope_theta: base of the rotary wavelengths.
      norm_eps: of RMSNorm.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    head_dim: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) <= 0:
                raise ValueError(f"{field.name}={getattr(self, field.name)} must be positive")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads={self.n_heads} is no multiple of n_kv_heads={self.n_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, got {self.head_dim}")

    def check_mesh(self, tensor: int) -> None:
        """Raises ValueError where the heads do not divide over `tensor` devices."""
        for name in ("n_heads", "n_kv_heads"):
            if getattr(self, name) % tensor:
                raise ValueError(
                    f"{name}={getattr(self, name)} does not divide over tensor={tensor} devices"
                )


# Vocabularies are those of the byte tokenizer, padded to a multiple of 64.
MODELS: dict[str, ModelConfig] = {
    "llama_tiny": ModelConfig(
        vocab_size=320, d_model=128, n_layers=4, n_heads=4, n_kv_heads=2, d_ff=384, head_dim=32
    ),
    "llama_125m": ModelConfig(
        vocab_size=320, d_model=768, n_layers=12, n_heads=12, n_kv_heads=12, d_ff=2048, head_dim=64
    ),
}  # fmt: skip


def rotate(x_BLNH: Float[Array, "B L N H"], positions_BL: Int[Array, "B L"], theta: float):
    """Rotary position embedding (arXiv 2104.09864) in float32, halves convention; x's dtype out."""
    half = x_BLNH.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions_BL[:, :, None, None].astype(jnp.float32) * frequencies[None, None, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x_BLNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BLNH.dtype)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * scale, in float32 inside; x's dtype out."""

    eps: float

    @nn.compact
    def __call__(self, x_BLD: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        init = nn.with_logical_partitioning(nn.initializers.ones, ("norm",))
        scale_D: Any = self.param("scale", init, (x_BLD.shape[-1],))
        y = x_BLD.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * scale_D[None, None]).astype(x_BLD.dtype)


class Attention(nn.Module):
    config: ModelConfig
    dense: Callable[..., Callable[..., Any]]

    @nn.compact
    def __call__(self, x_BLD, segments_BL, positions_BL):
        c = self.config
        heads = lambda y, n: y.reshape(*y.shape[:2], n, c.head_dim)  # noqa: E731
        q = self.dense("q", c.n_heads * c.head_dim, ("embed", "heads"))(x_BLD)
        k = self.dense("k", c.n_kv_heads * c.head_dim, ("embed", "kv_heads"))(x_BLD)
        v = self.dense("v", c.n_kv_heads * c.head_dim, ("embed", "kv_heads"))(x_BLD)
        q_BLNH = rotate(heads(q, c.n_heads), positions_BL, c.rope_theta)
        k_BLKH = rotate(heads(k, c.n_kv_heads), positions_BL, c.rope_theta)
        y_BLNH = dot_product_attention(q_BLNH, k_BLKH, heads(v, c.n_kv_heads), segments_BL)
        y = constrain(y_BLNH.reshape(*y_BLNH.shape[:2], -1), "batch", "length", "heads")
        return self.dense("o", c.d_model, ("heads", "embed"))(y)


class SwiGLU(nn.Module):
    config: ModelConfig
    dense: Callable[..., Callable[..., Any]]

    @nn.compact
    def __call__(self, x_BLD):
        gate_BLF = self.dense("gate", self.config.d_ff, ("embed", "mlp"))(x_BLD)
        up_BLF = self.dense("up", self.config.d_ff, ("embed", "mlp"))(x_BLD)
        hidden_BLF = constrain(nn.silu(gate_BLF) * up_BLF, "batch", "length", "mlp")
        return self.dense("down", self.config.d_model, ("mlp", "embed"))(hidden_BLF)


class Block(nn.Module):
    """One layer. `policy` decides the recipes of its linears, by their paths."""

    config: ModelConfig
    policy: Policy
    backend: str | None

    @nn.compact
    def __call__(
        self,
        x_BLD: Float[Array, "B L D"],
        segments_BL: Int[Array, "B L"],
        positions_BL: Int[Array, "B L"],
        key: Shaped[Array, "..."] | None = None,
    ) -> Float[Array, "B L D"]:
        c = self.config

        def dense(prefix: str) -> Callable[..., Callable[..., Any]]:
            def make(name: str, features: int, axes: tuple[str, str]) -> Callable[..., Any]:
                path = f"layers/{prefix}/{name}"
                # What is added to the residual stream starts smaller: its variance grows with
                # every one of the 2 * n_layers additions (GPT-2).
                shrink = math.sqrt(2 * c.n_layers) if name in ("o", "down") else 1.0
                layer = Dense(
                    features, self.policy.recipe(path), self.backend,
                    kernel_init=nn.initializers.normal(0.02 / shrink), kernel_axes=axes, name=name,
                )  # fmt: skip
                return lambda x: layer(x, _fold_in(key, MODULES.index(path)))

            return make

        y = RMSNorm(c.norm_eps, name="attention_norm")(x_BLD)
        y = Attention(c, dense("attention"), name="attention")(y, segments_BL, positions_BL)
        x_BLD = constrain(x_BLD + y, "batch", "length", "residual")
        y = SwiGLU(c, dense("mlp"), name="mlp")(RMSNorm(c.norm_eps, name="mlp_norm")(x_BLD))
        return constrain(x_BLD + y, "batch", "length", "residual")


class Transformer(nn.Module):
    """tokens -> logits, with amax histories under `fp8jax.nn.HISTORIES` if the policy delays.

    Attributes:
      config: shapes.
      policy: a key of `POLICIES` or a `Policy`. The first step of a delayed one runs with
        `policy.seeding()`.
      backend: a key of `BACKENDS`, or None for the fastest that can.
      remat: a key of `REMAT`.
      unroll: layers a loop iteration; n_layers for no loop, which compiles longer and saves the
        copies in and out of the stack.
      dtype: of activations and residual stream.
    """

    config: ModelConfig
    policy: str | Policy = "bf16"
    backend: str | None = None
    remat: str = "none"
    unroll: int = 1
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(
        self,
        tokens_BL: Int[Array, "B L"],
        segments_BL: Int[Array, "B L"],
        positions_BL: Int[Array, "B L"],
        key: Shaped[Array, "..."] | None = None,
    ) -> Float[Array, "B L V"]:
        """float32 logits of the next token; `key` is for policies that round stochastically.

        Raises ValueError for unknown names and for a policy that does not fit the model."""
        c, policy = self.config, as_policy(self.policy)
        policy.check(MODULES, c.n_layers)
        init = nn.initializers.normal(0.02)
        table_VD: Any = self.param(
            "embedding", nn.with_logical_partitioning(init, ("vocab", "embed")),
            (c.vocab_size, c.d_model),
        )  # fmt: skip
        # Gathered over fsdp before the look-up, as bfloat16: otherwise XLA would shard its result
        # like the table and then move all of it.
        table_VD = constrain(table_VD.astype(self.dtype), "vocab", "residual")
        x_BLD = jnp.take(table_VD, tokens_BL, axis=0)
        x_BLD = constrain(x_BLD, "batch", "length", "residual")
        x_BLD = self._layers(policy, x_BLD, segments_BL, positions_BL, key)
        x_BLD = RMSNorm(c.norm_eps, name="final_norm")(x_BLD)
        head = Dense(
            c.vocab_size, policy.recipe("lm_head"), self.backend, kernel_init=init,
            kernel_axes=("embed", "vocab"), preferred_element_type=jnp.float32, name="lm_head",
        )  # fmt: skip
        logits_BLV = head(x_BLD, _fold_in(key, c.n_layers))
        return constrain(logits_BLV, "batch", "length", "vocab")

    def _layers(self, policy: Policy, x_BLD, segments_BL, positions_BL, key):
        """All layers, stretch by stretch of the stack."""
        remat = lookup("remat policy", self.remat, REMAT)
        params, histories = self._stack(policy)
        for begin, end, recipes in _stretches(policy, self.config.n_layers):
            block = Block(self.config, recipes, self.backend, parent=None)

            def layer(x, scanned, block=block):
                variables, index = scanned
                layer_key = _fold_in(key, index)
                return block.apply(variables, x, segments_BL, positions_BL, layer_key), None

            if remat is not None:
                layer = jax.checkpoint(layer, policy=remat, prevent_cse=False)
            variables = {"params": params}
            if _delays_layers(recipes):
                variables[HISTORIES] = histories
            part = jax.tree.map(lambda leaf, b=begin, e=end: leaf[b:e], variables)
            if HISTORIES in part:  # after slicing, which max-combining arrays do not support
                part[HISTORIES] = to_max_combining(part[HISTORIES])
            scanned = (part, jnp.arange(begin, end))
            x_BLD, _ = lax.scan(layer, x_BLD, scanned, unroll=min(self.unroll, end - begin))
        return x_BLD

    def _stack(self, policy: Policy) -> tuple[Any, Any]:
        """Parameters and histories of all layers, with a leading axis of layers."""
        c = self.config
        # Without exemptions: the histories exist for all layers, used or not.
        block = Block(c, policy.without_exemptions(), self.backend, parent=None)
        ids = jnp.zeros((1, 1), jnp.int32)
        inputs = (jnp.zeros((1, 1, c.d_model), self.dtype), ids, ids, jax.random.key(0))

        def init_params(rng):
            keys = jax.random.split(rng, c.n_layers)
            stacked = jax.vmap(lambda key: block.init(key, *inputs)["params"])(keys)
            return nn.meta.add_axis(stacked, 0, {nn.meta.PARTITION_NAME: "layers"})

        params = self.param("layers", init_params)
        if not _delays_layers(policy):
            return params, {}

        def init_histories():
            shapes = jax.eval_shape(block.init, jax.random.key(0), *inputs)[HISTORIES]
            return jax.tree.map(lambda s: jnp.zeros((c.n_layers, *s.shape), s.dtype), shapes)

        return params, self.variable(HISTORIES, "layers", init_histories).value


def _fold_in(key, index):
    return None if key is None else jax.random.fold_in(key, index)


def _delays_layers(policy: Policy) -> bool:
    """Whether a layer's linear keeps histories, the head aside."""
    return any(policy.recipe(path).histories for path in MODULES if path.startswith("layers/"))


def _stretches(policy: Policy, n_layers: int) -> list[tuple[int, int, Policy]]:
    """(first layer, one past the last, policy) of each stretch of layers with the same recipes."""
    exempt = Policy((("layers/*", HIGH_PRECISION),), name="bf16")
    first, last = policy.bf16_first, n_layers - policy.bf16_last
    stretches = [
        (0, first, exempt),
        (first, last, policy.without_exemptions()),
        (last, n_layers, exempt),
    ]
    return [(begin, end, recipes) for begin, end, recipes in stretches if begin < end]


def abstract_variables(model: Transformer) -> Any:
    """Shapes of the model's variables, boxed with logical axis names; nothing is allocated."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    key = jax.random.key(0)
    return jax.eval_shape(model.init, key, tokens, tokens, tokens, key)


def count_params(config: ModelConfig) -> int:
    """Number of parameters, embedding and head included."""
    params = abstract_variables(Transformer(config))["params"]
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Model FLOPs of training on one token: forward and backward, nothing counted twice.

    6 for each weight of a matrix product, and 6 * seq_len * N * H a layer for causal attention
    (scores and values, half of the square). The embedding's look-up is free.
    """
    c = config
    attention = c.d_model * c.head_dim * (2 * c.n_heads + 2 * c.n_kv_heads)
    weights = c.n_layers * (attention + 3 * c.d_model * c.d_ff) + c.d_model * c.vocab_size
    return 6 * weights + 6 * c.n_layers * seq_len * c.n_heads * c.head_dim
