"""Injects faults into a run of several processes of this host, and prints a table of what happened.

    python -m experiments.process_faults --workdir=/tmp/faults --processes=2
    python -m experiments.process_faults --workdir=/tmp/moments --moments=20

The first runs the faults one after the other in one workdir, each resumed from where the one before
has left it. The second sends SIGTERM to a random process at random moments from the join on, with
checkpoints no oftener than every 1,000 steps. Both end with the run itself, whose numbers must have
the bits of a run without faults. Where JAX finds GPUs, each process has one of them.
"""

import dataclasses
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import app, flags

from fp8jax.lm.records.events import Event
from fp8jax.lm.records.jsonl import each_line
from fp8jax.lm.training.channel import RUN_AGAIN

_WORKDIR = flags.DEFINE_string("workdir", None, "A new folder for the runs.", required=True)
_PROCESSES = flags.DEFINE_integer("processes", 2, "How many processes train.", 2)
_GPUS = flags.DEFINE_bool("gpus", False, "Give each process a GPU, by its number.")
_ONLY = flags.DEFINE_list("only", [], "Names of the faults to inject; none for all.")
_MOMENTS = flags.DEFINE_integer("moments", 0, "Random moments at which to send SIGTERM.", 0)

_EVERY = 5  # steps between the checkpoints of the faults
_LIMIT_S = 600.0  # for one run
_SPEEDS = ("time", "step_s", "tokens_per_s", "mfu", "peak_memory_bytes")
_MODEL = dict(d_model=64, n_layers=1, n_heads=4, n_kv_heads=2, d_ff=128, head_dim=16)


@dataclasses.dataclass(frozen=True)
class Fault:
    """What is injected into one process, and how the others are to end.

    Attributes:
      name: for the table.
      inject: kind for `--inject`.
      last: whether it is the last process's, otherwise the first one's.
      says: what every process that lives must say.
      status: of the processes that live.
      flags: of all processes.
      dies: whether the process itself cannot speak any more.
    """

    name: str
    inject: str
    last: bool
    says: str
    status: int = 1
    flags: tuple[str, ...] = ()
    dies: bool = False


_SILENT = "has not been heard from"
# The first that finds process 0 silent kills it, and the others find it gone.
_SILENT_FIRST = f"process 0 of .* ({_SILENT}|has gone, and its coordinator)"
FAULTS = (
    Fault("source raises in the last", "source_raises", True, "OSError: the data source failed"),
    Fault("source raises in the first", "source_raises", False, "OSError: the data source failed"),
    Fault(
        "source stalls in the last",
        "source_stalls",
        True,
        "TimeoutError: no batch came within 3 s",
        flags=("--config.data_timeout=3",),
    ),
    Fault("disk full in the first", "full_disk", False, "OSError: .*File too large"),
    Fault("disk full in the last", "full_disk", True, "File too large|EFBIG"),
    Fault("NaN", "nan_loss", True, "NonFiniteError: step .* is not finite"),
    Fault("read-only in the first", "read_only", False, "Permission denied"),
    Fault("hook raises in the last", "hook_raises", True, "LookupError: a hook failed"),
    Fault("hook raises in the first", "hook_raises", False, "LookupError: a hook failed"),
    Fault(
        "step hangs in the last",
        "hangs",
        True,
        "has not finished in 10 s",
        flags=("--step_timeout=10",),
    ),
    Fault("kill -9 in the last", "kill", True, _SILENT, dies=True),
    Fault("kill -9 in the first", "kill", False, "has gone", dies=True),
    Fault("kill -STOP in the last", "stop", True, _SILENT, dies=True),
    Fault("kill -STOP in the first", "stop", False, _SILENT_FIRST, dies=True),
    Fault("SIGTERM in the last", "sigterm", True, "SIGTERM in process", status=RUN_AGAIN),
)


