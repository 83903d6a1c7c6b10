"""Measures a trained model: fp8jax evaluate --workdir=runs/smoke \\
    --tasks=perplexity,questions.jsonl --precision=fp8_current,fp8_block

Prints one table: each number in BF16 and in each precision, with standard errors, and what it
differs from BF16 on the same items. --workdir is a run's directory, or hf:DIR. A task is one of

    perplexity    perplexity and bits per byte of the run's held-out documents, or of --data; of
                  the former also what gzip and a bigram of bytes need, below the table
    FILE.jsonl    multiple choice or exact match, FILE.jsonl:samples=4,temperature=0.8
    FILE.yaml     any task of lm-evaluation-harness whose data is local

--problems=FILE.jsonl,NAME=FILE.jsonl also measures the accuracy on problems whose answers are
numbers (experiments.arithmetic, GSM8K, MATH), with shuffled answers as a control; --tasks= leaves
out the rest. --json=FILE writes all numbers with their items, to compare them with other models'.

--telemetry=FOLDER also writes what each precision does to weights and activations, on the first
batch of that text: FOLDER/PRECISION.parquet (docs/telemetry.md).

docs/evaluation.md describes them. Tasks from files need `pip install lm-eval`.
"""

import dataclasses
import importlib.util
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags
from absl import logging as absl_logging

from fp8jax.device import xla
from fp8jax.lm.cli import command
from fp8jax.lm.cli.measured import ACCURACY, BASELINE, Numbers, table, write_json
from fp8jax.lm.cli.solve import solve, stop_ids
from fp8jax.lm.data.byte_tokenizer import Tokenizer
from fp8jax.lm.data.loader import valid_batches
from fp8jax.lm.data.rows import Rows
from fp8jax.lm.inference.accuracy import share
from fp8jax.lm.inference.generate import MOST_POSITIONS, SEEDS
from fp8jax.lm.inference.memory_check import memory_errors
from fp8jax.lm.inference.perplexity import joined, read_texts, score_texts
from fp8jax.lm.inference.problems import Problem, read_problems, shuffled
from fp8jax.lm.inference.scorer import require_room
from fp8jax.lm.inference.yardsticks import Yardsticks, yardsticks
from fp8jax.lm.interop.trained import TrainedModel, check_precisions, load_model
from fp8jax.lm.model.telemetry import measure_forward
from fp8jax.lm.records.checkpoint import DamagedError
from fp8jax.lm.training.held_out import corpus_of_run
from fp8jax.telemetry.files import write_rows

_WORKDIR = flags.DEFINE_string("workdir", None, "The run's directory, or hf:DIR.", required=True)
_TASKS = flags.DEFINE_string("tasks", "perplexity", "Tasks, separated by commas.")
_PRECISION = flags.DEFINE_string(
    "precision", None, "Policies beside bf16, separated by commas; default: the run's last one."
)
_DATA = flags.DEFINE_string(
    "data", None, "Text for perplexity, in the syntax of the config key data; all of it is read."
)
_STEP = flags.DEFINE_integer("step", None, "Which checkpoint of a run; default: the newest.")
_LENGTH = flags.DEFINE_integer(
    "length", None, "Most tokens of a row; default: the run's seq_len.", lower_bound=2
)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Most rows in a batch.", lower_bound=1)
_LIMIT = flags.DEFINE_integer("limit", None, "Use only the first rows of each task.", lower_bound=1)
_PROBLEMS = flags.DEFINE_string(
    "problems", None, "Files of problems, FILE or NAME=FILE, separated by commas."
)
_MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", 256, "Most tokens of a response to a problem.", 1, MOST_POSITIONS
)
_PROBLEM_BATCH = flags.DEFINE_integer(
    "problem_batch", 128, "Most problems that are answered at a time.", lower_bound=1
)
_JSON = flags.DEFINE_string("json", None, "A file for all numbers with their items; overwritten.")
_TELEMETRY = flags.DEFINE_string("telemetry", None, "Folder of files with what casts do.")
_SEED = flags.DEFINE_integer(
    "seed",
    0,
    "Of samples, stochastic rounding and shuffled answers.",
    lower_bound=0,
    upper_bound=SEEDS - 1,
)

ERRORS = (*command.ERRORS, DamagedError, MemoryError)
VERBOSITY = absl_logging.WARNING

PERPLEXITY = "perplexity"
SHUFFLED, ENDED = "shuffled answers", "responses that end"


