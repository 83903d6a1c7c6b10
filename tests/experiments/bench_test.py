"""The benchmark: turns and medians by hand, its page and figures, and each table once at tiny size.

No time is asserted: what a CPU takes says nothing. What is asserted is who runs, who is refused and
why, and that figures are the quotients that they claim to be.
"""

import datetime
import functools
import itertools
import json
import math
import re
import shlex
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base, smoke
from experiments import markdown
from experiments.bench import (
    accumulation,
    decoding,
    operators,
    size_gains,
    starts,
    steps,
    telemetry,
    timing,
    torch_peers,
    training_steps,
)
from experiments.bench.operators import Limits
from experiments.bench.report import Report, Row, mean_ratio, versions, write
from experiments.bench.timing import Program, Timing, time_in_turns
from fp8jax.device import xla
from fp8jax.gemm.backends.xla import matmul_xla
from fp8jax.gemm.histories.amax_history import HISTORIES
from fp8jax.kernels.block_gemm import TuningConfig
from fp8jax.lm.model.transformer import Transformer, count_params
from fp8jax.lm.training.build import build
from fp8jax.lm.training.faults import Faults
from fp8jax.lm.training.loop import train_and_evaluate
from tests.support.commands import run_command
from tests.support.runs import tiny

pytestmark = pytest.mark.extended

QUICK = functools.partial(time_in_turns, rounds=1, seconds=0.0)
LIMITS = Limits(bf16=1e10, fp8=2e10, copy=1e9)


# Turns --------------------------------------------------------------------------------------------


class Clock:
    """Advances only as contestants say, and notes who was called."""

    def __init__(self):
        self.now, self.calls = 0.0, []

    def __call__(self) -> float:
        return self.now

    def contestant(self, name: str, times, **fields):
        """Calls take the next of `times` each, the last one for ever."""
        left = list(times)

        def call():
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return lambda: Program(call=call, wait=lambda _: None, **fields)


def test_contestants_take_turns_and_medians_are_of_rounds():
    clock = Clock()
    # The first two calls warm up, the third says how long one takes.
    entrants = {
        "a": clock.contestant("a", [9, 9, 1, 1, 5, 3]),
        "b": clock.contestant("b", [9, 9, 0.5, 2, 2, 2, 2, 4, 4]),
    }
    found = time_in_turns(entrants, rounds=3, seconds=1.0, clock=clock)
    assert clock.calls == ["a"] * 3 + ["b"] * 3 + ["a", "b", "b"] * 3
    assert found["a"] == Timing(seconds=3.0, spread=4 / 3)  # of 1, 5 and 3
    assert found["b"] == Timing(seconds=2.0, spread=1.0)  # of 2, 2 and 4


def test_items_share_the_time_of_a_call():
    clock = Clock()
    entrants = {"a": clock.contestant("a", [4.0], items=4, bytes=7)}
    found = time_in_turns(entrants, rounds=2, seconds=8.0, clock=clock)
    assert found["a"] == Timing(seconds=1.0, bytes=7)
    assert len(clock.calls) == 3 + 2 * 2


def test_a_batch_is_bounded_and_has_one_call_at_least():
    for each, calls in ((1e-9, timing._MOST_CALLS), (100.0, 1)):
        clock = Clock()
        time_in_turns({"a": clock.contestant("a", [each])}, rounds=1, seconds=1.0, clock=clock)
        assert len(clock.calls) == 3 + calls


def test_whoever_fails_is_a_reason_and_the_others_go_on():
    clock, closed = Clock(), []
    missing = lambda: (_ for _ in ()).throw(ImportError("no module\nnamed peer"))  # noqa: E731

    def tires():
        calls = iter(range(4))
        return Program(
            call=lambda: next(calls), wait=lambda _: None, close=lambda: closed.append("tires")
        )

    fine = clock.contestant("fine", [1.0], close=lambda: closed.append("fine"))
    found = time_in_turns({"missing": missing, "tires": tires, "fine": fine}, rounds=3, clock=clock)
    assert found["missing"].reason == "ImportError: no module named peer"
    assert found["tires"].reason.startswith("StopIteration") and math.isnan(found["tires"].seconds)
    assert found["fine"] == Timing(seconds=1.0)
    assert closed == ["tires", "fine"]  # what failed is gone before the others go on


def test_results_are_dropped_before_the_next_call():
    class Result:
        alive = 0

        def __init__(self):
            Result.alive += 1
            assert Result.alive == 1, "the result before is still there"

        def __del__(self):
            Result.alive -= 1

    clock = Clock()

    def call():
        clock.now += 1.0
        return Result()

    program = Program(call=call, wait=lambda _: None)
    found = time_in_turns({"a": lambda: program}, rounds=2, seconds=3.0, clock=clock)
    assert found["a"] == Timing(seconds=1.0) and Result.alive == 0


# Page and figures ---------------------------------------------------------------------------------


def report(**figures) -> Report:
    rows = [
        Row(
            case="4x4",
            name="a",
            timing=Timing(seconds=0.002, spread=0.1, bytes=2**29),
            work=4e9,
            limit=0.001,
            baseline=0.003,
        ),
        Row(case="4x4", name="b", timing=Timing(reason="ValueError: no"), work=4e9, limit=0.001),
    ]
    return Report(title="T", rate="TFLOP/s", rows=rows, figures=figures, notes=["A note."])


