"""Strict by default: eight virtual CPU devices, no rank promotion, warnings are errors.

Must run before JAX starts, hence the order here. `pytest -m gpu` takes the GPU instead. With the
environment variable FP8JAX_TEST_ANNOTATIONS every annotated signature of the library is checked.

Compiled programs are kept from run to run in ~/.cache/fp8jax/tests, in a folder for this version of
jaxlib and this kind of host. CI (the environment variable CI is set) begins without any.
"""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile

if "-m gpu" in " ".join(sys.argv):
    os.environ["FP8JAX_TEST_PLATFORM"] = "gpu"  # also for processes of pytest-xdist
ON_GPU = os.environ.get("FP8JAX_TEST_PLATFORM", "cpu") == "gpu"
if ON_GPU:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # they share its memory
else:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "")
        # The second one does nothing on a CPU, but a dry run sets it (fp8jax/device/xla.py), and
        # programs are only shared between processes that have the same flags.
        + " --xla_force_host_platform_device_count=8 --xla_gpu_autotune_level=0"
        # The same bits on every x86 processor (docs/results/test_suite.md).
        + " --xla_cpu_max_isa=AVX2 --xla_cpu_enable_platform_dependent_math=false"
    )

if os.environ.get("FP8JAX_TEST_ANNOTATIONS"):
    from jaxtyping import install_import_hook

    # Every annotated signature of the library is checked at each call.
    install_import_hook("fp8jax", "beartype.beartype")

import jax  # noqa: E402
import jaxlib  # noqa: E402
import pytest  # noqa: E402

from fp8jax.device import xla  # noqa: E402
from tests.support import devices, shared_programs, text, tfds_examples  # noqa: E402
from tests.support.tiers import pytest_addoption, pytest_configure  # noqa: E402, F401

jax.config.update("jax_numpy_rank_promotion", "raise")

# Tracing makes many objects that live long. Collecting less often takes a tenth off its time.
gc.freeze()
gc.set_threshold(400_000, 20, 20)


def share_compiled_programs() -> None:
    """Has the test processes, and the programs that they start, share what they compile.

    Tests compile many of the same programs. A directory that the user set is used as it is.
    """
    xla.replace_cache_keys()
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        if os.environ.get("CI"):
            directory = tempfile.mkdtemp(prefix="fp8jax-tests-")
            atexit.register(shutil.rmtree, directory, ignore_errors=True)
        else:
            directory = os.path.join(
                os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"),
                "fp8jax",
                "tests",
                f"jaxlib-{jaxlib.__version__}-{xla.host_fingerprint()}",
            )
        os.environ["JAX_COMPILATION_CACHE_DIR"] = directory
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
    # JAX has read its variables already.
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    seconds = os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", float(seconds))


share_compiled_programs()
if not ON_GPU:
    devices.runs_take_one()
    shared_programs.install()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """(spec, cache) of a generated corpus of one source."""
    folder = tmp_path_factory.mktemp("data")
    return text.write_generated_text(folder, documents=400), str(folder / "cache")


@pytest.fixture
def takes_ctrl_c():
    """SIGINT raises KeyboardInterrupt, also where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def tfds():
    return tfds_examples.import_tfds()


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """A dataset that tfds prepared; returns its folder and its builder class."""
    folder, builder = tmp_path_factory.mktemp("tfds"), tfds_examples.examples_class()
    builder(data_dir=folder, file_format="array_record").download_and_prepare()
    return folder, builder


@pytest.fixture
def data_dir(tfds, dataset, monkeypatch):
    """Has tfds look where the dataset is, as TFDS_DATA_DIR does where tfds is not imported yet."""
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(dataset[0]))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    shared_programs.begin_test(frozenset(mark.name for mark in item.iter_markers()))
    result = yield
    if nextitem is None or nextitem.path != item.path:
        shared_programs.end_file()
    return result


def pytest_collection_modifyitems(config, items):
    """Leaves out the tests that need a GPU where there is none."""
    others = [item for item in items if item.get_closest_marker("gpu") and not ON_GPU]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]
