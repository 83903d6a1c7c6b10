"""Which packages are held out, and which of their files are too close to a file that trains.

Whole packages are held out, since files of one package resemble each other. They are drawn by a
hash of their names among those of middle size, so that nobody chooses them and no single one
decides. Identical files are already gone. Of those that a held-out package shares in part with a
training package, such as a vendored module of another version, most lines occur there: such files
neither train nor validate.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from experiments.study.corpus_files import File

HELD_OUT_BYTES = 8 * 2**20  # until so much is held out: about 2.5M tokens
PACKAGE_BYTES = (2**18, 2**22)  # of packages that may be held out, least and most
MOST_SEEN = 0.5  # share of a held-out file's lines that may occur in files that train

_LINE_BYTES = 20  # shorter lines, such as `return None`, are everywhere


def held_out_packages(sizes: Mapping[str, int]) -> set[str]:
    """Returns the packages that are held out.

    Args:
      sizes: package -> bytes.
    """
    least, most = PACKAGE_BYTES
    middle = [name for name, size in sizes.items() if least <= size <= most]
    chosen: set[str] = set()
    for name in sorted(middle, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if sum(sizes[each] for each in chosen) >= HELD_OUT_BYTES:
            break
        chosen.add(name)
    return chosen


def unseen(held_out: Sequence[File], train: Iterable[File]) -> list[File]:
    """Returns the held-out files of whose lines at most `MOST_SEEN` occur in files that train."""
    lines = {file.digest: _lines(file) for file in held_out}
    wanted = set().union(*lines.values())
    seen: set[bytes] = set()
    for file in train:
        seen |= wanted & _lines(file)
    return [
        file
        for file in held_out
        if len(lines[file.digest] & seen) <= MOST_SEEN * len(lines[file.digest])
    ]


def _lines(file: File) -> set[bytes]:
    stripped = (line.strip() for line in file.path.read_bytes().splitlines())
    return {line for line in stripped if len(line) >= _LINE_BYTES}