def test_table_by_hand():
    assert report().table().splitlines() == [
        "| case | contestant | ms | spread | TFLOP/s | of the limit | against BF16 | GiB | note |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| 4x4 | a | 2.000 | 10% | 2 | 50.0% | 1.500x | 0.50 |  |",
        "| 4x4 | b |  |  |  |  |  |  | ValueError: no |",
    ]
    bare = Report(
        title="",
        rate="GB/s",
        figures={},
        rows=[Row(case="c", name="a", timing=Timing(seconds=1.0), work=2e9)],
    )
    assert bare.table().splitlines()[0] == "| case | contestant | ms | spread | GB/s |"


def test_writers_replace_one_section_and_merge_figures(tmp_path):
    path = tmp_path / "new" / "h200"
    write(path, "step", report(x=1.0, lost=math.nan), "one")
    write(path, "gemm", report(y=2.0), "two")
    first = path.with_suffix(".md").read_text()
    write(path, "step", report(x=3.0), "three")
    page = path.with_suffix(".md").read_text()
    assert first.startswith("# Benchmarks: h200\n\n<!-- section: step -->\n\n## T\n\n```bash\none")
    assert page == first.replace("one", "three").replace("`x`: 1", "`x`: 3")
    assert page.count("<!-- section: ") == page.count("<!-- end: ") == 2
    assert f"jax {jax.__version__}" in page and "A note." in page and "lost" not in page
    figures = json.loads(path.with_suffix(".json").read_text())
    assert figures == {
        "x": {"value": 3.0, "command": "three"},
        "y": {"value": 2.0, "command": "two"},
    }
    with pytest.raises(ValueError, match="no line '<!-- end: step -->'"):
        markdown.replace_section(page.replace("<!-- end: step -->\n", ""), "step", "")


def test_mean_ratio_skips_what_has_no_time():
    pairs = [(4.0, 2.0), (8.0, 1.0), (math.nan, 1.0), (1.0, math.nan)]
    assert mean_ratio(pairs) == pytest.approx(4.0)
    assert math.isnan(mean_ratio([(math.nan, 1.0)]))


# The tables ---------------------------------------------------------------------------------------


@pytest.fixture
def without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)


@pytest.fixture
def hasty(monkeypatch):
    """Programs that compile in half the time: how fast they run is not asked."""
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    monkeypatch.setattr(xla, "compiler_options", lambda **_: options)


def by_name(made: Report) -> dict[str, Timing]:
    return {row.name: row.timing for row in made.rows}


def ran(made: Report) -> set[str]:
    return {name for name, timing in by_name(made).items() if not timing.reason}


def test_limits_are_measured():
    limits = operators.measure_limits(QUICK, 64)
    assert min(limits.bf16, limits.fp8, limits.copy) > 0
    assert limits.matrix(True) == limits.fp8 and limits.matrix(False) == limits.bf16


@pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated:DeprecationWarning")
def test_gemm(without_torch, hasty):
    policies = ["bf16", "fp8_delayed", "fp8_delayed@pallas"]
    with jax.numpy_rank_promotion("allow"):  # flax does
        made = operators.measure_gemm(["256x128x128"], policies, QUICK, LIMITS, peers=True)
    assert ran(made) == {
        "JAX bf16",
        "JAX f8, one scale",
        "linear bf16",
        "linear fp8_delayed",
        "linear fp8_delayed, seeding itself",
        "linear flax Fp8DotGeneralOp",
        "linear flax Fp8DirectDotGeneralOp",
    }
    found = by_name(made)
    refused = found["linear fp8_delayed@pallas"].reason
    assert refused.startswith("NotImplementedError: backend 'pallas' cannot run")
    assert "torch" in found["torch bf16"].reason and "ours 1x128 by 128x128" in found
    rows = {row.name: row for row in made.rows}
    product, linear = 2 * 256 * 128 * 128, 6 * 256 * 128 * 128
    assert rows["JAX bf16"].limit == product / LIMITS.bf16
    assert rows["linear fp8_delayed"].limit == linear / LIMITS.fp8
    assert rows["linear fp8_delayed"].baseline == found["linear bf16"].seconds
    assert not made.known  # neither ours nor theirs had a time
    with pytest.raises(ValueError, match="unknown policy 'fp8_blok'"):
        operators.measure_gemm(["256x128x128"], ["fp8_blok"], QUICK, LIMITS, peers=False)


def test_accumulation():
    """On a CPU both sum in float32: at most 384 roundings of 2^-24, so below 2.3e-5 of what is
    summed up. That is 16 times what sums around zero amount to, for 384 products."""
    made = accumulation.measure_accumulation(["256x128x384"], QUICK, LIMITS)
    cases = [(row.case.split()[0], row.name) for row in made.rows]
    assert cases == [(g, n) for g in ("fwd", "dgrad", "wgrad") for n in ("bf16", "fast", "split")]
    assert not any(row.timing.reason for row in made.rows)
    assert {row.work for row in made.rows} == {2 * 256 * 128 * 384}
    errors = {n: v for n, v in made.known.items() if n.startswith("accumulation_error")}
    assert set(errors) == {f"accumulation_error/{g}/{how}" for g, how in cases if how != "bf16"}
    assert all(0 < error < 16 * 2.3e-5 for error in errors.values())
    assert re.search(r"\| fwd 256x128x384 \| split .* not shown; \S+, positive", made.table())


