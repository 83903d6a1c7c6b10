"""The lock of a workdir: one holder at a time, in one process or two, and released by a kill."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import jax
import pytest

from fp8jax.lm.records import workdir_lock
from fp8jax.lm.records.workdir_lock import LOCK, lock_workdir

# Holds the lock as `lock_workdir` does, without loading JAX.
HOLD = """
import fcntl, os, sys, time
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(descriptor, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def test_the_second_is_refused_in_one_line_that_names_the_first(tmp_path):
    workdir = tmp_path / "new" / "run"
    with lock_workdir(workdir):
        with pytest.raises(BlockingIOError) as error, lock_workdir(workdir):
            pass
        # A refusal leaves what the holder wrote.
        assert f"process {os.getpid()} on " in (workdir / LOCK).read_text()
        message = str(error.value)
        assert str(workdir) in message and f"(process {os.getpid()} on " in message
        assert "\n" not in message
    assert (workdir / LOCK).read_text() == ""
    with lock_workdir(workdir):  # released
        pass


def test_an_error_releases_it(tmp_path):
    with pytest.raises(KeyError), lock_workdir(tmp_path):
        raise KeyError
    with lock_workdir(tmp_path):
        pass


def test_a_killed_process_leaves_no_lock(tmp_path):
    """But its file, of which only the system knows whether it is locked."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / LOCK)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BlockingIOError, match="another program trains"):
            lock_workdir(tmp_path).__enter__()
        holder.send_signal(signal.SIGKILL)
        assert holder.wait(10) == -signal.SIGKILL
    assert (tmp_path / LOCK).exists()
    with lock_workdir(tmp_path):
        pass


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock_workdir(tmp_path), lock_workdir(tmp_path):
        pass
    assert caplog.text.count("has no locks (No locks available)") == 2


def test_another_error_of_the_lock_is_one(tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="Input/output error"), lock_workdir(tmp_path):
        pass


def test_only_the_first_process_of_a_run_takes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(workdir_lock.jax, "process_index", lambda: 1)
    with lock_workdir(tmp_path / "run"):
        assert not (tmp_path / "run").exists()
    assert jax.process_index() == 1  # patched


def test_a_workdir_that_cannot_be_one(tmp_path):
    file = tmp_path / "file"
    file.write_text("text")
    for workdir in (file, file / "run"):
        with pytest.raises(NotADirectoryError, match=f"workdir {workdir} .* is a file"):
            lock_workdir(workdir).__enter__()
    with pytest.raises(ValueError, match="gs://bucket/run is a URL"):
        lock_workdir("gs://bucket/run").__enter__()
    with pytest.raises(OSError, match="the workdir /proc/run cannot be made"):
        lock_workdir("/proc/run").__enter__()
    with pytest.raises(OSError, match="the workdir /proc cannot be written"):
        lock_workdir("/proc").__enter__()
    assert file.read_text() == "text" and list(tmp_path.iterdir()) == [file]
