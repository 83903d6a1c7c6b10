"""The probes of the transformer, and the rows of what they have measured.

The LM head has a probe only where its recipe casts something: a head in high precision may be
computed in chunks with the loss (chunked_loss.py), and nothing is cast there.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fp8jax.gemm.probe import PROBE, empty_probe
from fp8jax.lm.model.layer import HIDDEN
from fp8jax.lm.model.promotion import Promotion
from fp8jax.lm.model.stretches import is_exact, stretches
from fp8jax.numerics.policy import Policy
from fp8jax.numerics.recipe import Recipe
from fp8jax.telemetry.rows import NO_LAYER, Row, hidden_row, rows_of

HIDDEN_LINEAR = "layers/mlp"


def transformer_probes(model: Any, what_if: Policy | None = None) -> dict[str, Any]:
    """Returns the collection `TELEMETRY` of a model: a probe for each linear, of zeros.

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
        elif model.resolved_policy.recipe(path).casts:
            tree[path] = {PROBE: empty_probe(beside)}
    layers["mlp"][HIDDEN] = jnp.zeros(n_layers, jnp.float32)
    return tree


def transformer_rows(
    model: Any, statistics: dict[str, Any], *, step: int, promotion: Promotion | None = None
) -> list[Row]:
    """Returns the rows of one measured step or forward pass.

    Args:
      statistics: a tree as `transformer_probes` returns, of NumPy arrays.
      promotion: which layers ran in another policy, with a NumPy array; None for none.
    """
    policy, n_layers = model.resolved_policy, model.config.n_layers
    rows: list[Row] = []
    for path in model.config.modules:
        group, _, rest = path.partition("/")
        if group == "layers":
            part, _, name = rest.partition("/")
            recipes = _recipes(policy, path, n_layers, promotion)
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


def _recipes(policy: Policy, path: str, n_layers: int, promotion: Promotion | None) -> list[Recipe]:
    """Returns the recipe that the linear at `path` ran in each layer."""
    recipes: list[Recipe] = []
    for stretch in stretches(policy, n_layers):
        here = None if is_exact(stretch.policy) else promotion
        for layer in range(stretch.begin, stretch.end):
            ran = here.policy if here is not None and here.of(path)[layer] else stretch.policy
            recipes.append(ran.recipe(path))
    return recipes
