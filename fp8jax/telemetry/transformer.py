"""Telemetry of the library's own transformer: its probes, and its rows.

The LM head has a probe only where its recipe casts something: a head in high precision may be
computed in chunks with the loss (model/chunked_loss.py), and nothing is cast there.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from fp8jax.device import xla
from fp8jax.linear.probe import PROBE, TELEMETRY, empty_probe
from fp8jax.model.layer import HIDDEN
from fp8jax.model.transformer import Transformer, is_exact, stretches
from fp8jax.numerics.names import as_policy
from fp8jax.numerics.policy import Policy
from fp8jax.numerics.recipe import Recipe
from fp8jax.telemetry.rows import NO_LAYER, Row, Table, hidden_row, rows_of

HIDDEN_LINEAR = "layers/mlp"


def transformer_probes(model: Transformer, what_if: Policy | None = None) -> dict[str, Any]:
    """Return the collection `TELEMETRY` of a model: a probe for each linear, of zeros.

    Args:
      what_if: the policy to measure beside the model's own; layers that it exempts are measured as
        the others. None for none.

    Raises ValueError for a what-if policy that does not fit the model.
    """
    n_layers = model.config.n_layers
    if what_if is not None:
        what_if.check(model.config.modules, n_layers)
    layers: dict[str, Any] = {}
    tree: dict[str, Any] = {"layers": layers}
    for path in model.config.modules:
        beside = None if what_if is None else what_if.recipe(path)
        group, _, rest = path.partition("/")
        if group == "layers":
            part, _, name = rest.partition("/")
            own = layers.setdefault(part, {})
            own[name] = {PROBE: empty_probe(beside, (n_layers,))}
        elif as_policy(model.policy).recipe(path).casts:
            tree[path] = {PROBE: empty_probe(beside)}
    layers["mlp"][HIDDEN] = jnp.zeros(n_layers, jnp.float32)
    return tree


def transformer_rows(
    model: Transformer, statistics: dict[str, Any], *, step: int, promoted: Any = None
) -> list[Row]:
    """Return the rows of one measured step or forward pass.

    Args:
      statistics: a tree as `transformer_probes` returns, of NumPy arrays.
      promoted: bool [layers], which ran in the policy `model.high`; None for none.
    """
    policy, n_layers = as_policy(model.policy), model.config.n_layers
    rows: list[Row] = []
    for path in model.config.modules:
        group, _, rest = path.partition("/")
        if group == "layers":
            part, _, name = rest.partition("/")
            recipes = _recipes(model, policy, path, promoted)
            probe = statistics["layers"][part][name][PROBE]
            rows += rows_of(probe, path, recipes, step=step, layers=range(n_layers))
        elif path in statistics:
            probe = jax.tree.map(lambda leaf: leaf[None], statistics[path][PROBE])
            recipe = policy.recipe(path)
            rows += rows_of(probe, path, [recipe], step=step, layers=[NO_LAYER])
    for layer, amax in enumerate(statistics["layers"]["mlp"][HIDDEN]):
        rows.append(
            hidden_row(float(amax), HIDDEN_LINEAR, step=step, layer=layer, recipe=policy.name)
        )
    return rows


def _recipes(model: Transformer, policy: Policy, path: str, promoted: Any) -> list[Recipe]:
    """Return the recipe that the linear at `path` ran in each layer."""
    recipes: list[Recipe] = []
    for stretch in stretches(policy, model.config.n_layers):
        low = high = stretch.policy.recipe(path)
        if model.high is not None and not is_exact(stretch.policy):
            high = as_policy(model.high).recipe(path)
        for layer in range(stretch.begin, stretch.end):
            recipes.append(high if promoted is not None and promoted[layer] else low)
    return recipes


def measure_forward(
    model: Transformer,
    variables: Any,
    tokens_BL: Int[Array, "B L"],
    segments_BL: Int[Array, "B L"],
    positions_BL: Int[Array, "B L"],
    *,
    what_if: str | Policy | None = None,
    key: Any = None,
) -> Table:
    """Return the telemetry of x and w in one forward pass, as inference computes it.

    With frozen kernels there are rows of x alone: their weights were quantized before. The pass is
    differentiated with respect to its probes, so it takes the memory of a backward pass without
    weight gradients; use a few rows of text.

    Args:
      model, variables: as for `model.apply`; histories, if any, are read and stay as they are.
      tokens_BL, segments_BL, positions_BL, key: as in `Transformer.__call__`.
      what_if: a policy, or the name of one, to measure beside the model's own.

    Returns:
      A `Table` with step 0.

    Raises:
      ValueError: for an unknown what-if policy, and for one that does not fit the model.

    Example:
      >>> config = dataclasses.replace(fp8jax.MODELS["gpt2_tiny"], n_layers=1)
      >>> model = fp8jax.Transformer(config, policy="bf16")
      >>> tokens = segments = jnp.ones((1, 4), jnp.int32)
      >>> positions = jnp.arange(4)[None]
      >>> shapes = jax.eval_shape(model.init, jax.random.key(0), tokens, segments, positions)
      >>> variables = jax.tree.map(lambda p: jnp.full(p.shape, 0.02), shapes)
      >>> table = fp8jax.telemetry.measure_forward(model, variables, tokens, segments, positions)
      >>> rows = table.where(lambda row: row.operand == "w").rows
      >>> for row in rows:
      ...     print(row.layer, row.linear, f"{row.amax:.3f}", row.bias)  # 0.02 * 2^14 < 448
      0 layers/attention/q 0.020 14
      0 layers/attention/k 0.020 14
      0 layers/attention/v 0.020 14
      0 layers/attention/o 0.020 14
      0 layers/mlp/up 0.020 14
      0 layers/mlp/down 0.020 14
    """
    beside = None if what_if is None else as_policy(what_if)
    probes = transformer_probes(model, beside)
    model = model.clone(remat="full") if model.remat == "none" else model

    def outputs(probes, variables, *inputs) -> Array:
        whole = bool(as_policy(model.policy).recipe("lm_head").casts)
        out: Any = model.apply(dict(variables) | {TELEMETRY: probes}, *inputs, head=whole)
        return jnp.sum(out if whole else out[0], dtype=jnp.float32)

    inputs = variables, tokens_BL, segments_BL, positions_BL, key
    gradients = jax.jit(jax.grad(outputs), compiler_options=xla.compiler_options())
    statistics = jax.device_get(gradients(probes, *inputs))
    return Table(tuple(forward_only(transformer_rows(model, statistics, step=0))))


def forward_only(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of a forward pass: without those of the casts that only a gradient makes."""
    return [row for row in rows if row.cast in ("fwd_x", "fwd_w", "")]
