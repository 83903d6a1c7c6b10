"""GEMMs inside `jax.shard_map`, on eight devices: the same as on one, for each way to shard."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from fp8jax.gemm.dot import dot_general, dot_general_together
from fp8jax.gemm.histories.amax_history import init_state
from fp8jax.gemm.weight import Weight
from fp8jax.numerics.names import as_recipe

P = PartitionSpec
MATMUL = (((1,), (0,)), ((), ()))
# How x [M, K], w [K, N] and y [M, N] lie on the mesh; the axes over which y must be summed.
SHARDINGS = {
    "data": (P("data"), P(), P("data"), ()),
    "data over both axes": (P(("data", "tensor")), P(), P(("data", "tensor")), ()),
    "columns of w": (P(), P(None, "tensor"), P(None, "tensor"), ()),
    "data and columns": (P("data"), P(None, "tensor"), P("data", "tensor"), ()),
    "nothing": (P(), P(), P(), ()),
}
# The last ones have several scales or a stochastic cast, and local amaxes.
RECIPES = (
    "bf16",
    "fp8_delayed",
    "fp8_delayed:amax=newest",
    "fp8_current",
    "fp8_cscale",
    "fp8_rowwise",
    "fp8_block",
)


def mesh():
    return jax.make_mesh((2, 4), ("data", "tensor"), (AxisType.Auto,) * 2)


def small(shape, largest):
    """Small integers; every fourth number of each row and column is ±`largest`.

    With largest = 7 * 2^k every scale is a power of two: sums are exact, in any order.
    """
    rng = np.random.default_rng(0)
    diagonal = sum(np.indices(shape))
    signs = rng.choice([-1.0, 1.0], shape)
    return jnp.asarray(
        signs * np.where(diagonal % 4, rng.integers(0, 3, shape), largest), jnp.float32
    )


@functools.cache
def arrays():
    """x [M, K] and w [K, N]; K and N are several blocks of 128."""
    return small((32, 256), 7.0), small((256, 512), 7.0)


def histories_of(recipe, value=0.0):
    return jax.tree.map(lambda h: jnp.asarray(np.full(h.shape, value, h.dtype)), init_state(recipe))


def results(product, x, w, state):
    """y, and the gradients of a loss; y's cotangents are small integers."""

    def loss(x, w, state):
        y = product(x, w, state)
        return jnp.sum(small(y.shape, 3.5) * y), y

    (_, y), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(x, w, state)
    return y, *grads


def product_of(recipe, seeded):
    product = functools.partial(
        dot_general, dimension_numbers=MATMUL, recipe=as_recipe(recipe), seeded=seeded
    )
    return lambda x, w, state: product(x, w, state=state)


@functools.cache
def on_one_device(recipe, seeded):
    state = histories_of(as_recipe(recipe), 7.0 if seeded else 0.0)
    return state, results(product_of(recipe, seeded), *arrays(), state)


CASES = [(recipe, False) for recipe in RECIPES] + [(recipe, True) for recipe in RECIPES[1:3]]


def tier(case, sharding):
    """Every recipe where x and w are cut, every sharding where amaxes are found over the mesh, and
    one axis at a time where they are not; the other pairs are in the full tier."""
    kept = sharding == "data and columns" or case == ("fp8_delayed", False)
    kept |= case == ("fp8_block", False) and sharding in ("data", "columns of w")
    return () if kept else pytest.mark.full


@pytest.mark.parametrize(
    ("recipe", "seeded", "sharding"),
    [
        pytest.param(*case, sharding, marks=tier(case, sharding))
        for sharding in SHARDINGS
        for case in CASES
    ],
)
def test_eight_devices_equal_one(recipe, seeded, sharding):
    """Sums are exact in any order, so that results agree to the bit."""
    spec_x, spec_w, spec_y, _ = SHARDINGS[sharding]
    state, one = on_one_device(recipe, seeded)
    eight = jax.shard_map(
        product_of(recipe, seeded),
        mesh=mesh(),
        in_specs=(spec_x, spec_w, P()),
        out_specs=spec_y,
        check_vma=True,
    )
    for got, right in zip(results(eight, *arrays(), state), one, strict=True):
        jax.tree.map(np.testing.assert_array_equal, got, right)


