"""What runs on the proving ground (configs/proving.py:ranking), fixed before the first run.

A chain is one arm with one seed, and one training run from its first step to its last. Its score is
the loss of all held-out rows after the last step. Runs of one seed have the same initialization,
the same rows in the same order and the same held-out rows.

    recipes     every policy of docs/recipes.md, and BF16 computed another way
    readings    other readings of papers, and options of recipes
    casts       the control with one of its six casts alone, and with all but one
    late        BF16 whose last fifth has another policy: each of docs/recipes.md
    late_casts  the same with one cast of a recipe, and with all but one
    late_growth the same with other parts of the run, from four fifths to one step
    late_short  the same with short parts, of one recipe
    schedule    FP4 whose last part runs in BF16, in FP8, or with FP4 in the forward alone
    last_step   FP4 whose last step alone runs in BF16
    constants   one constant scale for everything, with and without a loss scale

Each arm is compared with `bf16` of its seed. `COMPARISONS` are the pairs of arms that the pages
speak of; no others are looked at. With so many intervals one in twenty leaves zero out by chance.
"""

import hashlib
import sys
from pathlib import Path
from typing import Any

from configs import proving
from experiments.study import parity_plan
from experiments.study.parity_parts import VALIDATED, Part
from experiments.study.parity_plan import BASELINE, CASTS_OF, NULL, Arm, Chain, Fork, Plan
from fp8jax.lm.sources import parse_sources
from fp8jax.numerics.policy import POLICIES
from fp8jax.numerics.recipe import CASTS

CONFIG = "configs/proving.py:ranking"

_RANKING = proving.get_config("ranking")

# The whole run: there is no trunk that others go on from.
RUN = Fork(
    name="16M",
    begin=0,
    steps=_RANKING.num_steps,
    step_tokens=_RANKING.batch_size * _RANKING.seq_len,
)

# Percent of BF16's loss, to either side: less than the gap that the authors of NVFP4 report.
MARGIN = 1.0

_SPEED = 1.5e5  # tokens a second while several runs share a GPU, until the ledger knows better


def _arm(name: str, precision: str = "", *changes: str, **fields: Any) -> Arm:
    return Arm(
        name=name,
        precision=precision or name,
        changes=changes,
        tokens_per_second=_SPEED,
        **fields,
    )


def _ending(trunk: str, target: str, begins: float, **fields: Any) -> Arm:
    """A run in `trunk` that ends in `target`, from that share of its steps on."""
    name = f"{trunk}_then_{target}_at_{begins}"
    return _arm(name, trunk, f'precision_schedule=(({begins},"{target}"),)', **fields)


_CONTROLS = {"fp4_naive"}
_BASE = _arm(BASELINE)
# Layers that are unrolled and scores in memory: the same arithmetic in another order.
_NULL_ARM = _arm(NULL, "bf16", "attention=xla", f"unroll={_RANKING.model_overrides.n_layers}")
_POLICIES = tuple(_arm(name, control=name in _CONTROLS) for name in POLICIES if name != BASELINE)

_TOKEN = "fp4_naive:fp4_tile=row,wgrad_tile=token"
_SAVED = "only=wgrad_x,wgrad_tile=token"
_GNMR = ("gnmr.alpha=1.5,", "gnmr.beta=1.3", "gnmr.most=1", "gnmr.precision=fp8_current")

_READINGS = (
    *map(
        _arm,
        (
            "fp8_amax:margin=3",
            "fp8_amax:scale=mse",
            "fp8_amax:qkv=shared",
            "fp8_amax:qkv=shared,formats=fnuz",
            "fp8_current:qkv=shared",
            "fp8_cscale:bias=0",
            "fp8_cscale:bias=12",
            "fp8_block:wgrad_g_tile=block128",
            "fp4_mixed:dgrad=bf16",
            "fp4_naive:fp4_tile=row",
            _TOKEN,
            f"fp4_naive:{_SAVED}",
            f"fp8_rowwise:{_SAVED}",
        ),
    ),
    _arm("fp4_naive_token_gnmr", _TOKEN, *_GNMR),
)

