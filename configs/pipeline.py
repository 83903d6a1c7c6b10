"""All config keys of a pipeline, with their defaults; experiments/pipeline runs it.

The strings of `cpt`, `sft_1`, `sft_2` and `evaluate` may name what earlier stages make: {tokenizer}
is the tokenizer.json, {problems_1} and {problems_2} are folders of problems.
"""

import ml_collections

import fp8jax


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()

    # Chains: each trains in one precision, or in several, and exports the result
    config.precisions = ("bf16", "fp8_block", "fp8_block_ue8m0")  # one for all stages of a chain
    config.chains = ()  # chains that change: ((CPT, both SFT, EXPORT), …), a precision each
    config.seeds = (0,)  # of fine-tuning, and of pre-training if pretrain_each_seed
    config.pretrain_each_seed = False  # True: seed N pre-trains its own model, with cpt.seed + N

    # Made first, once for all chains
    config.tokenizer = ml_collections.ConfigDict()
    config.tokenizer.folder = ""  # a folder with tokenizer and chat template; "": one is learned
    config.tokenizer.data = ""  # text to learn from, in the syntax of cpt.data; "": that of cpt
    config.tokenizer.vocab_size = 1024  # tokens, special ones included
    for name, steps, seed in (("problems_1", "1:2", 1), ("problems_2", "1:3", 2)):
        problems = ml_collections.ConfigDict()
        problems.train = 1000  # problems to learn from
        problems.test = 200  # problems of each test file
        problems.steps = steps  # A:B, from A to B operations in a problem
        problems.largest = 99  # no number is larger
        problems.seed = seed  # of the problems
        config[name] = problems

    # Training: whole configs, with all keys of configs/base.py. The pipeline sets their precision,
    # and for fine-tuning the model, the tokenizer, the weights to start from and the seed
    config.cpt = fp8jax.base_config()  # continual pre-training
    config.cpt.tokenizer = "bpe:{tokenizer}"  # of all stages
    config.sft_1 = fp8jax.base_config()  # first stage of fine-tuning
    config.sft_1.data = "chat:{problems_1}/train.jsonl"  # or conversations of yours
    config.sft_2 = fp8jax.base_config()  # second stage, which follows on the first
    config.sft_2.data = "chat:{problems_2}/train.jsonl"  # or conversations of yours

    # Evaluation of each trained and each exported model
    config.evaluate = ml_collections.ConfigDict()
    config.evaluate.rows = 256  # most held-out rows of each source
    config.evaluate.batch_size = 16  # rows, and problems, at a time
    config.evaluate.problems = (  # NAME=FILE of problems with answers
        "trained={problems_2}/test.jsonl",
    )
    config.evaluate.max_tokens = 128  # most tokens of a response
    config.evaluate.seed = 0  # of shuffled answers, the control
    return config
