"""The Transformer: what does not depend on precision, what sees what, and what is counted.

Parameters are drawn as the model draws them and then enlarged (`enlarged`): at initialization
attention is nearly uniform and layers hardly matter, so that many a mistake would not show.
"""

import dataclasses
import functools
import re
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fp8jax.device import xla
from fp8jax.gemm import modules as linears
from fp8jax.gemm.backends import emulated
from fp8jax.gemm.histories.amax_history import HISTORIES, merge_history
from fp8jax.gemm.modules import Dense
from fp8jax.gemm.vjp import KEY_ORDER
from fp8jax.lm.model.attention import reference
from fp8jax.lm.model.blockwise_attention import RowMax
from fp8jax.lm.model.config import ModelConfig
from fp8jax.lm.model.layer import Block, FeedForward, Linears
from fp8jax.lm.model.norms import RMSNorm
from fp8jax.lm.model.transformer import REMAT, Transformer, abstract_variables
from fp8jax.lm.training import step
from fp8jax.numerics.module_paths import MODULES
from fp8jax.numerics.names import as_policy, as_recipe
from fp8jax.numerics.policy import POLICIES, Policy
from fp8jax.numerics.recipe import Recipe
from fp8jax.numerics.recipes import RECIPES
from tests.support.products import equations, float8_products
from tests.support.reference import folded

V, D, LAYERS, N, K, F, H = 64, 32, 3, 4, 2, 48, 8
CONFIG = ModelConfig(
    vocab_size=V, d_model=D, n_layers=LAYERS, n_heads=N, n_kv_heads=K, d_ff=F, head_dim=H
)
B, L = 2, 16
# Row 0: documents of 6 and 7 tokens and padding; row 1: one document.
SEGMENTS = np.array([[1] * 6 + [2] * 7 + [0] * 3, [1] * L], np.int32)
POSITIONS = np.array([[*range(6), *range(7), *range(3)], [*range(L)]], np.int32)
EVERYWHERE = Policy((("*", RECIPES["fp8_delayed"]),))  # the head, too


def exempt(name: str, first: int, last: int) -> Policy:
    return dataclasses.replace(POLICIES[name], bf16_first=first, bf16_last=last)


def stochastic() -> Policy:
    recipe = RECIPES["fp8_current"]
    casts = {
        name: dataclasses.replace(getattr(recipe, name), rounding="stochastic")
        for name in KEY_ORDER
    }
    return Policy((("*", Recipe(**casts)),), name="stochastic")


def leaves(tree) -> dict[str, jax.Array]:
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, a), b in zip(leaves(one).items(), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=path)


def distance(a, b) -> float:
    """Relative, in the norm over the whole tree."""
    a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@functools.cache
def batch() -> dict[str, jax.Array]:
    tokens = np.random.default_rng(0).integers(0, V, (B, L + 1)).astype(np.int32)
    same = np.pad(SEGMENTS[:, :-1] == SEGMENTS[:, 1:], ((0, 0), (0, 1)))
    arrays = dict(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        segments=SEGMENTS,
        positions=POSITIONS,
        weights=((SEGMENTS > 0) & same).astype(np.float32),
    )
    return {name: jnp.asarray(a) for name, a in arrays.items()}


@functools.cache
def initial(policy: str | Policy = "bf16", config: ModelConfig = CONFIG, **kwargs):
    model, one = Transformer(config, policy, **kwargs), jnp.zeros((1, 1), jnp.int32)
    return jax.jit(lambda: nn.meta.unbox(model.init(jax.random.key(0), one, one, one)))()


@functools.cache
def enlarged():
    """Kernels times 10, so that each maps vectors of size 1 to vectors of size 1 or so, and the
    embedding to size 1."""
    factors = {"kernel": 10, "embedding": 50, "scale": 1}

    def enlarge(path, leaf):
        return jnp.asarray(np.float32(factors[path[-1].key]) * np.asarray(leaf))

    with jax.ensure_compile_time_eval():  # a test may ask for them first while it traces
        return jax.tree_util.tree_map_with_path(enlarge, initial()["params"])


OLD = np.arange(16, 0, -1, dtype=np.float32)  # a history that no amax of these tests repeats


def histories_of(policy, value=OLD):
    """Every history of the policy's model filled with `value`; {} if it keeps none."""
    tree = abstract_variables(Transformer(CONFIG, policy)).get(HISTORIES, {})
    return jax.tree.map(lambda h: jnp.asarray(np.broadcast_to(value, h.shape)), tree)


@functools.partial(jax.jit, static_argnames="model")
def logits_of(model, params, tokens, segments=None, positions=None, histories=None):
    segments = jnp.asarray(SEGMENTS) if segments is None else segments
    positions = jnp.asarray(POSITIONS) if positions is None else positions
    variables = {"params": params} | ({HISTORIES: histories} if histories else {})
    return model.apply(variables, tokens, segments, positions)


def _mean_loss(params, histories, model, batch, key=None):
    """As in training: the mean over tokens."""
    return step.loss_sum(model, params, histories, batch, key) / jnp.sum(batch["weights"])


def traced_gradients(model, params, histories, batch, key=None):
    """loss, (gradients, new histories)."""
    return jax.value_and_grad(_mean_loss, argnums=(0, 1))(params, histories, model, batch, key)


