"""FP8 checkpoints in the formats that servers read.

    fp8_block           Hugging Face's `fp8`: E4M3 codes, and a float32 scale `weight_scale_inv` for
                        each block of 128x128 weights (DeepSeek-V3)
    compressed_tensors  `float-quantized`, strategy `channel`: E4M3 codes, and a float32 scale
                        `weight_scale` [out, 1] for each output channel

In both, weight = codes * scale; servers quantize activations on the fly, in tiles of 128 or by
token. A tensor X.weight [out, in] becomes the codes X.weight and the scales. Embedding, norms, head
and biases stay in bfloat16, and so do linears that the run's policy leaves in high precision.

Scales of channels follow the run: where its policy casts weights on the grid of the format
(fp8_rowwise), the codes are those of training, bit for bit. Other runs get powers of two.

Scales of blocks are powers of two, whatever the run had: Blackwell's GEMMs need them, and vLLM
makes them of float32 ones on Hopper, too, which rounds every weight once more (3.72% instead of
2.64% off, where powers of two from the start are 2.65% off). For the codes of an fp8_block run,
ask for float32 scales. With `scale_fmt`, SGLang rounds the scales of activations up to powers of
two, which is what fp8_block_ue8m0 trained with.

Blocks are 128x128, so ours [in, out] and theirs [out, in] have the same, transposed. Servers join
the weights of queries, keys and values, and of gate and up, and refuse blocks that would cross the
borders between them. So every dimension must be a multiple of 128.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.lm.interop.tensor_names import names_for, places
from fp8jax.lm.model.config import ModelConfig
from fp8jax.lookup import lookup, unknown
from fp8jax.numerics.formats import FORMATS
from fp8jax.numerics.policy import Policy
from fp8jax.numerics.quantization import quantize_unchecked
from fp8jax.numerics.recipe import Cast
from fp8jax.numerics.scales import SCALES
from fp8jax.numerics.tiles import BLOCK128, ROW, TILE128, Tile

BLOCK = 128
E4M3 = FORMATS["e4m3"]
SCALE_RULES = {"float32": SCALES["fp32"], "power_of_two": SCALES["e8m0"]}

Tensors = Mapping[str, Callable[[], np.ndarray]]  # name -> a function that makes the tensor
Module = tuple[int, str]  # a linear: its layer, and its path, such as "layers/mlp/up"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Format:
    """A format of FP8 checkpoints.

    Attributes:
      name: its key in `FP8_FORMATS`.
      tile: which weights share a scale.
      suffix: of the name of the scales, which replaces "weight".
      config: the modules that are not converted -> `quantization_config` of config.json.
      scales: a key of `SCALE_RULES` for exports that name none; None follows the run.
    """

    name: str
    tile: Tile
    suffix: str
    config: Callable[[tuple[str, ...]], dict[str, Any]]
    scales: str | None = None


def _block_config(kept: tuple[str, ...]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": list(kept),
        "ignored_layers": list(kept),  # what older versions of vLLM read instead
    }


def _channel_config(kept: tuple[str, ...]) -> dict[str, Any]:
    """One group of all linears: weights by channel, activations by token, when they are read."""
    numbers = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None}
    group = {
        "targets": ["Linear"],
        "format": "float-quantized",
        "output_activations": None,
        "weights": {**numbers, "strategy": "channel", "dynamic": False},
        "input_activations": {**numbers, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": list(kept),
        "config_groups": {"group_0": group},
    }


_BLOCK = Fp8Format(
    name="fp8_block",
    tile=BLOCK128,
    suffix="weight_scale_inv",
    config=_block_config,
    scales="power_of_two",
)
_CHANNEL = Fp8Format(
    name="compressed_tensors", tile=ROW, suffix="weight_scale", config=_channel_config
)
FP8_FORMATS = {fmt.name: fmt for fmt in (_BLOCK, _CHANNEL)}


# Planning -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Export:
    """What an export writes.

    Attributes:
      format: of the checkpoint.
      casts: name of a tensor that is quantized -> its cast, for weights [out, in].
      kept: the modules that stay in bfloat16, for config.json.
      notes: lines for people: the scales, whether the codes are those of training, what is kept.
      scale_fmt: of the scales of activations, where servers have a choice; None for theirs.
    """

    format: Fp8Format
    casts: dict[str, Cast]
    kept: tuple[str, ...]
    notes: tuple[str, ...]
    scale_fmt: str | None = None

    def quantization_config(self) -> dict[str, Any]:
        """Returns `quantization_config` of config.json."""
        config = self.format.config(self.kept)
        return config if self.scale_fmt is None else config | {"scale_fmt": self.scale_fmt}


def plan_export(
    model: ModelConfig,
    policy: Policy,
    fmt: str,
    *,
    scales: str | None = None,
    prefix: str | None = None,
) -> Fp8Export:
    """Returns what an export writes; nothing is computed or written.

    Args:
      policy: what the run trained in.
      fmt: a key of `FP8_FORMATS`.
      scales: a key of `SCALE_RULES`; None for the format's own, which may follow the run.
      prefix: what the names of tensors begin with; None for that of the family.

    Raises:
      ValueError: an unknown name; shapes that servers refuse, all of them; linears that servers
        join, of which the policy casts only some; a model with GPT-2's linears.
    """
    chosen = lookup("FP8 format", fmt, FP8_FORMATS)
    if scales is not None and scales not in SCALE_RULES:
        raise unknown("rule of scales", scales, SCALE_RULES)
    if model.learned_positions:
        raise ValueError(
            f"format={fmt}: FP8 formats are for torch's Linear, and GPT-2's weights are another"
            " module's: export it in bf16"
        )
    _check_shapes(model, chosen)
    own = _casts_of_training(model, policy)
    casts: dict[Module, Cast] = {}
    following: dict[Module, bool] = {}
    for module, cast in own.items():
        casts[module], following[module] = _export_cast(cast, chosen, scales or chosen.scales)
    _check_joined(own, policy)
    prefix = names_for(model).prefix if prefix is None else prefix
    named = _linear_names(model, prefix)
    linears = {name: modules for name, modules in named.items() if modules[0] in casts}
    return Fp8Export(
        format=chosen,
        casts={name: _cast_of(name, modules, casts) for name, modules in linears.items()},
        kept=_kept(model, chosen, named, linears, prefix),
        notes=_notes(model, policy, casts, following, scales, chosen),
        scale_fmt="ue8m0" if _rounds_activations(policy, chosen, casts) else None,
    )


def _rounds_activations(policy: Policy, fmt: Fp8Format, casts: Mapping[Module, Cast]) -> bool:
    """Whether the run trained with powers of two as scales of activations, too, and of weights."""
    if fmt is not _BLOCK or not all(cast.rule.power_of_two for cast in casts.values()):
        return False
    inputs = [policy.recipe(path).fwd_x for _, path in casts]
    return all(x is not None and x.tile == TILE128 and x.rule.power_of_two for x in inputs)


def _modules(model: ModelConfig) -> list[Module]:
    """Returns (layer, path) of all linears inside layers."""
    paths = [path for path in model.modules if path.startswith("layers/")]
    return [(layer, path) for layer in range(model.n_layers) for path in paths]


def _casts_of_training(model: ModelConfig, policy: Policy) -> dict[Module, Cast | None]:
    """Returns (layer, path) -> how the run casts the weights of linears that are exported in FP8.

    A run that casts no weights at all exports all of them, with None.
    """
    first, last = policy.exempt(model.n_layers)
    inner = range(first, model.n_layers - last)
    own = {
        (layer, path): policy.recipe(path).fwd_w if layer in inner else None
        for layer, path in _modules(model)
    }
    if not any(own.values()):
        return own
    return {module: cast for module, cast in own.items() if cast is not None}


def _export_cast(own: Cast | None, fmt: Fp8Format, scales: str | None) -> tuple[Cast, bool]:
    """Returns the cast of an export, and whether its codes are those of training."""
    grid = Cast(format=E4M3, tile=fmt.tile, scale=SCALE_RULES["power_of_two"])
    follows = own is not None and dataclasses.replace(grid, scale=own.rule) == own
    if scales is not None:
        cast = dataclasses.replace(grid, scale=SCALE_RULES[scales])
        return cast, cast == own
    return (own, True) if own is not None and follows else (grid, False)


def _check_shapes(model: ModelConfig, fmt: Fp8Format) -> None:
    """Raises ValueError with all shapes that servers refuse in this format."""
    if fmt.tile != BLOCK128:
        return
    problems = []
    for path, (inputs, outputs) in model.linears.items():
        if path == "lm_head":
            continue
        for what, size in (("inputs", inputs), ("outputs", outputs)):
            if size % BLOCK:
                problems.append(f"{path} has {size} {what}")
    if problems:
        raise ValueError(
            f"format={fmt.name}: servers need multiples of {BLOCK}, but {', '.join(problems)};"
            " format=compressed_tensors takes any size"
        )


JOINED = (
    ("layers/attention/q", "layers/attention/k", "layers/attention/v"),
    ("layers/mlp/gate", "layers/mlp/up"),
)  # linears that servers join


def _check_joined(own: Mapping[Module, Any], policy: Policy) -> None:
    """Raises ValueError for linears that servers join, of which only some are exported in FP8."""
    for layer in {layer for layer, _ in own}:
        for group in JOINED:
            cast = [path for path in group if (layer, path) in own]
            if cast and len(cast) < len(group):
                raise ValueError(
                    f"servers join {', '.join(group)}, but policy {policy.name!r} casts the weights"
                    f" of {', '.join(cast)} only: export in bf16"
                )


def _linear_names(model: ModelConfig, prefix: str) -> dict[str, tuple[Module, ...]]:
    """Returns tensor -> (layer, path) of the linears inside layers whose weights it has."""
    table = places(model)
    named: dict[str, tuple[Module, ...]] = {}
    for layer, path in _modules(model):
        name = table[f"{path}/kernel"].name(layer, prefix)
        named[name] = (*(named[name] if name in named else ()), (layer, path))
    return named


def _cast_of(name: str, modules: tuple[Module, ...], casts: Mapping[Module, Cast]) -> Cast:
    """Returns the cast of a tensor, from those of its linears."""
    own = {casts[module] for module in modules}
    if len(own) > 1:
        paths = ", ".join(path for _, path in modules)
        raise ValueError(f"{name} holds {paths}, whose scales differ: give scales")
    return own.pop()


def _kept(
    model: ModelConfig,
    fmt: Fp8Format,
    named: Mapping[str, tuple[Module, ...]],
    linears: Mapping[str, tuple[Module, ...]],
    prefix: str,
) -> tuple[str, ...]:
    """Returns the modules that stay in bfloat16, layer by layer.

    compressed-tensors is about linears only, so that embedding and norms would match nothing there.

    Args:
      named: tensor -> its linears, inside layers; `linears` are those that are quantized.
    """
    weights = []
    for place in places(model).values():
        layers = range(model.n_layers if place.per_layer else 1)
        weights += [place.name(layer, prefix) for layer in layers]
    if fmt is _CHANNEL:
        weights = list(named)
    kept = {
        name.removesuffix(".weight")
        for name in weights
        if name.endswith(".weight") and name not in linears
    }
    return tuple(sorted(kept | {"lm_head"}, key=_by_layer))


def _by_layer(name: str) -> tuple[list[int], str]:
    return [int(number) for number in re.findall(r"\d+", name)], name


def _notes(
    model: ModelConfig,
    policy: Policy,
    casts: Mapping[Module, Cast],
    following: Mapping[Module, bool],
    scales: str | None,
    fmt: Fp8Format,
) -> tuple[str, ...]:
    rules = {cast.rule.power_of_two for cast in casts.values()}
    names = {True: "powers of two", False: "float32"}
    notes = [f"scales: {' and '.join(names[rule] for rule in sorted(rules))}"]
    if all(following.values()):
        notes.append(f"codes: those that {policy.name} trained with, bit for bit")
    elif scales is not None and any(recipe.fwd_w for _, recipe in policy.rules):
        notes.append(f"codes: scales={scales} leaves the grid that {policy.name} trained on")
    elif any(following.values()):
        paths = sorted({path for (_, path), same in following.items() if not same})
        notes.append(
            f"codes: those that {policy.name} trained with, except in {', '.join(paths)}, whose"
            " grid this format does not hold"
        )
    else:
        quantizes = any(recipe.fwd_w for _, recipe in policy.rules)
        trained = "with scales of another grid" if quantizes else "in high precision"
        notes.append(f"codes: made by this export, since {policy.name} trained weights {trained}")
    if fmt is _BLOCK:
        notes += _notes_for_servers(policy, casts, following)
    kept = [path for path in _modules(model) if path not in casts]
    if kept:
        layers = sorted({layer for layer, _ in kept})
        notes.append(
            f"{len(kept)} linears of the layers {', '.join(map(str, layers))} stay in bf16, as in"
            " training"
        )
    if policy.recipe("lm_head").fwd_w is not None:
        notes.append(f"lm_head stays in bf16, which {policy.name} quantizes")
    return tuple(notes)


def _notes_for_servers(
    policy: Policy, casts: Mapping[Module, Cast], following: Mapping[Module, bool]
) -> list[str]:
    """What to know before scales of blocks are served."""
    if not all(cast.rule.power_of_two for cast in casts.values()):
        return [
            "vLLM rounds float32 scales of blocks to powers of two, and so every weight once more:"
            " start it with VLLM_USE_DEEP_GEMM_E8M0=0, or export with scales=power_of_two"
        ]
    if not all(following.values()) and _would_follow(policy, casts):
        return [
            f"scales=float32 gives the codes that {policy.name} trained with; vLLM then needs"
            " VLLM_USE_DEEP_GEMM_E8M0=0"
        ]
    if _rounds_activations(policy, _BLOCK, casts):
        return ["activations: SGLang rounds their scales as in training (scale_fmt=ue8m0)"]
    return []


def _would_follow(policy: Policy, casts: Mapping[Module, Cast]) -> bool:
    """Whether float32 scales would give the codes of training."""
    float32 = Cast(format=E4M3, tile=BLOCK128, scale=SCALE_RULES["float32"])
    return all(policy.recipe(path).fwd_w == float32 for _, path in casts)


# Writing ------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="cast")
def _quantize(weight: jax.Array, cast: Cast) -> tuple[jax.Array, jax.Array]:
    """Returns codes and float32 scales of a weight [out, in]."""
    q = quantize_unchecked(weight, cast.format, cast.tile, contract_axis=-1, scale=cast.rule)
    return q.values, q.float_scale()


def fp8_tensors(export: Fp8Export, tensors: Tensors) -> dict[str, Callable[[], np.ndarray]]:
    """Returns name -> a function that makes the tensor, for all tensors of an FP8 checkpoint.

    The scales come behind their codes; whoever makes the tensors in this order quantizes each
    weight once, and holds one at a time.

    Args:
      tensors: those of the checkpoint in high precision, the weights as the run stored them: codes
        of weights that were rounded to bfloat16 would not be those of training.

    Raises (the functions):
      ValueError: a weight is not finite.
    """

    @functools.lru_cache(maxsize=1)
    def quantized(name: str) -> tuple[np.ndarray, np.ndarray]:
        codes, scale = jax.device_get(_quantize(jnp.asarray(tensors[name]()), export.casts[name]))
        if not np.isfinite(scale).all():
            raise ValueError(f"{name} has values that are not finite: nothing to export")
        return codes, scale

    made: dict[str, Callable[[], np.ndarray]] = {}
    for name, make in tensors.items():
        if name not in export.casts:
            made[name] = make
            continue
        made[name] = lambda name=name: quantized(name)[0]  # type: ignore[misc]
        made[scale_name(export.format, name)] = lambda name=name: quantized(name)[1]  # type: ignore[misc]
    return made


def scale_name(fmt: Fp8Format, weight: str) -> str:
    """Returns the name of the scales of a tensor of codes."""
    return weight.removesuffix("weight") + fmt.suffix
