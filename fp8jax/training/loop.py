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
import json
import os
import time
from pathlib import Path

import jax
from absl import logging
from jaxtyping import Array
from ml_collections import ConfigDict

from fp8jax.analysis.gemms import log_gemms
from fp8jax.analysis.size_gate import is_measured_here
from fp8jax.data.corpus import Corpus, build_corpus
from fp8jax.data.loader import Batch, TimedIterator, to_devices, train_batches
from fp8jax.device import hardware, xla
from fp8jax.model.config import flops_per_token
from fp8jax.model.transformer import count_params
from fp8jax.records.checkpoint import Checkpointer
from fp8jax.records.metrics import Metrics
from fp8jax.stability.faults import Faults
from fp8jax.training.build import build
from fp8jax.training.policy_switch import enter_policy
from fp8jax.training.profile import Profile
from fp8jax.training.recovery import Recovery, rejection_cause
from fp8jax.training.resume import checkpoint_items, initial_stage, read_checkpoint
from fp8jax.training.run import Run
from fp8jax.training.stop_request import StopRequest
from fp8jax.training.validate import sample_text, validate
from fp8jax.training.watch import LayerWatch

NO_FAULTS = Faults()


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
    xla.set_compilation_cache()
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
        stop = stack.enter_context(StopRequest())
        checkpointer = stack.enter_context(
            Checkpointer(
                checkpoints, every=config.checkpoint_every,
                keep=config.checkpoint_keep, keep_best=config.checkpoint_keep_best,
            )
        )  # fmt: skip

        # Resume or begin -----------------------------------------------------------------------
        restored, changes = read_checkpoint(checkpointer, run, settings, corpus)
        # Rows read so far say where the data goes on, also if batch size or mixture have changed.
        start = 0 if restored is None else restored.step
        position = corpus.train.start(None if restored is None else restored.meta["position"])
        trace = Profile(profile, workdir)
        trace.require_within(start, config.num_steps)
        stack.callback(trace.stop)
        metrics = stack.enter_context(
            Metrics(workdir, num_steps=max(config.num_steps, start), start_step=start)
        )
        with open(os.path.join(workdir, "config.json"), "w") as file:
            json.dump(settings, file, indent=2, sort_keys=True)
        for step, reason in checkpointer.rejected:
            metrics.event(step, "damaged_checkpoint", reason=reason)
        stage, state, seeding = initial_stage(run, restored)
        # Old checkpoints lack the two.
        known = {"recovery": {}, "amaxes": []} | ({} if restored is None else restored.meta)
        recovery = Recovery(run, config, checkpointer, metrics, known["recovery"])
        watch = LayerWatch(metrics, known["amaxes"])
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
        rows = TimedIterator(faults.batches(batches, start + 1), config.data_timeout)

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
            if rejection_cause(scalars):
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
            checkpointer.save(step, checkpoint_items(state), meta, metric)

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
                state = enter_policy(state, stage.state, stage.kept)
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