# Compiled as training is: without these options, what XLA fuses decides which values are rounded.
gradients = jax.jit(
    traced_gradients, static_argnames="model", compiler_options=xla.compiler_options()
)


# Parameters ---------------------------------------------------------------------------------------

SHAPES = {
    "embedding": (V, D),
    "final_norm/scale": (D,),
    "layers/attention/k/kernel": (LAYERS, D, K * H),
    "layers/attention/o/kernel": (LAYERS, N * H, D),
    "layers/attention/q/kernel": (LAYERS, D, N * H),
    "layers/attention/v/kernel": (LAYERS, D, K * H),
    "layers/attention_norm/scale": (LAYERS, D),
    "layers/mlp/down/kernel": (LAYERS, F, D),
    "layers/mlp/gate/kernel": (LAYERS, D, F),
    "layers/mlp/up/kernel": (LAYERS, D, F),
    "layers/mlp_norm/scale": (LAYERS, D),
    "lm_head/kernel": (D, V),
}
VARIANTS = [
    *((name, {}) for name in POLICIES),
    *(("fp8_delayed", {"remat": name}) for name in REMAT),
    *(("fp8_delayed", {"unroll": n}) for n in (2, LAYERS)),
    *((exempt("fp8_delayed", *ends), {}) for ends in [(1, 0), (0, 2), (1, 1), (3, 0), (1, 2)]),
    (EVERYWHERE, {"remat": "full", "unroll": LAYERS}),
    (stochastic(), {}),
    # One linear alone: it asks for its recipe under its own path.
    *((Policy(((path, RECIPES["fp8_delayed"]),), name=path), {}) for path in MODULES),
]


@pytest.mark.parametrize(("policy", "kwargs"), VARIANTS)
def test_the_parameter_tree_is_always_the_same(policy, kwargs):
    variables = abstract_variables(Transformer(CONFIG, policy, **kwargs))
    params = leaves(nn.meta.unbox(variables["params"]))
    assert {path: leaf.shape for path, leaf in params.items()} == SHAPES
    assert all(leaf.dtype == jnp.float32 for leaf in params.values())
    # Histories are for all layers, exempt or not: a change of exemptions keeps the state's shape.
    if as_policy(policy).delayed:
        expected = {
            f"{path}/{operand}_amax_history": (LAYERS, 16) if path.startswith("layers") else (16,)
            for path in MODULES
            for operand in "xwg"
            if as_policy(policy).recipe(path).histories
        }
        found = leaves(variables[HISTORIES])
        assert {path: leaf.shape for path, leaf in found.items()} == expected
    else:
        assert set(variables) == {"params"}


@pytest.mark.parametrize("n_layers", [LAYERS - 1, LAYERS + 1])
def test_parameters_of_another_number_of_layers_are_refused(n_layers):
    params = nn.meta.unbox(abstract_variables(Transformer(CONFIG))["params"])
    model = Transformer(dataclasses.replace(CONFIG, n_layers=n_layers))
    said = rf"layers\['attention'\].* have the shape \({LAYERS}, .* the model has {n_layers} layers"
    with pytest.raises(ValueError, match=said):
        jax.eval_shape(model.apply, {"params": params}, *[jnp.zeros((1, 8), jnp.int32)] * 3)


@pytest.mark.parametrize(
    ("policy", "kwargs"),
    [
        ("fp8_delayed", {}),
        ("fp4_mixed", {"remat": "full"}),
        (exempt("fp8_delayed", 1, 1), {"unroll": LAYERS}),
    ],
)
def test_initial_values_are_always_the_same(policy, kwargs):
    variables = initial(policy, **kwargs)
    assert_same(variables["params"], initial()["params"])
    assert all((np.asarray(h) == 0).all() for h in jax.tree.leaves(variables.get(HISTORIES, {})))


def test_initial_values_have_the_documented_spread_and_layers_differ():
    """Standard deviation 0.02, and 0.02 / sqrt(2 * 3) where the residual stream is added to. The
    estimate from n numbers is off by 1 / sqrt(2 n) relative; four times that is allowed."""
    for path, leaf in leaves(initial()["params"]).items():
        values = np.asarray(leaf)
        if path.endswith("scale"):
            np.testing.assert_array_equal(values, np.ones_like(values))
            continue
        last = path.split("/")[-2] if "/" in path else path
        expected = 0.02 / np.sqrt(6) if last in ("o", "down") else 0.02
        assert abs(values.std() / expected - 1) < 4 / np.sqrt(2 * values.size), path
        if path.startswith("layers"):
            assert (values[0] != values[1]).mean() > 0.99 and (values[1] != values[2]).any()


# The same program, otherwise compiled -------------------------------------------------------------


@functools.cache
def gradients_under(name: str, remat: str):
    model = Transformer(CONFIG, name, remat=remat)
    return gradients(model, enlarged(), histories_of(name), batch())


def test_no_layer_of_a_stack_reads_or_shifts_a_history():
    """All histories are summarized before the first layer and shifted after the last one: so XLA
    gets that arithmetic once, not for each layer of a stack without a loop."""
    entries = 13  # a size that nothing else has
    policy = f"fp8_delayed:history={entries}"
    model = Transformer(CONFIG, policy, unroll=CONFIG.n_layers)
    histories = histories_of(policy, np.float32(1))
    jaxpr = jax.make_jaxpr(functools.partial(traced_gradients, model))(
        enlarged(), histories, batch()
    )
    shapes = re.findall(rf"f32\[([\d,]*){entries}\]", str(jaxpr))
    assert set(shapes) == {f"{CONFIG.n_layers},"}


