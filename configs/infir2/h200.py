"""InfiR2's pipeline at 125M parameters, for one H200: BF16 beside FP8 in blocks, three seeds.

python -m experiments.pipeline --config=configs/infir2/h200.py --workdir=runs/infir2_h200 \\
    --config.cpt.data='jsonl:/text/*.jsonl'

continues the pre-training from random weights for 105M tokens of the given text, with a tokenizer
that is learned from it, in the proportions of the paper's schedule: an eighth of the steps warms
up, an eighth decays. Then both stages of fine-tuning learn arithmetic with worked steps, five
epochs each, in rows of whole examples. The last chain asks what happens if the kind of scale
changes between the stages.
"""

import ml_collections

from configs import pipeline


def get_config() -> ml_collections.ConfigDict:
    config = pipeline.get_config()
    config.precisions = ("bf16", "fp8_block", "fp8_block_ue8m0")
    config.chains = (
        ("bf16", "bf16", "fp8_block_ue8m0"),  # quantized after training
        ("fp8_block", "fp8_block", "fp8_block_ue8m0"),
        ("fp8_block_ue8m0", "fp8_block_ue8m0", "fp8_block"),
        ("fp8_block", "fp8_block_ue8m0", "fp8_block"),
    )
    config.seeds = (0, 1, 2)
    config.tokenizer.vocab_size = 32_000
    config.problems_1.update(train=30_000, test=2000, steps="1:2")
    config.problems_2.update(train=45_000, test=2000, steps="1:3")
    for stage in (config.cpt, config.sft_1, config.sft_2):
        stage.seq_len = 1024
        stage.optimizer.b1, stage.optimizer.b2 = 0.9, 0.95
        stage.optimizer.final_fraction = 0.1
        stage.valid.batches = 16
        stage.checkpoint.every = 400
        stage.checkpoint.keep = 1  # of 27 runs with 1.3 GB each
    cpt = config.cpt
    cpt.data = "jsonl:text/*.jsonl"  # to be replaced
    cpt.model = "llama_125m"
    cpt.seed = 1236
    cpt.batch_size = 64
    cpt.num_steps = 1600
    cpt.optimizer.schedule = "wsd"
    cpt.optimizer.warmup_steps = 200
    cpt.optimizer.decay_fraction = 0.125
    cpt.optimizer.learning_rate = 1e-3
    cpt.valid.every = 400
    for sft in (config.sft_1, config.sft_2):
        sft.num_epochs = 5
        sft.batch_size = 8  # rows, of about a dozen examples each
        sft.optimizer.warmup_fraction = 0.05
        sft.optimizer.learning_rate = 5e-4
        sft.optimizer.weight_decay = 0.0
        sft.valid.every = 200
    config.evaluate.problems = (
        "trained={problems_2}/test.jsonl",
        "harder={problems_2}/test_harder.jsonl",
        "templates={problems_2}/test_templates.jsonl",
    )
    config.evaluate.rows = 2048
    config.evaluate.batch_size = 128
    return config
