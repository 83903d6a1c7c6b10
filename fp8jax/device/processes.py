"""The processes of one run: which of them this one is, and a store of texts that all of them share.

The store is that of the coordinator, which process 0 runs: no collective, no device, no program. So
it works before the first compilation, and while another process hangs in a collective. A process by
itself has a store of its own, so callers need not ask whether there are others.
"""

import contextlib
import os
import socket
import sys
import time
from typing import Any, NoReturn

import jax

from fp8jax import hidden_jax

_PREFIX = "fp8jax/"  # Orbax and JAX have keys of their own in the same store

_alone: dict[str, str] = {}  # the store of a process by itself


def index() -> int:
    """Returns the number of this process, from 0. Starts no backend."""
    return int(hidden_jax.processes().process_id)


def count() -> int:
    """Returns how many processes the run has. Starts no backend."""
    return int(hidden_jax.processes().num_processes)


def host() -> str:
    """Returns the name of this process's host."""
    return socket.gethostname()


def coordinator() -> tuple[str, int]:
    """Returns host and port of process 0's coordinator."""
    host, _, port = hidden_jax.processes().coordinator_address.rpartition(":")
    return host.strip("[]"), int(port)


def detect(method: str | None) -> tuple[str, int, int]:
    """Returns coordinator, number of processes and index, as JAX finds them in its cluster.

    Args:
      method: JAX's name of a cluster, None for whichever it finds.

    Raises:
      ValueError: JAX finds none.
    """
    try:
        address, number, process = hidden_jax.detect_cluster(method)
    except Exception as error:  # of any kind: of a missing variable or package, or of the network
        kind = method or "tpu"
        raise ValueError(f"JAX finds no cluster of the kind {kind} here: {error!r}") from error
    if address is None or number is None or process is None:
        raise ValueError(f"JAX finds no cluster of the kind {method or 'tpu'} here")
    return str(address), int(number), int(process)


def put(key: str, value: str) -> None:
    """Stores a text, in place of an older one of that key.

    Raises:
      ConnectionError: the coordinator does not answer.
    """
    client = _client()
    if client is None:
        _alone[key] = value
        return
    try:
        client.key_value_set(_PREFIX + key, value, allow_overwrite=True)
    except jax.errors.JaxRuntimeError as error:
        raise _lost(error) from error


def get(key: str, timeout_s: float) -> str:
    """Returns the text of a key, for which it waits.

    Raises:
      TimeoutError: nobody has stored it within that many seconds.
      ConnectionError: the coordinator does not answer.
    """
    client = _client()
    if client is None:
        if key not in _alone:
            raise TimeoutError(f"nobody stored {key}")
        return _alone[key]
    try:
        return str(client.blocking_key_value_get(_PREFIX + key, max(1, round(1e3 * timeout_s))))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            raise TimeoutError(f"nobody stored {key} within {timeout_s:g} s") from error
        raise _lost(error) from error


def keys(prefix: str) -> dict[str, str]:
    """Returns the texts of all keys that begin with `prefix/`, by the rest of the key; at once.

    Raises:
      ConnectionError: the coordinator does not answer.
    """
    client = _client()
    if client is None:
        found = list(_alone.items())
    else:
        try:
            found = client.key_value_dir_get(f"{_PREFIX}{prefix}/")
        except jax.errors.JaxRuntimeError as error:
            raise _lost(error) from error
        found = [(key.removeprefix(_PREFIX), value) for key, value in found]
    begin = f"{prefix}/"
    return {key.removeprefix(begin): value for key, value in found if key.startswith(begin)}


def leave(status: int, wait_s: float = 10) -> NoReturn:
    """Ends this process at once: no `atexit`, whose barrier waits minutes for the other processes.

    Process 0 waits up to `wait_s` seconds until the others have left, too: it runs the coordinator,
    and without that JAX aborts them with dumps of their stacks.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # it may lie on a disk that is full
            stream.flush()
    try:
        if index() > 0:
            put(f"left/{index()}", "")
        end = time.monotonic() + wait_s
        while index() == 0 and len(keys("left")) < count() - 1 and time.monotonic() < end:
            time.sleep(0.05)
    except ConnectionError:
        pass  # there is no one to tell
    os._exit(status)


def _client() -> Any:
    """Returns JAX's client of the store, None in a process by itself."""
    return hidden_jax.processes().client


def _lost(error: Exception) -> ConnectionError:
    first = str(error).splitlines()[0]
    return ConnectionError(
        f"process {index()} on {host()} no longer reaches the coordinator, in process 0: {first}"
    )
