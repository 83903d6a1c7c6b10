"""The controller against the paper's formulas in plain Python, and promotions in training."""

import dataclasses
import functools
import itertools
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.lm.data.loader import to_devices, train_batches
from fp8jax.lm.model.models import MODELS
from fp8jax.lm.model.probes import _recipes
from fp8jax.lm.model.promotion import Promotion
from fp8jax.lm.model.transformer import Transformer
from fp8jax.lm.records.jsonl import read_jsonl
from fp8jax.lm.stability.gnmr import Gnmr
from fp8jax.lm.training.build import build
from fp8jax.lm.training.loop import train_and_evaluate
from fp8jax.numerics.names import as_policy
from fp8jax.numerics.policy import Policy
from tests.support.runs import corpus, tiny


def settings(**changes) -> Gnmr:
    defaults = dict(
        alpha=(1.5,), beta=1.3, first=0.0, most=2, lock_steps=1, window=5, precision="bf16"
    )
    return Gnmr(**(defaults | changes))


def promoted(config: Gnmr, norms, first_steps=0) -> np.ndarray:
    """What is promoted after each step, [steps, layers] or [steps, layers, linears]."""

    def step(seen, norms):
        seen = config.update(seen, norms, jax.random.key(0), jnp.int32(first_steps))
        return seen, seen["promoted"]

    norms = jnp.asarray(norms, jnp.float32)
    return np.asarray(jax.lax.scan(step, config.init(norms.shape[1:]), norms)[1])


def by_the_paper(config: Gnmr, norms, first_steps) -> np.ndarray:
    """The algorithm, layer by layer, in float64."""
    steps, layers = norms.shape
    mean, lock = np.zeros(layers), np.zeros(layers, int)
    queue: list[list[float]] = [[] for _ in range(layers)]
    found = np.zeros((steps, layers), bool)
    for t in range(steps):
        alpha = config.alpha[0] if t < first_steps else config.alpha[-1]
        scores = np.zeros(layers)
        for b in range(layers):
            ratio = 1.0 if t == 0 else norms[t, b] / mean[b]
            last = queue[b][-config.window :]
            grown = ratio / np.mean(last) if len(last) == config.window else 1.0
            scores[b] = max(ratio / alpha, grown / config.beta)
            mean[b] += (norms[t, b] - mean[b]) / (t + 1)
            queue[b].append(ratio)
        candidates = [b for b in range(layers) if scores[b] > 1 or lock[b] > 0]
        chosen = sorted(candidates, key=lambda b: -scores[b])[: config.most]
        for b in range(layers):
            found[t, b] = b in chosen
            again = config.lock_steps if scores[b] > 1 else max(lock[b] - 1, 0)
            lock[b] = again if b in chosen else 0
    return found


@pytest.mark.parametrize(
    ("changes", "first_steps"),
    [
        ({}, 0),
        (dict(most=1), 0),
        (dict(lock_steps=3), 0),
        (dict(lock_steps=0), 0),
        (dict(alpha=(3.0, 1.1)), 20),
        (dict(window=2, beta=2.0), 0),
    ],
)
def test_promotions_are_the_papers(changes, first_steps):
    norms = np.exp(np.random.default_rng(0).normal(0.0, 0.4, (80, 6)))
    norms[40:44, 2] *= 5
    expected = by_the_paper(settings(**changes), norms, first_steps)
    assert 0.02 < expected.mean() < 0.4
    found = promoted(settings(**changes), norms, first_steps)
    np.testing.assert_array_equal(found, expected)
    linears = promoted(settings(**changes, unit="linear"), norms.reshape(80, 3, 2), first_steps)
    np.testing.assert_array_equal(linears, expected.reshape(80, 3, 2))


def test_steady_gradients_promote_nothing_and_a_jump_its_layer():
    norms = np.ones((30, 4))
    assert not promoted(settings(), norms).any()
    norms[20, 3] = 10.0
    found = promoted(settings(), norms)
    assert [tuple(where) for where in np.argwhere(found)] == [(20, 3), (21, 3)]  # and its lock


