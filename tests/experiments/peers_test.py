"""The same numbers as other implementations: flax's delayed scaling, the quantizers of jax.nn and
of qwix. Written independently of this library and of tests/support/reference.py, they agree to the
bit wherever arithmetic leaves no choice: where scales are powers of two, or the data far from ties.

`jax.nn.scaled_matmul` itself, which multiplies what jax.nn quantizes, has no CPU lowering before
JAX 0.12.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops

from fp8jax.gemm.dot import dot_general
from fp8jax.gemm.histories.amax_history import init_state
from fp8jax.numerics.quantization import quantize
from fp8jax.numerics.recipe import Recipe
from fp8jax.numerics.recipes import RECIPES
from fp8jax.numerics.scales import Delayed
from fp8jax.numerics.tiles import MX32, NV16, TILES
from tests.support import reference

# Optimized: of the programs of other tests, XLA casts float32 to 4 bits by way of 16 bits, which
# rounds twice. This library rounds before it casts (numerics/formats.py), others do not.
pytestmark = [pytest.mark.extended, pytest.mark.optimized]

MATMUL = (((1,), (0,)), ((), ()))

# flax: delayed scaling ----------------------------------------------------------------------------

HISTORY = 3
DELAYED = RECIPES["fp8_delayed"].map(
    lambda _, cast: dataclasses.replace(cast, scale=Delayed(HISTORY))
)
NAMES = {"x": "input", "w": "kernel", "g": "output_grad"}
FORMAT = {"x": "e4m3", "w": "e4m3", "g": "e5m2"}


@functools.partial(jax.jit, static_argnames="recipe")
def ours(x, w, g, histories, recipe: Recipe):
    """y, dx, dw, new histories."""
    f = functools.partial(dot_general, dimension_numbers=MATMUL, recipe=recipe, backend="emulated")
    y, vjp = jax.vjp(lambda x, w, h: f(x, w, state=h), x, w, histories)
    return y, *vjp(g)


@jax.jit
def flaxs(x, w, g, variables):
    module = fp8_ops.Fp8DirectDotGeneralOp(amax_history_length=HISTORY)
    y, vjp = jax.vjp(lambda x, w, v: module.apply(v, x, w, MATMUL), x, w, variables)
    return y, *vjp(g)


def by_age(history) -> np.ndarray:
    """flax rolls the other way: newest, oldest, ..., second newest."""
    history = np.asarray(history)
    return np.concatenate([history[:1], history[:0:-1]])


def steps_of_both(steps):
    """(step's operands, the scales flax used, our results, flax's results) of each step, both
    starting from empty histories; asserts equal histories on the way."""
    histories = init_state(DELAYED)
    module = fp8_ops.Fp8DirectDotGeneralOp(amax_history_length=HISTORY)
    variables = module.init(jax.random.key(0), *(steps[0][k] for k in "xw"), MATMUL)
    for operands in steps:
        args = [jnp.asarray(operands[k]) for k in "xwg"]
        *mine, histories = ours(*args, histories, DELAYED)
        *theirs, variables = flaxs(*args, variables)
        meta = variables[fp8_ops.OVERWRITE_WITH_GRADIENT]
        for k, name in NAMES.items():
            np.testing.assert_array_equal(histories[k], by_age(meta[f"{name}_amax_history"]))
        yield operands, {k: float(meta[f"{n}_scale"][0]) for k, n in NAMES.items()}, mine, theirs


def test_eight_steps_of_delayed_scaling_have_the_bits_of_flax():
    """amax = max * 2^k, with k going up and down by more than the history is long, so that numbers
    saturate (steps 2, 7), reach the subnormals (8) and old maxima expire (6). Integers up to 100
    have 7 bits, more than a code; the elements that pin the amaxes meet only zeros. So every scale
    is a power of two, every sum is exact in float32, and nothing is left to differ."""
    rng, size, steps, scales, rounded = np.random.default_rng(0), 32, [], [], 0
    for k in (0, 4, -3, -3, -3, -4, 12, 0):
        largest = {"x": min(100, 448 * 2.0**k), "w": min(100, 448 * 2.0**k), "g": 100}
        step = {n: rng.integers(-m, m + 1, (size, size)) * 1.0 for n, m in largest.items()}
        for v in step.values():
            v[:2], v[:, :2] = 0, 0
        step["x"][0, 0] = step["w"][1, 1] = 448 * 2.0**k
        step["g"][1, 1] = 57344
        step["g"] *= 2.0**-k
        steps.append({n: v.astype(np.float32) for n, v in step.items()})
    for operands, used, mine, theirs in steps_of_both(steps):
        scales.append(used["x"])
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(a, b)
        rounded += np.count_nonzero(mine[0] != operands["x"] @ operands["w"])
    assert scales == [1, 1, 16, 16, 16, 0.125, 0.125, 4096]
    assert rounded > 0.9 * 8 * 30**2


def test_delayed_scaling_on_random_data_is_within_rounding_of_flax():
    """flax divides where this library multiplies with a reciprocal: its scale is 1 / (max / amax),
    ours amax * (1 / max), each off by two roundings (u = 2^-24); x / scale and x * (1 / scale) by
    one or two more. So scales agree to 4u and quotients to 8u: where no element is that close to a
    tie (asserted), the codes are equal. Results then differ by two scales, 8u, and by what each
    side rounds: sums of 16 terms, the product of the scales and that with the sum, 17u. The first
    step only fills the histories: flax reads empty ones as the scale 1, this library as full of
    the operand's own amax."""
    rng, u, steps = np.random.default_rng(0), 2.0**-24, []
    for growth in (1.0, 3.1, 0.4, 0.3, 0.2, 0.1):
        sigma = {"x": 3.0 * growth, "w": 0.02, "g": 1e-4 / growth}
        steps.append(
            {k: (rng.normal(size=(16, 16)) * s).astype(np.float32) for k, s in sigma.items()}
        )
    for operands, used, mine, theirs in itertools.islice(steps_of_both(steps), 1, None):
        seen = {}
        for k, v in operands.items():
            table = reference.finite_values(FORMAT[k])
            ties, ratio = (table[1:] + table[:-1]) / 2, v.astype(np.float64) / used[k]
            distance = np.abs(ratio[..., None] - ties).min(axis=-1)
            assert (distance > 8 * u * np.abs(ratio)).all()
            seen[k] = np.abs(reference.saturating_cast(ratio, FORMAT[k]).astype(float)) * used[k]
        x, w, g = (seen[k] for k in "xwg")
        for a, b, magnitude in zip(mine, theirs, (x @ w, g @ w.T, x.T @ g), strict=True):
            assert (np.abs(np.asarray(a, np.float64) - b) <= 42.01 * u * magnitude).all()


