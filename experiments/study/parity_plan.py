"""What the study of parity trains: arms, seeds and forks, fixed before the first run but for the
last two seeds of `controls` and the last of `larger`.

An arm is a way to train, such as a precision. A chain is one arm with one seed: a trunk at a
constant learning rate, and forks that decay from it, each over the last eighth of its horizon:

    trunk   0 ------- 1008 ------- 2016 --------------- 4032 --------- … --- 8064   steps
                       \\ 75M        \\ 151M               \\ 302M              \\ 604M   tokens

So four horizons cost the trunk once. The trunk ends where the last fork begins. A chain begins and
ends on one machine; its forks are done one by one, the shortest first. Forks of another arm may
decay from its trunk, too: what they cost is that of a decay in another precision.

Chains of one seed have the same initialization, the same rows in the same order and the same
held-out rows: each is compared with `bf16` of its seed and its fork, and with nothing else.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from configs import gnmr, study
from fp8jax.lookup import lookup
from fp8jax.numerics.recipe import CASTS

STEP_TOKENS = 65_536  # 64 rows of 1024 (configs/study.py)


@dataclasses.dataclass(frozen=True)
class Fork:
    """A decay from the trunk, and what it is called after: its tokens, rounded."""

    name: str
    begin: int  # the trunk's steps
    steps: int  # of the decay
    step_tokens: int = STEP_TOKENS

    @property
    def tokens(self) -> int:
        return (self.begin + self.steps) * self.step_tokens


FORKS = tuple(
    Fork(name, steps - steps // 8, steps // 8)
    for name, steps in (("75M", 1152), ("150M", 2304), ("300M", 4608), ("600M", 9216))
)

# The first fork's steps from the last one's trunk: the tokens before a decay, apart from its steps.
SHORT = Fork("538M", FORKS[-1].begin, FORKS[0].steps)
ALL_FORKS = tuple(sorted((*FORKS, SHORT), key=lambda fork: fork.tokens))

BASELINE, NULL = "bf16", "bf16_again"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train.

    Attributes:
      name: in the ledger and the tables.
      precision: the policy.
      changes: other keys of the config, KEY=VALUE.
      environment: variables of its processes.
      control: whether it is known to be worse: a study that does not say so is broken.
      trunk: the arm whose trunk its forks decay from; None for one of its own.
      tokens_per_second: a guess for the time that it takes, until the ledger knows better.
    """

    name: str
    precision: str
    changes: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    control: bool = False
    trunk: "Arm | None" = None
    tokens_per_second: float = 4e5  # emulated recipes


def _recipes(*precisions: str, tokens_per_second: float = 4e5) -> tuple[Arm, ...]:
    return tuple(
        Arm(name=name, precision=name, tokens_per_second=tokens_per_second) for name in precisions
    )


# Scores in memory, a loop over layers, and the GEMM algorithm that XLA takes without timing: the
# same arithmetic in another order, so what it differs by is what any change of program does.
_NULL_ARM = Arm(
    name=NULL,
    precision="bf16",
    changes=("attention=xla", "unroll=1"),
    environment=(("XLA_FLAGS", "--xla_gpu_autotune_level=0"),),
    tokens_per_second=5e5,
)

# Every scale is an eighth of what the amax asks for, as if it dated from a time at which the tensor
# was an eighth as large: what lies above saturates.
_STALE = Arm(
    name="stale_scale", precision="fp8_delayed:margin=-3", control=True, tokens_per_second=8e5
)

_BF16 = _recipes("bf16", tokens_per_second=9e5)
_FP8 = _recipes("fp8_delayed", "fp8_block", tokens_per_second=8e5)
_FP4 = _recipes("nvfp4", "fp4_mixed")
_CONTROLS = (Arm(name="fp4_naive", precision="fp4_naive", control=True), _STALE)
_OTHERS = (
    *_recipes("fp8_current", "fp8_amax", "fp8_rowwise", "fp8_block_ue8m0", tokens_per_second=7e5),
    *_recipes("fp8_rowwise_wgrad_bf16", tokens_per_second=7e5),
    *_recipes("mxfp8", "mxfp4", "nvfp4_mixed", "fp4_block", "fp4_backward"),
)
# Recipes that came later, and the constant scale, which does not train without a loss scale.
_LATER_RECIPES = (
    *_recipes("nvfp4_unbiased", "nvfp4_4over6", "quartet2", "tetrajet2", "nemotron3"),
    *_recipes("fp4_weights", "deepseek_v4"),
    Arm(
        name="fp8_cscale_loss_scale_65536",
        precision="fp8_cscale",
        changes=("optimizer.loss_scale=65536",),
        tokens_per_second=8e5,
    ),
)
# GNMR's own stress (configs/gnmr.py): activations saved for wgrad in 4 bits, a scale a token, with
# 8 bits in promoted layers. If 4 bits are as good as 8, there is nothing to promote.
_SAVED_4, _SAVED_8 = gnmr.SAVED_IN_4_BITS, gnmr.SAVED_IN_8_BITS
_PROMOTED = Arm(
    name="saved_4_gnmr",
    precision=_SAVED_4,
    changes=(
        *("gnmr.alpha=1.5,", "gnmr.beta=1.3", f"gnmr.most={gnmr.MOST['llama_60m']}"),
        f"gnmr.precision={_SAVED_8}",
    ),
)
_SAVED = (
    Arm(name="saved_8", precision=_SAVED_8),
    Arm(name="saved_4", precision=_SAVED_4),
    _PROMOTED,
)
_RATES = tuple(
    Arm(
        name=f"bf16_rate_{rate}",
        precision="bf16",
        changes=(f"optimizer.learning_rate={rate}",),
        tokens_per_second=9e5,
    )
    for rate in ("1e-3", "2e-3", "4e-3", "8e-3")
)

