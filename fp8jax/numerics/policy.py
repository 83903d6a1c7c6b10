"""Policies: which module uses which recipe. Data, no computation.

A `Policy` maps module paths to recipes (recipe.py). It is an ordered list of (pattern, recipe): the
first pattern that matches a path decides, and modules that no pattern matches stay in high
precision. The first and last layers can be exempt. Patterns are shell-style (`layers/mlp/*`) and
contain no layer index, because the layers are one stack.

`POLICIES` holds the named policies; names.py adds options to a name. The FP4 paper (arXiv
2502.11458) compares FP4 and FP8 for the attention's forward and for the backward of all linears,
with FP4 in the forward of the MLPs. All four combinations are here:

                       backward FP4     backward FP8
    attention FP4      fp4_naive        fp4_block
    attention FP8      fp4_backward     fp4_mixed      (the paper's choice)
"""

import dataclasses
import fnmatch
import math
from collections.abc import Iterable
from typing import Any

from fp8jax.lookup import Table, brief
from fp8jax.numerics.describe import HEADER, recipe_rows, table
from fp8jax.numerics.recipe import Cast, Recipe
from fp8jax.numerics.recipes import HIGH_PRECISION, RECIPES
from fp8jax.numerics.scales import Constant


@dataclasses.dataclass(frozen=True)
class Policy:
    """Which module uses which recipe.

    Attributes:
      rules: (shell-style pattern of module paths, recipe); the first match decides.
      bf16_first, bf16_last: how many layers at the start and at the end run in high precision: a
        number, or a fraction of all layers (a float below 1), rounded up.
      name: for logs and error messages; ignored by == and hash.

    Raises:
      TypeError: for rules that are not such pairs, and for numbers of layers of another type.
      ValueError: for numbers of layers that are negative, or neither whole nor a fraction.

    Example:
      >>> block = fp8jax.RECIPES["fp8_block"]
      >>> policy = fp8jax.Policy((("layers/mlp/*", block),), bf16_last=0.1, name="mlps")
      >>> policy.recipe("layers/mlp/up").name, policy.recipe("layers/attention/q").name
      ('fp8_block', 'bf16')
      >>> policy.exempt(24)  # of 24 layers, the first none and the last three run in BF16
      (0, 3)
    """

    rules: tuple[tuple[str, Recipe], ...]
    bf16_first: int | float = 0
    bf16_last: int | float = 0
    name: str = dataclasses.field(default="custom", compare=False)

    def __post_init__(self):
        if not isinstance(self.rules, tuple | list):
            raise TypeError(
                "the rules of a policy are pairs (pattern, recipe), such as"
                f' (("layers/*", RECIPES["fp8_block"]),), got {brief(self.rules)}'
            )
        for rule in self.rules:
            _check_rule(rule)
        object.__setattr__(self, "rules", tuple(map(tuple, self.rules)))
        for end in ("bf16_first", "bf16_last"):
            value = getattr(self, end)
            if not isinstance(value, int | float):
                raise TypeError(f"{end} must be a number of layers, got {brief(value)}")
            # `not >=` also rejects NaN.
            if not value >= 0 or value == math.inf or (value != int(value) and value > 1):
                raise ValueError(
                    f"{end}={value} is neither a number of layers nor a fraction below 1 of them"
                )

    def __repr__(self) -> str:
        rules = [f"{pattern}: {recipe.name}" for pattern, recipe in self.rules]
        ends = {"first": self.bf16_first, "last": self.bf16_last}
        exempt = [f"{end} {value} of the layers: bf16" for end, value in ends.items() if value]
        return f"Policy({self.name!r}, {'; '.join([*rules, *exempt])})"

    def table(self) -> str:
        """A text table of the casts of each rule, for people."""
        rows = []
        for pattern, recipe in self.rules:
            of_recipe = recipe_rows(recipe.by_name(), recipe.accumulation)
            rows += [(pattern, recipe.name, *row) for row in of_recipe]
        return table(rows, ("modules", "recipe", *HEADER))

    def recipe(self, path: str) -> Recipe:
        """Returns the recipe of the module at `path`, such as "layers/mlp/down"."""
        for pattern, recipe in self.rules:
            if fnmatch.fnmatchcase(path, pattern):
                return recipe
        return HIGH_PRECISION

    def exempt(self, num_layers: int) -> tuple[int, int]:
        """Returns how many first and how many last layers run in high precision."""

        def count(value: int | float) -> int:
            if value == int(value):
                return int(value)
            # Rounding to 6 digits first: 0.15 * 20 is a little more than 3.
            return math.ceil(round(value * num_layers, 6))

        return count(self.bf16_first), count(self.bf16_last)

    def check(self, paths: Iterable[str], num_layers: int) -> None:
        """Checks the policy against a model's module paths and number of layers.

        Raises ValueError for a rule that matches no path (a typo would silently leave modules in
        high precision), and for more exempt layers than the model has.
        """
        paths = list(paths)
        for pattern, _ in self.rules:
            if not fnmatch.filter(paths, pattern):
                raise ValueError(
                    f"policy {self.name!r}: rule {pattern!r} matches no module; "
                    f"the modules are {', '.join(paths)}"
                )
        first, last = self.exempt(num_layers)
        if first + last > num_layers:
            raise ValueError(
                f"policy {self.name!r}: {first} first and {last} last layers are exempt, but the"
                f" model has only {num_layers}"
            )

    @property
    def delayed(self) -> bool:
        """Whether any module has amax histories, which a first step must seed."""
        return any(recipe.histories for _, recipe in self.rules)

    @property
    def constant_gradients(self) -> bool:
        """Whether some gradient has a constant scale that is not finer than that of x or w."""
        return any(
            cast is not None and cast.timing == "constant" and not _finer(cast, recipe)
            for _, recipe in self.rules
            for cast in (recipe.dgrad_g, recipe.wgrad_g)
        )

    @property
    def stochastic(self) -> bool:
        """Whether any module needs a key."""
        return any(recipe.stochastic for _, recipe in self.rules)

    def current(self) -> "Policy":
        """Returns the policy whose delayed casts take current scales: it has no histories."""
        rules = tuple((pattern, recipe.current()) for pattern, recipe in self.rules)
        return dataclasses.replace(self, rules=rules)

    def without_exemptions(self) -> "Policy":
        """Returns the policy of the layers that are not exempt."""
        return dataclasses.replace(self, bf16_first=0, bf16_last=0)


