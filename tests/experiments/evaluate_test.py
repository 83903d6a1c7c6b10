"""The command experiments.evaluate, in this process: what it measures, and what it refuses."""

import importlib
import json
import math
import re

import jax
import numpy as np
import pytest

from fp8jax.lm.data.byte_tokenizer import ByteTokenizer
from fp8jax.lm.data.tokenizers import tokenizer
from fp8jax.lm.inference.accuracy import paired_difference
from fp8jax.lm.inference.generate import Generator
from fp8jax.lm.inference.paired import measured
from fp8jax.lm.records.checkpoint import Checkpointer
from fp8jax.lm.records.run_checkpoint import CHECKPOINT_VERSION
from fp8jax.lm.training.build import build
from fp8jax.lm.training.epochs import read_corpus
from fp8jax.lm.training.resume import checkpoint_items
from fp8jax.lm.training.validate import validate
from fp8jax.telemetry import read
from tests.support.chats import pairs, write_chats
from tests.support.commands import command_here
from tests.support.runs import corpus, tiny
from tests.support.text import write_generated_text, write_jsonl

BYTES = ByteTokenizer()
TEXTS = ["a text that nobody trained on", "and another one of them"]
NUMBER = r"[+-]?\d+\.\d+(?:e[+-]\d+)?"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the workdir of a run that has not trained, and what the run validates."""
    folder = tmp_path_factory.mktemp("evaluate")
    data = write_generated_text(folder, documents=100), str(folder / "cache")
    config = tiny(data, precision="fp8_current", valid__batches=None)
    run = build(config)
    with jax.set_mesh(run.mesh):
        state = run.stages[0].programs.initialize()
        scalars, _ = validate(run, run.stages[0], state, corpus(*data))
    meta = {"version": CHECKPOINT_VERSION, "config": run.settings.record}
    meta["data"] = corpus(*data).fingerprint
    with Checkpointer(folder / "run" / "checkpoints", every=1, keep=1, keep_best=0) as checkpointer:
        checkpointer.save(1, checkpoint_items(run, state), meta, None)
    write_jsonl(folder / "other.jsonl", TEXTS)
    (folder / "empty.txt").write_text("")
    write_problems(folder, 1, name="one")
    write_problems(folder, 1, 2, name="two")
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
    header, *lines, others = evaluate("--workdir=DIR/run", "--batch_size=16").splitlines()
    assert header.split() == ["of", "measured", "precision", "value", "minus", "bf16"]
    found = dict(map(columns, lines))
    (source,) = {key[0] for key in found}
    beside = r", the same text in bits per byte: gzip (\S+), a bigram that counted .* text (\S+)"
    gzip, bigram = map(float, re.fullmatch(source + beside, others).groups())
    assert 0 < gzip < bigram < 8  # the text is generated, of few words
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


def test_files_that_have_changed_since_the_run_are_refused(evaluate, trained):
    """What is held out now may have been trained on: a file that is cut is cut anew."""
    path = trained[0] / "generated-0.jsonl"
    before = path.read_bytes()
    try:
        path.write_bytes(before + before.splitlines(keepends=True)[0])
        with pytest.raises(SystemExit, match="are not those that it trained on.* give --data"):
            evaluate("--workdir=DIR/run", "--precision=bf16")
    finally:
        path.write_bytes(before)


def test_delayed_scales_without_histories_are_said(evaluate, caplog):
    given = ("--data=jsonl:DIR/other.jsonl", "--precision=fp8_delayed,fp8_current")
    rows = [columns(line) for line in evaluate("--workdir=DIR/run", *given).splitlines()[1:]]
    of = {key[2]: numbers for key, numbers in rows if key[1] == "perplexity"}
    assert of["fp8_delayed"] == of["fp8_current"]
    said = [record.getMessage() for record in caplog.records if "histories" in record.getMessage()]
    assert len(said) == 1 and "no amax histories of fp8_delayed" in said[0]


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


def test_rows_of_conversations_have_room_for_each(tmp_path):
    """--length packs the held-out conversations again, in full; BF16 twice, to keep it short."""
    config = tiny((write_chats(tmp_path, pairs(60)), str(tmp_path / "cache")))
    config.update(tokenizer=f"bpe:{tmp_path}/tokenizer.json", seq_len=160)
    config.model_overrides.vocab_size = tokenizer(config.tokenizer).vocab_size
    run = build(config)
    with jax.set_mesh(run.mesh):
        items = checkpoint_items(run, run.stages[0].programs.initialize())
    meta = {"version": CHECKPOINT_VERSION, "config": run.settings.record}
    meta["data"] = read_corpus(run.settings, run.tokenizer).fingerprint
    with Checkpointer(tmp_path / "run" / "checkpoints", every=1, keep=1, keep_best=0) as saved:
        saved.save(1, items, meta, None)
    with command_here("evaluate") as evaluate:
        flags = [f"--workdir={tmp_path}/run", "--precision=bf16", f"--json={tmp_path}/found.json"]
        with pytest.raises(SystemExit, match="--length=20 is less than a held-out conv") as said:
            evaluate(*flags, "--length=20")
        assert "config" not in str(said.value) and "seq_len" not in str(said.value)
        least = re.search(r"give (--length=\d+) or more", str(said.value))[1]
        values, tokens = [], []
        for length in ([], [least]):
            evaluate(*flags, *length)
            row = json.loads((tmp_path / "found.json").read_text())["numbers"][0]
            values.append(row["value"])
            tokens.append(sum(row["weights"]))
    # The same conversations in other rows: float32 sums in another order.
    assert tokens[0] == tokens[1] and values[0] == pytest.approx(values[1], rel=1e-5)


def write_problems(folder, *answers, name="sums"):
    rows = [{"prompt": f"What is {answer}?", "answer": answer} for answer in answers]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"{name}.jsonl").write_text(text)


@pytest.fixture
def answering(monkeypatch):
    """The model's greedy tokens, but in FP8 the last of three problems gets another response."""
    asked = []

    def generate(self, prompts, sampling, num_tokens, stops, **unused):
        asked.append((len(prompts), num_tokens, self.max_requests))
        texts = [f"#### {i}" for i in range(len(prompts))]
        if len(asked) == 1:  # the run's own precision is measured first
            texts[-1] = "I do not know"
        return [np.array([*BYTES.encode(text), BYTES.eos]) for text in texts]

    monkeypatch.setattr(Generator, "generate", generate)
    return asked


