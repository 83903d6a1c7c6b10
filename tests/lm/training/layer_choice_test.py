"""The default of `remat` and `unroll`: the estimate, the choice, what a run records and resumes."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from configs import base
from fp8jax.device import hardware
from fp8jax.lm.model.models import MODELS
from fp8jax.lm.records.checkpoint import Checkpointer
from fp8jax.lm.training import build as building
from fp8jax.lm.training import layer_choice
from fp8jax.lm.training.build import build
from fp8jax.lm.training.console import start_lines
from fp8jax.lm.training.layer_choice import Sizes, choose_layers, saved_bytes, step_bytes
from fp8jax.lm.training.loop import train_and_evaluate
from fp8jax.lm.training.resume import as_begun
from tests.support.runs import corpus, one_layer, tiny

GIB = 2**30

# The estimate ------------------------------------------------------------------------------------

PARAMETERS = {
    "llama_125m": 134_105_856,
    "qwen2.5_1.5b": 1_543_714_304,
    "qwen2.5_7b": 7_615_616_512,
    "llama3_8b": 8_030_261_248,
}


def sizes(
    model: str,
    policy: str = "bf16",
    rows: int = 1,
    seq_len: int = 8192,
    gpus: int = 1,
    tensor: int = 1,
    seeds: bool = False,
) -> Sizes:
    """Of a step on each GPU of mesh=fsdp or tensor, with AdamW and attention=flash, on a Hopper."""
    c, code = MODELS[model], 2 if policy == "bf16" else 1
    share = PARAMETERS[model] // (gpus * tensor)
    each = dict.fromkeys(c.linears, code)
    return Sizes(
        shape=c,
        tokens=rows * seq_len,
        tensor=tensor,
        fsdp=gpus,
        codes=each,
        weights=each,
        fused=policy != "bf16",
        attention=c.n_heads // tensor * (2 * c.head_dim + 4),
        whole_logits=False,
        state=12 * share,
        gradients=4 * share,
        masters=0,
        accumulates=False,
        seeds=seeds,
    )


QWEN = dict(model="qwen2.5_1.5b", rows=4, seq_len=4096)
SEEDS = dict(policy="fp8_delayed", seeds=True)


@pytest.mark.parametrize(
    ("setting", "remat", "unroll", "gib"),
    [
        # Totals of steps compiled for H200s (docs/results/layer_choice.md).
        (QWEN | dict(policy="fp8_delayed"), "none", 1, 48.53),
        (QWEN | dict(policy="fp8_delayed"), "quantized", 1, 45.98),
        (QWEN | dict(policy="fp8_delayed"), "dots", 1, 44.67),
        (QWEN | dict(policy="fp8_delayed"), "full", 1, 26.24),
        (QWEN, "none", 1, 57.03),
        (QWEN, "quantized", 1, 54.24),
        (QWEN, "dots", 1, 43.93),
        (QWEN, "full", 1, 26.32),
        (QWEN | dict(policy="fp8_delayed", gpus=4), "none", 1, 33.65),
        (QWEN | dict(gpus=4), "none", 1, 43.04),
        (QWEN | dict(gpus=4), "none", 28, 40.51),
        (dict(model="llama3_8b", policy="fp8_delayed", gpus=4), "none", 1, 61.36),
        (dict(model="llama3_8b", policy="fp8_delayed", gpus=4), "dots", 1, 55.31),
        (dict(model="llama3_8b", policy="fp8_delayed", gpus=4), "full", 1, 36.31),
        (dict(model="llama3_8b", gpus=4), "none", 1, 72.61),
        # Those of programs that seed histories.
        (QWEN | SEEDS, "none", 28, 52.26),
        (QWEN | SEEDS, "quantized", 28, 50.40),
        (QWEN | SEEDS, "dots", 28, 45.37),
        (QWEN | SEEDS, "full", 28, 27.35),
        (QWEN | SEEDS | dict(gpus=2), "none", 28, 43.21),
        (QWEN | SEEDS | dict(gpus=4), "none", 28, 37.48),
        (dict(model="llama3_8b", gpus=4) | SEEDS, "none", 32, 64.86),
        # Totals of steps on H200s (docs/benchmarks/h200_2026_11.md).
        (QWEN, "none", 28, 55.23),
        (QWEN | dict(policy="fp8_block"), "none", 28, 43.87),
        (QWEN | dict(policy="fp8_block"), "none", 1, 48.59),
        (QWEN | dict(gpus=2), "none", 28, 45.53),
        (QWEN | dict(gpus=2), "none", 1, 48.66),
        (dict(model="qwen2.5_1.5b", rows=1, seq_len=32_768), "full", 1, 29.58),
        (dict(model="qwen2.5_7b", tensor=2), "full", 1, 60.52),
        (dict(model="llama_125m", rows=32, seq_len=1024), "none", 12, 13.93),
    ],
)
def test_the_estimate_is_on_the_safe_side_of_what_xla_allocates(setting, remat, unroll, gib):
    assert gib < step_bytes(sizes(**setting), remat, unroll) / GIB < 1.11 * gib


def test_the_estimate_by_hand():
    """Two layers of width 4: 2 heads of 2, 1 of keys, 6 hidden units; 10 tokens, 8 words."""
    shape = dataclasses.replace(
        MODELS["llama_tiny"],
        d_model=4,
        n_layers=2,
        n_heads=2,
        n_kv_heads=1,
        d_ff=6,
        head_dim=2,
        vocab_size=8,
    )
    one = dataclasses.replace(
        sizes("llama_125m"),
        shape=shape,
        tokens=10,
        codes=dict.fromkeys(shape.linears, 1),
        weights=dict.fromkeys(shape.linears, 1),
        attention=24,
        state=1000,
        gradients=400,
    )
    # x; and q, k, v, gate, up, o; and codes of q's and gate's input, and of down's; and attention,
    # o's input, norms.
    kept = {"full": 8, "dots": 8 + 2 * (4 + 2 + 2 + 6 + 6) + 8}
    kept["quantized"] = kept["dots"] + 4 + 4 + 6
    kept["none"] = kept["quantized"] + 24 + 2 * 4 + 16
    kept["fp8_inputs"] = kept["none"] - (4 + 4 + 6 + 6) * 15 // 16  # x, o, gate and up
    assert {remat: saved_bytes(one, remat) for remat in kept} == kept
    layer, head = 10 * (kept["none"] + 16 * 6), 2 * 4 * 10 * 8 + 6 * 4 * 8
    for remat, saved in kept.items():
        assert step_bytes(one, remat, 1) == 1000 + 2 * 10 * saved + max(400 + layer, head)
    kernels = 2 * (4 * (4 + 2 + 2 + 4) + 3 * 4 * 6)
    whole = 1000 + max(2 * 10 * kept["none"] + kernels + max(layer, head), 400 + layer)
    assert step_bytes(one, "none", 2) == whole
    changed = lambda **fields: step_bytes(dataclasses.replace(one, **fields), "none", 1)  # noqa: E731
    looped = step_bytes(one, "none", 1)
    assert changed(accumulates=True) == looped + 400 and changed(masters=7) == looped + 7
    assert changed(fsdp=2) == looped + 6 * 4 * 8 + 6 * kernels // 2
    assert changed(fused=True) == looped - (2 + 1) * 10 * 6
    # Halves of heads, hidden units and words: 2 (2 + 1 + 1 + 3 + 3) of results, 3 codes, 4 of o.
    half, split = kept["none"] - 20 - 3 - 4, (6 * 4 * 8 + 6 * kernels // 2) // 2
    assert changed(tensor=2) == 1000 + 20 * half + 400 + 10 * (half + 16 * 3) + split
    # The program that seeds has a loop, and no fused MLP: it keeps the input of "down".
    seeding = dataclasses.replace(one, seeds=True, fused=True)
    assert step_bytes(seeding, "none", 2) == step_bytes(seeding, "none", 1) == looped > whole


# The choice --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "gib", "chosen"),
    [
        ((None, None), 105, ("none", 28)),
        ((None, None), 64, ("none", 28)),  # 57.6 GiB by the estimate, 59 in a loop
        ((None, None), 56, ("dots", 28)),
        ((None, None), 33, ("full", 1)),
        ((None, None), 16, ("full", 1)),  # does not fit: the least
        ((None, 1), 64, ("quantized", 1)),
        ((None, 7), 33, ("full", 7)),
        (("full", None), 105, ("full", 1)),
        (("dots", None), 105, ("dots", 28)),
        (("none", None), 16, ("none", 28)),
        (("dots", 2), 16, ("dots", 2)),
        ((None, None), None, ("none", 28)),
    ],
)
def test_the_least_recomputation_that_fits_is_chosen(monkeypatch, said, gib, chosen):
    monkeypatch.setattr(hardware, "platform", lambda: "gpu")
    limit = None if gib is None else gib * GIB
    made = choose_layers(*said, [sizes(**QWEN)], limit)
    assert (made.remat, made.unroll) == chosen
    assert made.chosen == tuple(
        k for k, v in zip(layer_choice.KEYS, said, strict=True) if v is None
    )
    assert bool(made.why) == (gib is not None and None in said)
    if made.why:
        assert made.estimate == step_bytes(sizes(**QWEN), *chosen)
        assert made.most == int(0.96 * limit)


def test_a_fallback_fits_by_what_was_compiled(monkeypatch):
    monkeypatch.setattr(hardware, "platform", lambda: "gpu")
    made = choose_layers(None, None, [sizes(**QWEN)], 64 * GIB)
    most, estimate = made.most, made.estimate  # 61.4 and 57.6 GiB
    assert made.fallback(most) is None
    assert made.fallback(most + 1) == ("quantized", 28)  # 56.3 GiB, enlarged by 1.066
    assert made.fallback(int(1.2 * estimate)) == ("dots", 28)
    assert made.fallback(3 * estimate) == ("full", 1)
    assert choose_layers(None, None, [sizes(**QWEN)], 33 * GIB).fallback(34 * GIB) is None
    assert choose_layers("none", 28, [sizes(**QWEN)], 33 * GIB).fallback(34 * GIB) is None


def test_what_is_chosen_is_said(monkeypatch):
    monkeypatch.setattr(hardware, "platform", lambda: "gpu")
    one = [sizes(**QWEN)]
    assert choose_layers(None, None, one, 100 * GIB).why == (
        "remat=none and unroll=28 (no loop): an estimate of 57.6 of 100.0 GiB"
    )
    assert choose_layers(None, None, one, 33 * GIB).why == (
        "remat=full and unroll=1 (a loop): an estimate of 27.7 of 33.0 GiB; remat=dots and unroll=1"
        " (a loop) would take 46.0"
    )
    assert choose_layers(None, None, one, 16 * GIB).why.endswith(
        "of 27.7 of 16.0 GiB, more than there is, and the least of all"
    )


@pytest.mark.parametrize(
    ("platform", "layers", "unroll"),
    [("gpu", 48, 48), ("gpu", 49, 1), ("cpu", 2, 1), ("tpu", 2, 1)],
)
def test_many_layers_loop_and_so_do_all_without_a_gpu(monkeypatch, platform, layers, unroll):
    monkeypatch.setattr(hardware, "platform", lambda: platform)
    one = sizes(**QWEN)
    one = dataclasses.replace(one, shape=dataclasses.replace(one.shape, n_layers=layers))
    assert choose_layers(None, None, [one], None).unroll == unroll


def test_all_stages_must_fit(monkeypatch):
    """BF16 at the end of an FP8 run needs more than its beginning."""
    monkeypatch.setattr(hardware, "platform", lambda: "gpu")
    fp8, bf16 = sizes(**QWEN, policy="fp8_delayed"), sizes(**QWEN)
    assert choose_layers(None, None, [fp8], 56 * GIB).remat == "none"
    assert choose_layers(None, None, [fp8, bf16], 56 * GIB).remat == "dots"


# Runs --------------------------------------------------------------------------------------------


@pytest.fixture
def limited(monkeypatch):
    """Takes bytes, which JAX may then use of each device."""
    return lambda size: monkeypatch.setattr(building, "memory_limit", lambda mesh: size)


def test_a_device_without_a_limit_has_none():
    class Device:
        def __init__(self, stats):
            self.memory_stats = lambda: stats

    known = [Device({"bytes_limit": size}) for size in (5, 3)]
    assert hardware.memory_limit(known) == 3
    assert hardware.memory_limit([*known, Device(None)]) is None
    assert hardware.memory_limit(jax.local_devices()) is None  # CPUs


def test_a_config_without_the_keys_is_recorded_with_them(data, limited):
    config = tiny(data, unroll=None)
    limited(GIB)
    run = build(config, jax.devices()[:1])
    assert (run.settings.record["remat"], run.settings.record["unroll"]) == ("none", 1)
    assert config.remat is None and config.unroll is None
    lines = start_lines(run, corpus(config.data, config.cache_dir), base.get_config().to_dict())
    assert not any("unroll=" in line for line in lines if line.startswith("config"))
    (line,) = [line for line in lines if line.startswith("layers")]
    assert line.startswith("layers     remat=none and unroll=1 (a loop): an estimate of 0.0 of 1.0")


def test_a_run_goes_on_as_it_began(tmp_path, data):
    config = one_layer(data, unroll=None)
    assert as_begun(config, tmp_path) is config
    record = build(config, jax.devices()[:1]).settings.record
    with Checkpointer(tmp_path / "checkpoints", every=1, keep=1, keep_best=0) as checkpointer:
        began = {"config": record | {"remat": "dots", "unroll": 1}}
        checkpointer.save(1, {"params": {"x": jnp.zeros(1)}}, began, None)
    begun = as_begun(config, tmp_path)
    assert (begun.remat, begun.unroll) == ("dots", 1) and config.remat is None
    with config.unlocked():
        config.remat = "full"
    assert as_begun(config, tmp_path).remat == "full"  # the override: `read_checkpoint` compares


def test_a_run_that_does_not_fit_goes_on_with_less(tmp_path, data, limited, caplog):
    """The estimate of a CPU's program is too low, so what was compiled decides."""
    config = one_layer(data, num_steps=1, valid__batches=1)
    limited(GIB)
    layers = build(config, jax.devices()[:1]).layers
    limited(int(1.1 * layers.estimate))
    with caplog.at_level("INFO", logger="absl"):
        train_and_evaluate(config, str(tmp_path))
    record = json.loads((tmp_path / "config.json").read_text())
    assert record["remat"] in ("quantized", "dots", "full") and record["unroll"] == 1
    assert "layers     the compiled step takes more than" in caplog.text
