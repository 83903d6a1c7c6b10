"""One layer of the decoder: attention, then an MLP, each with a norm before and a residual after.

Legend: B batch, L length, D residual width, N query heads, K key and value heads, H head size,
F hidden width.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from fp8jax.gemm.frozen import FrozenKernel, has_frozen
from fp8jax.gemm.fused_mlp import can_fuse_mlp, fused_mlp
from fp8jax.gemm.modules import Dense, add_bias, together
from fp8jax.gemm.probe import TELEMETRY, watched
from fp8jax.gemm.promotable import promotable_dot
from fp8jax.lm.mesh import constrain, weight_specs
from fp8jax.lm.model.attention import Implementation, choose_attention
from fp8jax.lm.model.cache import KVCache, attend_cached, written
from fp8jax.lm.model.config import BIASES, MLPS, NORM_PLACES, ModelConfig
from fp8jax.lm.model.fp8_inputs import with_fp8_inputs
from fp8jax.lm.model.layer_kinds import LayerKind, kind_of
from fp8jax.lm.model.norms import RMSNorm, norm_layer
from fp8jax.lm.model.promotion import Promotion
from fp8jax.lm.model.rope import rotate
from fp8jax.numerics.formats import folded, power_of_two_below
from fp8jax.numerics.module_paths import MODULES
from fp8jax.numerics.names import as_recipe
from fp8jax.numerics.policy import Policy

# A collection: float32 [n_layers] amaxes, one leaf for each output inside a layer.
AMAXES = "amaxes"
# The leaf of "mlp" in it, and in `TELEMETRY`, for the input of "down": the output of SwiGLU.
HIDDEN = "hidden"


class LinearSpec(NamedTuple):
    """A linear of a layer.

    Attributes:
      name, features: of the linear and its output.
      axes: logical axes of its kernel.
      recompute_codes: as in `Dense`.
    """

    name: str
    features: int
    axes: tuple[str, str]
    recompute_codes: bool = False


@dataclasses.dataclass(frozen=True)
class Linears:
    """Creates and applies the linears of one part of a layer, attention or MLP.

    The linears become submodules of the flax module that calls this object. A linear's path is
    `path`/name; it decides the recipe, the bias and the random key.

    Attributes:
      config, policy, backend: as in `Transformer`.
      path: path of the part, such as "layers/mlp".
      key: random key of the layer, or None.
      promotion: of this layer; None where no layer ever is promoted.
      real_BL: bool [B, L], False for positions that carry zeros into every linear; None for none.
      seeded: as in `Transformer`.
    """

    config: ModelConfig
    policy: Policy
    backend: str | None
    path: str
    key: Any
    promotion: Promotion | None = None
    real_BL: Any = None
    seeded: bool = True

    def __call__(self, x, *linears: LinearSpec, input_scale=None) -> tuple[Array, ...]:
        """Applies each linear to x [..., K]; returns one array [..., features] for each.

        Args:
          input_scale: powers of two [K] by which x is divided before it is quantized, see `Dense`.

        Raises:
          ValueError: an input scale in a layer that can be promoted.
        """
        x = self.masked(x)
        layers = [self.layer(linear) for linear in linears]
        if self.promotion is not None:
            if input_scale is not None:
                raise ValueError(
                    "a layer with mlp='smooth_swiglu' cannot be promoted: use another mlp or turn "
                    "promotions off"
                )
            return tuple(self._promotable(layer, x, self.promotion) for layer in layers)
        return together(layers, x, self.keys(linear.name for linear in linears), input_scale)

    def masked(self, x_BLK):
        """Returns x with zeros in the positions that are not real."""
        return x_BLK if self.real_BL is None else jnp.where(self.real_BL[..., None], x_BLK, 0)

    def layer(self, linear: LinearSpec) -> Dense:
        """Returns the linear's module."""
        path = self._path_of(linear.name)
        # The outputs of "o" and "down" are added to the residual stream, whose variance grows with
        # each of the 2 * n_layers additions: so their kernels start smaller (GPT-2).
        shrink = math.sqrt(2 * self.config.n_layers) if linear.name in ("o", "down") else 1.0
        return Dense(
            linear.features,
            self.policy.recipe(path),
            self.backend,
            path in BIASES[self.config.biases],
            kernel_init=nn.initializers.normal(0.02 / shrink),
            kernel_axes=linear.axes,
            seeded=self.seeded,
            recompute_codes=linear.recompute_codes,
            gathered=weight_specs(*linear.axes),
            name=linear.name,
        )

    def keys(self, names: Iterable[str]) -> list[Any]:
        """Returns the random key of each linear: the layer's, folded with its place in MODULES."""
        return [fold_in(self.key, MODULES.index(self._path_of(name))) for name in names]

    def _path_of(self, name: str) -> str:
        return f"{self.path}/{name}"

    def _promotable(self, layer: Dense, x, promotion: Promotion) -> Array:
        """Applies the linear in its own recipe, or in the promotion's if it is promoted."""
        name = str(layer.name)
        (key,) = self.keys([name])
        weight, bias = layer.variables_for(x.shape[-1], key, name)
        if isinstance(weight.value, FrozenKernel):
            raise ValueError(f"layers with frozen kernels cannot be promoted: {name!r} is frozen")
        y = promotable_dot(
            x,
            weight,
            promotion.of(self._path_of(name)),
            low=as_recipe(layer.recipe),
            high=promotion.policy.recipe(self._path_of(name)),
            backend=self.backend,
            seeded=self.seeded,
        )
        return add_bias(y, bias)

    def fuses(self, x) -> bool:
        """Whether gate, up and down can run as one `fused_mlp`.

        Its kernels have no biases and no promotions, and gate and up share a recipe. They take the
        scales of arrays that are never whole, so no history may be empty.
        """
        if self.promotion is not None or not self.seeded:
            return False
        gate, up, down = (self._path_of(name) for name in ("gate", "up", "down"))
        recipe = self.policy.recipe(gate)
        if self.policy.recipe(up) != recipe:
            return False
        if not {gate, up, down}.isdisjoint(BIASES[self.config.biases]):
            return False
        return can_fuse_mlp(recipe, self.policy.recipe(down), self.backend, x.dtype)

    def gated(self, x, gate: LinearSpec, up: LinearSpec, down: LinearSpec) -> Array:
        """Returns down(silu(gate(x)) * up(x)), computed by `fused_mlp`; only where `fuses(x)`."""
        x = self.masked(x)

        def weight(linear: LinearSpec, size: int):
            (key,) = self.keys([linear.name])
            return self.layer(linear).variables_for(size, key, linear.name)[0]

        sizes = ((gate, x.shape[-1]), (up, x.shape[-1]), (down, up.features))
        recipes = [self.policy.recipe(self._path_of(linear.name)) for linear in (gate, down)]
        return fused_mlp(
            x,
            [weight(linear, size) for linear, size in sizes],
            recipes=(recipes[0], recipes[1]),
            backend=self.backend,
        )


