"""Statistics of casts against NumPy on the same tensors, and how those of several parts combine."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from fp8jax.gemm.dot import dot_general, dot_general_together
from fp8jax.gemm.histories.amax_history import init_state
from fp8jax.gemm.probe import (
    BEYOND,
    COUNTS,
    PEAKS,
    Probe,
    deposit,
    empty_probe,
    row_names,
    watched,
)
from fp8jax.gemm.promotable import promotable_dot
from fp8jax.gemm.weight import Weight
from fp8jax.numerics.names import as_recipe
from fp8jax.numerics.recipe import CASTS
from fp8jax.telemetry.measure import combine
from tests.support import h200, reference

P = PartitionSpec
MATMUL = (((1,), (0,)), ((), ()))
AXES = {"fwd_x": -1, "wgrad_x": -2, "fwd_w": -2, "dgrad_w": -1, "dgrad_g": -1, "wgrad_g": -2}
KEY = jax.random.key(3)


def arrays(rows=48, seed=0):
    """x [rows, 96], w [96, 64] and g [rows, 64], with zeros and a wide range of magnitudes."""
    rng = np.random.default_rng(seed)

    def one(*shape):
        x = rng.standard_normal(shape) * np.exp(3 * rng.standard_normal(shape))
        return np.where(rng.random(shape) < 0.1, 0, x).astype(np.float32)

    return one(rows, 96), one(96, 64), one(rows, 64)


def numbers(probe: Probe, i: int) -> dict:
    """The row as a dict; counts as ints."""
    sums = np.asarray(probe.sums)[i]
    counts = [int(high) * 4096 + int(low) for high, low in sums[:8].reshape(4, 2)]
    peaks = dict(zip(PEAKS, np.asarray(probe.peaks, np.float32)[i], strict=True))
    energies = {"signal": sums[8], "noise": sums[9]}
    return peaks | dict(zip(COUNTS, counts, strict=True)) | energies


def expected(x, cast, name, amax=None, key=None) -> dict:
    """What NumPy finds of one cast, in float32 where the cast computes in float32."""
    found = {"amax": np.abs(x).max(), "elements": x.size, "nonzero": np.count_nonzero(x)}
    if cast is None:
        return found | {"underflow": 0, "saturated": 0, "noise": 0.0}
    x = reference.rotated(x, cast, AXES[name])
    draws = None if key is None else reference.uniform(key, name, x.shape)
    values, spread, scales = reference.quantize(
        x, cast.format.name, cast.tile, AXES[name], cast.rule, amax, draws=draws
    )
    codes, wide = values.astype(np.float64), x.astype(np.float64)
    scaled = np.abs(x * (np.float32(1) / spread))
    signal, noise = np.sum(wide**2), np.sum((wide - codes * spread.astype(np.float64)) ** 2)
    return found | {
        "elements": x.size,
        "nonzero": np.count_nonzero(x),
        "scale": spread[x != 0].max(),
        "underflow": np.count_nonzero((x != 0) & (codes == 0)),
        "signal": signal,
        "noise": noise,
        "saturated": np.count_nonzero(scaled > np.float32(cast.format.max * BEYOND)),
    }


def check(probe, i, x, cast, name, amax=None, key=None):
    """Everything but the energies is exact; the SQNR in dB is right to 1e-5."""
    ours, theirs = numbers(probe, i), expected(x, cast, name, amax, key)
    signal, noise = theirs.pop("signal", None), theirs.pop("noise")
    assert {k: ours[k] for k in theirs} == theirs, name
    if noise:
        sqnr = 10 * np.log10(float(ours["signal"]) / float(ours["noise"]))
        np.testing.assert_allclose(sqnr, 10 * np.log10(signal / noise), rtol=1e-5)
    else:
        assert ours["noise"] == 0


def measured(x, w, g, recipe, what_if=None, state=None):
    """The statistics of one GEMM whose result has the gradient g."""
    recipe, what_if = as_recipe(recipe), what_if and as_recipe(what_if)
    state = init_state(recipe) if state is None else state
    return _measured(x, w, g, state, recipe=recipe, what_if=what_if)


@functools.partial(jax.jit, static_argnames=("recipe", "what_if"))
def _measured(x, w, g, state, *, recipe, what_if):
    def loss(probe):
        y = dot_general(x, w, MATMUL, recipe=recipe, key=KEY, probe=probe, seeded=True, state=state)
        return jnp.sum(y * g)

    return jax.grad(loss)(empty_probe(what_if))


@pytest.mark.parametrize(
    "recipe, what_if",
    [("fp8_current", None), ("fp8_block", "fp8_rowwise"), ("nvfp4", None), ("bf16", "fp4_naive")],
)
def test_statistics_equal_numpy(recipe, what_if):
    x, w, g = arrays()
    probe = measured(x, w, g, recipe, what_if)
    of_names, named = dict(x=x, w=w, g=g), as_recipe(recipe).by_name()
    for i, name in enumerate(CASTS):
        key = KEY if named[name] is not None and named[name].rounding == "stochastic" else None
        check(probe, i, of_names[name[-1]], named[name], name, key=key)
    for i, name in enumerate(row_names(what_if and as_recipe(what_if))[6:], start=6):
        name = name.removeprefix("what_if.")
        check(probe, i, of_names[name[-1]], as_recipe(what_if).by_name()[name], name)


def test_a_tile_of_zeros_says_nothing_of_scales():
    """Its own scale is 1, more than those of the others."""
    x, w, g = arrays()
    x = x * np.float32(1e-4)
    x[0] = 0
    probe = measured(x, w, g, "fp8_block")
    assert 0 < numbers(probe, 0)["scale"] < 1
    check(probe, 0, x, as_recipe("fp8_block").fwd_x, "fwd_x")


def test_what_if_rounds_with_draws_of_its_own():
    """Else its statistics would be those of the run's own codes, where both round alike."""
    probe, casts = measured(*arrays(), "nvfp4", "nvfp4"), as_recipe("nvfp4").by_name()
    assert row_names(as_recipe("nvfp4"))[6:] == tuple(f"what_if.{name}" for name in CASTS)
    for i, name in enumerate(CASTS):
        alike = numbers(probe, i)["noise"] == numbers(probe, i + 6)["noise"]
        assert alike == (casts[name].rounding != "stochastic"), name
    assert {cast.rounding for cast in casts.values()} == {"nearest", "stochastic"}


