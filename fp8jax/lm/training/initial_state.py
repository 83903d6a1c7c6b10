"""The state that a run starts with where another run's checkpoint is to go on under a new config.

A decay of its own from any checkpoint of a stable phase, for example, is the last phase of "wsd" in
a workdir of its own:

    --config.initial_state=runs/stable@30000 --config.optimizer.schedule=decay \\
        --config.optimizer.warmup_steps=0

What goes on, and what starts anew:

    goes on     parameters; the optimizer's state with its own count (Adam's bias correction); the
                key and the step that stochastic rounding is seeded with; amax histories, spikes and
                the promoter's where their settings agree (optional_state.py); the place in the data
    starts at 0 the loop's steps; the schedules of the learning rate, of the precision and of resets
                (oscillation.py); what recovery has spent

So a decay equals the last phase of one "wsd" run bit for bit. Each source of the data goes on with
its own next row: no text comes again while tokenizer, seq_len, seed and the order of the sources
agree. Only a run of `num_epochs` reads its data from the beginning.
"""

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

from fp8jax.lm.data.tokenizers import for_rows
from fp8jax.lm.interop.folders import HUGGING_FACE, small_file
from fp8jax.lm.interop.initial_weights import refuse_other_shapes
from fp8jax.lm.interop.stored_workdirs import local_workdir
from fp8jax.lm.interop.trained import (
    read_record,
    refuse_not_finite,
    shape_of_workdir,
    tokenizer_of_workdir,
)
from fp8jax.lm.optim.optimizers import restart_schedule
from fp8jax.lm.records.checkpoint import Checkpointer, Restored
from fp8jax.lm.records.differences import listed
from fp8jax.lm.records.run_checkpoint import CONVERTED_FROM, PARAMS
from fp8jax.lm.training.resume import checkpoint_items
from fp8jax.lm.training.run import Run

# Keys of the optimizer that decide which arrays the state has, and what they mean.
_SAME = ("name", "moments", "master_weights")


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitialState:
    """The checkpoint of another run.

    Attributes:
      source: its workdir, which may be a URL.
      step: of the checkpoint; None for the newest sound one.
    """

    source: str
    step: int | None

    @classmethod
    def parse(cls, spec: str) -> "InitialState":
        """Reads `WORKDIR` or `WORKDIR@STEP`.

        Raises:
          ValueError: it names a folder of weights, which holds no optimizer's state.
        """
        if spec.startswith("hf:"):
            raise ValueError(
                f"initial_state={spec} has weights and no optimizer's state: take it as"
                " initial_weights"
            )
        found = re.fullmatch(r"(.+)@(\d+)", spec)
        if found is None:
            return cls(source=spec, step=None)
        return cls(source=found[1], step=int(found[2]))

    def check(self, run: Run) -> None:
        """Reads no arrays, and refuses a checkpoint that does not fit the run.

        Raises:
          ValueError: there is no such checkpoint, it is damaged or a conversion, or it has another
            model, another tokenizer or another kind of optimizer.
          DamagedError: all checkpoints of the workdir are damaged.
        """
        with self._checkpointer() as checkpointer:
            self._read_meta(checkpointer, run)

    @functools.cached_property
    def _workdir(self) -> Path:
        return local_workdir(self.source, None, self.step)

    def read(self, run: Run) -> Restored:
        """Returns the checkpoint as one of step 0 of the run.

        Raises:
          ValueError, DamagedError: as `check` does; ValueError also for parameters that are NaN or
            infinite.
        """
        with self._checkpointer() as checkpointer:
            step, meta = self._read_meta(checkpointer, run)
            items = checkpoint_items(run, run.stages[0].state)
            for part in run.optional_state:
                if part.key(meta["config"], step) != part.key(run.settings.record, 1):
                    items.pop(part.item)
            restored = checkpointer.restore(items, at_most=step)
        if restored is None or restored.step != step:
            raise ValueError(
                f"initial_state: the checkpoint of step {step} of {self.source} is damaged"
            )
        arrays = restored.arrays
        refuse_not_finite(arrays[PARAMS], self._workdir)
        opt_state = restart_schedule(arrays["state"]["opt_state"])
        return Restored(
            step=0,
            arrays=arrays | {"state": arrays["state"] | {"opt_state": opt_state}},
            meta={
                # A number of epochs counts the examples from the first one.
                "position": meta["position"] if run.settings.num_epochs is None else None,
                "recovery": {},
                "amaxes": [],
            },
        )

    def _read_meta(self, checkpointer: Checkpointer, run: Run) -> tuple[int, dict[str, Any]]:
        step, meta = read_record(checkpointer, self._workdir, self.step)
        if CONVERTED_FROM in meta:
            raise ValueError(
                f"initial_state={self.source} holds weights that were converted from"
                f" {meta[CONVERTED_FROM]}, and no optimizer's state: take it as initial_weights"
            )
        before = meta["config"]
        was, now = before["optimizer"], run.settings.record["optimizer"]
        others = [f"optimizer.{k}: {was[k]} -> {now[k]}" for k in _SAME if was[k] != now[k]]
        reset = was["reset"] if "reset" in was else ""  # older runs have no such key
        if bool(reset) != bool(now["reset"]):  # it keeps sums of each kernel
            others.append(f"optimizer.reset: {reset!r} -> {now['reset']!r}")
        if others:
            raise ValueError(
                f"initial_state={self.source} has the state of another optimizer: {listed(others)}."
                " Take these keys from its config.json, or its weights alone as initial_weights"
            )
        refuse_other_shapes(
            f"initial_state={self.source} is that of another model",
            shape_of_workdir(self._workdir, before),
            run.stages[0].model.config,
        )
        self._refuse_other_tokenizer(before, run)
        return step, meta

    def _refuse_other_tokenizer(self, before: dict[str, Any], run: Run) -> None:
        """Raises ValueError if the model's ids stood for other tokens; paths do not count."""
        text_tokenizer = tokenizer_of_workdir(self._workdir, before)
        assert text_tokenizer is not None  # a run has one
        rows = run.stages[0].model.config.vocab_size
        text_tokenizer = for_rows(text_tokenizer, rows, self.source)
        if text_tokenizer.fingerprint != run.tokenizer.fingerprint:
            raise ValueError(
                f"initial_state={self.source} was trained with another tokenizer, so that the ids"
                f" of tokenizer={run.settings.record['tokenizer']} mean other text: set tokenizer="
                f"{_spec_of_kept(self._workdir, before)}"
            )

    def _checkpointer(self) -> Checkpointer:
        if not (self._workdir / "checkpoints").is_dir():
            what = "has no checkpoints" if self._workdir.is_dir() else "is not a folder"
            raise ValueError(
                f"initial_state: {self.source} {what}: name the workdir of a run as WORKDIR, or as"
                " WORKDIR@STEP with a number"
            )
        return Checkpointer(self._workdir / "checkpoints", every=1, keep=1, keep_best=0)


def _spec_of_kept(workdir: Path, record: dict[str, Any]) -> str:
    """Returns a spec of the tokenizer with which a run trained; it may be the run's own copy."""
    kept = small_file(workdir / HUGGING_FACE, "tokenizer.json")
    return record["tokenizer"] if kept is None or record["tokenizer"] == "bytes" else f"bpe:{kept}"
