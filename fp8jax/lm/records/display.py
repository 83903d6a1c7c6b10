"""Shows the progress of a run on stderr."""

import datetime
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import tqdm

_SECONDS_BETWEEN_LINES = 10.0


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


class Display:
    """Shows a progress bar if stderr is a terminal, else a plain line every 10 s.

    A step with validation and the last step always get a line.
    """

    def __init__(self, num_steps: int, start_step: int):
        self._num_steps = num_steps
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm.tqdm(
                total=num_steps, initial=start_step, unit="step", dynamic_ncols=True
            )
        # (step, time) of the first step shown. The time before it was spent on compilation.
        self._first: tuple[int, float] | None = None
        self._last_shown = -math.inf
        self._not_shown: str | None = None

    def show(self, step: int, scalars: Mapping[str, float | int | None]) -> None:
        """Shows the scalars of a finished step; those that are None are left out."""
        values = {name: scalars[name] for name in _SHOWN if name in scalars}
        parts = [_SHOWN[name](value) for name, value in values.items() if value is not None]
        if self._bar is not None:
            self._bar.set_postfix_str("  ".join(parts), refresh=False)
            self._bar.update(step - self._bar.n)
            return
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
        elif step > self._first[0]:
            rate = (now - self._first[1]) / (step - self._first[0])
            left = datetime.timedelta(seconds=round(rate * (self._num_steps - step)))
            parts.append(f"left {left}")
        line = "  ".join([f"step {step}/{self._num_steps}", *parts])
        validated = any(name.startswith("valid") for name in scalars)
        due = now - self._last_shown >= _SECONDS_BETWEEN_LINES
        if due or validated or step >= self._num_steps:
            print(line, file=sys.stderr, flush=True)
            self._last_shown, self._not_shown = now, None
        else:
            self._not_shown = line

    def aside(self) -> Any:
        """Returns a context in which other lines may be written to stderr."""
        # external_write_mode removes the bar and draws it again. It works without a bar too.
        return tqdm.tqdm.external_write_mode(file=sys.stderr)

    def close(self) -> None:
        """Closes the bar, or prints the last line if it has not been shown."""
        if self._bar is not None:
            self._bar.close()
        if self._not_shown is not None:
            print(self._not_shown, file=sys.stderr, flush=True)
            self._not_shown = None
