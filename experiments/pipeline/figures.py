"""The figures of a pipeline, from the results of its stages: figures.json.

    loss_gap/RECIPE             the largest gap of a stage; loss_gap/RECIPE/STAGE has each
    accuracy/TASK/RECIPE        share of right answers after both stages of fine-tuning
    inference_kept/RECIPE       perplexity of the exported model over the trained one's in BF16
    time/STAGE/RECIPE           seconds of a training step
    memory/STAGE/RECIPE         bytes that XLA allocates on a device for a training step

RECIPE is the name of a chain. Every figure has a `value`; those of items have a standard `error`.
A `seeds_error` is that of a mean over seeds, which differ in more than the items.
Gaps and differences are those to BF16's chain, on the same rows and problems, pair by pair. With
several seeds, an item counts with its mean over them, since all seeds share the items.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.pipeline.chains import BASELINE, Chain
from experiments.pipeline.evaluation import ACCURACY, LOSS, SHUFFLED, Numbers, known, read_items
from experiments.pipeline.plan import TRAINING, Plan
from experiments.pipeline.stages import read_result
from fp8jax.lm.inference.accuracy import paired_difference
from fp8jax.lm.inference.paired import Measured, difference, measured

Figures = dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    """What the stages of a pipeline have found; read once.

    Attributes:
      cpt: chain's name -> the numbers of its pre-trained models, one or a seed each.
      tuned: of its fine-tuned models, a seed each.
      exported: of its exported models.
    """

    plan: Plan
    cpt: Mapping[str, list[Numbers]]
    tuned: Mapping[str, list[Numbers]]
    exported: Mapping[str, list[Numbers]]

    @classmethod
    def read(cls, plan: Plan) -> "Results":
        root, seeds = plan.workdir, [f"seed_{seed}" for seed in plan.seeds]
        return cls(
            plan=plan,
            cpt={
                chain.name: [
                    read_items(root / plan.pre_trained(chain, seed) / "evaluate_cpt")
                    for seed in plan.pre_training_seeds
                ]
                for chain in plan.chains
            },
            tuned={
                chain.name: [read_items(root / chain.trained / seed / "evaluate") for seed in seeds]
                for chain in plan.chains
            },
            exported={
                chain.name: [read_items(root / chain.name / seed / "reload") for seed in seeds]
                for chain in plan.chains
            },
        )


def figures(results: Results) -> Figures:
    """Returns all figures of a finished pipeline."""
    found: Figures = {}
    for chain in results.plan.chains:
        found |= _loss_gaps(results, chain)
    for chain in results.plan.chains:
        found |= _accuracies(results, chain)
    for chain in results.plan.chains:
        found |= _kept(results, chain)
    return found | _costs(results.plan)


# Loss ---------------------------------------------------------------------------------------------


def _loss_gaps(results: Results, chain: Chain) -> Figures:
    """Relative gaps of a chain's loss to BF16's at each stage."""
    if chain.name == BASELINE:
        return {}
    baseline = results.plan.chains[0]
    found: Figures = {}
    for stage in TRAINING:
        own, other = (stage_losses(results, each, stage) for each in (chain, baseline))
        gap = difference(mean_over_seeds(own), mean_over_seeds(other))
        reference = mean_over_seeds(other).estimate.value
        seeds = [a.estimate.value / b.estimate.value - 1 for a, b in zip(own, other, strict=True)]
        assert gap is not None
        found[f"loss_gap/{chain.name}/{stage}"] = {
            "value": gap.value / reference,
            "error": known(gap.error / reference),
            "loss": reference + gap.value,
            "loss_bf16": reference,
            "seeds": seeds,
            "seeds_error": _error_of_mean(seeds),
        }
    worst = max(found.values(), key=lambda each: each["value"])
    return {f"loss_gap/{chain.name}": {k: worst[k] for k in ("value", "error")}, **found}


def _error_of_mean(seeds: Sequence[float]) -> float | None:
    """The standard error of the mean of some seeds; None for a single one, which tells nothing."""
    return statistics.stdev(seeds) / math.sqrt(len(seeds)) if len(seeds) > 1 else None


def stage_losses(results: Results, chain: Chain, stage: str) -> list[Measured]:
    """Returns the loss of each seed on the stage's own held-out text, in the chain's precision."""
    if stage == "cpt":
        return [_loss(numbers, stage, chain.cpt, stage) for numbers in results.cpt[chain.name]]
    return [_loss(numbers, stage, chain.sft, stage) for numbers in results.tuned[chain.name]]


def _loss(numbers: Numbers, model: str, precision: str, text: str) -> Measured:
    """The loss on all sources of a stage's text, as if they were one."""
    prefix = f"{model}|{precision}|{LOSS}|{text}/"
    parts = [each for name, each in sorted(numbers.items()) if name.startswith(prefix)]
    items, weights = ([_items(each)[i] for each in parts] for i in (0, 1))
    return measured(np.concatenate(items), np.concatenate(weights))