def test_problems(evaluate, trained, answering):
    """The table and the file, with two of three right in FP8, and all in BF16."""
    write_problems(trained[0], 0, 1, 2)
    flags = ("--workdir=DIR/run", "--tasks=", "--max_tokens=20", "--problem_batch=7")
    said = evaluate(*flags, "--problems=x=DIR/sums.jsonl", "--json=DIR/found.json")
    assert answering == [(3, 20, 7)] * 2
    header, *lines = [re.split(r"  +", line) for line in said.splitlines()]
    assert header == ["of", "measured", "precision", "value", "minus bf16", "loses at most"]
    bound = paired_difference(np.ones(3, bool), np.array([True, True, False])).upper
    third = "± 0.33"  # sqrt(variance / 3) of the items 1, 1, 0, and of their differences
    assert lines == [
        ["x", "accuracy", "bf16", "1 ± 0"],
        ["x", "accuracy", "fp8_current", f"0.67 {third}", f"-0.33 {third}", f"{bound:.4f}"],
        ["x", "shuffled answers", "bf16", "0 ± 0"],
        ["x", "shuffled answers", "fp8_current", "0 ± 0", "+0 ± 0"],
        ["x", "responses that end", "bf16", "1 ± 0"],
        ["x", "responses that end", "fp8_current", "1 ± 0", "+0 ± 0"],
    ]
    found = json.loads((trained[0] / "found.json").read_text())
    assert (found["source"], found["baseline"]) == (f"{trained[0]}/run", "bf16")
    rows = {(row["measured"], row["precision"]): row for row in found["numbers"]}
    row = rows["accuracy", "fp8_current"]
    assert row["items"] == [1, 1, 0] and row["weights"] == [1, 1, 1]
    assert row["value"] == 2 / 3 and row["loses_at_most"] == bound
    assert row["minus_bf16"]["value"] == pytest.approx(-1 / 3, rel=1e-12)
    assert rows["accuracy", "bf16"]["items"] == [1, 1, 1] and len(rows) == 6
    assert not list(trained[0].glob("*.tmp"))


