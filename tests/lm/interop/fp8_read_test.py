"""FP8 folders of others: read by what their configuration means, or refused by its field."""

import ml_dtypes
import numpy as np
import pytest

from fp8jax.lm.interop.read import open_tensors
from tests.support.hf_folders import write_folder

OUT, IN = 24, 40
NAME = "model.layers.0.mlp.up_proj"
NUMBERS = dict(num_bits=8, type="float", symmetric=True, dynamic=False)


def codes() -> np.ndarray:
    x = np.random.default_rng(0).normal(size=(OUT, IN)).astype(np.float32)
    return (100 * x).astype(ml_dtypes.float8_e4m3fn)


def scales(*shape: int, dtype=np.float32) -> np.ndarray:
    """Powers of two, which every dtype of scales holds; no two neighbors are equal."""
    exponents = -np.arange(np.prod(shape, dtype=int)) % 7
    return np.exp2(exponents).reshape(shape).astype(dtype)


def group(**weights) -> dict:
    """A group as llm-compressor writes it, with all that does not change what is stored."""
    how = dict(actorder=None, group_size=None, observer="minmax", observer_kwargs={})
    inputs = dict(num_bits=8, type="float", symmetric=True, dynamic=True, strategy="token")
    return {
        "input_activations": inputs | how | dict(block_structure=None, observer="memoryless"),
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {**NUMBERS, "block_structure": None, **how, **weights},
    }


def compressed(one: dict, **changes) -> dict:
    return {
        "config_groups": {"FP8_DYNAMIC": one},
        "format": "float-quantized",
        "global_compression_ratio": 1.239,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "frozen",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.9.5",
        **changes,
    }


# What transformers 5 writes for FineGrainedFP8Config(): no fmt.
FINE_GRAINED = {
    "activation_scheme": "dynamic",
    "dequantize": False,
    "expert_dtype": "fp8",
    "modules_to_convert": None,
    "modules_to_not_convert": ["lm_head"],
    "quant_method": "fp8",
    "scale_fmt": "float",
    "weight_block_size": [16, 16],
}
FP8_BLOCK = group(strategy="block", block_structure=[16, 16])


def folder_of(path, quantization: dict, scale: np.ndarray, suffix: str, **more):
    tensors = {f"{NAME}.weight": codes(), f"{NAME}.{suffix}": scale, **more}
    return write_folder(path, {"quantization_config": quantization}, tensors)


BLOCKS = (2, 3)  # of 16 x 16 in 24 x 40
BF16, E8M0 = ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu


@pytest.mark.parametrize(
    ("quantization", "suffix", "scale"),
    [
        (FINE_GRAINED, "weight_scale_inv", scales(*BLOCKS)),
        (FINE_GRAINED, "weight_scale_inv", scales(*BLOCKS, dtype=BF16)),
        (FINE_GRAINED, "weight_scale_inv", scales(*BLOCKS, dtype=np.float16)),
        (FINE_GRAINED | {"scale_fmt": "ue8m0"}, "weight_scale_inv", scales(*BLOCKS, dtype=E8M0)),
        (FINE_GRAINED | {"ignored_layers": ["lm_head"]}, "weight_scale_inv", scales(*BLOCKS)),
        (FINE_GRAINED | {"weight_block_size": None}, "weight_scale_inv", scales()),
        # Old files for vLLM: one scale for a tensor.
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "weight_scale", scales()),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "weight_scale", scales(1)),
        (compressed(group(strategy="channel")), "weight_scale", scales(OUT, 1)),
        (compressed(group(strategy="channel")), "weight_scale", scales(OUT, 1, dtype=BF16)),
        (compressed(group(strategy="channel")), "weight_scale", scales(OUT)),
        (compressed(group(strategy="tensor")), "weight_scale", scales(1, dtype=BF16)),
        (compressed(FP8_BLOCK), "weight_scale", scales(*BLOCKS)),
        (compressed(FP8_BLOCK, format="naive-quantized"), "weight_scale", scales(*BLOCKS)),
        (
            compressed(group(strategy="channel") | {"input_activations": None}),
            "weight_scale",
            scales(OUT, 1),
        ),
    ],
)
def test_layouts_of_others_are_read(quantization, suffix, scale, tmp_path):
    """Whole, and a part that begins and ends inside of blocks; against NumPy."""
    files = open_tensors(folder_of(tmp_path, quantization, scale, suffix))
    wide = scale.astype(np.float32)
    if wide.size == BLOCKS[0] * BLOCKS[1]:
        wide = np.repeat(np.repeat(wide, 16, axis=0), 16, axis=1)[:OUT, :IN]
    elif wide.size == OUT:
        wide = wide.reshape(OUT, 1)
    expected = codes().astype(np.float32) * wide
    assert files.dtypes == {f"{NAME}.weight": "F32"}
    for index in ((slice(0, OUT), slice(0, IN)), (slice(5, 19), slice(17, 40))):
        np.testing.assert_array_equal(files.read(f"{NAME}.weight", index), expected[index])


CHANNEL = group(strategy="channel")


