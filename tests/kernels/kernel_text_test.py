"""Equal kernels have equal texts, whatever was lowered before them: so they are compiled once."""

import re

from fp8jax.training.build import build
from fp8jax.training.programs import lower_program
from tests.support import h200
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