# Quantizers ---------------------------------------------------------------------------------------


def normal(shape=(64, 256), seed=0) -> np.ndarray:
    """Normal data whose rows span 14 binades."""
    x = np.random.default_rng(seed).normal(size=shape) * np.exp2(np.arange(shape[0]) % 14)[:, None]
    return x.astype(np.float32)


def with_tensor_amax(x: np.ndarray, amax: float) -> np.ndarray:
    """x, one element being amax and the others clipped below it."""
    x = np.clip(x, -0.9 * amax, 0.9 * amax).astype(np.float32)
    x[3, 5] = amax
    return x


def assert_same_codes(values, theirs) -> None:
    np.testing.assert_array_equal(
        np.asarray(values).view(np.uint8), np.asarray(theirs).view(np.uint8)
    )


def jax_nn_quantize(x, mode: str, global_scale=None):
    """(codes, scales) of jax.nn's quantizer, which is private, for x [rows, contracting]."""
    # Imported here and not skipped: where a later JAX has moved it, only these tests fail.
    from jax._src.cudnn.scaled_matmul_stablehlo import quantize as theirs

    config = jax.nn.get_scaled_dot_general_config(mode, global_scale)
    values, scales = theirs(jnp.asarray(x)[None], config)
    return values[0], scales[0]


@pytest.mark.parametrize(("mode", "fmt"), [("mxfp8", "e4m3"), ("mxfp4", "e2m1")])
def test_mx_has_the_bits_of_jax_nn(mode, fmt):
    """Scales are powers of two rounded up, of amax / max there and by bit patterns here. Where they
    could differ is at max * 2^k and just beside it, so some tiles have such an amax."""
    if mode == "mxfp4" and jax.__version_info__ < (0, 12):
        # An older JAX has no such function to compare with. `.ci/run --all` runs this on the newest
        # JAX, too, and qwix, below, has the same bits under every JAX.
        pytest.skip("jax.nn knows mxfp4 from JAX 0.12 on")
    x = normal()
    top = np.float32(reference.MAX[fmt])
    x = np.clip(x, -8 * top, 8 * top)
    x[::7, ::32] = 8 * top
    x[1::7, ::32] = np.nextafter(8 * top, np.float32(0))
    x[2::7, ::32] = 8 * top * np.float32(1 + 2.0**-20)
    values, scales = jax_nn_quantize(x, mode)
    q = quantize(jnp.asarray(x), fmt, MX32, scale="e8m0")
    assert_same_codes(q.values, values)
    assert q.scale.dtype == scales.dtype
    np.testing.assert_array_equal(np.asarray(q.scale), np.asarray(scales))


