"""Tasks of lm-evaluation-harness, read from local files.

A file of JSON lines (.jsonl, also with .gz or .zst) is a task by itself. All its rows are either

    {"query": "…Answer:", "choices": ["…", "…"], "gold": 1}     multiple choice
    {"query": "…Answer:", "answer": "…"}                        exact match after generation

A choice or an answer follows its query after a space. Choices follow it as they are if all of them
begin with white space, or all queries end in it. Multiple choice reports `acc`, and `acc_norm` by
log-likelihood divided by the length of the choice. Exact match compares the first line that the
model writes, without the white space around it, with the answer, or with any of a list of answers.

A .yaml file is a task in the harness's own language, for everything else: prompts from other
fields, filters, other metrics. Its data must be local files, and it cannot call Python.

Needs the package lm_eval: `pip install lm-eval`.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import yaml
from lm_eval.api.registry import METRIC_REGISTRY
from lm_eval.api.task import ALL_OUTPUT_TYPES, ConfigurableTask

from fp8jax.lm.data.files import COMPRESSIONS, Tally, open_counted
from fp8jax.lm.inference.harness import GenerationOptions
from fp8jax.lookup import brief, unknown

# Readers of the package datasets that read local files and run nobody's code.
LOCAL_FORMATS = ("json", "csv", "text", "parquet", "arrow")

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """What a spec says after its file, FILE:samples=4,temperature=0.8

    Attributes:
      samples: texts generated for each row; the row's score is their mean.
      temperature: of the draws; 0 takes the most likely token.
      max_tokens: of a generated text.
      shots: other rows of the file, with their answers, that precede a query.
    """

    samples: int = 1
    temperature: float = 0.0
    max_tokens: int = 64
    shots: int = 0

    @classmethod
    def parse(cls, text: str) -> "TaskOptions":
        """Parses NAME=NUMBER,…; "" gives the defaults.

        Raises:
          ValueError: an option is unknown or out of its range, or samples would all be the same.
        """
        kinds = {field.name: field.type for field in dataclasses.fields(cls)}
        given: dict[str, Any] = {}
        for part in text.split(",") if text else ():
            name, equals, number = part.partition("=")
            if not equals or name not in kinds:
                raise ValueError(
                    f"unknown option {part!r}; there are {', '.join(kinds)}, as in samples=4"
                )
            kind = float if name == "temperature" else int
            try:
                given[name] = kind(number)
            except ValueError as error:
                raise ValueError(f"{part!r} must be a number") from error
        options = cls(**given)
        for name, least in (("samples", 1), ("max_tokens", 1), ("shots", 0), ("temperature", 0)):
            if not getattr(options, name) >= least:
                raise ValueError(f"{name}={getattr(options, name)} must be at least {least}")
        if options.samples > 1 and options.temperature == 0:
            raise ValueError(f"samples={options.samples} would be equal at temperature=0")
        return options


def read_task(spec: str) -> ConfigurableTask:
    """Returns the task of a spec FILE[:NAME=NUMBER,…], a .jsonl or .yaml file.

    Raises:
      ValueError: the file is of another kind, cannot be read, is no task, or reads data that is not
        local; or an option is unknown, or means nothing for this task.
    """
    name, _, text = spec.partition(":")
    path, options = Path(name).expanduser(), TaskOptions.parse(text)
    suffix = (path.with_suffix("") if path.suffix in COMPRESSIONS else path).suffix
    if suffix == ".jsonl":
        return _json_task(path, options)
    if path.suffix in (".yaml", ".yml"):
        if text:
            raise ValueError(f"{spec}: write options into the file, as the harness has them")
        return _yaml_task(path)
    raise ValueError(f"{spec}: a task is a .jsonl or a .yaml file")


class LocalTask(ConfigurableTask):
    """A task whose rows are in memory."""

    def __init__(self, config: dict[str, Any], rows: list[Row]):
        self._rows = rows
        super().__init__(config=config)

    def download(self, *unused: Any, **also_unused: Any) -> None:
        """Makes the rows the data set; the harness calls it."""
        self.dataset = {"test": datasets.Dataset.from_list(self._rows)}


def task_name(path: Path) -> str:
    """Returns the file's name without its endings: arc.jsonl.zst -> arc"""
    return path.name.split(".")[0]


