"""What runs in FP8, for programs of models that are not this library's."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import fp8jax
from fp8jax.analysis.gemms import Fp8FallbackError, find_gemms
from fp8jax.device import hardware
from fp8jax.gemm.backends import choice as backends
from fp8jax.numerics.names import as_recipe
from fp8jax.numerics.policy import POLICIES
from tests.support.stored_hlo import H200, STORED, stored


class Network(nn.Module):
    recipe: object

    @nn.compact
    def __call__(self, x):
        product = functools.partial(fp8jax.nn.Fp8DotGeneral, self.recipe)
        x = nn.relu(nn.Dense(64, dot_general_cls=product, name="up")(x))
        return nn.Dense(8, dot_general_cls=product, name="down")(x)


@functools.cache
def compiled(recipe):
    model, x = Network(recipe), jnp.ones((16, 32))
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    grad = jax.grad(lambda v, x: jnp.sum(model.apply(v, x) ** 2))
    return jax.jit(grad).lower(variables, x).compile()


OWN = fp8jax.Recipe(
    name="my own",
    fwd_x=fp8jax.Cast(format=fp8jax.FORMATS["e5m2"]),
    fwd_w=fp8jax.Cast(format=fp8jax.FORMATS["e4m3"]),
)


@pytest.mark.parametrize("recipe", ["fp8_delayed:history=4", "fp8_block", OWN])
def test_every_gemm_of_stock_modules_is_found_by_name(recipe):
    gemms = [g for g in fp8jax.gemms(compiled(recipe), recipes=[OWN]) if g.role is not None]
    # The input of the first layer needs no gradient.
    roles = {(module, role) for module in ("up", "down") for role in ("fwd", "dgrad", "wgrad")}
    seen = {(g.module.split("/")[0], g.role) for g in gemms}
    assert seen == roles - {("up", "dgrad")} and len(gemms) == 5
    assert {g.recipe for g in gemms} == {recipe if isinstance(recipe, str) else recipe.name}
    for g in gemms:
        wanted = recipe is not OWN or g.role == "fwd"
        assert (g.reason is not None) == wanted and not g.fp8
    assert "backend: emulated; cpu has no FP8" in " ".join(fp8jax.gemm_table(gemms).split())


def test_a_program_that_is_not_compiled_is_refused():
    f = jax.jit(lambda x, w: fp8jax.einsum("mk,kn->mn", x, w, recipe="fp8_current"))
    x, w = jnp.ones((16, 32)), jnp.ones((32, 16))
    for program in (f, f.lower(x, w)):
        for read in (fp8jax.gemms, fp8jax.assert_fp8):
            with pytest.raises(
                TypeError, match=r"expected a compiled program, .*\.compile\(\), got"
            ):
                read(program)


def test_a_recipe_of_ones_own_must_be_given():
    with pytest.raises(ValueError, match="unknown recipe 'my own'"):
        fp8jax.gemms(compiled(OWN))


def test_a_program_that_falls_back_is_refused():
    with pytest.raises(Fp8FallbackError, match="(?s)5 GEMMs of the program .* emulated"):
        fp8jax.assert_fp8(compiled("fp8_delayed:history=4"))
    with pytest.raises(AssertionError, match="at least one FP8 GEMM in modules 'head', got 0"):
        fp8jax.assert_fp8(compiled("fp8_delayed:history=4"), "head")
    plain = jax.jit(lambda x: x @ x).lower(jnp.ones((16, 16))).compile()
    with pytest.raises(AssertionError, match="got 0; modules with quantized GEMMs: none"):
        fp8jax.assert_fp8(plain)


@pytest.mark.parametrize("name", ["h200_delayed", "h200_llama_delayed", "h200_rowwise"])
def test_programs_of_a_gpu_are_judged_as_with_their_policy(name):
    policy, layers, roles = STORED[name]
    text = stored(name)
    ours = fp8jax.gemms(text, device=H200)
    with_policy = find_gemms(text, POLICIES[policy], device=H200)
    assert {(g.module, g.role, g.fp8, g.reason) for g in ours} == {
        (g.module, g.role, g.fp8, g.reason) for g in with_policy if g.kernel != "none"
    }
    fp8 = sum(g.count for g in ours if g.fp8)
    assert fp8 == layers * len(roles)
    fp8jax.assert_fp8(text, "layers/*", count=fp8, device=H200)
    with pytest.raises(AssertionError, match=f"expected {fp8 + 1} FP8 GEMMs .* got {fp8}"):
        fp8jax.assert_fp8(text, "layers/*", count=fp8 + 1, device=H200)
    with pytest.raises(Fp8FallbackError, match="A100 has no FP8 matrix unit|emulated"):
        fp8jax.assert_fp8(text, device=hardware.Device("gpu", "NVIDIA A100", (8, 0)))


def test_one_is_warned_once_where_another_jax_would_run_the_kernels(monkeypatch, caplog):
    monkeypatch.setattr(backends.hardware, "device", lambda: H200)
    pallas = backends.BACKENDS["pallas"]
    for missing, lines in (("the kernels need jax 0.11 or later", 1), (None, 0)):
        backends._warn_slow.cache_clear()
        without = backends.dataclasses.replace(pallas, missing=lambda m=missing: m)
        monkeypatch.setitem(backends.BACKENDS, "pallas", without)
        caplog.clear()
        for _ in range(2):
            backends.choose_backend(None, fp8jax.RECIPES["fp8_block"])
            backends.choose_backend(None, fp8jax.RECIPES["fp8_current"])  # XLA has GEMMs for it
            backends.choose_backend(None, as_recipe("fp8_block:wgrad_tile=token"))  # no kernels
        said = [r.getMessage() for r in caplog.records if "EMULATED" in r.getMessage()]
        assert len(said) == lines
        assert all("fp8_block runs EMULATED" in line and "Python 3.12" in line for line in said)
