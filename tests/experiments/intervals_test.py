"""t-intervals against tabulated quantiles, and those of the pages against their own tables."""

import json
import re
from statistics import fmean

import pytest

from experiments.study.intervals import (
    interval_table,
    read_numbers,
    seed_differences,
    t_interval,
    t_quantile,
)
from tests.support import ROOT

# Two-sided quantiles of Student's t, as tables print them, by degrees of freedom.
TABULATED = {
    0.90: {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 10: 1.812, 30: 1.697},
    0.95: {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 30: 2.042, 120: 1.980},
    0.99: {1: 63.657, 2: 9.925, 3: 5.841, 4: 4.604, 5: 4.032, 10: 3.169, 30: 2.750},
}


@pytest.mark.parametrize("confidence", TABULATED)
def test_quantiles_are_those_of_the_tables(confidence):
    for freedom, printed in TABULATED[confidence].items():
        assert f"{t_quantile(confidence, freedom):.3f}" == f"{printed:.3f}"


def test_an_interval_by_hand():
    interval = t_interval([1.0, 2.0, 3.0])  # standard deviation 1, error 1 / sqrt(3)
    assert interval.degrees_of_freedom == 2
    assert interval.mean == 2.0
    assert interval.half_width == pytest.approx(4.303 / 3**0.5, abs=1e-3)
    assert (interval.low, interval.high) == pytest.approx((-0.484, 4.484), abs=1e-3)
    assert t_interval([1.0, 3.0]).half_width == pytest.approx(12.706, abs=1e-3)
    # The standard deviation of six values, over sqrt(6), times the quantile of five degrees.
    six = t_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], confidence=0.99)
    assert six.half_width == pytest.approx(4.032 * 3.5**0.5 / 6**0.5, abs=1e-3)
    with pytest.raises(ValueError, match=r"needs two values or more, got \[1.0\]"):
        t_interval([1.0])


# The numbers of a pipeline ------------------------------------------------------------------------

NUMBERS = {
    "run/accuracy/sums/bf16": {"value": 0.5, "seeds": [0.5, 0.6]},
    "run/accuracy/sums/fp8_block": {"value": 0.5, "seeds": [0.4, 0.7]},
    "run/loss_gap/fp8_block": {"value": 0.2},
    "run/loss_gap/fp8_block/cpt": {"value": 0.01, "seeds": [0.01]},
    "run/loss_gap/fp8_block/sft_1": {"value": 0.02, "seeds": [0.01, 0.03]},
    "loss_gap/fp8_block/sft_1": {"value": 0.5, "seeds": [0.5, 0.5]},
    "run/time/cpt/bf16": {"value": 1.0},
}


def test_differences_are_those_of_the_same_seed(tmp_path):
    path = tmp_path / "figures.json"
    path.write_text(json.dumps(NUMBERS))
    differences = seed_differences(read_numbers(path), "run")
    assert differences == {
        "accuracy/sums/fp8_block": pytest.approx([10, -10]),
        "loss_gap/fp8_block/cpt": [1.0],
        "loss_gap/fp8_block/sft_1": [1.0, 3.0],
    }
    assert list(seed_differences(NUMBERS)) == ["loss_gap/fp8_block/sft_1"]
    # 12.706 times the error of the mean of two, half of their difference.
    assert interval_table(differences).splitlines()[2:] == [
        "| `accuracy/sums/fp8_block` | +10.00, -10.00 | +0.000 | [-127.06, +127.06] | 1 |",
        "| `loss_gap/fp8_block/cpt` | +1.00 | +1.000 | one seed | – |",
        "| `loss_gap/fp8_block/sft_1` | +1.00, +3.00 | +2.000 | [-10.71, +14.71] | 1 |",
    ]
    with pytest.raises(ValueError, match="no `other/loss_gap/`"):
        seed_differences(NUMBERS, "other")


# The pages ----------------------------------------------------------------------------------------


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def printed(values: list[float], digits: int) -> str:
    interval = t_interval(values)
    return f"[{interval.low:+.{digits}f}, {interval.high:+.{digits}f}]"


def test_intervals_of_the_losses_follow_from_mean_and_range():
    number = r"([+-][\d.]+)"
    row = rf"\| \**{number}%\** \({number} to {number}\) \| (\[.*\]) \|$"
    rows = re.findall(row, page("results/recipes_loss.md"), re.M)
    assert len(rows) == 35
    for *texts, interval in rows:
        mean, low, high = map(float, texts)
        digits = 1 if "." in texts[0] else 0
        assert interval == printed([low, 3 * mean - low - high, high], digits)


def test_intervals_of_the_readings_follow_from_their_seeds():
    row = r"^\| (`.*?) \| ([\d.]+ [\d.]+ [\d.]+) \| [^|]* \| [^|]*\| ([^|]*) \|"
    # Without the tables that `proving_table` writes from a ledger.
    text = re.sub(r"(?s)<!-- table: .*?<!-- end -->", "", page("results/recipe_readings.md"))
    rows = re.findall(row, text, re.M)
    assert len(rows) == 27
    for name, texts, interval in rows:
        losses = [float(text) for text in texts.split()]
        if name == "`bf16`":
            base = losses
        else:
            gaps = [100 * (a / b - 1) for a, b in zip(losses, base, strict=True)]
            assert interval == printed(gaps, 1), name


def test_intervals_beside_stosignsgd_follow_from_their_seeds():
    row = r"^\| `(\w+)` \| \de-\d \| ([\d.]+ [\d.]+ [\d.]+) \| ([\d.]+) \|(.*)\|$"
    rows = re.findall(row, page("results/stosignsgd.md"), re.M)
    losses = {name: [float(text) for text in texts.split()] for name, texts, *_ in rows}
    assert len(rows) == 5
    for name, _, mean, rest in rows:
        # Losses are rounded to 5e-5, and so is their mean.
        assert abs(fmean(losses[name]) - float(mean)) <= 1e-4
        if name != "stosignsgd":
            pairs = zip(losses[name], losses["stosignsgd"], strict=True)
            gaps = [100 * (a / b - 1) for a, b in pairs]
            assert rest == f" {fmean(gaps):+.1f} | {printed(gaps, 1)} ", name


def test_intervals_of_infir2_are_those_of_its_numbers():
    """Each table of losses by stage, one run after the other, and the README's first table."""
    numbers = json.loads(page("infir2.json"))
    tables = page("infir2.md").split("| stage, rows |")[1:]
    for run, table in zip(("", "three_pretrained"), tables, strict=True):
        differences = seed_differences(numbers, run)
        for stage in ("cpt", "sft_1", "sft_2"):
            (row,) = re.findall(rf"^\| `{stage}`,.*$", table, re.M)
            for recipe, cell in zip(
                ("fp8_block", "fp8_block_ue8m0"), row.split(" | ")[2:], strict=True
            ):
                seeds = differences[f"loss_gap/{recipe}/{stage}"]
                if len(seeds) == 1:
                    assert "one seed" in cell
                else:
                    listed = ", ".join(f"{value:+.2f}%" for value in seeds)
                    assert f": {listed} {printed(seeds, 2)}" in cell
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| `fp8_block` \|.*$", readme, re.M)
    for stage in ("cpt", "sft_2"):
        assert printed(differences[f"loss_gap/fp8_block/{stage}"], 2) in row
