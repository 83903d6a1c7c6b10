"""Every config builds, every key is documented and read, and a mistyped command says so at once."""

import ast
import dataclasses
import importlib
import io
import re
import tokenize
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from configs import base
from fp8jax.lm.corpus import build_corpus
from fp8jax.lm.data.loader import train_batches
from fp8jax.lm.mesh import MeshAxes
from fp8jax.lm.model.config import ModelConfig
from fp8jax.lm.optim.config import OptimizerConfig
from fp8jax.lm.optim.optimizers import make_optimizer
from fp8jax.lm.records.config_keys import by_path
from fp8jax.lm.sources import parse_sources
from fp8jax.lm.training.build import build
from fp8jax.lm.training.programs import abstract_numbers, training_programs
from fp8jax.lm.training.settings import Settings, check_numbers
from fp8jax.numerics.names import as_recipe
from fp8jax.numerics.schedule import as_schedule
from fp8jax.numerics.tiles import TOKEN
from tests.support import ROOT
from tests.support.commands import command_line
from tests.support.text import write_generated_text

# Whole pipelines, whose configs hold several training configs (tests/experiments/pipeline_test.py);
# the rest are training configs.
PIPELINES = ("pipeline", "infir2/h200", "infir2/small")
CONFIGS = sorted(
    name
    for path in (ROOT / "configs").rglob("*.py")
    if path.stem[0] != "_"
    if (name := path.relative_to(ROOT / "configs").with_suffix("").as_posix()) not in PIPELINES
)
RUNS = [name for name in CONFIGS if name != "base"]


def module_of(name: str) -> ModuleType:
    """infir2/cpt_7b -> the module configs.infir2.cpt_7b."""
    return importlib.import_module("configs." + name.replace("/", "."))


def sizes(name: str) -> tuple[str, ...]:
    """What may follow the colon of --config=FILE:SIZE, sizes or stages; () for neither."""
    module = module_of(name)
    return next(
        (getattr(module, kind) for kind in ("SIZES", "STAGES") if hasattr(module, kind)), ()
    )


ALL = [(name, size) for name in CONFIGS for size in sizes(name) or (None,)]


def load(name: str, size: str | None = None):
    """The config of that file, locked as the command line locks it."""
    get_config = module_of(name).get_config
    return (get_config() if size is None else get_config(size)).lock()


def smoke_size(config, folder: Path):
    """The config with the smallest sizes, on generated text; all else as it is."""
    tiny = dict(d_model=32, n_layers=2, n_heads=2, n_kv_heads=2, d_ff=64, head_dim=16)
    config.model_overrides.update(tiny)
    config.update(num_steps=8, optimizer=dict(warmup_steps=1), seq_len=32)
    if config.unroll is not None:
        config.unroll = min(config.unroll, tiny["n_layers"])
    config.batch_size = 8 * config.grad_accum
    config.update(data=write_generated_text(folder), cache_dir=str(folder / "cache"))
    return config


def abstract_batch(rows, run):
    """The shapes of a batch, sharded as the run wants it."""
    return {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=run.batch_sharding)
        for name, array in rows.items()
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_config_builds_at_smoke_size(name, tmp_path):
    config = smoke_size(load(name), tmp_path)
    run = build(config)
    corpus = build_corpus(
        config.data,
        run.tokenizer,
        seq_len=config.seq_len,
        valid_fraction=config.valid.fraction,
        cache_dir=config.cache_dir,
    )
    batches = train_batches(corpus.train, seed=config.seed, batch_size=config.batch_size)
    batch = abstract_batch(next(batches), run)
    batches.close()
    with jax.set_mesh(run.mesh):
        numbers = abstract_numbers(run, run.stages[0])
        for program in training_programs(run.stages[0]):
            step = getattr(run.stages[0].programs, program)
            state, metrics = jax.eval_shape(step, run.stages[0].state, batch, numbers)
            assert jax.tree.structure(state) == jax.tree.structure(run.stages[0].state)
            promoted = {"promoted": (2,)} if config.gnmr.alpha else {}
            assert {k: v.shape for k, v in metrics.items()} == promoted | dict.fromkeys(
                ("loss", "grad_norm", "learning_rate"), ()
            )
        sums = jax.eval_shape(run.stages[0].programs.eval_step, run.stages[0].state, batch)
    assert sums["nats"].dtype == jnp.float32


@pytest.mark.parametrize(("name", "size"), ALL)
def test_config_resolves_as_it_is(name, size):
    config = load(name, size)
    run = build(config)  # full size: nothing is allocated
    assert config.unroll in (None, 1, run.stages[0].model.config.n_layers)  # 1: a loop
    if config.num_epochs is None:
        parse_sources(config.data)
        return
    with pytest.raises(ValueError, match="no file matches 'InfiAlign-SFT-(72k|165k)/"):
        parse_sources(config.data)  # conversations that the user has to get