def test_errors_of_sums_by_hand(monkeypatch):
    """Of equal products, fast loses one half."""
    half = lambda a, b, dtype, how: matmul_xla(a, b, dtype, how) / (2 if how == "fast" else 1)  # noqa: E731
    monkeypatch.setattr(accumulation, "matmul_xla", half)
    monkeypatch.setattr(accumulation, "normal", lambda seed, shape: jnp.ones(shape, jnp.bfloat16))
    made = accumulation.measure_accumulation(["32x16x48"], QUICK, LIMITS)
    errors = {n: v for n, v in made.known.items() if n.startswith("accumulation_error")}
    expected = {n: 0.5 if n.endswith("fast") else 0.0 for n in errors}
    assert len(errors) == 6 and errors == pytest.approx(expected, abs=2**-22)  # scales are rounded


def test_figures_of_accumulation_by_hand(monkeypatch):
    """Split takes 1.5 times as long in one shape and 6 times in another: 3 times in the mean."""
    sums = itertools.count()
    by_hand = lambda gemm, how: accumulation._Sums(shown=how, error=next(sums), positive=2.0)  # noqa: E731
    monkeypatch.setattr(accumulation, "_sums_of", by_hand)
    splits = iter([1.0, 2.0, 3.0, 1.0, 2.0, 12.0])  # of fwd, dgrad and wgrad of both shapes

    def timed(entrants):
        split = next(splits)
        return {name: Timing(seconds=split if name == "split" else 2.0) for name in entrants}

    made = accumulation.measure_accumulation(["32x16x48", "16x16x16"], timed, LIMITS)
    assert made.known["accumulation_cost/wgrad"] == pytest.approx(3.0)
    assert made.known["accumulation_cost/fwd"] == pytest.approx(0.5)
    assert made.known["accumulation_error/dgrad/split"] == 9  # 3 and 9: the largest
    assert "| wgrad 16x16x16 | split |" in made.table() and "split; 1.1e+01, positive 2.0e+00" in (
        made.table()
    )


@pytest.mark.parametrize("shape", ["256x128", "256x128x0", "axbxc"])
def test_a_wrong_shape_raises(shape):
    with pytest.raises(ValueError, match="expected MxKxN, positive"):
        operators.measure_gemm([shape], [], QUICK, LIMITS, peers=False)


def even(entrants) -> dict[str, Timing]:
    """A race that everyone finishes in a second, and `pallas` in half of one; nobody is called."""
    return {n: Timing(seconds=0.5 if n.endswith("pallas") else 1.0) for n in entrants}


def test_figures_of_products_and_quantizers_by_hand():
    made = operators.measure_gemm(["256x128x128"], [], even, LIMITS, peers=True)
    assert made.figures == {"block_gemm_vs_cublas": 1.0}
    # Bytes read and written of 256 x 128 numbers: bfloat16 or float32 in, one a code out, and a
    # float32 scale for the tensor, for 128 or for 16,384 numbers. SwiGLU reads two and gives one
    # code, its gradient reads three and gives both codes of two and one of h.
    n = 256 * 128
    work = {
        "one scale, both": 4 * n + 8,
        "one scale, float32": 5 * n + 4,
        "one scale, float32, transposed": 5 * n + 4,
        "1x128, both": 4 * n + 8 * n / 128,
        "128x128, float32": 5 * n + 4 * 2,
        "128x128, float32, transposed": 5 * n + 4 * 2,
        "swiglu, one scale": 5 * n,
        "swiglu_grad, one scale": 11 * n,
    }
    made = operators.measure_quantize(["256x128"], even, LIMITS)
    assert {row.name.rpartition(": ")[0]: row.work for row in made.rows} == work
    speed = math.exp(np.mean([math.log(bytes_ / 0.5 / LIMITS.copy) for bytes_ in work.values()]))
    assert made.figures == {"quantize_bandwidth": pytest.approx(speed)}


def test_sweep():
    made = operators.sweep_gemm(["256x128x128"], QUICK, LIMITS)
    assert len(made.rows) == sum(map(len, operators.TUNINGS.values())) and not ran(made)
    assert all(isinstance(t, TuningConfig) for ts in operators.TUNINGS.values() for t in ts)


def test_attention(without_torch):
    names = ["xla", "cudnn_causal"]
    made = operators.measure_attention(
        ["2x64x4x2x32"], names, QUICK, LIMITS, counts=[1, 5], peers=True
    )
    assert ran(made) == {"xla"} and made.rows[0].timing.bytes > 0
    assert made.rows[-1].case == "2x64x4x2x32, 5 documents a row" and not made.figures
    assert "needs an NVIDIA GPU" in by_name(made)["cudnn_causal"].reason
    assert made.rows[-1].name.startswith("torch ") and "torch" in made.rows[-1].timing.reason
    assert made.rows[0].work == 3 * (2 * 2 * 64 * 64 * 4 * 32 * 2 / 2)


def test_documents_of_the_attention_benchmark():
    segments = np.asarray(operators.documents(3, 64, 5))
    assert (segments[:, 0] == 1).all() and (segments[:, -1] == 5).all()
    assert np.isin(np.diff(segments, axis=1), (0, 1)).all()


