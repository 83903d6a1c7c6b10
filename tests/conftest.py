"""Strict by default: eight virtual CPU devices, no rank promotion, checked annotations.

Warnings are errors too (pyproject.toml). Must run before JAX starts, hence the order here.
`pytest -m gpu` takes the GPU instead.
"""

import atexit
import collections
import os
import shutil
import sys
import tempfile

if "-m gpu" in " ".join(sys.argv):
    os.environ["FP8JAX_TEST_PLATFORM"] = "gpu"  # also for processes of pytest-xdist
if os.environ.get("FP8JAX_TEST_PLATFORM", "cpu") == "gpu":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # they share its memory
else:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    )

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # Shared by the test processes and by the programs that they start, for this run only: tests
    # compile many of the same programs.
    cache = tempfile.mkdtemp(prefix="fp8jax-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
    atexit.register(shutil.rmtree, cache, ignore_errors=True)

from jaxtyping import install_import_hook

# Every annotated signature of the library is checked at each call, in tests only.
install_import_hook("fp8jax", "beartype.beartype")

import jax  # noqa: E402
import pytest  # noqa: E402

from tests.support import text, tfds_examples  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """(spec, cache) of a generated corpus of one source."""
    folder = tmp_path_factory.mktemp("data")
    return text.write_generated_text(folder, documents=400), str(folder / "cache")


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


def pytest_collection_modifyitems(items):
    """Files with the most slow tests first, so that no process is left alone with one at the end.
    A file's tests stay together and in their order."""
    slow = collections.Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])
