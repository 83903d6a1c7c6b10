"""Where the kernels run, and what fills their operands up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.device import hardware
from fp8jax.kernels import hopper, requirements
from tests.support.interpreter import allowed


@pytest.mark.parametrize(
    ("device", "runs"),
    [
        (hardware.Device("gpu", "NVIDIA H200", (9, 0)), True),
        (hardware.Device("gpu", "NVIDIA B200", (10, 0)), False),
        (hardware.Device("gpu", "NVIDIA L4", (8, 9)), False),
        (hardware.Device("gpu", "gfx942"), False),
        (hardware.Device("cpu", "cpu"), False),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_only_hopper_runs_them(device, runs):
    reason = requirements.refuses(device)
    if runs:
        assert reason is None
    else:
        assert reason == f"the kernels are for Hopper (compute capability 9.0), got {device.kind}"


def test_an_older_jax_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 9))
    assert "jax 0.11 or later, got jax 0." in str(requirements.jax_too_old())
    with allowed(cores=1), pytest.raises(NotImplementedError, match="jax 0.11 or later"):
        requirements.require()


@pytest.mark.parametrize(
    ("shape", "padded"),
    [((128, 256), (128, 256)), ((1, 129), (128, 256)), ((200, 128), (256, 128))],
)
def test_operands_are_filled_up_with_zeros(shape, padded):
    x = jnp.ones(shape, jnp.bfloat16)
    got = np.asarray(hopper.pad_to_blocks(x), np.float32)
    assert got.shape == padded and got.sum() == x.size
    assert (got[: shape[0], : shape[1]] == 1).all()
