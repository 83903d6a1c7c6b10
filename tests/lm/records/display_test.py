"""The display away from a terminal (terminal_test.py has that): few and complete lines."""

import math

from fp8jax.lm.records import display
from fp8jax.lm.records.metrics import Metrics


def _run(workdir, steps, *, start_step=0):
    with Metrics(workdir, num_steps=10, start_step=start_step) as out:
        for step in steps:
            out.write(step, {"loss": 1 / (3 + step)})


class _Clock:
    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


def test_plain_lines_are_rare_and_complete(tmp_path, capsys, monkeypatch):
    clock = _Clock()
    monkeypatch.setattr(display, "time", clock)
    scalars = {"loss": 2.34561, "grad_norm": 0.512, "learning_rate": 1e-3, "tokens_per_s": 12345.0}
    scalars |= {"mfu": 0.412, "step_s": 0.1234, "unknown_to_the_display": 1.0}
    with Metrics(tmp_path, num_steps=300, start_step=100) as out:
        for step in range(101, 120):
            out.write(step, scalars)
            clock.now += 1
        out.write(120, {**scalars, "valid_loss": 2.5})
        out.write(121, {"loss": math.nan, "mfu": None})
    lines = capsys.readouterr().err.splitlines()
    rest = "grad_norm 0.51  lr 1.0e-03  12.3k tok/s  mfu 41.2%  0.123 s/step"
    assert lines == [
        f"step 101/300  loss 2.3456  {rest}",
        f"step 111/300  loss 2.3456  {rest}  left 0:03:09",
        f"step 120/300  loss 2.3456  valid_loss 2.5000  {rest}  left 0:03:00",
        "step 121/300  loss nan  left 0:02:50",  # the last one of a stopped run, shown at its end
    ]


def test_the_last_step_is_shown_once(tmp_path, capsys):
    _run(tmp_path, range(1, 11))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["1/10", "10/10"]