def test_delayed_scales_saturate_and_are_compared_with_the_current_one():
    x, w, g = arrays()
    amaxes = {"x": np.float32(np.abs(x).max() / 8), "w": np.float32(np.abs(w).max() * 8)}
    amaxes["g"] = np.float32(np.abs(g).max())
    recipe = as_recipe("fp8_delayed:history=2")
    state = {k: jnp.array([amax, 0], jnp.float32) for k, amax in amaxes.items()}
    probe = measured(x, w, g, recipe, state=state)
    for i, name in enumerate(CASTS):
        cast, array = recipe.by_name()[name], dict(x=x, w=w, g=g)[name[-1]]
        check(probe, i, array, cast, name, amaxes[name[-1]])
        row = numbers(probe, i)
        ratio = {"x": 1 / 8, "w": 8, "g": 1}[name[-1]]  # powers of two, so exact
        assert row["scale"] / row["current_scale"] == ratio
    assert numbers(probe, 0)["saturated"] > 0 and numbers(probe, 1)["underflow"] > 0


def test_no_probe_leaves_no_trace():
    x, w, g = map(jnp.asarray, arrays())

    def program(**probe):
        def loss(x, w):
            return jnp.sum(dot_general(x, w, MATMUL, recipe="fp8_block", **probe) * g)

        return jax.jit(jax.grad(loss, (0, 1))).lower(x, w).as_text()

    assert program() == program(probe=None)


@h200.needs_plugin
def test_a_gpu_reads_each_array_once_for_its_statistics():
    """Besides the kernels that cast it. Nothing of an array's size is written but codes, which are
    read in the layout of their array."""
    sizes = (512, 1024), (1024, 768), (512, 768)
    x, w, g = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in sizes)
    recipe = as_recipe("fp8_delayed")

    def statistics(x, w, g):
        def loss(probe):
            y = dot_general(
                x, w, MATMUL, recipe=recipe, state=init_state(recipe), seeded=True, probe=probe
            )
            return jnp.vdot(y, g)

        return jax.grad(loss)(empty_probe())

    text = h200.compiled(statistics, x, w, g).as_text()
    main = text[text.index("\nENTRY") :].splitlines()
    fusions = [line for line in main if " fusion(" in line]
    assert fusions
    for name, shape in zip("xwg", sizes, strict=True):
        readers = [line for line in fusions if re.search(rf"[( ]%{name}\b", line)]
        assert len(readers) == 1, readers
        for dims in (shape, shape[::-1]):
            assert not re.search(r"\[{},{}\].* fusion\(".format(*dims), "\n".join(fusions))


# Several parts ------------------------------------------------------------------------------------


def counts_of(probe: Probe) -> np.ndarray:
    pairs = np.asarray(probe.sums)[..., :8].reshape(*probe.sums.shape[:-1], 4, 2)
    return pairs @ [4096, 1]


def same(ours: Probe, theirs: Probe):
    """Equal but for the order of float sums."""
    np.testing.assert_array_equal(ours.peaks, theirs.peaks)
    np.testing.assert_array_equal(*(counts_of(probe) for probe in (ours, theirs)))
    np.testing.assert_allclose(ours.sums[..., 8:], theirs.sums[..., 8:], rtol=1e-5)


