"""Muon against NumPy: which parameters it takes, its step, its momentum in 8 bits, and meshes."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from fp8jax.lm.mesh import MeshAxes, make_mesh, tree_shardings
from fp8jax.lm.optim.moment_formats import MOMENTS
from fp8jax.lm.optim.muon import labels
from fp8jax.lm.optim.optimizers import make_optimizer, schedule_steps
from tests.support.optimizers import configured, nested

# The leaves of a model: two layers of kernels, in, out and their norms, and what is no layer's.
SHAPES = {
    "embedding": ((40, 32), ("vocab", "embed")),
    "layers/attention/o/kernel": ((2, 64, 128), ("layers", "heads", "embed")),
    "layers/mlp/up/kernel": ((2, 32, 512), ("layers", "embed", "mlp")),
    "layers/mlp/up/bias": ((2, 512), ("layers", "mlp")),
    "layers/mlp_norm/scale": ((2, 32), ("layers", "norm")),
    "lm_head/kernel": ((32, 40), ("embed", "vocab")),
}
MUON = ("layers/attention/o/kernel", "layers/mlp/up/kernel")


def leaves(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {path: rng.normal(size=s).astype(np.float32) for path, (s, _) in SHAPES.items()}


def flat(tree) -> dict[str, np.ndarray]:
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {"/".join(key.key for key in path): np.asarray(leaf) for path, leaf in found}


@functools.cache
def compiled(moments: str):
    c = configured(name="muon", schedule="constant", warmup_steps=0, moments=moments, clip_norm=1e9)
    optimizer, _ = make_optimizer(c)
    return c, optimizer, jax.jit(optimizer.init), jax.jit(optimizer.update)


def three_steps(moments: str, place=lambda tree: tree, state=None):
    """Parameters and states after each of three steps."""
    c, _, init, update = compiled(moments)
    params, found = place(nested(leaves(0))), []
    state = init(params) if state is None else state
    for seed in (1, 2, 3):
        numbers = dict(learning_rate=c.learning_rate, clip_norm=c.clip_norm)
        updates, state = update(place(nested(leaves(seed))), state, params, **numbers)
        params = optax.apply_updates(params, updates)
        found.append((params, state))
    return found


# By hand ------------------------------------------------------------------------------------------


def newton_schulz(x: np.ndarray) -> np.ndarray:
    """Jordan's five iterations in float64, of one matrix."""
    x = x / (np.linalg.norm(x) + 1e-8)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x


def orthogonal(x: np.ndarray) -> np.ndarray:
    """The iterations for each matrix of a stack, the shorter side first."""
    tall = x.shape[1] > x.shape[2]
    return np.stack([newton_schulz(m.T).T if tall else newton_schulz(m) for m in x])


def to_8_bits(x: np.ndarray, group: int) -> np.ndarray:
    """Codes times scales, one scale for each `group` elements of the last axis."""
    x = x.astype(np.float32)
    groups = x.reshape(*x.shape[:-1], -1, group)
    scale = np.abs(groups).max(-1, keepdims=True) / np.float32(127)
    return (np.rint(groups / scale) * scale).reshape(x.shape)


def by_hand(path: str, c, group: int | None) -> np.ndarray:
    """Three steps of one kernel: W <- W - lr (0.2 sqrt(max(in, out)) NS(n) + decay W)."""
    w, m, b = leaves(0)[path].astype(np.float64), 0.0, 0.95
    for t, seed in enumerate((1, 2, 3), start=1):
        g = leaves(seed)[path].astype(np.float64)
        m = b * m + (1 - b) * g
        ahead = b * m / (1 - b ** (t + 1)) + (1 - b) * g / (1 - b**t)
        update = 0.2 * np.sqrt(max(w.shape[1:])) * orthogonal(ahead)
        w = w - c.learning_rate * (update + c.weight_decay * w)
        if group is not None:
            m = to_8_bits(m, group).astype(np.float64)
    return w


