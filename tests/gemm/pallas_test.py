"""The backend `pallas`: products, gradients and histories against `emulated`, in the interpreter.

What every backend has to do is in dot_test.py, with the table of what each of them takes.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fp8jax.device import hardware
from fp8jax.gemm import dot
from fp8jax.gemm.backends import emulated, pallas
from fp8jax.gemm.backends.choice import BACKENDS, choose_backend
from fp8jax.gemm.backends.operands import CastRequest
from fp8jax.gemm.backends.refusals import can_fuse_swiglu
from fp8jax.gemm.dot import dot_general
from fp8jax.gemm.histories.amax_history import init_state
from fp8jax.gemm.probe import empty_probe
from fp8jax.numerics.recipes import RECIPES
from tests.support import reference
from tests.support.interpreter import TOO_OLD, allowed, interpret, needs_pallas
from tests.support.products import CONTRACTED, KERNELS, MATMUL, normal_operands, variant

H200 = hardware.Device("gpu", "NVIDIA H200", (9, 0))
BATCHED = (((2,), (1,)), ((0,), (0,)))
NAMES = sorted(KERNELS)
KEY = jax.random.key(4)
OTHERS = ("current", "amax", "cscale", "rowwise_wgrad_bf16", "block_ue8m0")


def operands(m: int, k: int, n: int, dtype=jnp.bfloat16) -> dict[str, jax.Array]:
    given = normal_operands(m, k, n, (3.0, 0.02, 1e-4), dtype)
    return {operand: jnp.asarray(a) for operand, a in given.items()}  # jax.tree would sort them


def histories(recipe, given: dict[str, jax.Array]):
    """The present amaxes twice, an older and smaller one before them."""
    amax = {k: float(jnp.max(jnp.abs(given[k].astype(jnp.float32)))) for k in recipe.histories}
    return {
        k: h.at[:3].set(jnp.float32([amax[k], amax[k], amax[k] / 2]))
        for k, h in init_state(recipe).items()
    }


def run(x, w, g, state, *, recipe, backend):
    """y, dx, dw and the new histories."""
    f = functools.partial(dot_general, dimension_numbers=MATMUL, recipe=recipe, backend=backend)
    y, vjp = jax.vjp(lambda x, w, s: f(x, w, state=s, key=KEY), x, w, state)
    return y, *vjp(g)


def both(recipe, given: dict[str, jax.Array]):
    """(what pallas gives, what emulated gives)."""
    args = (*given.values(), histories(recipe, given))
    got = interpret(jax.jit(functools.partial(run, recipe=recipe, backend="pallas")), *args)
    return got, jax.jit(functools.partial(run, recipe=recipe, backend="emulated"))(*args)


def magnitudes(recipe, product: str, given: dict[str, jax.Array]) -> np.ndarray:
    """|a| |b| of the product's operands as they are quantized."""
    parts = []
    for cast, (operand, axis) in zip(recipe.gemms[product], CONTRACTED[product], strict=True):
        value = np.asarray(given[operand], np.float32)
        if cast is not None:
            name = f"{product}_{operand}"
            value = reference.apply_cast(value, cast, axis, key=KEY, name=name)
        parts.append(np.abs(value))
    (a, b), ((_, of_a), (_, of_b)) = parts, CONTRACTED[product]
    return (a if of_a == -1 else a.T) @ (b if of_b == -2 else b.T)