# JSON lines ---------------------------------------------------------------------------------------


def _json_task(path: Path, options: TaskOptions) -> ConfigurableTask:
    rows = _read_rows(path)
    kind = {frozenset(row) for row in rows}
    if len(kind) != 1:
        raise ValueError(f"{path}: some rows have choices, others an answer: make it two files")
    if len(rows) <= options.shots:
        raise ValueError(f"{path}: shots={options.shots} needs more rows than {len(rows)}")
    choices = "choices" in rows[0]
    config = {
        "task": task_name(path),
        "test_split": "test",
        "fewshot_split": "test",
        "num_fewshot": options.shots,
        "doc_to_text": "query",
    }
    config |= _choice_config(path, rows, options) if choices else _answer_config(options)
    return LocalTask(config, rows)


def _choice_config(path: Path, rows: Sequence[Row], options: TaskOptions) -> dict[str, Any]:
    if dataclasses.replace(options, shots=0) != TaskOptions():
        raise ValueError(f"{path} is multiple choice, which generates nothing: only shots= fits")
    means = {"aggregation": "mean", "higher_is_better": True}
    return {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "target_delimiter": _delimiter(path, rows),
        "metric_list": [{"metric": "acc"} | means, {"metric": "acc_norm"} | means],
    }


def _delimiter(path: Path, rows: Sequence[Row]) -> str:
    """Returns what stands between a query and its choices: a space, unless they have one."""
    spaced = {choice[0].isspace() for row in rows for choice in row["choices"]}
    if len(spaced) > 1:
        raise ValueError(
            f"{path}: some choices begin with white space, others do not: write it everywhere or"
            " nowhere"
        )
    return "" if True in spaced or all(row["query"][-1].isspace() for row in rows) else " "


def _answer_config(options: TaskOptions) -> dict[str, Any]:
    decoding = {
        "until": ["\n"],
        "max_gen_toks": options.max_tokens,
        "do_sample": options.temperature > 0,
        "temperature": options.temperature,
    }
    keep = {"function": "take_first_k", "k": options.samples}
    return {
        "output_type": "generate_until",
        "doc_to_target": _first_answer,
        "generation_kwargs": decoding,
        "repeats": options.samples,
        "filter_list": [{"name": "all", "filter": [keep]}],
        "process_results": _exact_match,
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }


def _first_answer(row: Row) -> str:
    return row["answers"][0]


def _exact_match(row: Row, results: list[list[str]]) -> dict[str, float]:
    """Returns the share of a row's samples that are one of its answers."""
    (samples,) = results
    hits = [sample.strip() in row["answers"] for sample in samples]
    return {"exact_match": sum(hits) / len(hits)}


def _read_rows(path: Path) -> list[Row]:
    """Returns the rows of a file: query, choices and gold; or query and answers."""
    rows = []
    with open_counted(path, Tally(), is_json=True) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    rows.append(_row(json.loads(line.decode("utf-8"))))
                    # JSON can spell lone surrogates, which no tokenizer takes.
                    json.dumps(rows[-1], ensure_ascii=False).encode("utf-8")
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{path}, line {number}: {error}") from error
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def _row(row: Any) -> Row:
    if not isinstance(row, dict) or not isinstance(_field(row, "query"), str) or not row["query"]:
        raise ValueError(f'expected {{"query": "…", …}}, got {brief(row)}')
    choices, answer = _field(row, "choices"), _field(row, "answer")
    if choices is not None:
        if not (_texts(choices) and len(choices) > 1):
            raise ValueError(f"choices must be a list of at least two texts, got {brief(choices)}")
        gold = _field(row, "gold")
        if type(gold) is not int or not 0 <= gold < len(choices):
            raise ValueError(f"gold must be an index of {len(choices)} choices, got {brief(gold)}")
        return {"query": row["query"], "choices": choices, "gold": gold}
    answers = [answer] if isinstance(answer, str) else answer
    if not _texts(answers):
        raise ValueError(f"expected choices, or an answer or a list of them, got {brief(row)}")
    if not all(text.strip() for text in answers):
        raise ValueError(f"an answer is blank, which every empty line would match: {brief(row)}")
    return {"query": row["query"], "answers": [text.strip() for text in answers]}


