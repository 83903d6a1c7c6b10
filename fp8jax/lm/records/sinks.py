"""Where a run's scalars go besides its own directory: Weights & Biases, or trackio on this machine.

    --config.log_to=wandb:PROJECT        (pip install wandb)
    --config.log_to=trackio:PROJECT      (pip install trackio; the same functions, local)

Both packages have the functions `init`, `log` and `finish`, and are imported only when asked for.
"""

import hashlib
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fp8jax.lookup import lookup

PACKAGES = {"wandb": "wandb", "trackio": "trackio"}


@runtime_checkable
class Sink(Protocol):
    """What takes a run's scalars."""

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Takes the scalars of one step, by name; all are finite."""

    def finish(self) -> None:
        """Ends; nothing is logged afterwards."""


class _PackageSink:
    """A `Sink` over a package with the functions of wandb."""

    def __init__(
        self, package: Any, project: str, workdir: Path, url: str | None, config: Mapping[str, Any]
    ):
        # The same workdir is the same run, so that a resumed one goes on where it was.
        run = hashlib.sha256((url or str(workdir.resolve())).encode()).hexdigest()[:12]
        name = f"{workdir.name}-{run}"
        self._package = package
        if package.__name__ == "wandb":
            package.init(
                project=project,
                name=name,
                id=name,
                resume="allow",
                dir=str(workdir),
                config=dict(config),
            )
        else:
            package.init(project=project, name=name, resume="allow", config=dict(config))

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._package.log(dict(scalars), step=step)

    def finish(self) -> None:
        self._package.finish()


def check_sink(spec: str) -> None:
    """Raises ValueError for what `open_sink` would refuse, before a run has written anything."""
    if spec:
        _imported(spec, _parse(spec)[0])


def open_sink(
    spec: str,
    workdir: str | os.PathLike[str],
    config: Mapping[str, Any],
    url: str | None = None,
) -> Sink | None:
    """Returns the sink that KIND:PROJECT names, None for an empty text.

    Args:
      workdir: the run's directory.
      url: of the workdir in a store, of which `workdir` is a copy.
      config: what the sink shows as the run's configuration.

    Raises:
      ValueError: not KIND:PROJECT of a known kind, or its package is not installed; then the
        message says how to install it.
    """
    if not spec:
        return None
    kind, project = _parse(spec)
    return _PackageSink(_imported(spec, kind), project, Path(workdir), url, config)


def _imported(spec: str, kind: str) -> Any:
    try:
        return importlib.import_module(PACKAGES[kind])
    except ImportError as error:
        raise ValueError(
            f"log_to={spec!r} needs the package {PACKAGES[kind]}: pip install {PACKAGES[kind]}"
        ) from error


def _parse(spec: str) -> tuple[str, str]:
    kind, _, project = spec.partition(":")
    lookup("kind of log_to", kind, PACKAGES)
    if not project:
        raise ValueError(f"log_to={spec!r}: expected {kind}:PROJECT")
    return kind, project