@pytest.mark.optimized_too
@pytest.mark.parametrize(
    ("name", "remat"),
    [
        ("fp8_delayed", "quantized"),
        ("fp8_delayed", "full"),
        # Computes again a part of what "full" does, as the next test shows.
        pytest.param("fp8_delayed", "dots", marks=pytest.mark.full),
        # Nothing about recomputing depends on the recipe, nor on whether a layer has histories.
        pytest.param("fp8_block", "full", marks=pytest.mark.full),
    ],
)
def test_rematerialization_changes_no_bit(name, remat):
    """Recomputed are the same operations on the same numbers, casts and amaxes included."""
    assert_same(gradients_under(name, remat), gradients_under(name, "none"))


@pytest.mark.parametrize(
    ("remat", "products", "codes"), [("full", 0, 0), ("dots", 6, 0), ("quantized", 6, 4)]
)
def test_what_a_rematerialization_policy_keeps(remat, products, codes):
    """Of each layer: results of its linears in bfloat16 but of the last, which nothing needs, and
    four quantized inputs; all of them are [tokens, features]."""
    model, histories = Transformer(CONFIG, "fp8_delayed", remat=remat), histories_of("fp8_delayed")
    mean_loss = functools.partial(_mean_loss, model=model, batch=batch(), key=None)
    _, vjp = jax.eval_shape(lambda p: jax.vjp(lambda p: mean_loss(p, histories), p), enlarged())
    kept = [x for x in jax.tree.leaves(vjp) if getattr(x, "shape", ())[:2] == (LAYERS, B * L)]
    assert sum(x.dtype == jnp.bfloat16 for x in kept) == products
    assert sum(x.dtype == jnp.float8_e4m3fn for x in kept) == codes


def test_what_is_computed_again_without_a_loop_has_a_barrier():
    """XLA would merge it with the forward, whose results would then be kept."""

    def barriers(unroll):
        mean_loss = functools.partial(
            _mean_loss, model=Transformer(CONFIG, remat="full", unroll=unroll), batch=batch()
        )
        program = jax.make_jaxpr(lambda params: mean_loss(params, {}))(jax.eval_shape(enlarged))
        return str(program).count("prevent_cse=True")

    assert (barriers(LAYERS - 1), barriers(LAYERS)) == (0, 1)


def test_unrolling_changes_nothing_but_the_loop():
    """The traced programs are the same, character by character, but for the scan's own parameter.

    (Compiled, they may differ by roundings: XLA may keep more than bfloat16 between operations
    that it fuses, and a loop's end is where it cannot.)"""

    def traced(unroll):
        model, histories = (
            Transformer(CONFIG, "fp8_delayed", unroll=unroll),
            histories_of("fp8_delayed"),
        )
        f = functools.partial(_mean_loss, model=model, batch=batch())
        program = jax.make_jaxpr(jax.value_and_grad(f, argnums=(0, 1)))(enlarged(), histories)
        text = str(program)
        assert text.count(f"unroll={unroll}\n") == 2  # one loop forward, one back
        return text.replace(f"unroll={unroll}\n", "unroll=?\n")

    assert traced(1) == traced(LAYERS) == traced(2)


def test_unrolled_layers_compute_the_same():
    """In float32, where fusion cannot drop a rounding of activations. Sums may be reordered:
    32 * 2^-24 for sums of 48 terms (pairwise, in vectors), through 3 layers of which each can
    double an error: 10 * 32 * 2^-24."""
    one, all_ = (
        gradients(Transformer(CONFIG, unroll=n, dtype=jnp.float32), enlarged(), {}, batch())
        for n in (1, LAYERS)
    )
    assert distance(all_, one) <= 320 * 2.0**-24


def by_layer(tree):
    """A tuple of layers in the place of their stack."""
    cut = lambda i: jax.tree.map(lambda leaf: np.asarray(leaf)[i], tree["layers"])  # noqa: E731
    return {**tree, "layers": tuple(map(cut, range(LAYERS)))} if tree else tree


@pytest.mark.parametrize(
    ("policy", "remat"),
    [
        ("bf16", "none"),
        (exempt("fp8_delayed", 1, 1), "full"),
        # Each of the two, and rematerialization, is in one of those above.
        pytest.param("bf16", "full", marks=pytest.mark.full),
        pytest.param(exempt("fp8_delayed", 1, 1), "none", marks=pytest.mark.full),
    ],
)
def test_separate_layers_compute_the_same(policy, remat):
    """In float32; `test_unrolled_layers_compute_the_same` derives the bound. A code that such an
    error moves to its neighbor would be 2^-4 of a number: no code of this batch does."""
    model = Transformer(CONFIG, policy, dtype=jnp.float32, unroll=LAYERS, remat=remat)
    loss, stacked = gradients(model, enlarged(), histories := histories_of(policy), batch())
    again, separate = gradients(model, by_layer(enlarged()), by_layer(histories), batch())
    assert distance(again, loss) <= 320 * 2.0**-24
    for one, other in zip(stacked, separate, strict=True):
        assert jax.tree.structure(by_layer(one)) == jax.tree.structure(other)
        if one:
            assert distance(other, by_layer(one)) <= 320 * 2.0**-24


