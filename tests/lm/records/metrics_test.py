"""Files of a resumed run read as one run, to the bit; errors name the file; events are logged."""

import errno
import inspect
import io
import json
import logging as python_logging
import math
import os
import random
import re
import struct
import subprocess
import sys
import tracemalloc
from unittest import mock

import jax
import pytest
from absl import logging

from fp8jax.lm.records import jsonl, metrics, tensorboard
from fp8jax.lm.records.events import Cause, Event
from fp8jax.lm.records.jsonl import read_jsonl
from fp8jax.lm.records.metrics import Metrics
from tests.support import ROOT


def _bits(x):
    return struct.pack("<d", x)


def test_floats_come_back_bit_for_bit_with_step_first(tmp_path):
    rng = random.Random(0)
    floats = [rng.uniform(-1, 1) * 10.0 ** rng.randint(-300, 300) for _ in range(200)]
    floats += [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.nan, math.inf, -math.inf]
    with Metrics(tmp_path / "run", num_steps=1000) as out:
        for step, value in enumerate(floats, start=1):
            out.write(step, {"loss": value, "mfu": None, "tokens": 7})
    path = tmp_path / "run" / "metrics.jsonl"
    lines = read_jsonl(path)
    assert [list(line) for line in lines] == [["step", "time", "loss", "mfu", "tokens"]] * len(
        floats
    )
    assert [line["step"] for line in lines] == list(range(1, len(floats) + 1))
    for line, value in zip(lines, floats, strict=True):
        assert _bits(line["loss"]) == _bits(value)
        assert line["mfu"] is None and line["tokens"] == 7

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    for text in path.read_text().splitlines():
        json.loads(text, parse_constant=refuse)


def test_a_line_is_in_the_file_when_write_returns(tmp_path):
    with Metrics(tmp_path, num_steps=10) as out:
        for step in (1, 2, 3):
            out.write(step, {"loss": 1.0})
            assert read_jsonl(tmp_path / "metrics.jsonl")[-1]["step"] == step
            out.event(step, Event.STAGE, policy="bf16")
            assert read_jsonl(tmp_path / "events.jsonl")[-1]["step"] == step


def _run(workdir, steps, *, start_step=0):
    with Metrics(workdir, num_steps=10, start_step=start_step) as out:
        for step in steps:
            out.write(step, {"loss": 1 / (3 + step)})


def _without_time(path):
    """The bytes of a file of metrics, but for the times of its lines."""
    text, times = re.subn(rb' "time": "[^"]*",', b"", path.read_bytes())
    assert times == len(text.splitlines())
    return text


def test_a_resumed_run_reads_as_one_run(tmp_path):
    _run(tmp_path / "whole", range(1, 11))
    _run(tmp_path / "killed", range(1, 8))
    path = tmp_path / "killed" / "metrics.jsonl"
    with open(path, "ab") as file:
        file.write(b'{"step": 8, "lo')  # the machine went down within a line
    assert [line["step"] for line in read_jsonl(path)] == list(range(1, 8))
    _run(tmp_path / "killed", range(6, 11), start_step=5)
    lines, whole = (_without_time(tmp_path / run / "metrics.jsonl") for run in ("killed", "whole"))
    assert lines == whole
    assert not list(path.parent.glob("*.tmp"))


def test_a_fresh_run_drops_the_old_lines_but_no_event(tmp_path):
    with Metrics(tmp_path, num_steps=10) as out:
        out.write(0, {"valid_loss": 2.0})
        out.write(1, {"loss": 1.0})
        out.event(1, Event.CHECKPOINT, fromm="nothing", path=tmp_path)
    with open(tmp_path / "events.jsonl", "ab") as file:
        file.write(b'{"time"')
    with Metrics(tmp_path, num_steps=10) as out:
        out.event(0, Event.START, rate=math.inf, nested={"losses": [1.5, math.nan]})
    assert read_jsonl(tmp_path / "metrics.jsonl") == []
    first, second = read_jsonl(tmp_path / "events.jsonl")
    assert list(first) == ["time", "step", "kind", "fromm", "path"]
    assert first["time"].endswith("+00:00") and first["path"] == str(tmp_path)
    assert (second["step"], second["kind"], second["rate"]) == (0, "start", math.inf)
    assert second["nested"] == {"losses": [1.5, "NaN"]}


