"""The training loop, from a config to a directory.

`train_and_evaluate` reads top to bottom: resolve the config, data, model and shardings, state,
resume, loop. A step is one compiled program (step.py).

The loop dispatches step n and then reads the metrics of step n - 1, so that the device never
waits for the host. A rejected step is therefore noticed one step late; by then the gate has already
kept it out of the state, and nothing is saved before its metrics were read. Only a ladder that may
repeat a step or roll back (stability/bad_steps.py) makes the loop wait for every step.

The loop counts batches; the state counts the steps that were not rejected, and the learning rate
follows the state.
"""

import contextlib
import dataclasses
import json
import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from jaxtyping import Array
from ml_collections import ConfigDict

from fp8jax.analysis.gemms import log_gemms
from fp8jax.analysis.size_gate import is_measured_here
from fp8jax.data.loader import Corpus, Impatient, build_corpus, train_batches
from fp8jax.device import hardware
from fp8jax.model.config import flops_per_token
from fp8jax.model.transformer import count_params
from fp8jax.numerics.policy import Policy, as_schedule
from fp8jax.records.checkpoint import Checkpointer, Restored, config_difference
from fp8jax.records.metrics import Metrics
from fp8jax.stability.bad_steps import CAUSES, GROWTHS, NON_FINITE, SPIKE, STOP, growing
from fp8jax.training.faults import Faults
from fp8jax.training.first_bad import find_bad, first_bad
from fp8jax.training.run import Run, build, sample_text, to_devices, validate
from fp8jax.training.step import Batch, TrainState, by_name, enter

NO_FAULTS = Faults()


class StoppedError(RuntimeError):
    """A step was rejected, and the ladder had nothing left; nothing of it was kept or saved."""


class NonFiniteError(StoppedError):
    """The same, for a loss or gradient that is not finite."""


class _StopRequest(contextlib.AbstractContextManager):
    """SIGTERM and the first Ctrl-C ask the loop to save and end; the second Ctrl-C ends at once."""

    def __init__(self):
        self.signal: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number, frame):
        self.signal = signal.Signals(number).name
        signal.signal(number, self._previous[number])


def _resume(
    checkpointer: Checkpointer, run: Run, config: dict[str, Any], corpus: Corpus
) -> tuple[Restored | None, list[str]]:
    """The newest sound checkpoint, if it belongs to this config, or if a change was asked for;
    and what has changed.

    Under another policy than trained its last step, the amax histories are left out: they start
    anew.

    Raises:
      ValueError: it comes from another config or other data; the message shows the difference.
    """
    found = checkpointer.read_meta()
    if found is None:
        return None, []
    step, meta = found
    # Keys that old checkpoints lack, as they then were.
    new: dict[str, Any] = {"attention_beta": None, "attention_tie_tolerance": None}
    new |= {"precision_schedule": [], "require_fp8_gemms": False, "size_gate": False}
    new |= {"moments": "float32", "recovery": "", "recovery_precision": "bf16"}
    new |= {"gnmr_alpha": [], "gnmr_beta": 1.3, "gnmr_first": 0.025, "gnmr_most": 1}
    new |= {"gnmr_lock": 1, "gnmr_window": 5, "gnmr_precision": "fp8_current"}
    new |= {"gnmr_random": None}
    new |= {"spike_window": None, "spike_deviations": 6.0, "data_timeout": 600.0}
    before = new | meta["config"]
    differences = config_difference(before, config)
    differences = [line for line in differences if not line.startswith("resume_with_changes:")]
    if meta["data"] != corpus.fingerprint:
        differences.append(
            f"(contents of the data): {meta['data'][:16]} -> {corpus.fingerprint[:16]}"
        )
    if differences and not config["resume_with_changes"]:
        raise ValueError(
            f"the checkpoint of step {step} in this workdir comes from another config:\n  "
            + "\n  ".join(differences)
            + "\nTake another --workdir, or ask for it with --config.resume_with_changes=True"
        )
    for line in differences:
        logging.warning("resuming with a change: %s", line)
    abstract = _as_items(run.at(step).state)
    gated = before["size_gate"] or config["size_gate"]  # whose policy hangs on other keys, too
    if _policy_of(before, step) != _policy_of(config, step) or (gated and differences):
        abstract.pop("fp8")
    if before["spike_window"] != config["spike_window"] or config["spike_window"] is None:
        abstract.pop("seen")
    keys = [name for name in config if name.startswith("gnmr_")]
    if any(before[name] != config[name] for name in keys) or not config["gnmr_alpha"]:
        abstract.pop("gnmr")
    return checkpointer.restore(abstract), differences