@dataclasses.dataclass(kw_only=True)
class Texts:
    """The text that perplexity is measured on; read when the first model needs it.

    Attributes:
      rows: those that are scored, by source.
      said: what other predictors need for it, a line for each source.
    """

    rows: Mapping[str, Rows] = dataclasses.field(default_factory=dict)
    said: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What is measured of each model.

    Attributes:
      perplexity: whether text is scored.
      tasks: the harness's.
      problems: by name.
    """

    perplexity: bool
    tasks: Sequence[Any]
    problems: Mapping[str, Sequence[Problem]]


def main(arguments: Sequence[str]) -> None:
    command.refuse_arguments(arguments)
    specs = [spec for spec in command.split_specs(_TASKS.value) if spec]
    _check_flags(specs)
    problems = _read_problems()
    tasks = _read_tasks([spec for spec in specs if spec != PERPLEXITY])
    if _LIMIT.value is not None and not tasks and not problems:
        raise ValueError("--limit is for tasks from files, and --tasks names none")
    precisions: list[Any] = command.split_specs(_PRECISION.value) if _PRECISION.value else []
    check_precisions(precisions)
    xla.set_compilation_cache()
    asked = Asked(perplexity=PERPLEXITY in specs, tasks=tasks, problems=problems)
    texts = Texts()
    with memory_errors("lower --batch_size, --problem_batch or --length"):
        measured = _measure_all(precisions, asked, texts)
    print("\n".join([table(measured), *texts.said]))
    if _JSON.value:
        write_json(Path(_JSON.value).expanduser(), _WORKDIR.value, measured)


def _check_flags(specs: Sequence[str]) -> None:
    """Raises ValueError for flags that mean nothing beside the others."""
    if not specs and not _PROBLEMS.value:
        raise ValueError("--tasks names no task")
    for flag, what in (
        (_DATA, "is for perplexity"),
        (_TELEMETRY, "measures the text of perplexity"),
    ):
        if flag.value and PERPLEXITY not in specs:
            raise ValueError(f"--{flag.name}={flag.value} {what}, which --tasks does not name")
    for number in (_MAX_TOKENS, _PROBLEM_BATCH):
        if number.present and not _PROBLEMS.value:
            raise ValueError(f"--{number.name} is for --problems")
    if _JSON.value:
        path = Path(_JSON.value).expanduser().absolute()
        if path.is_dir():
            raise ValueError(f"--json={_JSON.value} is a folder: name a file")
        if not path.parent.is_dir():
            raise ValueError(f"--json={_JSON.value}: there is no such folder")


def _measure_all(precisions: Sequence[Any], asked: Asked, texts: Texts) -> Mapping[str, Numbers]:
    """Returns the numbers of each precision, of the run's own without any, and of the baseline."""
    measured: dict[str, Numbers] = {}
    for precision in precisions or [None]:
        trained = _load(precision)
        label = precision or trained.model.resolved_policy.name
        measured[label] = _measure(trained, asked, texts)
    if BASELINE in measured:
        return measured
    return {BASELINE: _measure(_load(BASELINE), asked, texts)} | measured


def _read_problems() -> dict[str, Sequence[Problem]]:
    """Returns the problems of --problems by name, the first ones of each file with --limit."""
    found: dict[str, Sequence[Problem]] = {}
    for spec in (_PROBLEMS.value or "").split(","):
        if not spec:
            continue
        name, equals, file = spec.rpartition("=")
        path = Path(file).expanduser()
        name = name if equals else path.name.partition(".")[0]
        if not name or name in found:
            raise ValueError(f"--problems: {spec} needs a name of its own, NAME=FILE")
        own = read_problems(path)
        if own.left_out:
            absl_logging.warning(
                "%s: %d problems have no number as their answer and are left out, %d are used",
                path,
                own.left_out,
                len(own.problems),
            )
        found[name] = own.problems[: _LIMIT.value]
        if len(found[name]) < 2:
            limit = "" if _LIMIT.value is None else f" with --limit={_LIMIT.value}"
            raise ValueError(
                f"--problems: {spec} has one problem{limit}: two are needed, whose answers are"
                " exchanged as a control"
            )
    if _PROBLEMS.value and not found:
        raise ValueError(f"--problems={_PROBLEMS.value} names no file")
    return found


def _load(precision: str | None) -> TrainedModel:
    trained = load_model(_WORKDIR.value, precision=precision, step=_STEP.value)
    if trained.tokenizer is None:
        raise ValueError(f"{trained.name} has no tokenizer, which every task needs")
    return trained


