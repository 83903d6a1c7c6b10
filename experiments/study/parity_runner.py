"""Runs the chains of the study on the GPUs of one machine, within the time that there is.

A thread for each GPU takes one chain after the other and starts its programs, one process at a
time; a GPU that is listed twice has two threads. Two times bound it, in seconds from now:

    budget    when this command must have ended: programs are told to save before, and the next
              command on the same machine goes on with what they saved
    machine   when the machine goes away: no chain begins that would not be finished by then

A chain that has begun here always goes on. On another machine nothing of it is left but the forks
in the ledger: it begins anew, for the forks that are missing. Chains of one seed run on one kind of
card, that of the seed's first line.

    WORKDIR/ledger.jsonl            the lines of this machine, also written to --ledger
    WORKDIR/CHAIN/done/PART         seconds of a program that is done, shared with its neighbors
    WORKDIR/CHAIN/PART.log          what it printed

A trunk that several chains share lies in the folder of the chain that it is named after, and stays.
Whoever comes first trains it; the others wait, and a thread takes a chain that waits only if there
is no other.
"""

import concurrent.futures
import dataclasses
import json
import os
import shutil
import signal
import statistics
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from experiments.study import parity_ledger
from experiments.study.parity_ledger import Line
from experiments.study.parity_parts import READERS, SCORE, Part, non_finite
from experiments.study.parity_plan import Chain, Fork
from fp8jax.lookup import lookup

GRACE = 30.0  # seconds that a program has to save
START = 15.0  # seconds that a program takes before it works: imports, compiled programs, data
PROGRAMS = 3  # of a fork


