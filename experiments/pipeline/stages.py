"""Stages that are run once: each has a folder, and is done when the folder has its result.

    WORKDIR/pipeline.json          written first: this folder is a pipeline's
    WORKDIR/STAGE/begun.json       written first, if a killed stage goes on with what it has left
    WORKDIR/STAGE/result.json      written last, whole or not at all: this stage is done
    WORKDIR/locks/STAGE            the lock of the program that makes it

Both hold what the stage was asked, and hashes of the results it is made from; a result has what the
stage found, too. So a stage is never taken for another one, after a change of the config or of an
earlier stage.

Several programs may make one pipeline, such as one for each GPU: each takes the first stage that
nobody makes and whose needs are done.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from fp8jax.lm.cli.command import INTERRUPTED
from fp8jax.lm.records.config_keys import with_new_keys
from fp8jax.lm.records.differences import config_difference, listed
from fp8jax.lm.records.workdir_lock import LOCK, HeldError, lock_file, make_directory

RESULT, BEGUN, MARK, LOCKS = "result.json", "begun.json", "pipeline.json", "locks"

_POLL_SECONDS = 1.0

AGAIN = "The stages before it are done: the same command goes on from there"


class StageError(RuntimeError):
    """A stage failed or was stopped; those before it are done."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One step of a pipeline.

    Attributes:
      name: its folder below the workdir.
      needs: the names of stages that come first.
      asked: what it is asked, as JSON. Whoever asks something else needs another stage.
      make: makes it in its folder; returns what it found, as JSON.
      resumes: whether `make` goes on with what a killed one has left; else the folder is emptied.
    """

    name: str
    needs: tuple[str, ...] = ()
    asked: Mapping[str, Any]
    make: Callable[[Path], Mapping[str, Any]]
    resumes: bool = False


def refuse_other_folder(workdir: Path) -> None:
    """Raises ValueError if the folder holds something else than a pipeline; it may be missing."""
    if not workdir.is_dir():
        return
    # A kill may have left the lock, and what `_write` had begun.
    others = {path.name for path in workdir.iterdir()} - {LOCK, _begun(MARK), MARK}
    # Asked after the listing: another program may be marking this folder and making stages in it.
    if others and not (workdir / MARK).exists():
        raise ValueError(
            f"{workdir} is not the workdir of a pipeline: it holds {min(others)}"
            f"{f' and {len(others) - 1} more' if len(others) > 1 else ''}; take another --workdir"
        )


def begin(workdir: Path) -> None:
    """Marks a workdir, which is made if missing; its stages may then empty their folders.

    Raises ValueError if the folder holds something else.
    """
    refuse_other_folder(workdir)
    with locked(workdir):
        if not (workdir / MARK).exists():
            _write(workdir / MARK, {})


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Holds the lock of a workdir, for which it waits; the folder is made if missing."""
    make_directory(workdir)
    with lock_file(workdir / LOCK, wait=True):
        yield


def require_same(workdir: Path, stages: Sequence[Stage]) -> None:
    """Raises ValueError if a stage was asked something else, or made from another, when it began.

    Stages that are not done count if they go on with what they have left. The message has the first
    reason, and all folders that are to be removed: those of stages made from such a stage, too.
    """
    reasons: list[str] = []
    removed: list[str] = []
    for stage in stages:
        was = "is done with"
        if (before := read_result(workdir, stage.name)) is None and stage.resumes:
            was, before = "has begun with", _read(workdir, stage.name, BEGUN)
        if before is None:
            continue
        found = []
        if changes := config_difference(with_new_keys(before["asked"]), stage.asked):
            found.append(f"{stage.name} {was} other settings: {listed(changes)}")
        if others := [need for need in stage.needs if need not in before["made_from"]]:
            found.append(f"{stage.name} was not made from {others[0]}")
        for need, digest in before["made_from"].items():
            if not (now := _digest(workdir, need)):
                found.append(f"{stage.name} was made from {need}, which is missing")
            elif now != digest:
                found.append(f"{stage.name} was made from another {need}")
        if found or not before["made_from"].keys().isdisjoint(removed):
            reasons, removed = reasons + found, [*removed, stage.name]
    if removed:
        folders = " ".join(str(workdir / name) for name in removed)
        raise ValueError(f"{reasons[0]}; take another --workdir, or remove {folders}")


