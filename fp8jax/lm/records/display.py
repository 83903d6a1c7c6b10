"""Shows the progress of a run on stderr: a bar on a terminal, few lines elsewhere.

On a terminal the bar is the last line, and as wide as the terminal. Everything else that is written
to stderr, warnings of libraries among it, appears above it. `NO_COLOR` is honored.
"""

import datetime
import math
import sys
import time
from collections.abc import Callable, Mapping

from absl import logging
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_BARS = 0.1
_LEAST_BAR = 8  # columns; numbers give way before the bar gets shorter


def _thousands(value: float) -> str:
    """Formats 12345.6 as 12.3k."""
    for factor, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.1f}{suffix}"
    return f"{value:.0f}"


# The scalars that the display shows, in this order. Files and TensorBoard get all scalars.
_SHOWN: dict[str, Callable[[float], str]] = {
    "loss": lambda x: f"loss {x:.4f}",
    "valid_loss": lambda x: f"valid_loss {x:.4f}",
    "valid_bits_per_byte": lambda x: f"valid_bits_per_byte {x:.4f}",
    "grad_norm": lambda x: f"grad_norm {x:.2f}",
    "learning_rate": lambda x: f"lr {x:.1e}",
    "tokens_per_s": lambda x: f"{_thousands(x)} tok/s",
    "mfu": lambda x: f"mfu {100 * x:.1f}%",
    "step_s": lambda x: f"{x:.3f} s/step",
    "peak_memory_bytes": lambda x: f"mem {x / 2**30:.1f} GiB",
}
_BESIDE_THE_BAR = ("loss", "tokens_per_s", "mfu")
_OF_A_VALIDATION = ("loss", "valid_loss", "valid_bits_per_byte")


def _parts(names: tuple[str, ...], scalars: Mapping[str, float | int | None]) -> list[str]:
    """The named scalars as texts, without those that are missing or None."""
    found = {name: scalars[name] for name in names if name in scalars}
    return [_SHOWN[name](value) for name, value in found.items() if value is not None]


class Display:
    """Shows a progress bar if stderr is a terminal, else a plain line every 10 s.

    A step with validation and the last step always get a line. The bar begins with the first step.
    """

    def __init__(self, num_steps: int):
        self._num_steps = num_steps
        self._bar = _Bar(num_steps) if sys.stderr.isatty() else None
        # (step, time) of the first step shown. The time before it was spent on compilation.
        self._first: tuple[int, float] | None = None
        self._last_shown = -math.inf
        self._not_shown: str | None = None

    def show(self, step: int, scalars: Mapping[str, float | int | None]) -> None:
        """Shows the scalars of a finished step; those that are None are left out."""
        now = time.monotonic()
        validated = any(name.startswith("valid") for name in scalars)
        left = self._left(step, now)
        names = tuple(_SHOWN)
        if self._bar is not None:
            self._bar.show(step, [*_parts(_BESIDE_THE_BAR, scalars), *left], now)
            names = _OF_A_VALIDATION if validated else _BESIDE_THE_BAR
            left = []
        line = "  ".join([f"step {step}/{self._num_steps}", *_parts(names, scalars), *left])
        due = self._bar is None and now - self._last_shown >= _SECONDS_BETWEEN_LINES
        if due or validated or step >= self._num_steps:
            self._print(line, "bold" if validated else "")
            self._last_shown, self._not_shown = now, None
        else:
            self._not_shown = line

    def _left(self, step: int, now: float) -> list[str]:
        """The time that is left, if it can be known."""
        if self._first is None:
            self._first = (step, now)
        if step == self._first[0]:
            return []
        rate = (now - self._first[1]) / (step - self._first[0])
        return [f"left {datetime.timedelta(seconds=round(rate * (self._num_steps - step)))}"]

    def _print(self, line: str, style: str = "") -> None:
        if self._bar is not None:
            self._bar.print(line, style)
        else:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Removes the bar, and prints the last step's line if it has not been shown."""
        if self._bar is not None:
            self._bar.close()
        if self._not_shown is not None:
            self._print(self._not_shown)
            self._not_shown = None


class _Bar:
    """The last line of a terminal: `12/300 ━━━━  loss 2.3456  12.3k tok/s  left 0:03:09`."""

    def __init__(self, num_steps: int):
        self._num_steps, self._step = num_steps, 0
        self._numbers: list[str] = []
        self._drawn = -math.inf
        self._console = Console(stderr=True, highlight=False)
        self._live: Live | None = None
        self._log_stream = logging.get_absl_handler().python_handler.stream

    def show(self, step: int, numbers: list[str], now: float) -> None:
        """Draws a finished step, at most ten times a second."""
        self._step, self._numbers = step, numbers
        if self._live is None:
            self._live = Live(
                self,
                console=self._console,
                auto_refresh=False,  # without a thread
                transient=True,
                redirect_stdout=sys.stdout.isatty(),  # what a pipe reads stays in the pipe
            )
            self._live.start()
            # absl's handler keeps the stream that it began with.
            logging.get_absl_handler().python_handler.setStream(sys.stderr)
        if now - self._drawn >= _SECONDS_BETWEEN_BARS:
            self._live.refresh()
            self._drawn = now

    def print(self, line: str, style: str) -> None:
        """Prints a line above the bar."""
        self._console.print(Text(line, style=style))

    def close(self) -> None:
        """Removes the bar."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            logging.get_absl_handler().python_handler.setStream(self._log_stream)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        place = f"{self._step}/{self._num_steps} "
        numbers = [*self._numbers]
        width = options.max_width - len("^C")  # which a terminal writes behind it
        while numbers and len(place) + _LEAST_BAR + _width(numbers) > width:
            numbers.pop(-2 if len(numbers) > 2 else -1)  # the loss and the time left stay longest
        columns = max(width - len(place) - _width(numbers), 1)
        line = Table.grid()
        line.add_row(
            Text(place, no_wrap=True),
            ProgressBar(total=self._num_steps, completed=self._step, width=columns),
            Text("".join(f"  {number}" for number in numbers), no_wrap=True),
        )
        yield line


def _width(numbers: list[str]) -> int:
    return sum(len(number) + 2 for number in numbers)