def changed(part: str, **fields) -> dict:
    return compressed({**CHANNEL, part: {**CHANNEL[part], **fields}})


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "awq"}, ".quant_method='awq' is not supported, only .fp8. or .compr"),
        (FINE_GRAINED | {"fmt": "e5m2"}, ".fmt='e5m2' is not supported"),
        (FINE_GRAINED | {"activation_scheme": "static"}, ".activation_scheme='static' is not sup"),
        (FINE_GRAINED | {"expert_dtype": "fp4"}, ".expert_dtype='fp4' is not supported"),
        (FINE_GRAINED | {"scale_fmt": "e4m3"}, ".scale_fmt='e4m3' is not supported"),
        (FINE_GRAINED | {"weight_block_size": [16]}, r".weight_block_size=\[16\] must be two"),
        (FINE_GRAINED | {"rotation": "hadamard"}, ".rotation='hadamard' is not supported: nobody"),
        (compressed(CHANNEL, format="pack-quantized"), ".format='pack-quantized' is not supp"),
        (compressed(CHANNEL, kv_cache_scheme=NUMBERS), ".kv_cache_scheme={.* is not supported"),
        (compressed(CHANNEL, transform_config={"a": 1}), ".transform_config={'a': 1} is not sup"),
        (compressed(CHANNEL, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.f"),
        (compressed(CHANNEL, moe={"a": 1}), ".moe={'a': 1} is not supported: nobody"),
        (compressed(CHANNEL | {"x": 3}), "config_groups.FP8_DYNAMIC.x=3 is not supported"),
        (compressed(CHANNEL, config_groups={}), ".config_groups has no group"),
        (compressed(CHANNEL | {"weights": None}), "config_groups.FP8_DYNAMIC.weights is missing"),
        (compressed(CHANNEL | {"output_activations": NUMBERS}), "FP8_DYNAMIC.output_activations="),
        (changed("weights", num_bits=4), "FP8_DYNAMIC.weights.num_bits=4 is not supported, only 8"),
        (changed("weights", type="int"), ".weights.type='int' is not supported, only .float"),
        (changed("weights", symmetric=False), ".weights.symmetric=False is not supported"),
        (changed("weights", strategy="group"), ".weights.strategy='group' is not supported"),
        (changed("weights", group_size=32), ".weights.group_size=32 is not supported"),
        (changed("weights", dynamic=True), ".weights.dynamic=True is not supported"),
        (changed("weights", rotated=True), ".weights.rotated=True is not supported: nobody"),
        (changed("input_activations", dynamic=False), ".input_activations.dynamic=False is not"),
        (changed("input_activations", num_bits=4), ".input_activations.num_bits=4 is not"),
        (
            compressed(CHANNEL, config_groups={"a": CHANNEL, "b": group(strategy="tensor")}),
            "config_groups has groups of unlike layouts, which is not supported: a, b",
        ),
    ],
)
def test_what_is_not_supported_is_named_with_its_field(quantization, message, tmp_path):
    folder = folder_of(tmp_path, quantization, scales(OUT, 1), "weight_scale")
    with pytest.raises(ValueError, match=message) as error:
        open_tensors(folder)
    assert str(error.value).startswith(f"{folder / 'config.json'}: quantization_config.")


@pytest.mark.parametrize(
    ("quantization", "scale", "suffix", "more", "message"),
    [
        (FINE_GRAINED, scales(3, 2), "weight_scale_inv", {}, r"shape \[3, 2\] instead of \[2, 3\]"),
        (compressed(CHANNEL), scales(OUT // 2, 1), "weight_scale", {}, r"instead of \[24, 1\]"),
        (compressed(FP8_BLOCK), scales(2), "weight_scale", {}, r"shape \[2\] instead of \[2, 3\]"),
        (
            FINE_GRAINED,
            scales(*BLOCKS, dtype=np.float64),
            "weight_scale_inv",
            {},
            "weight_scale_inv has dtype F64, not one of F32, BF16, F16, F8_E8M0",
        ),
        (
            FINE_GRAINED,
            scales(*BLOCKS),
            "weight_scale",
            {},
            "up_proj.weight has no weight_scale_in",
        ),
        (
            FINE_GRAINED | {"weight_block_size": None},
            scales(),
            "weight_scale",
            {f"{NAME}.weight_scale_inv": scales()},
            "has more than one weight_scale_inv or weight_scale",
        ),
        (
            FINE_GRAINED,
            scales(*BLOCKS),
            "weight_scale_inv",
            {"a.weight": codes()[None], "a.weight_scale_inv": scales(*BLOCKS)},
            r"a.weight has codes of shape \[1, 24, 40\]",
        ),
    ],
)
def test_scales_that_do_not_fit_are_named(quantization, scale, suffix, more, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        open_tensors(folder_of(tmp_path, quantization, scale, suffix, **more))


def test_the_older_name_of_the_configuration(tmp_path):
    """compressed-tensors before 0.7."""
    tensors = {f"{NAME}.weight": codes(), f"{NAME}.weight_scale": scales(OUT, 1)}
    folder = write_folder(tmp_path, {"compression_config": compressed(CHANNEL)}, tensors)
    every = slice(0, OUT), slice(0, IN)
    expected = codes().astype(np.float32) * scales(OUT, 1)
    np.testing.assert_array_equal(open_tensors(folder).read(f"{NAME}.weight", every), expected)
