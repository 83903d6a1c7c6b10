"""Saves and restores checkpoints with Orbax's CheckpointManager, and detects damage it misses.

Each step gets a list of its files' SHA-256 hashes (checkpoint_files.py says why). It is written in
the background after Orbax has committed the step, and checked before the step is read. If the
process died between the two, the step has no list. Such a step is read too, but then only the
damage that Orbax itself detects is noticed.

Invariants:

- The steps in the directory form one line of history. `save` first renames every step later than
  the last saved or restored one, so that Orbax ignores it: to `corrupt-<step>` if it was found
  damaged, else to `abandoned-<step>` (the run went back to an earlier step, or started afresh).
- Only `save` deletes steps. It keeps the latest `keep` steps and the `keep_best` steps with the
  lowest metric.
- A step's metric is stored in the step's own JSON, under its hash, so it outlives the process. (If
  Orbax stored the metric, it would be an item of its own. Orbax fails at startup if that item is
  damaged, and with `best_fn` and `max_to_keep` it deletes the newest step.)
- Reading changes nothing on disk, so another process may read while a run writes.
- If a step is damaged, the step before it is read and a warning is logged. A checkpoint of another
  model raises an error.
"""

import dataclasses
import json
import logging as python_logging
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from jax.experimental import multihost_utils

from fp8jax.lm.records.checkpoint_files import (
    HASHES,
    find_damage,
    hash_files,
    list_files,
    short_error,
)
from fp8jax.lm.records.deferred_signals import deferred_signals
from fp8jax.lm.records.differences import abstract_leaf, require_same_structure, tree_structure
from fp8jax.lm.records.run_checkpoint import today

_META = "meta"


