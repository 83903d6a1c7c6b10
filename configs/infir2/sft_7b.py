"""InfiR2: supervised fine-tuning of Qwen 2.5 7B in FP8, in two stages, as published (2509.22536).

python -m experiments.train --config=configs/infir2/sft_7b.py --workdir=runs/infir2/sft_7b

is :stage1, on InfiAlign-SFT-72k; --config=configs/infir2/sft_7b.py:stage2 follows on
InfiAlign-SFT-165k. Each trains for 5 epochs in batches of 64 rows of 32,768 tokens, with 5% warm-up
and a cosine to a tenth, without weight decay. The loss is that of the assistant's tokens. It needs
several GPUs. Give what lies elsewhere on your machine:

    --config.initial_weights=WORKDIR or hf:DIR          stage 1: pre-training's; stage 2: stage 1's
    --config.tokenizer=bpe:DIR/tokenizer.json           Qwen's, its chat template beside it
    --config.data='chat:/path/*.jsonl'                  the conversations

The paper's batch is 64 conversations; here it is 64 rows, which hold several short conversations
each. The settings of both stages are those of its scripts; its model card says a learning rate of
1e-5 and a weight decay of 0.05. Validation, mesh and checkpoints are ours. The baseline is
--config.precision=bf16; --config.precision=fp8_block has float32 scales instead of powers of two.
"""

import ml_collections

import fp8jax

STAGES = ("stage1", "stage2")


def get_config(stage: str = "stage1") -> ml_collections.ConfigDict:
    if stage not in STAGES:
        raise ValueError(f"stage {stage!r} is none of {', '.join(STAGES)}")
    config = fp8jax.base_config()
    config.precision = "fp8_block_ue8m0"
    config.model = "qwen2.5_7b"
    config.mesh = "fsdp"
    config.remat = "full"  # as its scripts
    config.data = {
        "stage1": "chat:InfiAlign-SFT-72k/*.jsonl",
        "stage2": "chat:InfiAlign-SFT-165k/*.jsonl",
    }[stage]
    config.valid.fraction = 0.01
    config.seq_len = 32_768
    config.batch_size = 64
    config.num_epochs = 5
    config.optimizer.schedule = "cosine"
    config.optimizer.learning_rate = 2e-5
    config.optimizer.warmup_fraction = 0.05
    config.optimizer.final_fraction = 0.1
    config.optimizer.weight_decay = 0.0
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.95
    config.valid.every = 200
    config.valid.batches = 16
    config.checkpoint.every = 200
    return config