@pytest.mark.parametrize("k", [-6, 0, 5])
def test_nvfp4_has_the_bits_of_jax_nn(k):
    """Under a power-of-two tensor scale. The tile's scale is amax / 6 there, amax * (1 / 6) here:
    within 2^-23 of each other, as are the quotients x / scale. A scale is rounded to 4 bits and a
    value to 2, so that a random number lies that close to a tie with probability below 2^-18, and
    none of the 16,384 numbers here does."""
    x = with_tensor_amax(normal() * np.float32(2.0**k), 2688 * 2.0**k)
    values, scales = jax_nn_quantize(x, "nvfp4", jnp.float32(2.0**k))
    q = quantize(jnp.asarray(x), "e2m1", NV16, scale="nvfp4")
    assert float(q.tensor_scale) == 2.0**k
    assert_same_codes(q.values, values)
    assert q.scale.dtype == scales.dtype
    np.testing.assert_array_equal(np.asarray(q.scale), np.asarray(scales))


def test_nvfp4_given_any_tensor_scale_agrees_with_jax_nn():
    """As above, with our tensor scale given to jax.nn: its quotients have one rounding more, and
    the same holds."""
    x = normal()
    q = quantize(jnp.asarray(x), "e2m1", NV16, scale="nvfp4")
    assert np.frexp(float(q.tensor_scale))[0] != 0.5
    values, scales = jax_nn_quantize(x, "nvfp4", q.tensor_scale)
    assert_same_codes(q.values, values)
    np.testing.assert_array_equal(np.asarray(q.scale), np.asarray(scales))


def qwix_quantize(x, qtype, tile, axis: int):
    """(codes, float32 scales) of qwix for x of two axes."""
    qwix = pytest.importorskip("qwix", reason="a test dependency, see pyproject.toml")
    sizes = {axis % 2: tile.contract, 1 - axis % 2: tile.free}
    q = qwix.quantize(
        jnp.asarray(x),
        qtype,
        channelwise_axes=[a for a, n in sizes.items() if n == 1],
        tiled_axes={a: n for a, n in sizes.items() if n not in (None, 1)},
    )
    return q.qvalue, q.scale


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(
    ("qtype", "fmt", "tile", "rule"),
    [
        ("mxfp8", "e4m3", "mx32", "e8m0"),
        ("mxfp4", "e2m1", "mx32", "e8m0"),
        ("nvfp4", "e2m1", "nv16", "nvfp4"),
        ("nvfp4", "e2m1", "nv16x16", "nvfp4"),
    ],
)
def test_block_formats_have_the_bits_of_qwix(qtype, fmt, tile, rule, axis):
    """qwix has no tensor scale in NVFP4: ours is 1 where the tensor's amax is 2688. It divides
    where we multiply with reciprocals, as jax.nn does."""
    x = with_tensor_amax(normal(), 2688.0)
    values, scales = qwix_quantize(x, qtype, TILES[tile], axis)
    q = quantize(jnp.asarray(x), fmt, TILES[tile], contract_axis=axis, scale=rule)
    assert_same_codes(q.values, values)
    np.testing.assert_array_equal(np.asarray(q.float_scale()), np.asarray(scales))


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("tile", ["tensor", "row", "tile128", "block128"])
def test_float32_scales_have_the_bits_of_qwix(tile, fmt, axis):
    """Every tile's amax is max * 2^k, k varying: there amax / max is as exact as our product with
    the reciprocal, and the scale 2^k rounds nothing."""
    rng = np.random.default_rng(0)
    top = np.float32(reference.MAX[fmt])
    x = np.clip(rng.normal(size=(256, 256)) * top / 5, -0.99 * top, 0.99 * top).astype(np.float32)
    for _, where in reference.tiles(x.shape, TILES[tile], axis):
        block = x[where]
        block[tuple(rng.integers(0, n) for n in block.shape)] = -top
        x[where] = block * np.float32(2.0 ** rng.integers(-9, 9))
    values, scales = qwix_quantize(x, reference.DTYPES[fmt], TILES[tile], axis)
    q = quantize(jnp.asarray(x), fmt, TILES[tile], contract_axis=axis, scale="fp32")
    assert_same_codes(q.values, values)
    np.testing.assert_array_equal(np.asarray(q.scale), np.asarray(scales))
