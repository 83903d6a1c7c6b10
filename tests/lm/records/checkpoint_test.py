"""What was saved comes back bit for bit, on any mesh; any damage is noticed and survived."""

import json
import logging as python_logging
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from absl import logging
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fp8jax.lm.records.checkpoint import Checkpointer, DamagedError
from fp8jax.lm.records.checkpoint_files import HASHES, find_damage, hash_files, list_files
from fp8jax.lm.records.differences import config_difference, listed


class Moments(NamedTuple):
    count: jax.Array
    mu: dict


class Empty(NamedTuple):
    pass


def _on(devices, spec):
    return NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:devices]), "d"), spec)


def _state(seed=0, devices=8):
    """A train state with all that one holds: odd dtypes, scalars, keys, named and empty nodes."""
    rng = np.random.default_rng(seed)
    w = rng.integers(0, 2**32, (16, 24), np.uint32).view(np.float32)  # NaNs and denormals as well
    bf16 = rng.integers(0, 2**16, (8, 8), np.uint16).view(jnp.bfloat16)
    sharded, everywhere = _on(devices, P("d")), _on(devices, P())
    put = jax.device_put
    return {
        "params": {"w": put(w, sharded), "b": put(bf16, sharded)},
        "opt": (Moments(put(jnp.int32(seed), everywhere), {"w": put(w[::-1], sharded)}), Empty()),
        "rng": put(jnp.array([seed, 2**32 - 1], jnp.uint32), everywhere),
        "key": put(jax.random.key(seed), everywhere),
        "nothing": None,
    }


def _fp8(seed=0):
    return {"history": jnp.full((2, 4), seed, jnp.float32) / 3}


def _like(tree, devices=8):
    """The same tree abstractly, on another number of devices."""

    def leaf(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_on(devices, x.sharding.spec))

    return jax.tree.map(leaf, tree)


def _bits(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return str(x.dtype), x.shape, np.asarray(x).tobytes()


def _assert_same(tree, expected):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    assert jax.tree.map(_bits, tree) == jax.tree.map(_bits, expected)


def _open(directory, *, every=1, keep=10, keep_best=0):
    return Checkpointer(directory, every=every, keep=keep, keep_best=keep_best)


def _write(directory, steps, **options):
    """Saves the state of seed `step` at each step."""
    with _open(directory, **options) as out:
        for step in steps:
            out.save(step, {"state": _state(step)}, {"at": step, "lr": 0.1}, None)


def _steps_of(directory):
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdigit())


@pytest.mark.parametrize("saved_on, restored_on", [(8, 8), (8, 1), (1, 8)])
def test_round_trip_onto_any_mesh(tmp_path, saved_on, restored_on):
    state = _state(3, saved_on)
    fp8 = {"h": jax.device_put(_fp8(3)["history"], _on(saved_on, P()))}
    meta = {"config": {"lr": 1 / 3, "mesh": (2, 4)}, "position": [1, 2**60], "note": None}
    with _open(tmp_path) as out:
        out.save(7, {"state": state, "fp8": fp8}, meta, None)
    abstract = {"state": _like(state, restored_on), "fp8": _like(fp8, restored_on)}
    with _open(tmp_path) as read:
        restored = read.restore(abstract)
        assert read.read_meta() == (7, restored.meta)
    assert restored.step == 7 and read.rejected == []
    assert restored.meta == {**meta, "config": {"lr": 1 / 3, "mesh": [2, 4]}}
    _assert_same(restored.arrays, {"state": state, "fp8": fp8})
    for leaf, wanted in zip(
        jax.tree.leaves(restored.arrays), jax.tree.leaves(abstract), strict=True
    ):
        assert leaf.sharding == wanted.sharding


def test_nothing_there_is_none_and_makes_nothing(tmp_path):
    with _open(tmp_path / "typo") as read:
        assert read.restore({"state": _like(_state())}) is None
        assert read.read_meta() is None
    assert not (tmp_path / "typo").exists()


