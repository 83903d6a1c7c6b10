"""From a config to the stages of a pipeline: the folder of each, and what each is made from.

    tokenizer, problems_1, problems_2                once
    CPT/cpt, CPT/evaluate_cpt                        for each precision of pre-training
    CPT/seed_N/cpt, evaluate_cpt                     instead, if each seed pre-trains
    CPT+SFT/seed_N/sft_1, sft_2, evaluate            for each precision and seed of fine-tuning
    CPT+SFT+EXPORT/seed_N/export, reload             for each chain and seed

A name whose precisions are all the same is that precision. What chains share is made once.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from configs import base
from experiments.pipeline import evaluation, making, training
from experiments.pipeline.chains import BASELINE, Chain, joined, read_chains
from experiments.pipeline.stages import Stage
from fp8jax.lm.inference.generate import SEEDS
from fp8jax.lookup import lookup

TRAINING = ("cpt", "sft_1", "sft_2")
PROBLEMS = ("problems_1", "problems_2")

_SHARED = ("model", "model_overrides", "tokenizer")  # keys of fine-tuning that are those of cpt
_STARTS = ("initial_weights", "initial_state")
_SET = ("precision", "resume_with_changes")  # keys that the pipeline sets
_SET_IN_TUNING = (*_SET, "seed", *_STARTS, *_SHARED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A pipeline that is to be run.

    Attributes:
      config: see configs/pipeline.py.
      workdir: an absolute path.
      chains: the baseline is the first.
      seeds: of fine-tuning, and of pre-training if each seed pre-trains.
    """

    config: ConfigDict
    workdir: Path
    chains: tuple[Chain, ...]
    seeds: tuple[int, ...]

    @classmethod
    def from_config(cls, config: ConfigDict, workdir: Path) -> "Plan":
        """Returns the plan of a config.

        Raises ValueError for what can be refused before anything is made.
        """
        seeds = tuple(config.seeds)
        if not seeds or len(set(seeds)) < len(seeds) or not all(type(n) is int for n in seeds):
            raise ValueError(f"seeds={seeds} must be one or more different whole numbers")
        if not all(0 <= seed < SEEDS for seed in seeds):
            raise ValueError(f"seeds={seeds} must be at least 0 and less than {SEEDS}")
        chains = read_chains(config.precisions, config.chains)
        plan = cls(config=config, workdir=workdir.resolve(), chains=chains, seeds=seeds)
        for name in TRAINING:
            _refuse_set(config[name], name)
        evaluation.check(config.evaluate)
        for spec in plan.strings():
            plan.filled(spec)
        making.check_tokenizer(config)
        for name in plan.problems:
            making.check_problems(config[name], name)
        return plan

    # Names ----------------------------------------------------------------------------------------

    @property
    def paths(self) -> dict[str, str]:
        """What {NAME} stands for in the config."""
        folder = self.workdir / "tokenizer"
        if self.config.tokenizer.folder:
            folder = Path(self.config.tokenizer.folder).expanduser().resolve()
        return {
            "tokenizer": str(folder / "tokenizer.json"),
            **{name: str(self.workdir / name) for name in PROBLEMS},
        }

    def strings(self) -> list[str]:
        """The strings of the config that may name what stages make."""
        config = self.config
        specs = [spec for name in TRAINING for spec in _strings(config[name])]
        return [*specs, *config.evaluate.problems]

    def filled(self, spec: str) -> str:
        """Returns a string of the config with its paths.

        Raises ValueError for an unknown {NAME}.
        """
        return re.sub(
            r"\{(\w+)\}", lambda found: lookup("stage with files", found[1], self.paths), spec
        )

    @property
    def problems(self) -> tuple[str, ...]:
        """The sets of problems that the config uses."""
        used = {name for spec in self.strings() for name in re.findall(r"\{(\w+)\}", spec)}
        return tuple(name for name in PROBLEMS if name in used)

    def pre_trained(self, chain: Chain, seed: int) -> str:
        """The folder with the pre-trained model from which a seed of a chain is fine-tuned."""
        folder = joined(chain.cpt)
        return f"{folder}/seed_{seed}" if self.config.pretrain_each_seed else folder

    @property
    def pre_training_seeds(self) -> tuple[int, ...]:
        """The seeds that pre-train models of their own; (0,) if all share one."""
        return self.seeds if self.config.pretrain_each_seed else (0,)

    # Configs --------------------------------------------------------------------------------------

    def training_config(self, stage: str, precision: str, seed: int, weights: str) -> ConfigDict:
        """Returns the config of a training stage.

        Args:
          seed: of fine-tuning; in pre-training it is added to the seed of its config.
          weights: where fine-tuning starts from; "" for pre-training.
        """
        config = self.config[stage].copy_and_resolve_references()
        with config.unlocked():
            config.precision = precision
            config.seed = seed if stage != "cpt" else config.seed + seed
            if stage != "cpt":
                config.initial_weights = weights
                for key in _SHARED:
                    value = self.config.cpt[key]
                    if isinstance(value, ConfigDict):
                        value = value.copy_and_resolve_references()
                    config[key] = value
            for key in ("data", "tokenizer", "model", "initial_weights", "initial_state"):
                if key in config:
                    config[key] = self.filled(config[key])
        return config.lock()


