"""The command experiments.evaluate, in this process: what it measures, and what it refuses."""

import importlib
import json
import math
import re

import jax
import pytest

from fp8jax.records.checkpoint import Checkpointer
from fp8jax.records.run_checkpoint import CHECKPOINT_VERSION
from fp8jax.telemetry import read
from fp8jax.training.build import build
from fp8jax.training.resume import checkpoint_items
from fp8jax.training.validate import validate
from tests.support.commands import command_here
from tests.support.runs import corpus, tiny
from tests.support.text import write_generated_text, write_jsonl

TEXTS = ["a text that nobody trained on", "and another one of them"]
NUMBER = r"[+-]?\d+\.\d+(?:e[+-]\d+)?"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the workdir of a run that has not trained, and what the run validates."""
    folder = tmp_path_factory.mktemp("evaluate")
    data = write_generated_text(folder, documents=100), str(folder / "cache")
    config = tiny(data, precision="fp8_current", valid_batches=None)
    run = build(config)
    with jax.set_mesh(run.mesh):
        state = run.stages[0].programs.initialize()
        scalars, _ = validate(run, run.stages[0], state, corpus(*data))
    meta = {"version": CHECKPOINT_VERSION, "config": run.settings.record}
    with Checkpointer(folder / "run" / "checkpoints", every=1, keep=1, keep_best=0) as checkpointer:
        checkpointer.save(1, checkpoint_items(run, state), meta, None)
    write_jsonl(folder / "other.jsonl", TEXTS)
    (folder / "empty.txt").write_text("")
    return folder, scalars


@pytest.fixture
def evaluate(capsys, trained):
    """A function from flags to what the command prints; DIR in a flag is the folder."""
    with command_here("evaluate") as run:

        def evaluate(*given):
            run(*[flag.replace("DIR", str(trained[0])) for flag in given])
            return capsys.readouterr().out

        yield evaluate


def columns(line):
    """(source, measured, precision), and the numbers of a line of the table."""
    source, measured, precision, rest = re.split(r"  +", line, maxsplit=3)
    return (source, measured, precision), [float(number) for number in re.findall(NUMBER, rest)]


def test_perplexity_is_the_run_s_own(evaluate, trained):
    """The precision that trained, and BF16 beside it on the same rows."""
    header, *lines = evaluate("--workdir=DIR/run", "--batch_size=16").splitlines()
    assert header.split() == ["of", "measured", "precision", "value", "minus", "bf16"]
    found = dict(map(columns, lines))
    (source,) = {key[0] for key in found}
    expected = {
        "perplexity": math.exp(trained[1]["valid_loss"]),
        "bits per byte": trained[1]["valid_bits_per_byte"],
    }
    assert sorted(found) == sorted(
        (source, name, precision) for name in expected for precision in ("bf16", "fp8_current")
    )
    for name, value in expected.items():
        own, error, *paired = found[source, name, "fp8_current"]
        # Sums of the same float32 numbers in another order, printed with two digits of the error.
        assert abs(own - value) < 1e-6 * value + error / 9
        baseline, its_error = found[source, name, "bf16"]
        assert abs(paired[0] - (own - baseline)) < error / 9
        assert paired[1] < its_error / 2  # the rows' own differences are common to both


def test_other_text(evaluate, trained):
    header, *lines = evaluate(
        "--workdir=DIR/run",
        "--precision=bf16",
        "--data=x=jsonl:DIR/other.jsonl,y=jsonl:DIR/other*",
        "--telemetry=DIR/telemetry",
    ).splitlines()
    found = dict(map(columns, lines))
    assert [key[0] for key in found] == ["x", "x", "y", "y", "all sources", "all sources"]
    x, y, together = (found[name, "perplexity", "bf16"][0] for name in ("x", "y", "all sources"))
    assert x == y == pytest.approx(together, rel=0.01)
    rows = read(trained[0] / "telemetry" / "bf16.parquet").rows
    assert {(row.cast, row.format) for row in rows} == {(c, None) for c in ("fwd_x", "fwd_w", "")}
    assert all(row.amax > 0 for row in rows)


BAD = [
    ((), "--workdir must have a value"),
    (("--workdir=DIR/nowhere",), "nowhere is not a folder"),
    (("--workdir=DIR/run", "--tasks="), "--tasks names no task"),
    (("--workdir=DIR/run", "--precision=fp7"), "fp7"),
    (("--workdir=DIR/run", "--step=7"), "no sound checkpoint of step 7"),
    (("--workdir=DIR/run", "--length=1"), "length"),
    (("--workdir=DIR/run", "--seed=4294967296"), r"--seed=4294967296: .* 4294967295\]"),
    (("--workdir=DIR/run", "--batch_size=100000000000"), "100000000000 rows .* lower --batch_size"),
    (("--workdir=DIR/run", "--length=100000000000"), "of 100000000000 tokens .* or --length"),
    (("--workdir=DIR/run", "--data=text:DIR/em*"), "source .* has no text"),
    (
        ("--workdir=DIR/run", "--length=100000", "--data=text:DIR/*.jsonl"),
        "rows of 100000 tokens .*--length",
    ),
    (("--workdir=DIR/run", "--limit=3"), "--limit is for tasks from files"),
    (("--workdir=DIR/run", "--tasks=a.jsonl", "--data=text:DIR/*"), "is for perplexity"),
    (("--workdir=DIR/run", "--tasks=a.jsonl", "--telemetry=DIR/t"), "measures the text of perpl"),
    (("--workdir=DIR/run", "--data=text:DIR/nothing*"), "no file matches"),
    (("--workdir=DIR/run", "more"), "arguments that are not flags"),
]


@pytest.mark.parametrize("given, message", BAD, ids=[" ".join(given) for given, _ in BAD])
def test_refused_in_one_line(evaluate, given, message):
    with pytest.raises(SystemExit) as ended:
        evaluate(*given)
    line = str(ended.value)
    assert line.startswith("error: ") and "\n" not in line and re.search(message, line), line


def test_tasks_need_the_harness(evaluate, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"task a.jsonl needs .* pip install 'fp8jax\[eval\]'"):
        evaluate("--workdir=DIR/run", "--tasks=a.jsonl")


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore")
def test_tasks(evaluate, trained):
    pytest.importorskip("lm_eval", reason="it runs the tasks")
    folder = trained[0]
    rows = [{"query": f"{i} is", "choices": ["odd", "even"], "gold": i % 2} for i in range(9)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "parity.jsonl").write_text(text)
    row = {"query": "one", "answer": "two"}
    (folder / "next.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row))
    said = evaluate(
        "--workdir=DIR/run", "--length=64", "--limit=8",
        "--tasks=DIR/parity.jsonl,DIR/next.jsonl:samples=2,temperature=0.5,max_tokens=3,perplexity",
    )  # fmt: skip
    keys = [tuple(re.split(r"  +", line)[:3]) for line in said.splitlines()]
    assert [key for key in keys if key[2] == "fp8_current"][2:] == [
        ("parity", "acc", "fp8_current"), ("parity", "acc_norm", "fp8_current"),
        ("next", "exact_match", "fp8_current"),
    ]  # fmt: skip
    with pytest.raises(SystemExit, match="line 1: expected"):
        (folder / "bad.jsonl").write_text("{}")
        evaluate("--workdir=DIR/run", "--tasks=DIR/bad.jsonl")