def test_a_spoilt_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not JSON"):
        read_jsonl(path)
    path.write_bytes(b"3\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:1: not a JSON object: 3"):
        read_jsonl(path)


def test_damaged_lines_and_gaps_are_noted_and_the_run_goes_on(tmp_path):
    good = [b'{"step": %d, "loss": 0.5}\n' % step for step in range(1, 13)]
    damaged = [
        b'{"step": 4, "lo{"step": 5}\n',
        b"\0\0\n",
        b"[6]\n",
        b'{"loss": 1}\n',
        b'{"step": "8"}\n',
    ]
    cut = b'{"step": 13, "lo'
    lines = [*good[:3], *damaged, *good[8:], cut]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    (tmp_path / "samples.jsonl").write_bytes(
        b'{"step": 5, "text": "a"}\n{"step": 12, "text": "b"}\n{\n'
    )
    (tmp_path / "events.jsonl").write_bytes(b'{"kind": "start"}\nno\n')
    with Metrics(tmp_path, num_steps=30, start_step=11) as out:
        assert out.missing == [(4, 8)]
        assert {name: len(found) for name, found in out.damaged.items()} == {
            "metrics.jsonl": 5,
            "samples.jsonl": 1,
            "events.jsonl": 1,
        }
        starts = [
            "line 4: not JSON",
            "line 5: not JSON",
            "line 6: not a JSON object",
            "line 7: no 'step'",
        ]
        found = out.damaged["metrics.jsonl"]
        assert [text[: len(start)] for text, start in zip(found, starts, strict=False)] == starts
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join([*good[:3], *good[8:11]])
    assert (tmp_path / "samples.jsonl").read_bytes() == b'{"step": 5, "text": "a"}\n'
    assert (tmp_path / "events.jsonl").read_bytes() == b'{"kind": "start"}\n'
    with Metrics(tmp_path, num_steps=30, start_step=20) as out:
        assert out.missing == [(4, 8), (12, 20)] and not out.damaged
    with Metrics(tmp_path, num_steps=30) as out:  # a fresh run
        assert not out.missing and not out.damaged
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_long_file_is_read_line_by_line(tmp_path, monkeypatch):
    """Half a million lines took 800 MB at a resume."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(b'{"step": %d, "loss": 0.5}\n' % step for step in range(1, 20_001)))
    tracemalloc.start()
    try:
        with Metrics(tmp_path, num_steps=30_000, start_step=19_990):
            assert tracemalloc.get_traced_memory()[1] < path.stat().st_size
    finally:
        tracemalloc.stop()
    assert sum(1 for _ in jsonl.each_line(path)) == 19_990


def test_steps_out_of_range_are_refused(tmp_path):
    with pytest.raises(ValueError, match="start_step=6 must lie between 0 and num_steps=5"):
        Metrics(tmp_path, num_steps=5, start_step=6)


def test_a_full_disk_names_the_file(tmp_path):
    with Metrics(tmp_path, num_steps=10) as out:
        out._metrics_file.close()
        out._metrics_file = open("/dev/full", "ab", buffering=0)
        with pytest.raises(OSError, match="cannot write: No space left on device: '/dev/full'"):
            out.write(1, {"loss": 1.0})

        out._metrics_file.close()

        class Short(io.FileIO):
            def write(self, data):
                return super().write(data[:-3])

        # beartype knows open()'s files only, so the writer itself is asked.
        with Short(tmp_path / "short.jsonl", "ab") as file:
            with pytest.raises(OSError, match=r"only 9 of 12 bytes .*short\.jsonl"):
                inspect.unwrap(jsonl.append_line)(file, {"step": 1})


def test_tensorboard_gets_finite_numbers_and_the_step_resumed_from(tmp_path):
    from tensorboardX import event_file_writer  # noqa: F401  (its package must be importable)
    from tensorboardX.proto import event_pb2

    _run(tmp_path, [1, 2])
    with Metrics(tmp_path, num_steps=10, start_step=1) as out:
        out.write(2, {"loss": 0.5, "grad_norm": math.nan, "mfu": None})
    resumed = sorted((tmp_path / "tensorboard").iterdir())[-1].read_bytes()
    events = []
    while resumed:  # TFRecord: length, its CRC, the data, its CRC
        (length,) = struct.unpack("<Q", resumed[:8])
        events.append(event_pb2.Event.FromString(resumed[12 : 12 + length]))
        resumed = resumed[16 + length :]
    started = [e.step for e in events if e.HasField("session_log")]
    points = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    assert started == [2]
    assert points == [(2, "training/loss", 0.5)]


def test_tensorboard_has_the_config_and_groups_of_curves(tmp_path, monkeypatch):
    opened = mock.Mock()
    monkeypatch.setattr(metrics, "Curves", opened)
    scalars = {"valid_loss/text": 2.0, "mfu": 0.5, "rows/text": 1.0}
    with Metrics(tmp_path, num_steps=10) as out:
        out.describe(0, "config", '{\n  "seed": 0\n}')
        out.write(1, scalars)
    writer = opened.return_value
    writer.text.assert_called_once_with(0, "config", '    {\n      "seed": 0\n    }')
    curves = {"validation/valid_loss/text": 2.0, "speed/mfu": 0.5, "rows/text": 1.0}
    writer.scalars.assert_called_once_with(1, curves)
    assert not (tmp_path / "samples.jsonl").exists()  # there is none


@pytest.mark.parametrize("start_step, purged_from", [(0, 0), (1, 2), (7, 8)])
def test_tensorboard_forgets_what_comes_after_the_step_resumed_from(
    tmp_path, monkeypatch, start_step, purged_from
):
    opened = mock.Mock()
    monkeypatch.setattr(metrics, "Curves", opened)
    with Metrics(tmp_path, num_steps=10, start_step=start_step):
        opened.assert_called_once_with(tmp_path / "tensorboard", purged_from)


def test_curves_that_cannot_be_written_raise_and_do_not_wait(tmp_path):
    """On a full disk tensorboardX's own writer waits for a thread that has died."""
    curves = tensorboard.Curves(tmp_path, 0)
    curves.scalars(1, {"loss": 1.0})

    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    curves.close()
    curves._file._py_recordio_writer._writer = Full()
    for step in range(2, 30):  # more than the ten that the other one keeps
        with pytest.raises(OSError, match=f"No space left on device.*{tmp_path.name}"):
            curves.scalars(step, {"loss": 1.0})


def test_torch_is_not_imported(tmp_path):
    """Where torch is installed, its import takes seconds; who wants it can still import it."""
    (tmp_path / "torch.py").write_text("print('imported torch')")
    program = "import fp8jax.lm.records.metrics; print('imported metrics'); import torch"
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines() == ["imported metrics", "imported torch"]


def test_events_are_logged(tmp_path):
    seen = []

    class Keep(python_logging.Handler):
        def emit(self, record):
            seen.append(record.getMessage())

    logger, handler, verbosity = python_logging.getLogger("absl"), Keep(), logging.get_verbosity()
    logger.addHandler(handler)
    logging.set_verbosity(logging.INFO)
    try:
        with Metrics(tmp_path, num_steps=10) as out:
            out.event(3, Event.SKIP, cause=Cause.SPIKE, loss=7.5, grad_norm=2e9, spent={})
    finally:
        logging.set_verbosity(verbosity)
        logger.removeHandler(handler)
    assert "step 3: loss 7.5, grad_norm 2e+09: a spike; the batch is skipped" in seen


def test_only_the_first_process_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with Metrics(tmp_path / "run", num_steps=10) as out:
        out.write(1, {"loss": 1.0})
        out.event(1, Event.START)
    assert not (tmp_path / "run").exists()