def stages(plan: Plan) -> list[Stage]:
    """Returns all stages, each after those that it needs."""
    found: dict[str, Stage] = {}
    for stage in [*shared(plan), *_pre_training(plan), *_fine_tuning(plan), *_exports(plan)]:
        found.setdefault(stage.name, stage)
    return list(found.values())


def check_training(plan: Plan) -> None:
    """Builds what every training stage runs, and plans every export.

    Raises ValueError or NotImplementedError as training and export would, before either begins.
    Files of problems are read, too. The shared stages must be done.
    """
    evaluation.read_all_problems(tuple(map(plan.filled, plan.config.evaluate.problems)))
    runs = [("cpt", chain.cpt) for chain in plan.chains]
    runs += [(stage, chain.sft) for chain in plan.chains for stage in ("sft_1", "sft_2")]
    for stage, precision in dict.fromkeys(runs):
        try:
            # Fine-tuning begins with random weights here: the stage before it has made none yet.
            shape = training.check(plan.training_config(stage, precision, plan.seeds[0], ""))
        except (ValueError, NotImplementedError) as error:
            raise type(error)(f"{stage} in {precision}: {error}") from error
    for chain in plan.chains:
        try:
            evaluation.check_export(shape, chain.export)
        except ValueError as error:
            raise ValueError(f"export of {chain.name}: {error}") from error


# Stages -------------------------------------------------------------------------------------------


def shared(plan: Plan) -> list[Stage]:
    """Returns the stages that are made before training, once for all chains."""
    config, made = plan.config, []
    if not config.tokenizer.folder:
        text = making.tokenizer_text(config)
        asked = {"text": text, "vocab_size": config.tokenizer.vocab_size}
        asked |= {"valid": {"fraction": config.cpt.valid.fraction}}
        make = functools.partial(making.make_tokenizer, config)
        made.append(Stage(name="tokenizer", asked=asked, make=make))
    for name in plan.problems:
        make = functools.partial(making.make_problems, config[name])
        made.append(Stage(name=name, asked=_json(config[name]), make=make))
    return made


def _pre_training(plan: Plan) -> list[Stage]:
    made = []
    for seed in plan.pre_training_seeds:
        for chain in plan.chains:
            folder = plan.pre_trained(chain, seed)
            made.append(_train(plan, "cpt", f"{folder}/cpt", chain.cpt, seed, None))
            made.append(
                _evaluate(
                    plan,
                    f"{folder}/evaluate_cpt",
                    {"cpt": f"{folder}/cpt"},
                    [chain.cpt, BASELINE],
                    texts={"cpt": ("cpt",)},
                    problems_of=None,
                )
            )
    return made


def _fine_tuning(plan: Plan) -> list[Stage]:
    made = []
    for seed in plan.seeds:
        for chain in plan.chains:
            folder = f"{chain.trained}/seed_{seed}"
            models = {"sft_1": f"{folder}/sft_1", "sft_2": f"{folder}/sft_2"}
            before = f"{plan.pre_trained(chain, seed)}/cpt"
            for stage, name in models.items():
                made.append(_train(plan, stage, name, chain.sft, seed, before))
                before = name
            made.append(
                _evaluate(
                    plan,
                    f"{folder}/evaluate",
                    models,
                    [chain.sft, BASELINE],
                    texts={"sft_1": ("sft_1",), "sft_2": ("sft_2", "cpt")},
                    problems_of="sft_2",
                )
            )
    return made


