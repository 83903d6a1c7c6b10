"""The shapes of transformers, and the table of those that papers and releases use.

One decoder serves all families; what tells them apart is data:

    family      norm   MLP        positions            biases  q and k    head
    GPT-2       layer  gelu_tanh  learned              all     plain      tied
    GPT (111M   layer  gelu       learned              all     plain      tied
     to 13B)
    Llama 2, 3  rms    swiglu     RoPE                 none    plain      its own
    Qwen 2, 2.5 rms    swiglu     RoPE, theta 1e6      q k v   plain      tied if small
    Qwen 3      rms    swiglu     RoPE, theta 1e6      none    normalized tied if small

Sources: GPT 111M to 13B is Cerebras-GPT (arXiv 2304.03208), the shapes of the 8-bit floating point
paper; Llama 2 (2307.09288), Llama 3 (2407.21783), Qwen 2.5 (2412.15115), Qwen 3 (2505.09388),
GPT-2 by its released weights. llama_60m to llama_1b are the shapes usual in the literature on
cheap pre-training (GaLore, arXiv 2403.03507, calls them 60M, 130M, 350M and 1B). gpt2_335m is
GPT-2 medium: the FP4 paper calls it so, its released weights count 355M.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
from jaxtyping import Array, Float

from fp8jax.lookup import lookup

# All linears there are, by the paths that a policy's patterns see. Their order is part of the
# random keys of stochastic rounding.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLP:
    """hidden = activation(gate) * up if `gated`, else activation(up). If `smooth`, "down" quantizes
    its channels divided by powers of two near their amaxes: Smooth-SwiGLU (arXiv 2409.12517)."""

    gated: bool
    activation: Callable[[Float[Array, "..."]], Float[Array, "..."]]
    smooth: bool = False

    def __post_init__(self):
        if self.smooth and not (self.gated and self.activation is jax.nn.silu):
            raise ValueError(f"smooth=True is for a gated MLP with SiLU, got {self}")

    @property
    def fusible(self) -> bool:
        """Whether this is what linear/fused_mlp.py computes."""
        return self.gated and self.activation is jax.nn.silu and not self.smooth


MLPS = {
    "swiglu": MLP(gated=True, activation=jax.nn.silu),
    "smooth_swiglu": MLP(gated=True, activation=jax.nn.silu, smooth=True),
    "gelu": MLP(gated=False, activation=functools.partial(jax.nn.gelu, approximate=False)),
    "gelu_tanh": MLP(gated=False, activation=functools.partial(jax.nn.gelu, approximate=True)),
}


# Which linears have a bias, besides what their norms have.
BIASES: dict[str, tuple[str, ...]] = {
    "none": (),
    "qkv": MODULES[:3],
    "all": MODULES[:-1],
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a Transformer.

    Attributes:
      vocab_size: V, of embedding and head; may exceed the tokenizer's.
      d_model, n_layers, n_heads, n_kv_heads, d_ff: D, number of layers, N, K, F.
      head_dim: H.
      norm: a key of `fp8jax.model.NORMS`.
      norm_eps: of the norms.
      mlp: a key of `MLPS`.
      biases: a key of `BIASES`.
      qk_norm: queries and keys are RMS-normalized, head by head, before they are rotated.
      tie_embeddings: the head multiplies by the embedding instead of a matrix of its own.
      learned_positions: size of the table of learned positions, 0 for rotary ones.
      rope_theta: base of the rotary wavelengths.
      rope_scaling: a key of `fp8jax.rope.ROPE_SCALINGS`, None for none.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    head_dim: int
    norm: str = "rms"
    norm_eps: float = 1e-5
    mlp: str = "swiglu"
    biases: str = "none"
    qk_norm: bool = False
    tie_embeddings: bool = False
    learned_positions: int = 0
    rope_theta: float = 10_000.0
    rope_scaling: str | None = None

    def __post_init__(self):
        for name in (
            "vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_ff", "head_dim",
            "norm_eps", "rope_theta",
        ):  # fmt: skip
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads={self.n_heads} is no multiple of n_kv_heads={self.n_kv_heads}"
            )
        lookup("MLP", self.mlp, MLPS)
        lookup("choice of biases", self.biases, BIASES)
        if self.learned_positions < 0:
            raise ValueError(f"learned_positions={self.learned_positions} is negative")
        for name, unset in (("rope_theta", 1e4), ("rope_scaling", None)):
            if self.learned_positions and getattr(self, name) != unset:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is for rotary positions, and this model has "
                    f"learned_positions={self.learned_positions}"
                )
        if not self.learned_positions and self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, got {self.head_dim}")

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """path -> (inputs, outputs) of the linears of a layer and of the head: `MODULES`, but no
        gate where the MLP has none."""
        d, f, queries, keys = (
            self.d_model, self.d_ff, self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim,
        )  # fmt: skip
        sizes = (
            (d, queries), (d, keys), (d, keys), (queries, d), (d, f), (d, f), (f, d),
            (d, self.vocab_size),
        )  # fmt: skip
        found = dict(zip(MODULES, sizes, strict=True))
        if not MLPS[self.mlp].gated:
            del found["layers/mlp/gate"]
        return found

    @property
    def modules(self) -> tuple[str, ...]:
        """The paths of the linears of this model."""
        return tuple(self.linears)

    def check_mesh(self, tensor: int) -> None:
        """Raises ValueError where the heads do not divide over `tensor` devices."""
        for name in ("n_heads", "n_kv_heads"):
            if getattr(self, name) % tensor:
                raise ValueError(
                    f"{name}={getattr(self, name)} does not divide over tensor={tensor} devices"
                )

    def check_length(self, seq_len: int) -> None:
        """Raises ValueError where rows are longer than the table of learned positions."""
        if self.learned_positions and seq_len > self.learned_positions:
            raise ValueError(
                f"{seq_len=} is more than the model's learned_positions={self.learned_positions}"
            )


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Model FLOPs of training on one token: forward and backward, nothing counted twice.

    6 for each weight of a matrix product, and 6 * seq_len * N * H a layer for causal attention
    (scores and values, half of the square). The embedding's look-up is free, a tied head is not.
    """
    c = config
    counts = {path: 1 if path == "lm_head" else c.n_layers for path in c.linears}
    weights = sum(counts[path] * k * n for path, (k, n) in c.linears.items())
    return 6 * weights + 6 * c.n_layers * seq_len * c.n_heads * c.head_dim