@dataclasses.dataclass(frozen=True)
class Gpu:
    index: int
    card: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a call of the runner is given.

    Attributes:
      chains: in the order of the plan.
      parts: chain, fork and the chain's folder -> the programs.
      gpus: each takes one chain at a time.
      workdir: of this machine.
      ledger: the committed file.
      budget, machine: seconds, as the module says.
      facts: the fields of a line that do not depend on the chain: setting, data, commit, code and
        versions.
    """

    chains: Sequence[Chain]
    parts: Callable[[Chain, Fork, Path], Sequence[Part]]
    gpus: Sequence[Gpu]
    workdir: Path
    ledger: Path
    budget: float
    machine: float
    facts: Mapping[str, Any]


def find_gpus() -> list[Gpu]:
    """Returns the GPUs that nvidia-smi lists; of CUDA_VISIBLE_DEVICES, if that has indices.

    Raises:
      ValueError: there is no such program, or CUDA_VISIBLE_DEVICES names a GPU otherwise than by
        an index that it lists.
    """
    query = ("nvidia-smi", "--query-gpu=index,name", "--format=csv,noheader")
    try:
        listed = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise ValueError("there is no nvidia-smi: the study trains on NVIDIA GPUs") from None
    pairs = [line.partition(",") for line in listed.splitlines()]
    found = {index: Gpu(int(index), name.strip()) for index, _, name in pairs}
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = found if chosen is None else chosen.split(",")
    return [lookup("GPU of CUDA_VISIBLE_DEVICES", name.strip(), found) for name in names]


def run(given: Run) -> list[Line]:
    """Runs what fits and returns the whole ledger.

    Raises:
      ChildProcessError: a program failed otherwise than by a loss that is not finite. The other
        GPUs have gone on until their time was up.
    """
    runner = _Runner(given)
    with concurrent.futures.ThreadPoolExecutor(len(given.gpus)) as pool:
        for done in [pool.submit(runner.work, gpu) for gpu in given.gpus]:
            done.result()
    if runner.failures:
        raise ChildProcessError("; ".join(runner.failures))
    return runner.lines


class _Runner:
    """The state that the threads share; all of it changes under the lock."""

    def __init__(self, given: Run):
        self.given = given
        now = time.monotonic()
        self.stop_at = now + given.budget - GRACE
        self.leave_at = now + given.machine - GRACE
        self.failures: list[str] = []
        self._lock = threading.Lock()
        self._taken: set[str] = set()
        self._running: list[Chain] = []
        self._cards: dict[int, str] = {}  # of the seeds that run now
        self._outputs: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)
        self.lines: list[Line] = []
        self._save()

    def work(self, gpu: Gpu) -> None:
        """Takes one chain after the other, until none is left or the time is up."""
        while (chain := self._take(gpu)) is not None:
            logging.info("GPU %d: %s", gpu.index, chain.name)
            try:
                self._run_chain(chain, gpu)
            except Exception as error:  # one arm's failure must not end those on other GPUs
                logging.warning("%s: %s", chain.name, error)
                self.failures.append(f"{chain.name}: {error}")
            finally:
                with self._lock:
                    self._running.remove(chain)

    def _run_chain(self, chain: Chain, gpu: Gpu) -> None:
        folder = self._folder(chain)
        while missing := self._missing(chain):
            if not self._run_fork(chain, missing[0], folder, gpu) or self._put_back(chain):
                return
        if not chain.shared:
            shutil.rmtree(folder, ignore_errors=True)

    def _run_fork(self, chain: Chain, fork: Fork, folder: Path, gpu: Gpu) -> bool:
        """Runs a fork's programs and writes its line; returns whether there was time for it."""
        programs = self.given.parts(chain, fork, folder)
        stopped, scores = "", {}
        for part in programs:
            code = self._run_once(part, gpu)
            if code is None:
                return False
            if code:
                stopped = non_finite(part.output) if part.kind != SCORE else ""
                if not stopped:
                    raise ChildProcessError(f"{part.name} failed: {_last_line(part)}")
                break
            if part.kind in READERS:
                scores = READERS[part.kind](part.output, chain.arm.precision)
        line = self._line(chain, fork, gpu, programs)
        self._save(dataclasses.replace(line, **scores, stopped=stopped))
        for part in programs[1:]:  # the trunk goes on, and needs the disk
            shutil.rmtree(part.output, ignore_errors=True)
        return True

    def _run_once(self, part: Part, gpu: Gpu) -> int | None:
        """Runs a program unless it is done; returns its status, or None if the time was up."""
        if part.mark.exists():
            return 0
        with self._lock:
            alone = self._outputs[part.output]
        with alone:  # of a trunk that several chains share
            return 0 if part.mark.exists() else _run_part(part, gpu, self.stop_at)

    def _line(self, chain: Chain, fork: Fork, gpu: Gpu, programs: Sequence[Part]) -> Line:
        spent = [
            sum(map(float, path.read_text().split()))
            for part in programs
            if (path := part.folder / f"{part.name}.seconds").exists()
        ]
        return Line(
            arm=chain.arm.name,
            seed=chain.seed,
            fork=fork.name,
            tokens=fork.tokens,
            card=gpu.card,
            trunk=(self._folder(chain.trunk) / "begun").read_text(),
            seconds=round(sum(spent), 1),
            commands=[part.text() for part in programs],
            **self.given.facts,
        )

    # What runs next -------------------------------------------------------------------------------

    def _take(self, gpu: Gpu) -> Chain | None:
        """Returns the next chain for a GPU: first those that have begun here; None if none fits."""
        now = time.monotonic()
        if now >= self.stop_at:
            return None
        with self._lock:
            free = [
                chain
                for chain in self.given.chains
                if chain.name not in self._taken
                and self._missing(chain)
                and self._card(chain, gpu) == gpu.card
            ]
            begun = [chain for chain in free if self._folder(chain).exists()]
            fits = [chain for chain in free if now + self.estimate(chain, gpu) <= self.leave_at]
            ready = [chain for chain in [*begun, *fits] if not self._waits(chain)]
            for chain in [*ready, *begun, *fits][:1]:
                self._taken.add(chain.name)
                self._running.append(chain)
                self._cards[chain.seed] = gpu.card
                self._begin(chain)
                return chain
        return None

    def _waits(self, chain: Chain) -> bool:
        """Returns whether a chain that runs is to train the trunk that this one needs next."""
        if chain.trunk.name == chain.name or not (missing := self._missing(chain)):
            return False
        trunk = self.given.parts(chain, missing[0], self._folder(chain))[0]
        others = [other for other in self._running if other.name != chain.name]
        return not trunk.mark.exists() and chain.trunk.name in {o.trunk.name for o in others}

    def _put_back(self, chain: Chain) -> bool:
        """Puts a chain back that would wait, for any thread; returns whether it did."""
        with self._lock:
            if waits := self._waits(chain):
                self._taken.remove(chain.name)
        return waits

    def _begin(self, chain: Chain) -> None:
        for folder in (self._folder(chain), self._folder(chain.trunk)):
            (folder / "done").mkdir(parents=True, exist_ok=True)
            if not (folder / "begun").exists():
                (folder / "begun").write_text(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))

    def _folder(self, chain: Chain) -> Path:
        return self.given.workdir / chain.folder

    def _comparable(self) -> list[Line]:
        facts = self.given.facts
        return parity_ledger.comparable(self.lines, facts["setting"], facts["data"])

    def _missing(self, chain: Chain) -> list[Fork]:
        own = (chain.arm.name, chain.seed)
        done = {line.fork for line in self._comparable() if (line.arm, line.seed) == own}
        return [fork for fork in chain.forks if fork.name not in done]

    def _card(self, chain: Chain, gpu: Gpu) -> str:
        """Returns the kind of card that a chain's seed runs on; this GPU's if it may choose."""
        if chain.seed in self._cards:
            return self._cards[chain.seed]
        cards = [line.card for line in self._comparable() if line.seed == chain.seed]
        return cards[0] if cards else gpu.card

    def estimate(self, chain: Chain, gpu: Gpu) -> float:
        """Returns the seconds that the missing forks of a chain take, its trunk from the start.

        The trunk of another chain is not counted.

        The speed is that of the arm's lines of this setting and card, or the plan's guess. Lines
        count what their programs took in all, so they are slow rather than fast.
        """
        missing = self._missing(chain)
        last = missing[-1]
        trunk = last.begin if chain.arm.trunk is None else 0
        tokens = (trunk + sum(fork.steps for fork in missing)) * last.step_tokens
        own = [
            line.seconds / line.tokens
            for line in self._comparable()
            if line.arm == chain.arm.name and line.card == gpu.card and not line.stopped
            if line.fork == chain.forks[0].name  # whose trunk is all of its own
        ]
        per_token = statistics.fmean(own) if own else 1 / chain.arm.tokens_per_second
        return tokens * per_token + START * PROGRAMS * len(missing)

    # The ledger -----------------------------------------------------------------------------------

    def _save(self, *new: Line) -> None:
        """Adds lines to the ledger of this machine and to the committed one, each read anew."""
        with self._lock:
            here = self.given.workdir / "ledger.jsonl"
            known = [parity_ledger.read(path) for path in (self.given.ledger, here)]
            self.lines = parity_ledger.merged(*known, new)
            for path in (here, self.given.ledger):
                parity_ledger.write(path, self.lines)


