"""JAX's coordinator and its clients in this process, in place of several processes."""

import concurrent.futures
import contextlib
import socket
from collections.abc import Callable, Iterator
from unittest import mock

import jax
from jax._src import distributed


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


As = Callable[[int], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def joined(count: int) -> Iterator[As]:
    """A function whose context makes this process the one of that number, of `count` that joined.

    Only what `fp8jax.device.processes` reads changes: there is one backend.
    """
    address = f"localhost:{free_port()}"
    states = [distributed.State() for _ in range(count)]

    def join(index: int) -> None:
        states[index].initialize(
            address, count, index, cluster_detection_method="deactivate", initialization_timeout=30
        )

    @contextlib.contextmanager
    def be(index: int) -> Iterator[None]:
        with mock.patch.object(distributed, "global_state", states[index]):
            yield

    before = jax.config.jax_enable_preemption_service
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM for good
    pool = concurrent.futures.ThreadPoolExecutor(count)
    try:
        list(pool.map(join, range(count)))
        yield be
    finally:
        list(pool.map(lambda state: state.shutdown(), reversed(states)))
        pool.shutdown()
        jax.config.update("jax_enable_preemption_service", before)
