"""What users put around the library: exports of any batch, strict dtypes, mappings, optimizers."""

import collections
import concurrent.futures
import functools
import pickle
import types

import flax.core
import flax.linen as linen
import flax.serialization
import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import checkify

import fp8jax
from fp8jax.gemm.histories.updates import init_update, join, merge, split, update
from fp8jax.gemm.modules import Dense
from fp8jax.nn import HISTORIES

MATMUL = (((1,), (0,)), ((), ()))
(BATCH,) = jax.export.symbolic_shape("B")
K, N = 128, 64
LAYER = Dense(8, "fp8_delayed:history=2")
X = jnp.ones((4, 8))


def loss_of(recipe):
    """A loss of (x, w, histories), whose gradients have all three GEMMs of a recipe."""

    def loss(x, w, state):
        key = jax.random.key(0)
        y = fp8jax.dot_general(x, w, MATMUL, recipe=recipe, state=state, key=key)
        return jnp.sum(y * y)

    return loss


def arguments(recipe, batch):
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((batch, K), (K, N)))
    return x, w, fp8jax.init_state(recipe)


@pytest.mark.parametrize("recipe", fp8jax.RECIPES)
def test_any_batch_size_exports(recipe):
    gradients = jax.jit(jax.grad(loss_of(recipe), (0, 1, 2)))
    exported = jax.export.export(gradients)(*arguments(recipe, BATCH))
    assert exported.in_avals[0].shape == exported.out_avals[0].shape == (BATCH, K)


