"""The proving ground: what its sizes are for, what runs on it, and what its pages say of that."""

import ast
import contextlib
import dataclasses
import io
import json
import re
import shutil
import textwrap

import pytest

from configs import base, proving
from experiments.study import (
    growth,
    parity_analysis,
    parity_ledger,
    proving_analysis,
    proving_plan,
)
from experiments.study.parity_parts import VALIDATED, read_validation
from experiments.study.parity_plan import BASELINE, NULL, Chain
from experiments.study.proving_plan import ALONE, ARMS, COMPARISONS, NAIVE, PLANS, RUN, SUMS
from fp8jax.lm.model.models import model_config
from fp8jax.lm.records.config_keys import by_path
from fp8jax.lm.training.loop import train_and_evaluate
from fp8jax.numerics.names import as_policy
from fp8jax.numerics.policy import POLICIES
from fp8jax.numerics.schedule import PrecisionSchedule
from tests.support import ROOT
from tests.support.runs import numbers
from tests.support.traced_programs import traced_once

# The config ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", proving.SIZES)
def test_tile_row_block_and_tensor_differ_in_every_linear_and_gemm(size):
    config = proving.get_config(size)
    given = {name: value for name, value in config.model_overrides.items() if value is not None}
    model = model_config(config.model, given)
    kv, heads = model.n_kv_heads * model.head_dim, model.n_heads * model.head_dim
    tokens = config.batch_size * config.seq_len
    for contracted in (model.d_model, model.d_ff, kv, heads, tokens):
        assert contracted % 128 == 0 and contracted > 128
    exempt = POLICIES["nvfp4_mixed"].exempt(model.n_layers)
    assert exempt == (0, 1) and 0.15 <= 1 / model.n_layers < 0.17


# The plan -----------------------------------------------------------------------------------------


def test_every_policy_runs_and_every_arm_can_be_honored():
    assert {arm.precision for arm in PLANS["recipes"].arms} == POLICIES.keys()
    keys = by_path(base.get_config()).keys()
    for arm in ARMS.values():
        assert as_policy(arm.precision).name == arm.precision
        assert {change.partition("=")[0] for change in arm.changes} <= keys
    assert {name for pair in COMPARISONS for name in pair} <= ARMS.keys()
    for plan in PLANS.values():
        assert plan.arms[0].name == BASELINE and plan.seeds == (0, 1, 2)
    controls = [name for name, arm in ARMS.items() if arm.control]
    late = [f"bf16_then_fp4_naive_at_{begins}" for begins in (0.8, 0.999, 0.95, 0.5, 0.2)]
    assert controls == ["fp4_naive", *late]
    assert ARMS[NULL].changes == ("attention=xla", "unroll=6")


def test_runs_of_a_schedule_end_as_their_names_say():
    plans = ("schedule", "last_step", "late", "late_casts", "late_growth", "late_short")
    ending = {arm for plan in plans for arm in PLANS[plan].arms if arm.changes}
    assert len(ending) == 12 + 2 + len(POLICIES) + 2 * (5 + 6) + 1 + 7 * 4 + 3
    for arm in ending:
        (change,) = arm.changes
        (last,) = ast.literal_eval(change.removeprefix("precision_schedule="))
        schedule = PrecisionSchedule(((0.0, arm.precision), last))
        assert arm.name == f"{arm.precision}_then_{schedule.policies[1].name}_at_{last[0]}"
        assert schedule.begins(RUN.steps)[1] in (200, 500, 800, 900, 950, 980, 995, 999)


def test_a_chain_is_one_run_that_is_scored_by_its_last_validation(tmp_path):
    (run,) = proving_plan.parts(Chain(ARMS["nvfp4"], 2, (RUN,)), RUN, tmp_path)
    assert run.kind == VALIDATED
    assert run.text() == (
        f"python -m experiments.train --config=configs/proving.py:ranking --workdir={tmp_path}/run"
        " --config.precision=nvfp4 --config.seed=2"
    )
    config = proving.get_config("ranking")
    assert config.num_steps % config.valid.every == 0 and config.valid.batches is None
    assert RUN.tokens == 16_384_000


def test_the_score_is_the_last_validation(tmp_path):
    rows = [{"step": 1, "valid_loss": 3.0}, {"step": 2, "valid_loss": 2.0}, {"step": 3}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_validation(tmp_path, "nvfp4") == {"loss": 2.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "valid_loss": float("nan")}))
    with pytest.raises(ValueError, match="in nvfp4: no finite loss"):
        read_validation(tmp_path, "nvfp4")


# The tables ---------------------------------------------------------------------------------------