# Which cast carries the gap of `fp4_naive`, 8%. For each cast: alone against BF16, and all without
# it against all. Effects add where the interval of (the sum of the six alone - all) holds 0; a cast
# is needed for the gap where all without it is better than all.
NAIVE = "fp4_naive"
ALONE = tuple(_arm(f"{NAIVE}:only={cast}") for cast in CASTS)
WITHOUT = tuple(_arm(f"{NAIVE}:{cast}=bf16") for cast in CASTS)

# The FP4 paper's schedule, with its recipe: what a run ends in, and where that begins. The control
# has the larger gap, so that a part of it is seen more easily.
_MIXED = "fp4_mixed"
_BEGINS = (0.8, 0.9, 0.95)
_TARGETS = (BASELINE, "fp8_block", f"{_MIXED}:backward=bf16")
_MIXED_ENDINGS = tuple(_ending(_MIXED, target, at) for target in _TARGETS for at in _BEGINS)
_NAIVE_ENDINGS = tuple(_ending(NAIVE, BASELINE, at) for at in _BEGINS)
# The last of 1,000 steps, at a tenth of the largest rate: the casts are gone, and hardly any
# training is left.
_LAST_STEP = tuple(_ending(trunk, BASELINE, 0.999) for trunk in (_MIXED, NAIVE))

# One constant scale; the same with gradients that are 2^12 and 2^16 times as large; with a scale of
# gradients that is 2^12 times smaller.
_CSCALE = "fp8_cscale"
_CONSTANTS = (
    _arm(_CSCALE),
    *(
        _arm(f"{_CSCALE}_loss_scale_{scale}", _CSCALE, f"optimizer.loss_scale={scale}")
        for scale in (4096, 65536)
    ),
    _arm(f"{_CSCALE}:margin=-12"),
)


# What a policy costs in the last fifth of training. Runs that have the first four in common, to the
# bit, are expected to differ by less than runs that share nothing. The null ends in BF16 once more.
def _late(policy: str, begins: float = 0.8) -> Arm:
    return _ending(BASELINE, policy, begins, control=policy in _CONTROLS)


LATE = {policy: _late(policy).name for policy in POLICIES}

# Its casts, each alone and all but each.
LATE_ALONE = {
    _late(whole).name: tuple(_late(f"{whole}:only={cast}") for cast in casts)
    for whole, casts in CASTS_OF.items()
}
LATE_WITHOUT = {
    _late(whole).name: tuple(_late(f"{whole}:{cast}=bf16") for cast in casts)
    for whole, casts in CASTS_OF.items()
}

# How the cost grows with the steps in the policy: policy -> its steps -> the arm. The last step is
# what reading costs, as far as one step at a tenth of the largest rate trains nothing. What a
# longer part costs beside it is training. Planned after `late` and `late_casts` had run.
GROWN = {
    policy: {
        RUN.steps - round(at * RUN.steps): _late(policy, at) for at in (0.999, 0.95, 0.8, 0.5, 0.2)
    }
    for policy in ("fp8_delayed", "fp8_block", "nvfp4", _MIXED, "mxfp4", "fp4_backward", NAIVE)
}

# In FP4 the last step alone costs more than the last 50: how many steps make up for how much?
# Planned when `late_growth` had run.
_SHORT = tuple(_late("nvfp4", at) for at in (0.999, 0.995, 0.98, 0.95, 0.9))

_SEEDS = (0, 1, 2)
PLANS = {
    "recipes": Plan(arms=(_BASE, *_POLICIES, _NULL_ARM), seeds=_SEEDS, forks=(RUN,)),
    "readings": Plan(arms=(_BASE, *_READINGS), seeds=_SEEDS, forks=(RUN,)),
    "casts": Plan(
        arms=(_BASE, _arm(NAIVE, control=True), *ALONE, *WITHOUT), seeds=_SEEDS, forks=(RUN,)
    ),
    "schedule": Plan(
        arms=(_BASE, _arm(_MIXED), *_MIXED_ENDINGS, _arm(NAIVE, control=True), *_NAIVE_ENDINGS),
        seeds=_SEEDS,
        forks=(RUN,),
    ),
    # Planned after the runs of `schedule`.
    "last_step": Plan(
        arms=(_BASE, _arm(_MIXED), _arm(NAIVE, control=True), *_LAST_STEP),
        seeds=_SEEDS,
        forks=(RUN,),
    ),
    "constants": Plan(arms=(_BASE, *_CONSTANTS), seeds=_SEEDS, forks=(RUN,)),
    "late": Plan(arms=(_BASE, *map(_late, POLICIES)), seeds=_SEEDS, forks=(RUN,)),
    "late_casts": Plan(
        arms=(
            *(_BASE, _late(BASELINE), *map(_late, CASTS_OF)),
            *(arm for arms in (LATE_ALONE, LATE_WITHOUT) for each in arms.values() for arm in each),
        ),
        seeds=_SEEDS,
        forks=(RUN,),
    ),
    "late_growth": Plan(
        arms=(
            *(_BASE, _late(BASELINE, 0.2)),
            *(arm for arms in GROWN.values() for arm in arms.values()),
        ),
        seeds=_SEEDS,
        forks=(RUN,),
    ),
    "late_short": Plan(arms=(_BASE, *_SHORT), seeds=_SEEDS, forks=(RUN,)),
}
ARMS = {arm.name: arm for plan in PLANS.values() for arm in plan.arms}

