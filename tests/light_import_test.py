"""`import fp8jax` is light: it loads none of the heavy dependencies, and works without them."""

import subprocess
import sys

import pytest

from tests.support import ROOT

# What only training, data or experiments need.
OPTIONAL = ("grain", "orbax", "tensorboardX", "tokenizers", "pyarrow", "tensorflow_datasets")
HEAVY = (*OPTIONAL, "jax.experimental.pallas", "ml_collections", "tqdm")

USE = """
import jax.numpy as jnp
import fp8jax

x, w = jnp.ones((16, 32), jnp.bfloat16), jnp.full((32, 8), 0.5, jnp.bfloat16)
q = fp8jax.quantize(x, fp8jax.FORMATS["e4m3"], fp8jax.TENSOR)
assert (fp8jax.dequantize(q) == 1).all()
y = fp8jax.dot_general(x, w, (((1,), (0,)), ((), ())), recipe="fp8_current")
assert y.shape == (16, 8) and (y == 16).all()
"""


def run(program: str) -> str:
    """What a program prints, in a process without this one's imports and hooks."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("use", ["import fp8jax", USE], ids=["import", "use"])
def test_none_of_the_heavy_modules_is_loaded(use):
    loaded = run(f"{use}\nimport sys\nprint(*sys.modules)").split()
    assert "fp8jax.linear.dot" in loaded
    assert [name for name in HEAVY if name in loaded] == []


@pytest.mark.parametrize("missing", [*OPTIONAL, "all"])
def test_products_work_where_a_dependency_is_missing(missing):
    names = OPTIONAL if missing == "all" else (missing,)
    run(f"import sys\nsys.modules.update(dict.fromkeys({names!r}))\n{USE}")