def _field(row: Row, name: str) -> Any:
    return row[name] if name in row else None


def _texts(value: Any) -> bool:
    """Whether it is a list of texts, none of them empty."""
    return isinstance(value, list) and bool(value) and all(isinstance(t, str) and t for t in value)


# YAML ---------------------------------------------------------------------------------------------


def require_lengths(tasks: Sequence[ConfigurableTask], max_length: int) -> None:
    """Raises ValueError for a task whose texts, without any prompt, fill rows of `max_length`."""
    for task in tasks:
        if task.OUTPUT_TYPE != "generate_until":
            continue
        new = GenerationOptions.parse(task.config.generation_kwargs or {}).max_tokens
        if new >= max_length:
            raise ValueError(
                f"the task {task.config.task} generates {new} tokens, which leaves no room for a"
                f" prompt in rows of {max_length}: give --length, or the task fewer tokens"
            )


def _yaml_task(path: Path) -> ConfigurableTask:
    try:
        # The harness's own loader would run the code that "!function" names.
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold keys and values, got {brief(config)}")
    _require_local(path, config)
    _require_known(path, config)
    try:
        task = ConfigurableTask(config={"task": task_name(path)} | config)
        if task.OUTPUT_TYPE == "generate_until":
            GenerationOptions.parse(task.config.generation_kwargs or {})
        return task
    except Exception as error:  # whatever the harness or datasets raise for a wrong config
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{path} is no task: {text}") from error


def _require_local(path: Path, config: dict[str, Any]) -> None:
    """Raises ValueError if a config names data or code that is not in local files."""
    for key in ("include", "group", "custom_dataset", "unsafe_code", "use_prompt"):
        if _field(config, key):
            raise ValueError(f"{path}: {key} is not supported")
    if _field(config, "dataset_path") not in LOCAL_FORMATS:
        raise ValueError(
            f"{path}: dataset_path must be one of {', '.join(LOCAL_FORMATS)}, with local files in "
            f"dataset_kwargs.data_files; got {brief(_field(config, 'dataset_path'))}"
        )
    for key in ("dataset_kwargs", "generation_kwargs"):
        if not isinstance(_field(config, key) or {}, dict):
            raise ValueError(f"{path}: {key} must hold keys and values, got {brief(config[key])}")
    files = _field(_field(config, "dataset_kwargs") or {}, "data_files")
    named = [file for group in _values(files) for file in _values(group)]
    for file in named:
        if not isinstance(file, str) or re.search("://|::", file) or not Path(file).exists():
            raise ValueError(f"{path}: data_files names {brief(file)}, which is no local file")
    if not named:
        raise ValueError(f"{path}: dataset_kwargs.data_files names no file")


def _require_known(path: Path, config: dict[str, Any]) -> None:
    """Raises ValueError if the harness has no such kind of request or no such metric.

    It would look for an unknown metric on the internet.
    """
    if (kind := _field(config, "output_type")) not in ALL_OUTPUT_TYPES:
        raise ValueError(
            f"{path}: output_type must be one of {', '.join(ALL_OUTPUT_TYPES)}; got {brief(kind)}"
        )
    metrics = _field(config, "metric_list")
    if metrics is not None and not (isinstance(metrics, list) and metrics):
        raise ValueError(f"{path}: metric_list must list metrics, got {brief(metrics)}")
    for metric in metrics or []:
        name = _field(metric, "metric") if isinstance(metric, dict) else None
        if not isinstance(name, str):
            raise ValueError(f'{path}: metric_list must list {{"metric": …}}, got {brief(metric)}')
        if _field(metric, "hf_evaluate"):
            raise ValueError(f"{path}: hf_evaluate would run code from the internet")
        if name not in METRIC_REGISTRY:
            raise ValueError(f"{path}: {unknown('metric', name, sorted(METRIC_REGISTRY))}")


def _values(value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else [value]
