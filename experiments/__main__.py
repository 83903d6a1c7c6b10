"""The commands of this folder: python -m experiments.NAME --flags

    train, generate, evaluate, convert, tokenizer, report    as `fp8jax NAME`
    pipeline      pre-trains, fine-tunes, evaluates and exports in several precisions
    launch        starts several processes here, or writes scripts that start them elsewhere
    arithmetic    makes word problems of several steps, with worked answers
    bench         measures GEMMs, layers, training steps, decoding and starts
    study         losses, scaling biases, noise, the study of what low precision costs

`python -m experiments.NAME --help` has the flags of a command.
"""

print(__doc__)
