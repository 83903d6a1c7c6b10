"""Measures a trained model: python -m experiments.evaluate --workdir=runs/smoke \\
    --tasks=perplexity,questions.jsonl --precision=fp8_current,fp8_block

Prints one table: each number in BF16 and in each precision, with standard errors, and what it
differs from BF16 on the same items. --workdir is a run's directory, or hf:DIR. A task is one of

    perplexity    perplexity and bits per byte of the run's held-out documents, or of --data
    FILE.jsonl    multiple choice or exact match, FILE.jsonl:samples=4,temperature=0.8
    FILE.yaml     any task of lm-evaluation-harness whose data is local

--telemetry=FOLDER also writes what each precision does to weights and activations, on the first
batch of that text: FOLDER/PRECISION.parquet (docs/telemetry.md).

docs/evaluation.md describes them. Tasks but perplexity need `pip install 'fp8jax[eval]'`.
"""

import importlib.util
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

import fp8jax  # noqa: F401  # sets the XLA flags, before JAX starts
from experiments import command
from fp8jax.data.byte_tokenizer import Tokenizer
from fp8jax.data.corpus import build_corpus
from fp8jax.data.loader import valid_batches
from fp8jax.data.rows import Rows
from fp8jax.device import xla
from fp8jax.inference.generate import SEEDS
from fp8jax.inference.memory import memory_errors
from fp8jax.inference.paired import Estimate, Measured, difference
from fp8jax.inference.perplexity import joined, read_texts, score_texts
from fp8jax.inference.scorer import require_room
from fp8jax.interop.trained import TrainedModel, load_model
from fp8jax.numerics.names import as_policy
from fp8jax.records.checkpoint import DamagedError
from fp8jax.records.text_table import aligned
from fp8jax.telemetry.files import write_rows
from fp8jax.telemetry.transformer import measure_forward

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
_TELEMETRY = flags.DEFINE_string("telemetry", None, "Folder of files with what casts do.")
_SEED = flags.DEFINE_integer(
    "seed", 0, "Of samples, and of stochastic rounding.", lower_bound=0, upper_bound=SEEDS - 1
)

ERRORS = (*command.ERRORS, DamagedError, MemoryError)

PERPLEXITY = "perplexity"
BASELINE = "bf16"

Numbers = dict[tuple[str, str], Measured]  # by task or source of text, and what is measured


def main(arguments: Sequence[str]) -> None:
    command.refuse_arguments(arguments)
    specs = [spec for spec in command.split_specs(_TASKS.value) if spec]
    if not specs:
        raise ValueError("--tasks names no task")
    if _DATA.value and PERPLEXITY not in specs:
        raise ValueError(f"--data={_DATA.value} is for perplexity, which --tasks does not name")
    if _TELEMETRY.value and PERPLEXITY not in specs:
        raise ValueError(
            f"--telemetry={_TELEMETRY.value} measures the text of perplexity, which --tasks does"
            " not name"
        )
    tasks = _read_tasks([spec for spec in specs if spec != PERPLEXITY])
    if _LIMIT.value is not None and not tasks:
        raise ValueError("--limit is for tasks from files, and --tasks names none")
    asked: list[Any] = command.split_specs(_PRECISION.value) if _PRECISION.value else []
    for name in asked:
        as_policy(name)
    xla.set_compilation_cache()
    with memory_errors("lower --batch_size or --length"):
        print(_table(_measure_all(asked, PERPLEXITY in specs, tasks)))