@pytest.mark.parametrize("batch", [1, 130])
def test_an_export_computes_the_same(batch):
    """The weight gradient has one block of 128 tokens, or two of which the second is padded."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((batch, K), (K, N)))
    gradient = jax.jit(jax.grad(loss_of("fp8_block"), 1))
    exported = jax.export.export(gradient)(*arguments("fp8_block", BATCH))
    np.testing.assert_array_equal(exported.call(x, w, {}), gradient(x, w, {}))


@pytest.mark.parametrize("recipe", fp8jax.RECIPES)
def test_strict_promotion_of_dtypes(recipe):
    with jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(jax.grad(loss_of(recipe), (0, 1, 2)), *arguments(recipe, 16))


# Mappings -----------------------------------------------------------------------------------------


@functools.cache
def trained():
    """Variables of a layer as dicts, and their gradients."""
    variables = LAYER.init(jax.random.key(0), X)
    gradients = jax.jit(jax.grad(lambda v: jnp.sum(LAYER.apply(v, X) ** 2)))(variables)
    return variables, gradients


def ordered(tree):
    """The same in OrderedDicts, the last names first."""
    if not isinstance(tree, dict):
        return tree
    return collections.OrderedDict((name, ordered(tree[name])) for name in reversed(list(tree)))


def defaults(tree):
    if not isinstance(tree, dict):
        return tree
    return collections.defaultdict(dict, {name: defaults(each) for name, each in tree.items()})


MAPPINGS = {"FrozenDict": flax.core.freeze, "OrderedDict": ordered, "defaultdict": defaults}


@pytest.mark.parametrize("kind", MAPPINGS)
def test_mappings_keep_their_type(kind):
    made = MAPPINGS[kind]
    variables, gradients = trained()
    plain = variables
    variables, structure = made(variables), jax.tree.structure(made(variables))
    rest, histories = split(variables)
    assert type(rest) is type(histories) is type(variables)
    joined = join(rest, histories)
    assert jax.tree.structure(dict(joined)) == jax.tree.structure(dict(variables))
    assert type(joined) is type(variables)
    assert split(rest) == (rest, {})
    merged = merge(made(gradients), gradients)
    assert jax.tree.structure(merged) == jax.tree.structure(made(gradients))
    optimizer = optax.sgd(0.1, momentum=0.9)
    expected = update(optimizer, plain, init_update(optimizer, plain), gradients)[0]
    for given in (made(gradients), gradients):  # of the variables' type, and dicts
        state = init_update(optimizer, variables)
        following, state, faults = update(optimizer, variables, state, given)
        assert jax.tree.structure(following) == structure
        for name in ("params", HISTORIES):
            for key, value in expected[name].items():
                np.testing.assert_array_equal(following[name][key], value)
        fp8jax.histories.raise_if(faults)
    # Masks and labels of optimizers are made from the parameters, and have their type.
    mask = jax.tree.map(lambda leaf: leaf.ndim > 1, rest)
    masked = optax.masked(optax.sgd(0.1), mask)
    update(masked, variables, init_update(masked, variables), made(gradients))


def test_a_view_of_a_dict_is_taken_apart():
    rest, histories = split(types.MappingProxyType({"params": {"a": 1}, HISTORIES: {"x": 2}}))
    assert (dict(rest), dict(histories)) == ({"params": {"a": 1}}, {HISTORIES: {"x": 2}})


# Optimizers ---------------------------------------------------------------------------------------


def loss(variables):
    return jnp.sum((LAYER.apply(variables, X) - 1.0) ** 2)


def test_extra_arguments_reach_the_optimizer():
    """Plateaus need the loss, Polyak's step, too; several of them behind MultiSteps and chain."""
    variables, gradients = trained()
    plateau = optax.chain(optax.sgd(1e-3), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
    state = init_update(plateau, variables)
    for value in (1.0, 2.0, 2.0):
        _, state, _ = update(plateau, variables, state, gradients, value=jnp.float32(value))
    assert state.optimizer[1].scale == 0.25
    for optimizer in (optax.polyak_sgd(), optax.MultiSteps(optax.polyak_sgd(), 2)):
        state = init_update(optimizer, variables)
        following, _, faults = update(optimizer, variables, state, gradients, value=4.0)
        fp8jax.histories.raise_if(faults)
        assert jax.tree.structure(following) == jax.tree.structure(variables)


def test_line_searches_see_parameters_alone():
    """L-BFGS evaluates the loss, which takes all variables, at other parameters."""
    variables = LAYER.init(jax.random.key(0), X)
    optimizer = optax.lbfgs(memory_size=2)

    @jax.jit
    def step(variables, state):
        value, gradients = jax.value_and_grad(loss)(variables)
        extra = dict(value=value, grad=gradients, value_fn=loss)
        return value, *update(optimizer, variables, state, gradients, **extra)

    state = init_update(optimizer, variables)
    values = []
    for _ in range(3):
        value, variables, state, faults = step(variables, state)
        fp8jax.histories.raise_if(faults)
        values.append(value.item())
    assert values[2] < 0.1 * values[0]
    assert variables[HISTORIES]["x_amax_history"].tolist() == [1.0, 1.0]


def test_optimizers_without_extra_arguments_say_so():
    variables, gradients = trained()
    optimizer = optax.scale(-0.1)
    with pytest.raises(TypeError, match=r"gradients, state and parameters alone: drop value, rate"):
        state = init_update(optimizer, variables)
        update(optimizer, variables, state, gradients, value=1.0, rate=2.0)


# Ellipses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("equation", "letters", "shapes"),
    [
        ("...k,nk->...n", "abk,nk->abn", [(2, 3, 8), (4, 8)]),
        ("...k,nk->...n", "k,nk->n", [(8,), (4, 8)]),
        ("...bk,...kn->...bn", "ebk,ekn->ebn", [(2, 3, 8), (2, 8, 4)]),
        ("...bk,...kn->b...n", "dbk,edkn->bedn", [(2, 3, 8), (5, 2, 8, 4)]),
        ("k...,kn->n...", "kab,kn->nab", [(8, 2, 3), (8, 4)]),
        ("ak,...->a...", "ak,kn->akn", None),
        ("ak,k...->a...", "ak,knm->anm", [(2, 8), (8, 3, 4)]),
    ],
)
def test_ellipses_stand_for_letters(equation, letters, shapes):
    if shapes is None:  # the contracted axis must have a letter
        with pytest.raises(ValueError, match="each letter must appear in two or all three"):
            fp8jax.einsum(equation, jnp.ones((2, 8)), jnp.ones((8, 3)), recipe="bf16")
        return
    operands = [jnp.ones(shape) for shape in shapes]
    product = functools.partial(fp8jax.einsum, recipe="fp8_current")
    left, right = (
        jax.make_jaxpr(functools.partial(product, each))(*operands) for each in (equation, letters)
    )
    assert str(left) == str(right)
    expected = jnp.einsum(equation, *operands).shape if equation.count("...") > 1 else None
    assert expected is None or left.out_avals[0].shape == expected