class Processes:
    """The processes of one run, from their start to their end."""

    def __init__(self, folder: Path, given: Sequence[str], faulty: int = -1, inject: str = ""):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        self.logs = [folder.with_name(f"{folder.name}.{i}.log") for i in range(_PROCESSES.value)]
        self.running: list[subprocess.Popen] = []
        for index, log in enumerate(self.logs):
            own = [f"--inject={inject}"] if index == faulty else []
            environment = dict(os.environ)
            if _GPUS.value:
                environment["CUDA_VISIBLE_DEVICES"] = str(index)
            with open(log, "w") as file:
                command = [
                    *(sys.executable, "-m", "experiments.train", f"--workdir={folder}", *given),
                    f"--coordinator=localhost:{port}",
                    f"--num_processes={_PROCESSES.value}",
                    f"--process_id={index}",
                    *own,
                ]
                self.running.append(
                    subprocess.Popen(command, stdout=file, stderr=file, env=environment)
                )

    def said(self, index: int) -> str:
        return self.logs[index].read_text(errors="replace")

    def keep(self, name: str) -> None:
        """Keeps the logs, which those of the next run would replace."""
        for log in self.logs:
            log.rename(log.with_suffix(f".{name}.log"))

    def shows(self, text: str) -> bool:
        """Whether process 0, which speaks for all, has said a text."""
        return text in self.said(0)

    def catches(self, number: int) -> bool:
        """Whether all processes have a handler for a signal."""
        for process in self.running:
            found = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())
            if found is None or not int(found[1], 16) >> (number - 1) & 1:
                return False
        return True

    def until(self, condition: Callable[..., bool], *given: object) -> None:
        """Waits until condition(*given); raises RuntimeError if a process ends before."""
        while not condition(*given):
            for index, process in enumerate(self.running):
                if process.poll() is not None:
                    ended = f"process {index} ended with status {process.returncode}"
                    for other in self.running:
                        other.kill()
                    raise RuntimeError(f"{ended} before it was asked to: {self.logs[index]}")
            time.sleep(0.05)

    def wait(self, says: str, faulty: int = -1, limit_s: float = _LIMIT_S) -> dict[str, float]:
        """Waits until all have ended, and kills them at a limit.

        Returns when a process has ended or stopped ("gone"), when each but a faulty one that is
        gone has said something ("named"), and when all had ended ("ended"), in seconds.
        """
        times: dict[str, float] = {}
        began = time.monotonic()
        while len(times) < 3 and time.monotonic() - began < limit_s:
            time.sleep(0.1)
            states = [_state(process) for process in self.running]
            now = time.monotonic()
            if set(states) & {"T", "ended"}:
                times.setdefault("gone", now)
            others = [i for i in range(len(states)) if i != faulty]
            if says and all(re.search(says, self.said(i)) for i in others):
                times.setdefault("named", now)
            if set(states) == {"ended"}:
                times.setdefault("ended", now)
                break
        for process in self.running:
            process.kill()
        return times


def _state(process: subprocess.Popen) -> str:
    """A letter as ps has it, or "ended"."""
    if process.poll() is not None:
        return "ended"
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def _given(folder: Path, steps: int, every: int) -> list[str]:
    """Flags of a small run."""
    text = folder / "text.jsonl"
    if not text.exists():
        rng = random.Random(0)
        words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(64)]
        texts = [" ".join(rng.choices(words, k=40)) for _ in range(400)]
        text.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    config = {
        "data": f"jsonl:{text}",
        "cache_dir": folder / "cache",
        "mesh": "fsdp",
        "seq_len": 64,
        "batch_size": 8,
        "num_steps": steps,
        "valid.every": 1000,
        "valid.batches": 1,
        "valid.fraction": 0.1,
        "unroll": 1,
        "checkpoint.every": every,
        "resume_with_changes": True,
        **{f"model_overrides.{name}": value for name, value in _MODEL.items()},
    }
    return ["--config=configs/base.py", *(f"--config.{key}={v}" for key, v in config.items())]


def _numbers(folder: Path) -> list[dict]:
    lines = each_line(folder / "metrics.jsonl")
    return [{key: v for key, v in line.items() if key not in _SPEEDS} for line in lines]


def _newest(folder: Path) -> int:
    """The step of the newest checkpoint, 0 for none."""
    steps = [int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdigit()]
    return max(steps, default=0)


