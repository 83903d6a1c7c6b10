"""One program at a time in a workdir: a lock that the system releases when its process dies.

The lock belongs to the open file, not to the file's existence. So a process that was killed, by
`kill -9` too, leaves no lock behind, although its file stays. The file holds host and process id of
the program that holds the lock, for the message to others, and is empty otherwise.
"""

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import jax
from absl import logging

LOCK = "lock"  # name of the file

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


@contextlib.contextmanager
def lock_workdir(workdir: str | os.PathLike[str]) -> Iterator[None]:
    """Holds the lock of a workdir, which is created if missing.

    In a run of several processes only the first one takes it. A file system without locks gets a
    warning.

    Raises:
      BlockingIOError: another program holds it; the message names it.
      NotADirectoryError: the workdir, or a folder of its path, is a file.
      ValueError: the workdir is a URL.
      OSError: the workdir cannot be written.
    """
    refuse_url(workdir)
    if jax.process_index() != 0:
        yield
        return
    path = make_directory(Path(workdir)) / LOCK
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock_file(path))
        except HeldError as error:
            raise BlockingIOError(
                f"another program{error} trains in the workdir {path.parent}: wait for it or stop "
                "it, or take another --workdir"
            ) from error
        except OSError as error:
            raise type(error)(
                f"the workdir {path.parent} cannot be written: {error.strerror}"
            ) from error
        yield


def refuse_url(workdir: str | os.PathLike[str]) -> None:
    """Raises ValueError if the workdir is a URL."""
    if "://" in str(workdir):
        raise ValueError(
            f"the workdir {workdir} is a URL: name a directory in a mounted file system"
        )


class HeldError(BlockingIOError):
    """Another program holds a lock. It says which in parentheses, or nothing if that is unknown."""


@contextlib.contextmanager
def lock_file(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Holds the lock of a file, which is created if missing; its folder must exist.

    Args:
      path: of a file that is nothing but a lock.
      wait: whether to wait until nobody else holds it.

    Raises:
      HeldError: another program holds it, and `wait` is False.
      OSError: the file cannot be written.
    """
    # Without O_TRUNC: what the holder wrote must stay readable.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _take(descriptor, path, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)  # releases the lock


def make_directory(directory: Path) -> Path:
    """Returns the directory of a workdir, made if missing.

    Raises NotADirectoryError or another OSError that says why it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotADirectoryError(
            f"the workdir {directory} cannot be made: it, or a folder of its path, is a file"
        ) from error
    except OSError as error:
        raise type(error)(f"the workdir {directory} cannot be made: {error.strerror}") from error
    return directory


def _take(descriptor: int, path: Path, operation: int) -> None:
    """Takes the lock and writes who holds it; raises HeldError if another program does."""
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        raise HeldError(f" ({holder})" if holder else "") from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logging.warning(
            "the file system of %s has no locks (%s): see to it yourself that no second program "
            "works there",
            path.parent,
            error.strerror,
        )
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
