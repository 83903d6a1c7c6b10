"""Bad inputs to the public API: each raises one line, which names the wrong value and what to do.

A row is (id, call, exception, regex of the message). The calls raise at trace time, on small
arrays, so that nothing is compiled.

The annotations' check (conftest.py) is off here: users do not have it.
"""

import dataclasses
import functools

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8jax
from fp8jax import (
    FORMATS,
    MODELS,
    POLICIES,
    RECIPES,
    Cast,
    Constant,
    Policy,
    Pow2,
    PrecisionSchedule,
    Recipe,
    Tile,
    cast,
    dequantize,
    init_state,
    nn,
    quantize,
)
from fp8jax.gemm.histories.updates import UpdateState
from fp8jax.numerics.names import as_policy, as_recipe
from fp8jax.numerics.scales import SCALES, Delayed, Fp32
from fp8jax.numerics.tiles import TILES
from tests.support.annotations import unchecked_annotations  # noqa: F401

MAX_LENGTH = 380  # of a message; the longest list all models

X, W = jnp.ones((2, 4)), jnp.ones((4, 3))
KEY = jax.random.key(0)
MATMUL = (((1,), (0,)), ((), ()))
HISTORIES, E4M3 = nn.HISTORIES, FORMATS["e4m3"]


# What the rows call -------------------------------------------------------------------------------


def call(function, *args, **kwargs):
    """A call to make later."""
    return functools.partial(function, *args, **kwargs)


def quant(x=X, fmt="e4m3", tile="tensor", **kwargs):
    return quantize(x, fmt, tile, **kwargs)


def dot(lhs=X, rhs=W, numbers=MATMUL, *positional, recipe="bf16", **kwargs):
    return fp8jax.dot_general(lhs, rhs, numbers, *positional, recipe=recipe, **kwargs)


def einsum(equation, lhs=X, rhs=W, recipe="bf16", **kwargs):
    return fp8jax.einsum(equation, lhs, rhs, recipe=recipe, **kwargs)


def init(module, x=X):
    """The shapes of a module's variables."""
    return jax.eval_shape(module.init, KEY, x)


