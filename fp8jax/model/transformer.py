"""The decoder that all families share: GPT-2, Llama and Qwen differ by configuration only.

Legend: B batch, L length, D residual width, N query heads, K key and value heads, H head size,
F hidden width, V vocabulary, P learned positions.

Parameters are float32 and do not depend on precision, rematerialisation or unrolling: all layers
are one stack, every leaf under "layers" having a leading axis of layers. They run as `lax.scan`s
over static slices of it, one slice for each stretch of layers with the same recipes (the first
and last ones may be exempt). So a checkpoint of one precision loads under any other. One
`nn.scan` a stretch, the usual spelling, would have made the tree depend on the policy.

Which product is quantised how is decided by the policy, by module path (`MODULES`). Which parts a
model is made of is decided by its `ModelConfig` (config.py).
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from fp8jax.device.mesh import constrain
from fp8jax.linear.dot import OPERAND, PRODUCT
from fp8jax.linear.fused_mlp import can_fuse, gated_mlp
from fp8jax.linear.modules import HISTORIES, Dense, Fp8DotGeneral, to_max_combining, together
from fp8jax.linear.promotable import switched_dot
from fp8jax.lookup import lookup
from fp8jax.model.attention import Implementation, dot_product_attention
from fp8jax.model.config import BIASES, MLPS, MODULES, ModelConfig
from fp8jax.model.embedding import look_up
from fp8jax.model.rope import rotate
from fp8jax.numerics.formats import power_of_two_below
from fp8jax.numerics.policy import Policy, as_policy
from fp8jax.numerics.recipe import HIGH_PRECISION, as_recipe
from fp8jax.numerics.scaling import tensor_amax

# What is kept of a layer for its backward; the rest is computed again: results of its linears
# ("dots"), and their quantised inputs too, so that none is quantised twice ("quantised"). Where
# they are computed again they have the same bits, casts being deterministic.
REMAT: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT),
    "quantised": jax.checkpoint_policies.save_only_these_names(PRODUCT, OPERAND),
    "full": jax.checkpoint_policies.nothing_saveable,
}


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, float32 inside; x's dtype out."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * _vector(self, "scale", nn.initializers.ones, x)).astype(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * scale + bias, as `RMSNorm`."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        y = y * _vector(self, "scale", nn.initializers.ones, x)
        return (y + _vector(self, "bias", nn.initializers.zeros, x)).astype(x.dtype)


def _vector(module: nn.Module, name: str, init: Any, x: Array) -> Array:
    """A parameter for each entry of x's last axis, with as many axes as x."""
    init = nn.with_logical_partitioning(init, ("norm",))
    vector_D: Any = module.param(name, init, (x.shape[-1],))
    return vector_D.reshape((1,) * (x.ndim - 1) + (-1,))


AMAXES = "amaxes"  # a collection: float32 [n_layers] for each output of a part of a layer


HIDDEN = "hidden"  # among them, of mlp: what its down takes, SwiGLU's output


NORMS: dict[str, type[nn.Module]] = {"rms": RMSNorm, "layer": LayerNorm}


def _norm(config: ModelConfig, name: str) -> Callable[..., Any]:
    return lookup("norm", config.norm, NORMS)(config.norm_eps, name=name)  # type: ignore[call-arg]


