"""Evaluation of trained and exported models, and the export: every number with its items.

An evaluation writes items.npz beside its result: what each row of text and each problem contributes
to each number. So models are compared on the same items, pair by pair (lm/inference/paired.py). A
number is called MODEL|PRECISION|KIND|NAME:

    sft_2|fp8_block|loss|cpt/python_stdlib    nats a token on a source of the held-out text of cpt
    sft_2|bf16|accuracy|trained               share of the problems of a file that are right
    sft_2|bf16|shuffled|trained               the same, with answers of other problems: the control
"""

import dataclasses
import hashlib
import math
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from experiments.pipeline.chains import export_format
from fp8jax.lm.chat.chat_corpus import DATE
from fp8jax.lm.chat.chat_template import load_chat_template
from fp8jax.lm.cli.solve import turn_ends
from fp8jax.lm.data.rows import Row
from fp8jax.lm.inference.accuracy import measure_accuracy, share
from fp8jax.lm.inference.generate import SEEDS
from fp8jax.lm.inference.paired import Measured, measured
from fp8jax.lm.inference.perplexity import score_texts
from fp8jax.lm.inference.problems import Problem, read_problems, shuffled
from fp8jax.lm.interop.export import export_model
from fp8jax.lm.interop.fp8_format import FP8_FORMATS, plan_export
from fp8jax.lm.interop.trained import TrainedModel, load_model
from fp8jax.lm.mesh import MeshAxes, make_mesh
from fp8jax.lm.model.config import ModelConfig
from fp8jax.lm.training.epochs import read_corpus, tokenizer_of_run
from fp8jax.lm.training.settings import Settings
from fp8jax.numerics.names import as_policy

ITEMS = "items.npz"
EXPORTED = "hf"  # the folder of an export's model

LOSS, ACCURACY, SHUFFLED = "loss", "accuracy", "shuffled"  # kinds of numbers