def test_papers_run_as_their_papers_say():
    assert {load("graphcore", size).precision for size in sizes("graphcore")} == {
        "fp8_amax:qkv=shared"
    }
    most = {"llama_60m": 2, "llama_125m": 4, "llama_350m": 6, "llama_1b": 6}  # the first is ours
    for size in sizes("gnmr"):
        config = load("gnmr", size)
        low, high = (as_recipe(name) for name in (config.precision, config.gnmr.precision))
        assert config.gnmr.alpha and low.wgrad_x != high.wgrad_x
        assert low.wgrad_x.tile == TOKEN and low.wgrad_x.format.bits == 4
        assert config.gnmr.most == most.get(size, 1)
        layers = build(config).stages[0].model.config.n_layers
        assert config.gnmr.most <= layers / 4 or size == "llama_125m"  # the paper's 4 of 12
        if size != "naive":  # only the saved activations are quantized
            assert [low.casts, high.casts] == [(low.wgrad_x,), (high.wgrad_x,)]


def check_values(config, **values) -> None:
    """Keys of a group are `group__key`."""
    found = by_path(config)
    assert {name: found[name.replace("__", ".")] for name in values} == values


def test_infir2_pretrains_as_published():
    """40,000 steps of 128 rows of 32,768: 168B tokens, in phases of 5,000, 30,000 and 5,000."""
    for name, model in (("cpt_1_5b", "qwen2.5_1.5b"), ("cpt_7b", "qwen2.5_7b")):
        config = load(f"infir2/{name}")
        check_values(
            config,
            precision="fp8_block_ue8m0",
            model=model,
            seed=1236,
            seq_len=32_768,
            batch_size=128,
            num_steps=40_000,
            document_masking=False,
            optimizer__name="adamw",
            optimizer__learning_rate=1e-4,
            optimizer__schedule="wsd",
            optimizer__weight_decay=0.1,
            optimizer__b1=0.9,
            optimizer__b2=0.95,
            optimizer__clip_norm=1.0,
            optimizer__moments="float32",
            optimizer__gradients="float32",
            optimizer__master_weights="float32",
        )
        assert round(config.num_steps * config.batch_size * config.seq_len / 1e9) == 168
        optimizer = OptimizerConfig.from_config(config)
        assert (optimizer.warmup, optimizer.decay_steps) == (5000, 5000)
        _, rate = make_optimizer(optimizer)
        for finished, expected in [(0, 2e-8), (4999, 1e-4), (34_999, 1e-4), (39_999, 1e-5)]:
            assert float(rate(finished)) == pytest.approx(expected, rel=1e-5, abs=1e-4 * 2.0**-22)


@pytest.mark.parametrize("stage", ["stage1", "stage2"])
def test_infir2_fine_tunes_as_published(stage):
    sizes = (("1_5b", "qwen2.5_1.5b", 5e-5), ("7b", "qwen2.5_7b", 2e-5))
    for name, model, peak in sizes:
        config = load(f"infir2/sft_{name}", stage)
        check_values(
            config,
            precision="fp8_block_ue8m0",
            model=model,
            seq_len=32_768,
            batch_size=64,
            num_epochs=5,
            document_masking=True,
            remat="full",
            optimizer__name="adamw",
            optimizer__weight_decay=0.0,
            optimizer__learning_rate=peak,
            optimizer__schedule="cosine",
            optimizer__b1=0.9,
            optimizer__b2=0.95,
        )
        assert {"stage1": "72k", "stage2": "165k"}[stage] in config.data
        config.num_steps = 1000  # what five epochs may come to
        optimizer = OptimizerConfig.from_config(config)
        assert optimizer.warmup == 50
        _, rate = make_optimizer(optimizer)
        assert float(rate(999)) == pytest.approx(peak / 10, rel=1e-5)
    with pytest.raises(ValueError, match="stage 'stage3' is none of stage1, stage2"):
        load("infir2/sft_7b", "stage3")


@pytest.mark.parametrize("size", ["small", "gpt2_125m"])
def test_stosignsgd_has_the_formats_of_its_paper(size):
    """Every linear in FP8, gradients in E5M2, momentum in E4M3 without a scale, BF16 weights; the
    largest magnitude is float32."""
    (stage,) = build(load("stosignsgd", size)).stages
    assert {r.name for r in map(stage.policy.recipe, stage.model.config.linears)} == {"fp8_current"}
    state = stage.state
    parts = [state.params, *(optax.tree.get(state.opt_state, name) for name in ("mu", "bound"))]
    for part, dtype in zip(parts, ("bfloat16", "float8_e4m3fn", "float32"), strict=True):
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(part)} == {dtype}
    assert load("stosignsgd", size).optimizer.gradients == "e5m2"


def test_best_checkpoints_may_be_rarer_than_validations_but_not_between_them():
    config = base.get_config()
    config.valid.every = 50
    config.checkpoint.update(keep_best=1, every=100)
    check_numbers(config)
    config.checkpoint.every = 25
    with pytest.raises(ValueError, match="checkpoint.every=25 must be a multiple of valid.every"):
        check_numbers(config)


