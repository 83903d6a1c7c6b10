"""Files in the folder of JAX's compilation cache, for what this library makes anew in each process.

They are as safe to read as the compiled programs beside them, which run what they say: whoever may
write to that folder decides what the processes that use it compute. They may be deleted at any
time. JAX never deletes them, nor counts them for `jax_compilation_cache_max_size`. A process that
is killed while it writes leaves a file NAME.HEX.
"""

import contextlib
import hashlib
import os
import uuid
from pathlib import Path

import jax
from absl import logging

_DIGEST = hashlib.sha256().digest_size


def folder() -> Path | None:
    """Returns JAX's cache folder; None without one, or in an object store, which is not read."""
    found = jax.config.values["jax_compilation_cache_dir"]
    if not found or "://" in found or not jax.config.values["jax_enable_compilation_cache"]:
        return None
    return Path(found)


def read(name: str) -> bytes | None:
    """Returns what was written under a name; None if nothing was, or if it cannot be read."""
    within = folder()
    if within is None:
        return None
    try:
        stored = (within / name).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        logging.warning("%s: %s; it is made again", within / name, error)
        return None
    digest, content = stored[:_DIGEST], stored[_DIGEST:]
    if hashlib.sha256(content).digest() != digest:
        logging.warning("%s is damaged; it is made again", within / name)
        return None
    return content


def write(name: str, content: bytes) -> None:
    """Writes a file at once or not at all. A folder that cannot be written to is a warning."""
    within = folder()
    if within is None:
        return
    draft = within / f"{name}.{uuid.uuid4().hex}"
    try:
        within.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(hashlib.sha256(content).digest() + content)
        os.replace(draft, within / name)
    except OSError as error:
        logging.warning("%s: %s; the next process makes it again", within / name, error)
        with contextlib.suppress(OSError):
            draft.unlink()
