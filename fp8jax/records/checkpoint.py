"""Checkpoints: Orbax's CheckpointManager, and what it lets through.

What Orbax 0.12 and TensorStore notice was tried on every file of a checkpoint. A file of array data
that is cut short or missing is an error; a flipped byte in one is not (chunks have no checksum:
the arrays come back wrong in silence), nor is one within a string of a JSON item. So each step gets
a list of its files' SHA-256, written in the background once the step is committed and checked
before the step is read. A step without the list, because the process died in between, is read too;
there only what Orbax itself notices is found.

Invariants:

- The directory is one line of history. `save` first moves every step beyond the one saved or
  restored last out of Orbax's sight: to `corrupt-<step>` where it was found damaged, else to
  `abandoned-<step>` (the run went back before it, or began afresh). Only a save deletes: what is
  neither among the latest `keep` steps nor among the `keep_best` of the lowest metric.
- A metric lies in the step's own JSON, under its hash, and so outlives the process. (Orbax would
  write an item of its own, fail at a start where that is damaged, and with `best_fn` and
  `max_to_keep` delete the newest step.)
- Reading changes nothing on disk, so that another process may read while a run writes.
- Damage falls back to the step before and is said; a checkpoint of another model raises.
"""

import dataclasses
import json
import logging as python_logging
import math
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging
from jax.experimental import multihost_utils

from fp8jax.records.checkpoint_files import HASHES, find_damage, hash_files, list_files, short_error
from fp8jax.records.differences import abstract_leaf, require_same_structure, tree_structure

_META = "meta"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """A checkpoint that was read: its step, the arrays asked for, and all of its meta."""

    step: int
    arrays: dict[str, Any]
    meta: dict[str, Any]