def test_a_split_contracting_axis_sums_to_the_whole():
    """The parts of y are added after the GEMM; histories hold the amaxes of the whole operands."""
    recipe = as_recipe("fp8_delayed")
    x, w = arrays()
    product = functools.partial(dot_general, dimension_numbers=MATMUL, recipe=recipe)
    parts = jax.shard_map(
        lambda x, w, state: jax.lax.psum(product(x, w, state=state), "tensor"),
        mesh=mesh(),
        in_specs=(P(None, "tensor"), P("tensor"), P()),
        out_specs=P(),
    )
    state = histories_of(recipe, 7.0)
    one = lambda x, w, state: product(x, w, state=state)  # noqa: E731
    for got, right in zip(results(parts, x, w, state), results(one, x, w, state), strict=True):
        jax.tree.map(np.testing.assert_array_equal, got, right)


def test_each_expert_has_its_own_scale_and_history():
    recipe = as_recipe("fp8_delayed:history=4")
    x, w = arrays()
    x_EMK = jnp.stack([x, 10 * x, 100 * x, 1000 * x])
    w_EKN = jnp.stack([w, 2 * w, 3 * w, 4 * w])
    state = jax.tree.map(lambda h: jnp.stack([h] * 4), histories_of(recipe))
    product = functools.partial(dot_general, dimension_numbers=MATMUL, recipe=recipe)

    def expert(x, w, state):
        return product(x[0], w[0], state=jax.tree.map(lambda h: h[0], state))[None]

    axis = jax.make_mesh((4,), ("expert",), (AxisType.Auto,), devices=jax.devices()[:4])
    experts = jax.shard_map(
        expert, mesh=axis, in_specs=(P("expert"), P("expert"), P("expert")), out_specs=P("expert")
    )
    _, dx, dw, new = results(experts, x_EMK, w_EKN, state)
    assert dx.shape == x_EMK.shape and dw.shape == w_EKN.shape
    np.testing.assert_array_equal(new["x"][:, 0], jnp.abs(x_EMK).max((1, 2)))
    np.testing.assert_array_equal(new["w"][:, 0], jnp.abs(w_EKN).max((1, 2)))


def test_gradients_inside_the_body_are_merged_already():
    recipe = as_recipe("fp8_delayed:history=4")
    x, w = arrays()

    def loss(w, state, x):
        return jnp.sum(1.75 * dot_general(x, w, MATMUL, recipe=recipe, state=state))

    inside = jax.shard_map(
        jax.grad(loss, argnums=(0, 1)), mesh=mesh(), in_specs=(P(), P(), P("data")), out_specs=P()
    )
    got = jax.jit(inside)(w, histories_of(recipe), x)
    right = jax.jit(jax.grad(loss, argnums=(0, 1)))(w, histories_of(recipe), x)
    jax.tree.map(np.testing.assert_array_equal, got, right)


def test_without_check_vma_histories_are_refused_and_current_scaling_is_right():
    x, w = arrays()
    for recipe, refused in (("fp8_delayed", True), ("fp8_block", False)):
        recipe = as_recipe(recipe)
        product = functools.partial(dot_general, dimension_numbers=MATMUL, recipe=recipe)
        one = lambda x, w, state, f=product: f(x, w, state=state)  # noqa: E731
        eight = jax.shard_map(
            one, mesh=mesh(), in_specs=(P("data"), P(), P()), out_specs=P("data"), check_vma=False
        )
        if refused:
            with pytest.raises(NotImplementedError, match="use jax.shard_map with check_vma=True"):
                results(eight, x, w, histories_of(recipe))
            continue
        for got, right in zip(results(eight, x, w, {}), results(one, x, w, {}), strict=True):
            jax.tree.map(np.testing.assert_array_equal, got, right)


def test_weights_of_one_x_must_be_sharded_alike():
    def both(x, one, other):
        return dot_general_together(x, (Weight(one), Weight(other)), MATMUL, recipe="fp8_current")

    x, w = arrays()
    with pytest.raises(ValueError, match="must vary over the same mesh axes, got .*'tensor'"):
        jax.shard_map(
            both, mesh=mesh(), in_specs=(P(), P(None, "tensor"), P()), out_specs=P(None, "tensor")
        )(x, w, w)
