"""fp8jax: train and run transformers in FP8 and FP4, with JAX and Flax.

`import fp8jax` provides formats, quantize, recipes, dot_general and linen modules. It also sets the
XLA flag that FP8 needs (device/xla.py). The transformer and the trainer are imported on first use,
with the packages of the extra `train` (Orbax, Grain, TensorBoard).
"""

from fp8jax import histories, nn
from fp8jax.device import xla
from fp8jax.gemm.dot import dot_general, einsum
from fp8jax.gemm.histories.amax_history import init_state
from fp8jax.gemm.histories.updates import init_update, update
from fp8jax.numerics.accumulation import Accumulation
from fp8jax.numerics.formats import FORMATS, cast
from fp8jax.numerics.policy import POLICIES, Policy
from fp8jax.numerics.quantization import Quantized, dequantize, quantize
from fp8jax.numerics.recipe import Cast, Recipe
from fp8jax.numerics.recipes import RECIPES
from fp8jax.numerics.scales import Constant, Delayed, Pow2
from fp8jax.numerics.schedule import PrecisionSchedule
from fp8jax.numerics.tiles import BLOCK128, MX32, NV16, ROW, TENSOR, TILE128, NV16x16, Tile

xla.set_xla_flags()
xla.launch_in_order()

import importlib  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from fp8jax import nnx, telemetry
    from fp8jax.analysis.any_program import assert_fp8, gemm_table, gemms
    from fp8jax.lm import figures
    from fp8jax.lm.model.config import ModelConfig
    from fp8jax.lm.model.models import MODELS
    from fp8jax.lm.model.telemetry import measure_forward
    from fp8jax.lm.model.transformer import Transformer
    from fp8jax.lm.training.config import base_config
    from fp8jax.lm.training.loop import train_and_evaluate

__version__ = "0.1.0"

__all__ = [
    "Accumulation",
    "BLOCK128",
    "Cast",
    "Constant",
    "Delayed",
    "FORMATS",
    "MODELS",
    "MX32",
    "ModelConfig",
    "NV16",
    "NV16x16",
    "POLICIES",
    "Policy",
    "Pow2",
    "PrecisionSchedule",
    "Quantized",
    "RECIPES",
    "ROW",
    "Recipe",
    "TENSOR",
    "TILE128",
    "Tile",
    "Transformer",
    "assert_fp8",
    "base_config",
    "cast",
    "dequantize",
    "dot_general",
    "einsum",
    "figures",
    "gemm_table",
    "gemms",
    "histories",
    "init_state",
    "init_update",
    "measure_forward",
    "nn",
    "nnx",
    "quantize",
    "telemetry",
    "train_and_evaluate",
    "update",
]

_ON_FIRST_USE = {
    "assert_fp8": "fp8jax.analysis.any_program",
    "gemm_table": "fp8jax.analysis.any_program",
    "gemms": "fp8jax.analysis.any_program",
    "base_config": "fp8jax.lm.training.config",
    "MODELS": "fp8jax.lm.model.models",
    "ModelConfig": "fp8jax.lm.model.config",
    "measure_forward": "fp8jax.lm.model.telemetry",
    "Transformer": "fp8jax.lm.model.transformer",
    "figures": "fp8jax.lm.figures",
    "telemetry": "fp8jax.telemetry",
    "nnx": "fp8jax.nnx",  # flax.nnx takes a fifth of a second to import
    "train_and_evaluate": "fp8jax.lm.training.loop",
}


def __getattr__(name: str) -> Any:
    if name in histories.__all__:
        raise AttributeError(f"fp8jax.{name} is fp8jax.histories.{name} now")
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module 'fp8jax' has no attribute {name!r}")
    try:
        module = importlib.import_module(_ON_FIRST_USE[name])
    except ModuleNotFoundError as error:
        if (error.name or "fp8jax").partition(".")[0] == "fp8jax":
            raise
        what = (
            f"fp8jax.{name} needs {error.name}: install fp8jax's extra `train`, in a clone"
            " by pip install -e '.[train]'"
        )
        raise ModuleNotFoundError(what, name=error.name) from error
    value = module if module.__name__.endswith(f".{name}") else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
