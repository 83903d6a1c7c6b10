"""Which GEMMs of a compiled training step really are FP8, and why where one is not.

XLA does not say when it multiplies FP8 in another precision: what does not match its patterns
becomes a BF16 GEMM, a CPU widens every operand, and the backend `emulated` multiplies in BF16 or
float32 on purpose. What ran is read from the optimized HLO (`compiled.as_text()`):

    library calls   __cublas$lt$matmul$f8, __cublas$lt$matmul, …; cuDNN's attention is no GEMM
    dot             on CPUs and in fusions; the kernel is a Triton or cuDNN fusion around it
    convolution     what TPUs make of a product, if it bears a product's name
    Pallas kernels  likewise; those without such a name cast, transpose or attend

The name is RECIPE.PRODUCT, which linear/dot.py puts around each product, in the path that JAX
keeps:

    jit(step)/transpose(jvp(Transformer))/…/while/body/…/Block/mlp/up/fp8_delayed.dgrad/dot_general

Loops count as often as they turn, where HLO knows. XLA multiplies small products with a common
operand as one (q, k and v, of x) and keeps one name; the others are found by their widths. A
product without a GEMM, or with fewer than its likes, is listed as missing: that its name was lost
does not prove that it is FP8.

Where layers may be promoted (linear/promotable.py) each product stands there twice, in a branch
for each
recipe, and only one of them runs. Of equal branches XLA keeps one, under one name, and calls it
twice: there a product may have its GEMMs under the name of another of its size.
"""

import collections
import dataclasses
import itertools
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Mapping

from absl import logging

from fp8jax.analysis.hlo import BARE, ROLES, UNNAMED, Gemm, module_position, parse_gemms
from fp8jax.device import hardware
from fp8jax.device.hardware import Device
from fp8jax.linear.backends import BACKENDS, choose_backend
from fp8jax.model.config import MODULES
from fp8jax.numerics.policy import Policy
from fp8jax.numerics.recipe import Recipe
from fp8jax.numerics.recipes import RECIPES


class Fp8FallbackError(ValueError):
    """A product that its recipe casts to FP8 runs in another precision."""


# Judgment ----------------------------------------------------------------------------------------


def find_gemms(
    text: str,
    policy: Policy,
    paths: Iterable[str] = MODULES,
    *,
    backend: str | None = None,
    device: Device | None = None,
    high: Policy | None = None,
) -> list[Gemm]:
    """All GEMMs of a compiled training step, and the products that have none.

    Args:
      text: `compiled.as_text()`.
      policy: the model's; its casts say what should be FP8.
      paths: the model's linears; as `ModelConfig.linears`, with (inputs, outputs) of each, by
        which merged products are found where kernels filled up narrow ones.
      backend, device: as for `choose_backend`.
      high: the policy of layers that are promoted, if any may be.
    """
    device = hardware.device() if device is None else device
    gemms = []
    outputs = {m: n for m, (_, n) in paths.items()} if isinstance(paths, Mapping) else {}
    for gemm in _with_merged(list(parse_gemms(text)), outputs):
        narrow = all(dtype.startswith(("f8", "f4")) for dtype in gemm.operands)
        fp8 = narrow and device.fp8 and gemm.kernel not in BARE
        reason = None if fp8 else _reason(gemm, policy, backend, device)
        gemms.append(dataclasses.replace(gemm, fp8=fp8, reason=reason))
    if high is None or not any(policy.recipe(path).casts for path in MODULES):
        return [*gemms, *_missing(gemms, policy, list(paths), {})]
    sizes = dict(paths) if isinstance(paths, Mapping) else {}
    missing = [gemm for each in (policy, high) for gemm in _missing(gemms, each, [*paths], sizes)]
    return [*gemms, *missing]


