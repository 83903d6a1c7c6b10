"""Scores of held-out text: pairing by hand, and the tables of a tiny run."""

import math
import re

import jax
import numpy as np
import pytest

from experiments.study import inference
from fp8jax.lm.training.loop import train_and_evaluate
from tests.support.runs import tiny

SEGMENTS = np.array([[1, 1, 1, 2], [1, 1, 0, 0]], np.int32)  # scored: 2 tokens, and 1


def test_a_ratio_of_perplexities_by_hand():
    """Differences 0.1, 0.3 and 0.5: the mean is 0.3, and the rows are off it by -0.2 and 0.2."""
    batches = [(np.zeros_like(SEGMENTS), SEGMENTS)]
    base = np.array([-1.0, -2.0, -3.0])
    got = base - np.array([0.1, 0.3, 0.5])
    ratio, error = inference.ratio_of(base, got, batches)
    assert ratio == pytest.approx(math.exp(0.3))
    assert error == pytest.approx(ratio * math.sqrt((0.04 + 0.04) * 2 / 1) / 3)
    assert inference.ratio_of(base, got * np.nan, batches)[0] == math.inf


@pytest.mark.extended
def test_the_tables_of_a_run(data, tmp_path):
    """BF16 and scales of tokens do not see later tokens, but for the sums of another GEMM shape;
    scales of a batch do."""
    config = tiny(
        data, precision="fp8_delayed", num_steps=10, optimizer__warmup_steps=2, valid__batches=1
    )
    train_and_evaluate(config, str(tmp_path / "run"))
    jax.clear_caches()
    text = inference.inference_tables(
        str(tmp_path / "run"),
        ["fp8_delayed", "fp8_block", "fp8_rowwise"],
        [6, 60],
        rows=16,
        batch_size=8,
        tolerance=0.5,
    )
    table = {
        cells[0].strip(" `"): [cell.strip() for cell in cells[1:]]
        for cells in (line.strip("|").split("|") for line in text.splitlines() if "|" in line)
    }
    for name in ("fp8_delayed", "fp8_block", "fp8_rowwise", "fp8_cscale:bias=6"):
        assert 0.8 < float(table[name][2].split()[0]) < 1.2 and table[name][3] == "yes"
    assert re.search(r"Those that work: 6 \(the sweep ends there\)", text)
    largest = {name: float(cells[-1]) for name, cells in table.items() if "amax of" in name}
    for name in ("fp8_amax", "fp8_rowwise"):
        assert (
            largest["fp8_current, amax of the batch"] > 100 * largest[f"{name}, amax of the token"]
        )