@dataclasses.dataclass(frozen=True)
class Linears:
    """The linears of one part of a layer, by their names; the caller's modules."""

    config: ModelConfig
    policy: Policy
    backend: str | None
    path: str  # of the part, such as "layers/mlp"
    key: Any
    high: Policy | None = None  # of layers that are promoted
    promoted: Any = None  # bool []: whether this one is; None where that never happens

    def layer(self, name: str, features: int, axes: tuple[str, str]) -> Dense:
        path = f"{self.path}/{name}"
        # What is added to the residual stream starts smaller: its variance grows with every one of
        # the 2 * n_layers additions (GPT-2).
        shrink = math.sqrt(2 * self.config.n_layers) if name in ("o", "down") else 1.0
        return Dense(
            features, self.policy.recipe(path), self.backend, path in BIASES[self.config.biases],
            kernel_init=nn.initializers.normal(0.02 / shrink), kernel_axes=axes, name=name,
        )  # fmt: skip

    def keys(self, names: Iterable[str]) -> list[Any]:
        return [_fold_in(self.key, MODULES.index(f"{self.path}/{name}")) for name in names]

    def __call__(self, x, *linears, input_scale=None) -> tuple[Array, ...]:
        """What each (name, features, axes of the kernel) makes of x."""
        layers = [self.layer(*linear) for linear in linears]
        if self.promoted is not None and self.high is not None:
            if input_scale is not None:
                raise ValueError("layers with smooth_swiglu cannot be promoted")
            return tuple(self._switched(layer, x) for layer in layers)
        return together(layers, x, self.keys(name for name, _, _ in linears), input_scale)

    def _switched(self, layer: Dense, x) -> Array:
        """What the layer makes of x, in the recipe of its policy or of the high one."""
        assert self.high is not None  # the caller has looked
        kernel, bias, histories = layer.variables_for(x.shape[-1])
        y = switched_dot(
            x, kernel, self.promoted, low=as_recipe(layer.recipe),
            high=self.high.recipe(f"{self.path}/{layer.name}"), state=histories,
            key=self.keys([str(layer.name)])[0], backend=self.backend, scope=str(layer.name),
        )  # fmt: skip
        return y if bias is None else y + bias.astype(y.dtype).reshape((1,) * (x.ndim - 1) + (-1,))

    def fuses(self, x) -> bool:
        """Whether gate, up and down run as one, the wide arrays made inside kernels
        (linear/fused_mlp.py)."""
        if self.promoted is not None:
            return False
        gate, up, down = paths = [f"{self.path}/{name}" for name in ("gate", "up", "down")]
        recipes = self.policy.recipe(gate), self.policy.recipe(down)
        plain = self.policy.recipe(up) == recipes[0] and not {*paths} & {
            *BIASES[self.config.biases]
        }
        return plain and can_fuse(*recipes, self.backend, x.dtype)

    def gated(self, x, *linears) -> Array:
        """down(silu(gate(x)) * up(x)) of those three."""
        layers = [self.layer(*linear) for linear in linears]
        names = [name for name, _, _ in linears]
        sizes = (x.shape[-1], x.shape[-1], layers[1].features)
        kernels, _, states = zip(
            *(layer.variables_for(size) for layer, size in zip(layers, sizes, strict=True)),
            strict=True,
        )
        return gated_mlp(
            x, kernels, recipes=(as_recipe(layers[0].recipe), as_recipe(layers[2].recipe)),
            states=states, keys=self.keys(names), backend=self.backend, scopes=names,
        )  # fmt: skip


class Attention(nn.Module):
    config: ModelConfig
    linears: "Linears"
    implementation: str | Implementation | None

    @nn.compact
    def __call__(self, x_BLD, segments_BL, positions_BL):
        c = self.config
        heads = lambda y, n: y.reshape(*y.shape[:2], n, c.head_dim)  # noqa: E731
        of_keys = (c.n_kv_heads * c.head_dim, ("embed", "kv_heads"))
        q, k, v = self.linears(
            x_BLD, ("q", c.n_heads * c.head_dim, ("embed", "heads")), ("k", *of_keys),
            ("v", *of_keys),
        )  # fmt: skip
        q_BLNH, k_BLKH = heads(q, c.n_heads), heads(k, c.n_kv_heads)
        if c.qk_norm:
            q_BLNH = RMSNorm(c.norm_eps, name="q_norm")(q_BLNH)
            k_BLKH = RMSNorm(c.norm_eps, name="k_norm")(k_BLKH)
        if not c.learned_positions:
            q_BLNH = rotate(q_BLNH, positions_BL, c.rope_theta, c.rope_scaling)
            k_BLKH = rotate(k_BLKH, positions_BL, c.rope_theta, c.rope_scaling)
        y_BLNH = dot_product_attention(
            q_BLNH, k_BLKH, heads(v, c.n_kv_heads), segments_BL, implementation=self.implementation
        )
        y = constrain(y_BLNH.reshape(*y_BLNH.shape[:2], -1), "batch", "length", "heads")
        return self.linears(y, ("o", c.d_model, ("heads", "embed")))[0]


