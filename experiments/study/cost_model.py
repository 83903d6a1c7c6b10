"""The theoretical cost of a policy: products weighted by their FLOPs and by the speed of a unit.

The model of the FP4 paper (arXiv 2502.11458). A product runs at the speed of its wider operand, and
the cost of training is the time of all products relative to that of BF16:

    cost = sum over modules of share * (1/v_fwd + 1/v_dgrad + 1/v_wgrad) / 3

with `share` a module's part of the forward FLOPs: dgrad and wgrad have as many each. The attention
core is never quantized, and its backward counts twice as well. Casts, norms, the optimizer and
memory cost nothing here. The result is thus what a policy could save at best, and no measurement.

The paper's split of LLaMA-7B at 4K, `PAPER_SPLIT`, follows from the shapes if the attention core is
counted in full, 4 * seq_len * N * H FLOPs a token and layer, and embedding and head are left out:
57.3 : 28.4 : 14.2. With half of the square, as `flops_per_token` counts causal attention
(`causal=True`), it would be 61.7 : 30.6 : 7.7. At the speeds 1, 2 and 4 the split gives 35.7% for
FP4 everywhere and 52.4% for the paper's own scheme.
"""

import dataclasses
import fnmatch
from collections.abc import Mapping

from fp8jax.lookup import unknown
from fp8jax.model.config import MODULES, ModelConfig
from fp8jax.numerics.policy import Policy
from fp8jax.numerics.policy_options import as_policy
from fp8jax.numerics.recipe import GemmCasts, Recipe
from fp8jax.numerics.recipes import HIGH_PRECISION

CORE = "attention core"  # scores and values: products without a weight, matched by no policy


PAPER_SPLIT = {"layers/mlp/*": 0.57, "layers/attention/*": 0.287, CORE: 0.143}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speeds:
    """Operations a second of the matrix units, in any common unit."""

    bf16: float = 1.0
    fp8: float = 2.0
    fp4: float = 4.0

    def __post_init__(self):
        for name, speed in dataclasses.asdict(self).items():
            if not 0 < speed < float("inf"):
                raise ValueError(f"{name}={speed} must be positive and finite")

    def of(self, product: GemmCasts) -> float:
        """The speed of a product: that of its wider operand."""
        return min(
            self.bf16 if cast is None else {8: self.fp8, 4: self.fp4}[cast.format.bits]
            for cast in product
        )

    def slowness(self, recipe: Recipe) -> float:
        """Time of a linear's three products, relative to BF16."""
        return sum(self.bf16 / self.of(product) for product in recipe.gemms.values()) / 3


def forward_flops(
    config: ModelConfig, seq_len: int, *, head: bool = False, causal: bool = False
) -> dict[str, int]:
    """FLOPs of one token's forward pass, all layers together, by path of the linear and `CORE`.

    Args:
      head: whether the LM head is counted; the FP4 paper leaves it out.
      causal: whether half of the attention's square is counted, or all of it as in the paper.
    """
    if seq_len < 1:
        raise ValueError(f"{seq_len=} must be at least 1")
    flops = {path: 2 * config.n_layers * k * n for path, (k, n) in config.linears.items()}
    of_head = flops.pop("lm_head") // config.n_layers  # there is one
    flops[CORE] = (
        (2 if causal else 4) * config.n_layers * seq_len * config.n_heads * config.head_dim
    )
    return flops | ({"lm_head": of_head} if head else {})


def relative_cost(
    policy: str | Policy,
    config: ModelConfig,
    seq_len: int,
    speeds: Speeds,
    *,
    head: bool = False,
    causal: bool = False,
) -> float:
    """Theoretical cost of training, 1 for BF16; `head` and `causal` as in `forward_flops`.

    Raises:
      ValueError: a policy that does not fit the model (`Policy.check`), or no length.
    """
    policy = as_policy(policy)
    policy.check(config.modules, config.n_layers)
    split = forward_flops(config, seq_len, head=head, causal=causal)
    exempt = sum(policy.exempt(config.n_layers)) / config.n_layers
    return split_cost(policy, split, speeds, exempt=exempt)


def split_cost(
    policy: str | Policy,
    split: Mapping[str, float | int],
    speeds: Speeds,
    *,
    exempt: float | None = None,
) -> float:
    """The same for a given split of the forward FLOPs, such as `PAPER_SPLIT`, in any unit.

    Args:
      split: module path, pattern or `CORE` -> FLOPs.
      exempt: share of the layers that run in BF16; needed if the policy exempts some.

    Raises:
      ValueError: a pattern that matches no module, or modules of unlike cost; no split.
    """
    policy, total, cost = as_policy(policy), sum(split.values()), 0.0
    if exempt is None and (policy.bf16_first or policy.bf16_last):
        raise ValueError(f"policy {policy.name!r} exempts layers: say their share as exempt")
    if min(split.values(), default=0) < 0 or total <= 0 or not 0 <= (exempt or 0) <= 1:
        raise ValueError(f"no shares of a whole: {dict(split)}, {exempt=}")
    for pattern, flops in split.items():
        paths = [] if pattern == CORE else fnmatch.filter(MODULES, pattern)
        if not paths and pattern != CORE:
            raise unknown("module", pattern, [*MODULES, CORE])
        recipes = [policy.recipe(path) for path in paths] or [HIGH_PRECISION]
        slowness = {speeds.slowness(recipe) for recipe in recipes}
        if len(slowness) > 1:
            raise ValueError(f"policy {policy.name!r} treats the modules of {pattern!r} unlike")
        in_bf16 = 0.0 if pattern == "lm_head" else exempt or 0.0
        cost += flops * (in_bf16 + (1 - in_bf16) * slowness.pop())
    return cost / total