def _measure_all(
    asked: Sequence[Any], perplexity: bool, tasks: Sequence[Any]
) -> Mapping[str, Numbers]:
    """Returns the numbers of each precision, of the run's own without any, and of the baseline."""
    rows: dict[str, Any] = {}
    measured: dict[str, Numbers] = {}
    for precision in asked or [None]:
        trained = _load(precision)
        label = precision or as_policy(trained.model.policy).name
        measured[label] = _measure(trained, perplexity, rows, tasks)
    if BASELINE in measured:
        return measured
    return {BASELINE: _measure(_load(BASELINE), perplexity, rows, tasks)} | measured


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
        raise ValueError(
            f"the task {specs[0]} needs lm-evaluation-harness: pip install 'fp8jax[eval]'"
        )
    from fp8jax.inference.tasks import read_task  # imports lm_eval

    for name in ("lm_eval", "datasets", "httpx"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return [read_task(spec) for spec in specs]


def _measure(
    trained: TrainedModel, perplexity: bool, rows: dict[str, Rows], tasks: Sequence[Any]
) -> Numbers:
    """Returns everything that is measured of one model; `rows` are read when they are empty."""
    tokenizer, numbers = trained.tokenizer, Numbers()
    assert tokenizer is not None
    length = _row_length(trained)
    if perplexity:
        require_room(trained.model, _BATCH_SIZE.value, length)
        if not rows:
            rows.update(_read_rows(trained, tokenizer, length))
        numbers |= _perplexities(trained, tokenizer, rows)
        if _TELEMETRY.value:
            _write_telemetry(trained, next(iter(rows.values())), _TELEMETRY.value)
    if tasks:
        from fp8jax.inference.harness import HarnessModel, begins_texts, run_tasks

        model = HarnessModel(
            trained.model, trained.variables, tokenizer, max_length=length,
            batch_size=_BATCH_SIZE.value, seed=_SEED.value,
            begin=trained.record is not None or begins_texts(tokenizer),
        )  # fmt: skip
        numbers |= run_tasks(model, tasks, limit=_LIMIT.value)
    return numbers


def _row_length(trained: TrainedModel) -> int:
    if _LENGTH.value is not None:
        return _LENGTH.value
    if trained.record is None:
        raise ValueError(f"{trained.name} is of no run that says how long rows are: give --length")
    return trained.record["seq_len"]


def _read_rows(trained: TrainedModel, tokenizer: Tokenizer, length: int) -> Mapping[str, Rows]:
    """Returns the rows of --data, or of the run's held-out documents, by source."""
    if _DATA.value:
        return read_texts(_DATA.value, tokenizer, seq_len=length)
    record = trained.record
    if record is None:
        raise ValueError(f"{trained.name} is of no run with held-out documents: give --data")
    # Runs that are older than this key had no conversations.
    fit = {key: record[key] for key in ("long_examples",) if key in record}
    corpus = build_corpus(
        record["data"], tokenizer, seq_len=length, valid_fraction=record["valid_fraction"],
        cache_dir=record["cache_dir"], **fit,
    )  # fmt: skip
    return corpus.valid


def _perplexities(trained: TrainedModel, tokenizer: Tokenizer, rows: Mapping[str, Rows]) -> Numbers:
    scores = score_texts(
        trained.model, trained.variables, rows, token_bytes=tokenizer.token_bytes,
        batch_size=_BATCH_SIZE.value, seed=_SEED.value,
    )  # fmt: skip
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
    policy = as_policy(trained.model.policy)
    key = jax.random.key(_SEED.value) if policy.stochastic else None
    table = measure_forward(
        trained.model, trained.variables, tokens, segments, positions, key=key
    )  # fmt: skip
    write_rows(Path(folder, f"{policy.name.replace('/', '_')}.parquet"), table.rows)


def _table(measured: Mapping[str, Numbers]) -> str:
    """Returns one line for each number and precision; the baseline's is the first."""
    baseline = measured[BASELINE]
    lines = [["of", "measured", "precision", "value", f"minus {BASELINE}"]]
    for key, own in baseline.items():
        for precision, numbers in measured.items():
            line = [*key, precision, _text(numbers[key].estimate)]
            if precision != BASELINE:
                line.append(_text(difference(numbers[key], own), "+"))
            lines.append(line)
    return "\n".join(aligned(lines))


def _text(estimate: Estimate | None, sign: str = "") -> str:
    """Returns "0.7500 ± 0.0217", with an error of two significant digits."""
    if estimate is None:
        return "?"
    value, error = estimate
    if not error > 0:  # zero, or unknown
        return f"{value:{sign}.5g}" + (" ± 0" if error == 0 else " ± ?")
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:{sign}.{digits}f} ± {error:.{digits}f}"


if __name__ == "__main__":
    command.run(main, errors=ERRORS)
