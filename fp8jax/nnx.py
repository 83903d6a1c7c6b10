"""Flax NNX modules with quantized GEMMs, and a training step for them.

A complete program::

    import fp8jax, jax.numpy as jnp, optax
    from flax import nnx

    class MLP(nnx.Module):
        def __init__(self, rngs):
            self.up = fp8jax.nnx.Linear(64, 256, "fp8_delayed", rngs=rngs)
            self.down = fp8jax.nnx.Linear(256, 64, "fp8_delayed", rngs=rngs)

        def __call__(self, x):
            return self.down(nnx.relu(self.up(x)))

    def loss_of(model, x, y):
        return jnp.mean((model(x) - y) ** 2)

    @nnx.jit
    def step(model, optimizer, x, y):
        loss, gradients = fp8jax.nnx.value_and_grad(loss_of)(model, x, y)
        return loss, fp8jax.nnx.update(model, optimizer, gradients)

    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    for x, y in batches:
        loss, faults = step(model, optimizer, x, y)
        fp8jax.histories.raise_if(faults)

Flax's own modules take an instance: `nnx.Linear(64, 256, dot_general=Fp8DotGeneral("fp8_delayed"),
promote_dtype=keep_master, rngs=rngs)`. One instance has one set of histories. So give each layer
its own, also in modules that pass one instance to several layers::

    attention = nnx.MultiHeadAttention(8, 64, decode=False, rngs=rngs)
    for layer in (attention.query, attention.key, attention.value, attention.out):
        layer.dot_general = nnx.data(fp8jax.nnx.Fp8DotGeneral("fp8_delayed"))

Flax calls a `dot_general_cls=` again in each forward pass, so its instances cannot store anything.
`functools.partial(Fp8DotGeneral, recipe)` works there for recipes without histories that do not
round stochastically; `update` refuses it for recipes with histories.

Histories are variables of type `AmaxHistory`, next to the `nnx.Param` of the model. The gradient of
a history is its next value (gemm/histories/amax_history.py), so it must be differentiated, but not
optimized:

nnx.grad                  differentiates `nnx.Param` only: its gradients lack histories, and
                          `update` refuses them
value_and_grad, grad      of this module differentiate both
nnx.Optimizer.update      alone moves parameters only: histories stay as they are
update                    moves both, and refuses an optimizer that has histories in its `wrt`

A module may be called more than once in a step, in any way: directly, in `nnx.scan`,
`nnx.fori_loop` or `nnx.cond`, and under `nnx.remat` or `nnx.jit`. Its history becomes the largest
of the calls: `value_and_grad` converts histories once, where they enter the loss, to the dtype in
which addition is the maximum. NNX splits and merges modules at each of these transformations, so
that each call has arrays of its own; they keep that dtype. With flax's
`nnx.value_and_grad(argnums=nnx.DiffState(0, (nnx.Param, AmaxHistory)))` instead, histories of
modules that are called more than once by way of such a transformation add up, which `raise_if`
reports after the second step.

Out of reach:

outside nnx.jit           a module that is called twice is refused, or its histories add up, which
                          `raise_if` reports: call `value_and_grad` inside `nnx.jit`
nnx.vmap of the input     and not of the module, inside the loss, is refused: its histories would
                          add up; call the module on the whole batch
pmean of gradients        inside `nnx.shard_map` averages histories, which nothing reports; under
                          `nnx.jit` with sharded arrays there is nothing to do
nnx.set_graph_mode(False) cannot differentiate a part of a module's variables
nnx.Einsum                takes no `dot_general`: use `nnx.LinearGeneral`
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Shaped

from fp8jax.gemm import modules
from fp8jax.gemm.dot import dot_general
from fp8jax.gemm.histories import updates
from fp8jax.gemm.histories.amax_history import HISTORIES, Histories, init_state, to_max_combining
from fp8jax.gemm.probe import Probe, empty_probe
from fp8jax.hidden_jax import is_eager
from fp8jax.lookup import brief
from fp8jax.numerics.names import as_recipe
from fp8jax.numerics.recipe import Recipe

__all__ = [
    "AmaxHistory",
    "Fp8DotGeneral",
    "Linear",
    "grad",
    "keep_master",
    "merge",
    "seed",
    "update",
    "value_and_grad",
]


Gradients: TypeAlias = Any  # an nnx.State of `nnx.Param` and `AmaxHistory`


class AmaxHistory(nnx.Variable[Any]):
    """The amax history of one operand, float32 [H]; its gradient is its next value.

    Example:
      >>> layer = fp8jax.nnx.Linear(8, 4, "fp8_delayed", rngs=nnx.Rngs(0))
      >>> histories = nnx.state(layer, fp8jax.nnx.AmaxHistory)
      >>> sorted(histories["dot_general"]), layer.dot_general.x_amax_history.shape
      (['g_amax_history', 'w_amax_history', 'x_amax_history'], (16,))
    """


class ProbePeaks(nnx.Variable[Any]):
    """`peaks` of a probe (gemm/probe.py), only there while a model is measured."""


class ProbeSums(nnx.Variable[Any]):
    """`sums` of a probe."""


# In linen models that contain NNX modules (`nnx.bridge.ToLinen`), the collection is linen's own.
nnx.register_variable_name(HISTORIES, AmaxHistory, overwrite=True)


_MODEL_STATE = (nnx.Param, AmaxHistory)


# Modules ------------------------------------------------------------------------------------------


class Fp8DotGeneral(nnx.Module):
    """`fp8jax.dot_general` with its histories, as the `dot_general=` of flax's modules.

    Attributes:
      recipe, backend, seeded: as in `fp8jax.nn.Fp8DotGeneral`.
      x_amax_history, w_amax_history, g_amax_history: those that the recipe has.
      stream: the stream of keys, if the recipe rounds stochastically and `rngs` has one, else None.
      probe_peaks, probe_sums, what_if: those of a probe while the model is measured, else None.

    Example:
      >>> layer = nnx.Linear(
      ...     8, 4, dot_general=fp8jax.nnx.Fp8DotGeneral("fp8_block"),
      ...     promote_dtype=fp8jax.nnx.keep_master, rngs=nnx.Rngs(0),
      ... )
      >>> layer(jnp.ones((2, 8), jnp.bfloat16)).dtype.name, layer.kernel.dtype.name
      ('bfloat16', 'float32')
    """

    def __init__(
        self,
        recipe: str | Recipe = "fp8_delayed",
        *,
        backend: str | None = None,
        seeded: bool = False,
        rngs: nnx.Rngs | None = None,
    ):
        """Creates empty histories.

        Args:
          recipe: a `Recipe` or the name of one, with options if any ("fp8_delayed:history=4").
          backend: a key of `BACKENDS`, or None for the fastest that can run the recipe.
          seeded: whether no history is empty; see `fp8jax.nn.Fp8DotGeneral`.
          rngs: for recipes that round stochastically: the stream "fp8" (`fp8jax.nn.RNG`), or the
            default stream.

        Raises:
          TypeError: for what is neither a recipe nor a name.
          ValueError: for an unknown name or option.
        """
        self.recipe = as_recipe(recipe)
        self.backend = backend
        self.seeded = seeded
        for operand, history in init_state(self.recipe).items():
            setattr(self, f"{operand}_amax_history", AmaxHistory(history))
        self.probe_peaks = nnx.data(None)
        self.probe_sums = nnx.data(None)
        self.what_if: Recipe | None = None
        self.stream = nnx.data(None)
        if rngs is not None and self.recipe.stochastic:
            if modules.RNG in rngs or "default" in rngs:
                self.stream = rngs[modules.RNG].fork()

    def histories(self) -> Histories:
        """Returns the histories, operand -> [H]."""
        return {k: getattr(self, f"{k}_amax_history")[...] for k in self.recipe.histories}

    def probe(self) -> Probe | None:
        """Returns the probe, None unless the model is being measured."""
        if self.probe_peaks is None or self.probe_sums is None:
            return None
        return Probe(self.probe_peaks[...], self.probe_sums[...], self.what_if)

    def __call__(
        self,
        lhs: Float[Array, "..."],
        rhs: Float[Array, "..."],
        dimension_numbers,
        *positional: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
        key: Shaped[Array, "..."] | None = None,
    ) -> Float[Array, "..."]:
        """Returns `dot_general` of activations lhs and weights rhs, by default in lhs's dtype.

        Arguments and errors are those of `fp8jax.dot_general`; recipes that round stochastically
        need `key` or a stream.
        """
        if self.recipe.stochastic and key is None:
            key = self._next_key()
        return dot_general(
            lhs,
            rhs,
            dimension_numbers,
            *positional,
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
            recipe=self.recipe,
            state=self.histories(),
            key=key,
            backend=self.backend,
            seeded=self.seeded,
            probe=self.probe(),
        )

    def _next_key(self) -> Array:
        if self.stream is None:
            raise ValueError(
                f"recipe {self.recipe.name!r} rounds stochastically and needs a key: create the"
                f" module with the RNG stream {modules.RNG!r}, as in rngs=nnx.Rngs(params=0,"
                f" {modules.RNG}=1)"
            )
        return self.stream()


def keep_master(arrays: Any, *, dtype: Any = None, inexact: bool = True) -> Any:
    """Returns (inputs, kernel, bias), the kernel as it is: a `promote_dtype=` for flax's modules.

    See `fp8jax.nn.keep_master`.

    Args:
      arrays: (inputs, kernel, bias); the bias may be None.
      dtype: of the returned inputs and bias; None for the inputs' own.
      inexact: ignored, since flax passes it; the arrays are floats.

    Returns:
      (inputs, kernel, bias).

    Raises:
      TypeError: for inputs that are no array.

    Example:
      >>> x, kernel, bias = jnp.ones((2, 8)), jnp.ones((8, 4)), jnp.zeros(4)
      >>> [a.dtype.name for a in fp8jax.nnx.keep_master((x, kernel, bias), dtype=jnp.bfloat16)]
      ['bfloat16', 'float32', 'bfloat16']
    """
    return modules.keep_master(*arrays, dtype=dtype)


class Linear(nnx.Linear):
    """y[..., N] = x[..., K] kernel[K, N] (+ bias[N]), quantized by a recipe.

    The float32 kernel is not cast to the activations' dtype, and so neither is its gradient.

    Attributes:
      dot_general: an `Fp8DotGeneral`.
      kernel, bias: as in `nnx.Linear`, which has others.

    Example:
      >>> layer = fp8jax.nnx.Linear(8, 4, "fp8_rowwise", rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 3, 8))).shape, layer.kernel.shape
      ((2, 3, 4), (8, 4))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        recipe: str | Recipe = "fp8_delayed",
        *,
        backend: str | None = None,
        seeded: bool = False,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        """Creates the parameters and empty histories.

        Args:
          in_features, out_features: K and N.
          recipe, backend, seeded: as in `Fp8DotGeneral`.
          rngs: with the stream "fp8", for recipes that round stochastically.
          options: others of `nnx.Linear`; without `dot_general` and `promote_dtype`.

        Raises:
          TypeError: for what is neither a recipe nor a name.
          ValueError: for an unknown name or option.
        """
        dot = Fp8DotGeneral(recipe, backend=backend, seeded=seeded, rngs=rngs)
        super().__init__(
            in_features,
            out_features,
            dot_general=dot,
            promote_dtype=keep_master,
            rngs=rngs,
            **options,
        )

    def __call__(
        self,
        inputs: Float[Array, "... K"],
        out_sharding: Any = None,
        *,
        key: Shaped[Array, "..."] | None = None,
    ) -> Float[Array, "... N"]:
        """Returns y in the dtype of the activations, or in `preferred_element_type`.

        Args:
          inputs: the activations; cast to `dtype` if the layer has one.
          out_sharding: as in `fp8jax.dot_general`.
          key: a PRNG key, for recipes that round stochastically; None for the module's stream.
        """
        x = inputs if self.dtype is None else inputs.astype(self.dtype)
        y = self.dot_general(
            x,
            self.kernel[...],
            (((x.ndim - 1,), (0,)), ((), ())),
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
            out_sharding=out_sharding,
            key=key,
        )
        return modules.add_bias(y, None if self.bias is None else self.bias[...])