# Programs -----------------------------------------------------------------------------------------


def _run_part(part: Part, gpu: Gpu, stop_at: float) -> int | None:
    """Runs a program on a GPU; returns its status, or None if the time was up before its end."""
    if (left := stop_at - time.monotonic()) <= 0:
        return None
    began = time.monotonic()
    shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # the GPU's memory, by several programs
    own = dict(part.environment) | {"CUDA_VISIBLE_DEVICES": str(gpu.index)}
    with open(part.folder / f"{part.name}.log", "ab") as log:
        process = subprocess.Popen(
            part.command, env=shared | os.environ | own, stdout=log, stderr=log
        )
        code: int | None
        try:
            code = process.wait(left)
        except subprocess.TimeoutExpired:
            code = None
            _end(process)
    seconds = time.monotonic() - began
    with open(part.folder / f"{part.name}.seconds", "a", encoding="utf-8") as file:
        file.write(f"{seconds:.1f}\n")
    if code == 0:
        part.mark.write_text(json.dumps(round(seconds, 1)))
    return code


def _end(process: subprocess.Popen) -> None:
    """Asks a program to save and end, and kills it if it does not."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_line(part: Part) -> str:
    text = (part.folder / f"{part.name}.log").read_text(encoding="utf-8", errors="replace").strip()
    return text.splitlines()[-1] if text else "it said nothing"
