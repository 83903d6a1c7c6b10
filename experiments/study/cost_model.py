"""The theoretical cost of a policy: the time of all matmuls, relative to BF16.

This is the cost model of the FP4 paper (arXiv 2502.11458). A GEMM runs at the speed v of its wider
operand, and the cost of training is

    cost = sum over modules of share * (1/v_fwd + 1/v_dgrad + 1/v_wgrad) / 3

where `share` is the module's fraction of the forward FLOPs. dgrad and wgrad have as many FLOPs as
the forward. The attention core is never quantized, and its backward has twice the FLOPs of its
forward, too. Casts, norms, the optimizer and memory cost nothing in this model. So the result is
the most that a policy could save, and not a measurement.

The paper's split of LLaMA-7B at length 4096, `PAPER_SPLIT`, follows from the shapes if the
attention core counts in full, with 4 * seq_len * N * H FLOPs per token and layer, and embedding and
head are left out: 57.3 : 28.4 : 14.2. With half of the square, as `flops_per_token` counts causal
attention (`causal=True`), it would be 61.7 : 30.6 : 7.7. At the speeds 1, 2 and 4, the split gives
35.7% for FP4 everywhere. The paper's own scheme costs 52.4% with its input gradient in FP8
(`fp4_mixed`), and 66.7% with the input gradient in BF16 (`fp4_mixed:dgrad=bf16`).
"""

import dataclasses
import fnmatch
from collections.abc import Mapping

from fp8jax.lm.model.config import ModelConfig
from fp8jax.lookup import unknown
from fp8jax.numerics.module_paths import MODULES
from fp8jax.numerics.names import as_policy
from fp8jax.numerics.policy import Policy
from fp8jax.numerics.recipe import GemmCasts, Recipe
from fp8jax.numerics.recipes import HIGH_PRECISION

CORE = "attention core"  # the two matmuls without a weight, which no policy matches


PAPER_SPLIT = {"layers/mlp/*": 0.57, "layers/attention/*": 0.287, CORE: 0.143}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speeds:
    """Operations per second of the matrix units by precision, in any common unit."""

    bf16: float = 1.0
    fp8: float = 2.0
    fp4: float = 4.0

    def __post_init__(self):
        for name, speed in dataclasses.asdict(self).items():
            if not 0 < speed < float("inf"):
                raise ValueError(f"{name}={speed} must be positive and finite")

    def of(self, casts: GemmCasts) -> float:
        """Returns the speed of a GEMM, which is that of its wider operand."""
        return min(
            self.bf16 if cast is None else (self.fp4 if cast.format.bits == 4 else self.fp8)
            for cast in casts
        )

    def slowness(self, recipe: Recipe) -> float:
        """Returns the time of a linear's three GEMMs, relative to BF16."""
        return sum(self.bf16 / self.of(casts) for casts in recipe.gemms.values()) / 3


def forward_flops(
    config: ModelConfig, seq_len: int, *, head: bool = False, causal: bool = False
) -> dict[str, int]:
    """Returns the FLOPs of one token's forward pass through all layers, by linear and `CORE`.

    Args:
      head: whether the LM head counts; the FP4 paper leaves it out.
      causal: whether only half of the attention's square counts; in the paper, all of it does.

    Raises:
      ValueError: seq_len is less than 1.
    """
    if seq_len < 1:
        raise ValueError(f"{seq_len=} must be at least 1")
    flops = {path: 2 * config.n_layers * k * n for path, (k, n) in config.linears.items()}
    head_flops = flops.pop("lm_head") // config.n_layers  # a model has one head
    flops[CORE] = (
        (2 if causal else 4) * config.n_layers * seq_len * config.n_heads * config.head_dim
    )
    return flops | ({"lm_head": head_flops} if head else {})


def relative_cost(
    policy: str | Policy,
    config: ModelConfig,
    seq_len: int,
    speeds: Speeds,
    *,
    head: bool = False,
    causal: bool = False,
) -> float:
    """Returns the theoretical cost of training, 1 for BF16.

    `head` and `causal` are as in `forward_flops`.

    Raises:
      ValueError: the policy does not fit the model (`Policy.check`), or seq_len is less than 1.
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
    """Returns the theoretical cost for a given split of the forward FLOPs, such as `PAPER_SPLIT`.

    Args:
      split: module path, pattern or `CORE` -> FLOPs, in any unit.
      exempt: fraction of the layers that run in BF16; needed if the policy exempts layers.

    Raises:
      ValueError: a pattern matches no module, or modules of different costs; the split has negative
        or no FLOPs; or `exempt` is missing or not a fraction.
    """
    policy, total, cost = as_policy(policy), sum(split.values()), 0.0
    if exempt is None and (policy.bf16_first or policy.bf16_last):
        raise ValueError(f"policy {policy.name!r} exempts layers: pass their fraction as exempt")
    if min(split.values(), default=0) < 0 or total <= 0 or not 0 <= (exempt or 0) <= 1:
        raise ValueError(f"a split must be positive, exempt a fraction: {dict(split)}, {exempt=}")
    for pattern, flops in split.items():
        paths = [] if pattern == CORE else fnmatch.filter(MODULES, pattern)
        if not paths and pattern != CORE:
            raise unknown("module", pattern, [*MODULES, CORE])
        recipes = [policy.recipe(path) for path in paths] or [HIGH_PRECISION]
        slowness = {speeds.slowness(recipe) for recipe in recipes}
        if len(slowness) > 1:
            raise ValueError(
                f"modules of {pattern!r} have different costs in policy {policy.name!r}: split them"
            )
        in_bf16 = 0.0 if pattern == "lm_head" else exempt or 0.0
        cost += flops * (in_bf16 + (1 - in_bf16) * slowness.pop())
    return cost / total
