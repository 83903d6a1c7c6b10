"""JAX's coordinator and its clients in this process: threads in place of processes."""

import concurrent.futures
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
from jax._src import distributed


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


class _OfThread:
    """What JAX knows of its processes, for each thread its own."""

    def __init__(self):
        self._before, self._here = distributed.global_state, threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._here.state if hasattr(self._here, "state") else self._before, name)

    @contextlib.contextmanager
    def taken(self, state: distributed.State) -> Iterator[None]:
        self._here.state = state
        try:
            yield
        finally:
            del self._here.state


As = Callable[[int], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def joined(count: int) -> Iterator[As]:
    """A function whose context makes this thread one of `count` processes that have joined.

    Only what `fp8jax.device.processes` reads changes: there is one backend.
    """
    address = f"localhost:{free_port()}"
    states = [distributed.State() for _ in range(count)]

    def join(index: int) -> None:
        states[index].initialize(
            address, count, index, cluster_detection_method="deactivate", initialization_timeout=30
        )

    of_thread = _OfThread()
    before = jax.config.jax_enable_preemption_service
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM for good
    pool = concurrent.futures.ThreadPoolExecutor(count)
    try:
        list(pool.map(join, range(count)))
        with mock.patch.object(distributed, "global_state", of_thread):
            yield lambda index: of_thread.taken(states[index])
    finally:
        list(pool.map(lambda state: state.shutdown(), reversed(states)))
        pool.shutdown()
        jax.config.update("jax_enable_preemption_service", before)
