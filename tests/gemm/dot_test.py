"""The quantized product and its gradients: exact by construction, and within derived bounds.

One suite for every recipe under every backend that claims it; the others must raise.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fp8jax.device import hardware
from fp8jax.gemm import vjp
from fp8jax.gemm.backends import operands as operands_of_gemms
from fp8jax.gemm.backends.choice import BACKENDS, choose_backend
from fp8jax.gemm.dot import dot_general, dot_general_together, einsum
from fp8jax.gemm.histories.amax_history import init_state
from fp8jax.gemm.weight import Weight
from fp8jax.kernels import blackwell
from fp8jax.numerics.formats import FORMATS
from fp8jax.numerics.quantization import dequantize, quantize
from fp8jax.numerics.recipe import Cast, Recipe
from fp8jax.numerics.recipes import RECIPES
from fp8jax.numerics.scales import SCALES, Constant, Outer128
from fp8jax.numerics.tiles import NV16, TENSOR, TILE128, Tile
from tests.support import reference
from tests.support.products import (
    CONTRACTED,
    IN_BF16,
    MATMUL,
    ON_HOPPER,
    PER_TENSOR,
    equations,
    float8_products,
    normal_operands,
    three_products,
    variant,
)

# No tile of 128 divides these; with 128-tiles each axis has two or three of them.
M, K, N = 136, 264, 144


# Every recipe, and the readings that their papers leave open.
CASES = RECIPES | {
    name: variant(name)
    for name in (
        "fp8_amax:margin=3",
        "fp8_amax:scale=mse,margin=3",
        "fp8_delayed:history=4,margin=1,amax=newest",
        "fp8_cscale:bias=2",
        "mxfp8:scale=e8m0_floor",
        "fp8_block:gradients=e5m2",
        "fp4_naive:fp4_tile=row",
        "fp4_naive:fp4_tile=row,wgrad_tile=token",
        "fp8_amax:formats=fnuz",
        "fp8_rowwise:formats=e3m2",
        "fp8_block:dgrad=bf16",
        "fp4_naive:only=wgrad_x,wgrad_tile=token",
        "fp8_block:wgrad_g_tile=block128",
    )
}
BLACKWELL = hardware.Device("gpu", "B200", (10, 0))
PAIRS = [
    (case, backend)
    for case in CASES
    for backend in BACKENDS
    if BACKENDS[backend].refuses(CASES[case], hardware.device()) is None
]
REFUSED = [(r, b) for r in RECIPES for b in BACKENDS if (r, b) not in PAIRS]
KEY = jax.random.key(7)
SHAPES = {"x": (M, K), "w": (K, N), "g": (M, N)}
# One recipe of each way through the product: of each tile, with and without histories, rotated.
WAYS = ("bf16", "fp8_delayed", "fp8_rowwise_wgrad_bf16", "fp8_block", "mxfp8", "nvfp4")


# Variants of others here; tests/numerics/fp4_recipes_test.py has the bits of their casts.
VARIANTS = ("nvfp4_unbiased", "nvfp4_4over6", "fp4_weights", "fp8_amax:scale=mse,margin=3")


def in_its_tier(cases):
    """Names, or tuples that begin with one; the variants are in the full tier."""
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        found.append(
            pytest.param(*values, marks=pytest.mark.full) if values[0] in VARIANTS else case
        )
    return found


def one_of_each_way(names=RECIPES):
    """The others are in the full tier: `test_exact_on_representable_operands` has all of them."""
    return [n if n in WAYS else pytest.param(n, marks=pytest.mark.full) for n in names]


def state_for(recipe: Recipe, operands: dict[str, np.ndarray]):
    """Histories that hold the present amaxes (the newest slot), as in a steady state."""
    state = {k: np.array(history) for k, history in init_state(recipe).items()}
    for k, history in state.items():
        history[0] = np.abs(operands[k]).max() or history[0]
    return state


run = functools.partial(three_products, key=KEY, seeded=True)


def float_product(product: str, operands: dict[str, np.ndarray]) -> np.ndarray:
    """In float64."""
    (a, ca), (b, cb) = CONTRACTED[product]
    left, right = (np.asarray(operands[name], np.float64) for name in (a, b))
    left = left if ca == -1 else left.swapaxes(-1, -2)
    return left @ (right if cb == -2 else right.swapaxes(-1, -2))


def check_exact(recipe: Recipe, backend: str, product: str, dtype, shapes):
    """Operands that the casts of the product hit exactly, with power-of-two scales: the only
    rounding left is that of the result to its dtype, since float32 holds all sums (checked)."""
    rng, unit = np.random.default_rng(1), 1.0
    operands = {k: rng.integers(-3, 4, s).astype(np.float32) for k, s in shapes.items()}
    for cast, (operand, axis) in zip(recipe.gemms[product], CONTRACTED[product], strict=True):
        if cast is not None and cast.requantizes:  # what the forward's cast hits, it hits as well
            cast, axis = recipe.by_name()[f"fwd_{operand}"], dict(CONTRACTED["fwd"])[operand]
        operands[operand] = reference.pinned(rng, shapes[operand], cast, axis)
        unit *= reference.unit(cast)
    magnitudes = float_product(product, {k: np.abs(a) for k, a in operands.items()})
    assert magnitudes.max() / unit < 2**24
    x, w, g = (operands[k] for k in "xwg")
    y, dx, dw, _ = run(
        x.astype(dtype),
        w,
        g.astype(dtype),
        state_for(recipe, operands),
        recipe=recipe,
        backend=backend,
    )
    got = {"fwd": y, "dgrad": dx, "wgrad": dw}[product]
    expected = float_product(product, operands).astype(np.float32)
    assert got.dtype == {"fwd": dtype, "dgrad": dtype, "wgrad": jnp.float32}[product]
    np.testing.assert_array_equal(np.asarray(got), expected.astype(got.dtype))


def has_exact_operands(product: str, name: str) -> bool:
    """Whether there are operands of the product that the casts hit exactly, with power-of-two
    scales. None if scales are larger than an amax needs, by 17/16."""
    casts = [cast for cast in CASES[name].gemms[product] if cast is not None]
    return all(reference.NVFP4.get(type(cast.rule), (1, None))[0] == 1 for cast in casts)


@pytest.mark.parametrize(
    ("name", "backend", "product"),
    in_its_tier(
        (*pair, product)
        for pair in PAIRS
        for product in CONTRACTED
        if has_exact_operands(product, pair[0])
    ),
)
def test_exact_on_representable_operands(name, backend, product):
    check_exact(CASES[name], backend, product, jnp.float32, SHAPES)


@pytest.mark.parametrize("product", CONTRACTED)
@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, backend) for name, backend in PAIRS if name in WAYS],
)
def test_exact_on_representable_operands_in_bfloat16(name, backend, product):
    check_exact(CASES[name], backend, product, jnp.bfloat16, SHAPES)


@pytest.mark.parametrize("product", CONTRACTED)
@pytest.mark.parametrize("name", one_of_each_way())
def test_exact_on_representable_batches(name, product):
    """An einsum with a batch axis, [E, M, K] x [E, K, N]: experts, for instance."""
    if not has_exact_operands(product, name):
        product = "fwd"
    shapes = {"x": (2, 24, 40), "w": (2, 40, 32), "g": (2, 24, 32)}
    check_exact(RECIPES[name], "emulated", product, jnp.float32, shapes)


def random_operands():
    """A copy, which a test may change."""
    return {k: a.copy() for k, a in _random_operands().items()}


@functools.cache
def _random_operands():
    return normal_operands(M, K, N)


@functools.cache
def random_exactly(product: str) -> np.ndarray:
    return float_product(product, random_operands())


def as_seen(recipe: Recipe, name: str, axis: int) -> np.ndarray:
    """The random operand of the cast of that name, such as "fwd_x", as its product sees it, in
    float64: rotated where that is asked for, quantized."""
    return _as_seen(*described(recipe, name, axis))


def described(recipe: Recipe, name: str, axis: int) -> tuple:
    """What decides how a product sees the operand: the arguments of `_as_seen`."""
    cast, forward = recipe.by_name()[name], None
    if cast is not None and cast.requantizes:
        forward = recipe.by_name()[f"fwd_{name[-1]}"]
    named = cast is not None and (cast.random or cast.requantizes)
    return name[-1], cast, axis, name if named else None, forward


@functools.cache  # many recipes have the same casts
def _as_seen(
    operand: str, cast: Cast | None, axis: int, name: str | None, forward: Cast | None
) -> np.ndarray:
    return reference.apply_cast(
        random_operands()[operand], cast, axis, key=KEY, name=name, forward=forward
    )


def as_given(recipe: Recipe, name: str, axis: int) -> np.ndarray:
    """That operand before its cast, rotated as the cast rotates it."""
    value, cast = random_operands()[name[-1]], recipe.by_name()[name]
    if cast is None or cast.hadamard == 1:
        return value
    word = reference.signs_of(KEY, name) if cast.redrawn else 0
    return reference.hadamard(value, cast.hadamard, axis, word)


@functools.cache
def random_products(name: str, backend: str) -> dict[str, np.ndarray]:
    """The three products of the random operands."""
    recipe, operands = CASES[name], random_operands()
    x, w, g = (operands[k] for k in "xwg")
    y, dx, dw, _ = run(x, w, g, state_for(recipe, operands), recipe=recipe, backend=backend)
    return jax.device_get({"fwd": y, "dgrad": dx, "wgrad": dw})


@pytest.mark.parametrize(("name", "backend"), in_its_tier(PAIRS))
def test_products_are_those_of_the_reference_quantizers(name, backend):
    """y, dx and dw equal the products of operands quantized by tests/support/reference.py.

    Bound: both sides multiply the same numbers. Where a tile's scale is a float32 number,
    `emulated` rounds each of the two once; else its numbers are exact, and the product of what is
    constant along K is rounded once, and once more when it multiplies the sum. What is left is
    float32 accumulation over at most 264 terms: (264 + 2) * 2^-24 of the sum of magnitudes.
    """
    got = random_products(name, backend)
    for product in CONTRACTED:
        pair = [described(CASES[name], f"{product}_{o}", axis) for o, axis in CONTRACTED[product]]
        expected, magnitudes = reference_product(product, *pair)
        bound = (264 + 2) * 2.0**-24 * magnitudes
        assert (np.abs(np.asarray(got[product], np.float64) - expected) <= bound).all()


@functools.cache  # many recipes have the same casts
def reference_product(product: str, left: tuple, right: tuple):
    """The product of the random operands as `_as_seen` of these, and that of their magnitudes."""
    (_, ca), (_, cb) = CONTRACTED[product]
    a, b = _as_seen(*left), _as_seen(*right)
    a = a if ca == -1 else a.T
    b = b if cb == -2 else b.T
    return a @ b, np.abs(a) @ np.abs(b)


@pytest.mark.parametrize(("name", "backend"), in_its_tier(PAIRS))
def test_error_is_what_the_roundings_imply(name, backend):
    """With independent roundings of relative size r and s (root mean square), the product of two
    operands is off by sqrt(r^2 + s^2 + r^2 s^2) in Frobenius norm; both are measured on the
    operands. Two-sided, within 10%: an operand that is silently not quantized fails too."""
    recipe = CASES[name]
    for product, got in random_products(name, backend).items():
        exact, roundings = random_exactly(product), []
        for cast, (operand, axis) in zip(recipe.gemms[product], CONTRACTED[product], strict=True):
            value = as_given(recipe, f"{product}_{operand}", axis)
            rounded = as_seen(recipe, f"{product}_{operand}", axis)
            roundings.append(np.linalg.norm(rounded - value) / np.linalg.norm(value))
            if cast is not None:
                assert roundings[-1] > 0.3 * cast.format.unit_roundoff
        expected = np.sqrt(np.prod([1 + r**2 for r in roundings]) - 1)
        error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
        assert abs(error - expected) <= 0.1 * expected + 264 * 2.0**-24


@pytest.mark.parametrize(("name", "backend"), REFUSED)
def test_a_backend_that_cannot_do_a_recipe_says_why(name, backend):
    with pytest.raises(NotImplementedError, match=f"{backend}.*{name}.*cpu.*: "):
        dot_general(
            jnp.ones((2, 4)),
            jnp.ones((4, 3)),
            MATMUL,
            recipe=name,
            backend=backend,
            state=init_state(name),
            key=KEY,
        )


# Recipe -> where it runs natively if not where all float8 does.
NATIVE = {
    hardware.Device("gpu", "T4", (7, 5)): {"bf16"},
    hardware.Device("gpu", "A100", (8, 0)): {"bf16"},
    hardware.Device("gpu", "L4", (8, 9)): PER_TENSOR,
    hardware.Device("gpu", "H200", (9, 0)): PER_TENSOR,
    BLACKWELL: PER_TENSOR | {"mxfp8", "nvfp4", "nvfp4_unbiased", "nvfp4_4over6", "quartet2"},
    hardware.Device("gpu", "RTX 5090", (12, 0)): PER_TENSOR,
    hardware.Device("tpu", "TPU v6 lite"): {"bf16"},
    hardware.Device("cpu", "cpu"): PER_TENSOR,  # when asked for: XLA widens
}


@pytest.mark.parametrize("device", NATIVE, ids=lambda device: device.kind)
def test_the_table_of_backends_is_as_documented(device):
    for name, recipe in RECIPES.items():
        assert BACKENDS["emulated"].refuses(recipe, device) is None
        refusal = BACKENDS["xla"].refuses(recipe, device)
        assert (refusal is None) == (name in NATIVE[device]), (name, refusal)
        refusal = BACKENDS["pallas"].refuses(recipe, device)
        kernels = name in ON_HOPPER and device.capability == (9, 0)
        assert (refusal is None) == (kernels or name == "bf16"), (name, refusal)
        best = choose_backend(None, recipe, device).name
        native = name in NATIVE[device] and name != "bf16" and device.platform == "gpu"
        assert best == ("pallas" if kernels else "xla" if native else "emulated")
        split = choose_backend(None, recipe, device, whole=False).name
        assert split == ("xla" if native else "emulated")


def test_a_refusal_names_what_is_missing():
    e4m3, e5m2 = Cast(format=FORMATS["e4m3"]), Cast(format=FORMATS["e5m2"])
    hopper, t4 = (hardware.Device("gpu", "an H200", (9, 0)), hardware.Device("gpu", "a T4", (7, 5)))
    refuses = BACKENDS["xla"].refuses
    assert "a T4 has no FP8 matrix unit" in refuses(RECIPES["fp8_current"], t4)
    assert "high-precision operand" in refuses(Recipe(fwd_x=e4m3), hopper)
    assert "e5m2 by e5m2" in refuses(Recipe(fwd_x=e5m2, fwd_w=e5m2), hopper)
    assert "e3m2: XLA has no GEMM for this 6-bit" in refuses(
        variant("fp8_rowwise:formats=e3m2"), BLACKWELL
    )
    assert "4-bit" in refuses(Recipe(fwd_x=Cast(format=FORMATS["e2m1"]), fwd_w=e4m3), hopper)
    assert "change along the contracting axis" in refuses(RECIPES["fp8_block"], BLACKWELL)
    assert "one scale per 32 elements" in refuses(RECIPES["mxfp8"], hopper)
    assert "e2m1" in refuses(RECIPES["mxfp4"], BLACKWELL)
    kernels = BACKENDS["pallas"].refuses
    for name in ("fp8_amax:formats=fnuz", "fp8_rowwise:formats=fnuz", "mxfp8:formats=fnuz"):
        assert "in e4m3fnuz: matrix units take e4m3 and e5m2" in refuses(variant(name), BLACKWELL)
        if name.startswith("mxfp8"):  # exact in bfloat16
            assert kernels(variant(name), hopper) is None
        else:
            assert "e4m3fnuz by e4m3fnuz: the kernels take e4m3" in kernels(variant(name), hopper)
    by_row = variant("fp4_naive:fp4_tile=row")
    assert "e2m1 by e2m1 with scales of rows: the kernels take e4m3" in kernels(by_row, hopper)
    by_token = variant("fp8_rowwise:wgrad_tile=token")
    assert "wgrad has scales that change along the contracting axis (token)" in refuses(
        by_token, hopper
    )
    assert "wgrad multiplies token by token: there is no kernel" in kernels(by_token, hopper)


def documented_scaled_matmul(a, b, a_scales, b_scales, preferred_element_type):
    """What jax.nn.scaled_matmul, which only GPUs have, says it computes."""
    assert preferred_element_type == jnp.float32 and a.shape[0] == b.shape[0]
    block = a.shape[-1] // a_scales.shape[-1]
    assert (a.dtype.itemsize, a_scales.dtype, block) in [
        (1, jnp.float8_e8m0fnu, 32),
        (1, jnp.float8_e4m3fn, 16),
    ]
    left, right = (
        codes.astype(jnp.float32) * jnp.repeat(scales.astype(jnp.float32), block, axis=-1)
        for codes, scales in ((a, a_scales), (b, b_scales))
    )
    return jnp.einsum("BMK,BNK->BMN", left, right, precision="highest")


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_blackwells_product_gets_codes_and_scales_in_its_layout(name, monkeypatch):
    monkeypatch.setattr(hardware, "device", lambda: BLACKWELL)
    monkeypatch.setattr(jax.nn, "scaled_matmul", documented_scaled_matmul)
    three_products.clear_cache()  # the other tests' programs
    shapes = {"x": (2, 24, 40), "w": (2, 40, 30), "g": (2, 24, 30)}
    for product in CONTRACTED:
        check_exact(CASES[name], "xla", product, jnp.float32, SHAPES)
        check_exact(CASES[name], "xla", product, jnp.bfloat16, shapes)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_scaled_matmul_computes_what_it_says(name):
    """Off Blackwell XLA dequantizes its operands: the layout is tested there, too."""
    recipe, operands = RECIPES[name], random_operands()
    args = (operands["x"], recipe.fwd_x), (operands["w"], recipe.fwd_w)
    x, w = (
        quantize(jnp.asarray(a), c.format, c.tile, contract_axis=axis, scale=c.scale)
        for (a, c), axis in zip(args, (-1, -2), strict=True)
    )
    got = jax.jit(lambda x, w: blackwell.scaled_matmul(x, w, -1, -2))(x, w)
    left, right = (np.asarray(dequantize(q), np.float64) for q in (x, w))
    # Dequantized to bfloat16 where it has no unit: 2^-9 an operand, and float32 sums.
    bound = (2 * 2.0**-8 + K * 2.0**-24) * (np.abs(left) @ np.abs(right))
    assert (np.abs(np.asarray(got, np.float64) - left @ right) <= bound).all()


# State --------------------------------------------------------------------------------------------


def test_new_histories_are_the_cotangents_of_the_old():
    recipe, operands = RECIPES["fp8_delayed"], random_operands()
    old = {k: jnp.arange(16, dtype=jnp.float32) + 1 for k in "xwg"}
    *_, new = run(*(operands[k] for k in "xwg"), old, recipe=recipe, backend="emulated")
    for k in "xwg":
        assert new[k][0] == np.abs(operands[k]).max()
        np.testing.assert_array_equal(new[k][1:], old[k][:-1])


def test_a_non_finite_operand_poisons_the_product_but_no_history():
    recipe, operands = RECIPES["fp8_delayed"], random_operands()
    old = {k: jnp.full(16, 5.0) for k in "xwg"}
    operands["g"][3, 4] = np.inf
    y, dx, dw, new = run(*(operands[k] for k in "xwg"), old, recipe=recipe, backend="emulated")
    assert np.isfinite(y).all() and not np.isfinite(dx).any() and not np.isfinite(dw).any()
    np.testing.assert_array_equal(new["g"], old["g"])
    operands["x"][0, 0] = np.nan
    y, *_, new = run(*(operands[k] for k in "xwg"), old, recipe=recipe, backend="emulated")
    assert np.isnan(y).all()
    np.testing.assert_array_equal(new["x"], old["x"])


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", in_its_tier(CASES))
def test_an_overflow_in_a_source_never_hides(name, bad):
    """What an operand's element (3, 4) is part of is not finite, and histories stay finite."""
    recipe = CASES[name]
    affected = {
        "x": ("y", 3, "dw", 4),
        "w": ("y", (slice(None), 4), "dx", (slice(None), 3)),
        "g": ("dx", 3, "dw", (slice(None), 4)),
    }
    for operand, (one, there, other, where) in affected.items():
        operands = random_operands()
        state = state_for(recipe, operands)
        operands[operand][3, 4] = bad
        got = run(*(operands[k] for k in "xwg"), state, recipe=recipe, backend="emulated")
        values = dict(zip(("y", "dx", "dw"), map(np.asarray, got[:3]), strict=True))
        assert not np.isfinite(values[one][there]).any()
        assert not np.isfinite(values[other][where]).any()
        for history in jax.tree.leaves(got[3]):
            assert np.isfinite(history).all()


