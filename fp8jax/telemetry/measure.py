"""Telemetry of anybody's model, linen or NNX: one evaluation, one table."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.gemm.histories.amax_history import HISTORIES
from fp8jax.gemm.histories.trees import check_loss
from fp8jax.gemm.modules import Dense, Einsum, Fp8DotGeneral
from fp8jax.gemm.probe import PROBE, TELEMETRY, Probe, empty_probe
from fp8jax.lookup import brief
from fp8jax.numerics.names import as_recipe
from fp8jax.numerics.policy import Policy
from fp8jax.numerics.recipe import Recipe
from fp8jax.telemetry.rows import NO_LAYER, Row, Table, forward_only, rows_of


def measure(
    f: Callable[..., Any],
    model: Any,
    *args: Any,
    what_if: str | Recipe | None = None,
    gradients: bool = True,
    has_aux: bool = False,
) -> Table:
    """Returns what every cast of a model does in one evaluation of a function of it.

    Every `Dense`, `Einsum`, `Fp8DotGeneral` and `Transformer` of this library that f calls is
    measured, and every module that has its own probes (`Whole`); linears that call
    `fp8jax.dot_general` itself are not found. The model stays as it is.
    A model that is called with `nn.scan` or `nn.vmap` over layers must name the collection
    `fp8jax.nn.TELEMETRY` in `variable_axes`, with axis 0.

    Args:
      f: (model, ...) -> the loss, a scalar. Compiled here, once for each function and shapes.
      model: flax's variables {"params": ..., ...} of a linen model, or an `nnx.Module`.
      args: what else f takes.
      what_if: a recipe, or the name of one, to measure on the same operands.
      gradients: False measures x and w alone; f may then return any arrays, such as logits.
      has_aux: whether f returns (loss, anything).

    Returns:
      A `Table`. `layer` is the index of a layer in its stack, else -1; `linear` is the module's
      path.

    Raises:
      TypeError: the model is neither of the two, or f returns no scalar.
      ValueError: an unknown recipe, no linear to measure, and a linear that a lifted transformation
        keeps from its probe.

    Example:
      >>> model = nn.Sequential([fp8jax.nn.Dense(8, "fp8_current"), nn.relu])
      >>> x = jnp.linspace(-1, 1, 16).reshape(2, 8)
      >>> variables = model.init(jax.random.key(0), x)
      >>> loss = lambda variables, x: model.apply(variables, x).mean()
      >>> table = fp8jax.telemetry.measure(loss, variables, x, what_if="fp4_naive")
      >>> for row in table.where(lambda row: row.cast == "fwd_x").rows:
      ...     print(row.linear, row.recipe, row.format, f"{row.sqnr_db:.0f} dB")
      layers_0 fp8_current e4m3 33 dB
      layers_0 fp4_naive e2m1 20 dB
    """
    recipe = None if what_if is None else as_recipe(what_if)

    scalar = _Scalar(f, gradients, has_aux)
    rows_of_model = _linen_rows if isinstance(model, Mapping) else _nnx_rows
    rows = rows_of_model(scalar, model, args, recipe)
    return Table(tuple(rows if gradients else forward_only(rows)))


@dataclasses.dataclass(frozen=True)
class _Scalar:
    """What is differentiated. Equal ones compile once."""

    f: Callable[..., Any]
    gradients: bool
    has_aux: bool

    def __call__(self, model: Any, *args: Any) -> Any:
        out = self.f(model, *args)
        return check_loss(out, self.has_aux) if self.gradients else _total(out)


def _total(out: Any) -> Any:
    """The sum of all float arrays of a result."""
    leaves = [x for x in jax.tree.leaves(out) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
    if not leaves:
        raise TypeError("f returns no array of floats: return logits or activations, for instance")
    return functools.reduce(jnp.add, [jnp.sum(x, dtype=jnp.float32) for x in leaves])


def _rows(statistics: Probe, path: str, recipe: Recipe) -> list[Row]:
    """The rows of one linear; leading axes of its probe are numbered as layers, in order."""
    stack = statistics.peaks.shape[:-2]
    count = int(np.prod(stack))
    flat = jax.tree.map(lambda leaf: leaf.reshape(count, *leaf.shape[len(stack) :]), statistics)
    layers = range(count) if stack else [NO_LAYER]
    return rows_of(flat, path, [recipe] * count, step=0, layers=layers)


def _nothing_found() -> ValueError:
    return ValueError(
        "no linear to measure: f calls no Dense, Einsum or Fp8DotGeneral of fp8jax (docs/"
        "your_model.md says how to quantize a model)"
    )


_TRACES = itertools.count()


# Linen --------------------------------------------------------------------------------------------


def _linen_rows(
    scalar: Callable[..., Any], variables: Any, args: tuple[Any, ...], what_if: Recipe | None
) -> list[Row]:
    if "params" not in variables:
        raise ValueError(
            f"variables have no 'params', but {', '.join(map(str, variables))}: pass what `init`"
            " returned"
        )
    calls, models = _calls(scalar, variables, args)
    if not (calls or models):
        raise _nothing_found()
    tree: dict[str, Any] = {}
    for call in calls.values():
        _at(tree, call.path)[PROBE] = empty_probe(what_if, call.layers)
    beside = None if what_if is None else Policy((("layers/*", what_if),), name=what_if.name)
    for path, model in models.items():
        _at(tree, path).update(model.telemetry_probes(beside))
    found = jax.device_get(_probe_gradients(scalar, tree, dict(variables), *args))
    rows: list[Row] = []
    for shown, call in calls.items():
        rows += _rows(_at(found, call.path)[PROBE], shown, call.recipe)
    for path, model in models.items():
        rows += model.telemetry_rows(_at(found, path), step=0)
    return rows


@functools.partial(jax.jit, static_argnums=0)
def _probe_gradients(scalar: _Scalar, probes: Any, variables: Any, *args: Any) -> Any:
    def require_probe(module):
        if not module.has_variable(TELEMETRY, PROBE):
            raise ValueError(
                f"linear {'/'.join(module.path)!r} cannot be measured: nn.scan and nn.vmap must"
                " name the collection fp8jax.nn.TELEMETRY in variable_axes (0), or in"
                " variable_broadcast for shared weights"
            )

    def with_probes(probes):
        with nn.intercept_methods(_Watch(require_probe, lambda model: None)):
            return scalar(variables | {TELEMETRY: probes}, *args)

    return jax.grad(with_probes)(probes)


def _at(tree: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """The dict at a path of nested dicts, which are made if they are missing."""
    return functools.reduce(lambda node, name: node.setdefault(name, {}), path, tree)


class _Call(NamedTuple):
    """A linear that was called: its path and recipe, and the leading axes of a stack of layers."""

    path: tuple[str, ...]
    recipe: Recipe
    layers: tuple[int, ...]


@runtime_checkable
class Whole(Protocol):
    """A linen module that is measured as a whole, as it runs its layers by itself.

    The linears inside of it do not know where their variables lie.
    """

    path: tuple[str, ...]

    def telemetry_probes(self, what_if: Policy | None = None) -> dict[str, Any]:
        """Returns its collection `TELEMETRY`: a probe of zeros for each linear."""

    def telemetry_rows(self, statistics: dict[str, Any], *, step: int) -> list[Row]:
        """Returns the rows of such a collection, once it has been measured."""


class _Watch:
    """An interceptor of flax that tells of each linear after its call, and of each `Whole`.

    The linears inside a `Whole` are not told of.
    """

    def __init__(self, linear: Callable[[Any], None], whole: Callable[[Any], None]):
        self._linear, self._whole, self._inside = linear, whole, 0

    def __call__(self, call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module, name = context.module, context.method_name
        whole = isinstance(module, Whole) and name == "__call__"
        self._inside += whole
        try:
            out = call(*args, **kwargs)
        finally:
            self._inside -= whole
        # `together` calls no layer, but asks each for its variables.
        linear = isinstance(module, Dense | Einsum | Fp8DotGeneral)
        if whole:
            self._whole(module)
        elif linear and name in ("__call__", "variables_for") and not self._inside:
            self._linear(module)
        return out


def _calls(
    scalar: Callable[..., Any], variables: Any, args: tuple[Any, ...]
) -> tuple[dict[str, _Call], dict[tuple[str, ...], Whole]]:
    """Returns what f calls, from a trace that computes nothing: linears by the paths to show, and
    modules with their own probes by their paths."""
    calls: dict[str, _Call] = {}
    models: dict[tuple[str, ...], Whole] = {}

    def linear(module):
        call = _Call(module.path, as_recipe(module.recipe), _stack_of(module, variables))
        calls["/".join(module.path)] = call

    def whole(model):
        models[model.path] = model

    with nn.intercept_methods(_Watch(linear, whole)):
        # A new name each time: JAX would take the trace of an earlier call, also of a jitted f, and
        # flax would call nothing.
        new = {TELEMETRY: {f"trace_{next(_TRACES)}": jnp.zeros(())}}
        jax.eval_shape(scalar, dict(variables) | new, *args)
    return {_shown(path, calls): call for path, call in calls.items()}, models


def _shown(path: str, calls: dict[str, _Call]) -> str:
    """The path of flax's own module, where an `Fp8DotGeneral` is its only one."""
    owner = path.removesuffix("/Fp8DotGeneral_0")
    return path if f"{owner}/Fp8DotGeneral_1" in calls else owner


