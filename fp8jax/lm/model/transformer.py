"""The decoder that all families share: GPT-2, Llama, Gemma differ by configuration only.

Legend: B batch, L length, D residual width, N query heads, K key and value heads, H head size,
F hidden width, V vocabulary, P learned positions.

Parameters are float32 and do not depend on precision, rematerialization or unrolling. The layers
are one stack: every leaf under "layers" has a leading axis of layers. `lax.scan` runs over static
slices of this stack, one slice for each stretch of layers with the same recipes (the policy may
exempt the first and last layers). So a checkpoint trained in one precision loads in any other. The
usual alternative, one `nn.scan` for each stretch, was rejected: the parameter tree would depend on
the policy.

The policy decides by module path (`MODULES`) in which recipe a linear runs. The model's
`ModelConfig` (config.py) decides which parts the model has.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from fp8jax.gemm.backends.choice import choose_backend
from fp8jax.gemm.frozen import has_frozen, take_layers
from fp8jax.gemm.histories.summary import summarize
from fp8jax.gemm.modules import Dense, Fp8DotGeneral
from fp8jax.gemm.vjp import GEMM_OUTPUT, QUANTIZED_INPUT
from fp8jax.lm.mesh import constrain, weight_specs
from fp8jax.lm.model.attention import Implementation
from fp8jax.lm.model.cache import Caches, slots_of
from fp8jax.lm.model.config import ModelConfig
from fp8jax.lm.model.embedding import look_up
from fp8jax.lm.model.layer import AMAXES, Block, fold_in
from fp8jax.lm.model.layer_kinds import LayerKind, kinds_of_layers
from fp8jax.lm.model.norms import norm_layer
from fp8jax.lm.model.probes import transformer_probes, transformer_rows
from fp8jax.lm.model.promotion import Promotion
from fp8jax.lm.model.stretches import Stretch, is_exact, stretches
from fp8jax.lookup import lookup
from fp8jax.nn import HISTORIES, TELEMETRY, to_max_combining
from fp8jax.numerics.module_paths import MODULES
from fp8jax.numerics.names import as_policy
from fp8jax.numerics.policy import Policy
from fp8jax.numerics.recipe import Recipe
from fp8jax.numerics.tiles import tensor_amax
from fp8jax.telemetry.rows import Row


@dataclasses.dataclass(frozen=True)
class Remat:
    """What each layer saves for its backward.

    Attributes:
      policy: of `jax.checkpoint`: what is saved, and not recomputed; None saves everything.
      fp8_inputs: whether the inputs of norms and activations are saved in FP8 (fp8_inputs.py).
    """

    policy: Callable[..., Any] | None
    fp8_inputs: bool = False


# "dots" saves the outputs of the linears. "quantized" also saves their quantized inputs, so that no
# input is quantized twice. A recomputed value has the same bits, since casts are deterministic;
# what "fp8_inputs" saves has not.
REMAT = {
    "none": Remat(None),
    "dots": Remat(jax.checkpoint_policies.save_only_these_names(GEMM_OUTPUT)),
    "quantized": Remat(jax.checkpoint_policies.save_only_these_names(GEMM_OUTPUT, QUANTIZED_INPUT)),
    "full": Remat(jax.checkpoint_policies.nothing_saveable),
    "fp8_inputs": Remat(None, fp8_inputs=True),
}


class Transformer(nn.Module):
    """tokens -> logits. If the policy has delayed scaling, the collection `HISTORIES` holds amaxes.

    For inference, `freeze` (freeze.py) replaces the kernels by what their casts make of them.

    Attributes:
      config: shape of the model.
      policy: a key of `POLICIES` or a `Policy`.
      backend: a key of `BACKENDS`, or None for the fastest that can run the recipe.
      attention: a key of `ATTENTIONS`, an `Implementation`, or None for the fastest here.
      remat: a key of `REMAT`: what layers save for the backward, and what that recomputes.
      unroll: layers in one iteration of the loop over layers. n_layers removes the loop, which
        takes longer to compile and saves the copies into and out of the stack.
      dtype: dtype of the activations and of the residual stream.
      zero_padding: whether positions of segment 0 carry zeros into every linear, so that they raise
        no amax. Training packs its rows and has next to no padding.
      seeded: promise that no amax history is empty, as after a first step. With False, empty ones
        seed themselves, as in `fp8jax.nn.Dense`; a first step of delayed scaling needs that.

    `apply(..., mutable=[AMAXES])` also returns the amax of every output inside every layer. An
    output that contains a NaN has the amax NaN.

    Example:
      >>> model = fp8jax.Transformer(fp8jax.MODELS["llama_tiny"], policy="fp8_delayed")
      >>> tokens = segments = jnp.ones((1, 8), jnp.int32)
      >>> positions = jnp.arange(8)[None]
      >>> variables = jax.eval_shape(model.init, jax.random.key(0), tokens, segments, positions)
      >>> sorted(variables)
      ['_overwrite_with_gradient', 'params']
      >>> logits = jax.eval_shape(model.apply, variables, tokens, segments, positions)
      >>> logits.shape, logits.dtype.name
      ((1, 8, 320), 'float32')
    """

    config: ModelConfig
    policy: str | Policy = "bf16"
    backend: str | None = None
    attention: str | Implementation | None = None
    remat: str = "none"
    unroll: int = 1
    dtype: Any = jnp.bfloat16
    zero_padding: bool = False
    seeded: bool = True

    @property
    def resolved_policy(self) -> Policy:
        """The policy that the name means."""
        return as_policy(self.policy)

    @property
    def has_layer_loop(self) -> bool:
        """Whether the compiled program has a loop over layers."""
        return self.unroll < self.config.n_layers

    def telemetry_probes(self, what_if: Policy | None = None) -> dict[str, Any]:
        """Returns a probe for each linear (probes.py), as `fp8jax.telemetry.measure` asks for."""
        return transformer_probes(self, what_if)

    def telemetry_rows(
        self, statistics: dict[str, Any], *, step: int, promotion: Promotion | None = None
    ) -> list[Row]:
        """Returns the rows of what the probes have measured (probes.py)."""
        return transformer_rows(self, statistics, step=step, promotion=promotion)

    @nn.compact
    def __call__(
        self,
        tokens_BL: Int[Array, "B L"],
        segments_BL: Int[Array, "B L"],
        positions_BL: Int[Array, "B L"],
        key: Shaped[Array, "..."] | None = None,
        promotion: Promotion | None = None,
        *,
        head: bool = True,
        cache: Caches | None = None,
        only_B: Int[Array, " B"] | None = None,
    ) -> Any:
        """Returns float32 logits [B, L, V] of the next token, or the operands of the head.

        With a cache, returns (logits or operands, the cache with these tokens).

        Args:
          tokens_BL: token ids.
          segments_BL: number of each token's document within its row, from 1; 0 is padding.
          positions_BL: position of each token within its segment.
          key: random key, for policies that round stochastically.
          promotion: what runs in another policy instead; None for nothing.
          head: False leaves out the head, and returns its input x_BLD in `dtype` and its weight
            w_DV as stored: the logits are x_BLD w_DV if the head's recipe casts nothing
            (chunked_loss.py).
          cache: of the tokens before these (cache.py), of one segment a row; positions_BL are then
            slots.
          only_B: the one index along L of each row that reaches the head; None for all.

        Raises:
          ValueError: a name is unknown, the policy does not fit the model, there are fewer learned
            positions than the rows or the cache have, or a cache comes with promotions or `AMAXES`.
        """
        c, policy = self.config, self.resolved_policy
        policy.check(c.modules, c.n_layers)
        c.check_length(tokens_BL.shape[1] if cache is None else slots_of(cache))
        init = nn.with_logical_partitioning(nn.initializers.normal(0.02), ("vocab", "embed"))
        table_VD: Any = self.param("embedding", init, (c.vocab_size, c.d_model))
        x_BLD = _scaled(c, look_up(table_VD, tokens_BL, "vocab", self.dtype))
        if c.learned_positions:
            init = nn.with_logical_partitioning(
                nn.initializers.normal(0.02), ("positions", "embed")
            )
            table_PD: Any = self.param("position_embedding", init, (c.learned_positions, c.d_model))
            x_BLD += look_up(table_PD, positions_BL, "positions", self.dtype)
        x_BLD = constrain(x_BLD, "batch", "length", "residual")
        inputs = _LayerInputs(segments_BL, positions_BL, key, promotion, kinds_of_layers(c))
        x_BLD, cache = self._layers(policy, x_BLD, inputs, cache)
        if only_B is not None:
            x_BLD = jnp.take_along_axis(x_BLD, only_B[:, None, None], axis=1)
            segments_BL = jnp.take_along_axis(segments_BL, only_B[:, None], axis=1)
        x_BLD = norm_layer(c, "final_norm")(x_BLD)
        if self.zero_padding:
            x_BLD = jnp.where(segments_BL[..., None] > 0, x_BLD, 0)
        if not head:
            out: Any = x_BLD, self._head_weight(policy, table_VD)
        else:
            out = self._head(policy, x_BLD, table_VD, fold_in(key, c.n_layers))
            out = constrain(out, "batch", "length", "vocab")
        return out if cache is None else (out, cache)

    def _head(self, policy: Policy, x_BLD, table_VD, key) -> Float[Array, "B L V"]:
        """Returns float32 logits. The head has its own kernel, or uses the embedding if tied.

        A tied head that is frozen (freeze.py) has its own codes.
        """
        recipe = policy.recipe("lm_head")
        frozen = has_frozen(self.get_variable("params", "lm_head"))
        if self.config.tie_embeddings and not frozen:
            head = Fp8DotGeneral(recipe, self.backend, seeded=self.seeded, name="lm_head")
            return head(
                x_BLD,
                table_VD,
                (((2,), (1,)), ((), ())),
                preferred_element_type=jnp.float32,
                key=key,
            )
        return self._untied_head(recipe)(x_BLD, key)

    def _head_weight(self, policy: Policy, table_VD) -> Float[Array, "D V"]:
        if self.config.tie_embeddings:
            return table_VD.T
        return (
            self._untied_head(policy.recipe("lm_head")).variables_for(self.config.d_model)[0].value
        )

    def _untied_head(self, recipe: Recipe) -> Dense:
        return Dense(
            self.config.vocab_size,
            recipe,
            self.backend,
            kernel_init=nn.initializers.normal(0.02),
            kernel_axes=("embed", "vocab"),
            preferred_element_type=jnp.float32,
            seeded=self.seeded,
            gathered=weight_specs("embed", "vocab"),
            name="lm_head",
        )

    def _layers(self, policy: Policy, x_BLD, inputs: "_LayerInputs", cache: Caches | None):
        """Runs all layers, one stretch after the other; returns x and the cache."""
        remat = lookup("remat policy", self.remat, REMAT)
        params, histories = self._stack(policy)
        if self.is_initializing():  # the row has one token, which not every attention accepts
            return x_BLD, cache
        watching, amaxes = self.is_mutable_collection(AMAXES), []
        if cache is not None and (watching or inputs.promotion is not None):
            raise ValueError("a cache is for inference: without promotions and amaxes of outputs")
        caches: list[Any] = []
        for stretch in stretches(policy, self.config.n_layers):
            variables = {"params": params}
            if _has_layer_histories(stretch.policy):
                variables[HISTORIES] = histories
            if self.has_variable(TELEMETRY, "layers"):
                variables[TELEMETRY] = self.get_variable(TELEMETRY, "layers")
            if cache is not None:
                x_BLD, part = _run_cached(self, stretch, variables, x_BLD, inputs, cache)
                caches.append(part)
                continue
            x_BLD, stretch_amaxes = _run_stretch(
                self, stretch, variables, x_BLD, inputs, remat, watching
            )
            amaxes.append(stretch_amaxes)
        if watching:
            stacked = jax.tree.map(lambda *parts: jnp.concatenate(parts), *amaxes)
            self.variable(AMAXES, "layers", lambda: stacked)
        return x_BLD, None if cache is None else _joined(caches)

    def backend_of(self, recipe: Recipe) -> str:
        """Returns the name of the backend that runs a recipe here; raises if none can."""
        return choose_backend(self.backend, recipe).name

    def _stack(self, policy: Policy) -> tuple[Any, Any]:
        """Returns the parameters and histories of all layers; their leaves are [n_layers, ...].

        Instead of a stack, parameters and histories may be tuples of one tree for each layer.
        """
        c = self.config
        # Without exemptions, since all layers have histories, also those that do not use them.
        block = Block(c, policy.without_exemptions(), self.backend, None, parent=None)
        ids = jnp.zeros((1, 1), jnp.int32)
        inputs = (jnp.zeros((1, 1, c.d_model), self.dtype), ids, ids, jax.random.key(0))

        if self.is_initializing():
            for path in c.linears:
                self.backend_of(policy.recipe(path))  # raises if it cannot run it
        # Initial parameters do not depend on the policy, and casts are slow to trace.
        plain = block.clone(policy=as_policy("bf16"))

        def init_params(rng):
            keys = jax.random.split(rng, c.n_layers)
            stacked = jax.vmap(lambda key: plain.init(key, *inputs)["params"])(keys)
            return nn.meta.add_axis(stacked, 0, {nn.meta.PARTITION_NAME: "layers"})

        # Where they are given, flax would trace `init_params` to compare shapes, which takes longer
        # than the layers themselves. Those check the shapes of their own slices.
        params: Any = nn.meta.unbox(self.get_variable("params", "layers"))
        if params is None or self.is_initializing():
            params = self.param("layers", init_params)
        elif not (isinstance(params, tuple) or has_frozen(params)):
            _check_layers(params, c.n_layers)
        if not _has_layer_histories(policy):
            return params, {}

        def init_histories():
            shapes = jax.eval_shape(block.init, jax.random.key(0), *inputs)[HISTORIES]
            return jax.tree.map(lambda s: jnp.zeros((c.n_layers, *s.shape), s.dtype), shapes)

        return params, self.variable(HISTORIES, "layers", init_histories).value


def _scaled(config: ModelConfig, x_BLD: Array) -> Array:
    """Returns embeddings as the first layer takes them."""
    if not config.scale_embedding:
        return x_BLD
    return x_BLD * jnp.asarray(math.sqrt(config.d_model), x_BLD.dtype)


def _check_layers(params: Any, n_layers: int) -> None:
    for path, leaf in jax.tree.leaves_with_path(params):
        if leaf.shape[:1] != (n_layers,):
            raise ValueError(
                f"params of layers{jax.tree_util.keystr(path)} have the shape {leaf.shape}, "
                f"but the model has {n_layers} layers"
            )


class _LayerInputs(NamedTuple):
    """What every layer reads besides x: see `Transformer.__call__`."""

    segments_BL: Any
    positions_BL: Any
    key: Any
    promotion: Any
    kinds: LayerKind | None

    def kinds_from(self, begin: int, end: int) -> LayerKind | None:
        return jax.tree.map(lambda leaf: leaf[begin:end], self.kinds)


# Functions, not methods of Transformer: flax would add a method's name to the name scopes of the
# compiled program.


def _run_stretch(
    model: Transformer,
    stretch: Stretch,
    variables: dict[str, Any],
    x_BLD: Array,
    inputs: _LayerInputs,
    remat: Remat,
    watching: bool,
) -> tuple[Array, Any]:
    """Runs one stretch of layers as a `lax.scan` over its slice of the stack.

    Layers whose variables are tuples run one after the other; so their gradients are tuples, too.

    Args:
      variables: of all layers: stacks with a leading axis of layers, or tuples.
      remat: an entry of `REMAT`.
      watching: whether to return amaxes.

    Returns:
      x after the stretch, and if `watching` the amax [layers of the stretch] of each output in a
      layer, else None.
    """
    block = Block(
        model.config,
        stretch.policy,
        model.backend,
        model.attention,
        model.zero_padding,
        model.seeded,
        remat.fp8_inputs,
        parent=None,
    )

    def layer(x_BLD, scanned):
        variables, index, promotion, kind = scanned
        key = fold_in(inputs.key, index)
        arguments = x_BLD, inputs.segments_BL, inputs.positions_BL, key, promotion, None, kind
        return _apply_layer(block, variables, arguments, watching)

    separate = isinstance(variables["params"], tuple)
    begin, end = stretch.begin, stretch.end
    if remat.policy is not None:
        # Without a loop, XLA would find that the backward computes again what the forward has, and
        # keep that instead.
        together = separate or model.unroll >= end - begin
        layer = jax.checkpoint(layer, policy=remat.policy, prevent_cse=together)
    part = _part_of(variables, begin, end)
    if HISTORIES in part:  # after slicing, which max-combining arrays do not support
        part[HISTORIES] = to_max_combining(summarize(part[HISTORIES]))
    promotion = None
    if inputs.promotion is not None and not is_exact(stretch.policy):
        promotion = inputs.promotion[begin:end]
    scanned = (part, jnp.arange(begin, end), promotion, inputs.kinds_from(begin, end))
    if separate:
        return _run_one_by_one(layer, x_BLD, scanned)
    return lax.scan(layer, x_BLD, scanned, unroll=min(model.unroll, end - begin))


def _run_one_by_one(layer: Callable[..., Any], x_BLD: Array, scanned: Any) -> tuple[Array, Any]:
    """Does what `lax.scan` does, with variables that are tuples; `layer` is traced once."""
    variables, indices, promotion, kinds = scanned
    layer, outs = jax.jit(layer), []
    for i, index in enumerate(indices):
        own = {name: _layer_of(tree, i) for name, tree in variables.items()}
        promoted = None if promotion is None else promotion[i]
        x_BLD, out = layer(x_BLD, (own, index, promoted, _layer_of(kinds, i)))
        outs.append(out)
    return x_BLD, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)


def _part_of(variables: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    """Returns the variables of layers `begin` to `end` - 1, of stacks or of tuples of layers."""
    return {
        name: tree[begin:end] if isinstance(tree, tuple) else take_layers(tree, begin, end)
        for name, tree in variables.items()
    }


def _run_cached(
    model: Transformer,
    stretch: Stretch,
    variables: dict[str, Any],
    x_BLD: Array,
    inputs: _LayerInputs,
    cache: Caches,
) -> tuple[Array, Caches]:
    """Runs one stretch of layers with their caches; returns x and the caches of these layers.

    A stack is scanned. Layers whose cache or parameters are a tuple run one after the other: a loop
    would first copy a layer's weights out of the stack, and its cache into it. They are traced and
    lowered once all the same, and so XLA compiles each kernel once: `layer` is jitted.

    Args:
      variables, cache: of all layers.
    """
    block = Block(
        model.config,
        stretch.policy,
        model.backend,
        model.attention,
        zero_padding=model.zero_padding,
        seeded=model.seeded,
        parent=None,
    )

    @jax.jit
    def layer(x_BLD, scanned):
        variables, index, cache, kind = scanned
        key = fold_in(inputs.key, index)
        rows = inputs.segments_BL, inputs.positions_BL
        return block.apply(variables, x_BLD, *rows, key, cache=cache, kind=kind)

    begin, end = stretch.begin, stretch.end
    kinds = inputs.kinds_from(begin, end)
    if not isinstance(cache, tuple):
        own = jax.tree.map(lambda leaf: leaf[begin:end], cache)
        scanned = (take_layers(variables, begin, end), jnp.arange(begin, end), own, kinds)
        return lax.scan(layer, x_BLD, scanned, unroll=min(model.unroll, end - begin))
    updated = []
    of_stretch = _part_of(variables, begin, end)
    for index in range(begin, end):
        own = {name: _layer_of(tree, index - begin) for name, tree in of_stretch.items()}
        x_BLD, part = layer(x_BLD, (own, index, cache[index], _layer_of(kinds, index - begin)))
        updated.append(part)
    return x_BLD, tuple(updated)


def _layer_of(layers: Any, index: int) -> Any:
    """Returns one layer of a stack, or of a tuple of layers."""
    return layers[index] if isinstance(layers, tuple) else jax.tree.map(lambda x: x[index], layers)


def _joined(parts: list[Any]) -> Caches:
    """Returns the cache of all layers, from those of consecutive stretches."""
    if isinstance(parts[0], tuple):
        return sum(parts, ())
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts) if parts[1:] else parts[0]


def _apply_layer(
    block: Block, variables: Any, arguments: tuple[Any, ...], watching: bool
) -> tuple[Array, Any]:
    """Runs one layer: returns its output, and if `watching` the amax of each output inside it."""
    if not watching:
        return block.apply(variables, *arguments), None  # type: ignore[return-value]
    y_BLD, seen = block.apply(
        variables, *arguments, capture_intermediates=True, mutable=["intermediates"]
    )
    return y_BLD, jax.tree.map(tensor_amax, seen["intermediates"])


def _has_layer_histories(policy: Policy) -> bool:
    """Whether a linear in a layer has amax histories; the head does not count."""
    return any(policy.recipe(path).histories for path in MODULES if path.startswith("layers/"))


def abstract_variables(model: Transformer) -> Any:
    """Returns the shapes of the model's variables, boxed with logical axis names.

    Nothing is allocated. A model is traced once, as that takes a fraction of a second.
    """
    resolved = model.clone(policy=model.resolved_policy)
    found = _abstract_variables(resolved, jax.sharding.get_abstract_mesh())
    return jax.tree.map(lambda leaf: leaf, found)  # dicts of the caller's own


@functools.lru_cache(maxsize=64)
def _abstract_variables(model: Transformer, mesh: jax.sharding.AbstractMesh) -> Any:
    """Under the mesh `mesh`, on which shapes and their shardings may depend."""

    def variables() -> Any:
        tokens, key = jnp.zeros((1, 1), jnp.int32), jax.random.key(0)
        return model.init(key, tokens, tokens, tokens, key)

    return jax.eval_shape(variables)


def count_params(config: ModelConfig) -> int:
    """Returns the number of parameters, embedding and head included."""
    params = abstract_variables(Transformer(config))["params"]
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