@functools.cache
def parts():
    """Two parts of a batch: their arrays, and the statistics of each."""
    halves = [arrays(seed=seed) for seed in (0, 1)]
    w = halves[0][1]
    return halves, [measured(x, w, g, "fp8_current", "fp8_block") for x, _, g in halves]


def weighted_product(probe, x, w, g):
    x, w, g = map(jnp.asarray, (x, w, g))
    return jnp.sum(dot_general(x, w, MATMUL, recipe="fp8_current", probe=probe) * g)


def test_calls_of_one_module_combine_also_in_a_loop_and_rematerialized():
    (first, second), statistics = parts()
    w = jnp.asarray(first[1])
    stacked = tuple(np.stack([first[i], second[i]]) for i in (0, 2))
    whole = combine(*statistics)
    empty = empty_probe(as_recipe("fp8_block"))

    def twice(probe):
        return sum(weighted_product(probe, x, w, g) for x, _, g in (first, second))

    def loop(probe):
        def body(total, scanned):
            return total + weighted_product(probe, scanned[0], w, scanned[1]), None

        return jax.lax.scan(body, 0.0, stacked)[0]

    for loss in (loop, jax.checkpoint(twice)):
        same(jax.jit(jax.grad(loss))(empty), whole)

    def layers(probes):  # a probe for each iteration, as in a stack of layers
        def body(total, scanned):
            x, g, probe = scanned
            return total + jax.checkpoint(weighted_product)(probe, x, w, g), None

        return jax.lax.scan(body, 0.0, (*stacked, probes))[0]

    both = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), empty)
    found = jax.jit(jax.grad(layers))(both)
    for i, one in enumerate(statistics):
        same(jax.tree.map(lambda leaf: leaf[i], found), one)  # noqa: B023


def test_weights_that_share_x_have_the_statistics_of_separate_calls():
    x, w, g = map(jnp.asarray, arrays())
    both = (w, w * 2)

    @jax.jit
    def statistics(x):
        def loss(probes):
            ys = dot_general_together(
                x,
                [Weight(w, probe=probe) for w, probe in zip(both, probes, strict=True)],
                MATMUL,
                recipe="fp8_block",
            )
            return sum(jnp.sum(y * g) for y in ys)

        return jax.grad(loss)((empty_probe(), empty_probe(as_recipe("mxfp8"))))

    found = statistics(x)
    same(found[0], measured(x, w, g, "fp8_block"))
    same(found[1], measured(x, w * 2, g, "fp8_block", "mxfp8"))


@pytest.mark.parametrize("x_spec, w_spec", [(P("data"), P()), (P("data"), P(None, "tensor"))])
def test_shard_map_counts_each_element_once(x_spec, w_spec):
    x, w, g = arrays()
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), (AxisType.Auto,) * 2)

    axes = ("data", *filter(None, w_spec))

    def body(x, w, g, probe):
        return jax.lax.psum(weighted_product(probe, x, w, g), axes)

    specs = (x_spec, w_spec, P(*axes), P())
    sharded = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P())
    with jax.set_mesh(mesh):
        found = jax.jit(jax.grad(sharded, 3))(x, w, g, empty_probe())
    same(found, measured(x, w, g, "fp8_current"))


@pytest.mark.parametrize("promoted", [False, True])
def test_a_promoted_linear_has_the_statistics_of_its_high_recipe(promoted):
    x, w, g = map(jnp.asarray, arrays())
    low, high = as_recipe("fp4_naive"), as_recipe("fp8_current")
    found = promotable_statistics(x, w, g, jnp.asarray(promoted), low=low, high=high)
    same(found, measured(x, w, g, high if promoted else low))


@functools.partial(jax.jit, static_argnames=("low", "high"))
def promotable_statistics(x, w, g, flag, *, low, high):
    def loss(probe):
        y = promotable_dot(x, Weight(w, probe=probe), flag, low=low, high=high)
        return jnp.sum(y * g)

    return jax.grad(loss)(empty_probe())


def test_deposit_and_watched_leave_values_alone():
    x, leaf = jnp.array([1.0, -3.0]), jnp.zeros(2)

    def loss(x, leaf, peak):
        return jnp.sum(2 * deposit(x, watched(x, peak), leaf, jnp.array([5.0, 7.0])))

    value, grads = jax.value_and_grad(loss, (0, 1, 2))(x, leaf, jnp.zeros(()))
    assert value == -4
    np.testing.assert_array_equal(grads[0], [0, 0])
    np.testing.assert_array_equal(grads[1], [5, 7])


def test_too_many_elements_are_refused():
    x = jax.ShapeDtypeStruct((2**16, 2**16), jnp.float32)
    w = jax.ShapeDtypeStruct((2**16, 1), jnp.float32)
    with pytest.raises(NotImplementedError, match="counts up to 2.32 elements"):
        jax.eval_shape(lambda x, w: jax.grad(weighted_product)(empty_probe(), x, w, 1.0), x, w)
