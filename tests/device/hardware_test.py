"""What the library knows about a device: its units and its peak FLOPs."""

import threading
import types

import jax
import pytest

from fp8jax.device import hardware


def test_queries_on_the_cpu():
    assert hardware.platform() == "cpu"
    assert hardware.device_kind() == "cpu"
    assert hardware.device() == hardware.Device("cpu", "cpu", None)
    assert not hardware.device().fp8 and not hardware.device().block_scaled
    assert hardware.peak_flops(hardware.device_kind()) is None


@pytest.mark.parametrize(
    "capability, fp8, block_scaled",
    [
        ("7.5", False, False),
        ("8.0", False, False),
        ("8.9", True, False),
        ("9.0", True, False),
        ("10.0", True, True),
        ("10.3", True, True),
        ("12.0", True, False),
        ("gfx942", False, False),
    ],
)
def test_units_by_compute_capability(monkeypatch, capability, fp8, block_scaled):
    first = types.SimpleNamespace(compute_capability=capability, device_kind="some GPU")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [first])
    device = hardware.device()
    assert (device.kind, device.fp8, device.block_scaled) == ("some GPU", fp8, block_scaled)


@pytest.mark.parametrize(
    "text, version",
    [("PJRT C API\ncuda 13000", 13_000), ("PJRT C API\ncuda 12080", 12_080), ("rocm 70000", None)],
)
def test_the_version_of_cuda(monkeypatch, text, version):
    assert hardware.cuda_version() is None
    backend = types.SimpleNamespace(platform_version=text)
    monkeypatch.setattr(jax.extend.backend, "get_backend", lambda: backend)
    assert hardware.cuda_version() == version


@pytest.mark.parametrize(
    "kind, flops",
    [
        ("Tesla T4", 65e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5e", 197e12),
        ("TPU v5", 459e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("cpu", None),
    ],
)
def test_peak_flops(kind, flops):
    assert hardware.peak_flops(kind) == flops


@pytest.mark.parametrize("fails", [False, True])
def test_devices_wake_in_threads(monkeypatch, fails):
    """`wake` waits for none of them, nor says what fails there."""
    begun, go = threading.Barrier(3), threading.Event()

    def device_put(x, device):
        begun.wait(60)  # both at once
        assert go.wait(60)
        devices.append(device)
        if fails:
            raise RuntimeError("no memory")
        return put(x)

    devices, put = [], jax.device_put
    before = set(threading.enumerate())
    monkeypatch.setattr(jax, "device_put", device_put)
    hardware.wake(jax.devices()[:2])
    threads = set(threading.enumerate()) - before
    assert devices == []
    begun.wait(60)
    go.set()
    for thread in threads:
        thread.join(60)
    assert set(devices) == set(jax.devices()[:2])