# What sees what -----------------------------------------------------------------------------------

# The forward of these does not tie rows together by one scale for a whole tensor of activations:
# either there is a scale a row, or it comes from the history. (Per-tensor current scaling does:
# there, any token may change the amax and so every other token's rounding, by design.)
UNTIED = ["bf16", "fp8_block", "fp4_mixed", "fp8_delayed"]


def untied_logits(name, tokens, **kwargs):
    model = Transformer(CONFIG, name)
    return np.asarray(logits_of(model, enlarged(), tokens, histories=histories_of(name), **kwargs))


@pytest.mark.parametrize("name", UNTIED)
def test_a_token_is_seen_from_its_position_on_and_within_its_document_only(name):
    """Bit for bit, for every position of every document; and where it is seen, it changes all."""
    tokens = np.asarray(batch()["tokens"])
    reference = untied_logits(name, jnp.asarray(tokens))
    for at in (0, 3, 5, 6, 9, 12, 15):
        other = np.where(np.arange(L) == at, (tokens + 7) % V, tokens)
        changed = untied_logits(name, jnp.asarray(other))
        sees = (np.arange(L) >= at) & (SEGMENTS == SEGMENTS[:, at : at + 1])
        np.testing.assert_array_equal(changed[~sees], reference[~sees])
        assert (changed[sees] != reference[sees]).any(axis=-1).all()


def test_without_segments_the_documents_would_see_each_other():
    """What the test above would show if segments were ignored: it can fail."""
    tokens = batch()["tokens"]
    ones = jnp.ones_like(tokens)
    one, other = (untied_logits("bf16", t, segments=ones) for t in (tokens, tokens.at[0, 2].add(1)))
    assert (one[0, 6:13] != other[0, 6:13]).any(axis=-1).all()


def test_gradients_are_causal():
    """Every position has a token of its own, so the gradient of one position's logits with
    respect to the embedding's rows says which positions it depends on. Under current scaling for
    the whole tensor as well: nothing is differentiated through an amax."""
    tokens = jnp.asarray(np.random.default_rng(1).permutation(V)[: B * L].reshape(B, L), jnp.int32)
    model, params = Transformer(CONFIG, "fp8_current"), enlarged()
    direction = jnp.asarray(np.random.default_rng(2).normal(size=V), jnp.float32)

    @jax.jit
    def rows(table, b, t):
        def value(table):
            return logits_of(model, {**params, "embedding": table}, tokens)[b, t] @ direction

        return jax.grad(value)(table)

    for b, t in [(0, 0), (0, 4), (0, 6), (0, 11), (1, 0), (1, 9), (1, 15)]:
        nonzero = np.asarray(rows(params["embedding"], b, t) != 0).any(axis=-1)
        seen = (np.arange(L) <= t) & (SEGMENTS[b] == SEGMENTS[b, t])
        expected = np.zeros(V, bool)
        expected[np.asarray(tokens)[b, seen]] = True
        np.testing.assert_array_equal(nonzero, expected)


def test_a_document_alone_and_packed_second_are_the_same():
    """Positions restart and nothing leaks. In float32: moved along the row, the sums over keys
    group otherwise, 2 * L roundings of a layer's output; 3 layers, each of which can double an
    error, and the head's sum of 32: (10 * 2 * 16 + 32) * 2^-24 of the largest logit."""
    model, tokens = Transformer(CONFIG, dtype=jnp.float32), batch()["tokens"]
    packed = logits_of(model, enlarged(), tokens)[0, 6:13]
    shifted = jnp.roll(tokens, -6, axis=1)
    row = lambda a: jnp.asarray(np.stack([np.r_[a, np.zeros(9, a.dtype)]] * 2))  # noqa: E731
    segments, positions = row(np.ones(7, np.int32)), row(np.arange(7, dtype=np.int32))
    alone = logits_of(model, enlarged(), shifted, segments, positions)[0, :7]
    bound = 352 * 2.0**-24 * float(jnp.abs(packed).max())
    assert float(jnp.abs(alone - packed).max()) <= bound
    # It would show if positions ran on: attention here does depend on the distance of documents'
    # tokens, but not on where both are; so shift the second half only.
    broken = positions.at[:, 3:].add(6)
    moved = logits_of(model, enlarged(), shifted, segments, broken)[0, 3:7]
    assert (jnp.abs(moved - packed[3:]).max(axis=-1) > 100 * bound).all()


def test_only_distances_matter_not_where_a_document_stands():
    """Rotary positions: all of them shifted by 100. Angles up to 115 in float32 are off by 115 *
    2^-24 each, cosines as much; scores by 2 * 115 * 2^-24 * |q| |k| / sqrt(H), |q| |k| < 100, which
    is 35 * 230 * 2^-24; times 10 through the layers as above."""
    model, tokens = Transformer(CONFIG, dtype=jnp.float32), batch()["tokens"]
    one = logits_of(model, enlarged(), tokens)
    other = logits_of(model, enlarged(), tokens, None, jnp.asarray(POSITIONS + 100))
    bound = 10 * 35 * 230 * 2.0**-24 * float(jnp.abs(one).max())
    assert float(jnp.abs(one - other).max()) <= bound < 0.01 * float(jnp.abs(one).max())


