"""Problems put to a loaded model: its template, its end ids, and kernels quantized once."""

import dataclasses
import json
from fractions import Fraction

import pytest

from fp8jax.gemm.frozen import has_frozen
from fp8jax.lm.cli import solve as solve_module
from fp8jax.lm.cli.solve import chat_template, solve, turn_ends
from fp8jax.lm.data.bpe import load_bpe
from fp8jax.lm.data.byte_tokenizer import ByteTokenizer
from fp8jax.lm.inference.accuracy import measure_accuracy
from fp8jax.lm.inference.problems import Problem
from fp8jax.lm.interop.export import export_model
from fp8jax.lm.interop.trained import TrainedModel
from tests.support.chat_templates import CHATML, HEADERS, write_chat_folder
from tests.support.tiny_models import tiny_model

PROBLEMS = {"a": [Problem(prompt=f"What is {i}?", answer=Fraction(i)) for i in range(3)]}


def loaded(tokenizer, files=None, **fields):
    model, variables = tiny_model(vocab_size=tokenizer.vocab_size, **fields)
    return TrainedModel(
        model=model, variables=variables, tokenizer=tokenizer, name="here", record=None, files=files
    )


def spied(monkeypatch):
    """The arguments of `measure_accuracy`, which answers nothing."""
    calls = []

    def measure(model, variables, tokenizer, problems, **options):
        calls.append({"variables": variables, **options})
        return {}

    monkeypatch.setattr(solve_module, "measure_accuracy", measure)
    return calls


def test_responses_are_those_of_the_trained_weights():
    trained = loaded(ByteTokenizer(), policy="fp8_current")
    found = solve(trained, PROBLEMS, max_tokens=6, batch_size=4)["a"]
    direct = measure_accuracy(
        trained.model,
        trained.variables,
        trained.tokenizer,
        PROBLEMS,
        template=None,
        max_tokens=6,
        batch_size=4,
    )["a"]
    assert found.responses == direct.responses


@pytest.mark.parametrize("mlp, frozen", [("swiglu", True), ("smooth_swiglu", False)])
def test_kernels_are_quantized_once_where_that_is_possible(monkeypatch, mlp, frozen):
    calls = spied(monkeypatch)
    solve(loaded(ByteTokenizer(), policy="fp8_current", mlp=mlp), PROBLEMS)
    assert has_frozen(calls[0]["variables"]) is frozen
    assert calls[0]["template"] is None and calls[0]["stop_ids"] == []


def test_template_and_end_ids_are_those_of_the_folder(tmp_path, monkeypatch):
    calls = spied(monkeypatch)
    tokenizer = load_bpe(write_chat_folder(tmp_path, CHATML) / "tokenizer.json")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    solve(loaded(tokenizer, files=tmp_path), PROBLEMS, max_tokens=9, batch_size=2)
    assert calls[0]["stop_ids"] == [3, 5]
    assert (calls[0]["max_tokens"], calls[0]["batch_size"]) == (9, 2)
    assert calls[0]["template"].template.place == str(tmp_path / "tokenizer_config.json")


def test_a_template_writes_the_date_of_training(tmp_path):
    tokenizer = load_bpe(write_chat_folder(tmp_path, HEADERS) / "tokenizer.json")
    template = chat_template(loaded(tokenizer, files=tmp_path))
    ids = template.prompt([{"role": "user", "content": "Hi"}])
    assert "Today Date: 26 Jul 2024" in tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("data", "settings", "expected"),
    [
        ("chat:a.jsonl", {"eos_token_id": 1, "temperature": 0.5}, [1, "turn"]),
        ("a=0.5*text:b,c=0.5*chat:d", {"eos_token_id": [1, 2]}, [1, 2, "turn"]),
        ("chat:a.jsonl", None, ["eos", "turn"]),
        ("chat:a.jsonl", {"temperature": 0.5}, ["eos", "turn"]),
        ("text:nochat:a", {"eos_token_id": 1}, 1),  # trained on other texts
    ],
)
def test_what_ends_a_turn_ends_a_text_of_the_exported_model(data, settings, expected, tmp_path):
    tokenizer = load_bpe(write_chat_folder(tmp_path, CHATML) / "tokenizer.json")
    if settings is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    trained = loaded(tokenizer, files=tmp_path)
    trained = dataclasses.replace(trained, record={"data": data, "seq_len": 64})
    (end,) = chat_template(trained).turn_ends()
    assert end != tokenizer.eos and turn_ends(trained) == ((end,) if "text:n" not in data else ())
    export_model(trained, tmp_path / "out", "bf16", stop_ids=turn_ends(trained))
    written = json.loads((tmp_path / "out/generation_config.json").read_text())
    ids = {"turn": end, "eos": tokenizer.eos}
    told = expected if expected == 1 else [ids[e] if e in ids else e for e in expected]
    assert written["eos_token_id"] == told
    assert settings is None or settings | {"eos_token_id": told} == written


def test_a_folder_without_a_template(tmp_path):
    assert chat_template(loaded(ByteTokenizer(), files=tmp_path / "nowhere")) is None


def test_a_model_without_tokenizer_is_refused():
    with pytest.raises(ValueError, match="here has no tokenizer, which problems need"):
        model, variables = tiny_model()
        none = TrainedModel(
            model=model, variables=variables, tokenizer=None, name="here", record=None
        )
        solve(none, PROBLEMS)
