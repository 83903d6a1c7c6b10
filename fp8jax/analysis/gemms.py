"""Which GEMMs of a compiled training step really are FP8, and why where one is not.

XLA does not say when it multiplies FP8 in another precision: what does not match its patterns
becomes a BF16 GEMM, a CPU widens every operand, and the backend `emulated` multiplies in BF16 or
float32 on purpose. What ran is read from the optimised HLO (`compiled.as_text()`):

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
import math
import re
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Mapping

from absl import logging

from fp8jax.device import hardware
from fp8jax.device.hardware import Device
from fp8jax.linear.backends import BACKENDS, choose_backend
from fp8jax.model.config import MODULES
from fp8jax.numerics.policy import Policy
from fp8jax.numerics.recipe import RECIPES, Recipe

PRODUCTS = ("fwd", "dgrad", "wgrad")


UNNAMED = "(unattributed)"


_LIBRARY = re.compile(
    r"__cublas\$(gemm|lt\$.*)|__cudnn\$blockScaledDot|__op\$block_scaled_dot|__onednn\$matmul"
)


_PALLAS = (
    "mosaic_gpu_v2", "mosaic_gpu", "__gpu$xla.gpu.triton", "triton_kernel_call_ffi",
    "triton_kernel_call", "tpu_custom_call",
)  # fmt: skip


# These run on the operands that they show, but not for certain in a matrix unit.
_BARE = ("dot", "scaled-dot", "convolution")


class Fp8FallbackError(ValueError):
    """A product that its recipe casts to FP8 runs in another precision."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemm:
    """One GEMM of a compiled program.

    Attributes:
      module: the path that policies see; for other products where they stand, UNNAMED if lost.
      product, recipe: one of PRODUCTS and a recipe's name; None if it is no product of a linear.
      merged: further modules that it multiplies for.
      operands, result: dtypes by their names in HLO: "f8e4m3fn", "bf16".
      shape: (M, K, N) on one device, batch axes being part of M; None if not known.
      kernel: the library's or kernel's target, the kind of the fusion, or the bare instruction.
      count: calls in a run of the program; of a missing product, those that it lacks.
      trips: turns of the loops around it; None where HLO does not know, and they count as one.
      fp8: both operands have 8 or 4 bits, and a matrix unit multiplies them.
      reason: why not, where its recipe casts both; else None.
    """

    module: str
    product: str | None
    recipe: str | None
    operands: tuple[str, ...]
    result: str
    kernel: str
    count: int
    shape: tuple[int, int, int] | None = None
    trips: int | None = 1
    merged: tuple[str, ...] = ()
    fp8: bool = False
    reason: str | None = None

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(sorted((self.module, *self.merged), key=_position))

    @property
    def name(self) -> str:
        """Such as layers/attention/q+k+v."""
        return "+".join([self.modules[0], *(m.rpartition("/")[2] for m in self.modules[1:])])

    @property
    def precision(self) -> str:
        return " x ".join(dict.fromkeys(self.operands))


def _position(path: str) -> int:
    return MODULES.index(path) if path in MODULES else len(MODULES)


# Text ---------------------------------------------------------------------------------------------

