"""The ledger of the study: a committed file with a JSON line for each fork that is done.

A line says what ran, where, on which code and data, how long it took, and what was lost on the
held-out rows. What has a line never runs again. The losses of all seeds stay in it.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from absl import logging

from fp8jax.text_table import aligned

Key = tuple[str, int, str, str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One fork of one arm and one seed.

    Attributes:
      arm, seed, fork: what of the plan it is.
      tokens: that it was trained on, the trunk's included.
      setting, data: digests of the config and of the data's manifest.
      card: the GPU's name.
      trunk: when its trunk began, and so which of several trunks of a chain this fork is of.
      commit: of the code, as the session gave it; `code` is the digest of the files that ran.
      versions: of Python and the libraries.
      commands: as a shell would take them.
      seconds: of these commands, on one GPU.
      loss: nats a token on the held-out rows in the arm's precision; None if training stopped.
      loss_bf16: the same with all casts left out; None if it was not scored.
      read: the same in other precisions.
      blocks: mean loss of 32 groups of neighboring rows, in their order.
      rows: a digest of the numbers of tokens of all rows, which tells whether two are of the same.
      scored: number of tokens scored.
      stopped: why training stopped before its end, "" if it did not.
    """

    arm: str
    seed: int
    fork: str
    tokens: int
    setting: str
    data: str
    card: str
    trunk: str
    commit: str
    code: str
    versions: dict[str, str]
    commands: list[str]
    seconds: float
    loss: float | None = None
    loss_bf16: float | None = None
    read: dict[str, float] = dataclasses.field(default_factory=dict)
    blocks: list[float] = dataclasses.field(default_factory=list)
    rows: str = ""
    scored: int = 0
    stopped: str = ""

    @property
    def key(self) -> Key:
        return self.arm, self.seed, self.fork, self.setting, self.data


def read(path: Path) -> list[Line]:
    """Returns the lines of a ledger; none if there is no file.

    Raises:
      ValueError: a line is damaged; the message names it. A last line that was cut, which a killed
        program may leave, is left out with a warning.
    """
    if not path.exists():
        return []
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(True), start=1):
        try:
            lines.append(Line(**json.loads(text)))
        except (ValueError, TypeError) as error:
            if not text.endswith("\n"):
                logging.warning("%s:%d is cut, and left out", path, number)
                break
            raise ValueError(f"{path}:{number} is no line of a ledger: {error}") from error
    return lines


def comparable(lines: Iterable[Line], setting: str, data: str) -> list[Line]:
    """Returns the lines of one setting and one set of data: no others are ever compared."""
    return [line for line in lines if (line.setting, line.data) == (setting, data)]


def summary(lines: Iterable[Line]) -> str:
    """Returns a line of text for each line."""
    table = [["arm", "seed", "fork", "loss", "without casts", "seconds", "card"]]
    for line in lines:
        losses = ["" if loss is None else f"{loss:.5f}" for loss in (line.loss, line.loss_bf16)]
        if line.stopped:
            losses[0] = line.stopped
        table.append(
            [line.arm, str(line.seed), line.fork, *losses, f"{line.seconds:.0f}", line.card]
        )
    return "\n".join(aligned(table))


def write(path: Path, lines: Iterable[Line]) -> None:
    """Writes a ledger, whole or not at all."""
    text = "".join(json.dumps(dataclasses.asdict(line), sort_keys=True) + "\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(path.name + ".tmp")
    half.write_text(text, encoding="utf-8")
    os.replace(half, path)


def merged(*ledgers: Sequence[Line]) -> list[Line]:
    """Returns the lines of several ledgers, each key once: the first that is found stays."""
    found: dict[Key, Line] = {}
    for line in (line for lines in ledgers for line in lines):
        found.setdefault(line.key, line)
    return list(found.values())
