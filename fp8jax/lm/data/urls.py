"""Files of data in object stores, `gs://…` and `s3://…`, through etils.epath.

They are read where they are, once for their hash and once for their tokens. epath needs the package
of the store, and that package finds endpoint and credentials as always.
"""

import os
from pathlib import Path
from typing import Any, cast

PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}  # scheme -> what epath needs


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

    scheme, _, rest = pattern.partition("://")
    if scheme not in PACKAGES:
        known = ", ".join(f"{name}://" for name in PACKAGES)
        raise ValueError(f"{pattern}: {scheme}:// is not read. There are: {known}")
    bucket, _, inside = rest.partition("/")
    if not bucket or not inside:
        raise ValueError(f"expected {scheme}://BUCKET/GLOB, got {pattern}")
    if "**" in inside:  # epath refuses it, too: the store would list all that it has
        raise ValueError(
            f"{pattern}: ** is not for object stores; name each folder, or give it a *"
        )
    try:
        found = list(epath.Path(f"{scheme}://{bucket}").glob(inside))
        paths = sorted((path for path in found if not path.is_dir()), key=os.fspath)
    except ImportError as error:
        raise ValueError(
            f"{pattern}: {scheme}:// needs the package {PACKAGES[scheme]}: pip install "
            f"{PACKAGES[scheme]} ({error})"
        ) from error
    except Exception as error:  # of the package, its client, the connection, the credentials
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(
            f"{pattern}: {scheme}://{bucket} cannot be listed by {PACKAGES[scheme]}: {why}"
        ) from error
    return cast(list[Path], paths)


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