class DamagedError(RuntimeError):
    """There are checkpoints, but none can be read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """A restored checkpoint.

    Attributes:
      step: the number of finished steps.
      arrays: the requested pytrees, by name.
      meta: all of the meta that was saved.
    """

    step: int
    arrays: dict[str, Any]
    meta: dict[str, Any]


class Checkpointer:
    """Saves and restores pytrees of arrays and a JSON dict, by step.

    Attributes:
      rejected: (step, reason) of each step found damaged so far, in the order of detection.
      failure: why a save has failed in the background, None as long as none has. `wait` raises it,
        too, but of several processes only when all others have waited ten minutes.
    """

    rejected: list[tuple[int, str]]
    failure: BaseException | None

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int,
        keep: int,
        keep_best: int,
        on_commit: Callable[[], None] | None = None,
    ):
        """Stores the settings; changes nothing on disk.

        Args:
          directory: the directory of the steps, in a file system that all processes share.
          every: `should_save` is true at multiples of this number of steps.
          keep: how many of the latest steps stay on disk.
          keep_best: how many of the steps with the lowest metric stay as well, however old.
          on_commit: called in the background, in the first process, once a step and its hashes are
            on disk. The step counts as saved when it returns, and as failed if it raises.

        Raises:
          ValueError: `every` or `keep` is less than 1, `keep_best` is negative, or the directory is
            a URL.
          NotADirectoryError: the directory is a file.
        """
        if every < 1 or keep < 1:
            raise ValueError(f"{every=} and {keep=} must be at least 1")
        if keep_best < 0:
            raise ValueError(f"{keep_best=} must be at least 0")
        if "://" in str(directory):
            raise ValueError(
                f"{directory} is a URL: checkpoints need a directory in a mounted file system"
            )
        self.rejected, self.failure = [], None
        self._directory = Path(os.path.abspath(directory))
        if self._directory.exists() and not self._directory.is_dir():
            raise NotADirectoryError(f"{self._directory} is a file: checkpoints need a directory")
        self._every, self._keep, self._keep_best = every, keep, keep_best
        self._on_commit = on_commit
        self._commit_failure: Exception | None = None  # that `wait` has yet to raise
        self._manager: ocp.CheckpointManager | None = None  # the first save creates it
        self._hashing: threading.Thread | None = None
        self._tip = -1  # the last saved or restored step
        # (step, what the paths of the checked files begin with) -> the record of an undamaged step.
        self._sound: dict[tuple[int, str | tuple[str, ...]], dict[str, Any]] = {}
        self._damaged: set[int] = set()
        self._metrics: dict[int, float | None] = {}  # of all steps saved or checked so far
        python_logging.getLogger("absl").addFilter(_is_no_orbax_info)
        python_logging.getLogger("absl").addFilter(self._note_failure)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def should_save(self, step: int) -> bool:
        """Whether to save at `step`. The caller decides about the last step of a run itself."""
        return step > 0 and step % self._every == 0

    def save(
        self, step: int, arrays: Mapping[str, Any], meta: Mapping[str, Any], metric: float | None
    ) -> None:
        """Saves a step in the background; returns when the arrays may be changed or donated.

        First waits for the previous save. If this run has already saved or restored `step`, the
        step and its metric stay as they are.

        Args:
          step: the number of finished steps.
          arrays: pytrees of JAX or NumPy arrays by name; PRNG keys are arrays too. Each can be
            restored without the others. A tree may have no leaves.
          meta: a dict that JSON can represent. Tuples come back as lists, keys as strings.
          metric: the validation loss, or another number where lower is better. A step is never
            among the best if its metric is None (not validated), infinite or NaN.

        Raises:
          TypeError: a tree is a bare leaf, a leaf is not an array, or meta is not JSON.
          ValueError: a tree is named "meta".
          Exception: the previous save failed in the background (because the disk is full, say).
        """
        if _META in arrays:
            raise ValueError(f"{_META!r} names the JSON part: give these arrays another name")
        structure = {name: tree_structure(tree) for name, tree in arrays.items()}
        record: dict[str, Any] = {"structure": structure, _META: dict(meta)}
        if metric is not None and math.isfinite(metric):
            record["metric"] = float(metric)
        json.dumps(record)  # raises for what is not JSON here, not in the background
        self.wait()
        manager = self._prepare()
        self._tip = step
        if step in manager.all_steps():
            return
        self._metrics[step] = record["metric"] if "metric" in record else None
        items: dict[str, Any] = {
            # Orbax refuses an item without leaves. The record's structure has its name.
            name: ocp.args.StandardSave(tree)
            for name, tree in arrays.items()
            if structure[name]
        }
        items[_META] = ocp.args.JsonSave(record)
        # Without force Orbax applies its own policy of which steps to save.
        manager.save(step, args=ocp.args.Composite(**items), force=True)
        if jax.process_index() == 0:
            self._hashing = threading.Thread(target=self._write_hashes, args=(manager, step))
            self._hashing.start()

    def restore(
        self,
        abstract: Mapping[str, Any],
        *,
        at_most: int | None = None,
        only: Iterable[str] | None = None,
    ) -> Restored | None:
        """Restores the newest undamaged step, bit for bit, with the given shardings.

        Args:
          abstract: pytrees of jax.ShapeDtypeStruct (or arrays) with shardings, by name. Trees that
            are not named here are not read.
          at_most: ignore later steps than this one. Use it to go back, to the step of `best` for
            example.
          only: check the hashes of the trees of these names and of meta, not of the whole step. So
            files that nobody asks for are not read.

        Returns:
          The restored step, or None if there are no steps.

        Raises:
          ValueError: a leaf has no sharding, or the newest undamaged step holds other arrays than
            `abstract` (the message lists the differences).
          DamagedError: there are steps, but all are damaged.
        """
        abstract = {name: jax.tree.map(abstract_leaf, tree) for name, tree in abstract.items()}
        self.wait()
        part = _files_of(only)
        for step in self._steps(at_most):
            record = self._check(step, part)
            if record is None:
                continue
            require_same_structure(self._directory / str(step), record["structure"], abstract)
            arrays = self._read(step, abstract)
            if arrays is not None:
                self._tip = step
                return Restored(step=step, arrays=arrays, meta=record[_META])
        self._refuse_if_any(at_most)
        return None

    def read_meta(
        self, *, at_most: int | None = None, only: Iterable[str] | None = None
    ) -> tuple[int, dict[str, Any]] | None:
        """Returns the step and meta of the checkpoint that `restore` would read; reads no arrays.

        Checks the hashes of all files of the step; `restore` does not check them again. A step
        without hashes may still turn out damaged in `restore`, which then reads an older step.

        Returns:
          (step, meta), or None if there are no steps.

        Raises:
          DamagedError: there are steps, but all are damaged.
        """
        self.wait()
        part = _files_of(only)
        for step in self._steps(at_most):
            record = self._check(step, part)
            if record is not None:
                return step, record[_META]
        self._refuse_if_any(at_most)
        return None

    def best(self) -> tuple[int, float] | None:
        """Returns the undamaged step with the lowest metric, and that metric.

        Of steps with equal metrics it is the newest. Its files are checked here: `restore` and
        `read_meta` with `at_most=step` read this step.

        Returns:
          (step, metric), or None if no undamaged step has a metric. `rejected` lists the damaged
          steps.
        """
        self.wait()
        for step, metric in self._ranked(self._steps(None)):
            if self._check(step) is not None:
                return step, metric
        return None

    def wait(self) -> None:
        """Waits until the last save and its hashes are on disk; raises the error of that save."""
        if self._hashing is not None:
            self._hashing.join()
            self._hashing = None
        if self._manager is not None:
            self._manager.wait_until_finished()
        if (failure := self._commit_failure) is not None:
            self._commit_failure = None
            raise failure

    def require_saved(self) -> None:
        """Raises the error of a save that has failed in the background, and waits for none."""
        if self.failure is not None:
            self.wait()
            raise self.failure

    def close(self) -> None:
        """Waits for the last save, then ends Orbax's threads. Call it before Python exits."""
        try:
            self.wait()
        finally:
            if self._manager is not None:
                self._manager.close()
                self._manager = None
            python_logging.getLogger("absl").removeFilter(self._note_failure)

    def _note_failure(self, record: python_logging.LogRecord) -> bool:
        """A log filter, since what Orbax logs of a failure is the first that it lets be known."""
        if record.levelno >= python_logging.ERROR and "/orbax/" in record.pathname:
            self.failure = self.failure or (record.exc_info or (None, None))[1]
        return True

    def _steps(self, at_most: int | None) -> list[int]:
        """Returns the committed steps, newest first.

        Orbax commits a step by renaming its directory to the step's number.
        """
        if not self._directory.is_dir():
            return []
        steps = [int(path.name) for path in self._directory.iterdir() if path.name.isdigit()]
        return sorted((s for s in steps if at_most is None or s <= at_most), reverse=True)

    def _refuse_if_any(self, at_most: int | None) -> None:
        """Raises if there are steps, none of which could be read: a fresh start would be wrong."""
        if self._steps(at_most):
            reasons = "; ".join(f"{step}: {reason}" for step, reason in self.rejected)
            raise DamagedError(
                f"every checkpoint in {self._directory} is damaged: {reasons}. Take another "
                "--workdir, or delete them to begin anew"
            )

    def _reject(self, step: int, reason: str) -> None:
        self._damaged.add(step)
        self.rejected.append((step, reason))
        logging.warning("checkpoint %s is damaged: %s", self._directory / str(step), reason)

    def _ranked(self, steps: list[int]) -> list[tuple[int, float]]:
        """Returns (step, metric) of the steps with a metric, best first, without damaged steps."""
        for step in steps:
            if step not in self._metrics and (record := self._check(step, _META)) is not None:
                self._metrics[step] = record["metric"]
        metrics = ((s, self._metrics[s]) for s in steps if s in self._metrics)
        known = [(s, m) for s, m in metrics if m is not None and s not in self._damaged]
        return sorted(known, key=lambda pair: (pair[1], -pair[0]))

    def _check(self, step: int, part: str | tuple[str, ...] = "") -> dict[str, Any] | None:
        """Returns the record of a step, or None, after rejecting the step, if it is damaged.

        Args:
          step: a committed step.
          part: what the paths of the files to check begin with; "" checks all.
        """
        if step in self._damaged:
            return None
        if (step, part) not in self._sound:
            reason = self._find_damage(step, part)
            if reason is None:
                try:
                    self._sound[step, part] = self._read_record(step)
                except Exception as error:
                    reason = f"its meta cannot be read: {short_error(error)}"
            if reason is not None:
                # If the step no longer exists, the writing process deleted it during the check.
                if (self._directory / str(step)).exists():
                    self._reject(step, reason)
                return None
        return self._sound[step, part]

    def _find_damage(self, step: int, part: str | tuple[str, ...]) -> str | None:
        """Returns what is wrong with the files of a step, or None; the same on all processes."""
        reason = None
        if jax.process_index() == 0:
            reason = find_damage(self._directory / str(step), part)
        if jax.process_count() > 1:
            # Only one process reads the files. All must come to the same verdict, or they would
            # restore different steps.
            said = np.array([step, reason is None], np.int32)
            first, sound = multihost_utils.broadcast_one_to_all(said).tolist()
            if first != step:
                raise RuntimeError(
                    f"process 0 reads checkpoint {first} of {self._directory}, this one {step}: its"
                    " file system shows an old state of the folder. Start the run again"
                )
            if not sound and reason is None:
                reason = "found damaged by process 0"
        return reason

    def _read_record(self, step: int) -> dict[str, Any]:
        """Reads what `save` stored next to the arrays: structure, meta, and metric or None."""
        record = self._load(step, {_META: ocp.args.JsonRestore()})[_META]
        metric = float(record["metric"]) if "metric" in record else None
        meta = today(record[_META])
        return {"structure": record["structure"], _META: meta, "metric": metric}

    def _read(self, step: int, abstract: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the arrays; None, after rejecting the step, if it turns out to be damaged."""
        items = {
            name: ocp.args.StandardRestore(tree)
            for name, tree in abstract.items()
            if jax.tree.leaves(tree)
        }
        try:
            arrays = self._load(step, items) if items else {}
        except Exception as error:
            hashed = (self._directory / str(step) / HASHES).exists()
            # If the hashes were right, the files are not damaged: the cause is another one, such as
            # too little memory. And several processes, each of which may fail alone, cannot agree
            # on another step.
            if hashed or jax.process_count() > 1:
                raise
            self._reject(step, f"its arrays cannot be read: {short_error(error)}")
            return None
        return {name: arrays[name] if name in items else tree for name, tree in abstract.items()}

    def _load(self, step: int, items: dict[str, Any]) -> dict[str, Any]:
        """Reads the given items of a step with Orbax, without touching the manager.

        Signals take effect afterwards: they would interrupt Orbax in the middle of its event loops.
        """
        path, args = self._directory / str(step), ocp.args.Composite(**items)
        with deferred_signals(), ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
            restored = reader.restore(path, args=args)
        return {name: restored[name] for name in items}

    def _prepare(self) -> ocp.CheckpointManager:
        """Moves steps later than `_tip` aside; creates the manager at the first call."""
        stale = [step for step in self._steps(None) if step > self._tip]
        if jax.process_index() == 0:
            for step in stale:
                why = "corrupt" if step in self._damaged else "abandoned"
                aside = self._directory / f"{why}-{step}"
                if aside.exists():
                    shutil.rmtree(aside)
                os.rename(self._directory / str(step), aside)
                logging.warning("moved checkpoint %d to %s", step, aside)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("fp8jax.checkpoint: moved aside")
        # The run may save a step of such a number again. Other processes need not have listed it.
        self._sound = {key: found for key, found in self._sound.items() if key[0] <= self._tip}
        self._metrics = {step: found for step, found in self._metrics.items() if step <= self._tip}
        self._damaged = {step for step in self._damaged if step <= self._tip}
        if self._manager is None:
            policies: list[Any] = [ocp.checkpoint_managers.LatestN(self._keep)]
            if self._keep_best:
                self._ranked(self._steps(None))  # reads the metrics of an earlier process
                policies.append(_BestN(self._keep_best, self._ranked))
            options = ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy(policies),
                cleanup_tmp_directories=True,  # of saves that a killed run left incomplete
            )
            self._manager = ocp.CheckpointManager(self._directory, options=options)
        elif set(self._manager.all_steps()) != set(self._steps(None)):
            # Stale steps were moved, or a save failed: Orbax had already forgotten the steps which
            # that save was to delete, and would never delete them.
            self._manager.reload()
        return self._manager

    def _write_hashes(self, manager: ocp.CheckpointManager, step: int) -> None:
        """Waits for the commit of `step`, then hashes its files. Runs in the background."""
        try:
            manager.wait_until_finished()
        except Exception:
            return  # Orbax raises it again in wait(): once in each thread that waits
        path = self._directory / str(step)
        try:
            written = path / f"{HASHES}.tmp"
            written.write_text(json.dumps(hash_files(path, list_files(path)), indent=0))
            os.replace(written, path / HASHES)
        except OSError as error:
            logging.warning("could not write the hashes of checkpoint %s: %s", path, error)
            return
        try:
            if self._on_commit is not None:
                self._on_commit()
        except Exception as error:  # of a thread, which nobody would see
            self._commit_failure, self.failure = error, self.failure or error


def newest_step(directory: Path) -> int | None:
    """Returns the newest committed step in a directory of checkpoints, sound or not; None if there
    is none."""
    if not directory.is_dir():
        return None
    return max(
        (int(path.name) for path in directory.iterdir() if path.name.isdigit()), default=None
    )


def _files_of(trees: Iterable[str] | None) -> str | tuple[str, ...]:
    """Returns what the paths of the files of some trees and of meta begin with; "" for all."""
    if trees is None:
        return ""
    return (*(f"{name}/" for name in sorted({*trees, _META})), "_CHECKPOINT_METADATA")


@dataclasses.dataclass(frozen=True)
class _BestN:
    """An Orbax preservation policy that preserves the best n steps of a ranking.

    Orbax's own BestN reads only metrics that Orbax wrote (the module docstring says why we do not
    let it). By default it also preserves all steps without a metric, and a NaN breaks its order.
    """

    n: int
    ranked: Callable[[list[int]], list[tuple[int, float]]]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        best = dict(self.ranked([info.step for info in checkpoints])[: self.n])
        return [info.step in best for info in checkpoints]


def _is_no_orbax_info(record: python_logging.LogRecord) -> bool:
    """A log filter that drops Orbax's many INFO lines; they share absl's logger with the run's."""
    return record.levelno >= python_logging.WARNING or "/orbax/" not in record.pathname