def test_only_some_items_and_empty_ones(tmp_path):
    state, fp8 = _state(), _fp8()
    with _open(tmp_path) as out:
        out.save(1, {"state": state, "fp8": {}, "none": {"a": None}}, {}, None)
        restored = out.restore({"fp8": {}, "none": {"a": None}, "state": _like(state)})
        assert restored.arrays["fp8"] == {} and restored.arrays["none"] == {"a": None}
        _assert_same(restored.arrays["state"], state)
        assert out.restore({}).arrays == {}
        out.save(2, {"state": state, "fp8": fp8}, {}, None)
        assert list(out.restore({"fp8": fp8}).arrays) == ["fp8"]  # arrays do for abstract ones


def test_should_save_and_keep(tmp_path):
    out = _open(tmp_path, every=5, keep=2)
    assert [step for step in range(12) if out.should_save(step)] == [5, 10]
    with out:
        for step in (3, 5, 10, 11):  # the first and an odd last one are not Orbax's to decide
            out.save(step, {"a": {"x": jnp.float32(step)}}, {}, None)
    assert _steps_of(tmp_path) == [10, 11]


def _tiny(step):
    return {"a": {"x": jnp.float32(step)}}


def _write_metrics(directory, metrics, **options):
    """Saves a step with each metric."""
    with _open(directory, **options) as out:
        out.restore({})
        for step, metric in metrics.items():
            out.save(step, _tiny(step), {"at": step}, metric)


def test_the_best_stay_among_later_and_worse_ones(tmp_path):
    metrics = {1: 3.0, 2: 1.0, 3: 2.0, 4: 1.5, 5: 4.0, 6: 5.0}
    _write_metrics(tmp_path, metrics, keep=1, keep_best=2)
    assert _steps_of(tmp_path) == [2, 4, 6]
    with _open(tmp_path) as read:
        assert read.best() == (2, 1.0)
        assert read.read_meta() == (6, {"at": 6}) and read.read_meta(at_most=2) == (2, {"at": 2})
        assert read.restore(_tiny(0)).arrays["a"]["x"] == 6  # a run goes on from the latest
        assert read.restore(_tiny(0), at_most=2).arrays["a"]["x"] == 2


def test_without_keep_best_only_the_latest_stay(tmp_path):
    _write_metrics(tmp_path, {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}, keep=2)
    assert _steps_of(tmp_path) == [3, 4]
    with _open(tmp_path) as read:
        assert read.best() == (3, 3.0)


def test_a_step_without_a_finite_metric_is_never_a_best_one(tmp_path):
    nan, inf = math.nan, math.inf
    metrics = {1: None, 2: nan, 3: 2.0, 4: -inf, 5: 3.0, 6: None, 7: inf, 8: nan, 9: None}
    _write_metrics(tmp_path, metrics, keep=2, keep_best=2)
    assert _steps_of(tmp_path) == [3, 5, 8, 9]
    with _open(tmp_path) as read:
        assert read.best() == (3, 2.0)
    _write_metrics(tmp_path / "none", {1: None, 2: nan, 3: None}, keep=1, keep_best=2)
    assert _steps_of(tmp_path / "none") == [3]
    with _open(tmp_path / "none") as read:
        assert read.best() is None and read.rejected == []
    with _open(tmp_path / "nothing") as read:
        assert read.best() is None


def test_of_equal_metrics_the_newest_is_best(tmp_path):
    _write_metrics(tmp_path, {1: 1.0, 2: 1.0, 3: 2.0, 4: 3.0}, keep=1, keep_best=1)
    assert _steps_of(tmp_path) == [2, 4]


def test_another_process_keeps_the_best_and_goes_on_from_the_latest(tmp_path):
    _write_metrics(tmp_path, {1: 0.1 + 0.2, 2: 2.0, 3: None}, keep=1, keep_best=1)
    for step in (4, 5):
        with _open(tmp_path, keep=1, keep_best=1) as out:
            assert out.restore(_tiny(0)).step == step - 1
            out.save(step, _tiny(step), {}, float(step))
        assert _steps_of(tmp_path) == [1, step]
    _write_metrics(tmp_path, {6: 0.3}, keep=1, keep_best=1)  # 0.1 + 0.2 was more, to the bit
    assert _steps_of(tmp_path) == [6]