def check(recipe, given: dict[str, jax.Array], got, expected):
    """Codes are the same, so that what differs is rounding. float32 sums of up to K products, in
    another order: K 2^-24 of the sum of magnitudes on either side; 4 more for the scales, which
    are multiplied before the sum or after it. A bfloat16 result is rounded once by `emulated`,
    and by per-tensor products, whose scale follows the codes' product, twice: 3 * 2^-8."""
    *values, new = got
    *wanted, expected_new = expected
    for product, a, b in zip(CONTRACTED, values, wanted, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        sums = magnitudes(recipe, product, given)
        terms = {"fwd": given["x"].shape[1], "dgrad": given["g"].shape[1]}
        count = terms[product] if product in terms else given["x"].shape[0]
        bound = 2 * (count + 4) * 2.0**-24 * sums
        a, exact = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if b.dtype == jnp.bfloat16:
            bound = bound + 3.01 * 2.0**-8 * np.maximum(np.abs(a), np.abs(exact))
        assert np.isfinite(a).all() and (np.abs(a - exact) <= bound).all(), product
    assert set(new) == set(expected_new) == set(recipe.histories)
    for operand, history in new.items():
        np.testing.assert_array_equal(history, expected_new[operand])


@needs_pallas
@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("fp8_delayed", (200, 136, 72), jnp.bfloat16),
        ("fp8_block", (200, 136, 72), jnp.bfloat16),
        *((name, (72, 136, 40), jnp.bfloat16) for name in NAMES if name[4:] in OTHERS),
        ("fp8_block:wgrad_g_tile=block128", (200, 136, 72), jnp.bfloat16),
        ("fp8_block", (40, 72, 24), jnp.float32),  # tiles of float32 are left to XLA
        ("fp8_rowwise", (200, 136, 72), jnp.bfloat16),
        ("fp8_rowwise", (40, 72, 24), jnp.float32),
        ("fp8_rowwise:gradients=e5m2,scale=e8m0", (72, 136, 40), jnp.bfloat16),
        ("fp8_delayed", (1, 128, 1), jnp.float32),
        ("fp8_rowwise", (1, 128, 1), jnp.bfloat16),
        ("fp8_block_ue8m0", (1, 128, 1), jnp.bfloat16),
        ("fp4_block", (200, 136, 72), jnp.bfloat16),
        ("fp4_naive", (72, 136, 40), jnp.bfloat16),
        ("fp4_weights", (72, 136, 40), jnp.bfloat16),  # the kernels pad x, XLA leaves w as it is
        ("mxfp8", (72, 136, 40), jnp.bfloat16),
        ("mxfp4", (128, 256, 128), jnp.bfloat16),
        ("nvfp4", (128, 256, 128), jnp.bfloat16),  # with the kernels of rotate.py and our GEMM
        ("nvfp4", (72, 136, 40), jnp.bfloat16),  # without
        # One operand of a product in high precision, beside wgrad's kernels
        ("nvfp4:fwd_x=bf16", (128, 256, 128), jnp.bfloat16),
        ("nvfp4:dgrad_w=bf16", (128, 256, 128), jnp.bfloat16),
        *(
            pytest.param(name, shape, jnp.bfloat16, marks=pytest.mark.full)
            for name, shape in (
                ("nvfp4_4over6", (128, 128, 128)),
                ("quartet2", (128, 128, 128)),
                ("quartet2", (72, 136, 40)),  # without the kernels
                ("tetrajet2", (128, 256, 128)),
            )
        ),
    ],
)
def test_products_gradients_and_histories_are_those_of_emulated(name, shape, dtype):
    recipe, given = variant(name), operands(*shape, dtype)
    check(recipe, given, *both(recipe, given))


@needs_pallas
def test_a_non_finite_operand_poisons_what_it_is_part_of():
    """A row of x in blocks and rows; all of it where the tensor has one scale, whose history
    stays."""
    given = operands(128, 128, 128)
    given["x"] = given["x"].at[3, 4].set(jnp.inf)
    # A scale of e8m0 is finite, and infinity is cast to the largest code.
    for name in ("fp8_block", "fp8_rowwise", "fp8_rowwise:scale=e8m0"):
        recipe = variant(name)
        y = interpret(
            lambda x, w, r=recipe: dot_general(x, w, MATMUL, recipe=r, backend="pallas"),
            given["x"],
            given["w"],
        )
        expected = np.broadcast_to(np.arange(128)[:, None] == 3, y.shape)
        np.testing.assert_array_equal(np.isnan(y), expected)
    recipe = RECIPES["fp8_delayed"]
    state = {k: jnp.full(16, 5.0) for k in "xwg"}
    f = jax.jit(functools.partial(run, recipe=recipe, backend="pallas"))
    y, dx, dw, new = interpret(f, *given.values(), state)
    assert np.isnan(y).all() and np.isnan(dw).all() and np.isfinite(dx).all()
    np.testing.assert_array_equal(new["x"], state["x"])


def layers(x, weights, g, *, recipe: str, backend: str | None, scan: bool, remat: bool = False):
    """Products in sequence, scanned or written out, and their gradients."""

    def layer(x, w):
        return dot_general(x, w, MATMUL, recipe=recipe, backend=backend)

    layer = jax.checkpoint(layer) if remat else layer

    def forward(x, weights):
        if scan:
            return lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0]
        return functools.reduce(layer, weights, x)

    y, vjp = jax.vjp(forward, x, weights)
    return y, *vjp(g)


def stack(count: int, size: int):
    """x, weights and g; a layer keeps the size of numbers."""
    rng = np.random.default_rng(0)
    x, g = (jnp.asarray(rng.normal(size=(size, size)), jnp.bfloat16) for _ in range(2))
    weights = rng.normal(size=(count, size, size)) * size**-0.5
    return x, jnp.asarray(weights, jnp.float32), g