# The same run six times at each of two rates: without a compilation cache each process times GEMM
# algorithms anew, so that what the losses scatter by is what any change of program does.
_REPEATS = tuple(
    Arm(
        name=f"bf16_{rate}_repeat{number}",
        precision="bf16",
        changes=(f"optimizer.learning_rate={rate}",),
        environment=(("JAX_ENABLE_COMPILATION_CACHE", "false"),),
        tokens_per_second=9e5,
    )
    for number in range(1, 7)
    for rate in ("1e-3", "2e-3")
)


@dataclasses.dataclass(frozen=True)
class Chain:
    """One arm with one seed.

    Attributes:
      size: one of configs/study.py.
      shared: whether forks of other chains decay from its trunk, too.
      read: precisions in which its weights are scored besides its own.
    """

    arm: Arm
    seed: int
    forks: tuple[Fork, ...]
    size: str = study.SIZES[0]
    shared: bool = False
    read: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.arm.name}-seed{self.seed}"

    @property
    def folder(self) -> str:
        """Its name, as that of a folder."""
        return re.sub(r"[^\w.-]", "_", self.name)

    @property
    def trunk(self) -> "Chain":
        """The chain whose trunk its forks decay from: itself, or one that is shared."""
        if self.arm.trunk is None:
            return self
        return dataclasses.replace(self, arm=self.arm.trunk, shared=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Arms x seeds x forks, of one size of configs/study.py.

    Attributes:
      read: precisions in which the weights that `bf16` trained are scored, too.
    """

    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    forks: tuple[Fork, ...]
    size: str = study.SIZES[0]
    read: tuple[str, ...] = ()

    def chains(
        self, arms: Sequence[str] | None = None, seeds: Sequence[int] | None = None
    ) -> list[Chain]:
        """Returns the chains in the order in which they are to run: seed by seed, `bf16` first.

        Args:
          arms: names of those that are wanted, in any order; None for all.
          seeds: any at all; None for the plan's.

        Raises:
          ValueError: it has no such arm; the message names those that it has. Or there is no seed.
        """
        known = {arm.name: arm for arm in self.arms}
        chosen = [lookup("arm", name, known) for name in (known if arms is None else arms)]
        if seeds is not None and not seeds:
            raise ValueError("a plan without seeds trains nothing")
        trunks = [arm.trunk for arm in self.arms]  # of all arms: the others may come later
        return [
            Chain(
                *(arm, seed, self.forks, self.size),
                shared=arm in trunks,
                read=self.read if arm.name == BASELINE else (),
            )
            for seed in (self.seeds if seeds is None else dict.fromkeys(seeds))
            for arm in self.arms
            if arm in chosen
        ]

    def setting(self) -> str:
        """Returns the digest of its config: only runs of one setting are compared."""
        return setting(study.get_config(self.size))


_HEADLINE = (*_BF16, *_FP8, *_FP4, _NULL_ARM)


def _branches(*arms: Arm) -> tuple[Arm, ...]:
    """Returns decays from the trunk of `bf16`, which all of them have in common."""
    return tuple(dataclasses.replace(arm, name=then(arm.name), trunk=_BF16[0]) for arm in arms)


def then(name: str) -> str:
    """Returns the name of an arm whose forks decay from the trunk of `bf16`."""
    return f"{BASELINE}_then_{name}"


_BRANCHES = _branches(*_FP8, *_FP4, _NULL_ARM, _CONTROLS[0])

# Recipe -> its casts, each of which runs alone (`only=CAST`) and is left out (`CAST=bf16`). `nvfp4`
# rotates both operands of wgrad, which go together.
CASTS_OF = {"nvfp4": (*CASTS[:4], "wgrad"), "fp4_naive": CASTS}
_ONE_CAST = _recipes(
    *(f"{recipe}:only={cast}" for recipe, casts in CASTS_OF.items() for cast in casts),
    *(f"{recipe}:{cast}=bf16" for recipe, casts in CASTS_OF.items() for cast in casts),
)
PLANS = {
    # The learning rate, in BF16; with a seed that no other plan has.
    "rate": Plan(arms=_RATES, seeds=(100,), forks=FORKS[:1]),
    # What one seed scatters by, in BF16, at two rates; with a seed that no other plan has.
    "repeats": Plan(arms=_REPEATS, seeds=(101,), forks=FORKS[:1]),
    # The same at the chosen rate, four times, at twice and four times the tokens.
    "repeats_long": Plan(arms=_REPEATS[1:8:2], seeds=(101,), forks=FORKS[1:3]),
    # Activations that are saved in 4 bits; chance and fixed layers follow if 4 bits fail.
    "saved": Plan(arms=(*_BF16, *_SAVED), seeds=(0, 1), forks=FORKS[:1]),
    # All arms with one seed, to 150M tokens.
    "screen": Plan(
        arms=(*_HEADLINE, *_CONTROLS, *_OTHERS, *_LATER_RECIPES), seeds=(0,), forks=FORKS[:2]
    ),
    # What the page is about, with intervals, at the horizon at which GPU time buys enough seeds.
    "headline": Plan(arms=_HEADLINE, seeds=tuple(range(12)), forks=FORKS[:1]),
    # Three seeds were planned. They detected `fp4_naive`, not `stale_scale`, whose gaps scatter by
    # 35%; with two more both are detected.
    "controls": Plan(arms=_CONTROLS, seeds=tuple(range(5)), forks=FORKS[:1]),
    # What the last eighth costs in another precision, at four times the tokens of `headline`: since
    # seven eighths are the same to the bit, gaps are expected to scatter by less.
    "branches": Plan(arms=(*_BF16, *_BRANCHES), seeds=tuple(range(200, 204)), forks=FORKS[:3:2]),
    # The same at eight times the tokens of `headline`, with the cost of reading what BF16 trained.
    # In `branches` a decay at four times the tokens has four times the steps, too; SHORT has the
    # steps of the first fork. Planned when `branches` had run: with four seeds half-widths below
    # 0.2% are expected. Two seeds fit into half an hour of two GPUs.
    "branches_long": Plan(
        arms=(*_BF16, *_BRANCHES[:-1]),
        seeds=tuple(range(210, 214)),
        forks=(FORKS[0], SHORT, FORKS[-1]),
        read=("fp8_delayed", "fp8_block", "nvfp4", "fp4_mixed"),
    ),
    # Which cast carries the cost of an ending in FP4, and whether the costs of casts add up
    # (cast_effects.py judges it): what `late_casts` asks of the proving ground, at 58M parameters
    # and from the full rate. Planned when `branches_long` had run. Guesses of that day: the
    # forward's two casts cost nine tenths of `nvfp4`, its activations more than its weights; the
    # costs of its casts add up; `wgrad_g` of `fp4_naive` costs more than the 0.15% of there.
    "branches_casts": Plan(
        arms=(*_BF16, *_branches(_FP4[0], _CONTROLS[0], *_ONE_CAST)),
        seeds=tuple(range(220, 223)),
        forks=FORKS[:1],
    ),
    # The same ending in every recipe, of the same seeds: one trunk serves both plans, in one
    # workdir and one ledger. The guess: recipes are in the order that they have in `late`, but for
    # those that round gradients coarsely, which the higher rate sets back. The machine's time ended
    # in seed 221, whose trunk went with it, before 222: seeds 223 to 226 were planned when that
    # much was known, and every pair counts. The next machine's time ended in seed 225.
    "branches_recipes": Plan(
        arms=(*_BF16, *_BRANCHES, *_branches(*_OTHERS, *_LATER_RECIPES, *_recipes("fp8_cscale"))),
        seeds=(220, 221, *range(223, 227)),
        forks=FORKS[:1],
    ),
    # The FP8 recipe and the FP4 recipe whose gaps have the narrowest intervals, at 134M parameters.
    # Three seeds were planned; a fourth when five of nine chains had run.
    "larger": Plan(
        arms=(*_BF16, *_FP8[:1], *_FP4[1:]),
        seeds=tuple(range(4)),
        forks=FORKS[:1],
        size=study.SIZES[1],
    ),
}

ARMS = {arm.name: arm for plan in PLANS.values() for arm in plan.arms}


# Keys that the config has had since the first run, with the values that leave a run as it was.
_LATER = {
    "require_fp8_gathers": False,
    "optimizer": {
        **{"reset": "", "reset_from": 0.6},
        **{"loss_scale": "none", "loss_scale_window": 2000},
    },
    "gnmr": {"unit": "layer"},
    "model_overrides": dict.fromkeys(
        ("norm_at", "qk_norm_joint", "query_scalar", "layer_pattern", "window")
        + ("joined_projections", "scale_embedding", "window_rope_theta", "rotary_dim")
    ),
}


def _without(config: dict[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config without the keys of `later` that have these values."""
    left = {}
    for key, value in config.items():
        if key in later and isinstance(value, dict):
            left[key] = _without(value, later[key])
        elif key not in later or value != later[key]:
            left[key] = value
    return left


def values(config: ConfigDict | None = None) -> dict[str, Any]:
    """Returns the values of a config, by default configs/study.py's, as the first run had them."""
    return _without(json.loads((config or study.get_config()).to_json()), _LATER)


def setting(config: ConfigDict | None = None) -> str:
    """Returns a digest of `values`: only runs of one setting are compared."""
    return hashlib.sha256(json.dumps(values(config), sort_keys=True).encode()).hexdigest()[:16]
