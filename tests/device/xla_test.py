"""Flags reach XLA only when the user has not set them; what a second process finds in the cache."""

import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.device import xla

_FLAG = "--xla_gpu_enable_triton_gemm"


@pytest.mark.parametrize(
    "before, after",
    [
        (None, f"{_FLAG}=false"),
        ("", f"{_FLAG}=false"),
        ("--xla_dump_to=/x", f"--xla_dump_to=/x {_FLAG}=false"),
        (f"{_FLAG}=true", f"{_FLAG}=true"),
        (f"--xla_a=1 {_FLAG} --xla_b=2", f"--xla_a=1 {_FLAG} --xla_b=2"),
        (f"{_FLAG}_of_another_name=true", f"{_FLAG}_of_another_name=true {_FLAG}=false"),
    ],
)
def test_the_flag_is_added_unless_named(monkeypatch, before, after):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if before is not None:
        monkeypatch.setenv("XLA_FLAGS", before)
    xla.set_xla_flags()
    xla.set_xla_flags()
    assert os.environ["XLA_FLAGS"] == after


def test_a_file_of_flags_is_read_but_not_edited(monkeypatch, tmp_path):
    path = tmp_path / "flags"
    path.write_text("--xla_dump_to=/x\n")
    monkeypatch.setenv("XLA_FLAGS", str(path))
    with pytest.warns(RuntimeWarning, match="names a file"):
        xla.set_xla_flags()
    path.write_text(f"--xla_dump_to=/x\n{_FLAG}=true\n")
    xla.set_xla_flags()
    assert os.environ["XLA_FLAGS"] == str(path)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "--xla_gpu_autotune_level=0"),
        (f"{_FLAG}=false", f"{_FLAG}=false --xla_gpu_autotune_level=0"),
        ("--xla_gpu_autotune_level=2", "--xla_gpu_autotune_level=2"),
        ("/a/file/of/flags", "/a/file/of/flags"),
    ],
)
def test_a_dry_run_takes_no_memory_of_a_gpu(monkeypatch, before, after):
    for name in ("XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv("XLA_FLAGS", before)
    xla.allocate_nothing()
    xla.allocate_nothing()
    assert os.environ["XLA_FLAGS"] == after
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("8", "8")])
def test_one_queue_of_launches_unless_named(monkeypatch, before, after):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if before is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", before)
    xla.launch_in_order()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == after


def test_too_late_on_a_gpu_is_said(monkeypatch):
    jax.devices()
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.warns(RuntimeWarning, match="before fp8jax was imported"):
        xla.set_xla_flags()
    xla.set_xla_flags()  # the flag is named now: said once


# Prints the cache directory; and of a step on one device, and of one on eight, the result's bits,
# and its hits and misses of the cache.
# fp8jax's own __init__ is not under test here, so device/hardware.py is all that it needs.
_CACHED = """
import sys, jax, jax.numpy as jnp
from fp8jax.device import xla
xla.set_xla_flags()
count = {"hits": 0, "misses": 0}
def listen(event, **_):
    for name in count:
        count[name] += event.endswith("compilation_cache/cache_" + name)
jax.monitoring.register_event_listener(listen)
print(xla.set_compilation_cache())
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
for devices in (jax.devices()[:1], jax.devices()):
    mesh = jax.sharding.Mesh(devices, "d")
    x = jnp.arange(64.0).reshape(8, 8) / 64
    x = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d")))
    @jax.jit
    def step(x):
        return jax.grad(lambda x: jnp.tanh(jax.nn.softmax(x @ x.T) @ x).sum())(x)
    count.update(hits=0, misses=0)
    y = step(x)
    found = dict(count)
    print(float(y.sum()).hex(), mesh.size, found["hits"], found["misses"])
"""


def test_a_second_process_hits_the_cache_in_silence_on_one_device(tmp_path):
    """What XLA reads back of a program of several CPU devices may wait for itself forever."""
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.getcwd(),
    }
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    lines = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", _CACHED], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        lines.append(done.stdout.splitlines())
    directory = tmp_path / "fp8jax" / "xla"
    assert lines[0][0].startswith(str(directory / "cpu-")) and os.listdir(lines[0][0])
    assert lines[1][0] == lines[0][0]
    for i, devices in ((1, 1), (2, 8)):
        bits, one = lines[0][i].split()[0], int(devices == 1)
        assert lines[0][i] == f"{bits} {devices} 0 {one}"
        assert lines[1][i] == f"{bits} {devices} {one} 0"


@pytest.fixture
def restored_cache_settings():
    names = (
        "jax_enable_compilation_cache",
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
    )
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    xla.compilation_cache.reset_cache()


def test_what_the_user_set_stays_and_an_argument_wins(
    monkeypatch, tmp_path, restored_cache_settings
):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "user"))
    assert xla.set_compilation_cache() == str(tmp_path / "user")
    used = xla.set_compilation_cache(str(tmp_path / "run"))
    assert used is not None and used.startswith(str(tmp_path / "run"))
    assert jax.config.jax_compilation_cache_dir == used
    assert xla.set_compilation_cache() == used


def test_a_cache_that_the_user_turned_off_stays_off(tmp_path, restored_cache_settings):
    jax.config.update("jax_enable_compilation_cache", False)
    assert xla.set_compilation_cache(str(tmp_path)) is None
    assert not os.listdir(tmp_path)


def test_a_cache_that_cannot_be_made_is_warned_of(tmp_path, restored_cache_settings):
    before = jax.config.values["jax_compilation_cache_dir"]
    (tmp_path / "file").write_text("")  # root may write everywhere, but in no file's folder
    with pytest.warns(UserWarning, match="are not stored.* Not a directory.*Set JAX_COMPILATION"):
        assert xla.set_compilation_cache(str(tmp_path / "file" / "cache")) is None
    assert jax.config.values["jax_compilation_cache_dir"] == before


def test_a_program_of_several_cpu_devices_has_no_key():
    backend, program = types.SimpleNamespace(platform="cpu"), None  # which is not looked at
    devices = np.array(jax.devices())
    assert xla._cache_key(None, backend=backend, devices=devices, computation=program) is None


def test_scales_fold_on_gpus_unless_every_rounding_was_asked_for(monkeypatch):
    assert not xla.folds_scales()  # a CPU
    assert xla.compiler_options() == {"xla_allow_excess_precision": False}
    monkeypatch.setattr(xla, "platform", lambda: "gpu")
    assert xla.folds_scales() and "xla_allow_excess_precision" not in xla.compiler_options()
    for layer_loop in (True, False):
        options = xla.compiler_options(layer_loop=layer_loop)
        assert options["xla_gpu_enable_dynamic_slice_fusion"] is not layer_loop
    monkeypatch.setenv("XLA_FLAGS", "--xla_allow_excess_precision=false")
    assert not xla.folds_scales()


def test_bytes_of_a_program_count_a_donated_argument_once():
    x = jax.ShapeDtypeStruct((1024,), jnp.float32)
    for donated, arrays in (((), 2), ((0,), 1)):
        program = jax.jit(lambda x: x + 1, donate_argnums=donated).lower(x).compile()
        assert xla.program_bytes(program) == arrays * 4096


def test_bytes_of_a_program_whose_second_argument_becomes_its_result():
    x = jax.ShapeDtypeStruct((1024,), jnp.float32)
    program = jax.jit(lambda x, y: x + y, donate_argnums=1).lower(x, x).compile()
    assert xla.program_bytes(program) == 2 * 4096
