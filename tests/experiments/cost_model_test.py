"""The FP4 paper's theoretical costs, by hand, and what no cost can be said of."""

import dataclasses

import pytest

from experiments.study.cost_model import (
    CORE,
    PAPER_SPLIT,
    Speeds,
    forward_flops,
    relative_cost,
    split_cost,
)
from fp8jax.lm.model.config import flops_per_token
from fp8jax.lm.model.models import MODELS
from fp8jax.numerics.policy import POLICIES
from fp8jax.numerics.recipes import RECIPES

pytestmark = pytest.mark.extended

PAPER, CAUTIOUS = Speeds(), Speeds(fp8=1.4, fp4=2.0)
GROUPS = ("layers/mlp", "layers/attention", CORE)
LLAMA = MODELS["llama2_7b"]
# Per cent. By hand, with f the MLPs, a the attention's linears, c the core, f + a + c = 1:
#   fp4_naive     n = (f + a)/4 + c
#   fp4_block     [n + 2 ((f + a)/2 + c)] / 3
#   fp4_backward  [f/4 + a/2 + c + 2 n] / 3
#   fp4_mixed     [f/4 + a/2 + c + 2 ((f + a)/2 + c)] / 3
#     dgrad=bf16  [f/4 + a/2 + c + 1 + (f + a)/2 + c] / 3
ON_PAPER = {
    ("fp4_naive", PAPER): 35.725,
    ("fp4_backward", PAPER): 38.11667,
    ("fp4_block", PAPER): 50.00833,
    ("fp4_mixed", PAPER): 52.4,
    ("fp4_mixed:dgrad=bf16", PAPER): 66.68333,
    ("fp4_naive", CAUTIOUS): 57.15,
    ("fp4_backward", CAUTIOUS): 59.2,
    ("fp4_block", CAUTIOUS): 69.39286,
    ("fp4_mixed", CAUTIOUS): 71.44286,
    ("fp4_mixed:dgrad=bf16", CAUTIOUS): 79.60476,
    ("bf16", CAUTIOUS): 100.0,
}


@pytest.mark.parametrize(("policy", "speeds"), ON_PAPER)
def test_costs_on_the_papers_split(policy, speeds):
    cost = 100 * split_cost(policy, PAPER_SPLIT, speeds)
    assert cost == pytest.approx(ON_PAPER[policy, speeds], abs=1e-5)


def test_the_papers_printed_figures():
    printed = {"fp4_naive": ("35.7", "57.1"), "fp4_mixed": ("52.4", "71.4")}
    for policy, figures in printed.items():
        for speeds, figure in zip((PAPER, CAUTIOUS), figures, strict=True):
            cost = 100 * split_cost(policy, PAPER_SPLIT, speeds)
            assert abs(cost - float(figure)) <= 0.05 + 1e-9  # 57.15 lies on the tie


def test_the_papers_split_is_llama_7b_with_the_whole_square():
    def shares(**how):
        flops = forward_flops(LLAMA, 4096, **how)
        groups = [[v for k, v in flops.items() if k.startswith(g)] for g in GROUPS]
        return [round(100 * sum(group) / sum(flops.values()), 1) for group in groups]

    assert shares() == [57.3, 28.4, 14.2]
    assert shares(causal=True) == [61.7, 30.6, 7.7]
    flops = forward_flops(LLAMA, 4096)
    assert flops["layers/mlp/gate"] == 32 * 2 * 4096 * 11008
    assert flops["layers/attention/k"] == 32 * 2 * 4096 * 4096
    assert flops[CORE] == 32 * 4 * 4096 * 4096
    assert 100 * relative_cost("fp4_mixed", LLAMA, 4096, PAPER) == pytest.approx(52.3333, abs=1e-4)
    assert 100 * relative_cost("fp4_naive", LLAMA, 4096, PAPER) == pytest.approx(35.6667, abs=1e-4)