# Lowering -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp8_current", "fp8_rowwise", *sorted(IN_BF16)])
@pytest.mark.parametrize("platform, rows", [("gpu", 48), ("cpu", 80)])  # JAX keeps what it traces
def test_operands_with_few_bits_are_multiplied_in_bfloat16(name, platform, rows, monkeypatch):
    """But, on a CPU, where the first is transposed: XLA has no such product under `jax.vmap`."""
    monkeypatch.setattr(operands_of_gemms, "platform", lambda: platform)
    recipe, operands = RECIPES[name], normal_operands(rows, K, N)
    args = (*(operands[k] for k in "xwg"), init_state(recipe))
    f = functools.partial(three_products, key=KEY, recipe=recipe, backend="emulated")
    jaxpr = jax.make_jaxpr(f)(*args)
    dots = [e for e, _ in equations(jaxpr.jaxpr) if e.primitive is jax.lax.dot_general_p]
    transposed = [e.params["dimension_numbers"][0][0] == (0,) for e in dots]
    wide = [jnp.float32 if platform == "cpu" and first else jnp.bfloat16 for first in transposed]
    assert [[v.aval.dtype for v in e.invars] for e in dots] == [[dtype] * 2 for dtype in wide]
    assert len(dots) == 3 and any(transposed)
    assert [e.outvars[0].aval.dtype for e in dots] == [jnp.float32] * 3


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4:rounding=nearest,hadamard=1"])
@pytest.mark.parametrize(
    "axis", [0, *(pytest.param(axis, marks=pytest.mark.full) for axis in (1, 2))]
)
def test_vmap_over_cotangents_gives_the_gradients_of_each(recipe, axis):
    """Integers from -2 to 2 and scales that are powers of two: every sum is exact."""
    rng = np.random.default_rng(0)
    shapes = (32, 64), (64, 96), (3, 32, 96)
    x_MK, w_KN, g_BMN = (jnp.asarray(rng.integers(-2, 3, s), jnp.float32) for s in shapes)
    product = functools.partial(dot_general, dimension_numbers=MATMUL, recipe=variant(recipe))

    def gradients(g_MN):
        return jax.vjp(product, x_MK, w_KN)[1](g_MN)

    dx_BMK, dw_BKN = jax.jit(jax.vmap(gradients, in_axes=axis))(jnp.moveaxis(g_BMN, 0, axis))
    np.testing.assert_array_equal(dx_BMK, g_BMN @ w_KN.T)
    np.testing.assert_array_equal(dw_BKN, x_MK.T @ g_BMN)


