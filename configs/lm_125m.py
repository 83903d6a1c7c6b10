"""A byte-level Llama of GPT-2 small's shape on one GPU: 200 steps of 32 rows of 1024 bytes.

python -m experiments.train --config=configs/lm_125m.py --workdir=runs/lm_125m

takes less than a minute on one NVIDIA H200. The model has 85M parameters, since a vocabulary of
bytes is small. It trains in BF16; --config.precision=fp8_delayed trains in FP8 (another --workdir).

Expect on 104 MB of English text a validation loss after 200 steps of 1.73 nats a byte in BF16 and
1.75 in fp8_delayed, and after 1000 steps 1.09 in both (docs/results/recipes_loss.md). By default
the text is Python's standard library; give yours with --config.data='text:/path/**/*.txt'.
"""

import ml_collections

import fp8jax


def get_config() -> ml_collections.ConfigDict:
    config = fp8jax.base_config()
    config.model = "llama_125m"
    config.model_overrides.vocab_size = 320  # bytes, padded to a multiple of 64
    config.seq_len = 1024
    config.batch_size = 32
    config.num_steps = 200
    config.optimizer.learning_rate = 6e-4
    config.valid.batches = 16
    config.checkpoint.every = 200
    return config