def made(arm, *losses, **fields):
    """Lines of seeds 0, 1, … with these losses."""
    common = dict(fork=RUN.name, tokens=1, setting="s", data="d", card="H100", trunk="t")
    common |= dict(commit="c", code="x", versions={}, commands=[], seconds=1.0) | fields
    return [
        parity_ledger.Line(arm=arm, seed=seed, loss=loss, **common)
        for seed, loss in enumerate(losses)
    ]


BASE = made(BASELINE, 2.0, 2.0, 2.0)


def test_tables_by_hand():
    """0.5 + {0, 0.1, -0.1}: a deviation of 0.1, so 4.303 x 0.1 / sqrt(3) = 0.25 to either side."""
    lines = [*BASE, *made("fp8_block", 2.010, 2.012, 2.008), *made("nvfp4", 2.06, 2.06, 2.06)]
    lines += [*made("fp8_rowwise", 1.9, 2.1, 2.0)[::-1], *made("mxfp4", 2.1)]
    filled = proving_analysis.tables(lines)
    header, _, *rows = filled["recipes"].splitlines()
    assert header.startswith(
        "| precision | loss of seeds 0, 1, 2 | against BF16, % | 95% interval |"
    )
    assert rows == [
        "| `bf16` | 2.0000 2.0000 2.0000 |  |  |  |  |",
        "| `fp8_rowwise` | 1.9000 2.1000 2.0000 | +0.00 | [-12.42, +12.42] | 2 | not decided |",
        "| `fp8_block` | 2.0100 2.0120 2.0080 | +0.50 | [+0.25, +0.75] | 2 | worse, within 1.0% |",
        "| `nvfp4` | 2.0600 2.0600 2.0600 | +3.00 | [+3.00, +3.00] | 2 | worse |",
        "| `mxfp4` | 2.1000 | +5.00 | – | – | one seed |",
    ]
    assert "| `mxfp4` | `nvfp4` | +1.94 | – | – | one seed |" in filled["comparisons"]
    place = "<!-- table: proving comparisons -->\n<!-- end -->\n"
    page = proving_analysis.fill_page(place, lines)
    assert filled["comparisons"] in page and proving_analysis.fill_page(page, lines) == page
    names = (
        "recipes, readings, casts, schedule, last_step, constants, late, late_casts, late_growth,"
        " late_short, comparisons, sum"
    )
    with pytest.raises(ValueError, match=f"no place for any of {names}"):
        proving_analysis.fill_page("a page", lines)


def test_the_sum_of_casts_by_hand():
    """Casts alone at 1% but one at 3%; all at 6% and 7%: 8 - 6, 8 - 7. Seed 2 lacks a cast.

    The interval: 12.706 x (1 / sqrt(2)) / sqrt(2) = 6.353 to either side.
    """
    lines = [*BASE, *made(NAIVE, 2.12, 2.14, 2.2)]
    for arm in ALONE[1:]:
        lines += made(arm.name, 2.02, 2.02, 2.02)
    assert proving_analysis.sum_of_casts(lines, NAIVE) == {}
    lines += made(ALONE[0].name, 2.06, 2.06)
    assert proving_analysis.sum_of_casts(lines, NAIVE) == pytest.approx({0: 2.0, 1: 1.0})
    late = "bf16_then_nvfp4_at_0.8"
    lines += [*made(late, 2.06, 2.04)]
    lines += [line for arm in SUMS[late] for line in made(arm.name, 2.02, 2.02)]
    assert len(SUMS[late]) == 5
    assert proving_analysis.sum_of_casts(lines, late) == pytest.approx({0: 2.0, 1: 3.0})
    row = "| `fp4_naive` | +2.00 +1.00 | +1.50 | [-4.85, +7.85] | 1 |"
    assert proving_analysis.tables(lines)["sum"].splitlines()[-2] == row


def test_what_policies_cost_in_a_last_fifth_is_ordered_and_named_by_format():
    late = proving_plan.LATE
    lines = [*BASE, *made(late["nvfp4"], 2.06, 2.04), *made(late["fp8_block"], 2.01, 2.02, 2.0)]
    lines += [*made(late["bf16"], 2.0, 2.0, 2.0), *made("mxfp8", 2.2)]
    found = proving_analysis.late_gaps(lines)
    assert list(found) == ["BF16/bf16", "FP8/fp8_block", "FP4/nvfp4"]
    assert found["FP4/nvfp4"] == pytest.approx([3.0, 2.0])
    assert found["FP8/fp8_block"] == pytest.approx([0.5, 1.0, 0.0])
    with pytest.raises(ValueError, match="none of the arms bf16_then_bf16_at_0.8, "):
        proving_analysis.late_gaps(BASE)


