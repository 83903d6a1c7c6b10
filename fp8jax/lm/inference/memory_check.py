"""Whether arrays fit into memory, asked before they are made.

Too large a request otherwise ends in an error of XLA's, or after a long silence.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import jax

from fp8jax.device import hardware


def capacity() -> int | None:
    """Returns the bytes that JAX may use of the default device: of a CPU, the host's memory.

    None if the device does not say.
    """
    stats = jax.local_devices()[0].memory_stats()
    if stats is not None and "bytes_limit" in stats:
        return stats["bytes_limit"]
    if hardware.platform() == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def array_bytes(tree: Any) -> int:
    """Returns the bytes of all arrays of a tree; they may be abstract."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def require_memory(needed: int, what: str, remedy: str) -> None:
    """Raises ValueError if `needed` bytes are more than `capacity()`.

    Args:
      what: what needs them, such as "a batch of 16 rows"; begins the message.
      remedy: what to change; ends it.
    """
    most = capacity()
    if most is not None and needed > most:
        raise ValueError(
            f"{what} would take at least {needed / 2**30:,.1f} GiB, and there are "
            f"{most / 2**30:,.1f} GiB of memory: {remedy}"
        )


@contextlib.contextmanager
def memory_errors(remedy: str) -> Iterator[None]:
    """Turns JAX's error for exhausted memory into a MemoryError of one line.

    Raises:
      MemoryError: the memory does not suffice; the message ends with `remedy`.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise MemoryError(f"memory is exhausted: {remedy}") from error
    except MemoryError as error:  # numpy's
        raise MemoryError(f"memory is exhausted ({error}): {remedy}") from error
