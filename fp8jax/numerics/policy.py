"""Policies: which module runs which recipe, and when. Data, no code.

A `Policy` maps module paths to recipes (recipe.py): an ordered list of (pattern, recipe), the first
match wins, what no pattern matches stays in high precision, and the first and last layers can be
exempt. Patterns are shell-style (`layers/mlp/*`) and never hold a layer's index: layers are one
stack. A policy's name may be followed by options,

    fp8_delayed:history=1024,margin=1      fp4_mixed:gradients=e5m2      nvfp4:head=fp8_current

each of which changes the casts that it is about (`OPTIONS`), the recipe of the LM head (`head`) or
the exempt layers (`bf16_first`, `bf16_last`). An option that no cast of the policy can honour
raises: the papers' open points are options, and one that does nothing would be a lie.

The FP4 paper (arXiv 2502.11458) argues with a 2 x 2, the attention's forward against every linear's
backward, the MLPs' forward being FP4 throughout. All four are here:

                       backward FP4     backward FP8
    attention FP4      fp4_naive        fp4_block
    attention FP8      fp4_backward     fp4_mixed      (theirs)

Its weights and activations may share scales along 128 elements or along a whole token and channel
(`fp4_tile=row`), and whether its FP8 gradients are E4M3 or E5M2 is not known (`gradients=e5m2`).

A `PrecisionSchedule` is a list of (fraction of training, policy). The FP4 paper's target-precision
stage, where the last part of training runs in high precision, is
((0.0, "fp4_mixed"), (1 - f, "bf16")); the paper's f is not known, 0.05 to 0.1 is usual.
"""

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Iterable
from typing import Any

from fp8jax.lookup import lookup, unknown
from fp8jax.numerics.formats import FORMATS
from fp8jax.numerics.recipe import HIGH_PRECISION, RECIPES, Cast, Recipe, as_recipe
from fp8jax.numerics.scaling import (
    BLOCK128,
    MX32,
    NV16,
    ROW,
    TENSOR,
    TILE128,
    Constant,
    Fp32,
    NV16x16,
    NvFp4,
    Pow2,
    as_scale_rule,
)