def test_what_policies_cost_by_their_steps():
    arms = [arm for arms in proving_plan.GROWN.values() for arm in arms.values()]
    assert list(proving_plan.GROWN["nvfp4"]) == [1, 50, 200, 500, 800]
    lines = [*BASE, *(line for arm in arms for line in made(arm.name, 2.02, 2.04))]
    curves = growth.by_steps(lines)
    assert {group: list(of) for group, of in curves.items()} == {
        "FP8": ["fp8_delayed", "fp8_block"],
        "FP4": ["nvfp4", "fp4_mixed", "mxfp4", "fp4_backward", "fp4_naive"],
    }
    assert list(curves["FP4"]["nvfp4"]) == [1, 50, 200, 500, 800]
    assert curves["FP4"]["nvfp4"][50] == pytest.approx([1.0, 2.0])
    with pytest.raises(ValueError, match="lacks endings of fp4_naive: train --plan=late_growth"):
        growth.by_steps(lines[:-2])


def test_what_arms_cost_by_their_tokens():
    lines = parity_ledger.read(ROOT / "docs/branches_ledger.jsonl")
    curves = growth.by_tokens(parity_analysis.verdicts(lines))
    assert {group: list(of) for group, of in curves.items()} == {
        "FP8, and BF16 computed another way": ["fp8_delayed", "fp8_block", "bf16_again"],
        "FP4": ["nvfp4", "fp4_mixed", "fp4_naive"],
    }
    loss = {(line.arm, line.fork, line.seed): line.loss for line in lines}
    for tokens, fork in ((75_497_472, "75M"), (301_989_888, "300M")):
        pairs = [(loss["bf16_then_nvfp4", fork, s], loss["bf16", fork, s]) for s in (200, 201, 202)]
        gaps = [100 * (own / base - 1) for own, base in pairs]
        assert curves["FP4"]["nvfp4"][tokens] == pytest.approx(gaps)
    with pytest.raises(ValueError, match="no arm has two seeds"):
        growth.by_tokens(parity_analysis.verdicts([line for line in lines if line.seed == 200]))


def test_a_control_that_is_not_worse_is_a_failure():
    for losses, failures in (((2.0, 2.1, 1.9), 1), ((1.9, 1.9, 1.9), 1), ((2.1, 2.1, 2.1), 0)):
        found = proving_analysis.control_failures([*BASE, *made("fp4_naive", *losses)])
        assert len(found) == failures, losses
    stopped = made("fp4_naive", None, stopped="run: not finite after step 3")
    assert proving_analysis.control_failures([*BASE, *stopped]) == []


def test_lines_of_several_texts_or_of_none_are_refused():
    other = [dataclasses.replace(line, data="e") for line in BASE]
    assert proving_analysis.lines_of(BASE, "s") == BASE
    with pytest.raises(ValueError, match=r"of one text, and are of \['d', 'e'\]"):
        proving_analysis.lines_of([*BASE, *other], "s")
    with pytest.raises(ValueError, match=r"are of \[\]"):
        proving_analysis.lines_of(BASE, "of another config")


def test_the_page_s_tables_are_those_of_the_committed_ledger():
    docs = ROOT / "docs"
    ledgers = {"proving_ledger_first": 25 * 3, "proving_ledger": 39 * 3}
    first, second = (parity_ledger.read(docs / f"{name}.jsonl") for name in ledgers)
    assert [len(first), len(second)] == [*ledgers.values()]
    first, second = (
        proving_analysis.lines_of(lines, proving_plan.setting()) for lines in (first, second)
    )
    for name in ("recipes_loss", "recipe_readings"):
        page = (docs / f"results/{name}.md").read_text(encoding="utf-8")
        assert proving_analysis.fill_page(page, second) == page
    casts = parity_ledger.read(docs / "casts_ledger.jsonl")
    page = (docs / "results/casts.md").read_text(encoding="utf-8")
    assert f"{len(casts)} of 42 runs" in page and len({line.code for line in casts}) == 1
    casts = proving_analysis.lines_of(casts, proving_plan.setting())
    assert proving_analysis.fill_page(page, casts) == page
    schedule = parity_ledger.read(docs / "schedule_ledger.jsonl")
    page = (docs / "results/fp4_schedule.md").read_text(encoding="utf-8")
    assert f"{len(schedule)} runs" in page and len({line.code for line in schedule}) == 1
    schedule = proving_analysis.lines_of(schedule, proving_plan.setting())
    assert proving_analysis.fill_page(page, schedule) == page
    assert proving_analysis.control_failures(schedule) == []
    pages = {"fp4_last_step": "last_step", "cscale_bias": "constants"}
    pages |= {"late": "late", "late_growth": "growth", "late_short": "short"}
    for name, of in pages.items():
        lines = parity_ledger.read(docs / f"{of}_ledger.jsonl")
        page = (docs / f"results/{name}.md").read_text(encoding="utf-8")
        assert f"{len(lines)} runs" in page and len({line.code for line in lines}) == 1
        lines = proving_analysis.lines_of(lines, proving_plan.setting())
        assert proving_analysis.fill_page(page, lines) == page
        assert proving_analysis.control_failures(lines) == []
    assert proving_analysis.control_failures(first) == []
    assert proving_analysis.control_failures(second) == []