def _finer(cast: Cast, recipe: Recipe) -> bool:
    """Whether a constant scale is smaller than that of x or w, which is a constant, too."""
    others = (recipe.fwd_x, recipe.fwd_w, recipe.dgrad_w, recipe.wgrad_x)
    return any(
        isinstance(cast.scale, Constant)
        and isinstance(other.scale, Constant)
        and cast.scale.value < other.scale.value
        for other in others
        if other is not None
    )


def _check_rule(rule: Any) -> None:
    """Raises TypeError unless `rule` is (pattern, recipe)."""
    if not (isinstance(rule, tuple | list) and len(rule) == 2 and isinstance(rule[0], str)):
        raise TypeError(
            "a rule of a policy is a pair (pattern, recipe), such as"
            f' ("layers/*", RECIPES["fp8_block"]), got {brief(rule)}'
        )
    pattern, recipe = rule
    if not isinstance(recipe, Recipe):
        known = f"RECIPES[{recipe!r}]" if recipe in list(RECIPES) else "RECIPES[name]"
        raise TypeError(
            f"rule {brief(pattern)} of a policy needs a Recipe, got {brief(recipe)}: use"
            f" fp8jax.{known}"
        )


# No pattern matches the embedding, LM head, norms and attention core: they stay in BF16.
POLICIES: Table[Policy] = Table(
    "policy",
    {
        **{name: Policy((("layers/*", recipe),), name=name) for name, recipe in RECIPES.items()},
        "fp4_mixed": Policy(
            (("layers/mlp/*", RECIPES["fp4_block"]), ("layers/attention/*", RECIPES["fp8_block"])),
            name="fp4_mixed",
        ),
        "fp4_backward": Policy(
            (
                ("layers/mlp/*", RECIPES["fp4_naive"]),
                ("layers/attention/*", RECIPES["fp4_naive"].with_forward(RECIPES["fp8_block"])),
            ),
            name="fp4_backward",
        ),
        # NVIDIA's 12B leaves 16% of the linears in BF16, most of them at the end
        # (arXiv 2509.25149).
        "nvfp4_mixed": Policy(
            (("layers/*", RECIPES["nvfp4"]),), bf16_last=0.15, name="nvfp4_mixed"
        ),
        # Nemotron 3 Super (arXiv 2604.12374) and Ultra: besides the last 15%, the projections of
        # attention stay in BF16.
        "nemotron3": Policy(
            (("layers/mlp/*", RECIPES["nvfp4"]),), bf16_last=0.15, name="nemotron3"
        ),
        # DeepSeek-V4 after pre-training, whose experts are the MLPs here.
        "deepseek_v4": Policy(
            (
                ("layers/mlp/*", RECIPES["fp4_weights"]),
                ("layers/attention/*", RECIPES["fp8_block_ue8m0"]),
            ),
            name="deepseek_v4",
        ),
    },
)
"""The policies by name; one for each recipe, for all linears of all layers, and mixtures.

`--config.precision` takes these names, with options behind a colon. An unknown name raises
ValueError with similar names.

Example:
  >>> [name for name in fp8jax.POLICIES if name not in fp8jax.RECIPES]
  ['fp4_mixed', 'fp4_backward', 'nvfp4_mixed', 'nemotron3', 'deepseek_v4']
  >>> policy = fp8jax.POLICIES["fp4_mixed"]
  >>> policy.recipe("layers/attention/q").name, policy.recipe("layers/mlp/up").name
  ('fp8_block', 'fp4_block')
"""