def test_problems_of_a_model_that_knows_nothing(evaluate, trained):
    write_problems(trained[0], *range(5), name="unknown")
    said = evaluate(
        "--workdir=DIR/run",
        "--precision=bf16",
        "--tasks=",
        "--max_tokens=4",
        "--limit=3",
        "--problems=DIR/unknown.jsonl",
    )
    assert [line.split()[:2] for line in said.splitlines()[1:]] == [
        ["unknown", "accuracy"],
        ["unknown", "shuffled"],
        ["unknown", "responses"],
    ]
    assert "0 ± 0" in said.splitlines()[1]


def test_problems_left_out_are_counted(evaluate, trained, answering, caplog):
    rows = [{"problem": "?", "solution": f"\\boxed{{{x}}}"} for x in ("0", "(1, 2)", "1", "x")]
    (trained[0] / "math.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluate("--workdir=DIR/run", "--tasks=", "--problems=DIR/math.jsonl")
    assert "math.jsonl: 2 problems have no number as their answer" in caplog.text
    assert answering[0][0] == 2


def test_json_of_perplexity(evaluate, trained):
    """Items and weights give the printed number again, and pair with those of other models."""
    evaluate("--workdir=DIR/run", "--json=DIR/perplexity.json", "--data=jsonl:DIR/other.jsonl")
    found = json.loads((trained[0] / "perplexity.json").read_text())
    for row in found["numbers"]:
        again = measured(
            np.array(row["items"], float),
            np.array(row["weights"], float),
            exponential=row["exponential"],
        )
        assert row["value"] == again.estimate.value
        assert (row["precision"] == "bf16") == ("minus_bf16" not in row)


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
    (("--workdir=DIR/run", "--problems=DIR/nothing.jsonl"), "nothing.jsonl"),
    (("--workdir=DIR/run", "--problems=DIR/other.jsonl"), "other.jsonl, line 1: expected the fi"),
    (("--workdir=DIR/run", "--problems=DIR/one.jsonl"), "has one problem: two are needed"),
    (
        ("--workdir=DIR/run", "--problems=DIR/two.jsonl", "--limit=1"),
        "one problem with --limit=1: two",
    ),
    (("--workdir=DIR/run", "--json=DIR/run"), "is a folder: name a file"),
    (
        ("--workdir=DIR/run", "--problems=DIR/two.jsonl,DIR/two.jsonl"),
        "two.jsonl needs a name of its own, NAME=FILE",
    ),
    (("--workdir=DIR/run", "--problems==DIR/two.jsonl"), "needs a name of its own, NAME=FILE"),
    (("--workdir=DIR/run", "--tasks=", "--problems=,"), "--problems=, names no file"),
    (("--workdir=DIR/run", "--max_tokens=3"), "--max_tokens is for --problems"),
    (("--workdir=DIR/run", "--problem_batch=3"), "--problem_batch is for --problems"),
    (("--workdir=DIR/run", "--json=DIR/nowhere/x.json"), "--json=.* there is no such folder"),
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
    with pytest.raises(SystemExit, match=r"task a.jsonl needs .* pip install lm-eval"):
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
        "--workdir=DIR/run",
        "--length=64",
        "--limit=8",
        "--tasks=DIR/parity.jsonl,DIR/next.jsonl:samples=2,temperature=0.5,max_tokens=3,perplexity",
    )
    keys = [tuple(re.split(r"  +", line)[:3]) for line in said.splitlines()]
    assert [key for key in keys if key[2:] == ("fp8_current",)][2:] == [
        ("parity", "acc", "fp8_current"),
        ("parity", "acc_norm", "fp8_current"),
        ("next", "exact_match", "fp8_current"),
    ]
    with pytest.raises(SystemExit, match="line 1: expected"):
        (folder / "bad.jsonl").write_text("{}")
        evaluate("--workdir=DIR/run", "--tasks=DIR/bad.jsonl")