@pytest.mark.parametrize("model", MODELS)
def test_flops_are_those_of_the_model(model):
    """Forward, dgrad and wgrad, with the head and causal attention: what utilization counts."""
    config = MODELS[model]
    flops = forward_flops(config, 512, head=True, causal=True)
    assert 3 * sum(flops.values()) == flops_per_token(config, 512)
    assert set(flops) == {*config.modules, CORE}


@pytest.mark.parametrize("policy", POLICIES)
def test_costs_lie_between_the_fastest_unit_and_bf16(policy):
    for speeds in (PAPER, CAUTIOUS):
        cost = relative_cost(policy, LLAMA, 2048, speeds)
        assert 1 / speeds.fp4 < cost <= 1
        assert (cost == 1) == (policy == "bf16")
        # The head is one more linear that no policy of the table quantizes.
        assert cost <= relative_cost(policy, LLAMA, 2048, speeds, head=True) <= 1


def test_a_product_runs_at_the_speed_of_its_wider_operand():
    e2m1, e4m3 = (RECIPES[name].fwd_x for name in ("fp4_naive", "fp8_block"))
    of = PAPER.of
    assert of(dataclasses.replace(RECIPES["bf16"], fwd_x=e2m1, fwd_w=e4m3).gemms["fwd"]) == 2
    assert of(dataclasses.replace(RECIPES["bf16"], fwd_x=e2m1).gemms["fwd"]) == 1
    # wgrad in high precision: (1/2 + 1/2 + 1) / 3.
    assert PAPER.slowness(RECIPES["fp8_rowwise_wgrad_bf16"]) == pytest.approx(2 / 3)
    slow = Speeds(bf16=2.0, fp8=1.0)  # where FP8 is slower than BF16
    assert slow.slowness(RECIPES["fp8_current"]) == 2


def test_exempt_layers_and_the_head_by_hand():
    flops = forward_flops(MODELS["gpt2_tiny"], 64, head=True)
    linears = sum(v for k, v in flops.items() if k.startswith("layers/"))
    core, head = flops[CORE], flops["lm_head"]
    tiny = MODELS["gpt2_tiny"]  # four layers: 15% rounds up to one
    expected = (linears * (1 / 4 + 3 / 4 / 4) + core) / (linears + core)
    assert relative_cost("nvfp4_mixed", tiny, 64, PAPER) == pytest.approx(expected)
    expected = (linears / 4 + core + head / 2) / (linears + core + head)
    policy = "nvfp4:head=fp8_current"
    assert relative_cost(policy, tiny, 64, PAPER, head=True) == pytest.approx(expected)
    all_exempt = relative_cost("nvfp4:bf16_first=2,bf16_last=2", tiny, 64, PAPER)
    assert all_exempt == pytest.approx(1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Speeds(fp4=0.0), "fp4=0.0 must be positive"),
        (lambda: Speeds(fp8=float("nan")), "fp8=nan must be positive"),
        (lambda: Speeds(bf16=float("inf")), "bf16=inf must be positive"),
        (lambda: forward_flops(LLAMA, 0), "seq_len=0 must be at least 1"),
        (lambda: relative_cost("fp4_mixd", LLAMA, 8, PAPER), "did you mean 'fp4_mixed'"),
        (lambda: relative_cost("nvfp4:bf16_last=40", LLAMA, 8, PAPER), "40 last layers"),
        (lambda: split_cost("bf16", {}, PAPER), "split must be positive"),
        (lambda: split_cost("bf16", {CORE: 2.0, "lm_head": -1.0}, PAPER), "split must be positive"),
        (lambda: split_cost("nvfp4_mixed", PAPER_SPLIT, PAPER), "exempts layers"),
        (lambda: split_cost("bf16", {"layers/mpl/*": 1.0}, PAPER), "unknown module 'layers/mpl"),
        (lambda: split_cost("fp4_mixed", {"layers/*": 1.0}, PAPER), "'layers/\\*' have different"),
    ],
)
def test_what_cannot_be_honored_raises(call, message):
    with pytest.raises(ValueError, match=message):
        call()