# Norms --------------------------------------------------------------------------------------------


def test_rms_norm_by_hand():
    """Squares, mean of 32, root, two products: 2 + 32 / 2 + 2 + 2 roundings of 2^-24 at most."""
    x = 3 * np.random.default_rng(0).normal(size=(2, 4, D)).astype(np.float32)
    scale = np.linspace(0.5, 2, D).astype(np.float32)
    norm, params = RMSNorm(1e-2), {"params": {"scale": jnp.asarray(scale)}}
    wide = x.astype(np.float64)
    expected = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-2) * scale
    np.testing.assert_allclose(norm.apply(params, jnp.asarray(x)), expected, rtol=22 * 2.0**-24)
    assert norm.apply(params, jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16


# Layers by hand, and histories --------------------------------------------------------------------


def by_hand(params, histories, policies, batch, dtype):
    """The model as a Python loop over its layers, each under a policy of its own.

    Returns zeros, one for each result of a linear, and a function of them: to the loss, and to
    what every linear got, path -> layer by layer. The zeros are added to the linears' results;
    the gradient with respect to one is what comes back to that linear.
    """
    params, histories = jax.device_get((params, histories))
    sizes = {path: _kernel(params, path).shape[-1] for path in MODULES}
    zeros = {
        path: [np.zeros((B, L, size), np.float32)] * (1 if path == "lm_head" else LAYERS)
        for path, size in sizes.items()
    }

    def loss(zeros):
        inputs = {path: [] for path in MODULES}
        x = params["embedding"].astype(dtype)[np.asarray(batch["tokens"])]
        for i, policy in enumerate(policies):
            pick = lambda leaf, i=i: leaf[i]  # noqa: E731
            variables = {"params": jax.tree.map(pick, params["layers"])}
            if policy.recipe("layers/mlp/up").histories:
                variables[HISTORIES] = jax.tree.map(pick, histories["layers"])
            own = {path: zeros[path][i] for path in zeros if path != "lm_head"}
            x, got = _layer_by_hand(policy, variables, own, x, batch)
            for path in got:
                inputs[path].append(got[path])
        recipe = policies[-1].recipe("lm_head")
        head = {"params": params["lm_head"]}
        if recipe.histories:
            head[HISTORIES] = histories["lm_head"]
        value, got = _head_by_hand(
            recipe, params["final_norm"], head, zeros["lm_head"][0], x, batch
        )
        return value, inputs | {"lm_head": [got]}

    return zeros, loss


# Compiled by themselves: equal layers are one program.
@functools.partial(jax.jit, static_argnums=0)
def _layer_by_hand(policy, variables, zeros, x, batch):
    """What one layer returns, and what each of its linears got."""
    inputs = {}

    def recorded(layers, scopes, x, *args):
        found = []
        for layer, y in zip(layers, together(layers, scopes, x, *args), strict=True):
            path = "/".join(("layers", *layer.path))
            found.append(y + zeros[path].astype(y.dtype))
            inputs[path] = x
        return tuple(found)

    together = linears.apply_together
    with mock.patch.object(linears, "apply_together", recorded):
        block = Block(CONFIG, policy, None, None)
        y = block.apply(variables, x, batch["segments"], batch["positions"])
    return y, inputs


@functools.partial(jax.jit, static_argnums=0)
def _head_by_hand(recipe, final_norm, variables, zeros, x, batch):
    """The loss, and what the head got."""
    x = RMSNorm(CONFIG.norm_eps).apply({"params": final_norm}, x)
    logits = Dense(V, recipe, preferred_element_type=jnp.float32).apply(variables, x) + zeros
    log_p = jax.nn.log_softmax(logits)
    nll = -jnp.take_along_axis(log_p, batch["targets"][:, :, None], axis=-1)[:, :, 0]
    return jnp.sum(nll * batch["weights"]) / jnp.sum(batch["weights"]), x


def _kernel(params, path):
    node = params
    for part in path.split("/"):
        node = node[part]
    return node["kernel"]


def test_histories_hold_the_amaxes_of_what_each_linear_got():
    """All operands of all linears of all layers and of the head: slot 0 is the amax as found by
    the loop in `by_hand`, the rest is the old history, one slot on.

    In float32, where the loop and the scan differ by reordered sums only, 320 * 2^-24 as for
    unrolling. Such a difference can turn a cast to the neighboring code, 2^-4 of one of at least
    32 terms of a sum, which moves an amax by a thousandth or less; weights not at all."""
    policy, histories = EVERYWHERE, histories_of(EVERYWHERE)
    model = Transformer(CONFIG, policy, dtype=jnp.float32)
    loss, (_, new) = gradients(model, enlarged(), histories, batch())
    zeros, f = by_hand(enlarged(), histories, [policy] * LAYERS, batch(), jnp.float32)
    (value, x), g = jax.value_and_grad(f, has_aux=True)(zeros)
    assert float(value) == pytest.approx(float(loss), rel=1e-3)
    found = leaves(new)
    assert len(found) == 3 * len(MODULES)
    amax = lambda a: np.abs(np.asarray(a, np.float32)).max()  # noqa: E731
    for path in MODULES:
        stacked = (lambda a: np.asarray(a)[None]) if path == "lm_head" else np.asarray
        for layer in range(1 if path == "lm_head" else LAYERS):
            expected = {
                "x": amax(x[path][layer]),
                "w": amax(stacked(_kernel(enlarged(), path))[layer]),
                "g": amax(g[path][layer]),
            }
            for operand, value in expected.items():
                history = stacked(found[f"{path}/{operand}_amax_history"])[layer]
                np.testing.assert_array_equal(history[1:], OLD[:-1])
                tolerance = 0 if operand == "w" else 1e-3
                np.testing.assert_allclose(history[0], value, rtol=tolerance, err_msg=path)


def test_an_exempt_layer_runs_in_bf16_and_keeps_its_histories():
    """The first of three is exempt: the loop by hand, its first layer alone in bf16, has the same
    loss (bound as above), and with other layers exempt it has another. Over two microbatches; the
    histories of the exempt layer come out as they went in."""
    policy = exempt("fp8_delayed", 1, 0)
    histories = histories_of(policy)
    model = Transformer(CONFIG, policy, dtype=jnp.float32)
    state = step.TrainState(
        step=jnp.int32(0),
        params=enlarged(),
        histories=histories,
        opt_state=(),
        key=jax.random.key(0),
    )
    _, _, new = jax.jit(lambda s, b: step.accumulate(model, s, b, 2))(state, batch())
    merged = jax.tree.map(merge_history, histories, new)
    for path, history in leaves(merged).items():
        history = np.asarray(history)
        np.testing.assert_array_equal(history[0], OLD, err_msg=path)
        np.testing.assert_array_equal(history[1:, 1:], [OLD[:-1]] * 2)
        assert (history[1:, 0] != OLD[0]).all()

    inside, outside = policy.without_exemptions(), POLICIES["bf16"]

    def loss_of(*policies):
        zeros, f = by_hand(enlarged(), histories, policies, batch(), jnp.float32)
        return float(f(zeros)[0])

    ours = float(jax.jit(_mean_loss, static_argnums=2)(enlarged(), histories, model, batch()))
    right = loss_of(outside, inside, inside)
    wrong = [loss_of(inside, inside, outside), loss_of(inside, outside, inside)]
    wrong += [loss_of(inside, inside, inside), loss_of(outside, outside, outside)]
    error = abs(ours - right)
    assert error <= 1e-5 * right and error < 0.1 * min(abs(ours - w) for w in wrong)


@pytest.mark.optimized_too
@pytest.mark.parametrize("ends", [(LAYERS, 0), (0, LAYERS)])
def test_all_layers_exempt_are_the_bf16_policy(ends):
    tokens = batch()["tokens"]
    policy = exempt("fp8_delayed", *ends)
    got = logits_of(Transformer(CONFIG, policy), enlarged(), tokens, histories=histories_of(policy))
    np.testing.assert_array_equal(got, logits_of(Transformer(CONFIG), enlarged(), tokens))
    quantized = untied_logits("fp8_delayed", tokens)
    assert (quantized != np.asarray(got)).mean() > 0.9


def test_the_first_step_of_delayed_scaling_has_the_gradients_of_bf16():
    """At initialization, with empty histories that seed themselves: nothing is flushed. The design
    asks for a cosine of 0.99; no leaf of any layer may hide below 0.97 in it."""
    params = initial("fp8_delayed")["params"]
    empty = histories_of("fp8_delayed", np.zeros(16, np.float32))
    exact = gradients(Transformer(CONFIG), params, {}, batch())[1][0]
    model = Transformer(CONFIG, "fp8_delayed", seeded=False)
    seeded = gradients(model, params, empty, batch())[1][0]

    def cosine(a, b):
        a, b = np.ravel(np.asarray(a, np.float64)), np.ravel(np.asarray(b, np.float64))
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

    whole = [np.concatenate([np.ravel(g) for g in jax.tree.leaves(t)]) for t in (seeded, exact)]
    assert 0.99 <= cosine(*whole) < 1 - 1e-7  # and something was quantized
    for path, got in leaves(seeded).items():
        want = leaves(exact)[path]
        stack = path.startswith("layers")
        for i in range(LAYERS if stack else 1):
            pair = (got[i], want[i]) if stack else (got, want)
            assert cosine(*pair) >= 0.97, (path, i)


# Smooth-SwiGLU ------------------------------------------------------------------------------------

SMOOTH = dataclasses.replace(CONFIG, mlp="smooth_swiglu")


@pytest.mark.parametrize("policy", ["bf16", "fp8_delayed"])
def test_smoothing_keeps_the_parameter_tree(policy):
    assert abstract_variables(Transformer(SMOOTH, policy)) == abstract_variables(
        Transformer(CONFIG, policy)
    )


@pytest.mark.optimized_too
def test_a_smooth_model_has_the_same_bits_in_high_precision_and_trains_in_fp8():
    """Powers of two are taken from one factor and given to the other. In FP8, where rounding tells
    them apart, a step down the gradient is one down the loss."""
    tokens = batch()["tokens"]
    one, other = (logits_of(Transformer(config), enlarged(), tokens) for config in (CONFIG, SMOOTH))
    np.testing.assert_array_equal(one, other)
    policy = Policy((("layers/mlp/down", RECIPES["fp8_current"]),), name="down")
    params = jax.device_get(enlarged())
    before, (gradient, _) = gradients(Transformer(SMOOTH, policy), params, {}, batch())
    gradient = jax.device_get(gradient)
    assert all(np.isfinite(g).all() and np.any(g) for g in jax.tree.leaves(gradient))
    stepped = jax.tree.map(lambda w, g: w - np.float32(1e-3) * g, params, gradient)
    after, _ = gradients(Transformer(SMOOTH, policy), stepped, {}, batch())
    assert np.isfinite(after) and after < before


@functools.partial(jax.jit, static_argnames=("config", "recipe"))
def feed_forward(config: ModelConfig, params, x, recipe: str = "bf16"):
    """y of one MLP, and the gradients of x and parameters for dy = cos y; `recipe` is for the last
    product alone."""

    policy = Policy((("layers/mlp/down", RECIPES[recipe]),), name="down")
    linears = Linears(config, policy, "emulated", "layers/mlp", None)

    class Whole(nn.Module):
        @nn.compact
        def __call__(self, x):
            return FeedForward(config, linears, name="mlp")(x)

    def value(params, x):
        y = Whole().apply({"params": {"mlp": params}}, x)
        return jnp.sum(jnp.sin(y)), y

    (_, y), gradients = jax.value_and_grad(value, argnums=(0, 1), has_aux=True)(params, x)
    return y, gradients


def mlp_inputs(dtype, larger: float = 1.0):
    """x and kernels of an MLP whose hidden units are of size 1 or so, but for number 7: it is
    `larger` times as large, and its row of the last kernel as much smaller."""
    rng = np.random.default_rng(0)
    kernels = {"gate": (D, F), "up": (D, F), "down": (F, D)}
    params = {name: {"kernel": rng.normal(size=s) / 4} for name, s in kernels.items()}
    params["up"]["kernel"][:, 7] *= larger
    params["down"]["kernel"][7] /= larger
    as_dtype = jnp.float64 if dtype == jnp.float64 else jnp.float32
    params = jax.tree.map(lambda kernel: jnp.asarray(kernel, as_dtype), params)
    return params, jnp.asarray(rng.normal(size=(B, L, D)), dtype)


@pytest.mark.optimized_too
@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32, jnp.bfloat16])
def test_smoothing_is_the_same_function(dtype):
    """To the bit (for float64, 1e-12 of each array's norm is what was asked for), forward and
    backward; channels of zeros and of numbers as large as 2^60 among them."""
    with jax.enable_x64(dtype == jnp.float64):
        params, x = mlp_inputs(dtype, larger=2.0**60)
        params["up"]["kernel"] = params["up"]["kernel"].at[:, 3].set(0.0)
        plain, smooth = (feed_forward(config, params, x) for config in (CONFIG, SMOOTH))
        assert plain[0].dtype == dtype and np.isfinite(np.asarray(plain[0], np.float64)).all()
        assert_same(smooth, plain)