@needs_pallas
def test_a_scan_over_layers_is_the_layers():
    """The interpreter has effects, which jax.checkpoint refuses: that one on the GPU, below."""
    args = stack(2, 128)
    one, other = (
        interpret(
            jax.jit(functools.partial(layers, recipe="fp8_block", backend="pallas", scan=scan)),
            *args,
        )
        for scan in (True, False)
    )
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


# Which backend is chosen --------------------------------------------------------------------------


@pytest.mark.parametrize("cast", ["fwd_x", "fwd_w", "dgrad_g", "dgrad_w"])
def test_a_transform_keeps_its_kernels_beside_an_operand_in_high_precision(cast):
    """XLA's own transforms compile for minutes in a whole step."""
    refuses = BACKENDS["pallas"].refuses
    assert refuses(variant(f"nvfp4:{cast}=bf16"), H200) is None
    assert "high-precision operand" in refuses(variant(f"nvfp4:only={cast}"), H200)
    assert "high-precision operand" in refuses(variant(f"fp4_naive:{cast}=bf16"), H200)


SENTENCE = "multiply two non-empty matrices and have no batch axis"


def chosen_for(monkeypatch, backend, numbers, x, w, recipe="fp8_current") -> str:
    """The backend of a product, traced as if on an H200."""
    names = []

    def spy(*args, **kwargs):
        names.append(choose_backend(*args, **kwargs))
        return names[-1]

    monkeypatch.setattr(hardware, "device", lambda: H200)
    monkeypatch.setattr(dot, "choose_backend", spy)
    with allowed(cores=132):
        jax.eval_shape(
            lambda x, w: dot_general(x, w, numbers, recipe=recipe, backend=backend), x, w
        )
    (backend,) = names
    return backend.name


@needs_pallas
@pytest.mark.parametrize(("recipe", "other"), [("fp8_current", "xla"), ("fp8_block", "emulated")])
def test_a_batch_is_left_to_others(monkeypatch, recipe, other):
    x, w = jnp.ones((2, 128, 128), jnp.bfloat16), jnp.ones((2, 128, 128), jnp.bfloat16)
    assert chosen_for(monkeypatch, None, MATMUL, x[0], w[0], recipe) == "pallas"
    assert chosen_for(monkeypatch, None, BATCHED, x, w, recipe) == other
    with pytest.raises(NotImplementedError, match=f"'pallas' .*{recipe}.*H200.*: .*{SENTENCE}"):
        chosen_for(monkeypatch, "pallas", BATCHED, x, w, recipe)


@needs_pallas
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block"])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_mesh_is_taken(monkeypatch, recipe, devices):
    x, w = jnp.ones((128, 128), jnp.bfloat16), jnp.ones((128, 128), jnp.bfloat16)
    auto = (jax.sharding.AxisType.Auto,)
    with jax.set_mesh(jax.make_mesh((devices,), ("data",), axis_types=auto)):
        assert chosen_for(monkeypatch, None, MATMUL, x, w, recipe) == "pallas"


@pytest.mark.parametrize("old", [False, True])
def test_an_older_jax_is_refused_by_name_and_passed_over_by_none(monkeypatch, old):
    """With the jax that is installed, and with one that lacks what the kernels use."""
    monkeypatch.setattr(hardware, "device", lambda: H200)
    if old:
        monkeypatch.setattr(jax, "__version_info__", (0, 10, 9))
    recipe = RECIPES["fp8_block"]
    if not old and TOO_OLD is None:
        assert choose_backend("pallas", recipe) == choose_backend(None, recipe)
        return
    message = "'pallas' .*fp8_block.*: the kernels need the Pallas of jax 0.11 or later, got jax 0."
    with pytest.raises(NotImplementedError, match=message):
        choose_backend("pallas", recipe)
    assert choose_backend(None, recipe).name == "emulated"
    assert choose_backend(None, RECIPES["fp8_current"]).name == "xla"


# On the device ------------------------------------------------------------------------------------


