"""fp8jax: training and running transformers in FP8 and FP4, in JAX and Flax.

`import fp8jax` adds the one XLA flag that FP8 needs (device/hardware.py); nothing else happens.
"""

from fp8jax.device import hardware

hardware.set_xla_flags()

from fp8jax import nn  # noqa: E402
from fp8jax.linear.dot import dot_general, einsum, init_state  # noqa: E402
from fp8jax.model.config import MODELS, ModelConfig  # noqa: E402
from fp8jax.model.transformer import Transformer  # noqa: E402
from fp8jax.numerics.formats import FORMATS, cast  # noqa: E402
from fp8jax.numerics.policy import POLICIES, Policy, PrecisionSchedule  # noqa: E402
from fp8jax.numerics.recipe import RECIPES, Cast, Recipe  # noqa: E402
from fp8jax.numerics.scaling import (  # noqa: E402
    BLOCK128,
    MX32,
    NV16,
    ROW,
    TENSOR,
    TILE128,
    Constant,
    NV16x16,
    Pow2,
    Quantized,
    Tile,
    dequantize,
    quantize,
)
from fp8jax.training.loop import train_and_evaluate  # noqa: E402

__all__ = [
    "BLOCK128", "Cast", "Constant", "FORMATS", "MODELS", "MX32", "ModelConfig", "NV16", "NV16x16",
    "POLICIES", "Policy", "Pow2", "PrecisionSchedule", "Quantized", "RECIPES", "ROW", "Recipe",
    "TENSOR", "TILE128", "Tile", "Transformer", "cast", "dequantize", "dot_general", "einsum",
    "init_state", "nn", "quantize", "train_and_evaluate",
]  # fmt: skip
