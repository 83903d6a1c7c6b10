"""FP8 checkpoints: the codes of training, what servers refuse, and the way back."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp8jax.lm.interop import convert
from fp8jax.lm.interop.config_json import to_config_json
from fp8jax.lm.interop.export import export_model
from fp8jax.lm.interop.fp8_format import FP8_FORMATS, fp8_tensors, plan_export
from fp8jax.lm.interop.read import TensorFiles
from fp8jax.lm.interop.tensor_names import names_for, places, tensors_of
from fp8jax.lm.interop.trained import TrainedModel, load_model
from fp8jax.lm.mesh import MeshAxes, make_mesh, tree_shardings
from fp8jax.lm.model.config import ModelConfig
from fp8jax.lm.model.freeze import freeze
from fp8jax.lm.model.transformer import Transformer, abstract_variables
from fp8jax.numerics.names import as_policy
from fp8jax.numerics.policy import Policy
from fp8jax.numerics.recipes import RECIPES
from tests.support.hf_folders import write_folder
from tests.support.random_weights import random_weights

CONFIG = ModelConfig(
    vocab_size=102,
    d_model=256,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    d_ff=384,
    head_dim=64,
    biases="qkv",
)
RAGGED = dataclasses.replace(CONFIG, d_ff=448, biases="none")
UP = "model.layers.1.mlp.up_proj"


@functools.cache
def params(config=CONFIG):
    return random_weights(abstract_variables(Transformer(config)))["params"]


@functools.cache
def frozen_layers(policy, config=CONFIG):
    return freeze(Transformer(config, policy), {"params": params(config)})["params"]["layers"]


def leaf_of(tree, path: str):
    return functools.reduce(lambda node, key: node[key], path.split("/"), tree)


def made(policy, fmt, config=CONFIG, scales=None, tree=None):
    """The plan of an export, and its tensors in the dtypes that are written."""
    plan = plan_export(config, as_policy(policy), fmt, scales=scales)
    tree = params(config) if tree is None else tree
    wide = tensors_of(config, functools.partial(leaf_of, tree), names_for(config).prefix)
    arrays = {name: make() for name, make in fp8_tensors(plan, wide).items()}
    narrow = {name: array.astype(ml_dtypes.bfloat16) for name, array in arrays.items()}
    own = {*plan.casts, *(name for name in arrays if name.endswith(plan.format.suffix))}
    return plan, {
        name: np.ascontiguousarray(arrays[name] if name in own else narrow[name]) for name in arrays
    }


def write(folder, plan, arrays, config=CONFIG):
    quantization = {"quantization_config": plan.quantization_config()}
    described = to_config_json(config, max_length=64) | {"dtype": "bfloat16"} | quantization
    return write_folder(folder, described, arrays, files=2)


GRIDS = [
    ("fp8_block", "fp8_block"),
    ("fp8_block_ue8m0", "fp8_block"),
    ("fp8_rowwise", "compressed_tensors"),
]


@pytest.mark.parametrize(
    ("policy", "fmt"),
    # Float32 scales are divided by; powers of two are exact in any program.
    [
        pytest.param(*grid, marks=pytest.mark.optimized_too if grid == GRIDS[0] else ())
        for grid in GRIDS
    ],
)
def test_codes_and_scales_are_those_of_training(policy, fmt):
    """Bit for bit those of the frozen model, transposed: of every linear of every layer."""
    plan, arrays = made(policy, fmt, scales="float32" if policy == "fp8_block" else None)
    assert any(f"codes: those that {policy} trained with, bit for bit" == n for n in plan.notes)
    frozen, checked = frozen_layers(policy), 0
    for path, place in places(CONFIG).items():
        if not (path.startswith("layers/") and path.endswith("kernel")):
            continue
        q = leaf_of(frozen, path.removeprefix("layers/")).operand.q
        codes, scales = np.asarray(q.values), np.asarray(q.float_scale())
        for layer in range(CONFIG.n_layers):
            name = place.name(layer, "model.")
            assert arrays[name].dtype == codes.dtype == ml_dtypes.float8_e4m3fn
            np.testing.assert_array_equal(
                arrays[name].view(np.uint8), codes[layer].T.view(np.uint8)
            )
            scale = arrays[name.removesuffix("weight") + plan.format.suffix]
            np.testing.assert_array_equal(scale, scales[layer].T)
            assert scale.dtype == np.float32
            checked += 1
    assert checked == len(plan.casts) == 14


def test_other_runs_get_powers_of_two_and_an_override_says_what_it_leaves():
    def notes(policy, fmt, scales=None):
        plan = plan_export(CONFIG, as_policy(policy), fmt, scales=scales)
        assert len({cast for cast in plan.casts.values()}) == 1
        return plan.notes

    assert notes("bf16", "fp8_block")[0] == "scales: powers of two"
    assert (
        "fp8_delayed trained weights with scales of another grid"
        in notes("fp8_delayed", "fp8_block")[1]
    )
    left = notes("fp8_block", "fp8_block", "power_of_two")
    assert left[0] == "scales: powers of two"
    assert left[1] == "codes: scales=power_of_two leaves the grid that fp8_block trained on"
    assert "bit for bit" in notes("fp8_block_ue8m0", "fp8_block", "power_of_two")[1]
    float32 = notes("bf16", "compressed_tensors", "float32")
    assert float32[0] == "scales: float32"
    assert float32[1] == "codes: made by this export, since bf16 trained weights in high precision"


def test_the_default_for_servers_and_what_is_said_of_it():
    """Blocks get powers of two, which vLLM leaves as they are; SGLang is told of those of
    activations where the run trained with them."""

    def export(policy, scales=None):
        plan = plan_export(CONFIG, as_policy(policy), "fp8_block", scales=scales)
        return plan.notes, plan.quantization_config()

    notes, config = export("fp8_block")
    assert notes[0] == "scales: powers of two" and "scale_fmt" not in config
    assert notes[2].startswith("scales=float32 gives the codes that fp8_block trained with")
    notes, config = export("fp8_block", "float32")
    assert notes[0] == "scales: float32" and "bit for bit" in notes[1]
    assert "VLLM_USE_DEEP_GEMM_E8M0=0, or export with scales=power_of_two" in notes[2]
    notes, config = export("fp8_block_ue8m0")
    assert config["scale_fmt"] == "ue8m0" and "(scale_fmt=ue8m0)" in notes[2]
    assert "scale_fmt" not in export("fp8_block_ue8m0", "float32")[1]
    notes, config = export("bf16")
    assert len(notes) == 2 and "scale_fmt" not in config
    assert config["ignored_layers"] == config["modules_to_not_convert"] != []
    for name in ("fp8_block", "fp8_block_ue8m0", "bf16"):
        channels = plan_export(CONFIG, as_policy(name), "compressed_tensors")
        assert "scale_fmt" not in channels.quantization_config()


def test_scales_are_powers_of_two():
    _, arrays = made("bf16", "fp8_block")
    for name, array in arrays.items():
        if name.endswith("weight_scale_inv"):
            np.testing.assert_array_equal(np.frexp(array)[0], 0.5)


def test_what_stays_in_bf16_is_listed():
    policy = as_policy("fp8_block:bf16_last=1,head=fp8_rowwise")
    plan = plan_export(CONFIG, policy, "fp8_block")
    listed = plan.quantization_config()["modules_to_not_convert"]
    assert {"lm_head", "model.embed_tokens", "model.norm", UP} <= set(listed)
    assert "model.layers.0.input_layernorm" in listed and "model.layers.0.mlp.up_proj" not in listed
    assert all(name.startswith("model.layers.0.") for name in plan.casts)
    assert "7 linears of the layers 1 stay in bf16, as in training" in plan.notes
    assert plan.notes[-1].startswith("lm_head stays in bf16, which fp8_block:")
    channel = plan_export(CONFIG, policy, "compressed_tensors").quantization_config()
    assert "model.norm" not in channel["ignore"] and {"lm_head", UP} <= set(channel["ignore"])


def test_shapes_that_servers_refuse_are_all_named():
    shape = dataclasses.replace(CONFIG, n_kv_heads=1, d_ff=448)
    with pytest.raises(ValueError) as error:
        plan_export(shape, as_policy("fp8_block"), "fp8_block")
    message = str(error.value)
    for problem in (
        "attention/k has 64 outputs",
        "mlp/gate has 448 outputs",
        "mlp/down has 448 in",
    ):
        assert problem in message
    assert "attention/q" not in message and "format=compressed_tensors takes any" in message
    assert plan_export(shape, as_policy("fp8_block"), "compressed_tensors").casts


def test_what_is_refused():
    gpt2 = dataclasses.replace(CONFIG, learned_positions=64, biases="all", norm="layer")
    with pytest.raises(ValueError, match="GPT-2's weights are another module's"):
        plan_export(gpt2, as_policy("fp8_block"), "fp8_block")
    half = Policy((("layers/attention/[qk]", RECIPES["fp8_block"]),), name="half")
    with pytest.raises(ValueError, match="servers join .* policy 'half' casts .*attention/k only"):
        plan_export(CONFIG, half, "fp8_block")
    with pytest.raises(ValueError, match="unknown FP8 format 'fp8'"):
        plan_export(CONFIG, as_policy("fp8_block"), "fp8")
    with pytest.raises(ValueError, match="unknown rule of scales 'pow2'"):
        plan_export(CONFIG, as_policy("fp8_block"), "fp8_block", scales="pow2")
    broken = jax.tree.map(np.array, params())
    broken["layers"]["mlp"]["up"]["kernel"][1, 3, 5] = np.inf
    with pytest.raises(ValueError, match=f"{UP}.weight has values that are not finite"):
        made("fp8_block", "fp8_block", tree=broken)


# Reading ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "policy", "fmt"),
    [
        (CONFIG, "fp8_block", "fp8_block"),
        (RAGGED, "fp8_rowwise", "compressed_tensors"),
    ],
)
def test_a_folder_gives_the_dequantized_weights_back(config, policy, fmt, tmp_path):
    """On one device, and on eight: the shards of a block read its scale."""
    plan, arrays = made(policy, fmt, config, scales="float32")
    folder = write(tmp_path, plan, arrays, config)
    read = load_model(f"hf:{folder}").variables["params"]
    frozen = frozen_layers(policy, config)
    for part, name in (("attention", "k"), ("mlp", "gate"), ("mlp", "down")):
        dequantized = jax.jit(jax.vmap(lambda kernel: kernel.dequantized()))
        np.testing.assert_array_equal(
            read["layers"][part][name]["kernel"], dequantized(frozen[part][name]["kernel"])
        )
    mesh = make_mesh(MeshAxes(data=2, fsdp=2, tensor=2))
    sharded = load_model(f"hf:{folder}", mesh=mesh).variables["params"]
    jax.tree.map(np.testing.assert_array_equal, sharded, read)


def test_eight_devices_write_what_one_writes():
    mesh = make_mesh(MeshAxes(data=2, fsdp=2, tensor=2))
    shardings = tree_shardings(abstract_variables(Transformer(CONFIG))["params"], mesh)
    _, expected = made("fp8_block", "fp8_block")
    _, got = made("fp8_block", "fp8_block", tree=jax.device_put(params(), shardings))
    assert got.keys() == expected.keys()
    for name in got:
        np.testing.assert_array_equal(got[name].view(np.uint8), expected[name].view(np.uint8))


def test_export_and_back(tmp_path):
    """A model that trained in fp8_block: to FP8, then to BF16, which has no quantization left."""
    model = Transformer(CONFIG, "fp8_block")
    trained = TrainedModel(
        model=model, variables={"params": params()}, tokenizer=None, name="run", record=None
    )
    notes = export_model(trained, tmp_path / "fp8", "fp8_block", scales="float32")
    assert notes[:2] == ("scales: float32", "codes: those that fp8_block trained with, bit for bit")
    _, expected = made("fp8_block", "fp8_block", scales="float32")
    with_files = TensorFiles(tmp_path / "fp8")
    assert with_files.shapes.keys() == expected.keys()
    for name, array in expected.items():
        got = with_files.read(name, tuple(slice(None) for _ in array.shape))
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(got.view(np.uint8), array.view(np.uint8))
    convert.export(f"hf:{tmp_path / 'fp8'}", tmp_path / "bf16", "bf16")
    config = json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    with pytest.raises(ValueError, match="scales=float32 is for FP8 formats: bfloat16 has none"):
        convert.export(f"hf:{tmp_path / 'fp8'}", tmp_path / "no", "bf16", scales="float32")
    ragged = dataclasses.replace(trained, model=Transformer(RAGGED, "fp8_block"))
    with pytest.raises(ValueError, match="servers need multiples of 128"):
        export_model(ragged, tmp_path / "no", "fp8_block")
    assert not (tmp_path / "no").exists()


def test_damaged_scales_are_all_named(tmp_path):
    plan, arrays = made("fp8_block", "fp8_block")
    del arrays[f"{UP}.weight_scale_inv"]
    gate = "model.layers.0.mlp.gate_proj.weight_scale_inv"
    arrays[gate] = np.ascontiguousarray(arrays[gate][:, :1])
    arrays["lost.weight_scale_inv"] = arrays[gate]
    folder = write(tmp_path, plan, arrays)
    with pytest.raises(ValueError) as error:
        load_model(f"hf:{folder}")
    message = str(error.value)
    assert f"{UP}.weight has no weight_scale_inv" in message
    assert f"{gate} has shape [3, 1] instead of [3, 2]" in message
    assert "lost.weight_scale_inv belongs to no codes" in message


def test_another_quantization_is_refused(tmp_path):
    plan, arrays = made("fp8_block", "fp8_block")
    other = plan.quantization_config() | {"fmt": "e5m2"}
    described = to_config_json(CONFIG, max_length=64) | {"quantization_config": other}
    folder = write_folder(tmp_path, described, arrays)
    with pytest.raises(ValueError, match="quantization_config.fmt='e5m2' is not supported, only"):
        load_model(f"hf:{folder}")


PHI = dataclasses.replace(CONFIG, biases="none", joined_projections=True)


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")  # to dequantize
@pytest.mark.parametrize(
    ("config", "policy", "fmt", "scales"),
    [
        (CONFIG, "fp8_block", "fp8_block", None),
        (CONFIG, "fp8_block", "fp8_block", "float32"),
        (CONFIG, "fp8_block_ue8m0", "fp8_block", None),  # which sets scale_fmt
        (CONFIG, "fp8_block:bf16_last=1", "fp8_block", None),
        (PHI, "fp8_block", "fp8_block", None),
        (RAGGED, "fp8_rowwise", "compressed_tensors", None),
        (RAGGED, "fp8_rowwise:bf16_first=1", "compressed_tensors", None),
    ],
)
def test_transformers_computes_the_same_logits(config, policy, fmt, scales, tmp_path):
    """On a CPU it dequantizes, to the dtype it is asked for: float32 loses nothing.

    A folder of compressed-tensors would quantize activations, too, if it were not asked not to.
    """
    torch = pytest.importorskip("torch", reason="a peer, not a dependency")
    transformers = pytest.importorskip("transformers", reason="a peer, not a dependency")
    plan, arrays = made(policy, fmt, config, scales)
    folder = write(tmp_path, plan, arrays, config)
    options = {"dtype": torch.float32}
    if fmt == "compressed_tensors":
        pytest.importorskip("compressed_tensors", reason="a peer, not a dependency")
        given = transformers.CompressedTensorsConfig(dequantize=True)
        options["quantization_config"] = given
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, **options).float()
    tokens = np.random.default_rng(0).integers(0, 102, (2, 32))
    with torch.no_grad():
        theirs = loaded(torch.tensor(tokens)).logits.numpy()
    trained = load_model(f"hf:{folder}")
    model, ids = trained.model.clone(dtype=jnp.float32), jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(32, dtype=jnp.int32), ids.shape)
    ours = jax.jit(model.apply)(trained.variables, ids, jnp.ones_like(ids), positions)
    assert np.linalg.norm(theirs - ours) / np.linalg.norm(ours) <= 1e-5


def test_joined_tensors_have_the_codes_of_their_parts(tmp_path):
    """Phi 3 stores q, k and v, and gate and up, in one tensor each."""
    _, apart = made("fp8_block", "fp8_block", dataclasses.replace(PHI, joined_projections=False))
    plan, joined = made("fp8_block", "fp8_block", PHI)
    assert len(plan.casts) == 8 and "model.layers.0.mlp.gate_up_proj.weight" in plan.casts
    for name, parts in (("self_attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
        for suffix in ("weight", "weight_scale_inv"):
            at = f"model.layers.1.{name.split('.')[0]}"
            expected = np.concatenate([apart[f"{at}.{part}_proj.{suffix}"] for part in parts])
            got = joined[f"model.layers.1.{name}_proj.{suffix}"]
            np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))
    read = load_model(f"hf:{write(tmp_path, plan, joined, PHI)}").variables["params"]
    at = "model.layers.1.self_attn.k_proj"
    scale = np.repeat(np.repeat(apart[f"{at}.weight_scale_inv"], 128, axis=0), 128, axis=1)
    expected = apart[f"{at}.weight"].astype(np.float32) * scale
    np.testing.assert_array_equal(read["layers"]["attention"]["k"]["kernel"][1], expected.T)
    rules = tuple(
        (f"layers/attention/{name}", RECIPES["fp8_block" if name == "v" else "fp8_rowwise"])
        for name in "qkv"
    )
    with pytest.raises(ValueError, match="qkv_proj.weight holds .*, whose scales differ: give sca"):
        plan_export(PHI, Policy(rules, name="x"), "compressed_tensors")


def test_every_format_describes_itself():
    for name, fmt in FP8_FORMATS.items():
        assert name == fmt.name and fmt.config(("lm_head",))["quant_method"] in (
            "fp8",
            "compressed-tensors",
        )