def mean_over_seeds(each: Sequence[Measured]) -> Measured:
    """Returns the number of which each item is the mean over the seeds."""
    pairs = [_items(one) for one in each]
    return measured(np.mean([items for items, _ in pairs], axis=0), pairs[0][1])


def _items(number: Measured) -> tuple[np.ndarray, np.ndarray]:
    assert number.items is not None and number.weights is not None
    return number.items, number.weights


# Problems -----------------------------------------------------------------------------------------


def _accuracies(results: Results, chain: Chain) -> Figures:
    found: Figures = {}
    own, other = results.tuned[chain.name], results.tuned[BASELINE]
    prefix = f"sft_2|{chain.sft}|{ACCURACY}|"
    for task in [name.removeprefix(prefix) for name in own[0] if name.startswith(prefix)]:
        mine = [numbers[f"{prefix}{task}"] for numbers in own]
        value, error = mean_over_seeds(mine).estimate
        control = [numbers[f"sft_2|{chain.sft}|{SHUFFLED}|{task}"] for numbers in own]
        exported = [
            numbers[f"export|{chain.export}|{ACCURACY}|{task}"]
            for numbers in results.exported[chain.name]
        ]
        found[f"accuracy/{task}/{chain.name}"] = {
            "value": value,
            "error": known(error),
            "items": len(_items(mine[0])[0]),
            "seeds": [each.estimate.value for each in mine],
            "shuffled": mean_over_seeds(control).estimate.value,
            "exported": mean_over_seeds(exported).estimate.value,
        }
        if chain.name != BASELINE:
            theirs = [numbers[f"sft_2|{BASELINE}|{ACCURACY}|{task}"] for numbers in other]
            found[f"accuracy/{task}/{chain.name}"] |= _behind(theirs, mine)
    return found


def _behind(baseline: Sequence[Measured], own: Sequence[Measured]) -> dict[str, float]:
    """BF16's accuracy minus a chain's, and the upper end of its one-sided 95% interval."""
    pair = paired_difference(*(_items(mean_over_seeds(each))[0] for each in (baseline, own)))
    return {"bf16_minus": pair.value, "bf16_minus_upper": pair.upper}


# Export -------------------------------------------------------------------------------------------


def _kept(results: Results, chain: Chain) -> Figures:
    """Perplexity of the exported model over that of the trained model in BF16.

    The value is that on the held-out conversations of the last stage. On the text of pre-training,
    which fine-tuning makes a model forget, both have large losses, and their ratio says less.
    """
    found: Figures = {}
    for text in ("cpt", "sft_2"):
        exported = [
            _loss(numbers, "export", chain.export, text) for numbers in results.exported[chain.name]
        ]
        trained = [_loss(numbers, "sft_2", BASELINE, text) for numbers in results.tuned[chain.name]]
        gap = difference(mean_over_seeds(exported), mean_over_seeds(trained))
        assert gap is not None
        ratio = math.exp(gap.value)
        found[text] = {"value": ratio, "error": known(ratio * gap.error)}
    return {f"inference_kept/{chain.name}": found["sft_2"] | {"text_of_cpt": found["cpt"]}}


# Time and memory ----------------------------------------------------------------------------------


def _costs(plan: Plan) -> Figures:
    """Times and memory of training steps, each beside BF16's."""
    times: Figures = {}
    memory: Figures = {}
    for stage in TRAINING:
        reference = _training(plan, plan.chains[0], stage)
        for chain in plan.chains:
            own, name = _training(plan, chain, stage), f"{stage}/{chain.name}"
            times[f"time/{name}"] = {
                "value": own["step_s"],
                "ratio": own["step_s"] / reference["step_s"],
                "tokens_per_s": own["tokens_per_s"],
                "steps": own["steps"],
                "devices": own["devices"],
            }
            memory[f"memory/{name}"] = {
                "value": own["memory"],
                "ratio": own["memory"] / reference["memory"],
                "devices": own["devices"],
            }
    return times | memory


def _training(plan: Plan, chain: Chain, stage: str) -> dict[str, Any]:
    """What a training stage of the first seed found."""
    seed = plan.seeds[0]
    tuned = f"{chain.trained}/seed_{seed}"
    folder = plan.pre_trained(chain, seed) if stage == "cpt" else tuned
    result = read_result(plan.workdir, f"{folder}/{stage}")
    assert result is not None
    return result["found"]