def distance(a, b) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(512, 1024, 768), (200, 136, 72)])
@pytest.mark.parametrize("name", NAMES)
def test_products_on_the_gpu(name, shape):
    """Relative Frobenius errors. Hopper keeps 14 bits of a sum of FP8 products: one of 128 is off
    by some 2^-12 (block_gemm_test.py), and one of 1024 without promotion by some 2^-10. To a
    bfloat16 result come both sides' roundings of up to 2^-8, at most three of 1.6e-3 root mean
    square, most of which fall together: measured were 1.2e-3 per tensor and 7e-4 in blocks, and
    2.7e-4 for a float32 gradient in blocks. A cast or a scale that is wrong costs 2^-6 at least."""
    recipe, given = RECIPES[name], operands(*shape)
    args = (*given.values(), histories(recipe, given))
    *got, new = jax.jit(functools.partial(run, recipe=recipe, backend="pallas"))(*args)
    *expected, wanted = jax.jit(functools.partial(run, recipe=recipe, backend="emulated"))(*args)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        blocks_in_float32 = "block" in name and a.dtype == jnp.float32
        assert distance(a, b) <= (2.0**-10 if blocks_in_float32 else 2.0**-8)
    for operand, history in new.items():
        np.testing.assert_array_equal(history, wanted[operand])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8_current", "fp8_block"])
def test_scan_and_checkpoint_on_the_gpu(name):
    """Three layers, scanned and computed again in the backward, against the same written out.
    Kernels give the same bits twice, but XLA may fuse or choose a GEMM otherwise; a difference of
    2^-10 then moves some codes of the next layer. 2^-5 is the error of one FP8 rounding."""
    args = stack(3, 256)
    f = functools.partial(layers, recipe=name, backend="pallas")
    plain = jax.jit(functools.partial(f, scan=False))(*args)
    for scan in (False, True):
        again = jax.jit(functools.partial(f, scan=scan, remat=True))(*args)
        for a, b in zip(again, plain, strict=True):
            assert distance(a, b) <= 2.0**-5


@needs_pallas
@pytest.mark.parametrize("name", ["fp8_current", "fp8_block", "fp8_rowwise"])
def test_statistics_of_kernel_codes_are_those_of_emulated_ones(name):
    """Codes of kernels are transposed and padded to whole blocks, which counts must not see."""
    given = operands(130, 200, 72)

    def statistics(x, w, g, *, backend):
        def loss(probe):
            y = dot_general(x, w, MATMUL, recipe=name, backend=backend, probe=probe)
            return jnp.sum(y.astype(jnp.float32) * g.astype(jnp.float32))

        return jax.grad(loss)(empty_probe())

    program = jax.jit(functools.partial(statistics, backend="pallas"))
    got = interpret(program, *given.values())
    expected = jax.jit(functools.partial(statistics, backend="emulated"))(*given.values())
    np.testing.assert_allclose(got.peaks, expected.peaks, rtol=1e-6)
    np.testing.assert_array_equal(got.sums[:, :8], expected.sums[:, :8])
    np.testing.assert_allclose(got.sums[:, 8:], expected.sums[:, 8:], rtol=1e-5)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        # Of scales that are powers of two, so that the GEMM is one of BF16 codes, in tiles of 128.
        ("mxfp4:fp4_tile=tile128,hadamard=1", "dgrad_g"),  # rounds stochastically
        ("mxfp4:fp4_tile=tile128,wgrad=bf16", "dgrad_g"),
        pytest.param("fp8_block_ue8m0:scale=e8m0_floor", "fwd_x", marks=pytest.mark.full),
        ("fp8_block_ue8m0:scale=e8m0_floor", "fwd_w"),
        pytest.param("fp8_block_ue8m0:formats=fnuz", "fwd_x", marks=pytest.mark.full),
        pytest.param("fp8_block_ue8m0:formats=e3m2", "fwd_w", marks=pytest.mark.full),
        pytest.param("fp4_weights:scale=e8m0_floor", "dgrad_g", marks=pytest.mark.full),
    ],
)
def test_casts_without_a_kernel_for_their_tiles_are_not_those_of_the_kernel(spec, name):
    recipe = variant(spec)
    assert choose_backend(None, recipe, H200).name == "pallas"
    assert not can_fuse_swiglu(recipe, recipe)
    cast, x = recipe.by_name()[name], operands(256, 384, 128)["x"]
    both = tuple(CastRequest(cast, axis, None, KEY) for axis in (-1, -2))
    for requests in (both, both[:1]):
        got, amax = pallas.quantize_fused(x, requests)
        expected, _ = emulated.quantize_each(x, requests)
        assert amax is None
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    if cast.rounding == "stochastic":
        nearest = dataclasses.replace(cast, rounding="nearest")
        (plain,), _ = emulated.quantize_each(x, (CastRequest(nearest, -1, None, None),))
        assert (plain.q.values != got[0].q.values).mean() > 0.1
