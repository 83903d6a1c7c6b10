"""InfiR2: continual pre-training of Qwen 2.5 1.5B in FP8, as published (2509.22536).

python -m experiments.train --config=configs/infir2/cpt_1_5b.py --workdir=runs/infir2/cpt_1_5b

trains for 40,000 steps of 128 rows of 32,768 tokens, 168 billion tokens in all: warm-up over 5,000
steps, stable for 30,000, cosine decay over the last 5,000 to a tenth. It needs several GPUs. The
paper starts from Qwen's weights, --config.initial_weights=hf:DIR; without them they are random. Its
data mixture is not published: give yours with --config.data, and Qwen's tokenizer with
--config.tokenizer=bpe:DIR/tokenizer.json.

The paper splits each layer over 2 GPUs (--config.mesh_axes.tensor=2). The mesh, validation and
checkpoints here are ours. The baseline is --config.precision=bf16;
--config.precision=fp8_block has float32 scales instead of powers of two.
"""

import ml_collections

import fp8jax


def get_config() -> ml_collections.ConfigDict:
    config = fp8jax.base_config()
    config.precision = "fp8_block_ue8m0"
    config.model = "qwen2.5_1.5b"
    config.mesh = "fsdp"
    config.seed = 1236
    config.seq_len = 32_768
    config.document_masking = False  # the paper's scripts reset nothing between documents
    config.batch_size = 128
    config.num_steps = 40_000
    config.optimizer.schedule = "wsd"
    config.optimizer.learning_rate = 1e-4
    config.optimizer.warmup_steps = 5000
    config.optimizer.decay_fraction = 0.125
    config.optimizer.final_fraction = 0.1
    config.optimizer.weight_decay = 0.1
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.95
    config.optimizer.clip_norm = 1.0
    config.valid.every = 1000
    config.valid.batches = 16
    config.checkpoint.every = 1000
    return config