@pytest.mark.parametrize("moments", ["float32", "int8"])
def test_three_steps_are_numpys(moments):
    """NS multiplies a small singular value by up to 3.45 in each of five iterations, and its
    relative error with it: 490 times some ten roundings of sums of 64 terms. In 8 bits, a code may
    differ by one where the float32 momentum lies between two."""
    found = flat(three_steps(moments)[-1][0])
    c = compiled(moments)[0]
    for path in MUON:
        group = None if moments == "float32" else SHAPES[path][0][-1]
        expected = by_hand(path, c, group)
        moved = np.abs(expected - leaves(0)[path]).max()
        bound = 490 * 10 * 8 * 2.0**-24 if group is None else 1 / 127
        assert np.abs(found[path] - expected).max() <= bound * moved
    # All else is AdamW's.
    adamw, _ = make_optimizer(dataclasses.replace(c, name="adamw", moments="float32"))
    params = nested(leaves(0))
    state, update = adamw.init(params), jax.jit(adamw.update)
    for seed in (1, 2, 3):
        numbers = dict(learning_rate=c.learning_rate, clip_norm=c.clip_norm)
        updates, state = update(nested(leaves(seed)), state, params, **numbers)
        params = optax.apply_updates(params, updates)
    for path, value in flat(params).items():
        if path not in MUON:
            np.testing.assert_array_equal(found[path], value, path)
        else:
            assert np.abs(found[path] - value).max() > 1e-3


def test_a_step_is_that_of_optax_with_these_dimension_numbers():
    """`optax.contrib.muon` itself, told by dimension numbers what is a matrix."""
    c, params = compiled("float32")[0], nested(leaves(0))
    numbers = optax.contrib.MuonDimensionNumbers(-2, -1)
    spec = jax.tree.map(lambda label: numbers if label == "muon" else None, labels(params))
    whole = optax.contrib.muon(
        c.learning_rate,
        beta=0.95,
        weight_decay=c.weight_decay,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=spec,
    )
    updates, _ = jax.jit(whole.update)(nested(leaves(1)), jax.jit(whole.init)(params), params)
    theirs = flat(optax.apply_updates(params, updates))
    ours = flat(three_steps("float32")[0][0])
    for path in MUON:
        np.testing.assert_allclose(ours[path], theirs[path], rtol=2e-6, atol=2e-7)


def test_only_the_kernels_of_layers_are_muons():
    boxed = {
        path: nn.Partitioned(jnp.zeros(shape), names) for path, (shape, names) in SHAPES.items()
    }
    for tree in (nested(leaves(0)), nested(boxed)):
        found = labels(tree)
        assert {path for path in SHAPES if get(found, path) == "muon"} == set(MUON)


def get(tree, path: str):
    for key in path.split("/"):
        tree = tree[key]
    return tree


# Storage and meshes -------------------------------------------------------------------------------


def momentum(state):
    """The stored momentum of both kernels, by path."""
    (stored,) = [
        leaf
        for leaf in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, optax.contrib.MuonState))
        if isinstance(leaf, optax.contrib.MuonState)
    ]
    return {path: get(stored.mu, path) for path in MUON}


