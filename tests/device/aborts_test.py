"""A thread that aborts does not end the process at once."""

import subprocess
import sys

from fp8jax.device import aborts

# Without fp8jax, whose import takes a second.
ABORT = """
import os, runpy, sys, threading, time
aborts = runpy.run_path(sys.argv[1])["Aborts"]()
aborts.open()
threading.Thread(target=os.abort, daemon=True).start()
while not aborts.seen:
    time.sleep(0.01)
print("said", flush=True)
aborts.close()
os._exit(3)
"""


def test_an_abort_waits_until_the_process_has_said_why():
    command = [sys.executable, "-c", ABORT, aborts.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("said\n", 3), done.stderr


def test_the_handler_before_comes_back():
    before = aborts._set_handler(None)  # the system's own
    try:
        held = aborts.Aborts()
        held.open()
        held.close()
        assert not aborts._set_handler(None) and not held.seen
    finally:
        aborts._set_handler(before)
