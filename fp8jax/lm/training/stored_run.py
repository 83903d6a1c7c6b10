"""Runs whose workdir lies in an object store: trained in a copy here, uploaded at each checkpoint.

A store appends to no file, renames no folder and holds no lock, and Orbax 0.12 cannot save to one
through fsspec. So such a run works in a folder of this machine as every run does, and what is new
there is uploaded once a checkpoint is committed, and at the end.

- A step of the store counts once it has its hashes, `sha256.json`, which are uploaded last. What a
  killed upload leaves is a step without hashes, which nobody reads.
- The steps of the store form one line of history, as those of any workdir do. Steps that the run
  went back behind are deleted before a step is committed, since a resume would take them for newer
  ones. Steps that the run no longer keeps are deleted afterwards.
- A lock in a store would outlive a killed run. Here who begins last owns the workdir: it writes
  `owner.json`, and a run that finds another one there stops and uploads nothing more.
- A killed run leaves its copy here. The run that comes next goes on in it if no other has owned the
  workdir since; else it begins with what the store has.
"""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import logging

from fp8jax.device import processes
from fp8jax.lm.data.urls import store_errors
from fp8jax.lm.interop.folders import HUGGING_FACE
from fp8jax.lm.records.checkpoint_files import HASHES
from fp8jax.lm.records.workdir_lock import LOCK, HeldError, lock_file
from fp8jax.telemetry.files import FOLDER

CACHE = "~/.cache/fp8jax/runs"
CLAIM = "owner.json"

_CHECKPOINTS = "checkpoints"
# What a run that goes on reads of its workdir, beside the checkpoints.
_READ = ("config.json", "metrics.jsonl", "samples.jsonl", "events.jsonl")
_READ_FOLDERS = (HUGGING_FACE, FOLDER)