def _policy_of(config: dict[str, Any], step: int) -> Policy | None:
    """The policy that trains step `step` of a config, which may be an old one: None where its
    names mean nothing any more."""
    try:
        schedule = as_schedule(config["precision"], config["precision_schedule"])
        return schedule.policy_of(step, config["num_steps"])
    except ValueError:
        return None


def _begin(run: Run, restored: Restored | None) -> tuple[Run, TrainState, bool]:
    """The stage to begin in, its state, and whether its first step seeds histories."""
    if restored is None:
        return run, run.initialise(), run.seeds
    arrays = restored.arrays
    # With histories, still in the stage of the last step, though the next may begin another.
    stage = run.at(restored.step if "fp8" in arrays else restored.step + 1)
    state = dataclasses.replace(stage.state, **arrays["state"])
    for name, fresh in run.remembered().items():
        shardings = jax.tree.map(lambda leaf: leaf.sharding, getattr(stage.state, name))
        known = arrays[name] if name in arrays else jax.device_put(fresh, shardings)
        state = dataclasses.replace(state, **{name: known})
    if "fp8" in arrays:
        return stage, dataclasses.replace(state, histories=arrays["fp8"]), False
    state = enter(state, stage.state, frozenset())
    return stage, state, bool(by_name(state.histories))


def _as_items(state: TrainState) -> dict[str, Any]:
    """The state as checkpoint items: histories apart, since a change of precision drops them."""
    return {
        "state": {
            "step": state.step, "params": state.params, "opt_state": state.opt_state,
            "key": state.key,
        },
        "fp8": state.histories,
        "seen": state.seen,
        "gnmr": state.gnmr,
    }  # fmt: skip


def _startup_report(run: Run, corpus: Corpus, config: ConfigDict) -> None:
    devices = run.mesh.devices
    logging.info("data:\n%s", corpus.summary())
    logging.info(
        "model %s: %s parameters, policy %s; %d x %s as %s; %s tokens a step, %d rows of %d",
        config.model, f"{count_params(run.model.config):,}", run.policies, devices.size,
        hardware.device_kind(), dict(run.mesh.shape),
        f"{config.batch_size * config.seq_len:,}", len(corpus.train), config.seq_len,
    )  # fmt: skip
    for gains in [run.gains, *(stage.gains for _, stage in run.later)]:
        if gains and is_measured_here():
            logging.info("%s", gains)


