"""The default of `unroll`: no loop over layers where it costs more than it saves."""

import jax
import pytest

from fp8jax.device import hardware
from fp8jax.training.build import build
from tests.support.runs import tiny


@pytest.mark.parametrize(
    ("platform", "precision", "layers", "changes", "unroll"),
    [
        ("gpu", "bf16", 28, {}, 28),
        ("gpu", "fp8_current", 12, {}, 12),
        ("gpu", "fp8_current", 13, {}, 1),  # compiles for three seconds a layer
        ("gpu", "bf16", 28, dict(remat="full"), 1),  # the loop has next to nothing to copy
        ("gpu", "bf16", 28, dict(remat="quantized"), 28),
        ("gpu", "bf16", 28, dict(mesh="fsdp", devices=2), 1),
        ("cpu", "bf16", 28, {}, 1),
        ("gpu", "bf16", 28, dict(unroll=2), 2),
    ],
)  # fmt: skip
def test_layers_are_unrolled_where_it_pays(
    data, monkeypatch, platform, precision, layers, changes, unroll
):
    monkeypatch.setattr(hardware, "platform", lambda: platform)
    monkeypatch.setattr(hardware, "compute_capability", lambda: (9, 0))
    changes = dict(unroll=None, backend="emulated", attention="xla") | changes
    devices = changes.pop("devices") if "devices" in changes else 1
    config = tiny(data, precision=precision, model_overrides__n_layers=layers, **changes)
    run = build(config, jax.devices()[:devices])
    assert run.stages[0].model.unroll == unroll
