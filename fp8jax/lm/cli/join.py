"""The start of a run of several processes: each command joins them before it touches a device."""

import os
import time

from absl import flags, logging

from fp8jax.lm.cli.cluster import CLUSTERS, place_of
from fp8jax.lm.cli.waiting_room import Guest, meet

_JAX_TIMEOUT_S = 60  # for JAX's own start, once all are there


def define_flags() -> None:
    """Defines the flags of this module, unless they are."""
    if "coordinator" in flags.FLAGS:
        return
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, if several processes run.")
    flags.DEFINE_integer("num_processes", None, "How many processes there are.", 1)
    flags.DEFINE_integer("process_id", None, "Which one this is, from 0.", 0)
    flags.DEFINE_enum(
        "cluster", "auto", CLUSTERS, "Whose tasks are the processes; none: this is the only one."
    )
    flags.DEFINE_float(
        "join_timeout", 300, "Seconds in which all processes must join, or the run ends.", 1
    )


def join(*, several: bool) -> bool:
    """Joins the processes of this run, as flags and scheduler say; returns whether there are any.

    Args:
      several: whether the command can run in several processes.

    The first process alone writes files and speaks; the others only warn. The store has the host of
    each, as hosts/INDEX.

    Raises:
      ValueError: the flags do not fit together, or the command runs in one process.
      JoinError: a process has not joined in time; the message says which.
    """
    given = flags.FLAGS
    place = place_of(
        given.cluster, os.environ, given.coordinator, given.num_processes, given.process_id
    )
    if place is None:
        return False
    if not several:
        raise ValueError(
            f"this command runs in one process, and this is one of {place.count}: start it once "
            "(with --cluster=none each of them works by itself)"
        )
    import jax

    from fp8jax import hidden_jax
    from fp8jax.device import processes

    me = Guest(index=place.index, count=place.count, host=processes.host())
    meet(place.coordinator, me, given.join_timeout)
    # Processes that are CPUs exchange with Gloo, which pairs messages by their order. Programs that
    # do not depend on each other, as a step and a request to stop, must not overtake each other.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if me.index > 0:
        time.sleep(0.2)  # until JAX's coordinator has the port: a refused client waits a second
    # It would take SIGTERM from lm/training/channel.py.
    jax.config.update("jax_enable_preemption_service", False)
    with hidden_jax.without_dumps():
        jax.distributed.initialize(
            place.coordinator,
            place.count,
            place.index,
            local_device_ids=place.device_ids,
            cluster_detection_method="deactivate",
            initialization_timeout=_JAX_TIMEOUT_S,
        )
    processes.put(f"hosts/{me.index}", me.host)
    if me.index > 0 and not given["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    return True
