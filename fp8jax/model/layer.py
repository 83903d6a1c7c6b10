"""TODO docstring."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from fp8jax.device.mesh import constrain
from fp8jax.linear.fused_mlp import can_fuse_mlp, fused_mlp
from fp8jax.linear.modules import Dense, together
from fp8jax.linear.promotable import promotable_dot
from fp8jax.model.attention import Implementation, dot_product_attention
from fp8jax.model.config import BIASES, MLPS, MODULES, ModelConfig
from fp8jax.model.norms import RMSNorm, norm_layer
from fp8jax.model.rope import rotate
from fp8jax.numerics.formats import power_of_two_below
from fp8jax.numerics.policy import Policy
from fp8jax.numerics.recipes import as_recipe

AMAXES = "amaxes"  # a collection: float32 [n_layers] for each output of a part of a layer


HIDDEN = "hidden"  # among them, of mlp: what its down takes, SwiGLU's output


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
        return [fold_in(self.key, MODULES.index(f"{self.path}/{name}")) for name in names]

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
        y = promotable_dot(
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
        return plain and can_fuse_mlp(*recipes, self.backend, x.dtype)

    def gated(self, x, *linears) -> Array:
        """down(silu(gate(x)) * up(x)) of those three."""
        layers = [self.layer(*linear) for linear in linears]
        names = [name for name, _, _ in linears]
        sizes = (x.shape[-1], x.shape[-1], layers[1].features)
        kernels, _, states = zip(
            *(layer.variables_for(size) for layer, size in zip(layers, sizes, strict=True)),
            strict=True,
        )
        return fused_mlp(
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

        y = norm_layer(c, "attention_norm")(x_BLD)
        attention = Attention(c, linears("attention"), self.attention, name="attention")
        y = attention(y, segments_BL, positions_BL)
        x_BLD = constrain(x_BLD + y, "batch", "length", "residual")
        y = FeedForward(c, linears("mlp"), name="mlp")(norm_layer(c, "mlp_norm")(x_BLD))
        return constrain(x_BLD + y, "batch", "length", "residual")


def fold_in(key, index):
    return None if key is None else jax.random.fold_in(key, index)