def run_stages(workdir: Path, stages: Sequence[Stage], whole: Sequence[Stage]) -> None:
    """Makes some stages of a whole pipeline, but not those that are done; waits for those that
    other programs make.

    Raises:
      StageError: a stage failed. It names the stage, and says how to go on.
    """
    names = [stage.name for stage in whole]
    titles = {n: f"stage {i} of {len(names)}, {n}" for i, n in enumerate(names, start=1)}
    waits = False
    while missing := [stage for stage in stages if read_result(workdir, stage.name) is None]:
        if any(_make_if_free(workdir, stage, titles[stage.name]) for stage in missing):
            waits = False
            continue
        if not waits:
            logging.info("waiting for other programs, which make what the next stages need")
        waits = True
        time.sleep(_POLL_SECONDS)


def _make_if_free(workdir: Path, stage: Stage, title: str) -> bool:
    """Makes a stage, unless its needs are not done or another program makes it: then False."""
    if any(read_result(workdir, need) is None for need in stage.needs):
        return False
    lock = workdir / LOCKS / stage.name
    lock.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock_file(lock))
        except HeldError:
            return False
        if read_result(workdir, stage.name) is None:  # another program may just have made it
            _make(workdir, stage, title)
    return True


def _make(workdir: Path, stage: Stage, title: str) -> None:
    logging.info("%s", title)
    started = time.monotonic()
    folder = workdir / stage.name
    if not stage.resumes:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    made_from = {need: _digest(workdir, need) for need in stage.needs}
    given = {"asked": stage.asked, "made_from": made_from}
    if stage.resumes:
        _write(folder / BEGUN, given)
    again = f"{AGAIN}. If it cannot, remove {folder}" if stage.resumes else AGAIN
    try:
        with contextlib.nullcontext() if stage.resumes else _ended_by_an_interrupt():
            found = stage.make(folder)
    except Exception as error:  # of any library: the line says how to go on
        said = " ".join(str(error).split()) or type(error).__name__
        raise StageError(f"{title}: {said}. {again}") from error
    seconds = round(time.monotonic() - started, 1)
    _write(folder / RESULT, given | {"found": found, "seconds": seconds})


@contextlib.contextmanager
def _ended_by_an_interrupt() -> Iterator[None]:
    """Ctrl-C ends the process here and now, in its main thread.

    A KeyboardInterrupt may come while XLA calls back into Python, where it is lost; and a Python
    that ends in order may crash on XLA's threads. What the stage has left is removed before it is
    made again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: Any) -> None:
        os.write(2, b"interrupted\n")
        os._exit(INTERRUPTED)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def count_done(workdir: Path, stages: Sequence[Stage]) -> int:
    return sum(read_result(workdir, stage.name) is not None for stage in stages)


def read_result(workdir: Path, name: str) -> dict[str, Any] | None:
    """Returns the result of a stage, None if it is not done.

    Raises ValueError if the file is damaged.
    """
    return _read(workdir, name, RESULT)


def _read(workdir: Path, name: str, file: str) -> dict[str, Any] | None:
    path = workdir / name / file
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; remove {path.parent}") from error


def _digest(workdir: Path, name: str) -> str:
    path = workdir / name / RESULT
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def _begun(name: str) -> str:
    return f".{name}.unfinished"


def _write(path: Path, content: Any) -> None:
    """Writes a JSON file that is never seen in part, by other programs or after a crash."""
    unfinished = path.with_name(_begun(path.name))
    with open(unfinished, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
