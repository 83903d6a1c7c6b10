"""Equal kernels have equal texts, whatever was lowered before them: so they are compiled once."""

import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from fp8jax.gemm.dot import dot_general
from fp8jax.gemm.histories.amax_history import init_state
from fp8jax.kernels import quantize
from fp8jax.kernels.lowered import as_kernel, shapes_of
from fp8jax.lm.training.build import build
from fp8jax.lm.training.programs import lower_program
from fp8jax.numerics.formats import FORMATS
from fp8jax.numerics.names import as_recipe
from tests.support import ROOT, h200
from tests.support.products import MATMUL
from tests.support.runs import tiny

pytestmark = h200.needs_plugin


def lowered(data, name: str) -> str:
    """Returns a program of a fresh `build`, as a process that has lowered nothing of it does."""
    sizes = dict(model_overrides__d_model=256, model_overrides__d_ff=512)
    with h200.default() as devices:
        run = build(tiny(data, precision="fp8_delayed", attention="flash", **sizes), list(devices))
        return lower_program(run, run.stages[0], name).as_text()


def kernels(program: str) -> set[str]:
    """Returns the hashes under which Mosaic GPU keeps compiled kernels."""
    return set(re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', program))


def test_programs_share_their_kernels(data):
    """A resumed run lowers the step alone; JAX's cache finds the program of the first run then."""
    step, seed = lowered(data, "step"), lowered(data, "seed_step")
    assert lowered(data, "step") == step
    # The seeding step does not fuse SwiGLU with the two casts that read it.
    assert kernels(step) and len(kernels(step) - kernels(seed)) == 2


def test_a_kernel_kept_for_the_shards_of_a_mesh_has_the_text_of_one_gpu():
    """Not the text of an older version, which JAX writes for programs that are stored."""
    cast = functools.partial(quantize.cast_transpose, fmt=FORMATS["e4m3"])
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 384), ())]
    with h200.default():
        alone = jax.jit(cast).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
        kept = as_kernel(cast, shapes_of(shapes)).exported.mlir_module()
    assert len(kernels(alone)) == 1 and kernels(kept) == kernels(alone)


# Prints the key that JAX's cache gives to a step on two GPUs, after other programs were lowered.
_KEY = """
import sys, types
from unittest import mock
import jax, numpy as np
from jax._src import compilation_cache, compiler
from fp8jax.device import xla
from fp8jax.lm.training.build import build
from fp8jax.lm.training.programs import lower_program
from tests.support import h200
from tests.support.runs import tiny
spec, cache, precision, *names = sys.argv[1:]
sizes = dict(model_overrides__d_model=256, model_overrides__d_ff=512)
config = tiny((spec, cache), precision=precision, attention="flash", mesh="fsdp", **sizes)
with h200.default(2) as devices:
    run = build(config, list(devices))
    kept = [lower_program(run, run.stages[0], name) for name in names]
with mock.patch.object(compilation_cache, "is_cache_used", lambda backend: True):
    print(xla._cache_key(
        compiler.get_compile_options(num_replicas=1, num_partitions=2),
        backend=types.SimpleNamespace(platform="gpu", platform_version=""),
        devices=np.array(2 * jax.devices()[:1]),
        computation=kept[-1].compiler_ir(),
    ))
    print("CustomSPMDPartitioning" in kept[-1].as_text())
"""


@pytest.mark.parametrize("precision", ["fp8_delayed", "fp8_block"])
def test_another_process_has_the_same_key_of_a_program_on_a_mesh(data, precision):
    """Whatever it has lowered before, and however it hashes strings. So it finds the program."""
    printed = []
    for seed, names in (("1", ["step"]), ("2", ["eval_step", "step"])):
        done = subprocess.run(
            [sys.executable, "-c", _KEY, *map(str, data), precision, *names],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        printed.append(done.stdout.split())
    assert printed[0] == printed[1]
    key, partitioned = printed[0]
    assert key.startswith("jit_") and partitioned == "True"


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_rowwise"])
def test_a_program_compiles_inside_set_mesh(recipe):
    """A kernel that is lowered in there says nothing of shardings, also of its scalars."""

    def both(x_MK, w_KN, g_MN, states):
        y, vjp = jax.vjp(
            lambda x, w: dot_general(x, w, MATMUL, recipe=recipe, backend="pallas", state=states),
            x_MK,
            w_KN,
        )
        return y, vjp(g_MN)

    spec = jax.P("a", None)
    with h200.default(2) as devices:
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((2,), ("a",), axis_types=auto, devices=list(devices))
        given = [
            jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.NamedSharding(mesh, spec))
            for shape in ((512, 384), (384, 256), (512, 256))
        ]
        with jax.set_mesh(mesh):
            states = jax.eval_shape(lambda: init_state(as_recipe(recipe)))
            text = jax.jit(both).lower(*given, states).compile().as_text()
    assert "mosaic_gpu" in text