# (arm, what it is compared with besides BF16)
COMPARISONS = (
    ("fp8_block", "fp8_rowwise"),
    ("fp8_block_ue8m0", "fp8_block"),
    ("fp8_block:wgrad_g_tile=block128", "fp8_block"),
    ("fp8_amax:margin=3", "fp8_amax"),
    ("fp8_amax:scale=mse", "fp8_amax"),
    ("fp8_amax:qkv=shared", "fp8_amax"),
    ("fp8_amax:qkv=shared,formats=fnuz", "fp8_amax:qkv=shared"),
    ("fp8_current:qkv=shared", "fp8_current"),
    ("fp4_naive", "nvfp4"),
    ("fp4_naive", "fp4_block"),
    ("fp4_backward", "fp4_mixed"),
    ("fp4_block", "fp4_mixed"),
    ("fp4_naive", "fp4_backward"),
    ("fp4_mixed:dgrad=bf16", "fp4_mixed"),
    ("mxfp4", "nvfp4"),
    ("nvfp4_mixed", "nvfp4"),
    ("nvfp4_unbiased", "nvfp4"),
    ("nvfp4_4over6", "nvfp4"),
    ("quartet2", "nvfp4"),
    ("tetrajet2", "nvfp4"),
    ("nemotron3", "nvfp4"),
    ("fp4_naive:fp4_tile=row", "fp4_naive"),
    (_TOKEN, "fp4_naive:fp4_tile=row"),
    ("fp4_naive_token_gnmr", _TOKEN),
    (f"fp4_naive:{_SAVED}", f"fp8_rowwise:{_SAVED}"),
    *((arm.name, NAIVE) for arm in WITHOUT),
    *((arm.name, _MIXED) for arm in _MIXED_ENDINGS),
    *((arm.name, NAIVE) for arm in _NAIVE_ENDINGS),
    *zip([arm.name for arm in _LAST_STEP], (_MIXED, NAIVE), strict=True),
    *((arm.name, whole) for whole, without in LATE_WITHOUT.items() for arm in without),
    *(
        (arm.name, arms[1].name)
        for arms in GROWN.values()
        for steps, arm in arms.items()
        if steps > 1
    ),
    *((arm.name, _SHORT[0].name) for arm in _SHORT if arm not in GROWN["nvfp4"].values()),
)
# All casts of a recipe -> each of them alone
SUMS = {NAIVE: ALONE, **LATE_ALONE}


def setting() -> str:
    """Returns a digest of the config's values: only runs of one setting are compared."""
    return parity_plan.setting(_RANKING)


def parts(chain: Chain, fork: Fork, folder: Path) -> list[Part]:
    """Returns the one program of a chain."""
    keys = (f"precision={chain.arm.precision}", f"seed={chain.seed}", *chain.arm.changes)
    output = folder / "run"
    flags = (f"--config={CONFIG}", f"--workdir={output}", *(f"--config.{key}" for key in keys))
    return [
        Part(
            name="run",
            kind=VALIDATED,
            command=(sys.executable, "-m", "experiments.train", *flags),
            environment=dict(chain.arm.environment),
            output=output,
            folder=folder,
        )
    ]


def text_digest() -> str:
    """Returns a digest of the files that runs train on, held-out ones included."""
    digest = hashlib.sha256()
    for source in parse_sources(_RANKING.data):
        for path in source.reader.files():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