@pytest.mark.parametrize(
    ("recipe", "larger", "lost"),
    [("fp8_current", 2.0**10, 0.0), ("fp8_current", 2.0**20, 0.9), ("fp4_block", 2.0**10, 0.7)],
)
def test_smoothing_makes_channels_of_all_sizes_alike(recipe, larger, lost):
    """An outlier channel whose row of the kernel is as much smaller changes no bit of the result,
    as each channel is divided by its own size. The error is that of two roundings to nearest: at
    most 2 * 2^-4 in E4M3 and 2 * 2^-2 in E2M1, if they never cancelled.

    Without smoothing, E4M3 takes an outlier of 2^10 as it takes none: its normal numbers span
    2^14.8. At 2^20 what is less than half its smallest number, 2^-18.8 of the largest, is lost: all
    of the other channels but numbers 2.3 times as large as the largest of this one was, and so most
    of the output. E2M1 loses what is under 2^-4.6 of a token's largest, at 2^10 all the others of
    the tokens where the outlier is not by chance near zero."""
    x = mlp_inputs(jnp.bfloat16)[1]
    params, outlier = (mlp_inputs(jnp.bfloat16, factor)[0] for factor in (1.0, larger))
    exact = np.asarray(feed_forward(CONFIG, params, x.astype(jnp.float32))[0], np.float64)

    def error(y):
        return np.linalg.norm(np.asarray(y, np.float64) - exact) / np.linalg.norm(exact)

    smooth, _ = feed_forward(SMOOTH, params, x, recipe)
    np.testing.assert_array_equal(feed_forward(SMOOTH, outlier, x, recipe)[0], smooth)
    bound = 2 * as_recipe(recipe).fwd_x.format.unit_roundoff
    assert error(smooth) < bound
    plain = error(feed_forward(CONFIG, outlier, x, recipe)[0])
    assert plain > lost if lost else plain < bound


