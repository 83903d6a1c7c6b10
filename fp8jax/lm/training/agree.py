"""What the processes of a run must have in common, compared before the first program is compiled.

Two processes with different learning rates would train to the end, each with its own; with other
numbers of steps they would wait for each other for ever. So each states in the coordinator's store
what it has, process 0 compares, and all end with the same line if one differs or has failed.

    config    each key, but for those that name a place of the host
    code      the files of this package, the versions of libraries, XLA's flags, JAX's options
    workdir   a file that process 0 writes and all others must see
    data      the fingerprint of the tokens
"""

import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import jax
from ml_collections import ConfigDict

from fp8jax.device import processes
from fp8jax.lm.corpus import Corpus
from fp8jax.lm.records.config_keys import by_path
from fp8jax.lm.records.workdir_lock import lock_workdir
from fp8jax.lm.training.run import Run

SAY_EVERY_S = 15.0

_OF_THE_HOST = ("cache_dir",)  # keys that may differ
_LIBRARIES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "libtpu",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "ml_dtypes",
    "numpy",
    "tokenizers",
)
_OPTIONS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
)
# Of XLA_FLAGS, what the processes of one run may have each for itself.
_OWN_FLAGS = ("--xla_force_host_platform_device_count", "--xla_dump_to")
_MOST = 6  # differences in a message

_calls = itertools.count(1)  # a process may train several runs, all processes in the same order

T = TypeVar("T")
Facts = Mapping[str, str]


class DisagreeError(ValueError):
    """The processes of a run have something different, and none may go on."""


class FailedElsewhereError(OSError):
    """Another process of the run has failed; the message names it."""


def together(topic: str, work: Callable[[], T], facts: Callable[[T], Facts] = lambda _: {}) -> T:
    """Returns what `work` returns, once it has succeeded in all processes, with the same facts.

    A process by itself just works.

    Args:
      topic: what the work is about, for people.
      facts: from the result to texts by name, which must be equal in all processes.

    Raises:
      DisagreeError: a fact differs; the same line in each process.
      FailedElsewhereError: the work failed in another process.
      Exception: what `work` raises in this one.
    """
    if processes.count() == 1:
        return work()
    key = f"{next(_calls)} {topic}"
    try:
        result = work()
        stated = dict(facts(result))
    except Exception as error:
        _state(key, {}, str(error) or type(error).__name__)
        _verdict(key)
        raise
    _state(key, stated, None)
    if verdict := _verdict(key):
        kind, line = verdict.split(" ", 1)
        raise {"differ": DisagreeError, "failed": FailedElsewhereError}[kind](line)
    return result


def config_facts(config: ConfigDict) -> Facts:
    """Returns the values of a config's keys, and what else decides what is compiled."""
    keys = {key: value for key, value in by_path(config).items() if key not in _OF_THE_HOST}
    return {**{f"config.{key}": repr(value) for key, value in keys.items()}, **_code_facts()}


def run_facts(run: Run) -> Facts:
    """Returns what the names of a config mean here: a recipe may be of the user's own file."""
    policies = {f"precision of stage {i}": repr(s.policy) for i, s in enumerate(run.stages)}
    return policies | {"tokenizer": run.tokenizer.fingerprint, "mesh": repr(dict(run.mesh.shape))}


def step_facts(newest: int | None) -> Facts:
    """Returns which checkpoint a run would go on from."""
    return {"newest checkpoint of the workdir": "none" if newest is None else str(newest)}


def data_facts(corpus: Corpus) -> Facts:
    """Returns what tells the tokens of all sources."""
    return {"data": corpus.fingerprint}


def lock_together(stack: contextlib.ExitStack, workdir: str) -> None:
    """Has process 0 hold the lock of the workdir until the stack ends, and all see that folder.

    Raises:
      DisagreeError: a process has another folder under this name.
      FailedElsewhereError: process 0 did not get the lock.
      Exception: in process 0, what `lock_workdir` raises.
    """

    def lock() -> None:
        stack.enter_context(lock_workdir(workdir))
        if processes.index() == 0 and processes.count() > 1:
            # No process has looked this name up: a network file system may remember an absence.
            name = f".seen-{secrets.token_hex(8)}"
            Path(workdir, name).touch()
            stack.callback(Path(workdir, name).unlink, missing_ok=True)
            processes.put("workdir", name)

    def seen(_: None) -> Facts:
        there = Path(workdir, processes.get("workdir", timeout_s=SAY_EVERY_S)).exists()
        return {"workdir": "shared" if there else f"not shared ({workdir})"}

    together("lock", lock)
    together("workdir", lambda: None, seen)


