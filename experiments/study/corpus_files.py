"""The text that lies on a machine: files of source code and documentation, by package.

A root is a folder with packages, such as site-packages, or a package as a whole, such as CUDA. In
site-packages, a package is what a top-level name holds; one level deeper in a namespace, a folder
without an __init__.py of its own (`nvidia/cublas`). Its license is that of the distribution that
installed it, as its metadata says. Text that is not UTF-8, is tiny or huge, or looks generated is
left out.
"""

import concurrent.futures
import dataclasses
import hashlib
import importlib.metadata
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = frozenset(".py .pyi .pyx .pxd .h .hh .hpp .inl .cuh .cu .c .cc .cpp .md .rst".split())
SIZES = (256, 2**19)  # bytes of a file, least and most
LINE_BYTES = 160  # mean length of a line above which a file is data or generated

_SKIPPED = (".dist-info", ".egg-info", "__pycache__")
_THREADS = 16  # reading from a cold disk waits more than it computes
_PYTHON, _CUDA = "PSF-2.0", "NVIDIA CUDA Toolkit End User License Agreement"
_UNSTATED = "not stated"


@dataclasses.dataclass(frozen=True)
class Root:
    """A folder to read.

    Attributes:
      name: of the package that it is; "" if it holds packages.
      license: of that package; those of others are in their metadata.
    """

    folder: Path
    name: str = ""
    license: str = ""


@dataclasses.dataclass(frozen=True)
class File:
    """A file of text; its digest is the SHA-256 of its bytes."""

    path: Path
    package: str
    license: str
    digest: str
    size: int


def machine_roots() -> list[Root]:
    """Returns the roots of this machine: all site-packages, Python's own library, and CUDA."""
    sites = [Path(p) for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    cuda = sorted(Path("/usr/local").glob("cuda*"))
    return [
        *(Root(folder) for folder in dict.fromkeys(path.resolve() for path in sites)),
        Root(Path(sysconfig.get_path("stdlib")).resolve(), "python", _PYTHON),
        *(Root(folder, "cuda", _CUDA) for folder in dict.fromkeys(p.resolve() for p in cuda)),
    ]


def find_files(roots: list[Root]) -> list[File]:
    """Returns the files of all roots, each content once: that of the first package by name.

    The result does not depend on the order in which the system lists folders.
    """
    named = [each for root in roots for each in _named(root)]
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        read = (
            [file for file in pool.map(_read, *zip(*named, strict=True)) if file] if named else []
        )
    unique: dict[str, File] = {}
    for file in sorted(read, key=lambda file: (file.package, file.path.as_posix())):
        unique.setdefault(file.digest, file)
    return list(unique.values())


def _named(root: Root) -> Iterator[tuple[Path, str, str]]:
    """Yields (path, package, license) of the files of a root that have a suffix of text."""
    licenses = {} if root.name else _licenses(root.folder)
    for folder, folders, names in os.walk(root.folder):
        skipped = {name for name in folders if name.endswith(_SKIPPED)}
        if root.name:  # packages are other roots
            skipped |= {"site-packages", "dist-packages"}
        folders[:] = [name for name in folders if name not in skipped]
        for name in names:
            path = Path(folder, name)
            if path.suffix in SUFFIXES and not path.is_symlink():
                package = root.name or _package(root.folder, path)
                top = path.relative_to(root.folder).parts[0]
                stated = licenses[top] if top in licenses else _UNSTATED
                yield path, package, root.license or stated


def _package(site: Path, path: Path) -> str:
    """Returns the package of a file in site-packages: `numpy`, `nvidia/cublas`, or a module."""
    top, *rest = path.relative_to(site).parts
    if len(rest) > 1 and not (site / top / "__init__.py").exists():
        return f"{top}/{rest[0]}"
    return top.removesuffix(".py")


def _licenses(site: Path) -> dict[str, str]:
    """Returns the license of each top-level name of a site-packages."""
    found = {}
    for distribution in importlib.metadata.distributions(path=[str(site)]):
        for file in distribution.files or ():
            found[file.parts[0]] = _license(distribution.metadata)
    return found


def _license(metadata: importlib.metadata.PackageMetadata) -> str:
    """Returns a license's name in one line, as the metadata has it."""
    if "License-Expression" in metadata:
        return metadata["License-Expression"]
    classifiers = metadata.get_all("Classifier") or []
    if listed := [text for text in classifiers if text.startswith("License ::")]:
        return listed[0].rpartition(" :: ")[2]
    stated = (metadata["License"] if "License" in metadata else "").strip()
    return stated.splitlines()[0][:80] if stated else _UNSTATED


def _read(path: Path, package: str, license: str) -> File | None:
    """Returns a file, or None if it is left out."""
    least, most = SIZES
    if not least <= path.stat().st_size <= most:
        return None
    content = path.read_bytes()
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if len(content) > LINE_BYTES * (content.count(b"\n") + 1):
        return None
    digest = hashlib.sha256(content).hexdigest()
    return File(path=path, package=package, license=license, digest=digest, size=len(content))