class _Recovery:
    """What is done about rejected steps: the ladder's rungs, each within its budget."""

    def __init__(
        self, run: Run, config: ConfigDict, checkpointer: Checkpointer, metrics: Metrics,
        spent: dict[str, int],
    ):  # fmt: skip
        self._run, self._config = run, config
        self._checkpointer, self._metrics = checkpointer, metrics
        self.spent = {name: 0 for name, _ in run.ladder.rungs} | spent

    def settle(
        self, step: int, scalars: dict[str, Any], stage: Run, state: TrainState, batch: Batch,
        seeding: bool,
    ) -> tuple[dict[str, Any], Run, TrainState, bool]:  # fmt: skip
        """The step's scalars, and stage, state and seeding to go on with: a seeding step that was
        rejected, or repeated without histories, is still to come.

        Raises StoppedError where nothing is left to try.
        """
        tried: set[str] = set()
        while cause := _cause(scalars):
            rung = self._run.ladder.next(self.spent, tried)
            if rung == STOP:
                self._stop(step, cause, scalars, stage, state, batch)
            tried.add(rung)
            if rung == "rollback" and self._checkpointer.read_meta() is None:
                continue  # nothing was saved yet
            self.spent[rung] += 1
            values = {name: scalars[name] for name in ("loss", "grad_norm")}
            self._metrics.event(step, rung, cause=cause, **values, spent=dict(self.spent))
            if rung == "repeat":
                state, out = stage.repeat_step(state, batch)
                again = {name: float(value) for name, value in jax.device_get(out).items()}
                scalars = scalars if _cause(again) else again
                continue
            if rung == "rollback":
                stage, state, seeding = self._roll_back()
            break
        return scalars, stage, state, seeding

    def _roll_back(self) -> tuple[Run, TrainState, bool]:
        found = self._checkpointer.read_meta()
        assert found is not None  # it was looked at
        abstract = _as_items(self._run.at(found[0]).state)
        return _begin(self._run, self._checkpointer.restore(abstract))

    def _stop(
        self, step: int, cause: str, scalars: dict[str, Any], stage: Run, state: TrainState,
        batch: Batch,
    ) -> None:  # fmt: skip
        values = {name: scalars[name] for name in ("loss", "grad_norm")}
        said = ", ".join(f"{name}={value:g}" for name, value in values.items())
        first = ""
        if cause == CAUSES[NON_FINITE]:
            model = (
                stage.model if int(state.step) else stage.model.clone(policy=stage.policy.seeding())
            )
            find = jax.jit(lambda s, b: find_bad(model, s, b, self._config.grad_accum))
            first = first_bad(jax.device_get(find(state, batch))) or "nothing, when computed again"
        self._metrics.event(step, STOP, cause=cause, **values, first=first, spent=self.spent)
        spike = cause == CAUSES[SPIKE]
        kind = StoppedError if spike else NonFiniteError
        what = "a spike" if spike else f"not finite; first: {first}"
        raise kind(
            f"step {step}: {said} is {what}. The update was not applied and nothing of it was"
            " saved: what checkpoints there are hold finite steps. Of recovery="
            f"{self._config.recovery!r} nothing is left to try. A lower learning rate or"
            " precision=bf16 may help."
        )


def _cause(scalars: dict[str, Any]) -> str:
    """Why the step was rejected, "" if it was not."""
    if not (math.isfinite(scalars["loss"]) and math.isfinite(scalars["grad_norm"])):
        return CAUSES[NON_FINITE]
    return CAUSES[SPIKE] if "verdict" in scalars and scalars["verdict"] == SPIKE else ""


class _Watch:
    """Writes events about layers: which are promoted (GNMR), and whose SwiGLU outputs grow."""

    def __init__(self, metrics: Metrics, amaxes: list[list[float]]):
        self._metrics = metrics
        self._promoted: list[int] = []
        self.amaxes = amaxes  # of the last validations, [validations, layers]

    def promoted(self, step: int, flags: np.ndarray) -> int:
        """How many layers ran in the high precision; an event where others did than before."""
        layers = [int(layer) for layer in flags.nonzero()[0]]
        if layers != self._promoted:
            self._metrics.event(step, "promotion", layers=layers)
        self._promoted = layers
        return len(layers)

    def validated(self, step: int, amaxes: list[float]) -> None:
        """Warns of layers that grow; and again when they have grown as much once more."""
        self.amaxes = [*self.amaxes[-GROWTHS:], amaxes]
        if layers := growing(self.amaxes):
            seen = {layer: [round(each[layer], 3) for each in self.amaxes] for layer in layers}
            self._metrics.event(step, "swiglu_grows", amaxes=seen)
            logging.warning(
                "the SwiGLU outputs of layers %s have grown at each of %d validations; scales of"
                " whole tensors lose the small ones then: model_overrides.mlp=smooth_swiglu, finer"
                " scales or more weight decay help (arXiv 2409.12517)", layers, GROWTHS,
            )  # fmt: skip
            self.amaxes = []


class _Trace:
    """A profile of steps `first` to `last`, written for xprof; nothing if `steps` is None."""

    def __init__(self, steps: tuple[int, int] | None, workdir: str):
        self.directory = os.path.join(workdir, "profile")
        self._steps = steps
        self._running = False

    def require_within(self, start: int, num_steps: int) -> None:
        """Raises ValueError where the steps to profile are not among those to come."""
        if self._steps and not start < self._steps[0] <= self._steps[1] <= num_steps:
            first, last = self._steps
            raise ValueError(
                f"profile={first}:{last} does not lie within the steps {start + 1} to {num_steps} "
                "of this run"
            )

    def start_if_due(self, step: int, state: TrainState) -> None:
        if self._steps and step == self._steps[0]:
            jax.block_until_ready(state)  # so that the step before is not in it
            jax.profiler.start_trace(self.directory)
            self._running = True

    def ends_with(self, step: int) -> bool:
        return self._running and self._steps is not None and step == self._steps[1]

    def stop(self, state: TrainState | None = None) -> None:
        """Ends a running profile, once `state` is there."""
        if self._running:
            jax.block_until_ready(state)
            jax.profiler.stop_trace()
            self._running = False


