"""Files in the folder of JAX's compilation cache, for what this library makes anew in each process.

They are as safe to read as the compiled programs beside them, which run what they say: whoever may
write to that folder decides what the processes that use it compute. JAX never deletes them; they
may be deleted at any time.
"""

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

import jax
from absl import logging

_DIGEST = hashlib.sha256().digest_size


def _folder() -> Path | None:
    """Returns JAX's cache folder; None without one, or in an object store, which is not read."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    if not folder or "://" in folder or not jax.config.values["jax_enable_compilation_cache"]:
        return None
    return Path(folder)


def read(name: str) -> bytes | None:
    """Returns what was written under a name; None if nothing was, or if it cannot be read."""
    folder = _folder()
    if folder is None:
        return None
    try:
        stored = (folder / name).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        logging.warning("%s: %s; it is made again", folder / name, error)
        return None
    digest, content = stored[:_DIGEST], stored[_DIGEST:]
    if hashlib.sha256(content).digest() != digest:
        logging.warning("%s is damaged; it is made again", folder / name)
        return None
    return content


def write(name: str, content: bytes) -> None:
    """Writes a file at once or not at all. A folder that cannot be written to is a warning."""
    folder = _folder()
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=folder, prefix=f"{name}.")
    except OSError as error:
        logging.warning("%s: %s; the next process makes it again", folder / name, error)
        return
    try:
        with open(handle, "wb") as file:
            file.write(hashlib.sha256(content).digest() + content)
        os.replace(draft, folder / name)
    except OSError as error:
        logging.warning("%s: %s; the next process makes it again", folder / name, error)
        with contextlib.suppress(OSError):
            os.unlink(draft)