def _reason(gemm: Gemm, policy: Policy, backend: str | None, device: Device) -> str | None:
    """Why a product that should be FP8 is not; None where it need not be."""
    if gemm.recipe is None or gemm.product is None:
        return None
    recipe: Recipe = policy.recipe(gemm.module)
    if recipe.name != gemm.recipe and gemm.recipe in RECIPES:  # of an exempt layer
        recipe = RECIPES[gemm.recipe]
    lhs, rhs = recipe.gemms[gemm.product]
    if lhs is None or rhs is None:
        return None
    if 4 in (lhs.format.bits, rhs.format.bits) and not device.block_scaled:
        return f"backend: {device.kind} has no FP4 matrix unit"
    if choose_backend(backend, recipe, device).name == "emulated":
        refusals = [(name, each.refuses(recipe, device)) for name, each in BACKENDS.items()]
        why = [f"{name} cannot: {refusal}" for name, refusal in refusals if refusal]
        why = why if device.fp8 else [f"{device.kind} has no FP8 matrix unit"]
        return "; ".join(["backend: emulated", *(why if backend is None else [])])
    if not device.fp8:
        return f"backend: {device.kind} has no FP8 matrix unit, XLA widened the operands"
    if gemm.shape and any(size % 16 for size in gemm.shape):
        return "shape: FP8 units take multiples of 16, not {} x {} x {}".format(*gemm.shape)
    if gemm.kernel in BARE:
        return f"layout: no library took it, a bare {gemm.kernel} was left"
    return "pattern: XLA did not recognize the FP8 product and widened its operands"


def _with_merged(gemms: list[Gemm], outputs: Mapping[str, int]) -> list[Gemm]:
    """The same, each with the modules whose products it does besides its own.

    The width of a linear is what its dgrad contracts: dgrads have no operand in common and are
    never merged. Where kernels fill up to whole blocks, dgrads are wider than some other products,
    which then have the model's `outputs`. A wider product does those of neighbors, which lack
    theirs.
    """
    filled = {g.module: g.shape[1] for g in gemms if g.product == "dgrad" and g.shape}
    plain = {m: min(n, outputs[m]) if m in outputs else n for m, n in filled.items()}
    counts = _counts(gemms)

    def merged(gemm: Gemm) -> tuple[str, ...]:
        if gemm.product not in ("fwd", "wgrad") or gemm.module not in filled or not gemm.shape:
            return ()
        folder = gemm.module.rpartition("/")[0]
        lacking = [
            m
            for m in filled
            if m.rpartition("/")[0] == folder
            if counts[m, gemm.recipe, gemm.product] < counts[m, gemm.recipe, "dgrad"]
        ]
        for widths, n in itertools.product((filled, plain), range(1, 3)):
            for others in itertools.combinations(lacking, n):
                if gemm.shape[2] == widths[gemm.module] + sum(widths[m] for m in others):
                    return others
        return ()

    return [dataclasses.replace(gemm, merged=merged(gemm)) for gemm in gemms]


def _counts(gemms: list[Gemm]) -> dict[tuple[str, str | None, str | None], int]:
    counts: dict[tuple[str, str | None, str | None], int] = collections.Counter()
    for gemm in gemms:
        for module in gemm.modules:
            counts[module, gemm.recipe, gemm.product] += gemm.count
    return counts


def _missing(
    gemms: list[Gemm], policy: Policy, paths: list[str], sizes: Mapping[str, tuple[int, int]]
) -> Iterator[Gemm]:
    """Products that should be FP8 and have no GEMM, or fewer than most dgrads and wgrads have: a
    model's layers run equally often. (Forwards run twice where they are rematerialized.) With
    `sizes` those that bear the name of a linear of the same size count, too."""
    counts, exact = _counts(gemms), all(gemm.trips for gemm in gemms)
    unnamed = sum(gemm.count for gemm in gemms if gemm.module == UNNAMED)
    quantized = {path: policy.recipe(path) for path in paths if policy.recipe(path).casts}
    for path, recipe in quantized.items():
        likes = [m for m in quantized if m.split("/")[0] == path.split("/")[0]]
        found = [counts[m, quantized[m].name, p] for m in likes for p in ROLES[1:]]
        exempt = not any(found) and counts[path, "bf16", "fwd"] > 0
        needed = 0 if exempt else max(statistics.mode(found), 1) if exact else 1
        for product, (lhs, rhs) in recipe.gemms.items():
            lack = needed - counts[path, recipe.name, product]
            alike = [m for m in quantized if sizes and sizes[m] == sizes[path]]
            if alike:
                lack = min(lack, sum(needed - counts[m, recipe.name, product] for m in alike))
            if lhs is not None and rhs is not None and lack > 0:
                yield Gemm(
                    module=path, product=product, recipe=recipe.name, operands=("nothing",),
                    result="-", kernel="none", count=lack,
                    reason=f"name: no GEMM bears it ({unnamed} of the program bear none)",
                )  # fmt: skip