_HEADER = re.compile(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$")


# Types stand before the opcode; in them no word follows a blank and precedes a parenthesis.
_OPCODE = re.compile(r" ([a-z][a-z0-9-]*)\(([^)]*)\)")


_TYPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")


_CALLED = re.compile(r"(?:calls|body|to_apply|\w+_computations?)=\{?((?:%[\w.-]+(?:, )?)+)")


_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


_KIND = re.compile(r'"kind":"(__[^"]+)"')


_OP_NAME = re.compile(r'op_name="([^"]*)"')


_TARGET = re.compile(r'custom_call_target="([^"]*)"')


_CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[=:][\[{]([^\]}]*)')


# Parts of an `op_name` that are not modules: what JAX calls its own control flow.
_CONTROL = {
    "while", "body", "cond", "scan", "checkpoint", "rematted_computation", "remat", "closed_call",
    "core_call", "eval_jaxpr", "pjit", "shard_map", "custom_vjp_call", "custom_jvp_call",
    "branch_0_fun", "branch_1_fun",
}  # fmt: skip


class _Program:
    """HLO text: instructions by computation and name, and which computation calls which."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, str]] = {"": {}}  # name -> what follows its " = "
        # computation -> (caller, turns if it is a loop's, kind if it is a kernel of its own)
        self._calls: dict[str, list[tuple[str, int | None, str]]] = collections.defaultdict(list)
        self._runs: dict[str, tuple[int, int | None]] = {}
        name = ""
        for line in text.splitlines():
            if line.startswith(" "):
                left, _, right = line.partition(" = ")
                self.computations[name][left.strip().removeprefix("ROOT ").lstrip("%")] = right
                if "=%" in right or "computations={" in right:
                    self._note_calls(name, right)
            elif header := _HEADER.match(line):
                name = header[1]
                self.computations[name] = {}

    def _note_calls(self, caller: str, right: str) -> None:
        known, kind = _TRIPS.search(right), _KIND.search(right)
        trips = 1 if "body=%" not in right else int(known[1]) if known else None
        for names in _CALLED.findall(right):
            for callee in re.findall(r"%([\w.-]+)", names):
                self._calls[callee].append((caller, trips, kind[1] if kind else ""))

    def runs(self, computation: str) -> tuple[int, int | None]:
        """How often it runs in all, and the turns of the loops around it."""
        if computation not in self._runs:
            calls = [(*self.runs(caller), trips) for caller, trips, _ in self._calls[computation]]
            count = sum(outer * (trips or 1) for outer, _, trips in calls)
            turns = [(outer or 0) * (trips or 0) for _, outer, trips in calls] or [1]
            self._runs[computation] = (count if calls else 1, max(turns) if all(turns) else None)
        return self._runs[computation]

    def kernel(self, computation: str) -> str:
        """The kind of the fusion around it that is a kernel of its own, or "" for none."""
        for caller, _, kind in self._calls[computation][:1]:
            return kind or self.kernel(caller)
        return ""

    def type_of(self, computation: str, name: str) -> tuple[str, list[int]]:
        body = self.computations[computation]
        return _parse_type(body[name]) if name in body else ("?", [])


def _parse_type(right: str) -> tuple[str, list[int]]:
    """dtype and dimensions, of a tuple those of its first part."""
    found = _TYPE.search(right)
    return (found[1], [int(n) for n in found[2].split(",") if n]) if found else ("?", [])


def _parse_name(op_name: str) -> tuple[str, str | None, str | None]:
    """(module, recipe, product)."""
    parts = op_name.split("/")
    scopes = [i for i, part in enumerate(parts) if part.rpartition(".")[2] in PRODUCTS]
    end = scopes[-1] if scopes else len(parts) - 1  # the last part is the operation
    # Transformations have parentheses, methods a dot; model/transformer.py calls a layer `Block`.
    modules = [part for part in parts[:end] if part.isidentifier() and part not in _CONTROL]
    path = "/".join("layers" if part == "Block" else part for part in modules) or UNNAMED
    recipe, _, product = parts[end].rpartition(".")
    return (path, recipe, product) if scopes else (path, None, None)


def _gemm(program: _Program, computation: str, right: str) -> Gemm | None:
    """The GEMM that an instruction is, not yet judged; None for all others."""
    instruction = _OPCODE.search(right)
    opcode = instruction[1].removesuffix("-start") if instruction else ""
    if instruction is None or opcode not in (*_BARE, "custom-call"):
        return None
    found, target = _OP_NAME.search(right), _TARGET.search(right)
    module, recipe, product = _parse_name(found[1] if found else "")
    kernel = target[1] if target else program.kernel(computation) or opcode
    if opcode == "custom-call" and not _LIBRARY.fullmatch(kernel):
        if kernel not in _PALLAS or not product:
            return None
    if opcode == "convolution" and not product:
        return None
    names = re.findall(r"%([\w.-]+)", instruction[2])[:2]
    operands = [program.type_of(computation, name) for name in names]
    result, dims = _parse_type(right)
    count, trips = program.runs(computation)
    return Gemm(
        module=module, product=product, recipe=recipe, operands=tuple(d for d, _ in operands),
        result=result, shape=_shape(right, operands[0][1] if operands else [], dims),
        kernel=kernel, count=count, trips=trips,
    )  # fmt: skip


def _shape(right: str, lhs: list[int], result: list[int]) -> tuple[int, int, int] | None:
    """(M, K, N), from the dimension numbers or, without, taking the result for [..., M, N]."""
    size, contracted = math.prod(lhs), _CONTRACTED.search(right)
    if not lhs or not result or 0 in (*lhs, *result):
        return None
    if contracted is None:
        M = math.prod(result[:-1])
        return M, size // M, result[-1]
    K = math.prod(lhs[int(axis)] for axis in re.findall(r"\d+", contracted[1]))
    return size // K, K, math.prod(result) * K // size


def _parse(text: str) -> Iterator[Gemm]:
    program = _Program(text)
    for computation, body in program.computations.items():
        for right in body.values():
            if "dot(" in right or "custom-call" in right or "convolution(" in right:
                gemm = _gemm(program, computation, right)
                if gemm is not None:
                    yield gemm


# Judgement ----------------------------------------------------------------------------------------


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
    for gemm in _with_merged(list(_parse(text)), outputs):
        narrow = all(dtype.startswith(("f8", "f4")) for dtype in gemm.operands)
        fp8 = narrow and device.fp8 and gemm.kernel not in _BARE
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
    lhs, rhs = recipe.products[gemm.product]
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
    if gemm.kernel in _BARE:
        return f"layout: no library took it, a bare {gemm.kernel} was left"
    return "pattern: XLA did not recognise the FP8 product and widened its operands"


def _with_merged(gemms: list[Gemm], outputs: Mapping[str, int]) -> list[Gemm]:
    """The same, each with the modules whose products it does besides its own.

    The width of a linear is what its dgrad contracts: dgrads have no operand in common and are
    never merged. Where kernels fill up to whole blocks, dgrads are wider than some other products,
    which then have the model's `outputs`. A wider product does those of neighbours, which lack
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
    model's layers run equally often. (Forwards run twice where they are rematerialised.) With
    `sizes` those that bear the name of a linear of the same size count, too."""
    counts, exact = _counts(gemms), all(gemm.trips for gemm in gemms)
    unnamed = sum(gemm.count for gemm in gemms if gemm.module == UNNAMED)
    quantised = {path: policy.recipe(path) for path in paths if policy.recipe(path).casts}
    for path, recipe in quantised.items():
        likes = [m for m in quantised if m.split("/")[0] == path.split("/")[0]]
        found = [counts[m, quantised[m].name, p] for m in likes for p in PRODUCTS[1:]]
        exempt = not any(found) and counts[path, "bf16", "fwd"] > 0
        needed = 0 if exempt else max(statistics.mode(found), 1) if exact else 1
        for product, (lhs, rhs) in recipe.products.items():
            lack = needed - counts[path, recipe.name, product]
            alike = [m for m in quantised if sizes and sizes[m] == sizes[path]]
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
    order = (*PRODUCTS, None)
    by_place = lambda g: (_position(g.modules[0]), g.module, order.index(g.product))  # noqa: E731
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