class FeedForward(nn.Module):
    config: ModelConfig
    linears: "Linears"

    @nn.compact
    def __call__(self, x_BLD):
        mlp, features = MLPS[self.config.mlp], self.config.d_ff
        gate, up = (("gate", features, ("embed", "mlp")), ("up", features, ("embed", "mlp")))
        down = ("down", self.config.d_model, ("mlp", "embed"))
        watched = self.is_mutable_collection("intermediates")  # kernels keep the wide arrays
        alone = self.is_initializing() or watched
        if mlp.fusible and not alone and self.linears.fuses(x_BLD):
            return self.linears.gated(x_BLD, gate, up, down)
        if mlp.gated:
            gate_BLF, up_BLF = self.linears(x_BLD, gate, up)
            hidden_BLF = mlp.activation(gate_BLF) * up_BLF
        else:
            (up_BLF,) = self.linears(x_BLD, up)
            hidden_BLF = mlp.activation(up_BLF)
        hidden_BLF = constrain(hidden_BLF, "batch", "length", "mlp")
        self.sow("intermediates", HIDDEN, hidden_BLF)
        scale_F = _channel_scale(hidden_BLF) if mlp.smooth else None
        return self.linears(hidden_BLF, down, input_scale=scale_F)[0]


def _channel_scale(x_BLF: Float[Array, "B L F"]) -> Float[Array, " F"]:
    """The power of two just below each channel's amax; 1 where there is none."""
    amax_F = jnp.max(jnp.abs(x_BLF), axis=(0, 1)).astype(jnp.float32)
    scale_F = power_of_two_below(lax.stop_gradient(amax_F))
    return jnp.where(jnp.isfinite(scale_F) & (scale_F > 0), scale_F, 1.0)


class Block(nn.Module):
    """One layer. `policy` decides the recipes of its linears, by their paths; `high` where it is
    promoted."""

    config: ModelConfig
    policy: Policy
    backend: str | None
    attention: str | Implementation | None
    high: Policy | None = None

    @nn.compact
    def __call__(
        self,
        x_BLD: Float[Array, "B L D"],
        segments_BL: Int[Array, "B L"],
        positions_BL: Int[Array, "B L"],
        key: Shaped[Array, "..."] | None = None,
        promoted: Bool[Array, ""] | None = None,
    ) -> Float[Array, "B L D"]:
        c = self.config

        def linears(prefix: str) -> Linears:
            path = f"layers/{prefix}"
            return Linears(c, self.policy, self.backend, path, key, self.high, promoted)

        y = _norm(c, "attention_norm")(x_BLD)
        attention = Attention(c, linears("attention"), self.attention, name="attention")
        y = attention(y, segments_BL, positions_BL)
        x_BLD = constrain(x_BLD + y, "batch", "length", "residual")
        y = FeedForward(c, linears("mlp"), name="mlp")(_norm(c, "mlp_norm")(x_BLD))
        return constrain(x_BLD + y, "batch", "length", "residual")