def test_step(hasty):
    policies = ["bf16", "fp8_block", "fp8_current@pallas"]
    made = steps.measure_step(
        ["tiny"], policies, QUICK, LIMITS, attention="xla", remat="dots", peers=False
    )
    assert ran(made) == {"bf16", "fp8_block"}
    found = by_name(made)
    assert found["fp8_current@pallas"].reason.startswith("NotImplementedError")
    bf16, fp8 = found["bf16"], found["fp8_block"]
    assert made.known == {
        "step_speedup_tiny_dots/fp8_block": bf16.seconds / fp8.seconds,
        "step_memory_tiny_dots/fp8_block": fp8.bytes / bf16.bytes,
    }


def test_figures_of_steps_by_hand():
    times = {"bf16": 3.0, "fp8_block": 2.0, "torch.compile bf16": 4.0}

    def timed(entrants):
        return {
            n: Timing(seconds=times[n], bytes=int(times[n])) if n in times else Timing(reason="no")
            for n in entrants
        }

    settings = {"attention": "xla", "peers": True}
    small = {"tiny": steps.STEPS["tiny"], "d4096": steps.STEPS["tiny"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "STEPS", small)
        patch.setattr(steps, "_init_params", lambda config: {})  # nobody is called
        made = steps.measure_step(
            ["d4096", "tiny_1x32"], ["bf16", "fp8_block"], timed, LIMITS, **settings
        )
    assert made.known == {
        f"{name}{suffix}{end}": value
        for suffix in ("", "_tiny_1x32")
        for name, end, value in (
            ("step_speedup", "/fp8_block", 1.5),
            ("step_memory", "/fp8_block", 2 / 3),
            ("bf16_vs_torch", "", 4 / 3),
        )
    }
    names = [row.name for row in made.rows if row.case == "d4096"]
    assert names == [*times, "torchao tensorwise", "torchao rowwise"]


def test_gains(hasty, tmp_path):
    """On a CPU every kind runs; the file holds the printed times."""
    shapes = ["64x128x128", "64x128x256", "64x256x256"]
    made = size_gains.measure_gains(shapes, QUICK)
    policies = ["bf16", "fp8_delayed", "fp8_current", "fp8_block", "fp8_rowwise"]
    assert [(row.case, row.name) for row in made.rows] == list(itertools.product(shapes, policies))
    assert ran(made) == set(policies) and not made.figures
    size_gains.write(tmp_path / "gains.json", made, "a command")
    text = (tmp_path / "gains.json").read_text()
    found = json.loads(text)
    facts = (found["device"], found["versions"], found["command"])
    assert facts == ("cpu", versions(), "a command")
    assert tuple(found["columns"]) == size_gains.COLUMNS
    rows = {(f"{m}x{k}x{n}", kind): times for kind, m, k, n, *times in found["rows"]}
    assert len(rows) == 3 * 4
    for row in made.rows:
        if row.name != "bf16":
            (kind,) = (kind for kind, name in size_gains.KINDS.items() if name == row.name)
            times = [round(1e6 * seconds, 2) for seconds in (row.baseline, row.timing.seconds)]
            assert rows[row.case, kind] == times


def test_a_kind_that_did_not_run_everywhere_is_left_out_of_the_table(hasty, tmp_path):
    turns = []

    def timed(entrants):
        turns.append(list(entrants))
        no_block = Timing(reason="out of memory") if len(turns) == 2 else Timing(seconds=0.5)
        return {n: Timing(seconds=1.0) for n in entrants} | {"fp8_block": no_block}

    made = size_gains.measure_gains(["8x16x16", "8x16x32", "8x32x32"], timed)
    size_gains.write(tmp_path / "gains.json", made, "")
    rows = json.loads((tmp_path / "gains.json").read_text())["rows"]
    assert {row[0] for row in rows} == {"delayed", "current", "row"}
    assert len(turns) == 3 and "out of memory" in made.table()


def test_the_shapes_of_gains_are_a_grid():
    assert len(size_gains.SHAPES) == 30 == len(set(size_gains.SHAPES))
    assert {"1024x1024x1024", "4096x2048x8192", "16384x8192x8192"} <= set(size_gains.SHAPES)


def test_step_shapes():
    model, rows, length = steps.step_shape("d4096_16x1024")
    assert (model.d_model, model.d_ff, rows, length) == (4096, 14_336, 16, 1024)
    assert steps.step_shape("d1536")[1:] == (2, 8192)
    with pytest.raises(ValueError, match="unknown shape 'd4097'"):
        steps.step_shape("d4097")


def test_the_limit_of_a_step_is_its_products_and_attention():
    """Weights of the layer and the head by hand, six FLOPs a token for each."""
    config, rows, length = steps.step_shape("tiny")
    weights = 128 * 128 * 2 + 2 * 128 * 64 + 3 * 128 * 256 + 128 * 256
    floor = steps.step_floor(config, rows, length, "xla", even, LIMITS)
    products = 6 * weights * 2 * 64
    assert floor[False] == pytest.approx({"matmuls": products / LIMITS.bf16, "attention": 1.0})
    assert floor[True] == pytest.approx({"matmuls": products / LIMITS.fp8, "attention": 1.0})


def test_a_delayed_policy_starts_from_what_its_seeding_step_saw():
    config, rows, length = steps.step_shape("tiny")
    batch = jax.tree.map(jnp.asarray, steps.random_batch(config, rows, length))
    params = steps._init_params(config)
    model = Transformer(config, "fp8_delayed")
    state = steps._seeded(model, params, batch)
    histories = jax.tree.leaves(state.histories)
    assert histories and all(bool(jnp.all(h[..., 0] > 0)) for h in histories)
    assert jax.tree.structure(state.histories) == jax.tree.structure(
        jax.eval_shape(model.init, state.key, *([batch["tokens"]] * 3), state.key)[HISTORIES]
    )


def test_training(monkeypatch, hasty):
    config = base.get_config()
    config.model_overrides.update(
        d_model=32, n_layers=1, n_heads=2, n_kv_heads=2, d_ff=64, head_dim=16, mlp="gelu_tanh"
    )
    config.update(seq_len=32, batch_size=4, grad_accum=1)
    monkeypatch.setattr(training_steps, "step_floor", lambda *_, **__: {True: {"matmuls": 0.001}})
    llama_tiny = build(config, jax.devices()[:1]).stages[0].model.config
    made = training_steps.measure_training(config, ["fp8_delayed"], QUICK, LIMITS)
    found = by_name(made)
    assert ran(made) == set(found) == {"fp8_delayed", "fp8_delayed, no optimizer", "optimizer"}
    whole, step, optimizer = (t.seconds for t in found.values())
    assert made.known == {
        "train_tokens_per_s/llama_tiny/fp8_delayed": pytest.approx(4 * 32 / whole),
        "train_vs_bench": (step + optimizer) / whole,
    }
    assert found["fp8_delayed"].bytes > 3 * 4 * count_params(llama_tiny)
    assert made.rows[0].note.endswith(" tokens/s") and not made.rows[1].note


def test_training_on_two_devices_and_packed_rows(monkeypatch, hasty):
    """Each device has half the parameters and half the rows."""
    config = base.get_config()
    config.model_overrides.update(
        d_model=64, n_layers=1, n_heads=2, n_kv_heads=2, d_ff=128, head_dim=32
    )
    config.update(seq_len=32, batch_size=4, mesh="fsdp")
    asked = []
    monkeypatch.setattr(
        training_steps,
        "step_floor",
        lambda *a, count, **_: asked.append((a[1], count)) or {False: {"matmuls": 0.001}},
    )
    made = {
        n: training_steps.measure_training(config, ["bf16"], QUICK, LIMITS, devices=n, count=3)
        for n in (1, 2)
    }
    assert ran(made[2]) == {"bf16", "bf16, no optimizer", "optimizer"}
    assert made[2].rows[0].case == "llama_tiny 4x32, 3 documents a row, 2 devices"
    assert made[2].rows[0].work == made[1].rows[0].work / 2
    assert 0.4 < by_name(made[2])["bf16"].bytes / by_name(made[1])["bf16"].bytes < 0.75
    assert asked == [(4, 3), (4, 3)]
    assert made[2].rows[0].limit == made[1].rows[0].limit / 2


def test_training_needs_the_devices():
    with pytest.raises(ValueError, match="--devices=9: this process has 8"):
        training_steps.measure_training(base.get_config(), ["bf16"], QUICK, LIMITS, devices=9)


def test_packed_rows_of_steps():
    config, rows, length = steps.step_shape("tiny")
    batch = steps.random_batch(config, rows, length, 3)
    for segments, positions in zip(batch["segments"], batch["positions"], strict=True):
        assert set(segments) == {1, 2, 3}
        expected = [np.arange(np.sum(segments == n)) for n in (1, 2, 3)]
        np.testing.assert_array_equal(positions, np.concatenate(expected))


def one_layer_of_width_32():
    config = base.get_config()
    config.model_overrides.update(
        d_model=32, n_layers=1, n_heads=2, n_kv_heads=2, d_ff=64, head_dim=16
    )
    config.update(seq_len=32, batch_size=2)
    return config


def test_settings_are_values_of_the_config(monkeypatch, hasty):
    """Each policy runs with each of them: with more rows a step holds more. Another optimizer has
    another state."""
    config = one_layer_of_width_32()
    no_limits = dict.fromkeys([False, True], {})
    monkeypatch.setattr(training_steps, "step_floor", lambda *_, **__: no_limits)
    settings = ["defaults", "batch_size=8,remat=full,optimizer.name=muon"]
    policies = ["bf16", "fp8_current"]
    made = training_steps.measure_training(config, policies, QUICK, LIMITS, settings=settings)
    names = [f"{policy}, {setting}" for policy in ("bf16", "fp8_current") for setting in settings]
    assert [row.name for row in made.rows] == names and ran(made) == set(names)
    assert [row.work / made.rows[0].work for row in made.rows] == [1, 4, 1, 4]
    assert all(
        by_name(made)[f"{p}, {settings[1]}"].bytes > by_name(made)[f"{p}, defaults"].bytes
        for p in ("bf16", "fp8_current")
    )
    assert made.figures["defaults_vs_best/llama_tiny/fp8_current/1"] >= 1


def test_a_step_that_does_not_fit_says_so_and_the_others_are_measured(monkeypatch, hasty):
    """256 rows have 10 MiB of logits, two rows a step of 1 MiB."""
    monkeypatch.setattr(training_steps, "step_floor", lambda *_, **__: {False: {}})
    monkeypatch.setattr(training_steps, "memory_limit", lambda mesh: 2**23)
    made = training_steps.measure_training(
        one_layer_of_width_32(), ["bf16"], QUICK, LIMITS, settings=["batch_size=256", "defaults"]
    )
    first, second = made.rows
    assert re.fullmatch(r"MemoryError: does not fit: 0\.\d\d of 0\.01 GiB", first.timing.reason)
    assert second.timing.seconds > 0 and not second.timing.reason
    assert "bf16, defaults: remat=none, unroll=1." in made.notes
    assert made.figures["defaults_vs_best/llama_tiny/bf16/1"] == 1


def test_what_a_failed_call_has_lost_is_made_again():
    case = training_steps._Case("bf16")
    training = training_steps._Training(one_layer_of_width_32(), [case], 1, 1)
    with jax.set_mesh(training.runs[case].mesh):
        before = training.state(case)  # donated to a call that fails
        after = training.state(case)
    assert jax.tree.structure(before) == jax.tree.structure(after)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("unroll", "'unroll' is not KEY=VALUE"),
        ("unrol=2", "'unrol=2' is not KEY=VALUE of a key"),
        ("mesh_axis.fsdp=2", "is not KEY=VALUE of a key"),
        ("unroll.fsdp=2", "is not KEY=VALUE of a key"),
        ("unroll=two", "'unroll=two': .*int"),
    ],
)
def test_a_wrong_setting_is_refused(setting, message):
    config = base.get_config()
    with pytest.raises(ValueError, match=message):
        training_steps.measure_training(config, ["bf16"], QUICK, LIMITS, settings=[setting])


