"""A recipe, an optimizer, a schedule and rows of a user's own file: trained, resumed, named."""

import re
import shutil
import sys

import pytest

from fp8jax.lm.cli import charts
from fp8jax.lm.cli.page import report
from fp8jax.lm.corpus import build_corpus
from fp8jax.lm.data.tokenizers import tokenizer
from fp8jax.lm.figures.run_files import read_run
from fp8jax.lm.training.build import build
from fp8jax.numerics.names import as_policy, as_recipe
from tests.support.commands import command_here
from tests.support.pages import page_of
from tests.support.runs import numbers, one_layer
from tests.support.traced_programs import traced_once

_MINE = """
import jax.numpy as jnp
import numpy as np
import optax
from fp8jax import Cast, Policy, Recipe, Tile

tile64 = Cast(format="e4m3", tile=Tile(1, 64), scale="e8m0")
casts = ("fwd_x", "fwd_w", "dgrad_g", "dgrad_w", "wgrad_x", "wgrad_g")
recipe = Recipe(name="any", **{name: tile64 for name in casts})
mlps = Policy((("layers/mlp/*", recipe),), name="any")
number = 3

def rows(seq_len):
    return np.random.default_rng(0).integers(0, 200, (90, seq_len + 1))

def half_sign(config):
    return optax.chain(optax.scale_by_sign(), optax.trace(config.b1), optax.scale(0.5))

def divides(config):
    return optax.scale_by_adam(config.b1, config.b2, eps=0.0)

def steps_down(config):
    return lambda step: config.learning_rate / (1 + step // 3)

def root(config):
    return lambda step: config.learning_rate * jnp.sqrt(1 - step / 5.5)
"""

_CONFIG = """
from tests.support.runs import one_layer

def get_config():
    return one_layer(
        ("rows:mine:rows", "unused"),
        precision="mine:recipe",
        num_steps=6,
        valid__every=6,
        checkpoint__every=3,
        optimizer__name="mine:half_sign",
        optimizer__schedule="mine:steps_down",
    )
"""


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(_MINE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("mine", None)


def test_a_run_resumes_to_the_bit_and_names_what_is_the_user_s(tmp_path, monkeypatch):
    config = tmp_path / "own_config.py"
    config.write_text(_CONFIG)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    with traced_once(), command_here("train") as train:
        train(f"--config={config}", f"--workdir={whole}")
        shutil.copytree(whole, parts)
        shutil.rmtree(parts / "checkpoints" / "6")
        train(f"--config={config}", f"--workdir={parts}")
    lines = numbers(whole)
    assert numbers(parts) == lines and lines[-1]["loss"] < lines[0]["loss"]
    rates = [line["learning_rate"] for line in lines]
    assert rates == pytest.approx([3e-3, 3e-3, 1.5e-3, 1.5e-3, 1.5e-3, 1e-3])
    assert "policy mine:recipe" in (whole / "precision.txt").read_text()
    monkeypatch.setattr(charts, "have_matplotlib", lambda: False)
    page = page_of(report([read_run(whole)]))["runs"]
    assert "precision mine:recipe" in page and "data rows:mine:rows" in page
    assert "optimizer.name = 'mine:half_sign'" in page and "rows-rows train 81" in page


def test_a_schedule_that_ends_in_nan_is_refused():
    """The loss and the gradient of the last step are finite, and its weights would not be."""
    config = one_layer(("rows:mine:rows", "unused"), num_steps=6, optimizer__schedule="mine:root")
    with pytest.raises(ValueError, match="mine:root: the learning rate of step 6 is nan"):
        build(config)
    config.num_steps = 5
    build(config)


@pytest.mark.full
def test_weights_that_an_optimizer_makes_nan_are_not_saved(tmp_path):
    """Rows of the embedding without a gradient are 0 / 0, and a sum of squares sees no gradient."""
    config = tmp_path / "own_config.py"
    config.write_text(_CONFIG.replace("mine:half_sign", "mine:divides"))
    with command_here("train") as train, pytest.raises(SystemExit) as ended:
        train(f"--config={config}", f"--workdir={tmp_path}/run", "--config.num_steps=1")
    expected = "state after step 1 has NaN or infinities in .*params/embedding.*optimizer mine:div"
    assert re.search(expected, str(ended.value))
    assert not list(tmp_path.glob("run/checkpoints/[0-9]*"))


@pytest.mark.parametrize(
    ("data", "changes", "message"),
    [
        ("rows:mine", {}, "expected rows:MODULE:OBJECT, got 'mine'"),
        ("rows:mine:row", {}, "rows of module 'mine': 'row'; did you mean 'rows'"),
        ("rows:mine:number", {}, "rows:mine:number is 3: expected rows, which have a length"),
        ("rows:mine:rows,python_stdlib", {}, r"\(rows-rows\) mix with no other .*python_stdlib"),
        ("rows:mine:rows", {"bad_examples": "skip"}, "bad_examples='skip' is for documents"),
    ],
)
def test_what_gives_no_rows_is_refused(data, changes, message):
    with pytest.raises(ValueError, match=message):
        build_corpus(
            data, tokenizer("bytes"), seq_len=4, valid_fraction=0.1, cache_dir="unused", **changes
        )


def test_names_with_options():
    assert as_recipe("mine:recipe").name == "mine:recipe"
    changed = as_recipe("mine:recipe:backward=bf16")
    assert (changed.name, changed.wgrad_x) == ("mine:recipe:backward=bf16", None)
    assert as_policy("mine:mlps").rules[0][0] == "layers/mlp/*"
    assert as_policy("mine:recipe:bf16_last=2").exempt(8) == (0, 2)


@pytest.mark.parametrize(
    ("resolve", "name", "error", "message"),
    [
        (as_policy, "mine:recip", ValueError, "of module 'mine': 'recip'; did you mean 'recipe'"),
        (as_policy, "yours:recipe", ValueError, "'yours:recipe': Python finds no module 'yours'"),
        (as_policy, "mine:number", TypeError, "mine:number is no policy and no recipe, but 3"),
        (as_recipe, "mine:mlps", TypeError, "mine:mlps is no recipe, but Policy"),
        (as_policy, "mine:recipe:", ValueError, "has a colon and no option"),
        (as_policy, "mine:recipe:margin", ValueError, "expected margin=VALUE"),
    ],
)
def test_what_is_not_there_is_refused(resolve, name, error, message):
    with pytest.raises(error, match=message):
        resolve(name)