class Transformer(nn.Module):
    """tokens -> logits, with amax histories under `fp8jax.nn.HISTORIES` if the policy delays.

    Attributes:
      config: shapes.
      policy: a key of `POLICIES` or a `Policy`. The first step of a delayed one runs with
        `policy.seeding()`.
      backend: a key of `BACKENDS`, or None for the fastest that can.
      attention: a key of `fp8jax.attention.ATTENTIONS`, an `Implementation`, or None for "xla".
      remat: a key of `REMAT`.
      unroll: layers a loop iteration; n_layers for no loop, which compiles longer and saves the
        copies in and out of the stack.
      dtype: of activations and residual stream.
      high: a key of `POLICIES` or a `Policy` without histories, for layers that are promoted; None
        where that never happens.

    `apply(..., mutable=[AMAXES])` also gives the largest magnitude of what each part of each layer
    computes, NaN where one is NaN.
    """

    config: ModelConfig
    policy: str | Policy = "bf16"
    backend: str | None = None
    attention: str | Implementation | None = None
    remat: str = "none"
    unroll: int = 1
    dtype: Any = jnp.bfloat16
    high: str | Policy | None = None

    @nn.compact
    def __call__(
        self,
        tokens_BL: Int[Array, "B L"],
        segments_BL: Int[Array, "B L"],
        positions_BL: Int[Array, "B L"],
        key: Shaped[Array, "..."] | None = None,
        promoted: Bool[Array, " layers"] | None = None,
    ) -> Float[Array, "B L V"]:
        """float32 logits of the next token; `key` is for policies that round stochastically,
        `promoted` says which layers run in the policy `high` instead, None for none.

        Raises ValueError for unknown names and for a policy that does not fit the model."""
        c, policy = self.config, as_policy(self.policy)
        policy.check(c.modules, c.n_layers)
        c.check_length(tokens_BL.shape[1])
        init = nn.with_logical_partitioning(nn.initializers.normal(0.02), ("vocab", "embed"))
        table_VD: Any = self.param("embedding", init, (c.vocab_size, c.d_model))
        x_BLD = look_up(table_VD, tokens_BL, "vocab", self.dtype)
        if c.learned_positions:
            init = nn.with_logical_partitioning(
                nn.initializers.normal(0.02), ("positions", "embed")
            )
            table_PD: Any = self.param("position_embedding", init, (c.learned_positions, c.d_model))
            x_BLD += look_up(table_PD, positions_BL, "positions", self.dtype)
        x_BLD = constrain(x_BLD, "batch", "length", "residual")
        x_BLD = self._layers(policy, x_BLD, segments_BL, positions_BL, key, promoted)
        x_BLD = _norm(c, "final_norm")(x_BLD)
        logits_BLV = self._head(policy, x_BLD, table_VD, _fold_in(key, c.n_layers))
        return constrain(logits_BLV, "batch", "length", "vocab")

    def _head(self, policy: Policy, x_BLD, table_VD, key) -> Float[Array, "B L V"]:
        """float32 logits, by a matrix of its own or by the embedding."""
        recipe = policy.recipe("lm_head")
        if self.config.tie_embeddings:
            head = Fp8DotGeneral(recipe, self.backend, name="lm_head")
            return head(
                x_BLD, table_VD, (((2,), (1,)), ((), ())), preferred_element_type=jnp.float32,
                key=key,
            )  # fmt: skip
        return Dense(
            self.config.vocab_size, recipe, self.backend,
            kernel_init=nn.initializers.normal(0.02), kernel_axes=("embed", "vocab"),
            preferred_element_type=jnp.float32, name="lm_head",
        )(x_BLD, key)  # fmt: skip

    def _layers(self, policy: Policy, x_BLD, segments_BL, positions_BL, key, promoted):
        """All layers, stretch by stretch of the stack."""
        remat = lookup("remat policy", self.remat, REMAT)
        params, histories = self._stack(policy)
        if self.is_initializing():  # on a row of one token, which not every attention takes
            return x_BLD
        watching, amaxes = self.is_mutable_collection(AMAXES), []
        for begin, end, recipes in _stretches(policy, self.config.n_layers):
            exact = all(not recipes.recipe(path).casts for path in MODULES)
            high = None if exact or self.high is None else as_policy(self.high)
            block = Block(self.config, recipes, self.backend, self.attention, high, parent=None)

            def layer(x, scanned, block=block):
                variables, index, flag = scanned
                inputs = x, segments_BL, positions_BL, _fold_in(key, index), flag
                if not watching:
                    return block.apply(variables, *inputs), None
                y, seen = block.apply(
                    variables, *inputs, capture_intermediates=True, mutable=["intermediates"]
                )
                return y, jax.tree.map(tensor_amax, seen["intermediates"])

            if remat is not None:
                layer = jax.checkpoint(layer, policy=remat, prevent_cse=False)
            variables = {"params": params}
            if _delays_layers(recipes):
                variables[HISTORIES] = histories
            part = jax.tree.map(lambda leaf, b=begin, e=end: leaf[b:e], variables)
            if HISTORIES in part:  # after slicing, which max-combining arrays do not support
                part[HISTORIES] = to_max_combining(part[HISTORIES])
            flags = None if high is None or promoted is None else promoted[begin:end]
            scanned = (part, jnp.arange(begin, end), flags)
            x_BLD, seen = lax.scan(layer, x_BLD, scanned, unroll=min(self.unroll, end - begin))
            amaxes.append(seen)
        if watching:
            stacked = jax.tree.map(lambda *parts: jnp.concatenate(parts), *amaxes)
            self.variable(AMAXES, "layers", lambda: stacked)
        return x_BLD

    def _stack(self, policy: Policy) -> tuple[Any, Any]:
        """Parameters and histories of all layers, with a leading axis of layers."""
        c = self.config
        # Without exemptions: the histories exist for all layers, used or not.
        block = Block(c, policy.without_exemptions(), self.backend, None, parent=None)
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
    first, last = policy.exempt(n_layers)
    last = n_layers - last
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
