"""Times contestants in turns.

A device's clock frequency changes with its temperature and with what ran before. So all contestants
of a comparison run in one process and in turns: each round gives every contestant a batch of calls,
and the median over the rounds is its time. The calls of a batch are dispatched one after the other
and waited for once, as a training loop does, so that the host's work overlaps with the device's.

A contestant that cannot run (refused, not installed, out of memory) is reported with the reason,
and the others continue. Between its turns a contestant holds only its operands: each result is
dropped before the next call. Its memory is freed when it fails, or at the end of the race.

What is ready, and each time, is written to stderr as soon as it is known, so that a long benchmark
that is cut off is not lost.
"""

import concurrent.futures
import dataclasses
import functools
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

_MOST_CALLS = 1000  # in a batch


def _nothing() -> None:
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """Something to time.

    Attributes:
      call: dispatches the work once and returns its result.
      wait: takes the result of the last call and returns when it is ready.
      close: is called when nothing refers to the program any more.
      items: number of equal pieces of work in a call. Times are those of one piece.
      bytes: the memory that the program's row shows, None for none.
    """

    call: Callable[[], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready
    close: Callable[[], None] = _nothing
    items: int = 1
    bytes: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """The result of a contestant.

    Attributes:
      seconds: median over the rounds; NaN if it failed.
      spread: (slowest - fastest) / median.
      bytes: as in its `Program`.
      reason: why it failed, "" if it did not.
    """

    seconds: float = math.nan
    spread: float = 0.0
    bytes: int | None = None
    reason: str = ""


# name -> a function that prepares the program, compiled or not. It may raise any exception.
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
    """Times all contestants in turns.

    Args:
      entrants: the contestants.
      rounds: number of batches of each contestant.
      seconds: approximate length of a batch, which has at least one call.
      threads: number of programs that are prepared at a time, before any of them is called.
      clock: returns seconds since some moment.

    Returns:
      name -> the contestant's result.
    """
    racers: dict[str, _Racer] = {}
    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for name, prepare in entrants.items():
            racers[name] = _Racer(pool.submit(prepare), clock)
    for name, racer in racers.items():
        racer.attempt(functools.partial(racer.warm_up, seconds))
        say(f"{name}: ready after {time.perf_counter() - begin:.1f} s")
    for _ in range(rounds):
        for racer in racers.values():
            racer.attempt(racer.time_batch)
    timings = {name: racer.timing() for name, racer in racers.items()}
    for racer in racers.values():
        racer.close()
    for name, timing in timings.items():
        say(f"{name}: {timing.reason or f'{1e3 * timing.seconds:.4f} ms'}")
    return timings


def say(text: str) -> None:
    """Writes a result to stderr as soon as it is known."""
    print(text, file=sys.stderr, flush=True)


class _Racer:
    """A contestant during a race."""

    def __init__(
        self, future: concurrent.futures.Future[Program], clock: Callable[[], float]
    ) -> None:
        self._future: concurrent.futures.Future[Program] | None = future
        self._clock = clock
        self._program: Program | None = None
        self._calls = 1  # in a batch
        self._times: list[float] = []
        self._reason = ""

    def attempt(self, turn: Callable[[], None]) -> None:
        """Runs a turn, unless the contestant has failed. An exception becomes its reason."""
        if self._reason:
            return
        try:
            turn()
        except Exception as error:  # a contestant may raise anything
            text = " ".join(str(error).split())
            self._reason = f"{type(error).__name__}: {text[:200]}"
        if self._reason:
            self.close()

    def warm_up(self, seconds: float) -> None:
        """Calls the program three times, and chooses how many calls fill `seconds`."""
        assert self._future is not None
        future, self._future = self._future, None  # which would keep the program alive
        self._program = future.result()
        self._run_batch(2)  # the first call may compile
        once = self._run_batch(1) * self._program.items
        self._calls = max(1, min(_MOST_CALLS, round(seconds / max(once, 1e-9))))

    def time_batch(self) -> None:
        self._times.append(self._run_batch(self._calls))

    def _run_batch(self, calls: int) -> float:
        """Returns the seconds of one piece of the program's work, measured over `calls` calls."""
        program = self._program
        assert program is not None
        out = None
        begin = self._clock()
        for _ in range(calls):
            out = None  # the next call may use its memory
            out = program.call()
        program.wait(out)
        return (self._clock() - begin) / calls / program.items

    def timing(self) -> Timing:
        if self._reason or self._program is None:
            return Timing(reason=self._reason)
        median = statistics.median(self._times)
        spread = (max(self._times) - min(self._times)) / median if median else 0.0
        return Timing(seconds=median, spread=spread, bytes=self._program.bytes)

    def close(self) -> None:
        """Drops the program, so that its memory is freed, and then calls its `close`."""
        close = self._program.close if self._program is not None else _nothing
        self._program = None
        gc.collect()
        close()