def variables_of(module, x=X):
    """A module's variables, all zeros."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), init(module, x))


def apply(module, variables, x=X, **kwargs):
    return jax.eval_shape(functools.partial(module.apply, **kwargs), variables, x)


def apply_dense(recipe, initialized_with, **kwargs):
    """Applies a layer to the variables of the same layer with another recipe."""
    return apply(nn.Dense(3, recipe), variables_of(nn.Dense(3, initialized_with)), **kwargs)


class Pair(linen.Module):
    """Two layers that share x, whose variables may come from other inputs."""

    keys: int = 2
    layers: int = 2

    @linen.compact
    def __call__(self, x):
        layers = [nn.Dense(3, "fp8_current") for _ in range(self.layers)]
        return nn.together(layers, x, [None] * self.keys)


def apply_pair_of_different_inputs():
    variables = variables_of(Pair())
    variables["params"]["Dense_1"]["kernel"] = jnp.zeros((5, 3))
    return apply(Pair(), variables)


def in_flax(**kwargs):
    return init(linen.Dense(3, dot_general_cls=functools.partial(nn.Fp8DotGeneral, **kwargs)))


# Trees of variables and gradients.

SGD = optax.sgd(0.1)
HISTORY = {HISTORIES: {"x_amax_history": jnp.zeros(4)}}
PARAMS = {"params": {"kernel": W}}
VARIABLES = PARAMS | HISTORY
FAULTS = fp8jax.gemm.histories.updates.Faults(HISTORY, jnp.zeros((), jnp.int32))


def update(gradients, variables=VARIABLES, optimizer=SGD, state=None):
    if state is None:
        state = UpdateState(SGD.init(PARAMS), jnp.zeros((), jnp.int32))
    return fp8jax.update(optimizer, variables, state, gradients)


def other_history(length=4, name="x_amax_history"):
    return {HISTORIES: {name: jnp.zeros(length)}}


# The rows -----------------------------------------------------------------------------------------

NOT_FLOATS = {
    "int": (jnp.ones((2, 4), jnp.int32), "must be float32, bfloat16 or float16, got int32"),
    "bool": (jnp.ones((2, 4), jnp.bool_), "must be float32, bfloat16 or float16, got bool"),
    "complex": (jnp.ones((2, 4), jnp.complex64), "must be float32.*got complex64"),
    "float8": (jnp.zeros((2, 4), jnp.float8_e4m3fn), "must be float32.*got float8_e4m3fn"),
    "list": ([[1.0, 2.0]], r"must be an array, got list \[\[1.0, 2.0\]\]: convert it with jnp.asa"),
    "number": (1.0, "must be an array, got float 1.0: convert it"),
    "none": (None, "must be an array, got NoneType"),
}
TAKE_FLOATS = {
    "quantize": (quant, "x"),
    "cast": (lambda x: cast(x, "e4m3"), "x"),
    "dot lhs": (dot, "lhs"),
    "dot rhs": (lambda x: dot(W.T, x), "rhs"),
    "einsum lhs": (lambda x: einsum("ab,bc->ac", x), "lhs"),
    "einsum rhs": (lambda x: einsum("ab,bc->ac", X, x), "rhs"),
    "Dense": (lambda x: nn.Dense(3, "bf16").init(KEY, x), "x"),
    "amax": (lambda x: quant(amax=x), "amax"),
}
OPERANDS = [
    (f"{name} of {kind}", call(function, value), TypeError, f"{argument} {message}")
    for name, (function, argument) in TAKE_FLOATS.items()
    for kind, (value, message) in NOT_FLOATS.items()
    if (name, kind) != ("amax", "none")  # no amax
]

QUANTIZE = [
    (
        "dequantize array",
        call(dequantize, X),
        TypeError,
        r"Quantized .* got ArrayImpl float32\[2, 4\]",
    ),
    ("dequantize list", call(dequantize, [1.0]), TypeError, r"expected the Quant.* got list \[1.0"),
    ("dequantize to int", lambda: dequantize(quant(), jnp.int32), TypeError, "dtype must.* int32"),
    (
        "dequantize to float8",
        lambda: dequantize(quant(), "float8_e5m2"),
        TypeError,
        "dtype must be float32, bfloat16 or float16, got float8_e5m2",
    ),
    ("dequantize to nonsense", lambda: dequantize(quant(), "f33"), TypeError, "dtype must.*'f33'"),
    ("scalar", call(quant, jnp.float32(1)), ValueError, "contract_axis=-1 .*a scalar has no axis"),
    (
        "axis too large",
        call(quant, contract_axis=2),
        ValueError,
        "contract_axis=2 is out of range for an array with ndim=2: allowed are -2 to 1",
    ),
    ("axis too small", call(quant, contract_axis=-3), ValueError, "contract_axis=-3 is out of ran"),
    (
        "axis float",
        call(quant, contract_axis=1.0),
        TypeError,
        "contract_axis must be an int, got 1",
    ),
    (
        "axis text",
        call(quant, contract_axis="k"),
        TypeError,
        "contract_axis must be an int, got 'k",
    ),
    ("negative amax", call(quant, amax=jnp.float32(-3)), ValueError, "not negative, got -3"),
    (
        "amax shape",
        call(quant, amax=jnp.ones(3)),
        ValueError,
        r"amax has shape \(3,\), .* the shape \(1, 1\) of the scales: give one amax per tile",
    ),
    ("amax rank", call(quant, amax=jnp.ones((1, 1, 1))), ValueError, r"amax has shape \(1, 1, 1\)"),
    (
        "amax of tiles",
        call(quant, tile="row", amax=jnp.ones((3, 1))),
        ValueError,
        r"shape \(2, 1\)",
    ),
    ("rounding", call(quant, rounding="up"), ValueError, "unknown rounding 'up'.*nearest, stoch"),
    ("no key", call(quant, rounding="stochastic"), ValueError, "takes a key, such as jax.random.k"),
    ("key unused", call(quant, key=KEY), ValueError, "rounding='nearest' takes no key"),
    (
        "key int",
        call(cast, X, "e4m3", rounding="stochastic", key=3),
        TypeError,
        r"key must be one PRNG key, such as jax.random.key\(0\), got int 3",
    ),
    (
        "key floats",
        call(cast, X, "e4m3", rounding="stochastic", key=jnp.ones(2)),
        TypeError,
        r"key must be one PRNG key, .* got an array of float32\[2\]",
    ),
    (
        "keys",
        call(cast, X, "e4m3", rounding="stochastic", key=jax.random.split(KEY)),
        TypeError,
        r"key must be one PRNG key, .* got an array of key<fry>\[2\]",
    ),
    ("cast e8m0", call(cast, X, "e8m0", rounding="stochastic", key=KEY), ValueError, "for scales"),
    (
        "format name",
        call(cast, X, "e4m4"),
        ValueError,
        "unknown format 'e4m4'; did you mean 'e4m3'",
    ),
    ("format none", call(cast, X, None), TypeError, r"its name \(e4m3, e5m2, .* got None"),
    (
        "format float16",
        call(cast, X, jnp.float16),
        TypeError,
        "expected a format, its dtype.*float1",
    ),
    ("format fnuz", call(cast, X, jnp.float8_e4m3b11fnuz), TypeError, "a format, .*e4m3b11fnuz"),
]

TILES_AND_SCALES = [
    ("Tile 0", call(Tile, 0, 1), ValueError, r"at least one element .*\(0, 1\)"),
    ("Tile text", call(Tile, "a", 1), TypeError, r"sizes must be ints, or None .* got \('a', 1\)"),
    ("Tile float", call(Tile, 1, 2.0), TypeError, r"sizes must be ints, .* got \(1, 2.0\)"),
    ("Tile bool", call(Tile, True, 2), TypeError, r"sizes must be ints, .* got \(True, 2\)"),
    ("tile of one", call(quant, tile=(1,)), TypeError, r"such as \(1, 128\), got \(1,\)"),
    ("tile of floats", call(quant, tile=(1.5, 2)), TypeError, r"of ints or None.* got \(1.5, 2\)"),
    ("tile number", call(quant, tile=0), TypeError, "expected a Tile, its name or .* got 0"),
    ("tile none", call(Cast, format=E4M3, tile=None), TypeError, "expected a Tile, .* got None"),
    ("tile zero", call(Cast, format=E4M3, tile=(0, 1)), ValueError, "at least one element"),
    ("tile name", call(quant, tile="tile12"), ValueError, "unknown tile 'tile12'; did.* 'tile128'"),
    ("TILES", lambda: TILES["tile12"], KeyError, "unknown tile 'tile12'; did you mean 'tile128'"),
    ("scale number", call(quant, scale=0.5), TypeError, r"got 0.5: a fixed scale is Constant\(val"),
    ("scale none", call(Cast, format=E4M3, scale=None), TypeError, r"\(fp32, pow2.* got None"),
    ("scale class", call(Cast, format=E4M3, scale=Pow2), TypeError, "expected a scale rule.*Pow2"),
    ("scale name", call(quant, scale="pow"), ValueError, "unknown scale rule 'pow'; did.* 'pow2'"),
    ("scale rule", call(quant, scale="Pow2(1)"), ValueError, r"did you mean 'pow2'.*Pow2\(margin"),
    ("SCALES", lambda: SCALES["pow"], KeyError, "unknown scale rule 'pow'; did you mean 'pow2'"),
    ("Constant 0", call(Constant, 0.0), ValueError, r"between 2\^-126 and 2\^126, got 0.0"),
    ("Constant -1", call(Constant, -1), ValueError, r"between 2\^-126 and 2\^126, got -1"),
    ("Constant nan", call(Constant, float("nan")), ValueError, r"between 2\^-126 and .* got nan"),
    ("Constant text", call(Constant, "a"), TypeError, "a constant scale must be a number, got 'a'"),
    (
        "Constant array",
        call(Constant, jnp.ones(2)),
        TypeError,
        r"must be a number, got float32\[2\]",
    ),
    ("Pow2 float", call(Pow2, 1.5), TypeError, r"Pow2\(margin\) takes an int .* got 1.5"),
    ("Pow2 text", call(Pow2, "a"), TypeError, r"Pow2\(margin\) takes an int .* got 'a'"),
    ("Pow2 large", call(Pow2, 200), ValueError, r"Pow2\(margin\) takes -126 to 126.* got 200"),
    ("Fp32 float", call(Fp32, 0.5), TypeError, r"Fp32\(margin\) takes an int .* got 0.5"),
]


def delayed(history: int) -> Cast:
    return Cast(format=E4M3, scale=Delayed(history))


CASTS_AND_RECIPES = [
    ("Cast format", call(Cast, format="fp8"), ValueError, "unknown format 'fp8'.*e4m3, e5m2"),
    ("Cast no format", call(Cast, format=None), TypeError, r"\(e4m3, e5m2, .*e8m0\), got None"),
    (
        "Cast e8m0",
        call(Cast, format="e8m0"),
        ValueError,
        "e8m0 holds scales, not values: use a sig",
    ),
    ("Cast scale", call(Cast, format=E4M3, scale="now"), ValueError, "unknown scale rule 'now'"),
    ("Cast scale number", call(Cast, format=E4M3, scale=2.0), TypeError, "is Constant.value"),
    ("Delayed history", call(Delayed, 0), ValueError, "history=0: delayed scaling needs at least"),
    ("Delayed history text", call(Delayed, "4"), TypeError, "history must be an int, got '4'"),
    ("Delayed history float", call(Delayed, 4.5), TypeError, "history must be an int, got 4.5"),
    ("Delayed rule", call(Delayed, 4, rule="fp"), ValueError, "unknown scale rule 'fp'"),
    ("Delayed constant", call(Delayed, 4, rule=Constant(1.0)), ValueError, "Constant.* of delayed"),
    ("Delayed amax", call(Delayed, 4, "mean"), ValueError, "unknown amax .*'mean'.* newest"),
    (
        "Cast delayed tile",
        call(Cast, format=E4M3, scale=Delayed(4), tile="row"),
        ValueError,
        "use tile=TENSOR",
    ),
    (
        "quantize delayed",
        call(fp8jax.quantize, jnp.ones(4), "e4m3", "tensor", scale=Delayed(4)),
        TypeError,
        "only a Cast has amax histories",
    ),
    ("Cast hadamard", call(Cast, format=E4M3, hadamard=3), ValueError, "power of two .* got 3"),
    ("Cast nvfp4", call(Cast, format=E4M3, scale="nvfp4"), ValueError, "nvfp4 needs format e2m1"),
    (
        "Recipe of text",
        call(Recipe, fwd_x="e4m3"),
        TypeError,
        "fwd_x must be a Cast, .* got 'e4m3'",
    ),
    (
        "Recipe of a recipe",
        call(Recipe, fwd_x=RECIPES["fp8_block"]),
        TypeError,
        r"fwd_x must be a Cast, or None for high precision, got Recipe\(",
    ),
    (
        "Recipe accumulation",
        call(Recipe, accumulation="split"),
        TypeError,
        r"accumulation must be an Accumulation\(fwd, dgrad, wgrad\), got 'split'",
    ),
    (
        "Recipe lengths",
        call(Recipe, fwd_x=delayed(history=4), wgrad_x=delayed(history=7)),
        ValueError,
        r"x has one history, but its casts set the lengths \[4, 7\]",
    ),
    (
        "Recipe hadamard",
        call(Recipe, fwd_x=Cast(format=E4M3, hadamard=16)),
        ValueError,
        "fwd rotates its operands by hadamard=16 and 1",
    ),
    ("RECIPES", lambda: RECIPES["fp9"], KeyError, "unknown recipe 'fp9'.*There are: bf16"),
    ("RECIPES near", lambda: RECIPES["fp8_blok"], KeyError, "did you mean 'fp8_block'"),
    ("POLICIES", lambda: POLICIES["x"], KeyError, "unknown policy 'x'.*There are: .*fp4_mixed"),
    ("FORMATS", lambda: FORMATS["e4m4"], KeyError, "unknown format 'e4m4'; did you mean 'e4m3'"),
    ("MODELS", lambda: MODELS["llama3"], KeyError, "unknown model 'llama3'; did.* 'llama3_8b'"),
    (
        "ModelConfig size",
        lambda: dataclasses.replace(MODELS["llama_tiny"], n_heads=0),
        ValueError,
        "n_heads=0 must be positive",
    ),
    (
        "ModelConfig MLP",
        lambda: dataclasses.replace(MODELS["llama_tiny"], mlp="swigl"),
        ValueError,
        "unknown MLP 'swigl'; did you mean 'swiglu'",
    ),
    (
        "init_state of a policy",
        call(init_state, "fp4_mixed"),
        ValueError,
        "'fp4_mixed' is a policy",
    ),
    (
        "init_state of a Policy",
        call(init_state, POLICIES["fp4_mixed"]),
        TypeError,
        "policy 'fp4_mixed' says which module .*give one of its recipes",
    ),
    ("init_state of None", call(init_state, None), TypeError, "a key of fp8jax.RECIPES, got None"),
    ("init_state of a Cast", call(init_state, Cast(format=E4M3)), TypeError, r"got Cast\("),
]

OPTIONS = [
    (f"option {text}", call(as_recipe, text), ValueError, message)
    for text, message in (
        ("fp8_delayed:", "'fp8_delayed:' has a colon and no option"),
        ("fp8_delayed:history", "expected history=VALUE, got 'history'"),
        ("fp8_delayed:history=", "history=: expected an int, got ''"),
        ("fp8_delayed:history=0", "history=0: delayed scaling needs at least one amax"),
        ("fp8_delayed:history=x", "history=x: expected an int, got 'x'"),
        ("fp8_delayed:history=4.5", "history=4.5: expected an int, got '4.5'"),
        ("fp8_delayed:history=4,history=5", "sets history twice"),
        ("fp8_delayed:histroy=4", "unknown option 'histroy'; did you mean 'history'"),
        ("fp8_delayed:history=4,", "unknown option ''"),
        ("fp8_current:history=4", "no cast of recipe 'fp8_current' uses this option"),
        ("fp8_delayed:margin=999", "takes -126 to 126 binades, got 999"),
        ("fp8_cscale:bias=-9999", "bias=-9999: .* between .* got bias=-9999"),
        ("fp8_block:scale=0.5", "scale=0.5: unknown scale rule '0.5'"),
        ("fp4_block:fp4_tile=tile12", "unknown tile 'tile12'; did you mean 'tile128'"),
        ("fp8_current:accumulation=fats", "unknown accumulation 'fats'; did you mean 'fast'"),
        ("fp8_block:accumulation=split", "no GEMM of recipe 'fp8_block' uses this option"),
        ("nvfp4:bf16_last=1", "names a recipe: bf16_last is an option of policies only"),
        ("fp8_blok:history=4", "unknown recipe 'fp8_blok'; did you mean 'fp8_block'"),
        ("fp4_mixed", "'fp4_mixed' is a policy, .* recipes are bf16"),
    )
]

BLOCK = RECIPES["fp8_block"]
MIXED = "fp4_mixed"
POLICIES_AND_SCHEDULES = [
    ("as_policy recipe", call(as_policy, BLOCK), TypeError, "recipe 'fp8_block' is not a policy"),
    ("as_policy number", call(as_policy, 3), TypeError, "a key of fp8jax.POLICIES, got 3"),
    ("as_policy near", call(as_policy, "fp4_mix"), ValueError, "did you mean 'fp4_mixed'"),
    (
        "policy option",
        call(as_policy, "nvfp4:bf16_last=x"),
        ValueError,
        "bf16_last=x: expected a n",
    ),
    (
        "Policy of a name",
        call(Policy, (("layers/*", "fp8_block"),)),
        TypeError,
        r"rule 'layers/\*' .* needs a Recipe, got 'fp8_block': use fp8jax.RECIPES\['fp8_block'\]",
    ),
    (
        "Policy of a policy",
        call(Policy, (("a", POLICIES[MIXED]),)),
        TypeError,
        "needs a Recipe, got",
    ),
    (
        "Policy of one rule",
        call(Policy, ("layers/*", BLOCK)),
        TypeError,
        r"pair .* got 'layers/\*'",
    ),
    (
        "Policy of a recipe",
        call(Policy, BLOCK),
        TypeError,
        "rules of a policy are pairs .* got Rec",
    ),
    ("Policy of text", call(Policy, "fp8_block"), TypeError, "are pairs .* got 'fp8_block'"),
    (
        "bf16_first negative",
        call(Policy, (), bf16_first=-1),
        ValueError,
        "bf16_first=-1 is neither",
    ),
    ("bf16_last 2.5", call(Policy, (), bf16_last=2.5), ValueError, "bf16_last=2.5 is neither"),
    ("bf16_first nan", call(Policy, (), bf16_first=float("nan")), ValueError, "=nan is neither"),
    ("bf16_first inf", call(Policy, (), bf16_first=float("inf")), ValueError, "=inf is neither"),
    ("bf16_first text", call(Policy, (), bf16_first="2"), TypeError, "number of layers, got '2'"),
    (
        "schedule order",
        call(PrecisionSchedule, ((0.0, "bf16"), (0.5, MIXED), (0.4, "bf16"))),
        ValueError,
        r"must increase and stay below 1, got \[0.0, 0.5, 0.4\]",
    ),
    (
        "schedule start",
        call(PrecisionSchedule, ((0.5, MIXED),)),
        ValueError,
        r"begin at 0.0.*\[0.5",
    ),
    (
        "schedule below 0",
        call(PrecisionSchedule, ((-0.5, MIXED),)),
        ValueError,
        "begin at 0.0, got",
    ),
    (
        "schedule above 1",
        call(PrecisionSchedule, ((0, MIXED), (1.5, "bf16"))),
        ValueError,
        "below 1",
    ),
    (
        "schedule nan",
        call(PrecisionSchedule, ((0, MIXED), (float("nan"), "bf16"))),
        ValueError,
        "must increase and stay below 1.*nan",
    ),
    ("schedule empty", call(PrecisionSchedule, ()), ValueError, r"begin at 0.0, got \[\]"),
    (
        "schedule of text",
        call(PrecisionSchedule, MIXED),
        TypeError,
        "tuple of stages, .*'fp4_mixed'",
    ),
    ("schedule flat", call(PrecisionSchedule, (0.0, MIXED)), ValueError, "0.0 is not a pair"),
    ("schedule reversed", call(PrecisionSchedule, ((MIXED, 0.0),)), ValueError, "is not a pair"),
    ("schedule share text", call(PrecisionSchedule, (("0", MIXED),)), ValueError, "is not a pair"),
    ("schedule policy", call(PrecisionSchedule, ((0, "fp9"),)), ValueError, "unknown policy 'fp9'"),
]

NUMBERS = [
    (f"dimension numbers {name}", call(dot, X, W, numbers), error, message)
    for name, numbers, error, message in (
        ("sizes", (((0,), (0,)), ((), ())), ValueError, r"contracting axes .*\[2\].* have \[4\]"),
        (
            "batch sizes",
            (((), ()), ((0,), (0,))),
            ValueError,
            "the batch axes must have equal sizes",
        ),
        (
            "counts",
            (((1, 0), (0,)), ((), ())),
            ValueError,
            "contracting axes must have equal sizes",
        ),
        ("too large", (((2,), (0,)), ((), ())), ValueError, r"axes \[2\] of lhs.*from 0 to 1"),
        ("negative", (((-1,), (0,)), ((), ())), ValueError, r"axes \[-1\] of lhs.*from 0 to 1"),
        ("twice", (((1, 1), (0, 0)), ((), ())), ValueError, r"axes \[1, 1\] of lhs: each at most"),
        ("both", (((1,), (0,)), ((1,), (0,))), ValueError, r"axes \[1, 1\] of lhs: each at most"),
        ("none", None, TypeError, r"must be \(\(lhs contracting, .* got None"),
        (
            "flat",
            ((1,), (0,)),
            TypeError,
            r"must be \(\(lhs contracting, .* got \(\(1,\), \(0,\)\)",
        ),
        ("half", (((1,), (0,)),), TypeError, r"must be \(\(lhs contracting"),
        ("floats", (((1.0,), (0,)), ((), ())), TypeError, r"must be \(\(lhs contracting"),
    )
]
FULL = {operand: jnp.zeros(16) for operand in "xwg"}
DOT = [
    ("scalar lhs", call(dot, jnp.float32(1)), ValueError, "none, as it is a scalar"),
    ("result int", call(dot, preferred_element_type=jnp.int32), TypeError, "result, must.* int32"),
    ("result float8", call(dot, preferred_element_type=jnp.float8_e5m2), TypeError, "float8_e5m2"),
    ("result nonsense", call(dot, preferred_element_type="f33"), TypeError, "must be.* got 'f33'"),
    (
        "einsum result",
        call(einsum, "ab,bc->ac", preferred_element_type=jnp.int8),
        TypeError,
        "int8",
    ),
    (
        "precision",
        call(dot, precision=jax.lax.Precision.HIGHEST),
        ValueError,
        "the recipe decides how a GEMM is computed: drop precision=.*HIGHEST",
    ),
    ("precision by position", call(dot, X, W, MATMUL, "highest"), ValueError, "drop .*'highest'"),
    ("out_sharding", call(dot, out_sharding="data"), ValueError, "apply jax.lax.with_sharding_con"),
    ("positions", call(dot, X, W, MATMUL, None, None, None), TypeError, "at most 5 .* got 6: pass"),
    ("swap", call(dot, X, W, MATMUL, None, recipe="fp8_block"), ValueError, "use fp8jax.einsum"),
    ("recipe", call(dot, recipe="fp8_blok"), ValueError, "'fp8_blok'; did you mean 'fp8_block'"),
    ("recipe none", call(dot, recipe=None), TypeError, "a key of fp8jax.RECIPES, got None"),
    ("recipe policy", call(dot, recipe="fp4_mixed"), ValueError, "'fp4_mixed' is a policy"),
    ("backend", call(dot, backend="xna"), ValueError, "unknown backend 'xna'; did you mean 'xla'"),
    ("backend list", call(dot, backend=["xla"]), ValueError, r"unknown backend \['xla'\]"),
    (
        "backend refuses",
        call(dot, recipe="fp8_block", backend="xla"),
        NotImplementedError,
        "backend 'xla' cannot run recipe 'fp8_block' here .*: fwd has scales that change",
    ),
    ("state missing", call(dot, recipe="fp8_delayed"), ValueError, r"got \{\}: fp8jax.init_state"),
    (
        "state short",
        call(dot, recipe="fp8_delayed", state=init_state("fp8_delayed:history=4")),
        ValueError,
        r"needs amax histories \{'x': 16, .*, got \{'x': 4",
    ),
    (
        "state operands",
        call(dot, recipe="fp8_delayed", state={"lhs": jnp.zeros(16)}),
        ValueError,
        r"needs amax histories \{'x': 16, .* got \{'lhs': 16\}",
    ),
    (
        "state dtype",
        call(dot, recipe="fp8_delayed", state=FULL | {"g": jnp.zeros(16, jnp.int32)}),
        TypeError,
        r"must be a dict of float32 arrays \[length\], got int32\[16\] for 'g'",
    ),
    (
        "state rank",
        call(dot, recipe="fp8_delayed", state=FULL | {"g": jnp.zeros((3, 16))}),
        TypeError,
        r"must be a dict of float32 arrays \[length\], got float32\[3, 16\] for 'g'",
    ),
    (
        "state of lists",
        call(dot, recipe="fp8_delayed", state=FULL | {"g": [0.0] * 16}),
        TypeError,
        r"must be a dict of float32 arrays .*, got \[0.0, .* for 'g'",
    ),
    (
        "state array",
        call(dot, recipe="fp8_delayed", state=jnp.zeros(16)),
        TypeError,
        "must be a dict of float32 arrays .* as fp8jax.init_state returns, got float32.16.",
    ),
    (
        "state needless",
        call(dot, recipe="fp8_block", state=FULL),
        ValueError,
        r"recipe 'fp8_block' needs amax histories \{\} .*, got \{'x': 16",
    ),
    (
        "no key",
        call(dot, recipe="nvfp4"),
        ValueError,
        "'nvfp4' rounds stochastically and needs a k",
    ),
    ("key int", call(dot, recipe="nvfp4", key=0), TypeError, "key must be one PRNG key, .* int 0"),
    ("keys", call(dot, recipe="nvfp4", key=jax.random.split(KEY)), TypeError, "one PRNG key"),
]

EQUATIONS = [
    (f"einsum {name}", call(einsum, equation), error, message)
    for name, equation, error, message in (
        ("no axis", "...ab,...cde->...c", ValueError, "the operands have 2 and 2 axes"),
        ("dots", "..b,bc->..c", ValueError, r"letters only.* got '\.\.b"),
        ("ellipsis", "...b,bc->c", ValueError, "an ellipsis in an operand must be in the result"),
        ("repeated letter", "aa,ac->c", ValueError, "at most once in each; see a"),
        ("repeated in the result", "ab,bc->acc", ValueError, "at most once in each; see c"),
        ("no arrow", "ab,bc", ValueError, "with the result.*got 'ab,bc'"),
        ("no result", "ab,ab->", ValueError, r"lhs \(2, 4\) and 4 in rhs|is 2 in lhs"),
        ("three operands", "ab,bc,cd->ad", ValueError, "two operands.*got 'ab,bc,cd->ad'"),
        ("one operand", "ab->ba", ValueError, "two operands.*got 'ab->ba'"),
        ("letter of one operand", "ab,bc->a", ValueError, "two or all three of the terms.*see c"),
        ("unknown letter", "ab,bc->acz", ValueError, "two or all three of the terms.*see z"),
        ("rank of lhs", "abc,cd->abd", ValueError, r"'abc' has 3 letters, but lhs has .*\(2, 4\)"),
        ("rank of rhs", "ab,b->a", ValueError, r"'b' has 1 letters, but rhs has shape \(4, 3\)"),
        ("sizes", "ab,cb->ac", ValueError, r"'b' is 4 in lhs \(2, 4\) and 3 in rhs \(4, 3\)"),
        ("number", 3, TypeError, "expected an equation such as .* got 3"),
    )
]

MODULES = [
    ("features 0", lambda: init(nn.Dense(0)), ValueError, "features must be positive, got 0"),
    ("features -1", lambda: init(nn.Dense(-1)), ValueError, "features must be positive, got -1"),
    (
        "features float",
        lambda: init(nn.Dense(3.0)),
        TypeError,
        "features must be a positive int.*3",
    ),
    (
        "features text",
        lambda: init(nn.Dense("a")),
        TypeError,
        "features must be a positive int.*'a",
    ),
    ("Dense recipe", lambda: init(nn.Dense(3, "fp9")), ValueError, "unknown recipe 'fp9'"),
    ("Dense policy", lambda: init(nn.Dense(3, MIXED)), ValueError, "'fp4_mixed' is a policy"),
    ("Dense backend", lambda: init(nn.Dense(3, "fp8_block", "xna")), ValueError, "backend 'xna'"),
    (
        "Dense scalar",
        lambda: init(nn.Dense(3), jnp.float32(1)),
        ValueError,
        "x is a scalar: a Dense",
    ),
    (
        "Dense other input",
        lambda: apply(nn.Dense(3), variables_of(nn.Dense(3)), jnp.ones((2, 5))),
        ValueError,
        r"need a kernel of shape \(5, 3\), but the variables hold \(4, 3\)",
    ),
    (
        "Dense no histories",
        lambda: apply(nn.Dense(3), {"params": {"kernel": W}}),
        ValueError,
        "runs 'fp8_delayed' and has no x_amax_history.*pass the collection",
    ),
    (
        "Dense histories of another recipe",
        lambda: apply_dense("fp8_delayed", "fp8_current"),
        ValueError,
        "runs 'fp8_delayed' and has no x_amax_history",
    ),
    (
        "Dense histories of another length",
        lambda: apply_dense("fp8_delayed", "fp8_delayed:history=4"),
        ValueError,
        r"needs amax histories \{'x': 16, .* got \{'x': 4",
    ),
    (
        "Dense no key",
        lambda: apply_dense("nvfp4", "nvfp4"),
        ValueError,
        "pass the RNG stream 'fp8'",
    ),
    (
        "Dense key",
        lambda: apply_dense("nvfp4", "nvfp4", key=1),
        TypeError,
        "one PRNG key.* got int 1",
    ),
    (
        "Einsum shape",
        lambda: init(nn.Einsum("ab,bc->ac", (5, 3))),
        ValueError,
        r"'b' is 4 in lhs \(2, 4\) and 5 in rhs \(5, 3\)",
    ),
    (
        "Einsum rank",
        lambda: init(nn.Einsum("ab,bc->ac", (4, 3, 2))),
        ValueError,
        "'bc' has 2 letter",
    ),
    ("Einsum shape 0", lambda: init(nn.Einsum("ab,bc->ac", (4, 0))), ValueError, r"got \(4, 0\)"),
    ("Einsum equation", lambda: init(nn.Einsum("ab,bc", (4, 3))), ValueError, "got 'ab,bc'"),
    ("together keys", lambda: init(Pair(keys=1)), ValueError, "got 2 layers and 1 keys"),
    ("together nothing", lambda: init(Pair(0, 0)), ValueError, "got 0 layers and 0 keys"),
    (
        "together inputs",
        apply_pair_of_different_inputs,
        ValueError,
        r"'Dense_1': .* need a kernel of shape \(4, 3\), but the variables hold \(5, 3\)",
    ),
    ("flax recipe", lambda: in_flax(recipe="fp9"), ValueError, "unknown recipe 'fp9'"),
    ("flax backend", lambda: in_flax(backend="xna"), ValueError, "unknown backend 'xna'"),
]

UPDATES = [
    (
        "update without histories",
        lambda: update(PARAMS),
        ValueError,
        "gradients lack amax history x",
    ),
    (
        "update of parameters",
        lambda: update(VARIABLES, PARAMS),
        ValueError,
        "which the variables la",
    ),
    (
        "update other histories",
        lambda: update(PARAMS | other_history(name="y_amax_history")),
        ValueError,
        "gradients lack amax history x_amax_history",
    ),
    (
        "update history length",
        lambda: update(PARAMS | other_history(7)),
        ValueError,
        r"histories and .* has shape \(4,\) in the first and \(7,\) in the second; use one recipe",
    ),
    (
        "update structure",
        lambda: update({"params": {"w": W}} | HISTORY),
        ValueError,
        "variables and gradients differ: only the first have 'params/kernel' and 1 more",
    ),
    (
        "update shape",
        lambda: update({"params": {"kernel": X}} | HISTORY),
        ValueError,
        r"variables and gradients differ: 'params/kernel' has shape \(4, 3\) in the first"
        r" and \(2, 4",
    ),
    (
        "update optimizer",
        lambda: update(VARIABLES, optimizer="adam"),
        TypeError,
        "optax.*got 'adam'",
    ),
    (
        "update state",
        lambda: update(VARIABLES, state=SGD.init(PARAMS)),
        TypeError,
        "state must come from fp8jax.init_update or update, got",
    ),
    ("init_update", lambda: fp8jax.init_update("adam", VARIABLES), TypeError, "optax.* got 'adam'"),
    ("init_update order", lambda: fp8jax.init_update(VARIABLES, SGD), TypeError, "optax optimizer"),
    (
        "split list",
        lambda: fp8jax.histories.split([VARIABLES]),
        TypeError,
        "got them inside a list",
    ),
    (
        "split state",
        lambda: fp8jax.histories.split({"a": (VARIABLES,)}),
        TypeError,
        "inside a tuple",
    ),
    (
        "join",
        lambda: fp8jax.histories.join({}, {"mlp": HISTORY}),
        KeyError,
        "has no 'mlp'.*fp8jax.histories.split",
    ),
    (
        "merge structure",
        lambda: fp8jax.histories.merge(VARIABLES, PARAMS),
        ValueError,
        "gradients to merge differ: only the first have '.*x_amax_history'",
    ),
    (
        "merge shapes",
        lambda: fp8jax.histories.merge({"a": X}, {"a": jnp.ones(4)}),
        ValueError,
        r"gradients to merge differ: 'a' has shape \(2, 4\) in the first and \(4,\) in the second",
    ),
    (
        "merge_stacked",
        lambda: fp8jax.histories.merge_stacked(VARIABLES),
        ValueError,
        r"x_amax_history' has shape \(4,\) and no leading axis of microbatches",
    ),
    (
        "merge_devices",
        lambda: fp8jax.histories.merge_devices(VARIABLES, "devices"),
        ValueError,
        "axis_name='devices' is no mapped axis here: call merge_devices inside",
    ),
    (
        "raise_if",
        lambda: fp8jax.histories.raise_if(None),
        TypeError,
        "takes the faults that update returns",
    ),
    (
        "raise_if in jit",
        lambda: jax.eval_shape(fp8jax.histories.raise_if, FAULTS),
        TypeError,
        "return them fr",
    ),
    (
        "seed loss",
        lambda: fp8jax.histories.seed(lambda v: X, VARIABLES),
        TypeError,
        r"return a scalar, got float32\[2, 4\]",
    ),
    (
        "seed tuple",
        lambda: fp8jax.histories.seed(lambda v: (0.0, 1), VARIABLES),
        TypeError,
        "set has_aux=True",
    ),
    (
        "seed aux",
        lambda: fp8jax.histories.seed(lambda v: jnp.float32(0), VARIABLES, has_aux=True),
        TypeError,
        r"with has_aux, loss must return \(scalar, anything\)",
    ),
]

ROWS = [
    *OPERANDS,
    *QUANTIZE,
    *TILES_AND_SCALES,
    *CASTS_AND_RECIPES,
    *OPTIONS,
    *POLICIES_AND_SCHEDULES,
    *NUMBERS,
    *DOT,
    *EQUATIONS,
    *MODULES,
    *UPDATES,
]


@pytest.mark.parametrize(
    ("make", "error", "message"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message) as raised:
        make()
    text = str(raised.value)
    if type(raised.value) is KeyError:  # whose str puts quotes around its message
        text = raised.value.args[0]
    assert "\n" not in text and len(text) <= MAX_LENGTH


def test_there_are_many_rows():
    assert len(ROWS) >= 90


# What looks odd and is accepted -------------------------------------------------------------------

ACCEPTED = [
    ("format name", lambda: Cast(format="e4m3").format, FORMATS["e4m3"]),
    ("format dtype", lambda: Cast(format=jnp.float8_e4m3fn).format, FORMATS["e4m3"]),
    ("format np.dtype", lambda: Cast(format=jnp.dtype(jnp.float8_e5m2)).format, FORMATS["e5m2"]),
    ("tile tuple", lambda: Cast(format=E4M3, tile=(1, 128)).tile, fp8jax.TILE128),
    ("tile list", lambda: Cast(format=E4M3, tile=[1, 128]).tile, fp8jax.TILE128),
    ("tile name", lambda: Cast(format=E4M3, tile="tile128").tile, fp8jax.TILE128),
    ("tile of quantize", lambda: quant(tile="row").tile, (1, None)),
    ("tile None", lambda: quant(tile=(None, 2)).tile, (None, 2)),
    ("scale name", lambda: Cast(format=E4M3, scale="pow2").scale, Pow2()),
    ("int constant", lambda: Constant(1).value, 1),
    ("numpy constant", lambda: Constant(np.float32(0.5)).value, 0.5),
    ("rules in a list", lambda: Policy([["a", BLOCK]]), Policy((("a", BLOCK),))),
    ("stages in a list", lambda: PrecisionSchedule([(0, MIXED)]), PrecisionSchedule(((0, MIXED),))),
    ("axis of numpy", lambda: quant(contract_axis=np.int64(0)).scale.shape, (1, 1)),
    ("numpy operands", lambda: dot(np.asarray(X), np.asarray(W)).shape, (2, 3)),
    ("scalars", lambda: dot(jnp.float32(2), jnp.float32(3), (((), ()), ((), ()))).shape, ()),
]


@pytest.mark.parametrize(
    ("make", "expected"), [row[1:] for row in ACCEPTED], ids=[row[0] for row in ACCEPTED]
)
def test_accepted(make, expected):
    assert make() == expected


@pytest.mark.parametrize("amax", [-1.0, float("nan"), float("inf")])
def test_a_traced_amax_that_is_no_amax_makes_the_scale_nan(amax):
    q = jax.jit(lambda amax: quant(amax=amax))(jnp.float32(amax))
    assert np.isnan(np.asarray(q.scale)).all()


def test_a_raw_key_is_a_key():
    with jax.legacy_prng_key("allow"):
        key = jax.random.PRNGKey(0)
    assert cast(X, "e4m3", rounding="stochastic", key=key).shape == X.shape
