"""Files in object stores, `gs://…` and `s3://…`, through etils.epath.

Data is read where it is, once for its hash and once for its tokens. epath needs the package
of the store, and that package finds endpoint and credentials as always.
"""

import concurrent.futures
import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}  # scheme -> what epath needs

_THREADS = 16  # that copy


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URL; no `Path` of pathlib is one."""
    return "://" in os.fspath(path)


def find_urls(pattern: str) -> list[Path]:
    """Returns the objects that a pattern matches, sorted; * stays in a folder.

    They are paths of epath, which do what this package asks of a `Path` of pathlib, except that
    `size_of` tells their size.

    Raises:
      ValueError: the scheme is unknown, its package missing, or the store does not answer.
    """
    from etils import epath

    with store_errors(pattern) as bucket:
        inside = pattern.removeprefix(f"{bucket}/")
        if inside in (bucket, ""):
            raise ValueError(f"expected {bucket}/GLOB, got {pattern}")
        if "**" in inside:  # epath refuses it, too: the store would list all that it has
            raise ValueError(f"{pattern}: ** is not for object stores; name each folder")
        found = list(epath.Path(bucket).glob(inside))
        return cast(
            list[Path], sorted((path for path in found if not path.is_dir()), key=os.fspath)
        )


@contextlib.contextmanager
def store_errors(url: str) -> Iterator[str]:
    """Gives the bucket of a URL, with its scheme, and says what a store answers as ValueError.

    Raises:
      ValueError: the scheme is unknown, its package missing, or the store does not answer.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in PACKAGES:
        known = ", ".join(f"{name}://" for name in PACKAGES)
        raise ValueError(f"{url}: {scheme}:// is not read. There are: {known}")
    bucket = rest.partition("/")[0]
    if not bucket:
        raise ValueError(f"expected {scheme}://BUCKET/…, got {url}")
    try:
        yield f"{scheme}://{bucket}"
    except ValueError:
        raise
    except ImportError as error:
        raise ValueError(
            f"{url}: {scheme}:// needs the package {PACKAGES[scheme]}: pip install "
            f"{PACKAGES[scheme]} ({error})"
        ) from error
    except Exception as error:  # of the package, its client, the connection, the credentials
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"{url} cannot be reached by {PACKAGES[scheme]}: {why}") from error


def as_path(path: str) -> Path:
    """Returns the path of a file, here or in an object store."""
    if not is_url(path):
        return Path(path)
    from etils import epath

    return cast(Path, epath.Path(path))


def size_of(path: Path) -> int:
    """Returns the bytes of a file."""
    stat: Any = path.stat()
    return stat.length if is_url(path) else stat.st_size


def changed_at(url: Path) -> float:
    """Returns when the store got an object, in seconds since 1970; many stores count whole ones."""
    stat: Any = url.stat()
    return stat.mtime


def copy_files(files: Iterable[Path], root: Path, target: Path) -> None:
    """Copies files below `root` of a store to the same places below a folder here.

    Raises what the store or the disk raises first.
    """

    def one(path: Path) -> None:
        here = target / path.relative_to(root)
        here.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as stored, here.open("wb") as written:
            shutil.copyfileobj(stored, written, 2**24)

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(one, files))  # raises what a thread raised
