"""Training steps compiled for an H200, without one: every GEMM once, and with its scale."""

import collections

import pytest

from fp8jax.analysis.gemms import find_gemms, format_table, require_fp8
from fp8jax.analysis.hlo import ROLES
from fp8jax.model.config import MODULES
from fp8jax.training.build import build
from fp8jax.training.programs import lower_program
from tests.support import h200
from tests.support.runs import tiny

pytestmark = [h200.needs_plugin, pytest.mark.slow]

LAYERS = 3


@pytest.mark.parametrize("unroll", [1, LAYERS])
@pytest.mark.parametrize("name", ["fp8_current", "fp8_block"])
def test_layers_run_each_gemm_once_and_scaled(data, name, unroll):
    """Layers so small that XLA would merge their GEMMs, with and without a loop. In a loop, whose
    results the backward reads, fp8_block would run GEMMs twice, and fp8_current round scales."""
    sizes = dict(
        model_overrides__d_model=256, model_overrides__d_ff=512, model_overrides__n_layers=LAYERS
    )
    with h200.default() as devices:
        run = build(tiny(data, precision=name, unroll=unroll, **sizes), list(devices))
        stage = run.stages[0]
        text = lower_program(run, stage, "step").compile().as_text()
        gemms = find_gemms(text, stage.policy, stage.model.config.linears)
        require_fp8(gemms)
    calls = collections.Counter[tuple[str, str | None]]()
    for gemm in gemms:
        for module in gemm.modules:
            calls[module, gemm.role] += gemm.count
    once = {
        (module, role): 1 if module == "lm_head" else LAYERS for module in MODULES for role in ROLES
    }
    assert {place: calls[place] for place in once} == once, format_table(gemms)
