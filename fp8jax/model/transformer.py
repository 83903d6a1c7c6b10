"""The decoder that all families share: GPT-2, Llama and Qwen differ by configuration only.

Legend: B batch, L length, D residual width, N query heads, K key and value heads, H head size,
F hidden width, V vocabulary, P learned positions.

Parameters are float32 and do not depend on precision, rematerialization or unrolling: all layers
are one stack, every leaf under "layers" having a leading axis of layers. They run as `lax.scan`s
over static slices of it, one slice for each stretch of layers with the same recipes (the first
and last ones may be exempt). So a checkpoint of one precision loads under any other. One
`nn.scan` a stretch, the usual spelling, would have made the tree depend on the policy.

Which product is quantized how is decided by the policy, by module path (`MODULES`). Which parts a
model is made of is decided by its `ModelConfig` (config.py).
"""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from fp8jax.device.mesh import constrain
from fp8jax.linear.amax_history import HISTORIES, to_max_combining
from fp8jax.linear.modules import Dense, Fp8DotGeneral
from fp8jax.linear.vjp import GEMM_OUTPUT, QUANTIZED_INPUT
from fp8jax.lookup import lookup
from fp8jax.model.attention import Implementation
from fp8jax.model.config import MODULES, ModelConfig
from fp8jax.model.embedding import look_up
from fp8jax.model.layer import AMAXES, Block, fold_in
from fp8jax.model.norms import norm_layer
from fp8jax.numerics.policy import Policy
from fp8jax.numerics.policy_options import as_policy
from fp8jax.numerics.recipes import HIGH_PRECISION
from fp8jax.numerics.tiles import tensor_amax