def _stack_of(module: Any, variables: Any) -> tuple[int, ...]:
    """The axes that a module's variables have outside of it and not inside: those of a stack."""
    for owner, collection in ((module, HISTORIES), (module, "params"), (module.parent, "params")):
        if not isinstance(owner, nn.Module) or collection not in owner.variables:
            continue
        inside = jax.tree.leaves(_own(owner.variables[collection]))
        outside: Any = variables[collection]
        for name in owner.path:
            outside = outside[name]
        for one, whole in zip(inside, jax.tree.leaves(_own(outside)), strict=False):
            return tuple(jnp.shape(whole)[: jnp.ndim(whole) - jnp.ndim(one)])
    return ()


def _own(tree: Any) -> dict[str, Any]:
    """The variables of a module without those of its submodules."""
    return {k: v for k, v in tree.items() if not isinstance(v, Mapping)}


# NNX ----------------------------------------------------------------------------------------------


def _nnx_rows(
    scalar: Callable[..., Any], model: Any, args: tuple[Any, ...], what_if: Recipe | None
) -> list[Row]:
    from flax import nnx

    from fp8jax import nnx as ours

    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"expected flax's variables {{'params': ...}} or an nnx.Module, got {brief(model)}"
        )
    copy, recipes = ours.with_probes(model, what_if)
    if not recipes:
        raise _nothing_found()
    found = jax.device_get(ours.statistics(scalar, copy, *args))
    rows: list[Row] = []
    for path, recipe in recipes.items():
        rows += _rows(found[path], path.removesuffix("/dot_general"), recipe)
    return rows


def combine(a: Any, b: Any) -> Any:
    """Returns the statistics of two parts of a batch as one; arrays without a probe are peaks."""

    def both(one: Any, other: Any) -> Any:
        if not isinstance(one, Probe):
            return jnp.maximum(one, other)
        peaks = jnp.maximum(one.peaks, other.peaks)
        return dataclasses.replace(one, peaks=peaks, sums=one.sums + other.sums)

    return jax.tree.map(both, a, b, is_leaf=lambda node: isinstance(node, Probe))
