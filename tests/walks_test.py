"""How far a value travels through the folders: x to its GEMM, a row of text, the config."""

import contextlib
import sys
import threading
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import fp8jax
from fp8jax.lm.data.loader import train_batches
from fp8jax.lm.training import build as building
from fp8jax.lm.training import settings
from tests.support import ROOT
from tests.support.runs import corpus, one_layer


def place(filename: str) -> str | None:
    """A file of fp8jax, below that folder; None for other files."""
    path = Path(filename)
    library = ROOT / "fp8jax"
    return path.relative_to(library).as_posix() if path.is_relative_to(library) else None


def folders(places: set[str]) -> set[str]:
    return {found.rpartition("/")[0] for found in places}


@contextlib.contextmanager
def entered():
    """The files of fp8jax whose functions are called, in any thread that begins meanwhile."""
    found: set[str] = set()

    def call(frame, event, _):
        if event == "call" and (file := place(frame.f_code.co_filename)):
            found.add(file)

    threading.setprofile(call)
    sys.setprofile(call)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_block"])
def test_x_enters_two_folders_from_dense_to_its_gemm(recipe, monkeypatch):
    """By the stack of calls at each GEMM, forward and backward."""
    multiply, stacks = jax.lax.dot_general, []

    def spy(*args, **kwargs):
        files = {place(frame.filename) for frame in traceback.extract_stack()} - {None}
        stacks.append(files)
        return multiply(*args, **kwargs)

    layer, x = fp8jax.nn.Dense(16, recipe=recipe), jnp.ones((8, 32))
    variables = layer.init(jax.random.key(0), x)
    monkeypatch.setattr(jax.lax, "dot_general", spy)
    jax.make_jaxpr(jax.grad(lambda v: jnp.sum(layer.apply(v, x))))(variables)
    assert len(stacks) == 3
    for files in stacks:
        assert {"gemm/vjp.py", "gemm/backends/emulated.py"} <= files
        assert folders(files) == {"gemm", "gemm/backends"}


def test_a_row_of_text_enters_one_folder(data):
    rows = corpus(*data).train
    with entered() as found:
        batches = train_batches(rows, seed=0, batch_size=2)
        next(batches)
        batches.close()
    assert "lm/data/rows.py" in found and folders(found) == {"lm/data"}


def test_numbers_of_a_config_are_checked_once(data, monkeypatch):
    check, checked = settings.check_numbers, []

    def count(config):
        checked.append(config)
        check(config)

    for module in (building, settings):
        monkeypatch.setattr(module, "check_numbers", count)
    building.build(one_layer(data), jax.devices()[:1])
    assert len(checked) == 1