# For people ---------------------------------------------------------------------------------------


def format_table(gemms: Iterable[Gemm]) -> str:
    """A line for all equal GEMMs of a module and product; totals; reasons."""
    groups = _group(gemms)
    rows = [("module", "product", "GEMMs", "operands", "M x K x N", "kernel")]
    for g, count in groups.items():
        product = f"{g.recipe}.{g.product}" if g.product else "-"
        loops = "" if g.trips == 1 else f" ({g.trips or '?'} turns)"
        shape = " x ".join(map(str, g.shape)) if g.shape else "?"
        rows.append((g.name, product, f"{count}{loops}", g.precision, shape, g.kernel))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    fp8 = sum(count for g, count in groups.items() if g.fp8)
    wanted = sum(count for g, count in groups.items() if g.fp8 or g.reason)
    others: dict[str, int] = collections.Counter()
    for g, count in groups.items():
        if not g.fp8 and not g.reason:
            others[f"{g.name} {g.precision}"] += count
    total = [f"FP8: {fp8} of {wanted} GEMMs that recipes cast to it"]
    total += [f"others: {', '.join(f'{k} ({n})' for k, n in others.items())}"] if others else []
    below = ["; ".join(total), *_fallbacks(groups)]
    return "\n".join(
        [*lines, *(textwrap.fill(line, 100, subsequent_indent="  ") for line in below)]
    )


def _group(gemms: Iterable[Gemm]) -> dict[Gemm, int]:
    """Equal GEMMs and how often they run, by module and product."""
    groups: dict[Gemm, int] = collections.Counter()
    order = (*ROLES, None)
    by_place = lambda g: (module_position(g.modules[0]), g.module, order.index(g.product))  # noqa: E731
    for gemm in sorted(gemms, key=by_place):
        groups[dataclasses.replace(gemm, count=0)] += gemm.count
    return groups


def _fallbacks(groups: dict[Gemm, int]) -> list[str]:
    """For each reason a line, with all that it is about."""
    about: dict[str, list[str]] = collections.defaultdict(list)
    for g, count in groups.items():
        if g.reason is not None:
            about[g.reason].append(f"{g.name} {g.product} in {g.precision} ({count})")
    return [f"NOT FP8: {', '.join(names)}: {reason}" for reason, names in about.items()]


def require_fp8(gemms: Iterable[Gemm]) -> None:
    """Raises Fp8FallbackError if a product that its recipe casts to FP8 on both sides is not run
    on FP8 operands; says which, in which precision they ran, and why."""
    groups = _group(gemm for gemm in gemms if gemm.reason is not None)
    if groups:
        raise Fp8FallbackError(
            f"{sum(groups.values())} GEMMs of a training step should be FP8 and are not:\n  "
            + "\n  ".join(_fallbacks(groups))
        )


def log_gemms(
    text: str, policy: Policy, paths: Iterable[str], backend: str | None, *,
    high: Policy | None, require: bool,
) -> None:  # fmt: skip
    """Logs the table of a compiled training step, and raises where it must be FP8 and is not."""
    gemms = find_gemms(text, policy, paths, backend=backend, high=high)
    logging.info("GEMMs of a training step, policy %s:\n%s", policy.name, format_table(gemms))
    if require:
        require_fp8(gemms)