def test_going_back_keeps_the_best_before(tmp_path):
    metrics = {1: 4.0, 2: 1.0, 3: 3.0, 4: 0.5}
    with _open(tmp_path, keep=2, keep_best=2) as out:
        for step, metric in metrics.items():
            out.save(step, _tiny(step), {}, metric)
        assert out.best() == (4, 0.5)
        assert out.restore(_tiny(0), at_most=3).step == 3
        out.save(4, _tiny(4), {}, 9.0)  # what step 4 was before no longer counts
        assert out.best() == (2, 1.0)
        for step in (5, 6):
            out.save(step, _tiny(step), {}, 8.0)
        assert out.best() == (2, 1.0)
    assert _steps_of(tmp_path) == [2, 3, 5, 6] and (tmp_path / "abandoned-4").is_dir()


@pytest.mark.parametrize("part", ["a", "meta"])
def test_a_damaged_best_is_said_and_the_next_one_taken(tmp_path, part):
    _write_metrics(tmp_path, {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}, keep=1, keep_best=3)
    _flip(max(_files_of(tmp_path / "1" / part), key=lambda p: p.stat().st_size))
    with _open(tmp_path, keep=1, keep_best=3) as out:
        assert out.restore(_tiny(0)).step == 4 and out.rejected == []
        assert out.best() == (2, 2.0)
        ((step, reason),) = out.rejected
        assert step == 1 and f"changed since it was saved: {part}/" in reason
        out.save(5, _tiny(5), {}, 5.0)  # takes the place of no sound one
    assert _steps_of(tmp_path) == [2, 3, 4, 5]


def test_the_same_step_twice_is_harmless(tmp_path):
    one, two = {"a": {"x": jnp.float32(1)}}, {"a": {"x": jnp.float32(2)}}
    with _open(tmp_path) as out:
        out.save(4, one, {"first": True}, None)
        out.save(4, two, {"first": False}, None)  # while the first is being written
        out.wait()
        out.save(4, two, {"first": False}, None)
    with _open(tmp_path) as again:
        assert again.restore(two).meta == {"first": True}
        again.save(4, two, {"first": False}, None)  # SIGTERM right after a resume
        restored = again.restore(two)
    assert restored.meta == {"first": True} and restored.arrays["a"]["x"] == 1


def test_arrays_may_be_donated_or_changed_once_save_returns(tmp_path):
    sharding = _on(8, P("d"))
    x = jax.device_put(jnp.zeros((512, 2048)), sharding)
    n = np.zeros(1000, np.float32)
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    with _open(tmp_path) as out:
        out.save(1, {"x": {"x": x, "n": n}}, {}, None)
        n += 1
        for _ in range(3):
            x = step(x)
        wanted = {"x": x, "n": jax.ShapeDtypeStruct(n.shape, n.dtype, sharding=_on(8, P()))}
        saved = out.restore({"x": wanted}).arrays["x"]
    assert not np.asarray(saved["x"]).any() and not np.asarray(saved["n"]).any()


def _files_of(step_directory):
    return sorted(p for p in step_directory.rglob("*") if p.is_file() and p.name != "sha256.json")


def _half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def _empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", [_half, _flip, os.remove, _empty], ids=lambda f: f.__name__)
def test_any_damage_to_any_file_falls_back(tmp_path, harm):
    _write(tmp_path, [1, 2])
    files = _files_of(tmp_path / "2")
    assert len(files) > 8 and len({p.parent for p in files}) > 4
    good = {path: path.read_bytes() for path in files}
    for path in files:
        harm(path)
        with _open(tmp_path) as read:
            assert read.read_meta() == (1, {"at": 1, "lr": 0.1})
        ((step, reason),) = read.rejected
        assert step == 2 and path.relative_to(tmp_path / "2").as_posix() in reason
        path.write_bytes(good[path])
    harm(next(path for path in files if "ocdbt.process_0/d" in path.as_posix()))
    with _open(tmp_path) as read:
        restored = read.restore({"state": _like(_state())})
    assert restored.step == 1 and [step for step, _ in read.rejected] == [2]
    _assert_same(restored.arrays["state"], _state(1))
    assert _steps_of(tmp_path) == [1, 2]  # reading moves nothing