def train_and_evaluate(
    config: ConfigDict,
    workdir: str,
    *,
    profile: tuple[int, int] | None = None,
    faults: Faults = NO_FAULTS,
) -> dict[str, float | None]:
    """Trains as `config` (configs/base.py) says; resumes by itself from what `workdir` holds.

    Args:
      config: all keys of configs/base.py.
      workdir: the run's directory: config.json, metrics.jsonl, samples.jsonl, events.jsonl,
        checkpoints/, tensorboard/, profile/.
      profile: first and last step of a trace for xprof, None for none.
      faults: to try out what happens (faults.py).

    Returns:
      The scalars of the last step written, validation included.

    Raises:
      ValueError, NotImplementedError: a config that cannot be honoured; before anything is trained.
      StoppedError: a loss or gradient norm was not finite (NonFiniteError), or the loss a spike,
        and the ladder had nothing left to try.
    """
    # The config, resolved ----------------------------------------------------------------------
    if not workdir:
        raise ValueError("workdir is empty: name the run's directory")
    hardware.set_compilation_cache()
    run = build(config)
    checkpoints = Path(workdir, "checkpoints")
    settings = json.loads(config.to_json())

    # Data --------------------------------------------------------------------------------------
    corpus = build_corpus(
        config.data, run.tokenizer, seq_len=config.seq_len, valid_fraction=config.valid_fraction,
        cache_dir=config.cache_dir,
    )  # fmt: skip
    _startup_report(run, corpus, config)

    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(run.mesh))
        stop = stack.enter_context(_StopRequest())
        checkpointer = stack.enter_context(
            Checkpointer(
                checkpoints, every=config.checkpoint_every,
                keep=config.checkpoint_keep, keep_best=config.checkpoint_keep_best,
            )
        )  # fmt: skip

        # Resume or begin -----------------------------------------------------------------------
        restored, changes = _resume(checkpointer, run, settings, corpus)
        # Rows read so far say where the data goes on, also if batch size or mixture have changed.
        start = 0 if restored is None else restored.step
        position = corpus.train.start(None if restored is None else restored.meta["position"])
        trace = _Trace(profile, workdir)
        trace.require_within(start, config.num_steps)
        stack.callback(trace.stop)
        metrics = stack.enter_context(
            Metrics(workdir, num_steps=max(config.num_steps, start), start_step=start)
        )
        with open(os.path.join(workdir, "config.json"), "w") as file:
            json.dump(settings, file, indent=2, sort_keys=True)
        for step, reason in checkpointer.rejected:
            metrics.event(step, "damaged_checkpoint", reason=reason)
        stage, state, seeding = _begin(run, restored)
        # Old checkpoints lack the two.
        known = {"recovery": {}, "amaxes": []} | ({} if restored is None else restored.meta)
        recovery = _Recovery(run, config, checkpointer, metrics, known["recovery"])
        watch = _Watch(metrics, known["amaxes"])
        if restored is not None:
            metrics.event(start, "resume", seeding=seeding, changes=changes)
        if start >= config.num_steps:
            metrics.event(start, "already_finished", num_steps=config.num_steps)
        batches = train_batches(
            corpus.train, seed=config.seed, batch_size=config.batch_size, position=position,
            process_index=jax.process_index(), process_count=jax.process_count(),
        )  # fmt: skip
        stack.callback(batches.close)
        # Not a step may wait for ever; of what is read ahead nothing is lost, `position` counts.
        rows = Impatient(faults.batches(batches, start + 1), config.data_timeout)

        # The loop ------------------------------------------------------------------------------
        tokens = config.batch_size * config.seq_len
        peak = hardware.peak_flops(hardware.device_kind())
        flops = tokens * flops_per_token(run.model.config, config.seq_len) / run.mesh.devices.size
        clock = time.perf_counter()

        def read(
            step: int, out: dict[str, Array], batch: Batch, seeded: bool
        ) -> dict[str, float | None]:
            """Waits for a step and returns its scalars; a rejected one climbs the ladder."""
            nonlocal clock, stage, state, seeding
            host = jax.device_get(out)
            if "promoted" in host:
                host["promoted"] = watch.promoted(step, host["promoted"])
            scalars = {name: float(value) for name, value in host.items()}
            now = time.perf_counter()
            step_s, clock = now - clock, now
            if _cause(scalars):
                scalars, stage, state, seeding = recovery.settle(
                    step, scalars, stage, state, batch, seeded
                )
            mfu = None if peak is None else flops / step_s / peak
            speed = {"step_s": step_s, "tokens_per_s": tokens / step_s, "mfu": mfu}
            return {**scalars, **speed, "peak_memory_bytes": hardware.peak_memory()}

        def save(step: int, metric: float | None) -> None:
            meta = {
                "config": settings, "data": corpus.fingerprint, "recovery": recovery.spent,
                "amaxes": watch.amaxes,
                "position": position.advanced((step - start) * config.batch_size).to_json(),
            }  # fmt: skip
            checkpointer.save(step, _as_items(state), meta, metric)

        # Stages whose training program is still to be looked at, all of them if FP8 is required.
        later = [each for begin, each in run.later if config.require_fp8_gemms and begin > start]
        unseen = [run.at(start + 1), *later]
        pending: tuple[int, dict[str, Array], Batch, bool] | None = None
        written: dict[str, float | None] = {}
        for step in range(start + 1, config.num_steps + 1):
            try:
                batch = to_devices(next(rows), run.batch_sharding)
            except Exception as error:
                if pending is not None:
                    metrics.write(pending[0], read(*pending))
                metrics.event(step - 1, "data_failed", reason=str(error))
                if step - 1 > start:
                    save(step - 1, None)
                raise
            trace.start_if_due(step, state)
            if (following := run.at(step)) is not stage:
                names = {"from": stage.policy.name, "to": following.policy.name}
                stage, seeding = following, following.seeds
                state = enter(state, stage.state, stage.kept)
                metrics.event(step - 1, "precision_switch", **names, seeding=seeding)
                unseen = unseen if config.require_fp8_gemms else [stage]
            while unseen and (step == start + 1 or not seeding):
                each = unseen.pop(0)  # jit keeps the program: its first call compiles no more
                program = each.step.lower(each.state, batch).compile()  # type: ignore[attr-defined]
                log_gemms(
                    program.as_text(), each.policy, each.model.config.linears, config.backend,
                    high=each.high, require=config.require_fp8_gemms,
                )  # fmt: skip
            state, out = (stage.seed_step if seeding else stage.step)(state, batch)
            seeded, seeding = seeding, False
            if pending is not None:
                metrics.write(pending[0], read(*pending))
            pending = (step, out, batch, seeded)
            stopping = stop.signal is not None
            ending = stopping or step == config.num_steps
            valid_due = step % config.valid_every == 0 or step == config.num_steps
            save_due = checkpointer.should_save(step) or ending
            sample_due = run.sample is not None and step % config.sample_every == 0
            if trace.ends_with(step):
                trace.stop(state)
                metrics.event(step, "profiled", directory=trace.directory)
            if not (valid_due or save_due or sample_due or run.ladder.waits or seeded):
                faults.after(step, checkpoints, checkpointer.wait)
                continue
            written, pending = read(step, out, batch, seeded), None
            if valid_due:
                scalars, amaxes = validate(stage, state, corpus, config)
                written |= scalars
                if step > config.warmup_steps:
                    watch.validated(step, amaxes)
                counts = corpus.train.counts(position, (step - start) * config.batch_size)
                written |= {f"rows/{name}": count for name, count in counts.items()}
            metrics.write(step, written)
            if sample_due:
                metrics.sample(step, sample_text(stage, state))
            if save_due:
                save(step, written["valid_loss"] if valid_due else None)
            faults.after(step, checkpoints, checkpointer.wait)
            clock = time.perf_counter()  # neither of these is part of a step
            if stopping:
                metrics.event(step, "stopped", signal=stop.signal)
                break
        if config.checkpoint_keep_best and (best := checkpointer.best()) is not None:
            metrics.event(best[0], "best_checkpoint", valid_loss=best[1])
    return written