def _read_tasks(specs: Sequence[str]) -> list[Any]:
    """Returns the harness's tasks; reads their files, so that a wrong one is refused at once."""
    if not specs:
        return []
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(f"the task {specs[0]} needs lm-evaluation-harness: pip install lm-eval")
    from fp8jax.lm.inference.tasks import read_task  # imports lm_eval

    for name in ("lm_eval", "datasets", "httpx"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return [read_task(spec) for spec in specs]


def _measure(trained: TrainedModel, asked: Asked, texts: Texts) -> Numbers:
    """Returns everything that is measured of one model."""
    tokenizer, numbers = trained.tokenizer, Numbers()
    assert tokenizer is not None
    if asked.tasks:
        from fp8jax.lm.inference.tasks import require_lengths

        require_lengths(asked.tasks, _row_length(trained))
    if asked.perplexity:
        length = _row_length(trained)
        require_room(trained.model, _BATCH_SIZE.value, length)
        if not texts.rows:
            _read(texts, trained, tokenizer, length)
        numbers |= _perplexities(trained, tokenizer, texts.rows)
        if _TELEMETRY.value:
            _write_telemetry(trained, next(iter(texts.rows.values())), _TELEMETRY.value)
    if asked.problems:
        numbers |= _solve(trained, asked.problems)
    if asked.tasks:
        from fp8jax.lm.inference.harness import HarnessModel, run_tasks

        model = HarnessModel(
            trained.model,
            trained.variables,
            tokenizer,
            max_length=_row_length(trained),
            batch_size=_BATCH_SIZE.value,
            seed=_SEED.value,
            begin=trained.begins_texts,
            stop_ids=stop_ids(trained),
        )
        numbers |= run_tasks(model, asked.tasks, limit=_LIMIT.value)
    return numbers


def _solve(trained: TrainedModel, problems: Mapping[str, Sequence[Problem]]) -> Numbers:
    found = solve(trained, problems, max_tokens=_MAX_TOKENS.value, batch_size=_PROBLEM_BATCH.value)
    numbers = Numbers()
    for name, own in problems.items():
        mixed = found[name].against(shuffled(own, _SEED.value))
        for what, flags_of_items in zip(
            (ACCURACY, SHUFFLED, ENDED), (found[name].right, mixed, found[name].ended), strict=True
        ):
            numbers[name, what] = share(flags_of_items)
    return numbers


def _row_length(trained: TrainedModel) -> int:
    if _LENGTH.value is not None:
        return _LENGTH.value
    if trained.record is None:
        raise ValueError(f"{trained.name} is of no run that says how long rows are: give --length")
    return trained.record["seq_len"]


def _read(texts: Texts, trained: TrainedModel, tokenizer: Tokenizer, length: int) -> None:
    """Reads --data, or the run's held-out documents."""
    if _DATA.value:
        texts.rows = read_texts(_DATA.value, tokenizer, seq_len=length, begin=trained.begins_texts)
        return
    try:
        corpus = corpus_of_run(trained, length)
    except ValueError as error:
        raise ValueError(f"{error}; or give --data") from error
    if corpus.first:  # conversations
        texts.rows = {name: _packed(name, rows, length) for name, rows in corpus.valid.items()}
        return
    texts.rows = corpus.valid
    texts.said = [
        _others(name, yardsticks(corpus.train.rows[name], rows, tokenizer))
        for name, rows in corpus.valid.items()
    ]


def _others(source: str, found: Yardsticks) -> str:
    return (
        f"{source}, the same text in bits per byte: gzip {found.gzip:.3f},"
        f" a bigram that counted the training text {found.bigram:.3f}"
    )


def _packed(name: str, rows: Rows, length: int) -> Rows:
    """Returns a source's rows of conversations, packed again into rows of `length` tokens."""
    from fp8jax.lm.chat.packing import ExampleRows  # imports jinja2 and the package tokenizers

    assert isinstance(rows, ExampleRows)
    if (most := int(rows.examples.lengths.max()) - 1) > length:
        raise ValueError(
            f"--length={length} is less than a held-out conversation of the run's source {name!r}:"
            f" give --length={most} or more, or leave it out"
        )
    return rows if length == rows.seq_len else ExampleRows(rows.examples, seq_len=length)


def _perplexities(trained: TrainedModel, tokenizer: Tokenizer, rows: Mapping[str, Rows]) -> Numbers:
    scores = score_texts(
        trained.model,
        trained.variables,
        rows,
        token_bytes=tokenizer.token_bytes,
        batch_size=_BATCH_SIZE.value,
        seed=_SEED.value,
    )
    if len(scores) > 1:
        scores["all sources"] = joined(list(scores.values()))
    numbers = Numbers()
    for source, each in scores.items():
        numbers[source, PERPLEXITY] = each.perplexity()
        numbers[source, "bits per byte"] = each.bits_per_byte()
    return numbers


def _write_telemetry(trained: TrainedModel, rows: Rows, folder: str) -> None:
    batch = next(valid_batches(rows, batch_size=_BATCH_SIZE.value))
    tokens, segments, positions = (
        jnp.asarray(batch[name]) for name in ("tokens", "segments", "positions")
    )
    policy = trained.model.resolved_policy
    key = jax.random.key(_SEED.value) if policy.stochastic else None
    table = measure_forward(trained.model, trained.variables, tokens, segments, positions, key=key)
    write_rows(Path(folder, f"{policy.name.replace('/', '_')}.parquet"), table.rows)
