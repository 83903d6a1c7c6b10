"""What the processes of a run tell each other beside their steps: who asks to stop, and what fails.

A process that waits in a collective for one that does not come waits for minutes and is aborted
then, with a dump of its stacks. So each process has two threads that no collective holds up. One
talks over the coordinator's store (device/processes.py) once a second; one looks at the clock.

Stop. SIGTERM or Ctrl-C in any process asks all to stop. Each freezes: it says which step its loop
has come to, and the loop waits before the next. The largest of these steps plus one is the last,
and all save it. If a process has not dispatched a step yet, no step is complete, nothing is to be
saved, and all leave at once. Both end with the status `RUN_AGAIN`. The first half is the rule of
JAX's `multihost_utils.reached_preemption_sync_point`. That is not used, since it takes SIGTERM
from Python, swallows one that comes before the loop, hears no Ctrl-C and does not say who asked.

Fail. An exception that ends the run in one process is told to all, and nobody saves alone: all say
it, with its process and host, let a save end that has begun, and leave. So it is with a process
that has not been heard from for `SILENT_S`, and with a step that takes longer than `step_timeout`.
Its time does not run while a process compiles, since all wait for that one; a compilation has a
limit of its own, `COMPILE_TIMEOUT_S`. A process leaves by `processes.leave`, without `atexit`,
whose barrier would wait for the others.
"""

import atexit
import contextlib
import faulthandler
import itertools
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from fp8jax.device import processes
from fp8jax.device.aborts import Aborts
from fp8jax.device.compiling import Compiling
from fp8jax.lm.training.agree import DisagreeError, FailedElsewhereError
from fp8jax.lm.training.stop_request import StopRequest

# The status of a run of several processes that was asked to stop: EX_TEMPFAIL of sysexits.h, which
# schedulers are told to read as "run me again" (docs/pods.md).
RUN_AGAIN = 75
STEP_TIMEOUT_S = 1800.0  # for a step with its data, validation and save
COMPILE_TIMEOUT_S = 7200.0  # for the compilation of one program
# Longer than C code holds the interpreter's lock. A process that was killed is named within 60 s.
SILENT_S = 45.0
SAVING_S = 10.0  # for a save that has begun when another process fails
ERRORS = "errors"  # folder of the workdir with a file for each process that failed or had to leave

_BEAT_S = 1.0
_COMPILES = " compiles"  # ends the beat of a process that does
_LEAVING_S = 12.0  # for process 0, which waits until the others have left
# What JAX and its collectives say when another process is the cause.
_OF_OTHERS = re.compile(
    r"\b(gloo|nccl)|coordination|\b(unavailable|deadline_exceeded|aborted|cancelled):",
    re.IGNORECASE,
)
_SUSPECT_S = 15.0  # the same as SILENT_S, once a collective has failed

# Longer than both threads look at the clock apart, unless the whole process is paused.
_PAUSED_S = 10.0

_opened = itertools.count()  # a process may train several runs, one after the other


class _Awake:
    """A clock that stands still while this process is paused, as by Ctrl-Z or SLURM.

    What others did in that time is not known. When all of a run are paused together, none has been
    silent.
    """

    def __init__(self) -> None:
        self._lock, self._last, self._paused = threading.Lock(), time.monotonic(), 0.0

    def __call__(self) -> float:
        """Returns seconds. To be called more often than every `_PAUSED_S`."""
        with self._lock:
            now = time.monotonic()
            if now - self._last > _PAUSED_S:
                self._paused += now - self._last
            self._last = now
            return now - self._paused