def _work(tokens: int) -> training_steps._Work:
    return training_steps._Work(tokens=tokens, flops=1.0, limit={})


def test_figures_of_training_steps_take_the_name_of_the_command():
    times = {"bf16": 4.0, "fp8_block": 3.0}
    found = {name: Timing(seconds=t, bytes=int(10 * t)) for name, t in times.items()}
    work = {training_steps._Case(name): _work(6) for name in times}
    assert training_steps._training_figures("qwen2.5_1.5b", found, work, 1, "infir2") == {
        "train_tokens_per_s/qwen2.5_1.5b/bf16": 1.5,
        "infir2_tokens_per_s": 2.0,
        "infir2_time": 0.75,
        "infir2_memory": 0.75,
    }
    parts = {"bf16, no optimizer": 3.0, "fp8_block, no optimizer": 2.0, "optimizer": 0.5}
    found |= {name: Timing(seconds=t) for name, t in parts.items()}
    assert training_steps._against_parts(list(times), found) == pytest.approx(2.5 / 3.0)


def test_figures_of_training_steps_take_the_best_setting_of_each_side():
    """Times of a token, so that 8 tokens in 5 s are better than 4 in 3; memory by itself."""
    rows = {
        ("bf16", "defaults"): (3.0, 4, 10),
        ("bf16", "b=8"): (5.0, 8, 30),
        ("fp8", "defaults"): (2.0, 4, 5),
        ("fp8", "b=8"): (math.nan, 8, None),
    }
    cases = {training_steps._Case(*key): value for key, value in rows.items()}
    found = {case.name: Timing(seconds=s, bytes=size) for case, (s, _, size) in cases.items()}
    work = {case: _work(tokens) for case, (_, tokens, _) in cases.items()}
    assert training_steps._training_figures("m", found, work, 2) == {
        "train_tokens_per_s/m/bf16": 1.6,
        "train_tokens_per_s/m/fp8": 2.0,
        "train_time/m/fp8": pytest.approx(0.8),
        "train_memory/m/fp8": 0.5,
        "defaults_vs_best/m/bf16/2": pytest.approx(1.2),
        "defaults_vs_best/m/fp8/2": 1.0,
    }