def test_by_chance_the_share_is_promoted_whatever_the_gradients():
    """400 draws of 6 layers: within five standard errors of the share, and no layer always."""
    norms = np.exp(np.random.default_rng(0).normal(0.0, 0.4, (400, 6)))
    found = promoted(settings(random=0.2), norms)
    assert abs(found.mean() - 0.2) < 5 * np.sqrt(0.2 * 0.8 / found.size)
    assert not found.all(axis=0).any() and (found.sum(axis=1) > 2).any()  # `most` does not bind
    np.testing.assert_array_equal(found, promoted(settings(random=0.2), norms[::-1]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(alpha=()), "gnmr.alpha=.* must be one or two positive thresholds"),
        (dict(alpha=(1.5, -1.0)), "one or two positive thresholds"),
        (dict(alpha=(3.0, 2.0, 1.0)), "one or two positive thresholds"),
        (dict(beta=0.0), "gnmr.beta=0.0 must be positive"),
        (dict(unit="block"), "gnmr.unit='block' is neither layer nor linear"),
        (dict(most=0), "gnmr.most=0 must be at least 1"),
        (dict(lock_steps=-1), "gnmr.lock_steps=-1 must be at least 0"),
        (dict(window=0), "gnmr.window=0 must be at least 1"),
        (dict(random=1.5), r"gnmr.random=1.5 must lie in \[0, 1\]"),
    ],
)
def test_thresholds_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        settings(**changes)


def test_settings_that_do_not_fit_a_run_are_refused(data):
    promoting = dict(precision="fp8_current", gnmr__alpha=(1.5,))
    with pytest.raises(ValueError, match="gnmr.most=3 is more than the model's 2 layers"):
        build(tiny(data, **promoting, gnmr__most=3))
    with pytest.raises(ValueError, match="gnmr.most=15 is more than the model's 14 linears"):
        build(tiny(data, **promoting, gnmr__most=15, gnmr__unit="linear"))
    with pytest.raises(ValueError, match="gnmr.random=0.1 needs a gnmr.alpha"):
        build(tiny(data, gnmr__random=0.1))
    with pytest.raises(ValueError, match="gnmr.precision='fp8_delayed' uses delayed scaling"):
        build(tiny(data, gnmr__alpha=(1.5,), gnmr__precision="fp8_delayed"))


def delayed(data, **changes):
    """A run with and without delayed scaling, layer by layer; and a batch of it."""
    config = tiny(
        data, precision="fp8_delayed", gnmr__alpha=(1.5,), gnmr__precision="bf16", **changes
    )
    run = build(config, jax.devices()[:1])
    batches = train_batches(corpus(*data).train, seed=0, batch_size=16)
    batch = to_devices(next(batches), run.batch_sharding)
    batches.close()
    return run, batch


@functools.cache
def seeded(data):
    """The state after a first step, which has seeded all histories."""
    run, batch = delayed(data, unroll=1)
    with jax.set_mesh(run.mesh):
        programs = run.stages[0].programs
        begin = programs.initialize()
        return programs.seed_step(begin, batch, programs.numbers(begin))[0]


@pytest.mark.parametrize(
    "changes",
    [
        dict(unroll=1),
        # The same branches, written out or computed again in the backward pass.
        pytest.param(dict(unroll=2), marks=pytest.mark.full),
        pytest.param(dict(remat="full"), marks=pytest.mark.full),
    ],
)
def test_promotions_change_without_a_compilation(data, changes):
    """Layer 1 promoted, then not, then all: another loss each time, one program, and histories
    that were written all the time."""
    begin = seeded(data)
    run, batch = delayed(data, **changes)
    programs = run.stages[0].programs
    losses, amaxes = [], []
    with jax.set_mesh(run.mesh):
        for flags in ([False, False], [False, True], [True, True]):
            promoter = begin.promoter | {"promoted": jnp.asarray(flags)}
            state = jax.tree.map(jnp.copy, dataclasses.replace(begin, promoter=promoter))
            state, out = programs.step(state, batch, programs.numbers(state))
            assert out["promoted"].tolist() == flags
            losses.append(float(out["loss"]))
            amaxes.append(jax.tree.map(np.array, state.histories))
    assert programs.step._cache_size() == 1  # type: ignore[attr-defined]
    assert len(set(losses)) == 3 and np.ptp(losses) < 0.02 * losses[0]
    for leaf in jax.tree.leaves(amaxes):
        assert (leaf[:, 0] > 0).all()
    for low, high in zip(*map(jax.tree.leaves, (amaxes[0], amaxes[2])), strict=True):
        np.testing.assert_allclose(low[:, 0], high[:, 0], rtol=0.3)  # of nearly the same arrays


