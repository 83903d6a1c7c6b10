"""Which GEMMs of a compiled training step run in FP8, and why the others do not.

XLA does not report when it multiplies FP8 operands in another precision: a dot that matches none of
its patterns becomes a BF16 GEMM, a CPU widens every operand, and the backend `emulated` multiplies
in BF16 or float32 on purpose. So `find_gemms` reads the GEMMs that really run from the optimized
HLO (analysis/hlo.py), and compares them with the casts of the policy.

HLO names a GEMM by one linear and role only. Two optimizations of XLA hide other names:

- XLA merges small GEMMs with a common operand into one, such as q, k and v of the same x, and keeps
  one of their names. `find_gemms` finds the others by the width of the merged GEMM.
- If layers may be promoted (gemm/promotable.py), each linear has a branch for each of two
  recipes, and only one branch runs. XLA keeps one of several equal branches, under one name, and
  calls it several times: a linear's GEMMs may have the name of another linear of the same size.

A role that has no GEMM, or fewer than the other linears have, is listed as missing: a lost name
does not prove that the GEMM is FP8.
"""

import collections
import dataclasses
import itertools
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from fp8jax.analysis.hlo import BARE, ROLES, UNNAMED, Gemm, module_position, parse_gemms
from fp8jax.device import hardware
from fp8jax.device.hardware import Device
from fp8jax.gemm.backends.choice import BACKENDS, choose_backend
from fp8jax.gemm.backends.refusals import exact_in_bf16
from fp8jax.numerics.module_paths import MODULES
from fp8jax.numerics.policy import Policy
from fp8jax.numerics.recipe import Recipe
from fp8jax.numerics.recipes import RECIPES
from fp8jax.numerics.tiles import TENSOR
from fp8jax.text_table import aligned


class Fp8FallbackError(ValueError):
    """A GEMM whose operands are both cast to FP8 or FP4 runs in another precision, with another
    accumulation than its recipe's, or with a rounded scale."""


def find_gemms(
    text: str,
    policy: Policy,
    paths: Iterable[str] = MODULES,
    *,
    backend: str | None = None,
    device: Device | None = None,
    high: Policy | None = None,
) -> list[Gemm]:
    """Returns all GEMMs of a compiled training step, followed by those that are missing.

    Args:
      text: `compiled.as_text()`.
      policy: the model's policy; its casts say which GEMMs should run in FP8.
      paths: paths of the model's linears. As a mapping to (inputs, outputs), such as
        `ModelConfig.linears`, it also helps to find merged GEMMs where kernels padded narrow ones.
      backend, device: as for `choose_backend`.
      high: the policy of promoted layers, if layers may be promoted.
    """
    device = hardware.device() if device is None else device
    sizes = dict(paths) if isinstance(paths, Mapping) else {}
    gemms = []
    for gemm in _with_merged(list(parse_gemms(text)), sizes):
        recipe: Recipe = policy.recipe(gemm.module)
        name = gemm.recipe
        if name is not None and name != recipe.name and name in RECIPES:  # exempt or promoted
            recipe = RECIPES[name]
        gemms.append(judged(gemm, recipe, backend, device))
    if high is None or not any(policy.recipe(path).casts for path in MODULES):
        return [*gemms, *_missing(gemms, policy, list(paths), {})]
    missing = [gemm for each in (policy, high) for gemm in _missing(gemms, each, [*paths], sizes)]
    return [*gemms, *missing]


def judged(gemm: Gemm, recipe: Recipe, backend: str | None, device: Device) -> Gemm:
    """Returns the GEMM of a linear that runs `recipe`, with `fp8` and `reason` filled in."""
    narrow = all(dtype.startswith(("f8", "f4")) for dtype in gemm.operands)
    fp8 = narrow and device.fp8 and gemm.kernel not in BARE
    if fp8:
        reason = _wrong_sum(gemm, recipe) or _rounded_scale(gemm, recipe)
    else:
        reason = _reason(gemm, recipe, backend, device)
    return dataclasses.replace(gemm, fp8=fp8, reason=reason)