# A process of its own: where Orbax gives up at the first error, its other reads end later, in
# threads, with complaints that pytest would lay at the door of whatever test runs by then.
_READ_EACH = """
import sys, jax, jax.numpy as jnp
from fp8jax.lm.records.checkpoint import Checkpointer, DamagedError
for directory in sys.argv[1:]:
    with Checkpointer(directory, every=1, keep=1, keep_best=0) as read:
        restored = read.restore({"state": {"x": jnp.zeros((64, 64))}})
    same = (restored.arrays["state"]["x"] == restored.step).all() and restored.meta == {"at": 1}
    print(restored.step, same, [step for step, _ in read.rejected])
"""


def test_without_hashes_what_orbax_notices_falls_back_too(tmp_path):
    with _open(tmp_path / "good") as out:
        for step in (1, 2):
            out.save(step, {"state": {"x": jnp.full((64, 64), float(step))}}, {"at": 1}, None)
    (tmp_path / "good" / "2" / "sha256.json").unlink()
    harms = [
        ("meta/metadata", os.remove),
        ("meta/metadata", _half),
        ("state/_METADATA", _empty),  # Orbax does without this file, but not with half of it
        ("state/_METADATA", _half),
        ("state/manifest.ocdbt", os.remove),
        ("state/d", os.remove),
        ("state/d", _half),
        ("state/d", _empty),
    ]
    directories = [tmp_path / "good"]
    for part, harm in harms:
        directories.append(tmp_path / f"{part.replace('/', '-')}-{harm.__name__}")
        shutil.copytree(tmp_path / "good", directories[-1])
        path = directories[-1] / "2" / part
        for file in path.iterdir() if path.is_dir() else [path]:
            harm(file)
    done = subprocess.run(
        [sys.executable, "-c", _READ_EACH, *map(str, directories)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["2 True []"] + ["1 True [2]"] * len(harms)


# A pickle that makes a directory when it is loaded, in the place of each file in turn, by someone
# who has the list of hashes match.
_READ_FORGED = """
import hashlib, json, os, pickle, sys
from pathlib import Path
import jax.numpy as jnp
from fp8jax.lm.records.checkpoint import Checkpointer, DamagedError

class Bomb:
    def __reduce__(self):
        return os.mkdir, (sys.argv[2],)

payload = pickle.dumps(Bomb())
pickle.loads(payload)  # it does go off
os.rmdir(sys.argv[2])
step = Path(sys.argv[1], "2")
sound = json.loads((step / "sha256.json").read_text())
for name in sound:
    good = (step / name).read_bytes()
    (step / name).write_bytes(payload)
    forged = sound | {name: hashlib.sha256(payload).hexdigest()}
    (step / "sha256.json").write_text(json.dumps(forged))
    try:
        with Checkpointer(sys.argv[1], every=1, keep=1, keep_best=0) as read:
            read.restore({"state": {"x": jnp.zeros((64, 64))}})
    except Exception as error:
        print(name, type(error).__name__)
    else:
        print(name, "read")  # another file holds the same, or an earlier step was taken
    (step / name).write_bytes(good)
os._exit(0)  # reads that Orbax gave up still run
"""


def test_a_pickle_in_a_checkpoint_is_never_loaded(tmp_path):
    with _open(tmp_path / "run") as out:
        for step in (1, 2):
            out.save(step, {"state": {"x": jnp.full((64, 64), float(step))}}, {"at": 1}, None)
    files = _files_of(tmp_path / "run" / "2")
    before = {path: path.read_bytes() for path in files}
    assert not any(data.startswith(b"\x80") for data in before.values())  # protocol 2 and later
    done = subprocess.run(
        [sys.executable, "-uc", _READ_FORGED, str(tmp_path / "run"), str(tmp_path / "gone_off")],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(files) and "Error" in done.stdout
    assert not (tmp_path / "gone_off").exists()
    assert {path: path.read_bytes() for path in files} == before


def test_only_the_named_part_is_compared(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    hashes = hash_files(tmp_path, list_files(tmp_path))
    (tmp_path / HASHES).write_text(json.dumps(hashes))
    (tmp_path / "b/file").write_text("x")
    (tmp_path / "c/file").unlink()
    assert find_damage(tmp_path, "a") is None
    assert find_damage(tmp_path, ("a", "b")) == "changed since it was saved: b/file"
    assert find_damage(tmp_path, ("a", "c")) == "missing: c/file"


def test_what_is_not_asked_for_may_be_gone(tmp_path):
    (tmp_path / "params").write_text("p")
    (tmp_path / "moments").write_text("m")
    (tmp_path / HASHES).write_text(json.dumps(hash_files(tmp_path, ["moments", "params"])))
    (tmp_path / "moments").unlink()
    assert find_damage(tmp_path, "params") is None
    assert find_damage(tmp_path, "") == "missing: moments"


def test_a_spoilt_list_of_hashes_is_damage(tmp_path):
    _write(tmp_path, [1, 2])
    for text in ("", "[]", "3", '{"a": '):
        (tmp_path / "2" / "sha256.json").write_text(text)
        with _open(tmp_path) as read:
            assert read.read_meta() == (1, {"at": 1, "lr": 0.1}), text


def test_a_rejected_step_can_be_saved_again(tmp_path):
    _write(tmp_path, [1, 2, 3])
    for step in (2, 3):
        _half(max(_files_of(tmp_path / str(step)), key=lambda p: p.stat().st_size))
    with _open(tmp_path) as out:
        assert out.restore({"state": _like(_state())}).step == 1
        for step in (2, 3):
            out.save(step, {"state": _state(10 + step)}, {}, None)
        assert out.restore({"state": _like(_state())}).step == 3
    assert [step for step, _ in out.rejected] == [3, 2]
    assert (tmp_path / "corrupt-2").is_dir() and (tmp_path / "corrupt-3").is_dir()
    with _open(tmp_path) as read:
        _assert_same(read.restore({"state": _like(_state())}).arrays["state"], _state(13))
    assert read.rejected == [] and _steps_of(tmp_path) == [1, 2, 3]


def test_all_damaged_raises_with_the_list(tmp_path):
    _write(tmp_path, [1, 2])
    for step in (1, 2):
        os.remove(tmp_path / str(step) / "meta" / "metadata")
    with _open(tmp_path) as read:
        message = r"every checkpoint in .* is damaged: 2: missing: meta/metadata; 1: "
        with pytest.raises(DamagedError, match=message) as error:
            read.restore({"state": _like(_state())})
        assert "\n" not in str(error.value)
        with pytest.raises(DamagedError, match=message):
            read.read_meta()
    assert _steps_of(tmp_path) == [1, 2]


def test_going_back_abandons_what_came_after(tmp_path):
    with _open(tmp_path) as out:
        for step in (1, 2, 3):
            out.save(step, {"state": _state(step)}, {"line": "old"}, None)
        assert out.restore({"state": _like(_state())}, at_most=2).step == 2
        out.save(3, {"state": _state(33)}, {"line": "new"}, None)
        restored = out.restore({"state": _like(_state())})
        assert out.restore({}, at_most=0) is None
    _assert_same(restored.arrays["state"], _state(33))
    assert restored.meta == {"line": "new"} and out.rejected == []
    with _open(tmp_path) as fresh:  # a run that never asked begins its own line
        fresh.save(1, {"state": _state(5)}, {"line": "fresh"}, None)
    assert _steps_of(tmp_path) == [1]
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"1", "abandoned-1", "abandoned-2", "abandoned-3"}


@pytest.mark.usefixtures("takes_ctrl_c")
def test_ctrl_c_waits_until_a_step_is_read(tmp_path, monkeypatch):
    read = []

    def interrupted(self, *args, restore=ocp.Checkpointer.restore, **kwargs):
        signal.raise_signal(signal.SIGINT)
        read.append(restore(self, *args, **kwargs))
        return read[-1]

    with Checkpointer(tmp_path, every=1, keep=1, keep_best=0) as checkpointer:
        checkpointer.save(1, {"fp8": _fp8()}, {}, None)
        checkpointer.wait()
        monkeypatch.setattr(ocp.Checkpointer, "restore", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.read_meta()
    assert len(read) == 1


def test_ctrl_c_waits_until_arrays_are_restored(tmp_path, monkeypatch, takes_ctrl_c):
    ended = []

    def interrupted(self, *args, restore=ocp.Checkpointer.restore, **kwargs):
        signal.raise_signal(signal.SIGINT)
        ended.append(restore(self, *args, **kwargs))
        return ended[-1]

    with Checkpointer(tmp_path, every=1, keep=1, keep_best=0) as checkpointer:
        checkpointer.save(1, {"fp8": _fp8()}, {}, None)
        checkpointer.wait()
        assert checkpointer.read_meta() == (1, {})
        monkeypatch.setattr(ocp.Checkpointer, "restore", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.restore({"fp8": _fp8()})
    assert len(ended) == 1


def test_another_model_is_an_error_that_says_what_differs(tmp_path):
    _write(tmp_path, [1, 2])
    state = _state()
    other = {**state, "params": {**state["params"], "w": jnp.zeros((4, 4)), "gate": jnp.ones(2)}}
    del other["rng"]
    with _open(tmp_path) as read:
        with pytest.raises(ValueError) as error:
            read.restore({"state": other})
        assert str(error.value).endswith(
            "its 'state' differs from this run's (checkpoint -> run): "
            "params/gate: (missing) -> 'float32[2]'; "
            "params/w: 'float32[16,24]' -> 'float32[4,4]'; "
            "rng: 'uint32[2]' -> (missing)"
        )
        narrow = jax.tree.map(lambda x: x, _like(state))
        narrow["params"]["w"] = jax.ShapeDtypeStruct((16, 24), jnp.bfloat16, sharding=_on(8, P()))
        with pytest.raises(ValueError, match=r"params/w: 'float32\[16,24\]' -> 'bfloat16"):
            read.restore({"state": narrow})
        with pytest.raises(ValueError, match=r"holds no 'fp8', only \['state'\]"):
            read.restore({"state": _like(state), "fp8": {"scale": _like(state)["rng"]}})
        # A part without arrays needs nothing, and may have come after the checkpoint was written.
        assert read.restore({"state": _like(state), "fp8": {}}).arrays["fp8"] == {}
        assert read.rejected == []


def test_a_message_lists_the_first_differences():
    assert listed(["a: 1 -> 2"]) == "a: 1 -> 2"
    assert listed(list("abcdefghij")) == "a; b; c; d; e; f; g; h; i; j"
    assert listed(list("abcdefghijkl")) == "a; b; c; d; e; f; g; h; i; j; and 2 more"


def test_what_cannot_be_kept_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="file is a file: checkpoints need a directory"):
        _open(tmp_path / "file")
    with pytest.raises(ValueError, match="every=0 and keep=1"):
        _open(tmp_path, every=0, keep=1)
    with pytest.raises(ValueError, match="keep_best=-1 must be at least 0"):
        _open(tmp_path, keep_best=-1)
    with pytest.raises(ValueError, match="is a URL"):
        _open("gs://bucket/run")
    with _open(tmp_path) as out:
        with pytest.raises(TypeError, match="a/b is not an array: 3"):
            out.save(1, {"state": {"a": {"b": 3}}}, {}, None)
        with pytest.raises(TypeError, match="not JSON serializable"):
            out.save(1, {"state": {"a": jnp.ones(2)}}, {"x": object()}, None)
        with pytest.raises(ValueError, match="names the JSON part"):
            out.save(1, {"meta": {"a": jnp.ones(2)}}, {}, None)
        with pytest.raises(TypeError, match="cannot save a bare leaf"):
            out.save(1, {"state": jnp.ones(2)}, {}, None)
        with pytest.raises(ValueError, match="has no sharding"):
            out.restore({"state": jax.ShapeDtypeStruct((2,), jnp.float32)})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.fixture
def small_files_only():
    """Files of this process cannot grow beyond a megabyte: as good as a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("said_by", ["wait", "save", "close", "require_saved"])
def test_a_full_disk_is_said_and_costs_that_save_only(tmp_path, small_files_only, said_by):
    small = {"a": {"x": jnp.ones(3)}}
    bits = np.random.default_rng(0).integers(0, 2**32, 2**20, np.uint32)  # 4 MiB
    out = _open(tmp_path)
    out.save(1, small, {}, None)
    out.require_saved()
    out.save(2, {"a": {"x": jnp.asarray(bits)}}, {}, None)
    with pytest.raises(Exception, match="File too large"):
        if said_by == "save":
            out.save(3, small, {}, None)
        while said_by == "require_saved" and out.failure is None:
            time.sleep(0.01)  # it waits for none
        getattr(out, said_by)()
    assert "File too large" in str(out.failure)  # said before, where `wait` waits for others
    small_files_only()
    with _open(tmp_path) as read:
        assert read.failure is None and read.restore(small).step == 1 and read.rejected == []
    if said_by == "wait":  # with room again the run may go on
        out.save(3, small, {}, None)
    out.close()
    assert _steps_of(tmp_path) == ([1, 3] if said_by == "wait" else [1])


def test_a_failed_save_displaces_no_best_one(tmp_path, small_files_only):
    bits = np.random.default_rng(0).integers(0, 2**32, 2**20, np.uint32)  # 4 MiB
    with _open(tmp_path, keep=1, keep_best=1) as out:
        for step in (1, 2):
            out.save(step, _tiny(step), {}, float(step))
        out.save(3, {"a": {"x": jnp.asarray(bits)}}, {}, 0.5)
        with pytest.raises(Exception, match="File too large"):
            out.wait()
        small_files_only()
        assert _steps_of(tmp_path) == [1, 2] and out.best() == (1, 1.0)
        out.save(4, _tiny(4), {}, 4.0)
    assert _steps_of(tmp_path) == [1, 4]


_KILLED = """
import os, signal, sys, threading
import jax, jax.numpy as jnp, numpy as np
from fp8jax.lm.records.checkpoint import Checkpointer, DamagedError
out = Checkpointer(sys.argv[1], every=1, keep=3, keep_best=0)
out.save(1, {"state": {"x": jnp.arange(8.0)}}, {"at": 1}, None)
out.wait()
big = np.random.default_rng(0).integers(0, 255, 2**26, np.uint8)
def die():  # the arrays are being written
    while not any(".orbax-checkpoint-tmp" in name for name in os.listdir(sys.argv[1])): pass
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=die).start()
out.save(2, {"state": {"x": jnp.asarray(big)}}, {"at": 2}, None)
out.wait()
"""


def test_a_kill_during_a_save_costs_that_save_only(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path)], env=environment, capture_output=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert _steps_of(tmp_path) == [1] and len(list(tmp_path.iterdir())) == 2
    with _open(tmp_path) as out:
        restored = out.restore({"state": {"x": jnp.zeros(8)}})
        assert restored.meta == {"at": 1} and out.rejected == []
        np.testing.assert_array_equal(restored.arrays["state"]["x"], np.arange(8.0))
        assert len(list(tmp_path.iterdir())) == 2  # a reader may be another process: no cleaning
        out.save(2, {"state": {"x": jnp.ones(8)}}, {"at": 2}, None)
    assert {p.name for p in tmp_path.iterdir()} == {"1", "2"}


def test_the_log_says_damage_and_is_otherwise_silent(tmp_path):
    seen = []

    class Keep(python_logging.Handler):
        def emit(self, record):
            seen.append((record.levelname, Path(record.pathname).name, record.getMessage()))

    logger, handler, verbosity = python_logging.getLogger("absl"), Keep(), logging.get_verbosity()
    logger.addHandler(handler)
    logging.set_verbosity(logging.INFO)
    try:
        _write(tmp_path, [1, 2])
        with _open(tmp_path) as read:
            read.restore({"state": _like(_state())})
        assert seen == []
        _flip(tmp_path / "2" / "meta" / "metadata")
        with _open(tmp_path) as read:
            assert read.restore({"state": _like(_state())}).step == 1
    finally:
        logging.set_verbosity(verbosity)
        logger.removeHandler(handler)
    (line,) = seen
    assert line[:2] == ("WARNING", "checkpoint.py")
    assert line[2].endswith("/2 is damaged: changed since it was saved: meta/metadata")


def test_config_difference():
    old = {"lr": 0.1, "mesh": [2, 4], "model": {"d": 64, "extra": {}}, "seed": 1, "nan": math.nan}
    new = {"lr": 0.2, "mesh": (2, 4), "model": {"d": 64, "heads": 2}, "seed": 1, "nan": math.nan}
    assert config_difference(old, new) == [
        "lr: 0.1 -> 0.2",
        "model.extra: {} -> (missing)",
        "model.heads: (missing) -> 2",
    ]
    assert config_difference(old, old) == []
