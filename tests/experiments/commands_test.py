"""The commands of experiments/ that train no model, in this process."""

import argparse
import ast
import importlib
import json
import re
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
from absl import flags

from experiments import subcommands
from fp8jax.lm.chat.chat_template import load_chat_template
from fp8jax.lm.data.bpe import train_bpe
from fp8jax.lm.data.tokenizers import tokenizer
from fp8jax.lm.sources import training_documents
from tests.support.commands import run_command, run_here


def test_another_folder_called_configs_is_answered_with_the_program_that_works(monkeypatch):
    monkeypatch.setitem(sys.modules, "configs", types.ModuleType("configs"))
    for name in ("configs.base", "configs.pipeline", "experiments.config_keys"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(
        SystemExit, match="error: cannot import name .base. from .configs.*`fp8jax`"
    ):
        importlib.import_module("experiments.config_keys")


def test_a_package_that_is_missing_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_collections", None)
    for name in ("experiments.config_keys", "fp8jax.lm.cli.config_flag"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SystemExit, match="this command needs ml_collections: install .* `train`"):
        importlib.import_module("experiments.config_keys")


# The tokenizer ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """One hundred documents of real text."""
    text = "".join(Path(module.__file__).read_text() for module in (argparse, ast))
    size = len(text) // 100
    lines = [json.dumps({"text": text[i * size : (i + 1) * size]}) for i in range(100)]
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text("\n".join(lines))
    return f"jsonl:{path}"


def test_tokenizer_learns_from_the_training_split(tmp_path, data):
    output = tmp_path / "new" / "tokenizer.json"
    flags = [f"--data={data}", "--valid_fraction=0.5", "--vocab_size=600", f"--output={output}"]
    done = run_here("tokenizer", *flags)
    assert (done.returncode, done.stderr) == (0, "")
    documents = list(training_documents(data, 0.5))
    assert 20 < len(documents) < 80
    assert output.read_text() == train_bpe(iter(documents), 600).to_str(pretty=True)
    made = tokenizer(f"bpe:{output}")
    num_bytes = sum(len(document.encode()) for document in documents)
    ratio = num_bytes / sum(len(made.encode(document)) for document in documents)
    assert done.stdout.splitlines() == [
        f"{output}: 600 tokens, {ratio:.2f} bytes a token",
        f"on the first {len(documents)} documents of the training split ({num_bytes:,} bytes)",
    ]
    before = output.read_bytes()
    done = run_here("tokenizer", *flags)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: --output={output} exists and is not overwritten\n"
    assert output.read_bytes() == before


def test_tokenizer_for_chats(tmp_path, data):
    output = tmp_path / "new" / "tokenizer.json"
    done = run_here(
        "tokenizer", f"--data={data}", "--vocab_size=600", f"--output={output}", "--chat"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{output}: 600 tokens, ")
    words = tokenizer(f"bpe:{output}")
    prompt = load_chat_template(output.parent, words).prompt([{"role": "user", "content": "2"}])
    assert prompt[0] == words.backend.token_to_id("<|im_start|>")


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--vocab_size=257"], "error: vocab_size=257 must be at least 258"),
        (["--vocab_size=99999"], "error: the text gives only "),
        (["--valid_fraction=2"], "error: valid_fraction"),
        (["--data=jsonl:/nowhere/*"], "error: "),
    ],
)
def test_tokenizer_refuses_in_one_line(tmp_path, data, flags, message):
    output = tmp_path / "tokenizer.json"
    done = run_here("tokenizer", f"--data={data}", f"--output={output}", *flags)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(message) and len(done.stderr.splitlines()) == 1
    assert not output.exists()


# Studies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, message",
    [
        (["recipes", "--output=docs/recipes.md", "--seeds=1"], "error: --seeds is not for recipes"),
        (
            [
                "curves",
                "--config=configs/smoke.py",
                "--workdir={}",
                "--precisions=fp8_block,fp8_delayed:history=4,margn=1",
            ],
            "error: unknown option 'margn'; did you mean 'margin'",
        ),
    ],
)
def test_study_refuses_in_one_line(tmp_path, flags, message):
    done = run_here("study.__main__", *(flag.format(tmp_path / "study") for flag in flags))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(message) and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "study").exists()


def test_study_needs_a_command():
    done = run_here("study.__main__", "--workdir=runs/x")
    assert done.returncode == 1
    assert (
        "the first argument must be one of recipes, curves, sweep, inference, intervals, ties,"
        " corpus, parity, parity_table, parity_figure, parity_curves, parity_casts,"
        " parity_endings, proving, proving_table, proving_figure, proving_curves, kv_cache; got "
    ) in done.stdout + done.stderr


def test_help_of_one_command_has_its_flags_alone():
    shown = run_command("bench", "step", "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("python -m experiments.bench step\n\nTimes forward and backward")
    own, shared = shown.stdout.split("takes, as all commands do:\n")
    assert {"shapes", "config", "documents"} < set(re.findall(r"^  --(\w+):", own, re.M))
    assert own.count("  --policies: ") == 1 and "--policies" not in shared  # it has it twice
    assert "  --rounds: Turns of each contestant. By default 7.\n" in shared
    assert "--kv_cache" not in shown.stdout


def test_help_says_what_a_command_needs():
    options = flags.FlagValues()
    flags.DEFINE_string("ledger", "", "The file.", options)
    flags.DEFINE_list("arms", ["a", "b"], "Arms.", options)
    flags.DEFINE_bool("fast", False, "Less.", options)
    one = subcommands.Command(name="table", about="Prints.", needs=["ledger"], takes=["arms"])
    with mock.patch.object(flags, "FLAGS", options), mock.patch.object(sys, "argv", [__name__]):
        shown = subcommands.help_of(one, [one], "python -m study")
    assert shown.split("\n\n") == [
        "python -m study table --ledger=…",
        "Prints.",
        "needs:\n  --ledger: The file.",
        "takes:\n  --arms: Arms. By default a,b.",
        "takes, as all commands do:\n  --fast: Less.",
    ]


def test_help_behind_two_dashes_is_the_other_command_s(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["launch", "local", "--", "train", "--help"])
    one = subcommands.Command(name="local", about="Starts processes.")
    subcommands.show_help([one], "python -m experiments.launch")  # returns
    sys.argv.remove("--")
    with pytest.raises(SystemExit):
        subcommands.show_help([one], "python -m experiments.launch")
