"""Which GEMMs of any compiled program run in FP8: for models that are not this library's.

    compiled = jax.jit(step).lower(variables, batch).compile()
    print(fp8jax.gemm_table(fp8jax.gemms(compiled)))
    fp8jax.assert_fp8(compiled)

Each GEMM of `dot_general` has the name of its recipe and of its role in the compiled program
(analysis/hlo.py), so no policy is needed. What cannot be seen is a GEMM that is not there: XLA may
merge two GEMMs under one name, and a linear whose input needs no gradient has no dgrad. So
`assert_fp8` takes the number of GEMMs to expect.
"""

import fnmatch
from collections.abc import Iterable
from typing import Any

import jax

from fp8jax.analysis.gemms import format_table, judged, require_fp8
from fp8jax.analysis.hlo import Gemm, parse_gemms
from fp8jax.device import hardware
from fp8jax.device.hardware import Device
from fp8jax.numerics.names import as_recipe
from fp8jax.numerics.recipe import Recipe


def gemms(
    compiled: Any,
    *,
    recipes: Iterable[Recipe] = (),
    backend: str | None = None,
    device: Device | None = None,
) -> list[Gemm]:
    """Returns all GEMMs of a compiled program, and what they run in.

    Args:
      compiled: `jax.jit(f).lower(...).compile()`, or its `as_text()`.
      recipes: recipes of your own, by whose names the program calls its GEMMs.
      backend: the backend that the model names, None if it names none.
      device: what the program was compiled for; None for this process's default device.

    Returns:
      A `Gemm` each, with `recipe`, `role`, `shape` (M, K, N), `operands` (dtypes), `fp8`, and the
      `reason` where a GEMM should be FP8 and is not.

    Raises:
      TypeError: for a program that is not compiled.
      ValueError: a GEMM runs a recipe that is neither known nor in `recipes`.

    Example:
      >>> x, w = jnp.ones((16, 32)), jnp.ones((32, 16))
      >>> f = functools.partial(fp8jax.einsum, "mk,kn->mn", recipe="fp8_current")
      >>> (gemm,) = fp8jax.gemms(jax.jit(f).lower(x, w).compile())
      >>> gemm.recipe, gemm.role, gemm.shape, gemm.fp8
      ('fp8_current', 'fwd', (16, 32, 16), False)
    """
    text = compiled if isinstance(compiled, str) else _text_of(compiled)
    device = hardware.device() if device is None else device
    own = {recipe.name: recipe for recipe in recipes}
    results = []
    for gemm in parse_gemms(text):
        if gemm.recipe is not None:
            recipe = own[gemm.recipe] if gemm.recipe in own else as_recipe(gemm.recipe)
            gemm = judged(gemm, recipe, backend, device)
        results.append(gemm)
    return results


def _text_of(compiled: Any) -> str:
    # What is lowered alone has a text, too, in which no GEMM is found.
    if isinstance(compiled, jax.stages.Lowered) or not hasattr(compiled, "as_text"):
        raise TypeError(
            "expected a compiled program, jax.jit(f).lower(...).compile(), got"
            f" {type(compiled).__name__}"
        )
    return compiled.as_text()


def gemm_table(gemms: Iterable[Gemm]) -> str:
    """Returns a text table of GEMMs, and why those that should be FP8 are not.

    Args:
      gemms: from `fp8jax.gemms`.

    Returns:
      Text of several lines, for people.

    Example:
      >>> x, w = jnp.ones((16, 32)), jnp.ones((32, 16))
      >>> f = functools.partial(fp8jax.einsum, "mk,kn->mn", recipe="fp8_current")
      >>> print(fp8jax.gemm_table(fp8jax.gemms(jax.jit(f).lower(x, w).compile())))
      module          recipe and role  GEMMs  operands  M x K x N     kernel
      (unattributed)  fp8_current.fwd  1      bf16      16 x 32 x 16  ...
      FP8: 0 of 1 GEMMs that recipes cast to it
      NOT FP8: (unattributed) fwd in bf16 (1): backend: emulated; cpu has no FP8 matrix unit
    """
    return format_table(gemms)


def assert_fp8(
    compiled: Any,
    modules: str = "*",
    *,
    count: int | None = None,
    recipes: Iterable[Recipe] = (),
    backend: str | None = None,
    device: Device | None = None,
) -> None:
    """Checks that every GEMM whose operands a recipe casts to FP8 or FP4 runs on such operands.

    Args:
      modules: shell-style pattern of the modules to look at, such as "*mlp*".
      count: how many FP8 GEMMs there must be, None for at least one. A linear has three in a
        training step, two if its input needs no gradient; GEMMs in a loop count each time.
      compiled, recipes, backend, device: as for `gemms`.

    Raises:
      Fp8FallbackError: some GEMMs run in another precision; it says which, and why.
      AssertionError: there are not `count` FP8 GEMMs.
      ValueError: as `gemms` does.

    Example:
      On a CPU, which has no FP8 units:

      >>> x, w = jnp.ones((16, 32)), jnp.ones((32, 16))
      >>> f = functools.partial(fp8jax.einsum, "mk,kn->mn", recipe="fp8_current")
      >>> fp8jax.assert_fp8(jax.jit(f).lower(x, w).compile())
      Traceback (most recent call last):
          ...
      fp8jax.analysis.gemms.Fp8FallbackError: 1 GEMMs of the program should run in FP8 and do not:
        NOT FP8: (unattributed) fwd in bf16 (1): backend: emulated; cpu has no FP8 matrix unit
    """
    all_gemms = gemms(compiled, recipes=recipes, backend=backend, device=device)
    ours = [gemm for gemm in all_gemms if fnmatch.fnmatchcase(gemm.module, modules)]
    require_fp8(ours)
    fp8 = sum(gemm.count for gemm in ours if gemm.fp8)
    if fp8 == 0 or (count is not None and fp8 != count):
        expected = "at least one FP8 GEMM" if count is None else f"{count} FP8 GEMMs"
        names = sorted({gemm.module for gemm in all_gemms if gemm.recipe is not None})
        raise AssertionError(
            f"expected {expected} in modules {modules!r}, got {fp8}; modules with quantized GEMMs:"
            f" {', '.join(names) or 'none'}"
        )