class Attention(nn.Module):
    """Causal attention with its projections q, k, v and o.

    Attributes:
      config: shape of the model.
      linears: creates the projections.
      implementation: as in `dot_product_attention`.
      fp8_inputs: as in `RMSNorm`, for norms of queries and keys.
    """

    config: ModelConfig
    linears: Linears
    implementation: str | Implementation | None
    fp8_inputs: bool = False

    @nn.compact
    def __call__(self, x_BLD, segments_BL, positions_BL, kind: LayerKind, cache=None):
        """Returns y; with a cache, also the cache with the new tokens."""
        c = self.config

        def split_heads(y, heads: int):
            return y.reshape(*y.shape[:2], heads, c.head_dim)

        def norm(name: str) -> RMSNorm:
            offset = c.norm == "rms_offset"
            return RMSNorm(c.norm_eps, offset, self.fp8_inputs, name=name)

        q, k, v = self.linears(
            x_BLD,
            LinearSpec("q", c.n_heads * c.head_dim, ("embed", "heads")),
            LinearSpec("k", c.n_kv_heads * c.head_dim, ("embed", "kv_heads")),
            LinearSpec("v", c.n_kv_heads * c.head_dim, ("embed", "kv_heads")),
        )
        if c.qk_norm_joint:
            q, k = norm("q_norm")(q), norm("k_norm")(k)
        q_BLNH, k_BLKH = split_heads(q, c.n_heads), split_heads(k, c.n_kv_heads)
        if c.qk_norm and not c.qk_norm_joint:
            q_BLNH, k_BLKH = norm("q_norm")(q_BLNH), norm("k_norm")(k_BLKH)
        if kind.frequencies is not None:
            q_BLNH = rotate(q_BLNH, positions_BL, kind.frequencies, kind.magnitude)
            k_BLKH = rotate(k_BLKH, positions_BL, kind.frequencies, kind.magnitude)
        if c.query_scalar not in (0, c.head_dim):
            q_BLNH *= math.sqrt(c.head_dim / c.query_scalar)
        v_BLKH = split_heads(v, c.n_kv_heads)
        updated, keeps_y = None, False
        if cache is not None:
            updated = written(cache, k_BLKH, v_BLKH, positions_BL, segments_BL > 0)
        if updated is None or cache.fresh:
            chosen = choose_attention(self.implementation, q_BLNH)
            window = () if kind.window is None else (kind.window,)
            y_BLNH = chosen.attend(q_BLNH, k_BLKH, v_BLKH, segments_BL, *window)
            keeps_y = chosen.saves_output
        else:
            y_BLNH = attend_cached(q_BLNH, updated, positions_BL, kind.window)
        y = constrain(y_BLNH.reshape(*y_BLNH.shape[:2], -1), "batch", "length", "heads")
        o = LinearSpec("o", c.d_model, ("heads", "embed"), recompute_codes=keeps_y)
        y = self.linears(y, o)[0]
        return y if cache is None else (y, updated)


