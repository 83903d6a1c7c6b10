"""What the console says at the start and at the end of a run."""

import dataclasses
import math

from configs import base
from fp8jax.analysis.gemms import Summary
from fp8jax.lm.training.build import build
from fp8jax.lm.training.console import best_of, closing_line, start_lines
from tests.support.runs import corpus, tiny


def test_the_start_names_what_differs_and_fits_a_screen(data):
    config = tiny(data, precision="fp8_current", grad_accum=2)
    run = build(config)
    lines = start_lines(run, corpus(config.data, config.cache_dir), base.get_config().to_dict())
    text = "\n".join(lines)
    assert len(lines) <= 15 and max(map(len, lines)) <= 100
    assert "precision='fp8_current'" in text and "grad_accum=2" in text
    assert "learning_rate=0.003" in text and "weight_decay" not in text  # its default
    assert " tokens in 2 microbatches; " in text and "policy     fp8_current" in text


def test_without_changes_and_without_defaults(data):
    run = build(tiny(data))
    rows = corpus(run.settings.data, run.settings.record["cache_dir"])
    assert start_lines(run, rows, run.settings.record)[0] == "config     all defaults"
    assert not any(line.startswith("config") for line in start_lines(run, rows, None))


def test_the_first_examples_of_conversations(data):
    run = build(tiny(data))
    rows = corpus(run.settings.data, run.settings.record["cache_dir"])
    first = (("a.jsonl, line 1", "Hi\n>>>Hello<<<\n"), ("b.jsonl, line 2", "Why? >>>So.<<<"))
    lines = start_lines(run, dataclasses.replace(rows, first=first), None)
    begin = next(i for i, line in enumerate(lines) if line.startswith("examples"))
    assert lines[begin : begin + 6] == [
        "examples   the first ones; what is trained stands in >>> and <<<",
        " " * 11 + "a.jsonl, line 1:",
        " " * 13 + "Hi",
        " " * 13 + ">>>Hello<<<",
        " " * 11 + "b.jsonl, line 2:",
        " " * 13 + "Why? >>>So.<<<",
    ]
    assert lines[begin + 6].startswith("model")


def test_the_end_names_the_best_loss_and_the_folder():
    lines = [
        {"step": 1, "loss": 9.0},
        {"step": 2, "loss": 8.0, "valid_loss": math.nan},
        {"step": 4, "loss": 7.0, "valid_loss": 1.5},
        {"step": 6, "loss": 6.0, "valid_loss": 2.25},
    ]
    assert closing_line("finished", 6, 3723.4, lines, "runs/a") == (
        "finished at step 6 after 1:02:03, valid_loss 2.2500 at step 6, best 1.5000 at step 4"
        "\nAll files are in runs/a"
    )
    assert closing_line("SIGINT", 1, 2.0, lines[:1], "runs/a") == (
        "SIGINT at step 1 after 0:00:02\nAll files are in runs/a."
        " The same command goes on from there"
    )
    assert best_of(lines[:2]) is None and best_of(lines)["step"] == 4


def test_of_two_best_losses_the_first_is_named():
    lines = [{"step": step, "valid_loss": loss} for step, loss in enumerate([3.0, 1.5, 1.5, 2.0])]
    assert best_of(lines) == lines[1]


def test_one_line_on_precision():
    assert str(Summary(252, 252, ())) == "all 252 quantized GEMMs multiply in FP8"
    assert str(Summary(0, 0, ())) == "no GEMM is quantized"
    assert str(Summary(1, 9, ("a", "b", "c"))) == (
        "1 of 9 quantized GEMMs multiply in FP8, the others do not: a (and 2 other reasons)"
    )
    assert str(Summary(1, 9, ("a", "b"))).endswith("do not: a (and 1 other reason)")
    assert str(Summary(0, 9, ("a",))) == "9 quantized GEMMs, none of which multiplies in FP8: a"
