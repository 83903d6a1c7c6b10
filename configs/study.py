"""The study of what low precision costs: a Llama of 58M or 134M parameters, and its decays.

python -m experiments.train --config=configs/study.py --workdir=runs/study

trains the trunk alone, in BF16, on Python's standard library in bytes. The study gives the data,
the tokenizer, precisions, seeds and forks (docs/parity.md):

    python -m experiments.study parity --plan=screen …

Width 512 and hidden width 1408, eleven times 128, make no tile, row or block ragged and none of
them the whole of a matrix: a granularity is what its name says. 8 layers of 8 heads have 25.7M
parameters; embedding and head, with 32,000 tokens, 32.8M; together 58.5M. :llama_125m is the same
with width 768, hidden width 2048 and 12 layers of 12 heads: 134.1M, and half the rate.

A step has 65,536 tokens. The trunk warms up and stays at its rate, without a decay; a fork is a run
with optimizer.schedule=decay from one of its checkpoints. At the published sizes of H100 and H200,
64 rows of 1024 fit on one GPU in every precision.
"""

import ml_collections

import fp8jax

SIZES = ("llama_60m", "llama_125m")


def get_config(size: str = "llama_60m") -> ml_collections.ConfigDict:
    if size not in SIZES:
        raise ValueError(f"size {size!r} is none of {', '.join(SIZES)}")
    config = fp8jax.base_config()
    config.model = size
    if size == "llama_60m":
        config.model_overrides.d_ff = 1408  # the model's own 1376 is no multiple of 128
    config.remat = "none"  # of all runs: only runs of one setting are compared
    config.seq_len = 1024
    config.batch_size = 64
    config.valid.batches = 1
    config.valid.every = 1008
    config.num_steps = 8064  # the trunk's: the last fork begins here
    config.optimizer.schedule = "wsd"
    config.optimizer.warmup_steps = 200
    config.optimizer.decay_fraction = 0.0  # the forks decay
    config.optimizer.final_fraction = 0.0  # forks end at a rate of zero
    # Tuned in BF16, once, with --plan=rate; at the larger size half of it, not tuned.
    config.optimizer.learning_rate = 2e-3 if size == "llama_60m" else 1e-3
    config.checkpoint.every = 1008  # divides the first steps of all forks
    config.checkpoint.keep = 2
    return config