# Randomness ---------------------------------------------------------------------------------------


def test_stochastic_rounding_needs_a_key():
    with pytest.raises(ValueError, match="needs a key"):
        logits_of(Transformer(CONFIG, stochastic()), enlarged(), batch()["tokens"])


def test_every_cast_of_every_layer_has_its_own_key_and_a_run_is_reproducible(monkeypatch):
    """The keys that arrive at `quantize`, one backward pass long, are those of the design:
    folded(key, layer, module, operand), each once, for 7 linears and 6 casts of the last two
    of three layers. The first is exempt: layers are counted in the model, not in their scan.
    The head comes behind the last layer: folded(key, layers, operand)."""
    seen = []

    def spy(x, *args, key, **kwargs):
        jax.debug.callback(lambda k: seen.append(tuple(np.asarray(k))), jax.random.key_data(key))
        return quantize(x, *args, key=key, **kwargs)

    quantize = emulated.quantize_unchecked
    monkeypatch.setattr(emulated, "quantize_unchecked", spy)
    model = Transformer(CONFIG, dataclasses.replace(stochastic(), bf16_first=1))
    f = jax.jit(lambda key: traced_gradients(model, enlarged(), {}, batch(), key))
    one = f(jax.random.key(1))
    jax.effects_barrier()
    recorded = sorted(seen)
    expected = [
        folded(jax.random.key(1), layer, module, operand)
        for layer in (1, 2)
        for module in range(7)
        for operand in range(6)
    ]
    expected += [folded(jax.random.key(1), LAYERS, operand) for operand in range(6)]
    assert recorded == sorted(map(tuple, expected))
    assert len(set(recorded)) == 2 * 7 * 6 + 6
    assert_same(f(jax.random.key(1)), one)
    other = f(jax.random.key(2))
    for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(one), strict=True):
        assert (np.asarray(a) != np.asarray(b)).any()


