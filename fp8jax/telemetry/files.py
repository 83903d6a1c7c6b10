"""Telemetry on disk: one Parquet file for each sampled step, in a folder that reads as one table.

    WORKDIR/telemetry/step_000000050.parquet        the fields of `Row` are its columns

    pandas.read_parquet("WORKDIR/telemetry")        all steps; also while the run writes

A file appears whole, under its name, once it is written: a Parquet file cannot grow, and half a
one cannot be read. A step that is measured again replaces its file, and a run that resumes first
drops the files of later steps, as it does with later lines of metrics.jsonl. So no row is there
twice. A rollback within a run goes on with the next step number, and drops nothing.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fp8jax.telemetry.rows import FIELDS, Row, Table

FOLDER = "telemetry"
_TYPES = {
    "step": "int32",
    "layer": "int16",
    "elements": "int64",
    "nonzero": "int64",
    "bias": "int16",
    "linear": "string",
    "operand": "string",
    "cast": "string",
    "recipe": "string",
    "format": "string",
    "what_if": "bool",
}


def _schema() -> Any:
    import pyarrow as pa

    kinds = {
        "int16": pa.int16(),
        "int32": pa.int32(),
        "int64": pa.int64(),
        "string": pa.string(),
        "bool": pa.bool_(),
    }
    return pa.schema(
        [(name, kinds[_TYPES[name]] if name in _TYPES else pa.float64()) for name in FIELDS]
    )


def write_rows(path: str | os.PathLike[str], rows: Sequence[Row]) -> None:
    """Writes rows as a Parquet file, which replaces one of that name; makes its folder.

    Args:
      path: of the file.
      rows: such as `table.rows`.

    Raises:
      OSError: it cannot be written.

    Example:
      >>> layer, x = fp8jax.nn.Dense(4, "fp8_current"), jnp.ones((2, 8))
      >>> loss = lambda variables: layer.apply(variables, x).mean()
      >>> table = fp8jax.telemetry.measure(loss, layer.init(jax.random.key(0), x))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     fp8jax.telemetry.write(f"{folder}/mine.parquet", table.rows)
      ...     fp8jax.telemetry.read(f"{folder}/mine.parquet") == table
      True
    """
    import pyarrow as pa
    import pyarrow.parquet

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(Table(tuple(rows)).columns(), schema=_schema())
    half = path.with_name(f".{path.name}.tmp")  # readers of folders skip names with a dot
    pa.parquet.write_table(table, half, compression="zstd")
    os.replace(half, path)


def read_rows(path: str | os.PathLike[str]) -> Table:
    """Returns the rows of a file, of a folder of files, or of a run's directory, in order of steps.

    Args:
      path: a Parquet file, a folder of such files, or a workdir.

    Returns:
      A `Table`.

    Raises:
      FileNotFoundError: there are none; it says what it looked for.
      ValueError: for a file of other columns.

    Example:
      `write` has one that reads rows. Without any:

      >>> fp8jax.telemetry.read("runs/nowhere")
      Traceback (most recent call last):
          ...
      FileNotFoundError: no telemetry in runs/nowhere: train with --config.telemetry.every=50, ...
    """
    import pyarrow.parquet

    path = Path(path)
    if path.is_dir() and (path / FOLDER).is_dir():
        path = path / FOLDER
    files = [path] if path.is_file() else sorted(path.glob("step_*.parquet"))
    if not files:
        raise FileNotFoundError(
            f"no telemetry in {path}: train with --config.telemetry.every=50, for instance"
        )
    rows: list[Row] = []
    for file in files:
        table = pyarrow.parquet.read_table(file)
        if missing := [name for name in FIELDS if name not in table.column_names]:
            raise ValueError(f"{file} has no column {', '.join(missing)}: not telemetry, or older")
        rows += [Row(**line) for line in table.select(FIELDS).to_pylist()]
    return Table(tuple(rows))


class StepFiles:
    """The files of one run's sampled steps."""

    def __init__(self, workdir: str | os.PathLike[str], start_step: int):
        """Drops the files of steps after `start_step`, and what a killed run left half written."""
        self._folder = Path(workdir, FOLDER)
        for path in _steps_after(self._folder, start_step):
            path.unlink()
        for path in self._folder.glob(".step_*.tmp"):
            path.unlink()

    def write(self, step: int, rows: Sequence[Row]) -> None:
        """Writes the rows of one step."""
        write_rows(self._folder / f"step_{step:09d}.parquet", rows)


def _steps_after(folder: Path, step: int) -> Iterable[Path]:
    for path in folder.glob("step_*.parquet"):
        if int(path.stem.removeprefix("step_")) > step:
            yield path
