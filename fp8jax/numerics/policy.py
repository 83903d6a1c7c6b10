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
from collections.abc import Iterable

from fp8jax.numerics.recipe import Recipe
from fp8jax.numerics.recipes import HIGH_PRECISION, RECIPES


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
        """The policy of the first step after initialization or after a switch to this policy."""
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