@pytest.mark.full
def test_scales_of_several_rows_are_those_of_each_row():
    """Integers up to 15 times powers of two, a scale for every 16 rows: every step is exact."""
    rng = np.random.default_rng(0)
    shapes = (64, 32), (32, 48)
    x_MK, w_KN = (jnp.asarray(rng.integers(-15, 16, s), jnp.float32) for s in shapes)
    x_MK *= jnp.repeat(2.0 ** jnp.arange(4), 16)[:, None]
    e4m3, pow2 = FORMATS["e4m3"], SCALES["pow2"]
    rows = Cast(format=e4m3, tile=Tile(16, None), scale=pow2)
    for fwd_w in (rows, Cast(format=e4m3, scale=pow2)):
        y_MN = dot_general(x_MK, w_KN, MATMUL, recipe=Recipe(fwd_x=rows, fwd_w=fwd_w))
        np.testing.assert_array_equal(y_MN, x_MK @ w_KN)


@pytest.mark.parametrize("rule", ["nvfp4", "outer128", "e8m0", "e8m0_floor", "pow2", "fp32"])
@pytest.mark.parametrize("fmt", [name for name, fmt in FORMATS.items() if fmt.signed])
def test_bfloat16_holds_what_the_table_of_bits_says(fmt, rule):
    """Every code times every scale of its tile, against NumPy: but for float32 scales, and but for
    numbers below 2^-126, which float32 does not hold either where devices flush them."""
    if rule in ("nvfp4", "outer128") and fmt != "e2m1":
        return
    cast = Cast(format=FORMATS[fmt], tile=NV16, scale=SCALES[rule])
    if rule == "fp32":
        assert not cast.exact_in(jnp.bfloat16)
        return
    codes = reference.finite_values(fmt)
    scales = 2.0 ** np.arange(-100, 101)
    if rule in ("nvfp4", "outer128"):
        outer = [1.0] if rule == "nvfp4" else scales
        scales = np.outer(reference.finite_values("e4m3"), outer).ravel()
    products = np.outer(codes, scales)
    products = products[np.abs(products) < 2.0**127].astype(np.float32)
    rounded = np.asarray(jnp.asarray(products).astype(jnp.bfloat16).astype(jnp.float32))
    assert cast.exact_in(jnp.bfloat16) == bool((rounded == products).all())
    with np.errstate(over="ignore"):
        in_float16 = (products.astype(np.float16).astype(np.float32) == products).all()
    assert cast.exact_in(jnp.float16) == bool(in_float16)


