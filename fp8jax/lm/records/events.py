"""The kinds of events in events.jsonl, defined once for those who write and those who read them.

Each line of events.jsonl has `time`, `step` (finished steps), `kind` (a value of `Event`) and its
own fields. All members are strings: `json` writes their values, and a line that was read back
compares equal to them.
"""

import enum


class Event(enum.StrEnum):
    """What happened to a run, with the fields that the event carries."""

    START = "start"  # jax, python, devices, mesh, processes, parameters, policies
    STAGE = "stage"  # policy, compile_s, memory: its step was compiled
    PRECISION = "precision"  # policy, fp8_gemms, cast_gemms: GEMMs of its step were found
    CHECKPOINT = "checkpoint"  # path: the state is being written there, in the background
    END = "end"  # reason, seconds, loss, best_valid_loss, best_step; reason may name an error
    RESUME = "resume"  # seeding, changes: the run goes on from a checkpoint
    ALREADY_FINISHED = "already_finished"  # num_steps: nothing was left to train
    STOPPED = "stopped"  # signal: SIGTERM or Ctrl-C; the state was saved
    FAILED = "failed"  # reason: another process of the run has failed, and all have left
    DATA_FAILED = "data_failed"  # reason: no batch came, or the source raised
    DAMAGED_LINES = "damaged_lines"  # file, lines: left out of the file; a few of them as text
    MISSING_STEPS = "missing_steps"  # steps: [first, last] of each gap in metrics.jsonl
    DAMAGED_CHECKPOINT = "damaged_checkpoint"  # reason: an older checkpoint was read instead
    BEST_CHECKPOINT = "best_checkpoint"  # valid_loss: the best checkpoint among those on disk
    PRECISION_SWITCH = "precision_switch"  # from, to, seeding: the next policy of the schedule
    TELEMETRY = "telemetry"  # compile_s: the program that samples casts was compiled
    PROFILED = "profiled"  # directory: where the trace lies
    PROMOTION = "promotion"  # layers or linears: that run in another policy from now on
    SWIGLU_GROWS = "swiglu_grows"  # amaxes: of layers whose SwiGLU output keeps growing
    OVERFLOW = "overflow"  # loss_scale: under which gradients overflowed; it is halved
    # A rejected step, and what was done about it: cause, loss, grad_norm, spent.
    REPEAT = "repeat"
    SKIP = "skip"
    ROLLBACK = "rollback"
    STOP = "stop"  # also first: the first tensor that was not finite


class Cause(enum.StrEnum):
    """Why a step was rejected: field `cause` of REPEAT, SKIP, ROLLBACK and STOP."""

    SPIKE = "spike"
    NON_FINITE = "non_finite"
