"""Scalars reach a package with wandb's functions, imported only when it is asked for."""

import sys
import types

import pytest

from fp8jax.lm.records.metrics import Metrics
from fp8jax.lm.records.sinks import check_sink, open_sink


@pytest.fixture
def fake(monkeypatch):
    """A package in the place of trackio, and wandb; it records its calls."""
    calls = []
    for name in ("trackio", "wandb"):
        package = types.ModuleType(name)
        package.init = lambda **options: calls.append(("init", options))
        package.log = lambda scalars, step: calls.append(("log", scalars, step))
        package.finish = lambda: calls.append(("finish",))
        monkeypatch.setitem(sys.modules, name, package)
    return calls


def test_scalars_reach_the_sink(fake, tmp_path):
    sink = open_sink("trackio:fp8", tmp_path, {"seed": 1})
    with Metrics(tmp_path, num_steps=2, sink=sink) as metrics:
        metrics.write(1, {"loss": 2.5, "mfu": None, "grad_norm": float("nan")})
        metrics.curves(1, {"telemetry/layers_0/x/amax": 3.0})
    (_, options), *others = fake
    assert options["project"] == "fp8" and options["config"] == {"seed": 1}
    assert others == [
        ("log", {"loss": 2.5}, 1),
        ("log", {"telemetry/layers_0/x/amax": 3.0}, 1),
        ("finish",),
    ]


def test_a_resumed_run_is_the_same_run(fake, tmp_path):
    for _ in range(2):
        open_sink("wandb:fp8", tmp_path, {})
    (_, first), (_, second) = fake
    assert first == second and first["resume"] == "allow" and first["id"] == first["name"]


def test_bad_sinks(monkeypatch, tmp_path):
    assert open_sink("", tmp_path, {}) is None
    check_sink("")
    for spec, message in (
        ("wandb", "log_to='wandb': expected wandb:PROJECT"),
        ("weights:x", "unknown kind of log_to 'weights'"),
    ):
        with pytest.raises(ValueError, match=message):
            check_sink(spec)
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if not installed
    missing = r"the package wandb: pip install wandb"
    with pytest.raises(ValueError, match=missing):
        open_sink("wandb:fp8", tmp_path, {})
    with pytest.raises(ValueError, match=missing):  # before a run has a folder
        check_sink("wandb:fp8")