class Channel(contextlib.AbstractContextManager["Channel"]):
    """Connects this process with the others of its run, from the join to the end.

    Ends with SystemExit(RUN_AGAIN) once all have stopped for a signal.

    Attributes:
      signal: the name of the signal for which the run stops, None for none.
    """

    def __init__(self, *, step_timeout: float = STEP_TIMEOUT_S, store: Any = processes):
        """Opens nothing yet.

        Args:
          step_timeout: seconds that a step may take, with all that happens around it but
            compilation.
          store: the functions of device/processes.py.
        """
        self.signal: str | None = None
        self._step_timeout, self._store = step_timeout, store
        self._index, self._count = store.index(), store.count()
        self._me = f"process {self._index} of {self._count} on {store.host()}"
        self._folder = f"channel{next(_opened)}"
        self._wake = threading.Event()  # for `_talk`, before its next beat
        self._request = StopRequest(self._wake)
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        # The step after which to stop.
        self._lock = threading.Lock()
        self._step: int | None = None  # that `reached` was asked about last
        self._frozen, self._stops = False, False
        self._agreed = threading.Event()
        self._last: int | None = None
        # Failures.
        self._who: dict[int, dict[str, Any]] = {}  # "me", "host", "pid", "began" of each process
        self._heard: dict[int, tuple[str, float]] = {}  # the last beat of each process, and when
        self._now = _Awake()
        self._answered = self._progress = self._now()
        self._taking: Callable[[], int] | None = None  # the step that the loop takes
        self._failure: Callable[[], BaseException | None] = lambda: None
        self._failed, self._silent_s = False, SILENT_S
        self._aborts, self._compiling = Aborts(), Compiling()
        self._compiled = ""  # the beat of process 0 at which it last saw a process compile
        self._leaving = threading.Lock()
        self._workdir: Path | None = None
        self._before_leaving: Callable[[list[str]], None] = lambda lines: None

    def __enter__(self) -> "Channel":
        self._request.__enter__()
        self._aborts.open()
        self._compiling.open()
        for work in (self._talk, self._watch):
            self._threads.append(threading.Thread(target=work, daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.fail(kind, error, trace)
        self._closed.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(2 * _BEAT_S)  # longer only if the coordinator does not answer
        with contextlib.suppress(ConnectionError):
            self._put(f"alive/{self._index}", "done")
            # If another one is asked to stop from now on, it need not wait for this one.
            self._put(f"at/{self._index}", str(self._step or 0))
        self._aborts.close()
        self._compiling.close()
        self._request.signal = None  # it has become that of all
        self._request.__exit__(kind, error, trace)
        if error is None and self._stops:
            raise SystemExit(RUN_AGAIN)

    def trains(
        self,
        workdir: str,
        step: Callable[[], int],
        failure: Callable[[], BaseException | None],
        before_leaving: Callable[[list[str]], None],
    ) -> None:
        """Begins to watch how long a step takes.

        Args:
          workdir: gets the error file of this process.
          step: the one that is taken.
          failure: what has failed in the background, None for nothing.
          before_leaving: called with what others have said of their failures. It may take
            `SAVING_S` seconds.
        """
        self._compiling.forget()
        self._workdir, self._before_leaving = Path(workdir), before_leaving
        self._progress, self._taking, self._failure = self._now(), step, failure

    def reached(self, step: int) -> bool:
        """Whether the run stops after this step. Ask once for each step that was dispatched."""
        self._progress = self._now()
        self._compiling.forget()
        with self._lock:
            if not self._frozen:
                self._step = step
                self._frozen = self._request.signal is not None
            if not self._frozen:
                return False
        self._wake.set()
        self._agreed.wait()  # if another process does not answer, this one leaves meanwhile
        self._stops = self._stops or step == self._last
        return step == self._last

    def fail(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Tells all others that an exception ends the run here; does nothing without one.

        Call it before anything else is cleaned up: this process has some seconds left.
        """
        if error is None or self._failed:
            return
        what = _in_a_line(error)
        of_jax = isinstance(error, jax.errors.JaxRuntimeError | ValueError)
        if of_jax and _OF_OTHERS.search(what):
            # Another process is the cause. Once it is known, this one leaves as the others do.
            self._silent_s = _SUSPECT_S
            time.sleep((SILENT_S if self._index else _SUSPECT_S) + 3 * _BEAT_S)
        if self._leaving.locked():
            _wait_for_the_end()  # which the other thread brings
        self._failed = True
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
        _end_in(SAVING_S + _LEAVING_S, status)
        atexit.register(self._store.leave, status)  # before JAX's own, which waits for the others
        if isinstance(error, DisagreeError | FailedElsewhereError):
            return  # all say it themselves
        line = f"{self._me} failed{self._where()}: {what}"
        _say(line)
        with contextlib.suppress(ConnectionError):
            self._tell(f"failed/{self._index}", line)
        self._record([line, "".join(traceback.format_exception(kind, error, trace))])

    # The two threads ------------------------------------------------------------------------------

    def _talk(self) -> None:
        who = {
            "me": self._me,
            "host": self._store.host(),
            "pid": os.getpid(),
            "began": _began(os.getpid()),
        }
        for beat in itertools.count():
            try:
                if beat == 0:
                    self._put(f"who/{self._index}", json.dumps(who))
                compiles = _COMPILES if self._compiling.makes_program() else ""
                self._put(f"alive/{self._index}", f"{beat}{compiles}")
                if len(self._who) < self._count:
                    self._who = {int(i): json.loads(text) for i, text in self._keys("who").items()}
                told = self._keys("told")
                self._leave_if_failed(told)
                self._wait_for_compilers(told)
                self._stop(told)
                if self._index == 0:
                    self._look_for_silent(beat)
                self._answered = self._now()
            except ConnectionError:
                pass  # `_watch` waits whether that lasts
            agreeing = self.signal is not None and not self._agreed.is_set()
            self._wake.wait(_BEAT_S / 10 if agreeing else _BEAT_S)
            self._wake.clear()
            if self._closed.is_set():
                return

    def _watch(self) -> None:
        while not self._closed.wait(_BEAT_S):
            now = self._now()
            if self._aborts.seen:
                self._leave_aborted()
            if self._index > 0 and now - self._answered > SILENT_S:
                self._leave({"silent/0": self._silent(0)}, 1)
            late, failure = "", self._failure()
            if failure is not None:
                late = f"{self._where()}: {_in_a_line(failure)}"
            elif self._taking is not None:
                late = self._late(self._taking(), now)
            if late and not self._failed:
                with contextlib.suppress(ConnectionError):
                    self._tell(f"failed/{self._index}", f"{self._me} failed{late}")

    # Stop -----------------------------------------------------------------------------------------

    def _stop(self, told: Mapping[str, str]) -> None:
        """Asks for a stop, or answers one who has asked, and learns the step to stop at."""
        name = self._request.signal
        if name is not None and "stop" not in told:
            told = {"stop": f"{name} in {self._me}"}
            self._tell("stop", told["stop"])
        if "stop" not in told or self._agreed.is_set():
            return
        if self.signal is None:
            with self._lock:
                self._frozen = True
            self._put(f"at/{self._index}", "" if self._step is None else str(self._step))
            self.signal = told["stop"].split()[0]
        at = self._keys("at").values()
        if len(at) < self._count:
            return
        if "" in at:
            line = f"{told['stop']}: no step is complete and nothing is to be saved; all leave"
            self._leave({"stop": line}, RUN_AGAIN)
        self._last = max(map(int, at)) + 1
        _say(f"{told['stop']}: all stop after step {self._last}")
        self._agreed.set()

    # Fail -----------------------------------------------------------------------------------------

    def _late(self, step: int, now: float) -> str:
        """Says what takes too long, "" if nothing does."""
        if self._compiling.seconds() > COMPILE_TIMEOUT_S:
            return f": step {step} has not compiled in {COMPILE_TIMEOUT_S:g} s"
        if now - self._progress > self._step_timeout:
            return f": step {step} has not finished in {self._step_timeout:g} s"
        return ""

    def _wait_for_compilers(self, told: Mapping[str, str]) -> None:
        """Lets the time of the step begin anew if process 0 has seen any process compile."""
        compiled = told["compiled"] if "compiled" in told else ""
        if compiled != self._compiled:
            self._compiled, self._progress = compiled, self._now()

    def _leave_if_failed(self, told: Mapping[str, str]) -> None:
        failures = {key: line for key, line in told.items() if "/" in key}
        if failures and not self._failed:
            self._leave(failures, 1)

    def _leave_aborted(self) -> None:
        """Leaves after JAX's runtime has aborted here: mostly since process 0 has gone."""
        try:
            socket.create_connection(processes.coordinator(), 3).close()
        except OSError:
            name = self._who[0]["me"] if 0 in self._who else "process 0"
            self._leave({"silent/0": f"{name} has gone, and its coordinator with it"}, 1)
        line = f"{self._me} failed{self._where()}: JAX's runtime aborted it"
        # Where the abort holds a lock of the runtime, the others learn of it by the silence.
        telling = threading.Thread(
            target=self._tell, args=(f"failed/{self._index}", line), daemon=True
        )
        telling.start()
        telling.join(_BEAT_S)
        self._leave({f"failed/{self._index}": line}, 1)

    def _look_for_silent(self, own: int) -> None:
        """In process 0: tells all of a process that has not been heard from, and that one compiles.

        Args:
          own: the beat of process 0.
        """
        beats, now = self._keys("alive"), self._now()
        if any(beat.endswith(_COMPILES) for beat in beats.values()):
            self._tell("compiled", str(own))
        for index in range(self._count):
            beat = beats[str(index)] if str(index) in beats else ""
            if index not in self._heard or self._heard[index][0] != beat:
                self._heard[index] = beat, now
            if beat != "done" and now - self._heard[index][1] > self._silent_s:
                self._tell(f"silent/{index}", self._silent(index))

    def _silent(self, index: int) -> str:
        name = self._who[index]["me"] if index in self._who else f"process {index}"
        why = "it was killed or stopped, or cannot be reached"
        return f"{name} has not been heard from for {self._silent_s:.0f} s: {why}"

    def _leave(self, lines: Mapping[str, str], status: int) -> None:
        """Ends this process. `lines` says why, by the key that another process has told it under.

        It begins with silent/INDEX for a process that has not been heard from.
        """
        if not self._leaving.acquire(blocking=False):
            _wait_for_the_end()  # which the other thread brings
        _end_in(_BEAT_S if "silent/0" in lines else SAVING_S + _LEAVING_S, status)
        for line in lines.values():
            _say(f"error: {line}" if status == 1 else line)
        if status == 1:
            self._record([*lines.values(), f"{self._me} left{self._where()}. Its threads:"])
        for silent in [int(key.split("/")[1]) for key in lines if key.startswith("silent/")]:
            self._kill(silent)
            if silent > 0:
                self._store.put(f"left/{silent}", "")  # process 0 need not wait for it
        if status == 1:
            self._before_leaving(list(lines.values()))
        self._store.leave(status)

    def _kill(self, index: int) -> None:
        """Kills a process of this host that is silent: stopped, it would keep memory and lock."""
        who = self._who[index] if index in self._who else None
        if who is None or who["host"] != self._store.host() or who["began"] is None:
            return
        if who["pid"] != os.getpid() and _began(who["pid"]) == who["began"]:
            with contextlib.suppress(OSError):
                os.kill(who["pid"], signal.SIGKILL)

    def _record(self, texts: list[str]) -> None:
        """Writes the error file of this process: texts, then where each of its threads is."""
        if self._workdir is None:
            return
        with contextlib.suppress(OSError):  # a full disk may be the failure
            folder = self._workdir / ERRORS
            folder.mkdir(exist_ok=True)
            with open(folder / f"process_{self._index}.txt", "a", encoding="utf-8") as file:
                file.write("\n".join([time.strftime("%Y-%m-%d %H:%M:%S %z"), *texts, ""]))
                file.flush()
                faulthandler.dump_traceback(file)
                file.write("\n")

    def _where(self) -> str:
        return " before the first step" if self._taking is None else f" at step {self._taking()}"

    # The store ------------------------------------------------------------------------------------

    def _tell(self, key: str, text: str) -> None:
        self._put(f"told/{key}", text)

    def _put(self, key: str, text: str) -> None:
        self._store.put(f"{self._folder}/{key}", text)

    def _keys(self, folder: str) -> dict[str, str]:
        found: dict[str, str] = self._store.keys(f"{self._folder}/{folder}")
        return found


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # the log may lie on the disk that is full
        print(line, file=sys.stderr, flush=True)


def _in_a_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _began(pid: int) -> str | None:
    """When a process of this host began, so that its number names no other; None if unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _wait_for_the_end() -> None:
    threading.Event().wait()


def _end_in(seconds: float, status: int) -> None:
    """Ends this process after some seconds, whatever it does until then."""
    timer = threading.Timer(seconds, os._exit, [status])
    timer.daemon = True
    timer.start()
