"""The quantised product and its gradients: exact by construction, and within derived bounds.

One suite for every recipe under every backend that claims it; the others must raise.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fp8jax import dot, runtime
from fp8jax.dot import BACKENDS, dot_general, einsum, init_state
from fp8jax.formats import FORMATS
from fp8jax.recipe import RECIPES, Cast, Recipe
from fp8jax.scaling import ROW, TENSOR, TILE128
from tests import reference

MATMUL = (((1,), (0,)), ((), ()))
# No tile of 128 divides these; with 128-tiles each axis has two or three of them.
M, K, N = 136, 264, 144
_ROW = Cast(format=FORMATS["e4m3"], tile=ROW)
CASES = {
    **RECIPES,
    "per_row": Recipe(
        fwd_x=_ROW, fwd_w=_ROW, dgrad_g=_ROW, dgrad_w=_ROW, wgrad_x=_ROW, wgrad_g=_ROW
    ),
}
PAIRS = [
    (case, backend)
    for case in CASES
    for backend in BACKENDS
    if BACKENDS[backend].refuses(CASES[case]) is None
]
REFUSED = [(r, b) for r in RECIPES for b in BACKENDS if (r, b) not in PAIRS]
# Product -> its operands as (cast, contracting axis of the canonical operand).
CONTRACTED = {
    "fwd": (("x", -1), ("w", -2)),
    "dgrad": (("g", -1), ("w", -1)),
    "wgrad": (("x", -2), ("g", -2)),
}
SHAPES = {"x": (M, K), "w": (K, N), "g": (M, N)}


def state_for(recipe: Recipe, operands: dict[str, np.ndarray]):
    """Histories that hold the present amaxes (the newest slot), as in a steady state."""
    state = init_state(recipe)
    return {
        k: h.at[0].set(np.abs(operands[k]).max()) if np.abs(operands[k]).max() else h
        for k, h in state.items()
    }


@functools.partial(jax.jit, static_argnames=("recipe", "backend"))
def run(x, w, g, state, *, recipe: Recipe, backend: str):
    """y, dx, dw, the new state."""
    f = functools.partial(dot_general, dimension_numbers=MATMUL, recipe=recipe, backend=backend)
    y, vjp = jax.vjp(lambda x, w, s: f(x, w, state=s), x, w, state)
    return y, *vjp(g)


def float_products(x, w, g) -> dict[str, np.ndarray]:
    x, w, g = (np.asarray(a, np.float64) for a in (x, w, g))
    return {"fwd": x @ w, "dgrad": g @ w.T, "wgrad": x.T @ g}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("product", CONTRACTED)
@pytest.mark.parametrize(("name", "backend"), PAIRS)
def test_exact_on_representable_operands(name, backend, product, dtype):
    """Every code is hit exactly and every scale is a power of two, so the only rounding left is
    that of the result to its dtype: float32 holds it (checked below)."""
    recipe = CASES[name]
    rng = np.random.default_rng(1)
    operands = {k: rng.integers(-3, 4, s).astype(np.float32) for k, s in SHAPES.items()}
    casts = recipe.products[product]
    unit = 1.0
    for cast, (operand, axis) in zip(casts, CONTRACTED[product], strict=True):
        operands[operand] = reference.pinned(rng, SHAPES[operand], cast, axis)
        unit *= {None: 1, "e4m3": 0.5, "e5m2": 64, "e2m1": 0.25}[cast and cast.format.name]
    (a, ca), (b, cb) = CONTRACTED[product]
    left = np.abs(operands[a]) if ca == -1 else np.abs(operands[a]).T
    right = np.abs(operands[b]) if cb == -2 else np.abs(operands[b]).T
    assert (left @ right).max() / unit < 2**24  # float32 sums of such terms are exact

    x, w, g = (jnp.asarray(operands[k]) for k in "xwg")
    y, dx, dw, _ = run(
        x.astype(dtype), w, g.astype(dtype), state_for(recipe, operands),
        recipe=recipe, backend=backend,
    )  # fmt: skip
    got = {"fwd": y, "dgrad": dx, "wgrad": dw}[product]
    expected = float_products(x, w, g)[product].astype(np.float32)
    assert got.dtype == {"fwd": dtype, "dgrad": dtype, "wgrad": jnp.float32}[product]
    np.testing.assert_array_equal(
        np.asarray(got, np.float32), np.asarray(jnp.asarray(expected).astype(got.dtype), np.float32)
    )


def random_operands(seed=0):
    """Normal data of unlike scales: nothing is near 1, and gradients are as small as they are."""
    rng = np.random.default_rng(seed)
    sigma = {"x": 3.0, "w": 0.02, "g": 1e-5}
    return {k: (rng.normal(size=s) * sigma[k]).astype(np.float32) for k, s in SHAPES.items()}


@pytest.mark.parametrize(("name", "backend"), PAIRS)
def test_products_are_those_of_the_reference_quantisers(name, backend):
    """y, dx and dw equal the products of operands quantised by tests/reference.py.

    Bound: both sides multiply the same numbers, so what differs is float32 accumulation over at
    most 264 terms, 264 * 2^-24 relative to the sum of magnitudes, and the rounding of a scale.
    """
    recipe, operands = CASES[name], random_operands()
    x, w, g = (operands[k] for k in "xwg")
    y, dx, dw, _ = run(x, w, g, state_for(recipe, operands), recipe=recipe, backend=backend)
    got = {"fwd": y, "dgrad": dx, "wgrad": dw}
    for product, casts in recipe.products.items():
        (a, ca), (b, cb) = CONTRACTED[product]
        left = reference.apply_cast(operands[a], casts.lhs, ca)
        right = reference.apply_cast(operands[b], casts.rhs, cb)
        left = left if ca == -1 else left.T
        right = right if cb == -2 else right.T
        bound = (264 + 4) * 2.0**-24 * (np.abs(left) @ np.abs(right))
        assert (np.abs(np.asarray(got[product], np.float64) - left @ right) <= bound).all()


@pytest.mark.parametrize(("name", "backend"), PAIRS)
def test_error_is_what_the_roundings_imply(name, backend):
    """With independent roundings of relative size r and s (root mean square), the product of two
    operands is off by sqrt(r^2 + s^2) in Frobenius norm; both are measured on the operands.
    Two-sided, within 10%: an operand that is silently not quantised fails too."""
    recipe, operands = CASES[name], random_operands(2)
    x, w, g = (operands[k] for k in "xwg")
    y, dx, dw, _ = run(x, w, g, state_for(recipe, operands), recipe=recipe, backend=backend)
    exact = float_products(x, w, g)
    for product, got in {"fwd": y, "dgrad": dx, "wgrad": dw}.items():
        roundings = []
        for cast, (operand, axis) in zip(
            recipe.products[product], CONTRACTED[product], strict=True
        ):
            value = operands[operand]
            rounded = reference.apply_cast(value, cast, axis)
            roundings.append(np.linalg.norm(rounded - value) / np.linalg.norm(value))
            if cast is not None:
                assert roundings[-1] > 0.3 * cast.format.unit_roundoff
        expected = np.hypot(*roundings)
        error = np.linalg.norm(got - exact[product]) / np.linalg.norm(exact[product])
        assert abs(error - expected) <= 0.1 * expected + 264 * 2.0**-24


@pytest.mark.parametrize(("name", "backend"), REFUSED)
def test_a_backend_that_cannot_do_a_recipe_says_why(name, backend):
    with pytest.raises(NotImplementedError, match=f"{backend}.*{name}.*: "):
        dot_general(
            jnp.ones((2, 4)), jnp.ones((4, 3)), MATMUL, recipe=name, backend=backend,
            state=init_state(name),
        )  # fmt: skip


def test_the_table_of_backends_is_as_documented():
    assert {r for r, b in PAIRS if b == "emulated"} == set(CASES)
    assert {r for r, b in PAIRS if b == "xla"} == {"bf16", "fp8_delayed", "fp8_current", "per_row"}


def test_no_backend_given_takes_one_that_can(monkeypatch):
    assert dot.choose_backend(None, RECIPES["fp8_delayed"]).name == "emulated"  # a CPU
    monkeypatch.setattr(runtime, "has_fp8_matmul", lambda: True)
    assert dot.choose_backend(None, RECIPES["fp8_delayed"]).name == "xla"
    assert dot.choose_backend(None, RECIPES["fp8_block"]).name == "emulated"
    monkeypatch.setattr(runtime, "platform", lambda: "gpu")
    monkeypatch.setattr(runtime, "has_fp8_matmul", lambda: False)
    assert "no FP8 matrix unit" in BACKENDS["xla"].refuses(RECIPES["fp8_current"])


def test_xla_refuses_mixed_products_and_e5m2_by_e5m2():
    e4m3, e5m2 = Cast(format=FORMATS["e4m3"]), Cast(format=FORMATS["e5m2"])
    refuses = BACKENDS["xla"].refuses
    assert "high-precision operand" in refuses(Recipe(fwd_x=e4m3))
    assert "e5m2 by e5m2" in refuses(Recipe(fwd_x=e5m2, fwd_w=e5m2))
    assert "4-bit" in refuses(Recipe(fwd_x=Cast(format=FORMATS["e2m1"]), fwd_w=e4m3))


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


@pytest.mark.parametrize("name", [r for r in RECIPES if r != "bf16"])
def test_an_overflow_in_the_source_never_hides(name):
    recipe, operands = RECIPES[name], random_operands()
    operands["x"][3, 4] = np.inf
    y, _, dw, _ = run(*(operands[k] for k in "xwg"), state_for(recipe, random_operands()),
                      recipe=recipe, backend="emulated")  # fmt: skip
    assert not np.isfinite(np.asarray(y)[3]).any() and not np.isfinite(np.asarray(dw)[4]).any()


def test_seeding_takes_the_current_amax_and_writes_histories():
    recipe, operands = RECIPES["fp8_delayed"], random_operands()
    operands["g"] *= 0.1  # all below half of e5m2's smallest number, 2^-17
    args = [operands[k] for k in "xwg"]
    empty = init_state(recipe)
    seeded = run(*args, empty, recipe=recipe.seeding(), backend="xla")
    current = run(*args, {}, recipe=RECIPES["fp8_current"], backend="xla")
    for a, b in zip(seeded[:3], current[:3], strict=True):
        np.testing.assert_array_equal(a, b)
    assert all(seeded[3][k][0] == np.abs(operands[k]).max() for k in "xwg")
    # What it is for: with an empty history the scale is 1 and every gradient is flushed to zero.
    _, dx, dw, _ = run(*args, empty, recipe=recipe, backend="xla")
    assert (np.asarray(dx) == 0).all() and (np.asarray(dw) == 0).all()
    assert (np.asarray(seeded[1]) != 0).all() and (np.asarray(seeded[2]) != 0).all()


# Lowering -----------------------------------------------------------------------------------------


def float8_products(jaxpr) -> int:
    """dot_generals with two float8 operands, nested jaxprs included."""
    count = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive is lax.dot_general_p:
            count += all(v.aval.dtype.itemsize == 1 for v in eqn.invars)
        for sub in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")
        ):
            inner = getattr(sub, "jaxpr", sub)
            if hasattr(inner, "eqns"):
                count += float8_products(inner)
    return count


@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_current"])
def test_xla_makes_exactly_three_float8_products(name):
    recipe, operands = RECIPES[name], random_operands()
    args = (*(operands[k] for k in "xwg"), init_state(recipe))
    jaxpr = jax.make_jaxpr(functools.partial(run, recipe=recipe, backend="xla"))(*args)
    assert float8_products(jaxpr.jaxpr) == 3


@pytest.mark.parametrize("name", [r for r in RECIPES if r != "bf16"])
def test_no_high_precision_activation_is_a_residual(name):
    """x is bfloat16, two bytes an element: what is kept of it has one. w is kept as it came."""
    recipe = RECIPES[name]
    x, w = jnp.ones((M, K), jnp.bfloat16), jnp.ones((K, N), jnp.float32)
    f = functools.partial(dot_general, dimension_numbers=MATMUL, recipe=recipe, backend="emulated")
    _, vjp = jax.vjp(lambda x, w: f(x, w, state=init_state(recipe)), x, w)
    kept = [leaf for leaf in jax.tree.leaves(vjp) if hasattr(leaf, "size") and leaf.size >= M * K]
    assert [leaf.dtype.itemsize for leaf in kept if leaf.shape == (M, K)] == [1]
    assert all(leaf.shape in ((M, K), (K, N)) for leaf in kept)


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
    for value, exact in zip(got, float_products(x, w, g).values(), strict=True):
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
    ours, vjp = jax.vjp(lambda a, b: einsum(equation, a, b, recipe="bf16"), lhs, rhs)
    theirs, their_vjp = jax.vjp(lambda a, b: jnp.einsum(equation, a, b), lhs, rhs)
    np.testing.assert_array_equal(ours, theirs)
    g = jnp.asarray(rng.integers(-4, 5, ours.shape), jnp.float32)
    for a, b in zip(vjp(g), their_vjp(g), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_batched_tensor_has_one_scale_per_tensor_and_one_each_per_tile():
    rng = np.random.default_rng(0)
    lhs = rng.normal(size=(3, 4, 128)).astype(np.float32) * np.float32([[[1]], [[8]], [[64]]])
    rhs = np.broadcast_to(np.eye(128, dtype=np.float32), (3, 128, 128))
    for tile in (TENSOR, TILE128):
        cast = Cast(format=FORMATS["e4m3"], tile=tile)
        y = einsum("bmk,bkn->bmn", jnp.asarray(lhs), jnp.asarray(rhs), recipe=Recipe(fwd_x=cast))
        np.testing.assert_allclose(y, reference.apply_cast(lhs, cast, -1), rtol=1e-6)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("m", "k", "n"), [(1, 128, 1), (0, 8, 4), (4, 0, 3), (5, 8, 0)])
def test_empty_and_one_row_operands(name, m, k, n):
    x, w, g = jnp.ones((m, k)), jnp.ones((k, n)), jnp.ones((m, n))
    recipe = RECIPES[name].seeding()
    y, dx, dw, _ = run(x, w, g, init_state(recipe), recipe=recipe, backend="emulated")
    np.testing.assert_allclose(y, np.full((m, n), float(k)), rtol=0.01)
    assert dx.shape == x.shape and dw.shape == w.shape and np.isfinite(dw).all()


@pytest.mark.parametrize("name", RECIPES)
def test_zero_in_zero_out(name):
    recipe = RECIPES[name]
    x, w, g = jnp.zeros((M, K)), jnp.zeros((K, N)), jnp.zeros((M, N))
    for value in run(x, w, g, init_state(recipe), recipe=recipe, backend="emulated")[:3]:
        assert (np.asarray(value) == 0).all()


# Randomness and bad input -------------------------------------------------------------------------


def test_stochastic_casts_follow_the_key():
    plain = Cast(format=FORMATS["e4m3"])
    recipe = Recipe(fwd_x=dataclasses.replace(plain, rounding="stochastic"), fwd_w=plain)
    x, w = (jnp.asarray(random_operands()[k]) for k in "xw")
    f = functools.partial(dot_general, x, w, MATMUL, recipe=recipe)
    np.testing.assert_array_equal(f(key=jax.random.key(0)), f(key=jax.random.key(0)))
    assert (f(key=jax.random.key(0)) != f(key=jax.random.key(1))).any()
    with pytest.raises(ValueError, match="needs a key"):
        f()


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        (dict(recipe="fp8_blok"), ValueError, "fp8_blok.; did you mean .fp8_block"),
        (dict(recipe="bf16", backend="xna"), ValueError, "xna.; did you mean .xla"),
        (dict(recipe="fp8_delayed"), ValueError, r"keeps amax histories .*16.* got \{\}"),
        (dict(recipe="bf16", state={"x": jnp.zeros(4)}), ValueError, r"keeps amax histories \{\}"),
    ],
)  # fmt: skip
def test_bad_arguments(kwargs, error, message):
    with pytest.raises(error, match=message):
        dot_general(jnp.ones((2, 4)), jnp.ones((4, 3)), MATMUL, **kwargs)


@pytest.mark.parametrize(
    "equation", ["ab,bc", "ab,bc,cd->ad", "aab,bc->ac", "ab,bc->a", "ab,bc->acz"]
)
def test_equations_that_are_no_product(equation):
    with pytest.raises(ValueError, match="got|letter"):
        einsum(equation, jnp.ones((2, 2)), jnp.ones((2, 2)), recipe="bf16")