def test_momentum_takes_a_byte_an_element_and_adams_moments_stay_float32():
    """At most 1.07 bytes an element, of a Llama's kernels with axes that a mesh may shard."""
    optimizer = compiled("int8")[1]
    shapes = {
        "layers/mlp/up/kernel": ((2, 512, 1408), ("layers", "embed", "mlp")),
        "layers/attention/o/kernel": ((2, 512, 512), ("layers", "heads", "embed")),
        "embedding": ((1024, 512), ("vocab", "embed")),
    }
    params = {k: nn.Partitioned(jnp.zeros(s), names) for k, (s, names) in shapes.items()}
    state = nn.meta.unbox(jax.eval_shape(optimizer.init, nested(params)))
    for path, kept in momentum(state).items():
        elements = np.prod(shapes[path][0])
        assert kept.values.dtype == jnp.int8 and kept.values.size == elements
        assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept)) <= 1.07 * elements
    adam = [x for x in jax.tree.leaves(state) if x.shape == (1024, 512)]
    assert [x.dtype for x in adam] == [jnp.float32] * 2
    # An axis that no mesh shards has groups of 2,048.
    whole = nn.Partitioned(jnp.zeros((2, 8, 4096)), ("layers", "embed", "residual"))
    state = jax.eval_shape(optimizer.init, nested({"layers/mlp/up/kernel": whole}))
    scales = [x for x in jax.tree.leaves(nn.meta.unbox(state)) if x.shape == (2, 8, 2)]
    assert len(scales) == 1


@pytest.mark.parametrize("moments", [pytest.param("float32", marks=pytest.mark.full), "int8"])
def test_eight_devices_take_the_steps_of_one(moments):
    """Momentum is cut as its kernel is. The products of NS add in another order there: the bound
    is that of the steps by hand."""
    mesh = make_mesh(MeshAxes(fsdp=2, tensor=4), jax.devices())
    boxed = nested(
        {path: nn.Partitioned(np.zeros(s), names) for path, (s, names) in SHAPES.items()}
    )
    optimizer = compiled(moments)[1]
    specs = tree_shardings(boxed, mesh)
    shardings = tree_shardings(jax.eval_shape(optimizer.init, boxed), mesh)
    initial = lambda: nn.meta.unbox(optimizer.init(boxed))  # noqa: E731
    *_, (whole, _) = three_steps(moments, state=jax.jit(initial)())
    *_, (cut, state) = three_steps(
        moments,
        lambda tree: jax.device_put(tree, specs),
        jax.jit(initial, out_shardings=shardings)(),
    )
    for path, value in flat(whole).items():
        moved = np.abs(value - leaves(0)[path]).max()
        bound = 490 * 10 * 8 * 2.0**-24 if moments == "float32" else 1 / 127
        assert np.abs(flat(cut)[path] - value).max() <= bound * moved, path
    for path, kept in momentum(shardings).items():
        for leaf in jax.tree.leaves(kept):
            assert leaf == NamedSharding(mesh, get(specs, path).spec), path
    for path, kept in momentum(state).items():
        for leaf in jax.tree.leaves(kept):
            assert leaf.sharding.is_equivalent_to(get(specs, path), leaf.ndim), path
    assert int(schedule_steps(state)) == 3


@pytest.mark.parametrize("moments", ["int8", "fp8_unscaled"])
@pytest.mark.parametrize("name", ["adamw", "sign_adamw"])
def test_8_bits_hold_no_second_moments(name, moments):
    with pytest.raises(ValueError, match=f"{moments} holds no second moments, .* {name} has some"):
        make_optimizer(configured(name=name, moments=moments))
    assert not MOMENTS[moments].second_moments


def test_bf16_holds_second_moments_that_decay():
    """A change below half of a step of bfloat16, 2^-8 at most, is rounded away."""
    for moments in ("bf16", "fp8_coat"):  # whose codes are E4M3, rounded to nearest
        with pytest.raises(ValueError, match="b2=0.999: some second moments would hardly decay"):
            make_optimizer(configured(name="adamw", moments=moments, b2=0.999))
    make_optimizer(configured(name="adamw", moments="fp8", b2=0.999))
    make_optimizer(configured(name="adamw", moments="bf16", b2=0.99))
    make_optimizer(configured(name="lion", moments="bf16", b2=0.999))
    v = jnp.bfloat16(1.0)  # where the steps below a number are the finest
    assert jnp.bfloat16(v * jnp.float32(1 - 0.9 * 2**-9)) == v > jnp.bfloat16(v * (1 - 2**-8))