def _reason(gemm: Gemm, recipe: Recipe, backend: str | None, device: Device) -> str | None:
    """Returns why a GEMM that should be FP8 is not, or None if it need not be FP8."""
    if gemm.recipe is None or gemm.role is None:
        return None
    lhs, rhs = recipe.gemms[gemm.role]
    if lhs is None or rhs is None:
        return None
    if exact_in_bf16(lhs, rhs) and set(gemm.operands) == {"bf16"} and not device.block_scaled:
        size = min(cast.tile.contract for cast in (lhs, rhs) if cast.tile.contract is not None)
        return (
            f"backend: {device.kind} has no matrix unit for scales of {size} elements;"
            " this GEMM of codes times scales is exact in bf16"
        )
    if 4 in (lhs.format.bits, rhs.format.bits) and not device.block_scaled:
        return f"backend: {device.kind} has no FP4 matrix unit"
    if choose_backend(backend, recipe, device).name == "emulated":
        return _why_emulated(recipe, backend, device)
    if not device.fp8:
        return f"backend: {device.kind} has no FP8 matrix unit, XLA widened the operands"
    if gemm.shape and any(size % 16 for size in gemm.shape):
        return "shape: FP8 matrix units need multiples of 16, not {} x {} x {}".format(*gemm.shape)
    if gemm.kernel in BARE:
        return f"layout: no library runs it, XLA left a bare {gemm.kernel}"
    return "pattern: XLA did not recognize the FP8 GEMM and widened its operands"


def _wrong_sum(gemm: Gemm, recipe: Recipe) -> str | None:
    """Returns which accumulation an FP8 GEMM runs if its recipe asks for a better one, or None."""
    if gemm.role is None or gemm.accumulation != "fast":
        return None
    wanted = getattr(recipe.accumulation, gemm.role)
    return None if wanted == "fast" else f"accumulation: {wanted} was asked for, and fast runs"


def _rounded_scale(gemm: Gemm, recipe: Recipe) -> str | None:
    """Returns what happens to a scale that XLA should have folded into an FP8 GEMM, or None.

    The backend `xla` multiplies a result by the one scale of both tensors in the result's dtype
    (gemm/backends/xla.py): within the GEMM that is float32, after it a scale of 8 bits. It is exact
    for a float32 result, and for scales that are powers of two.
    """
    if gemm.role is None or gemm.scaled is not False or gemm.result == "f32":
        return None
    casts = [cast for cast in recipe.gemms[gemm.role] if cast is not None]
    if any(cast.tile != TENSOR for cast in casts) or all(c.rule.power_of_two for c in casts):
        return None
    return (
        f"scale: XLA did not fold it into the GEMM and rounds it to {gemm.result}; GEMMs that it "
        "merges stay apart with XLA_FLAGS=--xla_gpu_dot_merger_threshold_mb=0"
    )


def _why_emulated(recipe: Recipe, backend: str | None, device: Device) -> str:
    """Returns why the backend is `emulated`: each other backend's refusal, unless it was chosen."""
    reasons = ["backend: emulated"]
    if backend is None and not device.fp8:
        reasons.append(f"{device.kind} has no FP8 matrix unit")
    elif backend is None:
        for name, each in BACKENDS.items():
            if refusal := each.refuses(recipe, device):
                reasons.append(f"{name} cannot: {refusal}")
    return "; ".join(reasons)


# Merged GEMMs -------------------------------------------------------------------------------------

_Counts = Mapping[tuple[str, str | None, str | None], int]  # (module, recipe, role) -> calls


def _count_calls(gemms: Iterable[Gemm]) -> _Counts:
    counts: dict[tuple[str, str | None, str | None], int] = collections.Counter()
    for gemm in gemms:
        for module in gemm.modules:
            counts[module, gemm.recipe, gemm.role] += gemm.count
    return counts


def _with_merged(gemms: list[Gemm], sizes: Mapping[str, tuple[int, int]]) -> list[Gemm]:
    """Returns the GEMMs with `merged` filled in.

    A linear's width, its number of outputs, is the K of its dgrad: XLA never merges dgrads, since
    they have no operand in common. Where kernels pad to whole blocks, the dgrad may be wider than
    the merged GEMM assumes; then the model's own number of outputs, from `sizes`, is the width.
    """
    padded = {g.module: g.shape[1] for g in gemms if g.role == "dgrad" and g.shape}
    plain = {m: min(n, sizes[m][1]) if m in sizes else n for m, n in padded.items()}
    counts = _count_calls(gemms)
    return [
        dataclasses.replace(gemm, merged=_merged_modules(gemm, (padded, plain), counts))
        for gemm in gemms
    ]


