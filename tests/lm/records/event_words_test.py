"""What a person reads of each event."""

import math

import pytest

from fp8jax.lm.records.event_words import in_words
from fp8jax.lm.records.events import Cause, Event
from tests.support.runs import ROUTINE

_REJECTED = {"loss": 7.5, "grad_norm": math.inf, "cause": Cause.NON_FINITE, "spent": {"skip": 1}}
_FIELDS = {
    Event.CHECKPOINT: ({"path": "a/4"}, "saving a/4"),
    Event.RESUME: (
        {"seeding": True, "changes": ["steps: 2 -> 4", "b"]},
        "the run goes on from here; the next step seeds its amax histories; changed: steps: 2 -> 4;"
        " changed: b",
    ),
    Event.ALREADY_FINISHED: ({"num_steps": 7}, "num_steps=7 leaves nothing to train"),
    Event.STOPPED: ({"signal": "SIGTERM"}, "stopped by SIGTERM, with its state saved"),
    Event.DATA_FAILED: ({"reason": "a.txt is gone"}, "no batch came: a.txt is gone"),
    Event.FAILED: (
        {"reason": "process 1 of 2 on n1 failed"},
        "all processes leave: process 1 of 2 on n1 failed",
    ),
    Event.DAMAGED_LINES: (
        {"file": "metrics.jsonl", "lines": ["line 2: not JSON", "…"]},
        "metrics.jsonl had damaged lines, which are left out: line 2: not JSON, …",
    ),
    Event.MISSING_STEPS: (
        {"steps": [(3, 7), (9, 9)]},
        "metrics.jsonl has no lines of steps 3 to 7, 9; the checkpoint is sound",
    ),
    Event.DAMAGED_CHECKPOINT: (
        {"reason": "x"},
        "this checkpoint is damaged, an older one is read instead: x",
    ),
    Event.BEST_CHECKPOINT: ({"valid_loss": 2}, "the best checkpoint on disk, valid_loss 2.0000"),
    Event.PRECISION_SWITCH: (
        {"from": "nvfp4", "to": "bf16", "seeding": False},
        "the next step trains in bf16 instead of nvfp4",
    ),
    Event.TELEMETRY: ({"compile_s": 3.21}, "compiled what samples casts in 3.2 s"),
    Event.PROFILED: ({"directory": "a/profile"}, "the trace is in a/profile"),
    Event.PROMOTION: ({"layers": []}, "layers in high precision from here on: none"),
    Event.SWIGLU_GROWS: (
        {"amaxes": {3: [1.0], 5: [2.0]}},
        "SwiGLU outputs keep growing in layers 3, 5",
    ),
    Event.OVERFLOW: (
        {"loss_scale": 65536.0},
        "gradients overflowed under loss_scale=65536, which is halved; the batch is left out",
    ),
    Event.REPEAT: (_REJECTED, "loss 7.5, grad_norm inf: not finite; the step is repeated"),
    Event.SKIP: (_REJECTED, "loss 7.5, grad_norm inf: not finite; the batch is skipped"),
    Event.ROLLBACK: (
        _REJECTED,
        "loss 7.5, grad_norm inf: not finite; back to the newest checkpoint",
    ),
    Event.STOP: (
        {**_REJECTED, "cause": Cause.SPIKE, "first": ""},
        "loss 7.5, grad_norm inf: a spike; the run ends",
    ),
}


@pytest.mark.parametrize("kind", Event)
def test_every_event_is_said_in_words_or_said_elsewhere(kind):
    if kind in _FIELDS:
        fields, words = _FIELDS[kind]
        assert in_words(kind, fields) == words
    else:
        assert kind in ROUTINE and in_words(kind, {}) == ""
