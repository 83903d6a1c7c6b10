"""What a line of the ledger says of the code and the machine that made it."""

import hashlib
import importlib.metadata
import platform
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_CODE = ("fp8jax", "configs", "experiments")
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy", "tokenizers")


def facts(setting: str, data: str, commit: str) -> dict[str, Any]:
    """Returns the fields of a line that all chains of a call share.

    Args:
      setting: digest of the config.
      data: digest of the data.
      commit: of the code; machines that train may have no repository to ask.
    """
    versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    return {
        "setting": setting,
        "data": data,
        "commit": commit,
        "code": _code(),
        "versions": {"python": platform.python_version()} | versions,
    }


def _code() -> str:
    """Returns a digest of all Python files of the library, the configs and the experiments."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in _CODE for path in (_ROOT / folder).rglob("*.py")):
        digest.update(path.relative_to(_ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
