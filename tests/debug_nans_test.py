"""`jax_debug_nans`: finite data raises nothing, and a NaN is blamed on the operation that made it.

A constant NaN, as in `jnp.where(finite, scale, jnp.nan)`, would be the first NaN of each program.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax.kernels import quantize as kernels
from fp8jax.lm.optim.optimizers import OPTIMIZERS
from fp8jax.lm.stability.spikes import SpikeDetector, judge
from fp8jax.lm.training.build import build
from fp8jax.lm.training.programs import abstract_batch, abstract_numbers
from fp8jax.numerics.formats import FORMATS, nan_unless, power_of_two_below
from fp8jax.numerics.recipes import RECIPES
from fp8jax.numerics.scales import SCALES
from tests.support.interpreter import allowed, needs_pallas
from tests.support.runs import tiny

SHAPE = (4, 32)
KEY = jax.random.key(0)


def arrays():
    numbers = np.random.default_rng(0)
    return tuple(jnp.asarray(numbers.normal(size=s), jnp.float32) for s in (SHAPE, SHAPE[::-1]))


def product(recipe, x, w):
    """A function of (x, w, histories) to the sum of squares of their product, and histories."""
    key = KEY if RECIPES[recipe].stochastic else None
    state = fp8jax.init_state(recipe)

    def loss(x, w, state):
        y = fp8jax.einsum("mk,kn->mn", x, w, recipe=recipe, state=state or None, key=key)
        return jnp.sum(y**2)

    return loss, state


# Constants ----------------------------------------------------------------------------------------


def nan_constants(jaxpr) -> list[str]:
    """Returns the equations of a traced program, and of all inside, that read a constant NaN."""
    found = []
    inner = jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr
    constants = dict(zip(inner.constvars, getattr(jaxpr, "consts", ()), strict=False))
    for eqn in inner.eqns:
        for x in eqn.invars:
            is_literal = isinstance(x, jax.extend.core.Literal)
            value = x.val if is_literal else constants[x] if x in constants else None
            if is_nan(value):
                found.append(f"{eqn.primitive} of {eqn.source_info.traceback}")
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns")):
            if hasattr(value, "eqns"):
                found += nan_constants(value)
    return found


def is_nan(value) -> bool:
    """Whether a constant, which may be a reference of a kernel, has a NaN."""
    if isinstance(value, jax.core.Tracer):
        return False
    if not isinstance(value, float | np.generic | np.ndarray | jax.Array):
        return False
    if not jnp.issubdtype(jnp.result_type(value), jnp.inexact):
        return False
    return bool(np.isnan(np.asarray(value).astype(np.float32)).any())


def traced(f, *args, **options):
    return nan_constants(jax.make_jaxpr(functools.partial(f, **options))(*args))


def test_constants_are_found_wherever_they_stand():
    def inside(x):
        return jax.lax.scan(lambda c, _: (jnp.where(c > 0, c, jnp.nan), None), x, None, length=2)[0]

    constant = np.array([1.0, np.nan], np.float32)
    assert len(traced(inside, 1.0)) == len(traced(lambda x: x + constant, 1.0)) == 1
    assert len(traced(jax.jit(lambda x: jnp.where(x > 0, x, jnp.nan)), 1.0)) == 1
    assert not traced(lambda x: jnp.where(x > 0, x, jnp.inf), 1.0)
    assert not traced(nan_unless, x=jnp.ones(2), sound=jnp.ones(2, bool))


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_block_ue8m0"])
def test_no_gemm_has_a_constant_nan(recipe):
    check_gemm(recipe)


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_gemm_of_all_has_a_constant_nan(recipe):
    check_gemm(recipe)


def check_gemm(recipe):
    x, w = arrays()
    loss, state = product(recipe, x, w)
    assert not traced(jax.value_and_grad(loss, (0, 1, 2)), x, w, state)


def test_no_cast_and_no_scale_has_a_constant_nan():
    x = jnp.ones((4, 256))
    for name in FORMATS:
        assert not traced(fp8jax.cast, x, fmt=name)
    for rule in SCALES:
        if rule != "eden":  # which transforms x; recipes have it
            tile = "tensor" if rule == "mse" else "nv16"
            assert not traced(fp8jax.quantize, x, fmt="e2m1", tile=tile, scale=rule)
    assert not traced(lambda amax: fp8jax.quantize(x, "e4m3", "tensor", amax=amax), 1.0)
    assert not traced(power_of_two_below, x)
    assert not traced(fp8jax.dequantize, fp8jax.quantize(x, "e4m3", "tensor"))


@needs_pallas
def test_no_kernel_has_a_constant_nan():
    x, fmt = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16), FORMATS["e4m3"]
    with allowed(cores=132):
        for rule in (SCALES["fp32"], SCALES["e8m0"]):
            assert not traced(kernels.quantize_tiles, x, fmt=fmt, rule=rule)
            assert not traced(kernels.quantize_blocks, x, fmt=fmt, rule=rule, transposed=True)


def test_no_verdict_has_a_constant_nan():
    detector = SpikeDetector(window=8, deviations=6.0)
    assert not traced(functools.partial(judge, detector), detector.init(), 1.0, 1.0)
    assert not np.isnan(detector.init()["losses"]).any()


@pytest.mark.full
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_training_step_has_a_constant_nan(data, optimizer):
    """With all that a step can have: spikes, GNMR, moments and gradients in FP8."""
    run = build(
        tiny(
            data,
            precision="fp8_delayed",
            optimizer__name=optimizer,
            optimizer__weight_decay=0.0,
            recovery__spike_window=8,
        )
    )
    stage, batch = run.stages[0], abstract_batch(run, run.settings.batch_size)
    for name in ("seed_step", "step", "eval_step"):
        numbers = () if name == "eval_step" else (abstract_numbers(run, stage),)
        with jax.set_mesh(run.mesh):
            program = getattr(stage.programs, name).trace(stage.state, batch, *numbers)
        assert not nan_constants(program.jaxpr)


# With jax_debug_nans ------------------------------------------------------------------------------


BLAMED = r"\(nan\) encountered in sqrt"


def test_finite_data_raises_nothing_and_a_nan_is_blamed_on_what_made_it():
    check_blame("fp8_current")


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_nan_is_blamed_on_what_made_it_with_all_recipes(recipe):
    check_blame(recipe)
    check_blame(recipe, lambda loss: jax.grad(loss, (0, 1)))


def check_blame(recipe, transform=lambda loss: loss):
    """At once and jitted; the NaN comes after the GEMM: the root of -1."""
    x, w = arrays()
    loss, state = product(recipe, x, w)

    def root(*args):
        return jnp.sqrt(-loss(*args))

    with jax.debug_nans(True):
        jax.block_until_ready(loss(x, w, state))
        jax.block_until_ready(jax.jit(transform(loss))(x, w, state))
        with pytest.raises(FloatingPointError, match=BLAMED):
            jax.jit(transform(root))(x, w, state)
