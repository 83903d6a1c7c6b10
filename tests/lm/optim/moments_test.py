"""Stored moments: errors within bounds of their formats, bytes, boxes, shards, and no drift."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fp8jax.lm.mesh import MeshAxes, make_mesh, tree_shardings
from fp8jax.lm.optim.moment_formats import MOMENTS, GroupedMoment
from fp8jax.lm.optim.moments import stored

FP8 = ("fp8", "fp8_coat", "fp8_unscaled")
KEY = jax.random.key(0)


def moments(shape=(48, 256), seed=0, spread=2.0) -> np.ndarray:
    """Signed numbers whose magnitudes are lognormal: e^spread is a standard deviation."""
    rng = np.random.default_rng(seed)
    size = np.exp(spread * rng.normal(size=shape)) * 1e-4
    return (size * rng.choice([-1.0, 1.0], shape)).astype(np.float32)


# Compiled whole: operation by operation, each one is compiled for each shape.
@functools.partial(jax.jit, static_argnames=("name", "group"))
def encode(name: str, x, group=128, key=KEY):
    return MOMENTS[name].encode(x, group, key)


@functools.partial(jax.jit, static_argnames="name")
def decode(name: str, coded):
    return MOMENTS[name].decode(coded)


def adam(name: str, seed=0) -> optax.GradientTransformation:
    inner = optax.scale_by_adam(0.9, 0.95)
    return stored(inner, MOMENTS[name], moments=dict(mu=False, nu=True), seed=seed)


# One array ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MOMENTS)
def test_nothing_becomes_something_and_zeros_stay(name):
    x = moments()
    x[:, ::3] = 0.0
    x[5] = 0.0  # a row of groups without any number
    again = np.asarray(decode(name, encode(name, x)))
    assert again.dtype == np.float32 and np.isfinite(again).all()
    assert (again[x == 0] == 0).all()
    assert (np.sign(again) * np.sign(x) >= 0).all()


def test_bf16_and_float32_round_once():
    x = jnp.asarray(moments())
    assert (MOMENTS["float32"].encode(x, 128, KEY) == x).all()
    assert (MOMENTS["bf16"].encode(x, 128, KEY) == x.astype(jnp.bfloat16)).all()


def test_scaled_codes_are_neighbors_and_right_on_average():
    """Stochastic rounding to one of the two codes around x / s: within a spacing of it, an eighth
    of x or 2^-9 of the scale; and over n keys the mean is off by five standard errors at most, one
    of which is half a spacing over sqrt(n)."""
    x = moments(shape=(4, 256))
    keys = jax.random.split(KEY, 400)
    (scale,) = encode("fp8", x).shared
    again = jax.jit(jax.vmap(lambda key: decode("fp8", encode("fp8", x, key=key))))(keys)
    scale = np.repeat(np.asarray(scale, np.float32), 128, axis=-1)
    spacing = np.maximum(np.abs(x) / 8, scale * 2.0**-9)
    again = np.asarray(again, np.float64)
    assert (np.abs(again - x) <= spacing).all()
    error = np.abs(np.mean(again, axis=0) - x)
    assert (error <= 5 * spacing / 2 / np.sqrt(len(keys))).all()


@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.1, 1.0, 2.0])
def test_expanded_codes_are_close(spread):
    """y is off by half of E4M3's spacing, at most 1/16 of y where y / s is normal, plus two
    roundings of bfloat16 of the scales, which cancel but where the largest saturates (2^-8). |x| =
    y^(1/k) s0 is off by 1/k of that. A range of less than 448^2 / 2 makes k at least 1; the
    smallest code in use is then 448 / (448^2 / 2) = 1/224, above 2^-8: a subnormal of E4M3 off by
    up to 2^-10, 0.22 of it."""
    x = moments(spread=spread)
    x = np.clip(np.abs(x), x.max() / 5e4, None) * np.sign(x)
    coded = encode("fp8_coat", x)
    power = np.asarray(coded.shared[1], np.float64)
    assert (power >= 1).all() and (power <= 16).all()
    again = np.asarray(decode("fp8_coat", coded))
    k = np.repeat(power, 128, axis=-1)
    assert (np.abs(again / x - 1) <= (1.25 ** (1 / k) - 1) + 2.0**-8).all()
    normal = np.abs(np.asarray(coded.values, np.float32)) >= 2.0**-6
    assert (np.abs(again / x - 1)[normal] <= ((1 + 1 / 15 + 2.0**-7) ** (1 / k) - 1)[normal]).all()


def test_a_constant_group_has_a_bounded_power():
    x = np.full((2, 128), 3e-5, np.float32)
    coded = encode("fp8_coat", x)
    assert (np.asarray(coded.shared[1]) == 16).all()
    np.testing.assert_allclose(decode("fp8_coat", coded), x, rtol=2.0**-8)


def test_unscaled_codes_underflow():
    """What StoSignSGD's paper saw: half of E4M3's smallest number is 2^-10."""
    x = jnp.asarray([2.0**-11, -(2.0**-11), 2.0**-9, 500.0])
    again = decode("fp8_unscaled", encode("fp8_unscaled", x, 4))
    assert again.tolist() == [0.0, 0.0, 2.0**-9, 448.0]


def test_a_second_moment_decays():
    """Without a gradient v of b2 = 0.95 shrinks by 5% a step: less than half of E4M3's spacing
    where codes lie 12% apart, so that rounding to nearest would keep it for ever. 60 steps: 0.046.
    The variance of a step is at most (spacing / 2)^2, a spacing being an eighth at most; of the
    mean over 4096 elements after 60 steps of a martingale, 60 (1/16)^2 / 4096 relative to v."""
    optimizer, params = adam("fp8"), {"kernel": jnp.zeros((32, 128))}
    state = jax.jit(optimizer.init)(params)
    update = jax.jit(optimizer.update)
    _, state = update({"kernel": jnp.ones((32, 128))}, state)
    mean = lambda state: np.mean(decode("fp8", state.inner.nu["kernel"]), dtype=float)  # noqa: E731
    before = mean(state)
    for _ in range(60):
        _, state = update(params, state)
    ratio = mean(state) / before
    assert abs(ratio / 0.95**60 - 1) <= 5 * np.sqrt(60 / 4096) / 16


def test_a_second_moment_is_zero_only_without_a_gradient():
    """Gradients of 2^0 to 2^-39 in one group, and zeros; E4M3 spans 2^-17.8 to 1. The update
    divides by no root smaller than that of the smallest code; the first moment underflows."""
    grads = {"kernel": np.exp2(-np.arange(64, dtype=np.float32))[None]}
    grads["kernel"][:, 40:] = 0.0
    optimizer = adam("fp8")
    update = jax.jit(optimizer.update)
    _, state = update(grads, jax.jit(optimizer.init)(grads))
    kept = state.inner.mu, state.inner.nu
    m, v = (np.asarray(decode("fp8", tree["kernel"]))[0] for tree in kept)
    assert m[0] > 0 and not m[30:].any()
    exact = 0.05 * np.square(grads["kernel"][0])
    assert (v[:40] > 0).all() and not v[40:].any()
    assert (v[10:40] == v[39]).all() and v[0] / v[39] <= 448 * 2**9
    np.testing.assert_allclose(v[:6], exact[:6], rtol=1 / 8)  # normal numbers: 2^-14.8 and above
    updates, _ = update(grads, state)
    assert np.abs(np.asarray(updates["kernel"])).max() <= 2.0


def test_each_step_rounds_with_draws_of_its_own():
    """A moment that is the gradient itself, equal in both steps."""
    grads = {"kernel": jnp.abs(moments((8, 128)))}
    optimizer = stored(optax.trace(0.0), MOMENTS["fp8"], moments=dict(trace=True), seed=0)
    update = jax.jit(optimizer.update)
    _, first = update(grads, jax.jit(optimizer.init)(grads))
    _, second = update(grads, first)
    one, other = (decode("fp8", state.inner.trace["kernel"]) for state in (first, second))
    assert 0.1 < np.mean(one != other) < 0.9


# A transformation ---------------------------------------------------------------------------------


def test_float32_is_optax_itself():
    inner = optax.scale_by_adam()
    assert stored(inner, MOMENTS["float32"], moments=dict(mu=False, nu=True), seed=0) is inner


@pytest.mark.parametrize("name", ["bf16", *FP8])
def test_an_update_is_optax_on_the_decoded_moments(name):
    """Two steps: the second reads what the first kept. No operation is fused with another: where
    it is, a sum and a product are rounded once in one program and twice in the other."""
    optimizer, plain = adam(name), optax.scale_by_adam(0.9, 0.95)
    options = {"xla_disable_hlo_passes": "fusion"}
    update, plain_update = (
        jax.jit(each.update, compiler_options=options) for each in (optimizer, plain)
    )
    params = {"a": np.zeros((3, 256), np.float32), "b": np.zeros(64, np.float32)}
    grads = [{k: moments(p.shape, seed) for k, p in params.items()} for seed in (1, 2)]
    first, state = update(grads[0], jax.jit(optimizer.init)(params))
    expected, _ = plain_update(grads[0], jax.jit(plain.init)(params))
    jax.tree.map(np.testing.assert_array_equal, first, expected)
    got, after = update(grads[1], state)
    decoded = {}
    for field in ("mu", "nu"):
        kept = getattr(state.inner, field)
        decoded[field] = {k: decode(name, kept[k]) for k in params}
    expected, _ = plain_update(grads[1], state.inner._replace(**decoded))
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert int(after.step) == 2 and int(after.inner.count) == 2


@pytest.mark.parametrize(("name", "most"), [("bf16", 2.0), ("fp8", 1.05), ("fp8_coat", 1.10)])
def test_bytes_an_element(name, most):
    """Of a Llama's kernels, axes named as the model names them."""
    shapes = {
        ("layers", "embed", "mlp"): (2, 512, 1408),
        ("layers", "mlp", "embed"): (2, 1408, 512),
        ("layers", "embed", "heads", None): (2, 512, 8, 64),
        ("vocab", "embed"): (1024, 512),
        ("layers", "norm"): (2, 512),
    }
    params = {
        str(names): nn.Partitioned(jnp.zeros(shape), names) for names, shape in shapes.items()
    }
    state = nn.meta.unbox(jax.eval_shape(adam(name).init, params))
    elements = sum(int(np.prod(shape)) for shape in shapes.values())
    for moment in (state.inner.mu, state.inner.nu):
        leaves = jax.tree.leaves(moment)
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        assert size <= most * elements
        if name.startswith("fp8"):
            assert any(leaf.dtype == jnp.float8_e4m3fn for leaf in leaves)
            one_byte = sum(leaf.size for leaf in leaves if leaf.dtype == jnp.float8_e4m3fn)
            assert one_byte == elements