def _print_row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def _finish(folder: Path, steps: int, every: int) -> None:
    """Ends the run, and says whether its numbers are those of a run without faults."""
    for path in (folder / "run", folder / "whole"):
        Processes(path, _given(folder, steps, every)).wait("", limit_s=10 * _LIMIT_S)
    resumed = [
        e["step"] for e in each_line(folder / "run/events.jsonl") if e["kind"] == Event.RESUME
    ]
    run, whole = _numbers(folder / "run"), _numbers(folder / "whole")
    equal = "equal" if run == whole and len(run) == steps else "DIFFERENT"
    print(f"\nResumed at steps {resumed}; the numbers of all {len(run)} steps are {equal}.")


def _inject_all(folder: Path) -> None:
    faults = [fault for fault in FAULTS if not _ONLY.value or fault.name in _ONLY.value]
    steps = (len(faults) + 2) * 2 * _EVERY
    given = _given(folder, steps, _EVERY)
    _print_row("fault", "said by all that live", "after, s", "all gone after, s", "status", "kept")
    _print_row(*["---"] * 6)
    for fault in faults:
        faulty = _PROCESSES.value - 1 if fault.last else 0
        step = _newest(folder / "run") + _EVERY + 2
        run = Processes(folder / "run", [*given, *fault.flags], faulty, f"{fault.inject}@{step}")
        times = run.wait(fault.says, faulty if fault.dies else -1)
        codes = [process.returncode for process in run.running]
        living = [code for i, code in enumerate(codes) if not (fault.dies and i == faulty)]
        began = (
            times["gone"]
            if fault.dies and "gone" in times
            else times["named"]
            if "named" in times
            else None
        )
        dumped = any("stack trace" in run.said(i) for i in range(len(codes)))
        named, ended = (
            "never" if began is None or key not in times else f"{times[key] - began:.0f}"
            for key in ("named", "ended")
        )
        right = set(living) == {fault.status} and not dumped
        kept = _newest(folder / "run")
        if not right or "named" not in times:
            run.keep(fault.name.replace(" ", "_"))
        _print_row(
            fault.name,
            "yes" if "named" in times else "NO",
            named,
            ended,
            f"{codes}{'' if right else ' WRONG'}",
            f"{kept} of {step}{'' if kept >= step - 2 else ' LOST'}",
        )
    _finish(folder, steps, _EVERY)


def _stop_at_moments(folder: Path) -> None:
    steps, every = 100 * (_MOMENTS.value + 1), 1000
    given, rng = _given(folder, steps, every), random.Random(0)
    _print_row("moment", "process", "seconds after", "all gone after, s", "status", "kept")
    _print_row(*["---"] * 6)
    for moment in range(_MOMENTS.value):
        before = _newest(folder / "run")
        run = Processes(folder / "run", given)
        run.until(run.catches, signal.SIGTERM)
        # Half of them after the first step; the others from the join on.
        began, index, delay = "the join", rng.randrange(_PROCESSES.value), 15 * rng.random() ** 2
        if moment % 2:
            began, delay = "the first step", 1.5 * rng.random()
            run.until(run.shows, f"\nstep {before + 1}/")
        time.sleep(delay)
        asked = time.monotonic()
        run.running[index].send_signal(signal.SIGTERM)
        times = run.wait("")
        ended = f"{times['ended'] - asked:.1f}" if "ended" in times else "NEVER"
        codes = [process.returncode for process in run.running]
        kept = _newest(folder / "run")
        if set(codes) != {RUN_AGAIN}:
            run.keep(f"moment_{moment + 1}")
        taken = sum(1 for _ in each_line(folder / "run/metrics.jsonl")) if kept else 0
        _print_row(
            moment + 1,
            index,
            f"{began} {delay:.1f}",
            ended,
            f"{codes}{'' if set(codes) == {RUN_AGAIN} else ' WRONG'}",
            f"{kept} of {taken}{', as before' if kept == before else ''}",
        )
    _finish(folder, steps, every)


def main(arguments: Sequence[str]) -> None:
    folder = Path(_WORKDIR.value).absolute()
    folder.mkdir(parents=True)
    if _MOMENTS.value:
        _stop_at_moments(folder)
    else:
        _inject_all(folder)


if __name__ == "__main__":
    app.run(main)
