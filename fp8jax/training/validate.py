"""TODO docstring."""

import math

import jax
import numpy as np
from ml_collections import ConfigDict

from fp8jax.data.corpus import Corpus
from fp8jax.data.loader import to_devices, valid_batches
from fp8jax.training.run import Run
from fp8jax.training.step import TrainState


def sample_text(run: Run, state: TrainState) -> str:
    """A text of the model's, from its prompt to the end of the document."""
    if run.sample is None:
        raise ValueError("this run was built without sample_every")
    ids = np.asarray(run.sample(state))
    ends = np.flatnonzero(ids[1:] == run.tokenizer.eos)  # BOS may be the same token
    return run.tokenizer.decode(ids[: ends[0] + 1] if len(ends) else ids)


def validate(
    run: Run, state: TrainState, corpus: Corpus, config: ConfigDict
) -> tuple[dict[str, float], list[float]]:
    """valid_loss (nats a token) and valid_bits_per_byte over all sources, and for each of them;
    and of each layer the largest magnitude of what its mlp/down takes."""
    sums: dict[str, dict[str, float]] = {}
    hidden: list[np.ndarray] = []
    for source, rows in corpus.valid.items():
        batches = valid_batches(
            rows, batch_size=config.batch_size // config.grad_accum,
            max_batches=config.valid_batches, process_index=jax.process_index(),
            process_count=jax.process_count(),
        )  # fmt: skip
        outs = [run.eval_step(state, to_devices(batch, run.batch_sharding)) for batch in batches]
        host = jax.device_get(outs)
        hidden += [out.pop("hidden") for out in host]
        sums[source] = {k: float(sum(float(out[k]) for out in host)) for k in host[0]}
    total = {k: sum(s[k] for s in sums.values()) for k in ("nats", "tokens", "bytes")}
    scalars = {}
    for suffix, s in [("", total), *((f"/{name}", s) for name, s in sums.items())]:
        scalars[f"valid_loss{suffix}"] = s["nats"] / s["tokens"]
        scalars[f"valid_bits_per_byte{suffix}"] = s["nats"] / s["bytes"] / math.log(2)
    return scalars, np.max(hidden, axis=0).tolist()