@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_current"])
def test_xla_makes_exactly_three_float8_products(name):
    recipe, operands = RECIPES[name], random_operands()
    args = (*(operands[k] for k in "xwg"), init_state(recipe))
    jaxpr = jax.make_jaxpr(functools.partial(three_products, recipe=recipe, backend="xla"))(*args)
    assert float8_products(jaxpr.jaxpr) == 3


@pytest.mark.parametrize("name", [r for r in RECIPES if RECIPES[r].wgrad_x is not None])
def test_no_high_precision_activation_is_a_residual(name):
    """x is bfloat16, two bytes an element: what is kept of it has one. w is kept as it came."""
    recipe = RECIPES[name]
    padded = -(-M // recipe.wgrad_x.hadamard) * recipe.wgrad_x.hadamard  # tokens, if rotated
    x, w = jnp.ones((M, K), jnp.bfloat16), jnp.ones((K, N), jnp.float32)
    f = functools.partial(dot_general, dimension_numbers=MATMUL, recipe=recipe, backend="emulated")
    _, vjp = jax.eval_shape(
        lambda x, w: jax.vjp(lambda x, w: f(x, w, state=init_state(recipe), key=KEY), x, w), x, w
    )
    kept = [leaf for leaf in jax.tree.leaves(vjp) if hasattr(leaf, "size") and leaf.size >= M * K]
    assert [leaf.dtype.itemsize for leaf in kept if leaf.shape == (padded, K)] == [1]
    assert all(leaf.shape in ((padded, K), (K, N)) for leaf in kept)


@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_current", "fp8_block"])
def test_a_loop_over_layers_saves_no_second_stack_of_weights(name):
    """The backward reads the weights that the loop was given: its only stack are the gradients."""
    recipe, layers = RECIPES[name], 3
    x, ws = jnp.ones((M, K), jnp.bfloat16), jnp.ones((layers, K, K), jnp.float32)
    f = functools.partial(dot_general, dimension_numbers=MATMUL, recipe=recipe, backend="emulated")

    def loss(ws):
        return jnp.sum(lax.scan(lambda x, w: (f(x, w, state=init_state(recipe)), None), x, ws)[0])

    equations = jax.make_jaxpr(jax.grad(loss))(ws).eqns
    loops = [equation for equation in equations if equation.primitive.name == "scan"]
    stacks = [[var.aval.shape for var in loop.outvars].count(ws.shape) for loop in loops]
    assert stacks == [0, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_current"])
def test_exact_on_the_matrix_unit(name):
    """As above, within the 14 bits that Hopper's FP8 sums keep: the element that pins an amax
    meets zeros, and what is left are sums of at most 264 products of at most 9."""
    recipe, rng = CASES[name], np.random.default_rng(0)
    operands = {k: rng.integers(-3, 4, s).astype(np.float32) for k, s in SHAPES.items()}
    x, w, g = (operands[k] for k in "xwg")
    for operand in (x, w, g):
        operand[:2], operand[:, :2] = 0, 0
    x[0, 0] = w[1, 1] = 448
    g *= 128
    g[1, 1] = 57344
    run_xla = functools.partial(run, recipe=recipe, backend="xla")
    *got, _ = run_xla(*map(jnp.asarray, (x, w, g)), state_for(recipe, operands))
    exactly = [float_product(product, {"x": x, "w": w, "g": g}) for product in CONTRACTED]
    for value, exact in zip(got, exactly, strict=True):
        assert np.count_nonzero(exact) > 0.9 * exact.size
        np.testing.assert_array_equal(np.asarray(value, np.float64), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [4096, 192])
def test_the_scale_is_multiplied_in_float32_inside_the_gemm(m):
    """bfloat16 results round once: they are those of a float32 result, rounded."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(m, 1024)), jnp.bfloat16)
    w = jnp.asarray(rng.normal(size=(1024, 512)), jnp.float32)
    f = functools.partial(
        dot_general, dimension_numbers=MATMUL, recipe="fp8_current", backend="xla"
    )
    narrow = jax.jit(f)
    wide = jax.jit(functools.partial(f, preferred_element_type=jnp.float32))
    assert narrow.lower(x, w).compile().as_text().count("__cublas$lt$matmul$f8") == 1
    np.testing.assert_array_equal(narrow(x, w), wide(x, w).astype(jnp.bfloat16))


# Shapes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "equation",
    ["bsd,dh->bsh", "bsd,dhk->bshk", "bshk,hkd->bsd", "ebd,edf->ebf", "bed,edf->bef", "ab,cb->ca"],
)
def test_einsum_equals_jax_on_any_layout(equation):
    """bf16 recipe: the layout is what is tested, gradients included; integers are exact."""
    sizes = dict(b=3, s=5, d=6, h=2, k=4, e=7, f=8, a=2, c=3)
    rng = np.random.default_rng(0)
    terms = equation.split("->")[0].split(",")
    lhs, rhs = (jnp.asarray(rng.integers(-4, 5, [sizes[c] for c in t]), jnp.float32) for t in terms)
    shape = [sizes[c] for c in equation.split("->")[1]]
    g = jnp.asarray(rng.integers(-4, 5, shape), jnp.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def with_gradients(product, lhs, rhs, g):
        y, vjp = jax.vjp(functools.partial(product, equation), lhs, rhs)
        return y, *vjp(g)

    ours = with_gradients(functools.partial(einsum, recipe="bf16"), lhs, rhs, g)
    for a, b in zip(ours, with_gradients(jnp.einsum, lhs, rhs, g), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_batched_tensor_has_one_scale_per_tensor_and_one_each_per_tile():
    rng = np.random.default_rng(0)
    lhs = rng.normal(size=(3, 4, 128)).astype(np.float32) * np.float32([[[1]], [[8]], [[64]]])
    rhs = np.broadcast_to(np.eye(128, dtype=np.float32), (3, 128, 128))
    for tile in (TENSOR, TILE128):
        cast = Cast(format=FORMATS["e4m3"], tile=tile)
        f = functools.partial(einsum, "bmk,bkn->bmn", recipe=Recipe(fwd_x=cast))
        y = jax.jit(f)(lhs, rhs)
        np.testing.assert_allclose(y, reference.apply_cast(lhs, cast, -1), rtol=1e-6)


@pytest.mark.parametrize("name", one_of_each_way())
@pytest.mark.parametrize(("m", "k", "n"), [(1, 128, 1), (0, 8, 4), (4, 0, 3), (5, 8, 0)])
def test_empty_and_one_row_operands(name, m, k, n):
    x, w, g = jnp.ones((m, k)), jnp.ones((k, n)), jnp.ones((m, n))
    recipe = RECIPES[name].current()
    y, dx, dw, _ = run(x, w, g, init_state(recipe), recipe=recipe, backend="emulated")
    # Ones are exact with a power-of-two scale; with 1 / 6 in e4m3 under a float32 one not quite,
    # and under a power of two each is off by e4m3's unit roundoff at most.
    rtol = (
        (1 + 2.0**-4) ** 2 - 1 if isinstance(recipe.fwd_x and recipe.fwd_x.rule, Outer128) else 0.01
    )
    np.testing.assert_allclose(y, np.full((m, n), float(k)), rtol=rtol)
    assert dx.shape == x.shape and dw.shape == w.shape and np.isfinite(dw).all()


@pytest.mark.parametrize("name", in_its_tier(RECIPES))
def test_zero_in_zero_out(name):
    recipe = RECIPES[name]
    x, w, g = jnp.zeros((M, K)), jnp.zeros((K, N)), jnp.zeros((M, N))
    for value in run(x, w, g, init_state(recipe), recipe=recipe, backend="emulated")[:3]:
        assert (np.asarray(value) == 0).all()


@pytest.mark.parametrize("name", one_of_each_way())
def test_eight_devices_equal_one(name):
    """Sharded along tokens and features, amaxes over all devices: the same codes. So results differ
    by the order of float32 sums only, of at most 272 terms on either side."""
    recipe, operands = RECIPES[name], random_operands()
    state = state_for(recipe, operands)
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = {"x": ("a", None), "w": ("b", "a"), "g": ("a", "b")}
    sharded = [
        jax.device_put(operands[k], jax.NamedSharding(mesh, jax.P(*specs[k]))) for k in "xwg"
    ]
    *one, histories = run(*(operands[k] for k in "xwg"), state, recipe=recipe, backend="emulated")
    *eight, sharded_histories = run(*sharded, state, recipe=recipe, backend="emulated")
    for product, got, expected in zip(recipe.gemms, eight, one, strict=True):
        (a, ca), (b, cb) = CONTRACTED[product]
        left = np.abs(as_seen(recipe, f"{product}_{a}", ca))
        right = np.abs(as_seen(recipe, f"{product}_{b}", cb))
        sums = (left if ca == -1 else left.T) @ (right if cb == -2 else right.T)
        assert (np.abs(np.asarray(got) - np.asarray(expected)) <= 2 * 272 * 2.0**-24 * sums).all()
    for operand, history in histories.items():
        np.testing.assert_array_equal(sharded_histories[operand], history)


def test_dgrad_quantizes_the_weight_itself_where_the_forward_does_not():
    """E4M3 has 1 and 9/8: 17/16 + 2^-12 is nearer to the latter, and in bfloat16 a tie."""
    w = jnp.full((8, 2), 17 / 16 + 2.0**-12)
    x, g = jnp.ones((4, 8), jnp.bfloat16), jnp.ones((4, 2), jnp.bfloat16)
    cast = Cast(format=FORMATS["e4m3"], scale=Constant(1.0))
    recipe = Recipe(dgrad_g=cast, dgrad_w=cast)
    (dx,) = jax.jit(
        lambda x, g: jax.vjp(lambda x: dot_general(x, w, MATMUL, recipe=recipe), x)[1](g)
    )(x, g)
    np.testing.assert_array_equal(dx, np.full((4, 8), 2 * 9 / 8))


def test_weights_that_share_an_operand_add_its_gradients_as_jax_does():
    """2^24, 1 and -2^24, whose sum in float32 depends on the order."""
    x, ws = jnp.ones((1, 1)), [jnp.full((1, 1), value) for value in (2.0**24, 1.0, -(2.0**24))]

    def shared(x):
        return [*dot_general_together(x, [*map(Weight, ws)], MATMUL, recipe="bf16")]

    def separate(x):
        return [x @ w for w in ws]

    (got,), (expected,) = (jax.vjp(f, x)[1]([x] * 3) for f in (shared, separate))
    assert got == expected == 1.0


def test_the_gradient_of_x_does_not_depend_on_the_dtype_of_x_where_only_dgrad_casts():
    """The codes are those of the float32 weight, so that only the result is rounded."""
    w = jnp.asarray(random_operands()["w"])
    recipe = Recipe(dgrad_w=Cast(format=FORMATS["e4m3"]))
    g = jnp.ones((1, w.shape[1]), jnp.bfloat16)

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(dtype):
        x = jnp.ones((1, w.shape[0]), dtype)
        return jax.vjp(lambda x: dot_general(x, w, MATMUL, recipe=recipe), x)[1](g.astype(dtype))[0]

    rounded = gradient(jnp.float32).astype(jnp.bfloat16)
    np.testing.assert_array_equal(gradient(jnp.bfloat16), rounded)


def test_cotangents_are_added_from_the_last_to_the_first():
    terms = [jnp.float32(value) for value in (2.0**24, 1.0, -(2.0**24))]
    assert vjp.sum_cotangents(terms) == 1.0 and vjp.sum_cotangents(terms[::-1]) == 0.0


# Randomness and bad input -------------------------------------------------------------------------


def test_stochastic_casts_follow_the_key():
    plain = Cast(format=FORMATS["e4m3"])
    recipe = Recipe(fwd_x=dataclasses.replace(plain, rounding="stochastic"), fwd_w=plain)
    x, w = (jnp.asarray(random_operands()[k]) for k in "xw")
    f = jax.jit(functools.partial(dot_general, x, w, MATMUL, recipe=recipe))
    keys = jax.random.key(0), jax.random.key(1)
    np.testing.assert_array_equal(f(key=keys[0]), f(key=keys[0]))
    assert (f(key=keys[0]) != f(key=keys[1])).any()
    for y in dot_general_together(
        x, [Weight(w, key=key) for key in keys], MATMUL, recipe=recipe, backend="emulated"
    ):  # the first key rounds x for all
        np.testing.assert_array_equal(y, f(key=keys[0]))
    with pytest.raises(ValueError, match="needs a key"):
        f()


def test_the_first_key_rounds_a_shared_x_for_the_gradients_of_all_weights():
    plain = Cast(format=FORMATS["e4m3"])
    recipe = Recipe(wgrad_x=dataclasses.replace(plain, rounding="stochastic"), wgrad_g=plain)
    x, w = (jnp.asarray(random_operands()[k]) for k in "xw")
    g, keys = x @ w, (jax.random.key(0), jax.random.key(1))

    @jax.jit
    def gradients(*keys):
        def shared(w):
            weights = [Weight(w, key=key) for key in keys]
            return dot_general_together(x, weights, MATMUL, recipe=recipe, backend="emulated")

        return jax.vjp(shared, w)[1](tuple(g for _ in keys))[0]

    np.testing.assert_array_equal(gradients(*keys), gradients(keys[0]) * 2)
    assert (gradients(keys[1]) != gradients(keys[0])).any()


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        (dict(recipe="fp8_blok"), ValueError, "fp8_blok.; did you mean .fp8_block"),
        (dict(recipe="bf16", backend="xna"), ValueError, "xna.; did you mean .xla"),
        (dict(recipe="fp8_delayed"), ValueError, r"needs amax histories .*16.* got \{\}"),
        (dict(recipe="bf16", state={"x": jnp.zeros(4)}), ValueError, r"needs amax histories \{\}"),
    ],
)
def test_bad_arguments(kwargs, error, message):
    with pytest.raises(error, match=message):
        dot_general(jnp.ones((2, 4)), jnp.ones((4, 3)), MATMUL, **kwargs)


@pytest.mark.parametrize(
    "equation", ["ab,bc", "ab,bc,cd->ad", "aab,bc->ac", "ab,bc->a", "ab,bc->acz"]
)
def test_equations_that_are_no_product(equation):
    with pytest.raises(ValueError, match="got|letter"):
        einsum(equation, jnp.ones((2, 2)), jnp.ones((2, 2)), recipe="bf16")
