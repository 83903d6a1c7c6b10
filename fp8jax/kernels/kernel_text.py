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

from jax.experimental.mosaic.gpu import core

_DUMP_NAME = "mosaic_gpu.dump_basename"


def remove_dump_names() -> None:
    """Removes the names for dumps from all kernels that this process lowers from now on."""
    if core._run_serde_pass is not _without_dump_name:
        core._run_serde_pass = _without_dump_name


_serialized = core._run_serde_pass  # JAX has no public way to change the text


def _without_dump_name(module: Any, **options: Any) -> Any:
    """Serializes a kernel's module as JAX does, and removes its name for dumps."""
    module = _serialized(module, **options)
    attributes = module.operation.attributes
    if _DUMP_NAME in attributes:
        del attributes[_DUMP_NAME]
    return module
