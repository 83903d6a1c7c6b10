"""A byte-level Llama of GPT-2 small's shape on one GPU: 200 steps of 32 rows of 1024 bytes.

python -m experiments.train --config=configs/lm_125m.py --workdir=runs/lm_125m

For one NVIDIA H200: a minute, 38 GiB; half of that and 10 GiB with --config.attention=cudnn, which
does not give the same bits twice. On 104 MB of English text the validation loss after 200
steps was 1.73 nats a byte in BF16 and 1.75 in fp8_delayed, after 1000 steps 1.09 in both.
85M parameters: a vocabulary of bytes is small. In FP8, take
--config.precision=fp8_delayed and a --workdir of its own. The text is Python's standard library;
for your own, --config.data='text:/path/**/*.txt'.
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
    config = base.get_config()
    config.model = "llama_125m"
    config.model_overrides.vocab_size = 320  # bytes, padded to a multiple of 64
    config.unroll = 12  # all layers: no copies in and out of the stack, for a longer compilation
    config.seq_len = 1024
    config.batch_size = 32
    config.num_steps = 200
    config.learning_rate = 6e-4
    config.valid_batches = 16
    config.checkpoint_every = 200
    return config