def _exports(plan: Plan) -> list[Stage]:
    made = []
    for seed in plan.seeds:
        for chain in plan.chains:
            source = f"{chain.trained}/seed_{seed}/sft_2"
            folder = f"{chain.name}/seed_{seed}"
            made.append(
                Stage(
                    name=f"{folder}/export",
                    needs=(source,),
                    asked={"precision": chain.export},
                    make=functools.partial(
                        evaluation.export, str(plan.workdir / source), chain.export
                    ),
                )
            )
            made.append(
                _evaluate(
                    plan,
                    f"{folder}/reload",
                    {"export": f"{folder}/export"},
                    [chain.export],
                    texts={"export": ("sft_2", "cpt")},
                    problems_of="export",
                )
            )
    return made


def _train(
    plan: Plan, stage: str, name: str, precision: str, seed: int, before: str | None
) -> Stage:
    weights = "" if before is None else str(plan.workdir / before)
    config = plan.training_config(stage, precision, seed, weights)
    # As in the config, so that a workdir may be moved once a stage is done.
    asked = _json(plan.config[stage]) | {"precision": precision, "seed": config.seed}
    if plan.config.tokenizer.folder:  # a learned one is a stage of its own
        asked["tokenizer_files"] = making.tokenizer_digest(plan.config)
    if before is not None:
        asked |= {key: _json(plan.config.cpt)[key] for key in _SHARED}
    return Stage(
        name=name,
        needs=(*_made_for(plan, _strings(asked)), *([] if before is None else [before])),
        asked=asked,
        make=functools.partial(training.train, config),
        resumes=True,
    )


def _evaluate(
    plan: Plan,
    name: str,
    models: Mapping[str, str],
    precisions: Sequence[str],
    *,
    texts: Mapping[str, Sequence[str]],
    problems_of: str | None,
) -> Stage:
    """A stage that evaluates models: {what they are called: the stage that made them}."""
    settings = plan.config.evaluate
    asked = _json(settings)
    if problems_of is not None and (digests := evaluation.problem_digests(settings.problems)):
        asked["problem_files"] = digests
    task = evaluation.Task(
        models={model: plan.workdir / made for model, made in models.items()},
        precisions=tuple(dict.fromkeys(precisions)),
        texts={model: tuple(names) for model, names in texts.items()},
        corpora={
            each: plan.training_config(each, BASELINE, 0, "")
            for names in texts.values()
            for each in names
        },
        problems_of=problems_of,
        problems=tuple(map(plan.filled, settings.problems)),
        rows=settings.rows,
        batch_size=settings.batch_size,
        max_tokens=settings.max_tokens,
        seed=settings.seed,
    )
    problems = () if problems_of is None else _made_for(plan, settings.problems)
    return Stage(
        name=name,
        needs=(*problems, *models.values()),
        asked=asked,
        make=functools.partial(evaluation.evaluate, task),
    )


def _made_for(plan: Plan, specs: Sequence[str]) -> tuple[str, ...]:
    """The shared stages whose files some strings of the config name."""
    used = {name for spec in specs for name in re.findall(r"\{(\w+)\}", spec)}
    return tuple(stage.name for stage in shared(plan) if stage.name in used)


# Configs ------------------------------------------------------------------------------------------


def _refuse_set(config: ConfigDict, stage: str) -> None:
    """Raises ValueError for keys of a training stage that the pipeline sets itself."""
    default = base.get_config()
    remedies = {"precision": "set precisions or chains", "seed": "set seeds"}
    remedies |= {key: f"set cpt.{key}" for key in _SHARED}
    remedies["resume_with_changes"] = "a stage that has begun keeps its settings"
    remedies |= dict.fromkeys(_STARTS, "fine-tuning starts from the stage before it")
    for key in _SET_IN_TUNING if stage != "cpt" else _SET:
        if key in default and _plain(config[key]) != _plain(default[key]):
            raise ValueError(f"{stage}.{key} is set by the pipeline: {remedies[key]}")


def _plain(value: Any) -> Any:
    return _json(value) if isinstance(value, ConfigDict) else value


def _json(config: ConfigDict) -> dict[str, Any]:
    return json.loads(config.to_json())


def _strings(config: Mapping[str, Any] | ConfigDict) -> list[str]:
    keys = ("data", "tokenizer", "model", "initial_weights")
    return [config[key] for key in keys]
