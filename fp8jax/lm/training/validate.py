"""Validation loss, and samples of text, from a state of the run."""

import math

import jax
import numpy as np

from fp8jax.lm.corpus import Corpus
from fp8jax.lm.data.loader import share_of_rows, to_devices, valid_batches
from fp8jax.lm.training.run import Run, Stage
from fp8jax.lm.training.step import TrainState


def validate(
    run: Run, stage: Stage, state: TrainState, corpus: Corpus
) -> tuple[dict[str, float], list[float]]:
    """Validation scalars, and the largest SwiGLU output of each layer.

    The rows are the first `valid.batches` times `batch_size` of each source, or all. They are read
    in microbatches, for the memory's sake. How many do not change which rows validate. It moves the
    loss only by the order of float sums, and by the amaxes of casts that share one across rows.

    Returns:
      valid_loss (nats a token) and valid_bits_per_byte over all sources, and the same for each
      source with /NAME; and, a layer each, the largest magnitude of the input of mlp/down.
    """
    settings = run.settings
    most = None
    if settings.valid_batches is not None:
        most = settings.valid_batches * settings.grad_accum
    sums: dict[str, dict[str, float]] = {}
    hidden: list[np.ndarray] = []
    share, shares = share_of_rows(run.batch_sharding, settings.microbatch)
    for source, rows in corpus.valid.items():
        batches = valid_batches(
            rows,
            batch_size=settings.microbatch,
            max_batches=most,
            process_index=share,
            process_count=shares,
        )
        eval_step = stage.programs.eval_step
        outs = [eval_step(state, to_devices(batch, run.batch_sharding)) for batch in batches]
        host = jax.device_get(outs)
        hidden += [out.pop("hidden") for out in host]
        sums[source] = {k: float(sum(float(out[k]) for out in host)) for k in host[0]}
    total = {k: sum(s[k] for s in sums.values()) for k in ("nats", "tokens", "bytes")}
    scalars = {}
    for suffix, s in [("", total), *((f"/{name}", s) for name, s in sums.items())]:
        scalars[f"valid_loss{suffix}"] = s["nats"] / s["tokens"]
        scalars[f"valid_bits_per_byte{suffix}"] = s["nats"] / s["bytes"] / math.log(2)
    return scalars, np.max(hidden, axis=0).tolist()


def sample_text(run: Run, stage: Stage, state: TrainState) -> str:
    """A text that the model generates, from the prompt to the end of the document.

    Raises ValueError for a run without `sample.every`.
    """
    if stage.programs.sample is None:
        raise ValueError("this run was built without sample.every")
    ids = np.asarray(stage.programs.sample(state))
    ends = np.flatnonzero(ids[1:] == run.tokenizer.eos)  # BOS may be the same token
    return run.tokenizer.decode(ids[: ends[0] + 1] if len(ends) else ids)
