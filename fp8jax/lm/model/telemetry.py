"""Telemetry of one forward pass of the transformer."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from fp8jax.device import xla
from fp8jax.gemm.probe import TELEMETRY
from fp8jax.lm.model.transformer import Transformer
from fp8jax.numerics.names import as_policy
from fp8jax.numerics.policy import Policy
from fp8jax.telemetry.rows import Table, forward_only


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
    """Returns the telemetry of x and w in one forward pass, as inference computes it.

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
      >>> table = fp8jax.measure_forward(model, variables, tokens, segments, positions)
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
    probes = model.telemetry_probes(beside)
    model = model.clone(remat="full") if model.remat == "none" else model

    def outputs(probes, variables, *inputs) -> Array:
        whole = bool(model.resolved_policy.recipe("lm_head").casts)
        out: Any = model.apply(dict(variables) | {TELEMETRY: probes}, *inputs, head=whole)
        return jnp.sum(out if whole else out[0], dtype=jnp.float32)

    inputs = variables, tokens_BL, segments_BL, positions_BL, key
    gradients = jax.jit(jax.grad(outputs), compiler_options=xla.compiler_options())
    statistics = jax.device_get(gradients(probes, *inputs))
    return Table(tuple(forward_only(model.telemetry_rows(statistics, step=0))))
