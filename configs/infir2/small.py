"""InfiR2's pipeline on a laptop: pre-training, two stages of fine-tuning, evaluation, export.

python -m experiments.pipeline --config=configs/infir2/small.py --workdir=runs/infir2

takes about three minutes on two CPU cores, and needs no data: the text is Python's standard
library, the problems are made. It shows that all stages work; a model of this size learns little
arithmetic. configs/infir2/h200.py is for one GPU.
"""

import ml_collections

from configs import pipeline


def get_config() -> ml_collections.ConfigDict:
    config = pipeline.get_config()
    config.precisions = ("bf16", "fp8_block")
    config.chains = (("fp8_block", "fp8_block", "fp8_block_ue8m0"),)
    config.tokenizer.vocab_size = 1024
    for stage in (config.cpt, config.sft_1, config.sft_2):
        stage.seq_len = 256
        stage.batch_size = 8
        stage.unroll = 2
        stage.optimizer.b1, stage.optimizer.b2 = 0.9, 0.95
        stage.optimizer.final_fraction = 0.1
    cpt = config.cpt
    cpt.model = "qwen2_tiny"
    # Multiples of 128, which servers need for weights in blocks.
    cpt.model_overrides.update(
        vocab_size=1024, d_model=128, n_layers=2, n_heads=4, n_kv_heads=4, d_ff=256
    )
    cpt.optimizer.schedule = "wsd"
    cpt.optimizer.decay_fraction = 0.125
    cpt.num_steps = 60
    cpt.optimizer.warmup_steps = 8
    cpt.valid.every = 30
    cpt.valid.batches = 4
    cpt.checkpoint.every = 20
    for sft in (config.sft_1, config.sft_2):
        sft.num_epochs = 1
        sft.optimizer.warmup_fraction = 0.05
        sft.optimizer.learning_rate = 5e-4
        sft.optimizer.weight_decay = 0.0
        sft.valid.every = 50
        sft.checkpoint.every = 20
    config.evaluate.rows = 64
    config.evaluate.max_tokens = 48
    return config