@pytest.mark.parametrize(("name", "size"), ALL)
@pytest.mark.parametrize("num_steps", [10, 50])
def test_a_shorter_run_needs_no_other_key(name, size, num_steps):
    config = load(name, size)
    config.num_steps = num_steps
    check_numbers(config)
    optimizer = OptimizerConfig.from_config(config)
    assert optimizer.warmup < num_steps
    _, schedule = make_optimizer(optimizer)
    assert 0 < float(schedule(num_steps - 1)) <= np.float32(config.optimizer.learning_rate)
    stages = as_schedule(config.precision, config.precision_schedule)
    assert stages.begins(num_steps)[0] == 0


@pytest.mark.parametrize("name", [name for name in RUNS if "small" in sizes(name)])
def test_sizes_are_documented_and_another_one_is_refused(name):
    docstring = " ".join(module_of(name).__doc__.split())
    for size in sizes(name)[1:]:
        assert size in docstring
    assert sizes(name)[0] == "small" and load(name) == load(name, "small")
    assert load(name).num_steps <= 200
    with pytest.raises(ValueError, match="size 'big' is none of small, "):
        load(name, "big")


@pytest.mark.parametrize("name", RUNS)
def test_docstring_is_the_config_s_own_command(name):
    docstring = ast.get_docstring(ast.parse((ROOT / f"configs/{name}.py").read_text()))
    command = f"python -m experiments.train --config=configs/{name}.py --workdir=runs/{name}"
    assert docstring and command in docstring.splitlines()


# Keys of base.py ----------------------------------------------------------------------------------


def uncommented_keys(source: str) -> list[str]:
    """The assignments to `config.KEY` without a comment on one of their lines.

    Groups of keys, `config.KEY = ConfigDict()`, need none.
    """
    commented = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
        if source.splitlines()[token.start[0] - 1].split("#")[0].strip()
    }
    return [
        ast.unparse(node.targets[0])
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign)
        if isinstance(node.targets[0], ast.Attribute)
        if not ast.unparse(node.value).endswith("ConfigDict()")
        if commented.isdisjoint(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    ]


def test_every_key_has_a_comment():
    assert uncommented_keys((ROOT / "fp8jax/lm/training/config.py").read_text()) == []
    assert uncommented_keys((ROOT / "configs/pipeline.py").read_text()) == []
    assert uncommented_keys("config.a = 1\n# not beside it\nconfig.b = f(\n  2  # x\n)") == [
        "config.a"
    ]


def path_of(node: ast.AST) -> str | None:
    """KEY of `config.KEY`, `self.config.KEY` and `config["KEY"]`, and GROUP.KEY; else None."""
    match node:
        case ast.Attribute(value=parent, attr=key):
            pass
        case ast.Subscript(value=parent, slice=ast.Constant(value=str(key))):
            pass
        case _:
            return None
    if ast.unparse(parent) in ("config", "self.config"):
        return key
    return None if (group := path_of(parent)) is None else f"{group}.{key}"


def keys_read(source: str) -> set[str]:
    """The paths that are read, those of groups, too; method calls aside."""
    nodes = list(ast.walk(ast.parse(source)))
    methods = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    paths = {path_of(node) for node in nodes if id(node) not in methods}
    return {path for path in paths if path is not None}


def test_every_key_is_read_and_what_is_read_is_a_key():
    config = base.get_config()
    # Elsewhere `config` is a ModelConfig or an OptimizerConfig.
    readers = [path.read_text() for path in (ROOT / "fp8jax/lm/training").rglob("*.py")]
    readers.append((ROOT / "fp8jax/lm/optim/config.py").read_text())
    read = set().union(*map(keys_read, readers))
    paths = by_path(config)
    # Handed over as a whole, field by field.
    whole = {f"optimizer.{field.name}" for field in dataclasses.fields(OptimizerConfig)}
    settings = {field.name for field in dataclasses.fields(Settings)} - {"record"}
    whole |= {path for path in paths if path.replace(".", "_") in settings}
    for group, fields in (("model_overrides", ModelConfig), ("mesh_axes", MeshAxes)):
        whole |= {f"{group}.{field.name}" for field in dataclasses.fields(fields)}
    groups = {path.partition(".")[0] for path in paths if "." in path}
    whole -= {"optimizer.num_steps", "optimizer.seed"}  # which are of the run
    assert set(paths) == read - groups | whole
    used = set(re.findall(r"settings\.(\w+)", "".join(readers)))
    assert settings <= used, settings - used
    assert keys_read('config.a + config["b"] + config.method() + other.c') == {"a", "b"}
    assert keys_read("config.a.b + config.c.method()") == {"a", "a.b", "c"}


def test_every_key_is_read_as_an_attribute():
    """`config.gnmr.lock` would be a method of ConfigDict."""
    for path in by_path(base.get_config()):
        assert not any(hasattr(ConfigDict, key) for key in path.split(".")), path


# The command line ---------------------------------------------------------------------------------


def test_missing_workdir_is_named():
    """With the config of smoke.py; bad_commands_test.py has all that is refused."""
    code, said = command_line()
    assert code == 1 and "Traceback" not in said
    assert re.search("^error: --workdir must have a value", said, re.MULTILINE)