Numbers = dict[str, Measured]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What an evaluation measures.

    Attributes:
      models: what each is called -> a workdir, or the folder of an export.
      precisions: in which each is evaluated.
      texts: model -> the training stages of whose held-out rows it is scored.
      corpora: training stage -> its config.
      problems_of: the model that solves problems; None for none.
      problems: NAME=FILE.
      rows: most rows of each source.
      batch_size, max_tokens, seed: of configs/pipeline.py's `evaluate`.
    """

    models: Mapping[str, Path]
    precisions: tuple[str, ...]
    texts: Mapping[str, tuple[str, ...]]
    corpora: Mapping[str, ConfigDict]
    problems_of: str | None
    problems: tuple[str, ...]
    rows: int
    batch_size: int
    max_tokens: int
    seed: int


def check(config: ConfigDict) -> None:
    """Raises ValueError, with the key, for settings of `evaluate` that cannot be honored."""
    for key in ("rows", "batch_size", "max_tokens"):
        if config[key] < 1:
            raise ValueError(f"evaluate.{key}={config[key]} must be at least 1")
    if not 0 <= config.seed < SEEDS:
        raise ValueError(f"evaluate.seed={config.seed} must be at least 0 and less than {SEEDS}")
    specs = [] if isinstance(config.problems, str) else list(map(str, config.problems))
    if isinstance(config.problems, str) or not all("=" in spec for spec in specs):
        raise ValueError(f"evaluate.problems={config.problems} must be a tuple of NAME=FILE")
    names = [spec.partition("=")[0] for spec in specs]
    for name in names:
        if not name or names.count(name) > 1 or "/" in name or "|" in name:  # parts of keys
            raise ValueError(
                f"evaluate.problems: the name {name!r} must be one of its own, without / and |"
            )


def problem_digests(specs: Sequence[str]) -> dict[str, str]:
    """Returns a hash of each file of problems of the user, by name.

    Those that name what a stage makes, such as {problems_2}, are left out.

    Raises ValueError, with the key, for a file that cannot be read.
    """
    digests = {}
    for name, _, path in (spec.partition("=") for spec in specs if "{" not in spec):
        try:
            content = Path(path).expanduser().read_bytes()
        except OSError as error:
            raise ValueError(f"evaluate.problems: {name}={path}: {error.strerror}") from error
        digests[name] = hashlib.sha256(content).hexdigest()
    return digests


def evaluate(task: Task, folder: Path) -> Mapping[str, Any]:
    """Measures the models; writes items.npz, and returns each number with its standard error."""
    numbers: Numbers = {}
    for model, source in task.models.items():
        exported = source / EXPORTED
        spec = f"hf:{exported}" if exported.is_dir() else str(source)
        for precision in task.precisions:
            trained = load_model(spec, precision=precision)
            found = _losses(task, model, trained)
            if model == task.problems_of:
                found |= _accuracies(task, trained)
            numbers |= {f"{model}|{precision}|{name}": each for name, each in found.items()}
            del trained
    arrays: dict[str, Any] = {}
    for name, each in numbers.items():
        arrays[f"{name}|items"], arrays[f"{name}|weights"] = each.items, each.weights
    with open(folder / ITEMS, "wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    jax.clear_caches()
    return {name: [known(x) for x in each.estimate] for name, each in numbers.items()}


def known(number: float) -> float | None:
    """Returns the number; None for NaN, an error that is unknown, which JSON cannot spell."""
    return None if math.isnan(number) else number


def read_items(folder: Path) -> Numbers:
    """Returns the numbers of an evaluation, with their items.

    Raises ValueError if the file is missing or damaged.
    """
    try:
        with np.load(folder / ITEMS) as arrays:
            names = [name.removesuffix("|items") for name in arrays if name.endswith("|items")]
            return {
                name: measured(arrays[f"{name}|items"], arrays[f"{name}|weights"]) for name in names
            }
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{folder / ITEMS} is damaged: {error}; remove {folder}") from error


# Text ---------------------------------------------------------------------------------------------


def _losses(task: Task, model: str, trained: TrainedModel) -> Numbers:
    assert trained.tokenizer is not None
    rows = {
        f"{stage}/{source}": found
        for stage in task.texts[model]
        for source, found in held_out_rows(task.corpora[stage], task.rows).items()
    }
    scores = score_texts(
        trained.model,
        trained.variables,
        rows,
        token_bytes=trained.tokenizer.token_bytes,
        batch_size=task.batch_size,
        seed=task.seed,
    )
    return {
        f"{LOSS}|{source}": measured(score.nats, score.tokens) for source, score in scores.items()
    }


def held_out_rows(config: ConfigDict, most: int) -> dict[str, list[Row]]:
    """Returns the first held-out rows of each source of a run."""
    settings = Settings.from_config(config, warmup_steps=0)  # which the data does not depend on
    corpus = read_corpus(settings, tokenizer_of_run(config))
    return {
        source: [rows[i] for i in range(min(most, len(rows)))]
        for source, rows in corpus.valid.items()
    }


# Problems -----------------------------------------------------------------------------------------


def read_all_problems(specs: Sequence[str]) -> dict[str, Sequence[Problem]]:
    """Returns the problems of files NAME=FILE by name.

    Raises ValueError as `read_problems` does, and for a file with a single one.
    """
    problems: dict[str, Sequence[Problem]] = {
        name: read_problems(Path(path).expanduser()).problems
        for name, _, path in (spec.partition("=") for spec in specs)
    }
    for name, own in problems.items():
        if len(own) < 2:
            raise ValueError(
                f"evaluate.problems: {name} has one problem: its answer has no control"
            )
    return problems


def _accuracies(task: Task, trained: TrainedModel) -> Numbers:
    """The accuracy on each file of problems, and that of the same responses on other answers."""
    assert trained.tokenizer is not None and trained.files is not None
    problems = read_all_problems(task.problems)
    if not problems:
        return {}
    found = measure_accuracy(
        trained.model,
        trained.variables,
        trained.tokenizer,
        problems,
        template=load_chat_template(trained.files, trained.tokenizer, now=DATE),
        max_tokens=task.max_tokens,
        batch_size=task.batch_size,
    )
    numbers: Numbers = {}
    for name, accuracy in found.items():
        control = accuracy.against(shuffled(problems[name], task.seed))
        numbers[f"{ACCURACY}|{name}"] = accuracy.measured()
        numbers[f"{SHUFFLED}|{name}"] = share(control)
    return numbers


# Export -------------------------------------------------------------------------------------------


def check_export(model: ModelConfig, precision: str) -> None:
    """Raises ValueError if a model cannot be exported in the format of a precision."""
    fmt = export_format(precision)
    if fmt in FP8_FORMATS:
        plan_export(model, as_policy(precision), fmt)


def export(source: str, precision: str, folder: Path) -> Mapping[str, Any]:
    """Writes the model of a workdir as a Hugging Face folder, in the format of a precision."""
    host = make_mesh(MeshAxes(), jax.local_devices(backend="cpu")[:1])
    trained = load_model(source, precision=precision, mesh=host)
    fmt = export_format(precision)
    notes = export_model(trained, folder / EXPORTED, fmt, stop_ids=turn_ends(trained))
    size = sum(path.stat().st_size for path in (folder / EXPORTED).glob("*.safetensors"))
    return {"format": fmt, "bytes": size, "notes": list(notes)}