@pytest.mark.parametrize("name", FP8)
def test_eight_devices_keep_the_same_moments(name):
    """Codes and scales are cut as the parameter is, so that no group lies on two devices, and are
    equal to one device's."""
    mesh = make_mesh(MeshAxes(fsdp=2, tensor=4), jax.devices())
    names = {"up": ("embed", "mlp"), "q": ("embed", "heads", None)}
    values = {"up": moments((64, 512)), "q": moments((64, 8, 32))}
    optimizer = adam(name)
    boxed = {k: nn.Partitioned(np.zeros_like(v), names[k]) for k, v in values.items()}
    initial = lambda: optimizer.init(boxed)  # noqa: E731
    shardings = tree_shardings(jax.eval_shape(initial), mesh)
    unboxed = lambda: nn.meta.unbox(initial())  # noqa: E731
    state = jax.jit(unboxed, out_shardings=shardings)()
    for moment in (state.inner.mu, state.inner.nu):
        for key, spec in (("up", ("fsdp", "tensor")), ("q", ("fsdp", "tensor", None))):
            for leaf in jax.tree.leaves(moment[key]):
                assert leaf.sharding == NamedSharding(mesh, PartitionSpec(*spec))
    grads = {
        k: jax.device_put(v, NamedSharding(mesh, PartitionSpec("fsdp", "tensor")))
        for k, v in values.items()
    }
    _, cut = jax.jit(optimizer.update)(grads, state)
    _, whole = jax.jit(optimizer.update)(values, jax.jit(unboxed)())
    for one, other in zip(*map(jax.tree.leaves, (cut, whole)), strict=True):
        assert one.dtype == other.dtype and np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_groups_do_not_depend_on_the_mesh_but_on_the_names():
    x = jnp.zeros((4, 256))
    kept = {
        key: jax.eval_shape(adam("fp8").init, {"x": leaf}).inner.mu["x"]
        for key, leaf in {
            "plain": x,
            "whole": nn.Partitioned(x, ("embed", "norm")),
            "cut": nn.Partitioned(x, ("embed", "mlp")),
        }.items()
    }
    sizes = {key: nn.meta.unbox(q).shared[0].shape for key, q in kept.items()}
    assert sizes == {"plain": (4, 2), "whole": (4, 2), "cut": (4, 8)}
    assert all(isinstance(q, GroupedMoment) for q in kept.values())