class StoredRun:
    """A workdir in a store, and the copy that a run works in.

    Attributes:
      url: of the workdir.
      folder: the copy.
    """

    def __init__(self, url: str, store: Any, root: str, folder: Path):
        """Stores the settings; reads and changes nothing.

        Args:
          url: of the workdir, for people.
          store: a file system of fsspec.
          root: the workdir, as that file system names it.
          folder: the copy; need not exist.
        """
        self.url, self.folder = url, folder
        self._store, self._root = store, root
        self._before: str | None = None  # the owner's file when this run came
        self._owner: str | None = None  # the same, once this run is the owner
        self._kept = False  # whether the copy is that of a killed run, which this one goes on
        self._steps: dict[int, str] = {}  # of the store: step -> its hashes
        self._uploaded: dict[str, tuple[int, int]] = {}  # file -> (bytes, time of change)

    def fetch(self) -> None:
        """Makes the copy the newest state of the workdir; changes nothing in the store.

        Raises:
          ValueError: the store does not answer.
        """
        with store_errors(self.url):
            self._before, mine = self._read_owner(), self.folder / CLAIM
            self._kept = self._before is not None and mine.exists()
            self._kept = self._kept and mine.read_text() == self._before
            if not self._kept and self.folder.exists():
                shutil.rmtree(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            names = self._names(self._root)
            self._steps = self._committed(names)
            if not self._kept:
                self._download(names)

    def claim(self) -> None:
        """Makes this run the owner of the workdir, before anything is written there.

        Raises:
          BlockingIOError: another program has become the owner since `fetch`.
          ValueError: the store does not answer.
        """
        self._require_owner(self._before)
        about = {"host": socket.gethostname(), "pid": os.getpid(), "run": secrets.token_hex(8)}
        owner = json.dumps(about)
        with store_errors(self.url):
            self._store.pipe_file(self._at(CLAIM), owner.encode())
            (self.folder / CLAIM).write_text(owner)
        self._owner = owner
        what = "goes on in" if self._kept else "works in"
        logging.info("%s: this run %s %s and uploads each checkpoint", self.url, what, self.folder)

    def upload(self) -> None:
        """Uploads what is new in the copy, and deletes the steps that it no longer has.

        Raises:
          BlockingIOError: another program has begun to train in the workdir since.
          ValueError: the store does not answer.
        """
        self._require_owner(self._owner)
        with store_errors(self.url):
            here = self._steps_here()
            new = sorted(step for step in here.keys() if here[step] != self._hashes(step))
            for step in sorted(self._steps):
                if new and step >= new[0] and (step not in here or step in new):
                    self._delete(step)
            self._upload_records()
            for step in new:
                self._upload_step(step, here[step])
            for step in sorted(self._steps.keys() - here.keys()):
                self._delete(step)

    def end(self) -> None:
        """Uploads the rest, and deletes the copy if the store has all of it.

        Raises:
          BlockingIOError, ValueError: as `upload`; then the copy stays.
        """
        if self._owner is not None:
            self.upload()
        uploaded = self._steps.keys() >= _step_folders(self.folder).keys()
        if uploaded if self._owner is not None else not self._kept:
            shutil.rmtree(self.folder)

    # The steps ------------------------------------------------------------------------------------

    def _hashes(self, step: int) -> str | None:
        """The hashes of a step of the store; None if it has no such step."""
        return self._steps[step] if step in self._steps else None

    def _steps_here(self) -> dict[int, str]:
        """Returns the hashes of each step of the copy that has them."""
        files = {step: path / HASHES for step, path in _step_folders(self.folder).items()}
        return {step: file.read_text() for step, file in files.items() if file.exists()}

    def _committed(self, names: list[str]) -> dict[int, str]:
        parts = [name.split("/") for name in names]
        steps = [
            part[1]
            for part in parts
            if len(part) == 3 and part[0] == _CHECKPOINTS and part[2] == HASHES
        ]
        return {
            int(step): self._store.cat_file(self._at(_CHECKPOINTS, step, HASHES)).decode()
            for step in steps
            if step.isdigit()
        }

    def _upload_step(self, step: int, hashes: str) -> None:
        path = self.folder / _CHECKPOINTS / str(step)
        files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != HASHES)
        self._put({file: file.relative_to(self.folder).as_posix() for file in files})
        self._store.pipe_file(self._at(_CHECKPOINTS, str(step), HASHES), hashes.encode())
        self._steps[step] = hashes

    def _delete(self, step: int) -> None:
        """Deletes a step of the store; first its hashes, so that half a step does not count."""
        folder = self._at(_CHECKPOINTS, str(step))
        self._store.rm_file(f"{folder}/{HASHES}")
        del self._steps[step]
        rest = self._names(folder)
        if rest:
            self._store.rm([f"{folder}/{name}" for name in rest])

    # Other files ----------------------------------------------------------------------------------

    def _upload_records(self) -> None:
        """Uploads the files beside the checkpoints that changed, deletes those that are gone.

        They are copied first: a run appends to them meanwhile.
        """
        now: dict[str, tuple[int, int]] = {}
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder).as_posix()
            own = name.startswith((f"{_CHECKPOINTS}/", ".seen-")) or name in (LOCK, CLAIM)
            with contextlib.suppress(FileNotFoundError):  # the run deletes some
                if path.is_file() and not own and path.suffix != ".tmp":
                    stat = path.stat()
                    now[name] = (stat.st_size, stat.st_mtime_ns)
        changed = [name for name in now if name not in self._uploaded or self._differs(name, now)]
        with tempfile.TemporaryDirectory(dir=self.folder.parent) as frozen:
            copies: dict[Path, str] = {}
            for i, name in enumerate(changed):
                with contextlib.suppress(FileNotFoundError):
                    shutil.copyfile(self.folder / name, Path(frozen, str(i)))
                    copies[Path(frozen, str(i))] = name
            self._put(copies)
        if gone := [name for name in self._uploaded if name not in now]:
            self._store.rm([self._at(name) for name in gone])
        self._uploaded = now

    def _differs(self, name: str, now: dict[str, tuple[int, int]]) -> bool:
        return self._uploaded[name] != now[name]

    def _download(self, names: list[str]) -> None:
        """Copies what a run reads: all committed steps, and the records."""
        steps = tuple(f"{_CHECKPOINTS}/{step}/" for step in self._steps)
        folders = tuple(f"{folder}/" for folder in _READ_FOLDERS)
        wanted = [name for name in names if name in _READ or name.startswith((*steps, *folders))]
        if wanted:
            logging.info("%s: copying %d files to %s", self.url, len(wanted), self.folder)
            here = [str(self.folder / name) for name in wanted]
            self._store.get(rpath=[self._at(name) for name in wanted], lpath=here)

    # The store ------------------------------------------------------------------------------------

    def _at(self, *names: str) -> str:
        return "/".join((self._root, *names))

    def _names(self, folder: str) -> list[str]:
        """Returns the names of all objects below a folder, relative to it."""
        self._store.invalidate_cache()
        found = (name.lstrip("/") for name in self._store.find(folder))
        prefix = folder.strip("/") + "/"
        return sorted(name.removeprefix(prefix) for name in found if name.startswith(prefix))

    def _put(self, files: dict[Path, str]) -> None:
        if files:
            self._store.put([str(path) for path in files], [self._at(n) for n in files.values()])

    def _require_owner(self, owner: str | None) -> None:
        with store_errors(self.url):
            found = self._read_owner()
        if found != owner:
            raise BlockingIOError(
                f"another program has begun to train in the workdir {self.url} since ({found}): "
                "this one stops, and uploads nothing more"
            )

    def _read_owner(self) -> str | None:
        try:
            return self._store.cat_file(self._at(CLAIM)).decode()
        except FileNotFoundError:
            return None


