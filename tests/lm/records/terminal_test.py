"""What a person sees: a run in a pseudo-terminal of 80, 100 and 120 columns, replayed."""

import contextlib
import os
import pty
import re
import subprocess
import sys

import pyte
import pytest

from tests.support import ROOT

# A run for each width, the last one without color: steps, validations, warnings in between.
_RUN = """
import fcntl, os, struct, sys, termios, warnings
from absl import flags, logging
from fp8jax.lm.cli import command
from fp8jax.lm.records.events import Event
from fp8jax.lm.records.metrics import Metrics
flags.FLAGS(sys.argv[:1])
logging.use_absl_handler()  # as `command.run` does
logging.set_verbosity(logging.INFO)
logging.get_absl_handler().setFormatter(command._Plain())
warnings.simplefilter("always")
for columns in (80, 100, 120, 80):
    fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with Metrics(sys.argv[1], num_steps=400) as out:
        out.say("compiling the training step…")
        for step in range(1, 391):
            rates = {"tokens_per_s": 123456.7, "mfu": 0.412} if step > 1 else {"mfu": None}
            scalars = {"loss": 2.34561, "grad_norm": 0.5, "learning_rate": 1e-3, **rates}
            if step % 100 == 0:
                out.event(step, Event.CHECKPOINT, path=f"runs/a/checkpoints/{step}")
                scalars |= {"valid_loss": 2.5, "valid_bits_per_byte": 3.6067}
            out.write(step, scalars)
            out._display._bar._live.refresh()  # ten times a second would leave most steps out
            if step == 150:
                warnings.warn("a library says that something is deprecated", stacklevel=1)
            if step == 250:
                logging.warning("a message of a module of this library")
        out.say_last("SIGINT at step 390 after 0:01:00. All files are in runs/a")
    print(end=chr(0), file=sys.stderr, flush=True)
    if columns == 120:
        os.environ["NO_COLOR"] = "1"
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What the terminal got, by run: (bytes, lines, bars)."""
    parent, child = pty.openpty()
    command = [sys.executable, "-c", _RUN, str(tmp_path_factory.mktemp("run"))]
    environment = {**os.environ, "TERM": "xterm-256color", "JAX_PLATFORMS": "cpu"}
    for name in ("NO_COLOR", "COLUMNS", "LINES"):
        environment.pop(name, None)
    process = subprocess.Popen(command, cwd=ROOT, stdout=child, stderr=child, env=environment)
    os.close(child)
    written = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while data := os.read(parent, 65536):
            written += data
    os.close(parent)
    assert process.wait() == 0
    runs = zip((80, 100, 120, "NO_COLOR"), written.split(b"\0"), strict=False)
    return {
        name: (text, *_replayed(text, 80 if name == "NO_COLOR" else name)) for name, text in runs
    }


def _replayed(written, columns):
    """The lines that scrolled by and those on the screen; and every bar that was seen."""
    screen = pyte.HistoryScreen(columns, 24, history=1000, ratio=1)
    stream, bars = pyte.ByteStream(screen), set()
    for piece in re.split(rb"(?=\r)", written):
        stream.feed(piece)
        bars.update(line.rstrip() for line in screen.display if "━" in line)
    gone = ["".join(row[i].data for i in range(columns)) for row in screen.history.top]
    return [line.rstrip() for line in [*gone, *screen.display] if line.strip()], bars


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_every_validation_and_checkpoint_is_a_line_and_none_is_broken(written, columns):
    _, lines, _ = written[columns]
    expected = ["compiling the training step…"]
    for step in (100, 200, 300):
        expected += [
            f"step {step}: saving runs/a/checkpoints/{step}",
            f"step {step}/400  loss 2.3456  valid_loss 2.5000  valid_bits_per_byte 3.6067",
        ]
    expected.insert(5, "warning: a message of a module of this library")
    expected += [
        "step 390/400  loss 2.3456  123.5k tok/s  mfu 41.2%",
        "SIGINT at step 390 after 0:01:00. All files are in runs/a",
    ]
    warned = [i for i, line in enumerate(lines) if "deprecated" in line or "warn(" in line]
    rest = [line for i, line in enumerate(lines) if i not in warned]
    assert len(warned) >= 1 and rest == expected
    assert all(len(line) <= columns for line in lines)


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_the_bar_fits_and_shows_what_matters(written, columns):
    _, _, bars = written[columns]
    assert len(bars) > 100
    for bar in bars:
        assert re.match(r"\d+/400 ", bar) and len(bar) <= columns
    whole = [bar for bar in bars if "left" in bar]
    assert all(len(bar) == columns - 2 for bar in whole) and len(whole) > 100
    assert any(
        re.search(r"━{8,} *loss 2\.3456  123\.5k tok/s  mfu 41\.2%  left \d:\d\d:\d\d$", bar)
        for bar in whole
    )


def test_no_color_is_honored(written):
    color = re.compile(rb"\x1b\[(3[0-7]|38;)")
    (colored, lines, _), (plain, same, _) = written[80], written["NO_COLOR"]
    assert color.search(colored) and not color.search(plain) and lines == same