def _code_facts() -> Facts:
    folder = Path(__file__).parents[2]
    assert folder.name == "fp8jax"
    code = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        code.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    given = os.environ["XLA_FLAGS"] if "XLA_FLAGS" in os.environ else ""
    kept = sorted(flag for flag in given.split() if not flag.startswith(_OWN_FLAGS))
    return {
        "code of fp8jax": f"{_version('fp8jax')} {code.hexdigest()[:12]}",
        "Python": platform.python_version(),
        **{name: version for name in _LIBRARIES if (version := _version(name))},
        "XLA_FLAGS": " ".join(kept),
        **{name: str(getattr(jax.config, name)) for name in _OPTIONS},
    }


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _state(key: str, facts: Facts, failure: str | None) -> None:
    said = {"host": processes.host(), "pid": os.getpid(), "facts": facts, "failure": failure}
    processes.put(f"agree/{key}/{processes.index()}", json.dumps(said))


def _verdict(key: str) -> str:
    """Returns what process 0 finds: "", or "differ" or "failed" and a line."""
    if processes.index() == 0:
        verdict = _compare(_all_stated(key))
        processes.put(f"agreed/{key}/verdict", verdict)
        return verdict
    began = time.monotonic()
    while True:
        try:
            return processes.get(f"agreed/{key}/verdict", timeout_s=SAY_EVERY_S)
        except TimeoutError:
            _say(key, began, [index for index in _absent(_stated(key)) if index])


def _stated(key: str) -> dict[int, dict]:
    found = processes.keys(f"agree/{key}")
    return {int(index): json.loads(said) for index, said in found.items()}


def _absent(stated: Mapping[int, dict]) -> list[int]:
    return [index for index in range(processes.count()) if index not in stated]


def _all_stated(key: str) -> dict[int, dict]:
    """Returns what all have stated, or some, if one of them has failed."""
    began = said = time.monotonic()
    pause = 0.02
    while True:
        stated = _stated(key)
        absent = _absent(stated)
        if not absent or any(each["failure"] is not None for each in stated.values()):
            return stated
        if time.monotonic() - said >= SAY_EVERY_S:
            said = time.monotonic()
            _say(key, began, absent)
        time.sleep(pause)
        pause = min(2 * pause, 1.0)  # each look reads what all have stated


def _say(key: str, began: float, absent: list[int]) -> None:
    names = ", ".join(map(str, absent[:_MOST])) or "0"
    seconds = f"{time.monotonic() - began:.0f} s"
    me = f"process {processes.index()} on {processes.host()}"
    print(
        f"waiting: {me}, for {key.partition(' ')[2]} of process {names}: {seconds}",
        file=sys.stderr,
        flush=True,
    )


def _compare(stated: Mapping[int, dict]) -> str:
    """Returns the verdict on what the processes state: all of them, unless one has failed."""

    def name(index: int) -> str:
        return f"process {index} on {stated[index]['host']}"

    for index, each in sorted(stated.items()):
        if each["failure"] is not None:
            return f"failed {name(index)}: {' '.join(each['failure'].split())}"
    first = stated[0]["facts"]
    lines = []
    for index in sorted(stated):
        facts = stated[index]["facts"]
        for key in sorted(first.keys() | facts.keys()):
            here, there = (f[key] if key in f else "(missing)" for f in (first, facts))
            if here != there:
                lines.append(f"{key} is {here} in {name(0)} and {there} in {name(index)}")
    more = f"; and {len(lines) - _MOST} more" if len(lines) > _MOST else ""
    return f"differ the processes differ: {'; '.join(lines[:_MOST])}{more}" if lines else ""