# What is kept of a layer for its backward; the rest is computed again: results of its linears
# ("dots"), and their quantized inputs too, so that none is quantized twice ("quantized"). Where
# they are computed again they have the same bits, casts being deterministic.
REMAT: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "dots": jax.checkpoint_policies.save_only_these_names(GEMM_OUTPUT),
    "quantized": jax.checkpoint_policies.save_only_these_names(GEMM_OUTPUT, QUANTIZED_INPUT),
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Transformer(nn.Module):
    """tokens -> logits, with amax histories under `fp8jax.nn.HISTORIES` if the policy delays.

    Attributes:
      config: shapes.
      policy: a key of `POLICIES` or a `Policy`. The first step of a delayed one runs with
        `policy.seeding()`.
      backend: a key of `BACKENDS`, or None for the fastest that can.
      attention: a key of `fp8jax.attention.ATTENTIONS`, an `Implementation`, or None for "xla".
      remat: a key of `REMAT`.
      unroll: layers a loop iteration; n_layers for no loop, which compiles longer and saves the
        copies in and out of the stack.
      dtype: of activations and residual stream.
      high: a key of `POLICIES` or a `Policy` without histories, for layers that are promoted; None
        where that never happens.

    `apply(..., mutable=[AMAXES])` also gives the largest magnitude of what each part of each layer
    computes, NaN where one is NaN.
    """

    config: ModelConfig
    policy: str | Policy = "bf16"
    backend: str | None = None
    attention: str | Implementation | None = None
    remat: str = "none"
    unroll: int = 1
    dtype: Any = jnp.bfloat16
    high: str | Policy | None = None

    @nn.compact
    def __call__(
        self,
        tokens_BL: Int[Array, "B L"],
        segments_BL: Int[Array, "B L"],
        positions_BL: Int[Array, "B L"],
        key: Shaped[Array, "..."] | None = None,
        promoted: Bool[Array, " layers"] | None = None,
    ) -> Float[Array, "B L V"]:
        """float32 logits of the next token; `key` is for policies that round stochastically,
        `promoted` says which layers run in the policy `high` instead, None for none.

        Raises ValueError for unknown names and for a policy that does not fit the model."""
        c, policy = self.config, as_policy(self.policy)
        policy.check(c.modules, c.n_layers)
        c.check_length(tokens_BL.shape[1])
        init = nn.with_logical_partitioning(nn.initializers.normal(0.02), ("vocab", "embed"))
        table_VD: Any = self.param("embedding", init, (c.vocab_size, c.d_model))
        x_BLD = look_up(table_VD, tokens_BL, "vocab", self.dtype)
        if c.learned_positions:
            init = nn.with_logical_partitioning(
                nn.initializers.normal(0.02), ("positions", "embed")
            )
            table_PD: Any = self.param("position_embedding", init, (c.learned_positions, c.d_model))
            x_BLD += look_up(table_PD, positions_BL, "positions", self.dtype)
        x_BLD = constrain(x_BLD, "batch", "length", "residual")
        x_BLD = self._layers(policy, x_BLD, segments_BL, positions_BL, key, promoted)
        x_BLD = norm_layer(c, "final_norm")(x_BLD)
        logits_BLV = self._head(policy, x_BLD, table_VD, fold_in(key, c.n_layers))
        return constrain(logits_BLV, "batch", "length", "vocab")

    def _head(self, policy: Policy, x_BLD, table_VD, key) -> Float[Array, "B L V"]:
        """float32 logits, by a matrix of its own or by the embedding."""
        recipe = policy.recipe("lm_head")
        if self.config.tie_embeddings:
            head = Fp8DotGeneral(recipe, self.backend, name="lm_head")
            return head(
                x_BLD, table_VD, (((2,), (1,)), ((), ())), preferred_element_type=jnp.float32,
                key=key,
            )  # fmt: skip
        return Dense(
            self.config.vocab_size, recipe, self.backend,
            kernel_init=nn.initializers.normal(0.02), kernel_axes=("embed", "vocab"),
            preferred_element_type=jnp.float32, name="lm_head",
        )(x_BLD, key)  # fmt: skip

    def _layers(self, policy: Policy, x_BLD, segments_BL, positions_BL, key, promoted):
        """All layers, stretch by stretch of the stack."""
        remat = lookup("remat policy", self.remat, REMAT)
        params, histories = self._stack(policy)
        if self.is_initializing():  # on a row of one token, which not every attention takes
            return x_BLD
        watching, amaxes = self.is_mutable_collection(AMAXES), []
        for begin, end, recipes in _stretches(policy, self.config.n_layers):
            exact = all(not recipes.recipe(path).casts for path in MODULES)
            high = None if exact or self.high is None else as_policy(self.high)
            block = Block(self.config, recipes, self.backend, self.attention, high, parent=None)

            def layer(x, scanned, block=block):
                variables, index, flag = scanned
                inputs = x, segments_BL, positions_BL, fold_in(key, index), flag
                if not watching:
                    return block.apply(variables, *inputs), None
                y, seen = block.apply(
                    variables, *inputs, capture_intermediates=True, mutable=["intermediates"]
                )
                return y, jax.tree.map(tensor_amax, seen["intermediates"])

            if remat is not None:
                layer = jax.checkpoint(layer, policy=remat, prevent_cse=False)
            variables = {"params": params}
            if _delays_layers(recipes):
                variables[HISTORIES] = histories
            part = jax.tree.map(lambda leaf, b=begin, e=end: leaf[b:e], variables)
            if HISTORIES in part:  # after slicing, which max-combining arrays do not support
                part[HISTORIES] = to_max_combining(part[HISTORIES])
            flags = None if high is None or promoted is None else promoted[begin:end]
            scanned = (part, jnp.arange(begin, end), flags)
            x_BLD, seen = lax.scan(layer, x_BLD, scanned, unroll=min(self.unroll, end - begin))
            amaxes.append(seen)
        if watching:
            stacked = jax.tree.map(lambda *parts: jnp.concatenate(parts), *amaxes)
            self.variable(AMAXES, "layers", lambda: stacked)
        return x_BLD

    def _stack(self, policy: Policy) -> tuple[Any, Any]:
        """Parameters and histories of all layers, with a leading axis of layers."""
        c = self.config
        # Without exemptions: the histories exist for all layers, used or not.
        block = Block(c, policy.without_exemptions(), self.backend, None, parent=None)
        ids = jnp.zeros((1, 1), jnp.int32)
        inputs = (jnp.zeros((1, 1, c.d_model), self.dtype), ids, ids, jax.random.key(0))

        def init_params(rng):
            keys = jax.random.split(rng, c.n_layers)
            stacked = jax.vmap(lambda key: block.init(key, *inputs)["params"])(keys)
            return nn.meta.add_axis(stacked, 0, {nn.meta.PARTITION_NAME: "layers"})

        params = self.param("layers", init_params)
        if not _delays_layers(policy):
            return params, {}

        def init_histories():
            shapes = jax.eval_shape(block.init, jax.random.key(0), *inputs)[HISTORIES]
            return jax.tree.map(lambda s: jnp.zeros((c.n_layers, *s.shape), s.dtype), shapes)

        return params, self.variable(HISTORIES, "layers", init_histories).value


def _delays_layers(policy: Policy) -> bool:
    """Whether a layer's linear keeps histories, the head aside."""
    return any(policy.recipe(path).histories for path in MODULES if path.startswith("layers/"))


def _stretches(policy: Policy, n_layers: int) -> list[tuple[int, int, Policy]]:
    """(first layer, one past the last, policy) of each stretch of layers with the same recipes."""
    exempt = Policy((("layers/*", HIGH_PRECISION),), name="bf16")
    first, last = policy.exempt(n_layers)
    last = n_layers - last
    stretches = [
        (0, first, exempt),
        (first, last, policy.without_exemptions()),
        (last, n_layers, exempt),
    ]
    return [(begin, end, recipes) for begin, end, recipes in stretches if begin < end]


def abstract_variables(model: Transformer) -> Any:
    """Shapes of the model's variables, boxed with logical axis names; nothing is allocated."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    key = jax.random.key(0)
    return jax.eval_shape(model.init, key, tokens, tokens, tokens, key)


def count_params(config: ModelConfig) -> int:
    """Number of parameters, embedding and head included."""
    params = abstract_variables(Transformer(config))["params"]
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
