"""The shape of a transformer, and what follows from it: its linears, its checks, its FLOPs.

One decoder serves all model families. The fields of `ModelConfig` tell them apart:

    family      norm   MLP        positions            biases  q and k    head
    GPT-2       layer  gelu_tanh  learned              all     plain      tied
    GPT (111M   layer  gelu       learned              all     plain      tied
     to 13B)
    Llama 2, 3  rms    swiglu     RoPE                 none    plain      its own
    Mistral     rms    swiglu     RoPE, windows        none    plain      its own
    Phi 3, 4    rms    swiglu     RoPE of a part       none    plain      its own
    SmolLM 3    rms    swiglu     RoPE, none in some   none    plain      tied
    Qwen 2, 2.5 rms    swiglu     RoPE, theta 1e6      q k v   plain      tied if small
    Qwen 3      rms    swiglu     RoPE, theta 1e6      none    normalized tied if small
    OLMo 2, 3   rms    swiglu     RoPE, windows in 3   none    normalized its own
                after                                          together
    Gemma 3     rms +1 geglu_tanh RoPE, two bases,     none    normalized tied
                both              windows

models.py has the sizes of each family, and their sources.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fp8jax.lm.model.rope import ROPE_SCALINGS, LongRope, RopeScaling
from fp8jax.lookup import brief, lookup
from fp8jax.numerics.module_paths import MODULES


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLP:
    """A kind of MLP.

    Attributes:
      gated: the hidden activations are activation(gate) * up if True, else activation(up).
      activation: an elementwise function.
      smooth: before "down" quantizes its input, each channel is divided by the power of two just
        below its amax: Smooth-SwiGLU (arXiv 2409.12517).
      limit: the gate is at most this before its activation, and up between minus and plus this, so
        that no hidden activation is an outlier (DeepSeek-V4); None for no limit.

    Raises:
      ValueError: smooth without SwiGLU, a limit without a gate.
    """

    gated: bool
    activation: Callable[[Float[Array, "..."]], Float[Array, "..."]]
    smooth: bool = False
    limit: float | None = None

    def __post_init__(self):
        if self.smooth and not (self.gated and self.activation is jax.nn.silu):
            raise ValueError(f"smooth=True needs a gated MLP with SiLU, got {self}")
        if self.limit is not None and not self.gated:
            raise ValueError(f"limit={self.limit} needs a gated MLP, got {self}")

    def hidden(self, gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
        """Returns the hidden activations of a gated MLP."""
        if self.limit is not None:
            gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return self.activation(gate) * up

    @property
    def fusible(self) -> bool:
        """Whether `fused_mlp` can compute it: it knows SwiGLU without smoothing and limits."""
        plain = not self.smooth and self.limit is None
        return self.gated and self.activation is jax.nn.silu and plain


MLPS = {
    "swiglu": MLP(gated=True, activation=jax.nn.silu),
    "smooth_swiglu": MLP(gated=True, activation=jax.nn.silu, smooth=True),
    "clamped_swiglu": MLP(gated=True, activation=jax.nn.silu, limit=10.0),
    "geglu_tanh": MLP(gated=True, activation=functools.partial(jax.nn.gelu, approximate=True)),
    "gelu": MLP(gated=False, activation=functools.partial(jax.nn.gelu, approximate=False)),
    "gelu_tanh": MLP(gated=False, activation=functools.partial(jax.nn.gelu, approximate=True)),
}


# Name -> the linears that have a bias. A LayerNorm has its own bias, whatever this says.
BIASES: dict[str, tuple[str, ...]] = {
    "none": (),
    "qkv": MODULES[:3],
    "all": MODULES[:-1],
}

# Name -> whether a part of a layer has a norm before it, and one after it, before the residual.
NORM_PLACES = {"before": (True, False), "after": (False, True), "both": (True, True)}

# Letters of `ModelConfig.layer_pattern`.
LAYER_KINDS = {
    "f": "all keys before a query",
    "w": "the keys of a window",
    "n": "all keys, without positions",
}

# Fields that only rotary positions have -> their values without effect.
_ROTARY = {"rope_theta": 1e4, "rope_scaling": None, "window_rope_theta": 0.0, "rotary_dim": 0}

# Bounds of sizes, so that a slip of a digit is named before anything is made for each layer. No
# program of today has more memory than a pod of 9,216 TPU v7 with 192 GiB each, and training takes
# 16 bytes a weight: float32, its gradient, and AdamW's two moments.
MOST_WEIGHTS = 9_216 * 192 * 2**30 // 16
# A layer waits for the one before. At a microsecond each, about the launch of one kernel, a token
# takes a second for so many.
MOST_LAYERS = 10**6
MOST_WINDOW = 2**30  # positions are int32, and so are their differences
# The largest of published models (Llama 3 405B, Gemma 3, GPT): who exceeds them most, is named.
_PUBLISHED = dict(
    n_layers=126,
    d_model=16_384,
    d_ff=53_248,
    n_heads=128,
    n_kv_heads=128,
    head_dim=256,
    vocab_size=262_144,
    learned_positions=2048,
)


def too_deep(name: str, layers: int) -> str:
    """Says that a model has more than `MOST_LAYERS` layers, a field of that name; "" if not."""
    if layers <= MOST_LAYERS:
        return ""
    return (
        f"{name}={brief(layers)} is more than {MOST_LAYERS:,}: layers run one after the other, so "
        "that a token would take seconds even at a microsecond a layer"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a `Transformer`.

    Attributes:
      vocab_size: V, rows of the embedding and outputs of the head; may exceed the tokenizer's.
      d_model: D, width of the residual stream.
      n_layers: number of layers.
      n_heads: N, number of query heads.
      n_kv_heads: K, number of key and value heads; divides N.
      d_ff: F, hidden width of the MLP.
      head_dim: H, size of a head.
      norm: a key of `NORMS` (norms.py).
      norm_at: a key of `NORM_PLACES`: norms before attention and MLP, after them, or both.
      norm_eps: added to the variance by the norms.
      mlp: a key of `MLPS`.
      biases: a key of `BIASES`.
      qk_norm: queries and keys are RMS-normalized, head by head, before they are rotated.
      qk_norm_joint: and not head by head, but all heads of a token together.
      query_scalar: attention divides its scores by the root of this; 0 for head_dim.
      layer_pattern: kinds of the layers, by letters of `LAYER_KINDS`; repeated until the last.
      window: keys that a query of a windowed layer sees, its own included; 0 without such layers.
      joined_projections: q, k and v are one tensor of a checkpoint, and so are gate and up.
      scale_embedding: embeddings are multiplied by the root of d_model.
      tie_embeddings: the head uses the embedding as its kernel.
      learned_positions: rows of the table of learned positions; 0 for rotary positions.
      rope_theta: base of the rotary wavelengths.
      rope_scaling: how RoPE is extended, a `RopeScaling` or a key of `ROPE_SCALINGS` (rope.py),
        which the constructor resolves; or None.
      window_rope_theta: base in windowed layers, which then are not scaled; 0: as in the others.
      rotary_dim: how many of a head's elements are rotated, the first ones; 0 for all.

    Raises:
      ValueError: a field is out of range or unknown, or two fields contradict each other.

    Example:
      >>> config = dataclasses.replace(fp8jax.MODELS["llama_tiny"], n_kv_heads=4)
      >>> config.linears["layers/mlp/down"]  # inputs, outputs
      (384, 128)
      >>> dataclasses.replace(config, n_kv_heads=3)
      Traceback (most recent call last):
          ...
      ValueError: n_heads=4 is not a multiple of n_kv_heads=3: set both
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    head_dim: int
    norm: str = "rms"
    norm_at: str = "before"
    norm_eps: float = 1e-5
    mlp: str = "swiglu"
    biases: str = "none"
    qk_norm: bool = False
    qk_norm_joint: bool = False
    query_scalar: int = 0
    layer_pattern: str = "f"
    window: int = 0
    joined_projections: bool = False
    scale_embedding: bool = False
    tie_embeddings: bool = False
    learned_positions: int = 0
    rope_theta: float = 10_000.0
    rope_scaling: Any = None
    window_rope_theta: float = 0.0
    rotary_dim: int = 0

    def __post_init__(self):
        for name in (
            "vocab_size",
            "d_model",
            "n_layers",
            "n_heads",
            "n_kv_heads",
            "d_ff",
            "head_dim",
            "norm_eps",
            "rope_theta",
        ):
            if not 0 < getattr(self, name) < math.inf:  # also refuses NaN
                raise ValueError(f"{name}={getattr(self, name)} must be positive and finite")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}:"
                " set both"
            )
        lookup("MLP", self.mlp, MLPS)
        lookup("choice of biases", self.biases, BIASES)
        lookup("place of norms", self.norm_at, NORM_PLACES)
        for name in ("learned_positions", "query_scalar", "window_rope_theta", "rotary_dim"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} is negative or not finite")
        self._check_sizes()
        self._check_layers()
        for name, unset in _ROTARY.items():
            if self.learned_positions and getattr(self, name) != unset:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is for rotary positions, but this model has "
                    f"learned_positions={self.learned_positions}"
                )
        if not self.learned_positions and self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, got {self.head_dim}")
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(
                f"rotary_dim={self.rotary_dim} must be even and at most head_dim={self.head_dim}"
            )
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, RopeScaling):
            scaling = lookup("RoPE scaling", self.rope_scaling, ROPE_SCALINGS)
            object.__setattr__(self, "rope_scaling", scaling)
        half = (self.rotary_dim or self.head_dim) // 2
        if isinstance(self.rope_scaling, LongRope) and len(self.rope_scaling.short) != half:
            raise ValueError(
                f"LongRope has {len(self.rope_scaling.short)} divisors, but heads have {half} pairs"
            )

    def _check_sizes(self) -> None:
        """Refuses a model that no machine holds or finishes, by the field that makes it so."""
        if said := too_deep("n_layers", self.n_layers):
            raise ValueError(said)
        if self._weights > MOST_WEIGHTS:
            times = {name: getattr(self, name) // size for name, size in _PUBLISHED.items()}
            largest = max(times, key=lambda name: times[name])
            raise ValueError(
                f"{largest}={brief(getattr(self, largest))} gives the model more than "
                f"{MOST_WEIGHTS:.1e} weights, which at the 16 bytes of training are more than the "
                "memory of a pod of 9,216 chips with 192 GiB"
            )
        if self.window >= MOST_WINDOW:
            raise ValueError(
                f"window={brief(self.window)} must be below 2^30: positions are 32-bit numbers"
            )

    def _check_layers(self) -> None:
        for letter in self.layer_pattern:
            lookup("kind of layer", letter, LAYER_KINDS)
        if not self.layer_pattern:
            raise ValueError("layer_pattern is empty: give a letter for each kind of layer")
        if self.window < 0 or ("w" in self.layer_pattern and not self.window):
            raise ValueError(
                f"window={self.window} must be positive with layer_pattern={self.layer_pattern!r}"
            )
        if self.qk_norm_joint and not self.qk_norm:
            raise ValueError("qk_norm_joint=True needs qk_norm=True")

    @property
    def layer_kinds(self) -> str:
        """The letter of `layer_pattern` of each layer."""
        times = self.n_layers // len(self.layer_pattern) + 1
        return (self.layer_pattern * times)[: self.n_layers]

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Path -> (input features, output features) of the linears of one layer and of the head.

        The order is that of `MODULES`. There is no gate if the MLP is not gated.
        """
        d, f = self.d_model, self.d_ff
        queries, keys = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        sizes = {
            "layers/attention/q": (d, queries),
            "layers/attention/k": (d, keys),
            "layers/attention/v": (d, keys),
            "layers/attention/o": (queries, d),
            "layers/mlp/gate": (d, f),
            "layers/mlp/up": (d, f),
            "layers/mlp/down": (f, d),
            "lm_head": (d, self.vocab_size),
        }
        assert tuple(sizes) == MODULES
        if not MLPS[self.mlp].gated:
            del sizes["layers/mlp/gate"]
        return sizes

    @property
    def modules(self) -> tuple[str, ...]:
        """The paths of the linears of this model."""
        return tuple(self.linears)

    @property
    def _weights(self) -> int:
        """Weights of the linears and tables, were the head untied."""
        sizes = {path: inputs * outputs for path, (inputs, outputs) in self.linears.items()}
        tables = 2 * sizes.pop("lm_head") + self.learned_positions * self.d_model
        return tables + self.n_layers * sum(sizes.values())

    def check_mesh(self, tensor: int) -> None:
        """Raises ValueError unless `tensor` devices can share the heads equally."""
        for name in ("n_heads", "n_kv_heads"):
            if getattr(self, name) % tensor:
                raise ValueError(
                    f"{name}={getattr(self, name)} does not divide over tensor={tensor} devices"
                )

    @property
    def max_positions(self) -> int:
        """The longest rows that can be computed; 0 for any."""
        if isinstance(self.rope_scaling, LongRope):
            return self.rope_scaling.original
        return self.learned_positions

    def check_length(self, seq_len: int) -> None:
        """Raises ValueError if rows are longer than `max_positions`."""
        if isinstance(self.rope_scaling, LongRope) and seq_len > self.max_positions:
            raise ValueError(
                f"{seq_len=} is more than the original_max_position_embeddings="
                f"{self.max_positions} of RoPE of type 'longrope': its long_factor for longer "
                "texts is not supported; use shorter rows"
            )
        if self.learned_positions and seq_len > self.learned_positions:
            raise ValueError(
                f"{seq_len=} is more than the model's learned_positions={self.learned_positions}: "
                "use shorter rows"
            )


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Returns the model FLOPs of training on one token, forward and backward.

    Recomputed values are not counted. Each weight of a linear takes 6 FLOPs. Causal attention takes
    6 * seq_len * N * H in each layer (scores and values, over half of the square), and in layers
    with a window what a window hides less. Looking up the embedding is free; a tied head still
    counts as a linear.
    """
    c = config
    counts = {path: 1 if path == "lm_head" else c.n_layers for path in c.linears}
    weights = sum(counts[path] * k * n for path, (k, n) in c.linears.items())
    windowed = c.layer_kinds.count("w")
    hidden = max(seq_len - c.window, 0)  # of the square, hidden^2 / 2 products
    keys = c.n_layers * seq_len - windowed * hidden * hidden // seq_len
    return 6 * weights + 6 * keys * c.n_heads * c.head_dim