@contextlib.contextmanager
def stored_run(url: str) -> Iterator[StoredRun]:
    """Gives the copy of a workdir in a store; at the end uploads the rest, and deletes the copy.

    The copy stays if not all of it could be uploaded.

    Args:
      url: `s3://BUCKET/NAME` or `gs://BUCKET/NAME`.

    Raises:
      ValueError: the store does not answer, the URL is a bucket, or there are several processes.
      BlockingIOError: another program of this machine trains in the workdir.
      OSError: the copy cannot be written.
    """
    if processes.count() > 1:
        raise ValueError(
            f"the workdir {url} is in an object store, which is for runs of one process: several "
            "need a directory in a mounted file system that they share"
        )
    with store_errors(url) as bucket:
        url = url.rstrip("/")
        if url == bucket:
            raise ValueError(f"expected {bucket}/NAME, got {url}: a run needs a folder of its own")
        import fsspec

        store, root = fsspec.url_to_fs(url)
    digest = hashlib.sha256(url.encode()).hexdigest()[:12]
    folder = Path(CACHE).expanduser() / f"{url.rpartition('/')[2]}-{digest}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock_file(folder.with_name(f"{folder.name}.lock")))
        except HeldError as error:
            raise BlockingIOError(
                f"another program{error} trains in the workdir {url}: wait for it or stop it, or "
                "take another --workdir"
            ) from error
        run = StoredRun(url, store, root, folder)
        run.fetch()
        try:
            yield run
        except BaseException:
            with _said(url, folder):
                run.end()
            raise
        run.end()


@contextlib.contextmanager
def _said(url: str, folder: Path) -> Iterator[None]:
    """Logs what a last upload raises; another error ends the run already."""
    try:
        yield
    except (OSError, ValueError) as error:
        logging.warning("%s does not have all of %s: %s", url, folder, error)


def _step_folders(workdir: Path) -> dict[int, Path]:
    folder = workdir / _CHECKPOINTS
    found = folder.iterdir() if folder.is_dir() else ()
    return {int(path.name): path for path in found if path.name.isdigit()}
