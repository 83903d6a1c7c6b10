"""Gives equal kernels equal texts, so that a process compiles each of them once.

Mosaic GPU compiles the text (the MLIR module) of a kernel that it finds in a program, and keeps the
result under a hash of that text. The text also holds a file name for dumps, with the number of
kernels that this process has lowered before: so an equal kernel in another program, such as the
seeding step beside the training step, was compiled again, 0.7 s each on the host of an H200. JAX's
compilation cache hashes the text, too: it did not find the training step of a resumed run, which
lowers no seeding step before.

Mosaic GPU makes a new name where the attribute is missing, so it is removed here.
"""

from typing import Any

from fp8jax import hidden_jax


def remove_dump_names() -> None:
    """Removes the names for dumps from all kernels that this process lowers from now on."""
    hidden_jax.change_kernels(_without_dump_name)


def _without_dump_name(module: Any) -> None:
    attributes = module.operation.attributes
    if "mosaic_gpu.dump_basename" in attributes:
        del attributes["mosaic_gpu.dump_basename"]