# Peers --------------------------------------------------------------------------------------------


def test_torch_without_a_gpu_is_a_reason(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = QUICK(torch_peers.gemms(256, 256, 256))
    assert all("sees no CUDA device" in t.reason for t in found.values())


def test_torchs_model_is_the_same_model(monkeypatch):
    """The same parameters in number, and where there is torch, the loss of the same weights."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch_peers, "DEVICE", "cpu")
    config, rows, length = steps.step_shape("tiny")
    theirs = torch_peers._model(torch, config, length).float()
    assert sum(p.numel() for p in theirs.parameters()) == count_params(config)
    params = jax.tree.map(np.asarray, steps._init_params(config))
    layer = jax.tree.map(lambda leaf: torch.tensor(leaf[0]), params["layers"])
    transposed = lambda *names: torch.cat([layer_of[n]["kernel"] for n in names], 1).T  # noqa: E731
    layer_of = layer["attention"] | layer["mlp"]
    with torch.no_grad():
        theirs.embedding.weight.copy_(torch.tensor(params["embedding"]))
        theirs.head.weight.copy_(torch.tensor(params["lm_head"]["kernel"]).T)
        ours = theirs.layers[0]
        ours.qkv.weight.copy_(transposed("q", "k", "v"))
        ours.o.weight.copy_(transposed("o"))
        ours.gate_up.weight.copy_(transposed("gate", "up"))
        ours.down.weight.copy_(transposed("down"))
    batch = jax.tree.map(jnp.asarray, steps.random_batch(config, rows, length))
    model = Transformer(config, dtype=jnp.float32)
    state = steps._seeded(model, params, batch)
    loss = jax.jit(lambda s, b: steps.accumulate(model, s, b, 1)[0])(state, batch)
    tokens, targets = (torch.tensor(np.asarray(batch[k])).long() for k in ("tokens", "targets"))
    # Both in float32, whose sums differ in order only: some hundred roundings of 2^-24.
    assert float(theirs(tokens, targets).detach()) == pytest.approx(float(loss), rel=2**-16)


# Decoding -----------------------------------------------------------------------------------------


def test_decoding_beside_bf16():
    policies = ["bf16", "fp8_rowwise", "fp8_delayed", "fp8_block:only=fwd_w"]
    made = decoding.measure_decoding(["qwen2_tiny_1x16x4"], policies, QUICK, LIMITS, cache="fp8")
    assert [(row.case, row.name) for row in made.rows] == [
        (f"qwen2_tiny_1x16x4 {kind}", policy)
        for kind in ("prefill", "decode")
        for policy in policies
    ]
    assert not any(row.timing.reason for row in made.rows)
    bf16, rowwise = made.rows[4], made.rows[5]
    share = bf16.work / LIMITS.copy / bf16.timing.seconds
    assert made.figures["decode_share/qwen2_tiny_1x16x4/bf16"] == pytest.approx(share)
    speedup = bf16.timing.seconds / rowwise.timing.seconds
    assert made.figures["decode_speedup/qwen2_tiny_1x16x4/fp8_rowwise"] == pytest.approx(speedup)


def test_bytes_of_a_decoded_token():
    """Four layers of 128 wide: 128 x (128 + 2 x 64) and 128 x 128 of attention, 3 x 128 x 384 of
    the MLP, with 256 biases and 256 scales of norms; then a norm and a tied head of 320 words. Keys
    and values of a token have 2 heads of 32 codes and a float32 scale each."""
    layer = 128 * 256 + 128 * 128 + 3 * 128 * 384
    vectors = 4 * (256 + 256) + 128  # in the model's dtype, as all random parameters
    cache = 18 * 4 * 2 * 2 * (32 + 4)  # the mean of 16 to 20 tokens
    found = {}
    for policy in ("bf16", "fp8_rowwise"):
        shape = decoding.shape_of("qwen2_tiny_1x16x4")
        params = decoding.random_params(shape.config)
        one = decoding._Contestant(shape, policy, "fp8", params)
        one.prefill()
        found[policy] = one.bytes
    assert found["bf16"] == 2 * (4 * layer + vectors + 320 * 128) + cache
    channels = 4 * (256 + 128 + 2 * 384 + 128)  # a scale for each column
    assert found["fp8_rowwise"] == (4 * layer + 4 * channels + 2 * (vectors + 320 * 128) + cache)


@pytest.mark.parametrize(
    "shape, message",
    [
        ("llama_tiny", "expected MODEL_BxPxT"),
        ("llama_tiny_1x2", "expected BxPxT"),
        ("lama_1x2x3", "unknown model 'lama'"),
    ],
)
def test_shapes_of_decoding(shape, message):
    with pytest.raises(ValueError, match=message):
        decoding.shape_of(shape)


# The command --------------------------------------------------------------------------------------


def test_command_prints_and_keeps(tmp_path):
    flags = ["quantize", "--tiny", "--rounds=1", "--seconds=0", f"--output={tmp_path}"]
    done = run_command("bench", *flags)
    assert done.returncode == 0, done.stderr
    command = shlex.join(["python", "-m", "experiments.bench", *flags])
    assert command in done.stdout and "| 256x128 | 1x128, both: xla |" in done.stdout
    name = f"cpu_{datetime.date.today():%Y_%m}"
    page = tmp_path.joinpath(f"{name}.md").read_text()
    assert done.stdout.strip() in page and "<!-- section: quantize -->" in page
    assert json.loads(tmp_path.joinpath(f"{name}.json").read_text()) == {}
    assert re.search(r"pallas \|  \|  .*NotImplementedError", page)


def test_command_writes_the_times_by_size(tmp_path):
    flags = ["gains", "--tiny", "--rounds=1", "--seconds=0", f"--output={tmp_path}"]
    done = run_command("bench", *flags)
    assert done.returncode == 0, done.stderr
    assert "| 64x128x256 | fp8_block |" in done.stdout
    rows = json.loads(tmp_path.joinpath("cpu_gains.json").read_text())["rows"]
    shapes = [(64, 128, 128), (64, 128, 256), (64, 256, 256)]
    assert [tuple(row[:4]) for row in rows] == [
        (kind, *shape) for kind in size_gains.KINDS for shape in shapes
    ]


def test_command_refuses_in_one_line():
    done = run_command("bench", "quantize", "--remat=full")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: --remat is not for quantize\n"


def test_cost_of_telemetry(data):
    small = dict(d_model=32, n_layers=1, n_heads=2, n_kv_heads=2, d_ff=64, mlp="gelu")
    config = tiny(
        data, num_steps=8, telemetry__every=4, optimizer__warmup_steps=0, unroll=1, batch_size=8
    )
    config.model_overrides.update(small)
    made = telemetry.measure_telemetry(config)
    assert [row.name for row in made.rows][:2] == [
        "run without telemetry",
        "run with telemetry every 4 steps",
    ]
    seconds = [row.timing.seconds for row in made.rows]
    without, with_telemetry = seconds[:2]
    parts_off, parts_on, (compiling, step, sampled) = seconds[2:5], seconds[5:8], seconds[8:]
    assert sum(parts_off) == pytest.approx(without)
    assert sum(parts_on) == pytest.approx(with_telemetry)
    assert min(*parts_off, *parts_on, compiling, step, sampled) > 0
    assert made.known == {
        "telemetry_cost": with_telemetry / without - 1,
        "telemetry_cost_steps": (parts_on[1] - parts_off[1]) / without,
        "telemetry_sample": sampled / step - 1,
    }
    assert "run with telemetry" in made.section("python -m experiments.bench telemetry")


def test_a_run_that_was_stopped_says_nothing_of_the_cost(data, monkeypatch):
    stopped = functools.partial(train_and_evaluate, faults=Faults.parse("sigterm@1"))
    monkeypatch.setattr(telemetry, "train_and_evaluate", stopped)
    config = tiny(data, num_steps=8, telemetry__every=4, unroll=1, batch_size=8)
    config.model_overrides.update(d_model=32, n_layers=1, n_heads=2, n_kv_heads=2, d_ff=64)
    with pytest.raises(RuntimeError, match="ended at step 2 of 3, reason 'SIGTERM': nothing is"):
        telemetry.measure_telemetry(config)


def test_what_a_sampled_step_takes_beyond_a_step():
    """Of 3 s on the device: the host is busy for 1 s, which the device has worked ahead."""
    times = dict.fromkeys(range(4, 12), 2.0) | {8: 2.0 + 3 + 1, 9: 2.0 - 1}
    run = telemetry._Run(whole=40.0, compiling=9.0, telemetry=3.0, steps=times)
    assert run.sampled(4) == [2.0, 5.0]
    assert (run.stepping, run.rest) == (19.0, 12.0)


def test_cost_of_telemetry_needs_two_samples(data):
    with pytest.raises(ValueError, match="telemetry needs --config.telemetry.every"):
        telemetry.measure_telemetry(tiny(data))
    with pytest.raises(ValueError, match="num_steps=7 has fewer than two samples"):
        telemetry.measure_telemetry(tiny(data, num_steps=7, telemetry__every=4))


def test_a_cached_start_compiles_less(data, monkeypatch):
    """Two processes of a run with one layer, which end at their third step; the second finds what
    the first has compiled."""
    start, compiled = starts._start, []

    def watched(arguments, cache, workdir):
        try:
            return start(arguments, cache, workdir)
        finally:
            compiled.append({file.name for file in cache.iterdir()})

    monkeypatch.setattr(starts, "_start", watched)
    monkeypatch.delenv("XLA_FLAGS")  # of several CPUs, which cache nothing
    arguments = [
        "--config=configs/smoke.py",
        "--config.model_overrides.n_layers=1",
        "--config.num_steps=1000000",
        f"--config.data={data[0]}",
        f"--config.cache_dir={data[1]}",
    ]
    config = smoke.get_config()
    config.data, config.cache_dir = data
    made = starts.measure_starts(config, arguments, ["bf16"])
    assert [row.name for row in made.rows] == ["bf16, cold", "bf16, cached"]
    cold, cached = (row.timing.seconds for row in made.rows)
    assert made.figures == {
        "start_cold/llama_tiny/bf16": cold,
        "start_cached/llama_tiny/bf16": cached,
    }
    assert 0 < float(made.rows[0].note.split()[3]) < cold
    assert len(compiled[1] - compiled[0]) < len(compiled[0])


def test_compiling_on_a_mesh_twice(data, monkeypatch):
    """On eight CPUs, for which programs of a mesh are never stored: both runs compile them."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    changes = {
        "model_overrides.n_layers": 1,
        "num_steps": 1000000,
        "mesh": "fsdp",
        "data": data[0],
        "cache_dir": data[1],
    }
    arguments = [f"--config.{key}={value}" for key, value in changes.items()]
    config = smoke.get_config()
    config.update_from_flattened_dict(changes)
    made = starts.measure_mesh_compile(
        config, ["--config=configs/smoke.py", *arguments], "fp8_delayed"
    )
    assert [row.name for row in made.rows] == ["fp8_delayed, cold", "fp8_delayed, second"]
    seconds = [row.timing.seconds for row in made.rows]
    assert list(made.figures) == ["mesh_compile/cold", "mesh_compile/second"]
    assert list(made.figures.values()) == seconds
    for row in made.rows:
        until, compiling = map(float, re.findall(r"([\d.]+) s;", row.note)[:2])
        assert 0 < row.timing.seconds < until and abs(compiling - row.timing.seconds) < 0.1
    assert not re.search(r"[1-9]\d* programs stored", made.rows[1].note)


def test_a_start_that_fails_says_why(data):
    config = smoke.get_config()
    config.data, config.cache_dir = data
    with pytest.raises(RuntimeError, match=r"before step 3: (?s:.)*no file 'configs/none.py'"):
        starts.measure_starts(config, ["--config=configs/none.py"], ["bf16"])