@pytest.mark.parametrize(
    ("name", "section", "count"),
    [
        ("late", "# What each recipe costs", 14),
        ("late_growth", "# How the cost", 7 + 1),
        ("late_short", "# How many steps", 2 + 2),
        ("branches", "# What the last eighth", 5 + 5),
        ("branches", "## 2026-11-30, later", 4 + 4),
        ("branches_casts", "# Which cast", 6 + 7),
        ("branches_recipes", "# What an ending", 22 + 14 + 6),
        ("parity_scatter", "## 2026-11-29, last:", 8 + 3 + 2),
    ],
    ids=[
        *("late", "late_growth", "late_short", "branches", "branches_long", "branches_casts"),
        *("branches_recipes", "parity_scatter"),
    ],
)
def test_a_page_s_script_prints_its_rows(name, section, count, monkeypatch):
    monkeypatch.chdir(ROOT)
    page = (ROOT / f"docs/results/{name}.md").read_text(encoding="utf-8")
    script = re.search(r"python - <<'END'.*?\n(.*?)\n *END\n", page.partition(section)[2], re.S)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(textwrap.dedent(script[1]), {})
    rows = [line for line in printed.getvalue().splitlines() if line.startswith("|")]
    assert len(rows) == count and set(rows) <= set(page.splitlines())


def test_the_page_s_verdict_has_the_intervals_of_its_tables(monkeypatch):
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs/results/recipes_loss.md").read_text(encoding="utf-8")
    section = page.partition("## The proving ground")[2].partition("\n## ")[0]
    script = section.partition("python - <<'END'\n")[2].partition("\nEND\n")[0]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(script, {})
    rows = [line for line in printed.getvalue().splitlines() if line.startswith("|")]
    assert len(rows) > 30 and "\n".join(rows) in section
    scatter = float(re.search(r"scatters by ([\d.]+)", printed.getvalue())[1])
    assert f"**one run scatters by {scatter:.2f}%**" in section
    verdict = section.rpartition("**Verdict.**")[2]
    said = re.findall(r"[-+][\d.]+% \[[^]]+\]", " ".join(verdict.split()))
    first = parity_ledger.read(ROOT / "docs/proving_ledger_first.jsonl")
    tables = "\n".join([section, *proving_analysis.tables(first).values()])
    cells = re.findall(r"\| ([-+][\d.]+) \| (\[[^]]+\]) \|", tables)
    assert len(said) > 15 and set(said) <= {f"{mean}% {interval}" for mean, interval in cells}


# Resuming -----------------------------------------------------------------------------------------

NEW = ("nvfp4_unbiased", "nvfp4_4over6", "quartet2", "tetrajet2", "fp4_weights")


@pytest.mark.full
@pytest.mark.parametrize("precision", [*NEW, "nemotron3", "deepseek_v4"])
def test_a_new_recipe_trains_the_proving_ground_and_resumes_to_the_bit(precision, data, tmp_path):
    """With two of its layers, so that the last of `nemotron3` is in BF16, and three short steps.

    The last checkpoint is taken away, which is what a death before it would have left.
    """
    config = proving.get_config()
    config.data, config.cache_dir = data
    config.precision = precision
    config.model_overrides.n_layers = 2
    config.update(num_steps=3, batch_size=2, seq_len=128)
    config.optimizer.warmup_steps = 1
    config.checkpoint.every, config.valid.every, config.valid.batches = 2, 3, 1
    with traced_once():
        train_and_evaluate(config, str(tmp_path))
        whole = numbers(tmp_path)
        assert len(whole) == 3 and whole[-1]["loss"] < whole[0]["loss"]
        shutil.rmtree(tmp_path / "checkpoints" / "3")
        train_and_evaluate(config, str(tmp_path))
    assert numbers(tmp_path) == whole
