"""The programs that make a fork of a chain, and what the ledger keeps of their results.

    trunk_2016  trains the chain's trunk to where the fork begins; goes on with what it has
    decay_150M  starts from the trunk's checkpoint and decays
    score_150M  scores the held-out rows, in the arm's precision and without its casts

Each is a process of its own, with one GPU. All of them go on, or begin anew, after they were
stopped.
"""

import dataclasses
import hashlib
import json
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.study.corpus import HELD_OUT, TOKENIZER, VALID_FRACTION, training_text
from experiments.study.parity_plan import FORKS, Arm, Chain, Fork
from fp8jax.lm.records.events import Cause, Event
from fp8jax.lm.records.jsonl import read_jsonl

# Kinds of parts: a run, scores of its weights, and a run whose last validation is its score.
TRAIN, SCORE, VALIDATED = "train", "score", "validated"
BLOCKS = 32  # groups of neighboring held-out rows

_PERPLEXITY, _BASELINE = "perplexity", "bf16"  # in the JSON of experiments.evaluate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One program of a fork.

    Attributes:
      name: its own in the chain.
      kind: TRAIN, SCORE or VALIDATED.
      command: the program and its arguments.
      environment: variables besides those of the caller.
      output: a run's workdir, or the file with the scores.
      folder: of its log, its seconds and its mark.
    """

    name: str
    kind: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    output: Path
    folder: Path

    @property
    def mark(self) -> Path:
        """The file that says that it is done."""
        return self.folder / "done" / self.name

    def text(self) -> str:
        """Returns the command as a shell takes it."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, "python", *map(shlex.quote, self.command[1:])])


def parts(chain: Chain, fork: Fork, folder: Path, corpus: Path) -> list[Part]:
    """Returns the programs of a fork, in order.

    Args:
      folder: of the chain, beside those of other chains.
      corpus: folder of the data (corpus.py).
    """
    of_trunk = folder.parent / chain.trunk.folder
    trunk, decay = of_trunk / "trunk", folder / f"decay_{fork.name}"
    scores = folder / f"score_{fork.name}.json"
    # All that a shared trunk saves: a decay may begin when the trunk is long past its fork.
    all_saved = FORKS[-1].begin // FORKS[0].begin
    kept = (f"checkpoint.keep={all_saved}",) if chain.trunk.shared else ()
    trunk_keys = (f"num_steps={fork.begin}", "resume_with_changes=True", *kept)
    decay_keys = (
        f"initial_state={trunk}@{fork.begin}",
        "optimizer.schedule=decay",
        "optimizer.warmup_steps=0",
        f"num_steps={fork.steps}",
        "checkpoint.keep=1",
    )
    read = (f"--precision={','.join(chain.read)}",) if chain.read else ()
    score = (
        f"--workdir={decay}",
        f"--step={fork.steps}",
        "--batch_size=32",
        f"--json={scores}",
        f"--data=jsonl:{corpus / HELD_OUT}.jsonl",
        *read,
    )

    def part(
        arm: Arm, name: str, kind: str, module: str, flags: Sequence[str], output: Path
    ) -> Part:
        return Part(
            name=name,
            kind=kind,
            command=(sys.executable, "-m", f"experiments.{module}", *flags),
            environment=dict(arm.environment),
            output=output,
            folder=output.parent,
        )

    to_fork = _train(chain.trunk, trunk_keys, trunk, corpus)
    from_fork = _train(chain, decay_keys, decay, corpus)
    return [
        part(chain.trunk.arm, f"trunk_{fork.begin}", TRAIN, "train", to_fork, trunk),
        part(chain.arm, f"decay_{fork.name}", TRAIN, "train", from_fork, decay),
        part(chain.arm, f"score_{fork.name}", SCORE, "evaluate", score, scores),
    ]


def _train(chain: Chain, keys: Sequence[str], workdir: Path, corpus: Path) -> list[str]:
    """Returns the flags of a training run."""
    settings = (
        f"precision={chain.arm.precision}",
        f"seed={chain.seed}",
        f"data={training_text(corpus)}",
        f"tokenizer=bpe:{corpus / TOKENIZER}",
        f"valid.fraction={VALID_FRACTION}",
        *chain.arm.changes,
        *keys,
    )
    flags = [f"--config.{setting}" for setting in settings]
    return [f"--config=configs/study.py:{chain.size}", f"--workdir={workdir}", *flags]


# Results ------------------------------------------------------------------------------------------


def non_finite(workdir: Path) -> str:
    """Returns at which step a run ended because something was not finite; "" if it did not."""
    path = workdir / "events.jsonl"
    events = [e for e in read_jsonl(path) if e["kind"] != Event.END] if path.exists() else []
    if not events or events[-1]["kind"] != Event.STOP or events[-1]["cause"] != Cause.NON_FINITE:
        return ""
    return f"{workdir.name}: not finite after step {events[-1]['step']}"


def read_scores(path: Path, precision: str) -> dict[str, Any]:
    """Returns the fields of a ledger's line that the scores give.

    Raises:
      ValueError: the file has no such scores, or a loss that is not finite.
    """
    numbers = json.loads(path.read_text(encoding="utf-8"))["numbers"]
    found = {number["precision"]: number for number in numbers if number["measured"] == _PERPLEXITY}
    if missing := [name for name in (precision, _BASELINE) if name not in found]:
        raise ValueError(f"{path} has no scores in {missing[0]}")
    nats, tokens = (np.array(found[precision][name]) for name in ("items", "weights"))
    losses = {name: float(np.sum(each["items"]) / tokens.sum()) for name, each in found.items()}
    if not all(map(math.isfinite, losses.values())):
        raise ValueError(f"{path}: losses of {losses}")
    blocks = zip(np.array_split(nats, BLOCKS), np.array_split(tokens, BLOCKS), strict=True)
    return {
        "loss": losses[precision],
        "loss_bf16": losses[_BASELINE],
        "read": {name: losses[name] for name in losses if name not in (precision, _BASELINE)},
        "blocks": [round(float(own.sum() / max(count.sum(), 1)), 6) for own, count in blocks],
        "rows": hashlib.sha256(tokens.astype("<i4").tobytes()).hexdigest()[:16],
        "scored": int(tokens.sum()),
    }


def read_validation(workdir: Path, precision: str) -> dict[str, Any]:
    """Returns the fields of a ledger's line that the last validation of a run gives.

    Raises:
      ValueError: the run has no validation, or its loss is not finite.
    """
    found = [row for row in read_jsonl(workdir / "metrics.jsonl") if "valid_loss" in row]
    if not found or not math.isfinite(found[-1]["valid_loss"]):
        raise ValueError(f"{workdir} in {precision}: no finite loss of held-out rows")
    return {"loss": found[-1]["valid_loss"]}


READERS: Mapping[str, Callable[[Path, str], dict[str, Any]]] = {
    SCORE: read_scores,
    VALIDATED: read_validation,
}