# Gradients ----------------------------------------------------------------------------------------


def value_and_grad(
    f: Callable[..., Any], *, argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """`nnx.value_and_grad` with respect to a model's `nnx.Param` and `AmaxHistory`.

    Args:
      f: (model, ...) -> a scalar, or (scalar, anything) with `has_aux`.
      argnums: the positions of models.
      has_aux: whether f returns (scalar, anything).

    Returns:
      A function that returns the value and an `nnx.State` of gradients and next histories, for
      `update`; one state for each position if `argnums` is a sequence.

    Raises:
      TypeError: when f returns no scalar.

    Example:
      >>> model = fp8jax.nnx.Linear(8, 4, "fp8_delayed:history=2", rngs=nnx.Rngs(0))
      >>> loss_of = lambda model, x: model(x).mean()
      >>> loss, gradients = fp8jax.nnx.value_and_grad(loss_of)(model, jnp.ones((2, 8)))
      >>> loss.shape, gradients["kernel"].shape, gradients["dot_general"]["x_amax_history"][...]
      ((), (8, 4), Array([1., 0.], dtype=float32))
    """
    return _differentiate(nnx.value_and_grad, f, argnums, has_aux, _MODEL_STATE)


def grad(
    f: Callable[..., Any], *, argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """`nnx.grad` with respect to a model's `nnx.Param` and `AmaxHistory`; see `value_and_grad`.

    Args:
      f, argnums, has_aux: as in `value_and_grad`.

    Returns:
      A function that returns an `nnx.State` of gradients and next histories; with `has_aux`, that
      and what f returned beside the scalar.

    Raises:
      TypeError: when f returns no scalar.

    Example:
      >>> model = fp8jax.nnx.Linear(8, 4, "fp8_delayed:history=2", rngs=nnx.Rngs(0))
      >>> gradients = fp8jax.nnx.grad(lambda model: model(jnp.ones((2, 8))).mean())(model)
      >>> gradients["dot_general"]["x_amax_history"][...]
      Array([1., 0.], dtype=float32)
    """
    return _differentiate(nnx.grad, f, argnums, has_aux, _MODEL_STATE)


def _differentiate(
    transform: Callable[..., Any],
    f: Callable[..., Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    kinds: tuple[type[nnx.Variable], ...],
) -> Callable[..., Any]:
    positions = (argnums,) if isinstance(argnums, int) else argnums
    if not (isinstance(positions, Sequence) and all(isinstance(i, int) for i in positions)):
        raise TypeError(
            f"argnums must be an int or several, got {brief(argnums)}; what is trained of a module"
            " is the optimizer's wrt"
        )
    wanted = tuple(nnx.DiffState(i, kinds) for i in positions)
    combined = tuple(kind for kind in kinds if kind in (AmaxHistory, ProbePeaks))

    @functools.wraps(f)
    def combining_by_max(*args: Any) -> Any:
        variables = [v for i in positions for _, v in _nodes(args[i], combined)]
        histories = [v.get_value() for v in variables]
        for variable, history in zip(variables, histories, strict=True):
            # Outside of jit, JAX cannot take the maximum: shared_leaf.py refuses a second call.
            if not is_eager(history):
                variable.set_value(to_max_combining(history))
        result = f(*args)
        for variable, history in zip(variables, histories, strict=True):
            variable.set_value(history)
        return result

    return transform(
        combining_by_max, argnums=wanted[0] if isinstance(argnums, int) else wanted, has_aux=has_aux
    )


def _nodes(model: Any, kind: type | tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    """Yields (path, node) of the modules or variables of a kind, each once."""
    for path, node in nnx.iter_graph(model):
        if isinstance(node, kind):
            yield "/".join(map(str, path)), node


def merge(gradients: Gradients, *more: Gradients) -> Gradients:
    """Returns the gradients of several microbatches as one: sums, and maxima of histories.

    Args:
      gradients, more: states from `value_and_grad` or `grad` of one model.

    Returns:
      A state like each of them.

    Raises:
      ValueError: the states differ in structure.

    Example:
      >>> model = fp8jax.nnx.Linear(8, 4, "fp8_delayed:history=2", rngs=nnx.Rngs(0))
      >>> gradients_of = fp8jax.nnx.grad(lambda model, x: model(x).mean())
      >>> x = jnp.ones((2, 8))
      >>> merged = fp8jax.nnx.merge(gradients_of(model, x), gradients_of(model, 3 * x))
      >>> merged["dot_general"]["x_amax_history"][...]
      Array([3., 0.], dtype=float32)
    """

    def combine(variable: nnx.Variable, *others: nnx.Variable) -> nnx.Variable:
        combined = jnp.maximum if isinstance(variable, AmaxHistory) else jnp.add
        values = [v.get_value() for v in (variable, *others)]
        return variable.replace(functools.reduce(combined, values))

    return jax.tree.map(
        combine, gradients, *more, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )


# A step -------------------------------------------------------------------------------------------


def update(
    model: nnx.Module, optimizer: nnx.Optimizer, gradients: Gradients, **options: Any
) -> updates.Faults:
    """Applies one step of the optimizer to the parameters, and gives histories their next values.

    Changes the model and the optimizer in place. The optimizer's `step` counts the updates.

    Args:
      model: the module that the gradients are of.
      optimizer: of parameters only, as `nnx.Optimizer(model, tx, wrt=nnx.Param)`.
      gradients: from this module's `value_and_grad` or `grad`.
      options: what else `optimizer.update` takes.

    Returns:
      What is wrong with the histories, for `fp8jax.histories.raise_if`.

    Raises:
      TypeError: for what is no `nnx.Optimizer`, and for gradients beside their loss.
      ValueError: the gradients have no histories, or others than the model; the optimizer has
        histories; a `dot_general_cls` of the model cannot store its histories.

    Example:
      >>> model = fp8jax.nnx.Linear(8, 4, "fp8_delayed:history=2", rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
      >>> gradients = fp8jax.nnx.grad(lambda model: model(jnp.ones((2, 8))).mean())(model)
      >>> fp8jax.histories.raise_if(fp8jax.nnx.update(model, optimizer, gradients))
      >>> model.dot_general.x_amax_history[...], optimizer.step[...].item()
      (Array([1., 0.], dtype=float32), 1)
    """
    if isinstance(optimizer, nnx.ModelAndOptimizer):
        raise TypeError("use nnx.Optimizer(model, tx, wrt=nnx.Param), got an nnx.ModelAndOptimizer")
    if not isinstance(optimizer, nnx.Optimizer):
        kind = type(optimizer).__name__
        raise TypeError(f"use nnx.Optimizer(model, tx, wrt=nnx.Param), got a {kind}")
    if isinstance(gradients, tuple):
        raise TypeError("the gradients are a tuple: of value_and_grad, pass the second result")
    _refuse_classes_with_histories(model)
    if _histories(nnx.state(model, optimizer.wrt)):
        raise ValueError(
            f"the optimizer's wrt={optimizer.wrt} has amax histories, whose gradients are their"
            " next values: use nnx.Optimizer(model, tx, wrt=nnx.Param)"
        )
    histories, new = _histories(nnx.state(model)), _histories(gradients)
    updates.require_same_histories(
        histories, new, remedy="use fp8jax.nnx.value_and_grad or fp8jax.nnx.grad"
    )
    updates.check_same_leaves(
        "histories and their gradients", histories, new, "take the gradients of this module"
    )
    optimizer.update(model, gradients, **options)
    nnx.update(model, updates.next_histories(histories, new))
    return updates.Faults(
        jax.tree.map(updates.history_fault, histories, new),
        jnp.asarray(optimizer.step[...], jnp.int32),
    )


def _histories(state: Any) -> dict[Any, Any]:
    """Returns the histories of a state as dicts of arrays, as the functions of updates.py take."""
    return nnx.to_pure_dict(nnx.filter_state(state, AmaxHistory))


def _refuse_classes_with_histories(model: nnx.Module) -> None:
    for path, layer in _nodes(model, nnx.LinearGeneral):
        given = layer.dot_general_cls
        made = given.func if isinstance(given, functools.partial) else given
        if made is Fp8DotGeneral and given().recipe.histories:
            raise ValueError(
                f"module {path!r} has a dot_general_cls with amax histories, and flax creates it"
                " again in each forward pass: leave it out, and set each layer.dot_general ="
                " nnx.data(Fp8DotGeneral(...))"
            )


# Telemetry ----------------------------------------------------------------------------------------


def with_probes(model: nnx.Module, what_if: Recipe | None) -> tuple[nnx.Module, dict[str, Recipe]]:
    """Returns a copy of the model with a probe in each `Fp8DotGeneral`; and path -> its recipe.

    The probes of stacked layers have the leading axes of their kernels or histories.
    """
    copy = nnx.clone(model)
    leading = {
        id(layer.dot_general): layer.kernel.shape[: layer.kernel[...].ndim - _own_axes(layer)]
        for _, layer in _nodes(copy, (nnx.Linear, nnx.LinearGeneral))
    }
    recipes = {}
    for path, dot in _nodes(copy, Fp8DotGeneral):
        layers = leading[id(dot)] if id(dot) in leading else ()
        for history in dot.histories().values():
            layers = history.shape[:-1]
        probe = empty_probe(what_if, layers)
        dot.probe_peaks = nnx.data(ProbePeaks(probe.peaks))
        dot.probe_sums = nnx.data(ProbeSums(probe.sums))
        dot.what_if = what_if
        recipes[path] = dot.recipe
    return copy, recipes


def _own_axes(layer: Any) -> int:
    """Axes of a layer's kernel without those of a stack of layers."""
    if isinstance(layer, nnx.Linear):
        return 2
    return sum(map(len, (layer.batch_axis, layer.in_features, layer.out_features)))


@functools.lru_cache(maxsize=16)  # a function that is measured again does not compile again
def _probe_gradients(f: Callable[..., Any]) -> Callable[..., Any]:
    return nnx.jit(_differentiate(nnx.grad, f, 0, False, (ProbePeaks, ProbeSums)))


def statistics(f: Callable[..., Any], model: nnx.Module, *args: Any) -> dict[str, Probe]:
    """Returns path -> the statistics of each `Fp8DotGeneral` in one evaluation of f(model, *args).

    Args:
      f: returns a scalar.
      model: from `with_probes`.
    """

    found = nnx.to_flat_state(_probe_gradients(f)(model, *args))
    leaves = {tuple(map(str, path)): value.get_value() for path, value in found}
    return {
        path: Probe(
            leaves[(*path.split("/"), "probe_peaks")],
            leaves[(*path.split("/"), "probe_sums")],
            dot.what_if,
        )
        for path, dot in _nodes(model, Fp8DotGeneral)
    }


# Before the first step ----------------------------------------------------------------------------


def seed(loss: Callable[..., Any], model: nnx.Module, *args: Any, has_aux: bool = False) -> None:
    """Gives a model new histories, which hold the amaxes of one evaluation of the loss.

    See `fp8jax.histories.seed`. Nothing else of the model changes.

    Args:
      loss: (model, ...) -> a scalar, or (scalar, anything) with `has_aux`.
      model: changed in place.
      args: what else the loss takes, such as a first batch.
      has_aux: whether the loss returns (scalar, anything).

    Raises:
      TypeError: the loss returns no scalar, or with `has_aux` no pair.

    Example:
      >>> model = fp8jax.nnx.Linear(8, 4, "fp8_delayed:history=2", seeded=True, rngs=nnx.Rngs(0))
      >>> fp8jax.nnx.seed(lambda model, x: model(x).mean(), model, jnp.full((2, 8), 3.0))
      >>> model.dot_general.x_amax_history[...]
      Array([3., 0.], dtype=float32)
    """

    def loss_of(variables: Any) -> Any:
        copy = nnx.clone(model)
        nnx.update(copy, to_max_combining(variables[HISTORIES]))
        return loss(copy, *args)

    filled = updates.seed(loss_of, {HISTORIES: _histories(nnx.state(model))}, has_aux=has_aux)
    nnx.update(model, filled[HISTORIES])