def test_the_linears_of_a_part_and_the_head_have_keys_of_their_own(monkeypatch):
    key = jax.random.key(1)
    linears = Linears(CONFIG, as_policy("bf16"), None, "layers/attention", key)
    keys = [jax.random.key_data(each) for each in linears.keys("qkv")]
    assert len({*map(tuple, np.stack(keys).tolist())}) == 3

    def head(self, policy, x_BLD, table_VD, key):
        return jax.random.key_data(key).reshape(1, 1, -1)

    variables = {"params": enlarged()}
    monkeypatch.setattr(Transformer, "_head", head)
    rows = (batch()[name] for name in ("tokens", "segments", "positions"))
    words = jax.jit(Transformer(CONFIG, "bf16").apply)(variables, *rows, key)
    np.testing.assert_array_equal(words[0, 0], folded(key, LAYERS))


# Counts -------------------------------------------------------------------------------------------


def training_program(policy, **kwargs):
    """The jaxpr of value_and_grad of the loss."""
    model = Transformer(CONFIG, policy, **kwargs)
    f = functools.partial(_mean_loss, model=model, batch=batch())
    return jax.make_jaxpr(jax.value_and_grad(f, argnums=(0, 1)))(
        enlarged(), histories_of(policy)
    ).jaxpr


@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_current"])
def test_a_training_step_has_three_float8_products_a_linear(name):
    """In the loops' bodies, which stand for all layers: 7 forward, 14 backward."""
    assert float8_products(training_program(name, backend="xla")) == 7 * 3
    assert float8_products(training_program("bf16", backend="xla")) == 0


@pytest.mark.parametrize(("first", "last"), [(1, 0), (0, 2), (1, 1)])
def test_exempt_layers_make_no_float8_products(first, last):
    program = training_program(exempt("fp8_delayed", first, last), backend="xla")
    run = sum(
        times
        for eqn, times in equations(program)
        if eqn.primitive is lax.dot_general_p
        and all(v.aval.dtype.itemsize == 1 for v in eqn.invars)
    )
    assert run == 21 * (LAYERS - first - last)


# Attention ----------------------------------------------------------------------------------------


@pytest.mark.optimized_too
def test_an_attention_object_is_as_good_as_its_name():
    """The same bits; and an equal object is an equal model, so that nothing is compiled anew."""
    named, given = (
        logits_of(Transformer(CONFIG, attention=fix), enlarged(), batch()["tokens"])
        for fix in ("stabilized", reference(RowMax()))
    )
    np.testing.assert_array_equal(given, named)
    one, other = (Transformer(CONFIG, attention=reference(RowMax())) for _ in range(2))
    assert one == other and hash(one) == hash(other)
    assert one != Transformer(CONFIG, attention=reference(RowMax(beta=3.0)))


# Bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(remat="ful"), "unknown remat policy 'ful'.*'full'"),
        (dict(policy="fp8_delay"), "unknown policy 'fp8_delay'.*'fp8_delayed'"),
        (dict(policy="fp8_block", backend="emulate"), "unknown backend 'emulate'.*'emulated'"),
        (dict(policy=Policy((("layers/mpl/*", RECIPES["fp8_block"]),))), "'layers/mpl/[*]'"),
        (
            dict(policy=exempt("fp8_block", 2, 2)),
            "2 first and 2 last layers are exempt, but the model has only 3",
        ),
    ],
)
def test_unknown_names_raise_with_the_near_ones(kwargs, message):
    with pytest.raises(ValueError, match=message):
        abstract_variables(Transformer(CONFIG, **kwargs))


def test_a_backend_that_cannot_run_the_policy_says_so():
    with pytest.raises(NotImplementedError, match="'xla' cannot run recipe 'fp8_block'"):
        abstract_variables(Transformer(CONFIG, "fp8_block", backend="xla"))