class Checkpointer:
    """Saves and restores pytrees of arrays and a JSON dict, by step.

    `rejected` lists the steps found damaged so far with the reason, in the order they were found.
    """

    rejected: list[tuple[int, str]]

    def __init__(self, directory: str | os.PathLike[str], *, every: int, keep: int, keep_best: int):
        """Touches nothing on disk.

        Args:
          directory: where the steps lie, in a file system that all processes share.
          every: `should_save` is true at multiples of this many steps.
          keep: how many of the latest steps stay.
          keep_best: how many of those with the lowest metric stay as well, however old.

        Raises:
          ValueError: every or keep is not positive, keep_best is negative, or the directory is a
            URL.
        """
        if every < 1 or keep < 1:
            raise ValueError(f"{every=} and {keep=} must be at least 1")
        if keep_best < 0:
            raise ValueError(f"{keep_best=} must be at least 0")
        if "://" in str(directory):
            raise ValueError(f"{directory} is a URL: checkpoints need a mounted file system")
        self.rejected = []
        self._directory = Path(os.path.abspath(directory))
        self._every, self._keep, self._keep_best = every, keep, keep_best
        self._manager: ocp.CheckpointManager | None = None  # made by the first save
        self._hashing: threading.Thread | None = None
        self._tip = -1  # the step saved or restored last
        # What the meta item of a good step holds, by the step and the part that was checked.
        self._sound: dict[tuple[int, str], dict[str, Any]] = {}
        self._damaged: set[int] = set()
        self._metrics: dict[int, float | None] = {}  # of the steps saved or looked at so far
        python_logging.getLogger("absl").addFilter(_no_orbax_chatter)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def should_save(self, step: int) -> bool:
        """Whether `step` is one to save at; the last one of a run is the caller's business."""
        return step > 0 and step % self._every == 0

    def save(
        self, step: int, arrays: Mapping[str, Any], meta: Mapping[str, Any], metric: float | None
    ) -> None:
        """Saves in the background; returns when the arrays may be changed or donated.

        A step that this run has saved or restored already is left as it is, its metric too. Waits
        for the save before.

        Args:
          step: the number of finished steps.
          arrays: pytrees of jax or NumPy arrays by name, each restorable without the others. One
            without leaves is fine. PRNG keys are arrays too.
          meta: what JSON can hold; tuples come back as lists, keys as strings.
          metric: what makes a step a best one, the lower the better: its validation loss. A step
            with None (not validated), an infinite one or a NaN is never a best one.

        Raises:
          TypeError: a tree is a bare leaf, a leaf is no array, or meta is not JSON.
          ValueError: a tree is called "meta".
          Exception: what went wrong in the background during the save before (a full disk).
        """
        if _META in arrays:
            raise ValueError(f"{_META!r} names the JSON part: call the arrays something else")
        structure = {name: tree_structure(tree) for name, tree in arrays.items()}
        record: dict[str, Any] = {"structure": structure, _META: dict(meta)}
        if metric is not None and math.isfinite(metric):
            record["metric"] = float(metric)
        json.dumps(record)  # here, not in the background
        self.wait()
        manager = self._prepare()
        self._tip = step
        if step in manager.all_steps():
            return
        self._metrics[step] = record["metric"] if "metric" in record else None
        items: dict[str, Any] = {
            # Orbax refuses an item without leaves; the structure remembers it.
            name: ocp.args.StandardSave(tree)
            for name, tree in arrays.items()
            if structure[name]
        }
        items[_META] = ocp.args.JsonSave(record)
        # force: Orbax would otherwise apply a policy of its own, which saves whatever comes first.
        manager.save(step, args=ocp.args.Composite(**items), force=True)
        if jax.process_index() == 0:
            self._hashing = threading.Thread(target=self._write_hashes, args=(manager, step))
            self._hashing.start()

    def restore(
        self, abstract: Mapping[str, Any], *, at_most: int | None = None
    ) -> Restored | None:
        """Restores the newest good step, bit for bit, onto the shardings asked for.

        Args:
          abstract: pytrees of jax.ShapeDtypeStruct (or arrays) with shardings, by name. What is
            not named is not read.
          at_most: only steps up to this one count, for going back; to the step of `best`, say.

        Returns:
          The newest step whose files are sound, or None where there is no step at all.

        Raises:
          ValueError: a leaf has no sharding, or the newest sound step holds other arrays than
            these: the message says which.
          RuntimeError: there are steps and all are damaged.
        """
        abstract = {name: jax.tree.map(abstract_leaf, tree) for name, tree in abstract.items()}
        self.wait()
        for step in self._steps(at_most):
            record = self._check(step)
            if record is None:
                continue
            require_same_structure(self._directory / str(step), record["structure"], abstract)
            arrays = self._read(step, abstract)
            if arrays is not None:
                self._tip = step
                return Restored(step=step, arrays=arrays, meta=record[_META])
        self._refuse_if_any(at_most)
        return None

    def read_meta(self, *, at_most: int | None = None) -> tuple[int, dict[str, Any]] | None:
        """The step and meta of the checkpoint that `restore` would take; reads no arrays.

        It checks the step's files, which `restore` then does not do again. Only damage that no
        check can see (see the module) may still make `restore` take an older step.

        Raises:
          RuntimeError: there are steps and all are damaged.
        """
        self.wait()
        for step in self._steps(at_most):
            record = self._check(step)
            if record is not None:
                return step, record[_META]
        self._refuse_if_any(at_most)
        return None

    def best(self) -> tuple[int, float] | None:
        """The step of the lowest metric among the sound ones on disk, and the metric.

        Of equal ones it is the newest. `restore` and `read_meta` take it with `at_most=step`, for
        its files were checked here.

        Returns:
          None where no sound step has a metric; what was found damaged stands in `rejected`.
        """
        self.wait()
        for step, metric in self._ranked(self._steps(None)):
            if self._check(step) is not None:
                return step, metric
        return None

    def wait(self) -> None:
        """Returns when the last save is on disk, with its hashes; raises what went wrong there."""
        if self._hashing is not None:
            self._hashing.join()
            self._hashing = None
        if self._manager is not None:
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and frees Orbax's threads. Call it before the interpreter ends."""
        try:
            self.wait()
        finally:
            if self._manager is not None:
                self._manager.close()
                self._manager = None

    def _steps(self, at_most: int | None) -> list[int]:
        """The committed steps, newest first; Orbax renames a step to its number as it commits."""
        if not self._directory.is_dir():
            return []
        steps = [int(path.name) for path in self._directory.iterdir() if path.name.isdigit()]
        return sorted((s for s in steps if at_most is None or s <= at_most), reverse=True)

    def _refuse_if_any(self, at_most: int | None) -> None:
        """Steps, but none that could be read, are an error and no fresh start."""
        if self._steps(at_most):
            reasons = "\n".join(f"  {step}: {reason}" for step, reason in self.rejected)
            raise RuntimeError(f"every checkpoint in {self._directory} is damaged:\n{reasons}")

    def _reject(self, step: int, reason: str) -> None:
        self._damaged.add(step)
        self.rejected.append((step, reason))
        logging.warning("checkpoint %s is damaged: %s", self._directory / str(step), reason)

    def _ranked(self, steps: list[int]) -> list[tuple[int, float]]:
        """Those that have a metric, with it, the best first; not those known to be damaged."""
        for step in steps:
            if step not in self._metrics and (record := self._check(step, _META)) is not None:
                self._metrics[step] = record["metric"]
        metrics = ((s, self._metrics[s]) for s in steps if s in self._metrics)
        known = [(s, m) for s, m in metrics if m is not None and s not in self._damaged]
        return sorted(known, key=lambda pair: (pair[1], -pair[0]))

    def _check(self, step: int, part: str = "") -> dict[str, Any] | None:
        """The record of a step with sound files, all or only the item `part`; None, and a word on
        it, for a damaged one.
        """
        if step in self._damaged:
            return None
        if (step, part) not in self._sound:
            reason = None
            if jax.process_index() == 0:
                reason = find_damage(self._directory / str(step), part)
            if jax.process_count() > 1:
                # One process reads all files and all do as it finds, or they would part ways.
                sound = multihost_utils.broadcast_one_to_all(reason is None)
                reason = reason or (None if sound else "found damaged by process 0")
            if reason is None:
                try:
                    record = self._load(step, {_META: ocp.args.JsonRestore()})[_META]
                    metric = float(record["metric"]) if "metric" in record else None
                    self._sound[step, part] = {
                        "structure": record["structure"], _META: record[_META], "metric": metric
                    }  # fmt: skip
                except Exception as error:
                    reason = f"its meta cannot be read: {short_error(error)}"
            if reason is not None:
                if (self._directory / str(step)).exists():
                    self._reject(step, reason)
                return None  # gone: the writer has deleted it, being one too many, as we looked
        return self._sound[step, part]

    def _read(self, step: int, abstract: dict[str, Any]) -> dict[str, Any] | None:
        """The arrays; None, and a word on it, where the step turns out damaged."""
        items = {
            name: ocp.args.StandardRestore(tree)
            for name, tree in abstract.items()
            if jax.tree.leaves(tree)
        }
        try:
            arrays = self._load(step, items) if items else {}
        except Exception as error:
            hashed = (self._directory / str(step) / HASHES).exists()
            # Sound files that cannot be read are no damage (memory, for one). And where processes
            # fail one by one they cannot agree on another step.
            if hashed or jax.process_count() > 1:
                raise
            self._reject(step, f"its arrays cannot be read: {short_error(error)}")
            return None
        return {name: arrays[name] if name in items else tree for name, tree in abstract.items()}

    def _load(self, step: int, items: dict[str, Any]) -> dict[str, Any]:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
            restored = reader.restore(self._directory / str(step), args=ocp.args.Composite(**items))
        return {name: restored[name] for name in items}

    def _prepare(self) -> ocp.CheckpointManager:
        """Moves aside what lies beyond the tip; makes the manager at the first call."""
        stale = [step for step in self._steps(None) if step > self._tip]
        if jax.process_index() == 0:
            for step in stale:
                why = "corrupt" if step in self._damaged else "abandoned"
                aside = self._directory / f"{why}-{step}"
                if aside.exists():
                    shutil.rmtree(aside)
                os.rename(self._directory / str(step), aside)
                logging.warning("checkpoint %d was moved to %s", step, aside)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("fp8jax.checkpoint: moved aside")
        for step in stale:  # the number may be saved anew
            self._sound.pop((step, ""), None)
            self._sound.pop((step, _META), None)
            self._metrics.pop(step, None)
            self._damaged.discard(step)
        if self._manager is None:
            policies: list[Any] = [ocp.checkpoint_managers.LatestN(self._keep)]
            if self._keep_best:
                self._ranked(self._steps(None))  # reads what an earlier process has written
                policies.append(_BestN(self._keep_best, self._ranked))
            options = ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy(policies),
                cleanup_tmp_directories=True,  # what a killed run left half written
            )
            self._manager = ocp.CheckpointManager(self._directory, options=options)
        elif set(self._manager.all_steps()) != set(self._steps(None)):
            # Stale steps are gone, or a save failed: Orbax forgot at once what that save would
            # have deleted, and would never delete it.
            self._manager.reload()
        return self._manager

    def _write_hashes(self, manager: ocp.CheckpointManager, step: int) -> None:
        """Runs in the background: waits for the commit, then hashes what lies there."""
        try:
            manager.wait_until_finished()
        except Exception:
            return  # Orbax raises it once in every thread that waits: again in wait()
        path = self._directory / str(step)
        try:
            written = path / f"{HASHES}.tmp"
            written.write_text(json.dumps(hash_files(path, list_files(path)), indent=0))
            os.replace(written, path / HASHES)
        except OSError as error:
            logging.warning("checkpoint %s stays without hashes: %s", path, error)


@dataclasses.dataclass(frozen=True)
class _BestN:
    """A preservation policy of Orbax's: the first n of the ranking stay.

    Orbax's own BestN reads only metrics that Orbax wrote (see the module), keeps all steps without
    one unless told otherwise, and lets a NaN spoil the order.
    """

    n: int
    ranked: Callable[[list[int]], list[tuple[int, float]]]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        best = dict(self.ranked([info.step for info in checkpoints])[: self.n])
        return [info.step in best for info in checkpoints]


def _no_orbax_chatter(record: python_logging.LogRecord) -> bool:
    """Keeps Orbax's many INFO lines, which share absl's logger with the run's own, off it."""
    return record.levelno >= python_logging.WARNING or "/orbax/" not in record.pathname
