"""Models of Hugging Face folders and of workdirs: same logits, nothing more read than asked for."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.gemm.histories.amax_history import HISTORIES
from fp8jax.lm.interop.trained import load_model
from fp8jax.lm.mesh import MeshAxes, make_mesh
from fp8jax.numerics.names import as_policy
from tests.support import hf_vectors
from tests.support.hf_folders import config_json, tensors, write_folder
from tests.support.hf_vectors import MODELS, TOKENS
from tests.support.runs import tiny
from tests.support.untrained import write_checkpoints


def logits_of(trained) -> np.ndarray:
    tokens = jnp.asarray(TOKENS, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    model = trained.model.clone(dtype=jnp.float32)
    return np.asarray(jax.jit(model.apply)(trained.variables, tokens, tokens * 0 + 1, positions))


# Of the others, config_json_test.py compares what is read of config.json, and
# tests/lm/model/families_test.py the logits of the same weights.
FOLDERS = ("gpt2", "llama_llama3", "qwen2", "qwen3")


@pytest.mark.parametrize(
    "family",
    [name if name in FOLDERS else pytest.param(name, marks=pytest.mark.full) for name in MODELS],
)
def test_a_folder_has_the_logits_of_hugging_face(family, tmp_path):
    """The bound is derived in tests/lm/model/families_test.py."""
    config = config_json(family)
    folder = write_folder(tmp_path, config, tensors(config, np.float32), files=3)
    trained = load_model(f"hf:{folder}")
    expected = np.array(json.loads(hf_vectors.FILE.read_text())["logits"][family], np.float32)
    error = np.abs(logits_of(trained) - expected).max() / np.abs(expected).max()
    assert error <= 116 * 2.0**-24
    assert trained.tokenizer is None and trained.record is None


@pytest.mark.parametrize(
    ("family", "axes"),
    [
        ("gpt2", dict(fsdp=2, tensor=2, data=2)),
        ("llama", dict(fsdp=8)),
        ("qwen3", dict(fsdp=2, tensor=2, data=2)),
    ],
)
def test_a_mesh_gets_its_shards_and_the_same_values(family, axes, tmp_path):
    config = config_json(family)
    folder = write_folder(tmp_path, config, tensors(config))
    whole = load_model(f"hf:{folder}").variables
    mesh = make_mesh(MeshAxes(**axes))
    sharded = load_model(f"hf:{folder}", mesh=mesh).variables
    jax.tree.map(np.testing.assert_array_equal, whole, sharded)
    kernel = sharded["params"]["layers"]["mlp"]["up"]["kernel"]
    assert kernel.sharding.spec[1] == "fsdp" and kernel.dtype == jnp.float32
    devices = mesh.shape["fsdp"] * mesh.shape["tensor"]
    assert kernel.addressable_shards[0].data.size * devices == kernel.size


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """Of a run of three steps in delayed scaling, the last in BF16: the last two checkpoints."""
    workdir = tmp_path_factory.mktemp("trained") / "run"
    config = tiny(data, precision="fp8_delayed", num_steps=3, precision_schedule=((0.7, "bf16"),))
    write_checkpoints(workdir, config, (2, 3))
    return workdir


def test_a_run_is_loaded_without_its_optimizer_state(run, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(run, workdir)
    for step in (2, 3):
        shutil.rmtree(workdir / "checkpoints" / str(step) / "state")
    trained = load_model(str(workdir))
    assert (trained.step, as_policy(trained.model.policy).name) == (3, "bf16")
    assert HISTORIES not in trained.variables and trained.tokenizer.name == "bytes"
    assert trained.record["num_steps"] == 3
    earlier = load_model(str(workdir), step=2)
    assert as_policy(earlier.model.policy) == as_policy("fp8_delayed")
    histories = jax.tree.leaves(earlier.variables[HISTORIES])
    assert all(float(history.max()) > 0 for history in histories)
    # Without histories of its own, a delayed policy takes current amaxes.
    other = load_model(str(workdir), precision="fp8_delayed")
    assert as_policy(other.model.policy) == as_policy("fp8_delayed").current()
    assert HISTORIES not in other.variables


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("hf:", {}, "hf: needs a folder"),
        ("hf:DIR/none", {}, "none does not exist"),
        ("hf:DIR/file", {}, "file is not a folder"),
        ("hf:DIR", dict(step=3), "step=3 is for workdirs"),
        ("hf:DIR", {}, "config.json cannot be read"),
        ("DIR", {}, "has no checkpoints: name the workdir of a run, or hf:DIR"),
        ("DIR/none", {}, "none is not a folder"),
        ("RUN", dict(step=1), "no sound checkpoint of step 1"),
        ("RUN", dict(precision="fp9"), "unknown"),
    ],
)
def test_bad_sources(source, options, message, run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=message):
        load_model(source.replace("DIR", str(tmp_path)).replace("RUN", str(run)), **options)