TILES = {
    "tensor": TENSOR, "row": ROW, "tile128": TILE128, "block128": BLOCK128, "mx32": MX32,
    "nv16": NV16, "nv16x16": NV16x16,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Policy:
    """Which module gets which recipe.

    Attributes:
      rules: (shell-style pattern over module paths, recipe), first match wins.
      bf16_first, bf16_last: layers at either end that run in high precision: a number of them, or
        a share of all (a float below 1), rounded up.
      name: for logs and errors; not part of its identity.
    """

    rules: tuple[tuple[str, Recipe], ...]
    bf16_first: int | float = 0
    bf16_last: int | float = 0
    name: str = dataclasses.field(default="custom", compare=False)

    def __post_init__(self):
        for end in ("bf16_first", "bf16_last"):
            value = getattr(self, end)
            if value < 0 or (value != int(value) and value > 1):
                raise ValueError(f"{end}={value} is neither a number of layers nor a share of them")

    def recipe(self, path: str) -> Recipe:
        """The recipe of the module at `path`, such as "layers/mlp/down"."""
        for pattern, recipe in self.rules:
            if fnmatch.fnmatchcase(path, pattern):
                return recipe
        return HIGH_PRECISION

    def exempt(self, num_layers: int) -> tuple[int, int]:
        """How many first and last layers run in high precision."""
        ends = (self.bf16_first, self.bf16_last)
        # Rounded first: 0.15 * 20 is a little more than 3.
        first, last = (n if n == int(n) else math.ceil(round(n * num_layers, 6)) for n in ends)
        return int(first), int(last)

    def check(self, paths: Iterable[str], num_layers: int) -> None:
        """Raises ValueError for a rule that no path matches (a typo would leave those modules in
        high precision without a word), and for more exempt layers than there are."""
        paths = list(paths)
        for pattern, _ in self.rules:
            if not fnmatch.filter(paths, pattern):
                raise ValueError(
                    f"policy {self.name!r}: rule {pattern!r} matches no module. "
                    f"There are: {', '.join(paths)}"
                )
        first, last = self.exempt(num_layers)
        if first + last > num_layers:
            raise ValueError(
                f"policy {self.name!r}: {first} first and {last} last layers"
                f" in high precision, of {num_layers}"
            )

    @property
    def delayed(self) -> bool:
        """Whether any module keeps amax histories, so that a first step has to seed them."""
        return any(recipe.histories for _, recipe in self.rules)

    @property
    def stochastic(self) -> bool:
        """Whether any module needs a key."""
        return any(recipe.stochastic for _, recipe in self.rules)

    def seeding(self) -> "Policy":
        """The policy of the first step after initialisation or after a switch to this policy."""
        rules = tuple((pattern, recipe.seeding()) for pattern, recipe in self.rules)
        return dataclasses.replace(self, rules=rules)

    def without_exemptions(self) -> "Policy":
        """The policy of the layers between the first and the last."""
        return dataclasses.replace(self, bf16_first=0, bf16_last=0)


# Embedding, LM head, norms and the attention core match none of these: they stay in BF16.
POLICIES: dict[str, Policy] = {
    **{name: Policy((("layers/*", recipe),), name=name) for name, recipe in RECIPES.items()},
    "fp4_mixed": Policy(
        (("layers/mlp/*", RECIPES["fp4_block"]), ("layers/attention/*", RECIPES["fp8_block"])),
        name="fp4_mixed",
    ),
    "fp4_backward": Policy(
        (
            ("layers/mlp/*", RECIPES["fp4_naive"]),
            (
                "layers/attention/*",
                RECIPES["fp4_naive"].with_forward(RECIPES["fp8_block"]),
            ),
        ),
        name="fp4_backward",
    ),
    # NVIDIA's 12B leaves 16% of the linears in BF16, most of them at the end (arXiv 2509.25149).
    "nvfp4_mixed": Policy((("layers/*", RECIPES["nvfp4"]),), bf16_last=0.15, name="nvfp4_mixed"),
}


# Options ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Option:
    """NAME=VALUE behind a policy's name.

    Attributes:
      parse: text to value; raises ValueError.
      takes: (name of the cast, such as "dgrad_g", the cast) -> whether it is about this one.
      change: (cast, value) -> the cast with it.
      help: one line for docs/recipes.md.
    """

    parse: Callable[[str], Any]
    takes: Callable[[str, Cast], bool]
    change: Callable[[Cast, Any], Cast]
    help: str


def _replace(field: str) -> Callable[[Cast, Any], Cast]:
    return lambda cast, value: dataclasses.replace(cast, **{field: value})


def _has_margin(name: str, cast: Cast) -> bool:
    return isinstance(cast.scale, Fp32 | Pow2)


def _free_rule(cast: Cast) -> bool:
    return not isinstance(cast.scale, Constant | NvFp4)


OPTIONS: dict[str, Option] = {
    "history": Option(
        int, lambda _, c: c.delayed, _replace("history"), "amaxes that a delayed cast keeps"
    ),
    "amax": Option(
        str, lambda _, c: c.delayed, _replace("amax"), "of a history: `max`, or the `newest`"
    ),
    "margin": Option(
        int, _has_margin,
        lambda c, v: dataclasses.replace(c, scale=dataclasses.replace(c.scale, margin=v)),  # type: ignore[type-var]
        "binades left free above the amax (scales in float32)",
    ),
    "bias": Option(
        int, lambda _, c: c.timing == "constant",
        lambda c, v: dataclasses.replace(c, scale=Constant(2.0**-v)),
        "exponent b of a constant scale 2^-b",
    ),
    "scale": Option(
        as_scale_rule, lambda _, c: _free_rule(c), _replace("scale"),
        "`fp32`, `pow2`, `e8m0`, or `e8m0_floor` as in OCP Microscaling",
    ),
    "gradients": Option(
        lambda text: lookup("format", text, FORMATS),
        lambda name, c: name.endswith("_g") and c.format.bits == 8,
        _replace("format"), "format of FP8 gradients: `e4m3` or `e5m2`",
    ),
    "fp4_tile": Option(
        lambda text: lookup("tile", text, TILES),
        lambda _, c: c.format.bits == 4 and _free_rule(c),
        _replace("tile"), "elements that share a scale in FP4: `row`, `tile128`, `mx32`, …",
    ),
    "hadamard": Option(
        int, lambda _, c: c.hadamard > 1, _replace("hadamard"), "size of the rotation, 1 for none"
    ),
    "rounding": Option(
        str, lambda _, c: c.rounding == "stochastic", _replace("rounding"),
        "`nearest` instead of stochastic",
    ),
}  # fmt: skip


_POLICY_OPTIONS = ("head", "bf16_first", "bf16_last")


def _apply_option(policy: Policy, name: str, value: str) -> Policy:
    if name == "head":
        return dataclasses.replace(policy, rules=(("lm_head", as_recipe(value)), *policy.rules))
    try:
        if name == "bf16_first":
            return dataclasses.replace(policy, bf16_first=float(value))
        if name == "bf16_last":
            return dataclasses.replace(policy, bf16_last=float(value))
        option = OPTIONS[name]
        parsed = option.parse(value)
    except ValueError as error:
        raise ValueError(f"{name}={value}: {error}") from None
    changed = 0

    def change(operand: str, cast: Cast) -> Cast:
        nonlocal changed
        if not option.takes(operand, cast):
            return cast
        changed += 1
        return option.change(cast, parsed)

    rules = tuple((pattern, recipe.map(change)) for pattern, recipe in policy.rules)
    if not changed:
        raise ValueError(f"{name}={value}: no cast of policy {policy.name!r} has such a thing")
    return dataclasses.replace(policy, rules=rules)


def as_policy(policy: str | Policy) -> Policy:
    """`policy`, resolved if it is a name, with options after a colon.

    Raises ValueError for an unknown name or option, and for an option that nothing takes.
    """
    if isinstance(policy, Policy):
        return policy
    name, _, options = policy.partition(":")
    resolved = lookup("policy", name, POLICIES)
    for option in options.split(",") if options else ():
        key, equals, value = option.partition("=")
        if key not in OPTIONS and key not in _POLICY_OPTIONS:
            raise unknown("option", key, [*OPTIONS, *_POLICY_OPTIONS])
        if not equals:
            raise ValueError(f"policy {policy!r}: expected {key}=VALUE, got {option!r}")
        resolved = _apply_option(resolved, key, value)
    return dataclasses.replace(resolved, name=policy)


# Schedules ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PrecisionSchedule:
    """The policies of a run, one after the other.

    Attributes:
      stages: (fraction of training at which it begins, policy or its name), the first at 0.0.
        Names are resolved.
    """

    stages: tuple[tuple[int | float, str | Policy], ...]

    def __post_init__(self):
        stages = tuple((float(begin), as_policy(policy)) for begin, policy in self.stages)
        object.__setattr__(self, "stages", stages)
        begins = [begin for begin, _ in stages]
        if not begins or begins[0] != 0.0:
            raise ValueError(f"a precision schedule begins at 0.0, got {begins}")
        if begins != sorted(set(begins)) or not begins[-1] < 1:  # NaN is not
            raise ValueError(
                f"a precision schedule's fractions of training grow and stay below 1, got {begins}"
            )

    @property
    def policies(self) -> tuple[Policy, ...]:
        return tuple(as_policy(policy) for _, policy in self.stages)

    def begins(self, num_steps: int) -> tuple[int, ...]:
        """How many steps are finished when each stage begins. Raises ValueError for a stage
        without a step."""
        begins = tuple(round(begin * num_steps) for begin, _ in self.stages)
        if len(set(begins)) < len(begins) or begins[-1] >= num_steps:
            raise ValueError(
                f"precision schedule: of {num_steps} steps, some stage gets none: they begin at"
                f" {begins}"
            )
        return begins

    def policy_of(self, step: int, num_steps: int) -> Policy:
        """The policy of step `step`, counted from 1."""
        begun = [begin < step for begin in self.begins(num_steps)]
        return self.policies[max(sum(begun), 1) - 1]


def as_schedule(precision: str, schedule: Iterable[Any]) -> PrecisionSchedule:
    """The schedule of a config's keys `precision` and `precision_schedule`: the first is the
    policy at the start, the second the stages, pairs of (fraction of training, policy), with or
    without the one at 0.0.

    Raises ValueError for what is no such pair, and where the two name two policies for the start.
    """
    schedule = tuple(schedule)
    for stage in schedule:
        match stage:
            case (int() | float(), str() | Policy()):
                continue
        raise ValueError(
            f"precision_schedule={schedule}: {stage!r} is no pair of a fraction of training and a"
            ' policy; one stage is ((0.9, "bf16"),)'
        )
    stages = tuple((float(begin), policy) for begin, policy in schedule)
    if not stages or stages[0][0] > 0:
        stages = ((0.0, precision), *stages)
    if as_policy(stages[0][1]) != as_policy(precision):
        raise ValueError(
            f"{precision=} contradicts the first stage of precision_schedule={stages}: change both,"
            " or leave out the stage at 0.0"
        )
    return PrecisionSchedule(stages)