class FeedForward(nn.Module):
    """The MLP, with its linears gate (if gated), up and down.

    Attributes:
      config: shape of the model.
      linears: creates the linears.
      fp8_inputs: whether gate and up are kept for the backward in FP8 (fp8_inputs.py).
    """

    config: ModelConfig
    linears: Linears
    fp8_inputs: bool = False

    @nn.compact
    def __call__(self, x_BLD):
        mlp, features = MLPS[self.config.mlp], self.config.d_ff
        gate = LinearSpec("gate", features, ("embed", "mlp"))
        up = LinearSpec("up", features, ("embed", "mlp"))
        down = LinearSpec("down", self.config.d_model, ("mlp", "embed"))
        # The fused kernels never write the hidden activations, which a watched layer reports.
        watching = self.is_mutable_collection("intermediates") or TELEMETRY in self.variables
        separate = self.is_initializing() or watching or has_frozen(self.variables)
        separate = separate or self.fp8_inputs  # they keep gate and up in bfloat16
        if mlp.fusible and not separate and self.linears.fuses(x_BLD):
            return self.linears.gated(x_BLD, gate, up, down)
        if mlp.gated:
            gate_BLF, up_BLF = self.linears(x_BLD, gate, up)
            hidden_BLF = self._kept(mlp.hidden, gate_BLF, up_BLF)
        else:
            (up_BLF,) = self.linears(x_BLD, up)
            hidden_BLF = self._kept(mlp.activation, up_BLF)
        hidden_BLF = self.linears.masked(constrain(hidden_BLF, "batch", "length", "mlp"))
        self.sow("intermediates", HIDDEN, hidden_BLF)
        if self.has_variable(TELEMETRY, HIDDEN):
            hidden_BLF = watched(hidden_BLF, self.get_variable(TELEMETRY, HIDDEN))
        scale_F = _channel_scale(hidden_BLF) if mlp.smooth else None
        return self.linears(hidden_BLF, down, input_scale=scale_F)[0]

    def _kept(self, hidden: Callable[..., Array], *inputs: Array) -> Array:
        """Saves only the inputs: a scan would store every value in between for every layer."""
        if self.fp8_inputs:
            return with_fp8_inputs(hidden, inputs)
        return jax.checkpoint(lambda *inputs: hidden(*inputs), prevent_cse=False)(*inputs)


def _channel_scale(x_BLF: Float[Array, "B L F"]) -> Float[Array, " F"]:
    """Returns the power of two just below each channel's amax; 1 where that is 0, inf or NaN."""
    amax_F = jnp.max(jnp.abs(x_BLF), axis=(0, 1)).astype(jnp.float32)
    scale_F = power_of_two_below(lax.stop_gradient(amax_F))
    return jnp.where(jnp.isfinite(scale_F) & (scale_F > 0), scale_F, 1.0)


class Block(nn.Module):
    """One layer.

    Attributes:
      config: shape of the model.
      policy: decides the recipes of the layer's linears by their paths.
      backend, attention: as in `Transformer`.
      zero_padding, seeded: as in `Transformer`.
      fp8_inputs: whether norms and the MLP keep their inputs in FP8 (fp8_inputs.py).
    """

    config: ModelConfig
    policy: Policy
    backend: str | None
    attention: str | Implementation | None
    zero_padding: bool = False
    seeded: bool = True
    fp8_inputs: bool = False

    @nn.compact
    def __call__(
        self,
        x_BLD: Float[Array, "B L D"],
        segments_BL: Int[Array, "B L"],
        positions_BL: Int[Array, "B L"],
        key: Shaped[Array, "..."] | None = None,
        promotion: Promotion | None = None,
        cache: KVCache | None = None,
        kind: LayerKind | None = None,
    ) -> Float[Array, "B L D"] | tuple[Float[Array, "B L D"], KVCache]:
        """Returns the layer's output; with a cache, also the cache with the new tokens.

        `kind` is None where all layers are of one kind.
        """
        c, real_BL = self.config, segments_BL > 0 if self.zero_padding else None

        def linears(part: str) -> Linears:
            path = f"layers/{part}"
            return Linears(
                c,
                self.policy,
                self.backend,
                path,
                key,
                promotion,
                real_BL,
                self.seeded,
            )

        def normalized(y, name: str, here: bool):
            return norm_layer(c, name, fp8_inputs=self.fp8_inputs)(y) if here else y

        before, after = NORM_PLACES[c.norm_at]
        kind = kind_of(c, c.layer_pattern[0]) if kind is None else kind
        y = normalized(x_BLD, "attention_norm", before)
        attention = Attention(
            c, linears("attention"), self.attention, self.fp8_inputs, name="attention"
        )
        if cache is None:
            y = attention(y, segments_BL, positions_BL, kind)
        else:
            y, cache = attention(y, segments_BL, positions_BL, kind, cache)
        y = normalized(y, "attention_post_norm", after)
        x_BLD = constrain(x_BLD + y, "batch", "length", "residual")
        y = normalized(x_BLD, "mlp_norm", before)
        y = FeedForward(c, linears("mlp"), self.fp8_inputs, name="mlp")(y)
        y = normalized(y, "mlp_post_norm", after)
        x_BLD = constrain(x_BLD + y, "batch", "length", "residual")
        return x_BLD if cache is None else (x_BLD, cache)


def fold_in(key, index):
    """Returns the key folded with `index`, or None for None."""
    return None if key is None else folded(key, index)