# Around a program ---------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [fp8jax.RECIPES, fp8jax.POLICIES], ids=["recipes", "policies"])
def test_recipes_and_policies_are_pickled(table):
    for name, entry in table.items():
        assert pickle.loads(pickle.dumps(entry)) == entry, name


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e8m0", "e2m1"])
def test_codes_keep_their_bits_in_files(name):
    """Of flax's msgpack and of pickle."""
    dtype = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "e8m0": "float8_e8m0fnu"}
    kind = np.dtype(getattr(ml_dtypes, dtype[name] if name in dtype else "float4_e2m1fn"))
    bits = np.arange(16 if name == "e2m1" else 256, dtype=np.uint8)
    codes = bits.view(kind)
    for read in (
        flax.serialization.msgpack_restore(flax.serialization.msgpack_serialize({"x": codes})),
        pickle.loads(pickle.dumps({"x": jnp.asarray(codes)})),
    ):
        found = np.asarray(read["x"])
        assert found.dtype == kind
        np.testing.assert_array_equal(found.view(np.uint8), bits)


def value_of(variables):
    return jax.value_and_grad(loss)(variables)


@pytest.mark.full
@pytest.mark.parametrize("way", ["disable_jit", "leaks", "checkify", "rbg", "remat", "threads"])
def test_ways_to_run_a_step_change_no_bit(way):
    variables = trained()[0]
    expected = jax.jit(value_of)(variables)
    if way == "disable_jit":
        # Not jitted, sums have another order: 8 terms of one sign at most double each rounding.
        with jax.disable_jit():
            found = jax.grad(loss)(variables)
        close = functools.partial(np.testing.assert_allclose, rtol=16 * 2.0**-24, atol=2.0**-20)
        jax.tree.map(close, found, expected[1])
        return
    if way == "leaks":
        with jax.checking_leaks():
            found = jax.jit(lambda v: value_of(v))(variables)
    elif way == "checkify":
        error, found = jax.jit(checkify.checkify(value_of, errors=checkify.float_checks))(variables)
        error.throw()
    elif way == "rbg":
        with jax.default_prng_impl("rbg"):
            found = jax.jit(lambda v: value_of(v))(variables)
    elif way == "remat":
        found = jax.jit(jax.value_and_grad(jax.checkpoint(loss)))(variables)
    else:
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            for found in pool.map(jax.jit(lambda v: value_of(v)), [variables] * 6):
                jax.tree.map(np.testing.assert_array_equal, found, expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.full
def test_a_step_that_is_not_finite_changes_nothing():
    """optax.apply_if_finite, with a branch of cond; and nothing moves a frozen kernel."""
    variables, gradients = trained()
    optimizer = optax.apply_if_finite(optax.sgd(0.1), max_consecutive_errors=3)
    state = init_update(optimizer, variables)
    bad = jax.tree.map(lambda leaf: leaf * jnp.nan, gradients["params"])

    @jax.jit
    def step(variables, state, is_bad):
        given = jax.lax.cond(is_bad, lambda: bad, lambda: gradients["params"])
        return update(optimizer, variables, state, {**gradients, "params": given})[:2]

    same, state = step(variables, state, True)
    jax.tree.map(np.testing.assert_array_equal, same["params"], variables["params"])
    moved, _ = step(variables, state, False)
    assert not np.array_equal(moved["params"]["kernel"], variables["params"]["kernel"])
    labels = {"params": {"kernel": "frozen"}}
    frozen = optax.multi_transform({"frozen": optax.set_to_zero()}, labels)
    still = update(frozen, variables, init_update(frozen, variables), gradients)[0]
    np.testing.assert_array_equal(still["params"]["kernel"], variables["params"]["kernel"])
    assert still[HISTORIES]["x_amax_history"][0] == gradients[HISTORIES]["x_amax_history"][0]


@pytest.mark.full
def test_what_flax_puts_around_a_module():
    assert "Dense" in LAYER.tabulate(jax.random.key(0), X)
    shapes = jax.eval_shape(LAYER.init, jax.random.key(0), X)
    assert shapes["params"]["kernel"].shape == (8, 8)
    bridged = nnx.bridge.lazy_init(nnx.bridge.ToNNX(LAYER, rngs=nnx.Rngs(0)), X)
    assert bridged(X).shape == (4, 8)
    parted = linen.with_partitioning(linen.initializers.lecun_normal(), ("in", "out"))
    boxed = Dense(8, "fp8_delayed:history=2", kernel_init=parted).init(jax.random.key(0), X)
    assert boxed["params"]["kernel"].names == ("in", "out")
