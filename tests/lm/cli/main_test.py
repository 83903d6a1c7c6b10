"""The program `fp8jax`: its commands, its configs by name, and what it says where packages lack.

The wheel's program runs in .ci/run.
"""

import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
from absl import app

import fp8jax
from fp8jax.lm import cli
from fp8jax.lm.cli import command, config_flag, main
from fp8jax.lm.cli.config_flag import mesh_names, read_mesh, with_files, with_meshes
from fp8jax.lm.mesh import MeshAxes
from tests.support import ROOT


def said(monkeypatch, *given: str) -> str:
    """What the program says at its end, as the line that Python writes to stderr."""
    monkeypatch.setattr(sys, "argv", ["fp8jax", *given])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return str(ended.value)


def test_the_program_names_its_commands(monkeypatch, capsys):
    names = "one of train, generate, evaluate, convert, tokenizer, report"
    assert said(monkeypatch) == f"error: name a command: {names}"
    assert said(monkeypatch, "trian") == f"error: there is no command 'trian': {names}"
    monkeypatch.setattr(sys, "argv", ["fp8jax", "--help"])
    main.main()
    help = capsys.readouterr().out
    assert all(f"\n    {name} " in help for name in main.COMMANDS)
    assert all((ROOT / f"experiments/{name}.py").is_file() for name in main.COMMANDS)


def test_help_is_no_error(capsys):
    app.define_help_flags()
    with pytest.raises(SystemExit) as ended:
        command.parse_flags(["program", "--help"])
    assert ended.value.code == 0 and "--helpfull" in capsys.readouterr().out


def test_a_package_that_is_missing_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_collections", None)
    for name in ("fp8jax.lm.cli.config_flag", "fp8jax.lm.training.config"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(cli, "config_flag")
    hint = "needs ml_collections: install fp8jax's extra `train`, in a clone by pip install"
    hint += " -e '.[train]'"
    assert said(monkeypatch, "train", "--config=smoke") == f"error: fp8jax train {hint}"
    monkeypatch.delitem(vars(fp8jax), "base_config", raising=False)
    with pytest.raises(ModuleNotFoundError, match=f"fp8jax.base_config {re.escape(hint)}"):
        fp8jax.base_config  # noqa: B018


def test_a_config_is_named_by_its_file_s_stem(monkeypatch, tmp_path):
    configs = ROOT / "configs"
    assert with_files(["x", "--config=smoke", "-config", "infir2/cpt_small", "--config"]) == [
        "x",
        f"--config={configs}/smoke.py",
        "-config",
        f"{configs}/infir2/cpt_small.py",
        "--config",
    ]
    assert with_files(["--config=fp4:gpt2"]) == [f"--config={configs}/fp4.py:gpt2"]
    monkeypatch.chdir(tmp_path)
    Path("smoke").write_text("")  # a user's own file comes first
    given = ["--config=smoke", "--config=nowhere", "--config=", "--configs=smoke", "config=smoke"]
    assert with_files(given) == given
    monkeypatch.setattr(config_flag, "_CONFIGS", tmp_path)  # as in a wheel
    Path("mine.py").write_text("")
    assert with_files(["--config=mine"]) == [f"--config={tmp_path}/mine.py"]


def test_the_version_is_the_package_s():
    assert fp8jax.__version__ == metadata.version("fp8jax")


def test_a_mesh_of_configs_is_named():
    """Sizes that are given go before those of the file, wherever they stand."""
    given = ["train", "--config.mesh_axes.tensor=2", "--config.mesh=gpus_64", "--config.mesh=fsdp"]
    assert with_meshes(given) == [
        *given[:2],
        *("--config.mesh=data", "--config.mesh_axes.data=8", "--config.mesh_axes.fsdp=8"),
        "--config.mesh=fsdp",
    ]
    with pytest.raises(ValueError, match="no mesh 'gpus': one of gpus_4, gpus_64, gpus_8, tpu_"):
        read_mesh("gpus")


@pytest.mark.parametrize("name", mesh_names())
def test_each_mesh_of_configs_fits_its_machine(name):
    """And says how far it was tried."""
    mesh = read_mesh(name)
    sizes = MeshAxes(**mesh["mesh_axes"])
    assert sizes.data * sizes.fsdp * sizes.tensor == mesh["nodes"] * mesh["devices_per_node"]
    assert mesh["label"] in ("measured", "compiled", "planned")
    assert mesh["device"] in ("gpu", "tpu")