def _merged_modules(
    gemm: Gemm, candidates: Iterable[Mapping[str, int]], counts: _Counts
) -> tuple[str, ...]:
    """Returns the other linears whose forward or wgrad GEMM was merged into this one.

    They are one or two linears of the same folder whose own GEMM is missing, and whose widths add
    up to that of the merged GEMM. `candidates` are the widths to try, one mapping after the other.
    """
    if gemm.role not in ("fwd", "wgrad") or not gemm.shape:
        return ()
    folder = gemm.module.rpartition("/")[0]
    for widths in candidates:
        if gemm.module not in widths:
            return ()
        lacking = [
            m
            for m in widths
            if m.rpartition("/")[0] == folder
            and counts[m, gemm.recipe, gemm.role] < counts[m, gemm.recipe, "dgrad"]
        ]
        for n in (1, 2):
            for others in itertools.combinations(lacking, n):
                if gemm.shape[2] == widths[gemm.module] + sum(widths[m] for m in others):
                    return others
    return ()


# Missing GEMMs ------------------------------------------------------------------------------------


def _expected_calls(
    quantized: Mapping[str, Recipe], counts: _Counts, exact: bool
) -> dict[str, int]:
    """Returns how often each GEMM role of each quantized linear should run, by path.

    All layers of a model run equally often. So the expected number is the most frequent count of
    dgrads and wgrads among the linears of the layers, or of the head. Forwards do not count:
    rematerialization runs them twice. If a loop has an unknown number of iterations (`exact` is
    False), one call is expected. A linear that runs in BF16 only, in a model whose layers are all
    exempt, is expected to have no calls.
    """
    expected = {}
    for path in quantized:
        stack = path.split("/")[0]
        calls = [
            counts[m, recipe.name, role]
            for m, recipe in quantized.items()
            if m.split("/")[0] == stack
            for role in ROLES[1:]
        ]
        if not any(calls) and counts[path, "bf16", "fwd"] > 0:
            expected[path] = 0
        else:
            expected[path] = max(statistics.mode(calls), 1) if exact else 1
    return expected


def _missing(
    gemms: list[Gemm], policy: Policy, paths: list[str], sizes: Mapping[str, tuple[int, int]]
) -> Iterator[Gemm]:
    """Report each GEMM role that runs fewer FP8 GEMMs than the number of layers implies.

    With `sizes`, a GEMM may have the name of any linear of the same size, so that a role is missing
    only if all linears of that size together have too few.
    """
    counts = _count_calls(gemms)
    quantized = {path: policy.recipe(path) for path in paths if policy.recipe(path).casts}
    expected = _expected_calls(quantized, counts, exact=all(gemm.trips for gemm in gemms))
    unnamed = sum(gemm.count for gemm in gemms if gemm.module == UNNAMED)
    for path, recipe in quantized.items():
        same_size = [m for m in quantized if sizes and sizes[m] == sizes[path]]
        for role, (lhs, rhs) in recipe.gemms.items():
            lack = expected[path] - counts[path, recipe.name, role]
            if same_size:
                total = sum(expected[path] - counts[m, recipe.name, role] for m in same_size)
                lack = min(lack, total)
            if lhs is not None and rhs is not None and lack > 0:
                yield Gemm(
                    module=path,
                    role=role,
                    recipe=recipe.name,
                    operands=("nothing",),
                    result="-",
                    kernel="none",
                    count=lack,
                    reason=f"name: no GEMM has this name ({unnamed} of the program have none)",
                )


# Reports ------------------------------------------------------------------------------------------


_MOST_NAMES = 6  # in a line below a table that has them all


def format_table(gemms: Iterable[Gemm]) -> str:
    """Returns a text table with one line for all equal GEMMs of a module and role.

    Totals follow, and one line for each reason why GEMMs that should be FP8 are not.
    """
    gemms = list(gemms)
    groups = _group(gemms)
    rows = [("module", "recipe and role", "GEMMs", "operands", "M x K x N", "kernel")]
    for g, count in groups.items():
        role = f"{g.recipe}.{g.role}" if g.role else "-"
        loops = "" if g.trips == 1 else f" ({g.trips or '?'} turns)"
        shape = " x ".join(map(str, g.shape)) if g.shape else "?"
        rows.append((g.name, role, f"{count}{loops}", g.precision, shape, g.runs))
    notes = [_totals(summarize(gemms), groups), *_fallbacks(groups, _MOST_NAMES)]
    wrapped = [textwrap.fill(note, 100, subsequent_indent="  ") for note in notes]
    return "\n".join([*aligned(rows), *wrapped])