def test_a_linear_is_promoted_alone():
    """Promoted by linears, a layer is what it is as a whole. One linear in all layers is what a
    policy makes of it, up to how XLA rounds around a branch."""
    sizes: dict[str, Any] = dict(d_model=32, d_ff=64, n_heads=2, n_kv_heads=2, head_dim=16)
    config = dataclasses.replace(MODELS["llama_tiny"], n_layers=2, **sizes)
    model = Transformer(config, "fp4_naive")
    one, positions = jnp.ones((1, 32), jnp.int32), jnp.arange(32)[None]
    inputs = jnp.asarray(np.random.default_rng(0).integers(0, 256, (1, 32))), one, positions
    variables = nn.meta.unbox(jax.jit(model.init)(jax.random.key(0), *inputs))
    linears = tuple(path for path in config.modules if path.startswith("layers/"))
    place = linears.index("layers/mlp/down")

    @jax.jit
    def logits(promotion):
        return model.apply(variables, *inputs, None, promotion)

    def of_linears(flags):
        return logits(Promotion(as_policy("bf16"), jnp.asarray(flags), linears))

    flags = np.zeros((2, len(linears)), bool)
    nothing = of_linears(flags)
    one = of_linears(flags | np.array([[False], [True]]))
    whole = logits(Promotion(as_policy("bf16"), jnp.asarray([False, True])))
    np.testing.assert_array_equal(one, whole)
    flags[:, place] = True
    down = of_linears(flags)
    rules = (("layers/mlp/down", as_policy("bf16").recipe("layers/mlp/down")),)
    policy = Policy((*rules, *model.resolved_policy.rules))
    expected = Transformer(config, policy).apply(variables, *inputs)
    changed = jnp.abs(nothing - expected).max()
    assert changed > 1e-3 and jnp.abs(down - expected).max() < changed / 100
    flags[0, place] = False
    promotion = Promotion(as_policy("bf16"), flags, linears)
    for path, ran in (("up", [True, True]), ("down", [True, False])):
        recipes = _recipes(model.resolved_policy, f"layers/mlp/{path}", 2, promotion)
        assert [bool(recipe.casts) for recipe in recipes] == ran


@pytest.mark.parametrize("unit", ["layer", pytest.param("linear", marks=pytest.mark.full)])
def test_a_run_writes_how_many_are_promoted_and_when_others_are(unit, data, tmp_path):
    """Thresholds that noise exceeds; two at a time."""
    config = tiny(data, precision="fp4_naive", gnmr__alpha=(0.9,), gnmr__most=2, num_steps=12)
    config.gnmr.unit = unit
    train_and_evaluate(config, str(tmp_path))
    counts = [line["promoted"] for line in read_jsonl(tmp_path / "metrics.jsonl")]
    events = [e for e in read_jsonl(tmp_path / "events.jsonl") if e["kind"] == "promotion"]
    assert events and 0 in counts and {*counts} <= {0, 1, 2}
    names: list[int] | list[str] = []
    for step, count in enumerate(counts, start=1):
        names = next((e[f"{unit}s"] for e in events if e["step"] == step), names)
        assert len(names) == count
    assert all(a[f"{unit}s"] != b[f"{unit}s"] for a, b in itertools.pairwise(events))
    if unit == "linear":
        some = {name for event in events for name in event["linears"]}
        linear = re.compile("[01]/(attention/[qkvo]|mlp/(gate|up|down))")
        assert some and all(linear.fullmatch(name) for name in some)
