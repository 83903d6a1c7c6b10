"""Contestants timed in turns, and the pages and figures that come of it.

A device's clock moves with its temperature and with what ran before. So whatever is compared runs
in one process and in turns: each round gives every contestant a batch of calls, and the median of
its rounds is its time. The calls of a batch are dispatched one after the other and waited for once,
as a training loop does it, so that the host's work overlaps with the device's.

A contestant that cannot run, be it refused, not installed or out of memory, is reported with the
reason, and the others go on. Between its turns it holds its operands only: results are dropped
before the next call, and what it had in memory goes when the race ends.
"""

import concurrent.futures
import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

_MOST_CALLS = 1000  # a batch


def _nothing() -> None:
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """Something to time.

    Attributes:
      call: dispatches it once.
      wait: returns when the result of the last call is there.
      close: called once nothing refers to the program any more.
      items: equal pieces of work in a call; times are of one.
      bytes: the memory that its row shows, None for none.
    """

    call: Callable[[], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready
    close: Callable[[], None] = _nothing
    items: int = 1
    bytes: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """What came of a contestant.

    Attributes:
      seconds: median over the rounds; NaN where it did not run to the end.
      spread: (slowest - fastest) / median.
      bytes: as its `Program` says.
      reason: why it did not run, "" where it did.
    """

    seconds: float = math.nan
    spread: float = 0.0
    bytes: int | None = None
    reason: str = ""


Contestants = Mapping[str, Callable[[], Program]]


Timer = Callable[[Contestants], dict[str, Timing]]


def time_in_turns(
    entrants: Contestants,
    *,
    rounds: int = 7,
    seconds: float = 0.1,
    threads: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Times all entrants in turns.

    Args:
      entrants: name -> what makes the program, compiled or not; may raise.
      rounds: batches of each.
      seconds: length of a batch, which has one call at least.
      threads: programs made at a time, before any of them is called.
      clock: seconds since some moment.
    """
    programs: dict[str, Program] = {}
    calls: dict[str, int] = {}
    times: dict[str, list[float]] = {name: [] for name in entrants}
    reasons: dict[str, str] = {}

    def attempt(name: str, turn: Callable[[str], None]) -> None:
        try:
            turn(name)
        except Exception as error:  # a peer may raise anything; its row says what
            text = " ".join(str(error).split())
            reasons[name] = f"{type(error).__name__}: {text[:200]}"
        if name in reasons:
            _close(programs, name)

    def prepare(name: str) -> None:
        programs[name] = made[name].result()
        _batch(programs[name], 2, clock)  # the first call may compile
        once = _batch(programs[name], 1, clock) * programs[name].items
        calls[name] = max(1, min(_MOST_CALLS, round(seconds / max(once, 1e-9))))

    def time_batch(name: str) -> None:
        times[name].append(_batch(programs[name], calls[name], clock))

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        made = {name: pool.submit(entrant) for name, entrant in entrants.items()}
    for name in entrants:
        attempt(name, prepare)
    for _ in range(rounds):
        for name in list(programs):
            attempt(name, time_batch)
    found = {
        name: Timing(reason=reasons[name])
        if name in reasons
        else _timing(times[name], programs[name].bytes)
        for name in entrants
    }
    for name in list(programs):
        _close(programs, name)
    return found


def _timing(times: list[float], size: int | None) -> Timing:
    median = statistics.median(times)
    spread = (max(times) - min(times)) / median if median else 0.0
    return Timing(seconds=median, spread=spread, bytes=size)


def _batch(program: Program, calls: int, clock: Callable[[], float]) -> float:
    """Seconds of an item of the program's work, from `calls` calls."""
    out = None
    begin = clock()
    for _ in range(calls):
        out = None  # its memory may be taken by the next call's
        out = program.call()
    program.wait(out)
    return (clock() - begin) / calls / program.items


def _close(programs: dict[str, Program], name: str) -> None:
    close = programs.pop(name).close if name in programs else _nothing
    gc.collect()
    close()