def _group(gemms: Iterable[Gemm]) -> dict[Gemm, int]:
    """Returns the distinct GEMMs (with `count` 0) and their calls, ordered by module and role."""

    def place(gemm: Gemm) -> tuple[int, str, int]:
        return module_position(gemm.modules[0]), gemm.module, (*ROLES, None).index(gemm.role)

    groups: dict[Gemm, int] = collections.Counter()
    for gemm in sorted(gemms, key=place):
        groups[dataclasses.replace(gemm, count=0)] += gemm.count
    return groups


def _totals(summary: "Summary", groups: Mapping[Gemm, int]) -> str:
    """Returns how many GEMMs run in FP8, of those that should, and which other GEMMs there are."""
    others: dict[str, int] = collections.Counter()
    for g, count in groups.items():
        if not (g.fp8 or g.reason):
            others[f"{g.name} {g.precision}"] += count
    parts = [f"FP8: {summary.fp8} of {summary.cast} GEMMs that recipes cast to it"]
    if others:
        parts.append(f"others: {', '.join(f'{name} ({n})' for name, n in others.items())}")
    return "; ".join(parts)


def _fallbacks(groups: Mapping[Gemm, int], most: int) -> list[str]:
    """Returns one line for each reason, with the GEMMs that it applies to, `most` at most."""
    by_reason: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for g, count in groups.items():
        if g.reason is not None:
            kind = _FAULTS[g.reason.partition(":")[0]][0] if g.fp8 else "NOT FP8"
            by_reason[kind, g.reason].append(f"{g.name} {g.role} in {g.precision} ({count})")
    lines = []
    for (kind, reason), names in by_reason.items():
        left_out = names[most:]
        more = [f"and {len(left_out)} more lines above"] if left_out else []
        lines.append(f"{kind}: {', '.join([*names[:most], *more])}: {reason}")
    return lines


# What a reason begins with -> what is wrong with an FP8 GEMM, and what it should do.
_FAULTS = {
    "accumulation": ("NOT SPLIT", "split their sums"),
    "scale": ("NOT SCALED", "multiply their sums by their scale"),
}


def require_fp8(gemms: Iterable[Gemm]) -> None:
    """Checks that every GEMM whose operands are both cast to FP8 or FP4 runs on such operands, that
    it adds up their products as its recipe asks, and that no scale is rounded.

    Raises:
      Fp8FallbackError: some do not; it says which, their precision, and why.
    """
    groups = _group(gemm for gemm in gemms if gemm.reason is not None)
    if groups:
        what = "run in FP8"
        if all(gemm.fp8 for gemm in groups):
            faults = {str(gemm.reason).partition(":")[0] for gemm in groups}
            what = " and ".join(_FAULTS[fault][1] for fault in sorted(faults))
        raise Fp8FallbackError(
            f"{sum(groups.values())} GEMMs of the program should {what} and do not:\n  "
            + "\n  ".join(_fallbacks(groups, len(groups)))
        )


class Summary(NamedTuple):
    """How many GEMMs run in FP8 or FP4, of how many whose operands recipes quantize.

    Attributes:
      reasons: why the others do not, each reason once.
    """

    fp8: int
    cast: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        if not self.cast:
            return "no GEMM is quantized"
        if self.fp8 == self.cast:
            return f"all {self.cast} quantized GEMMs multiply in FP8"
        first, more = self.reasons[:1], len(self.reasons) - 1
        reasons = "1 other reason" if more == 1 else f"{more} other reasons"
        others = f" (and {reasons})" if more > 0 else ""
        some = f"{self.fp8} of {self.cast} quantized GEMMs multiply in FP8, the others do not"
        none = f"{self.cast} quantized GEMMs, none of which multiplies in FP8"
        return ": ".join([some if self.fp8 else none, *first]) + others


def summarize(gemms: Iterable[Gemm]) -> Summary:
    """Returns the counts of a program's GEMMs."""
    gemms = list(gemms)
    fp8 = sum(gemm.count for gemm in gemms if gemm.fp8)
    cast = sum(gemm.count for gemm in gemms if gemm.fp8 or gemm.reason)
    return Summary(fp8, cast, tuple(dict.fromkeys(g.reason for g in gemms if g.reason)))
