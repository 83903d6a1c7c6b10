"""A run of whole epochs: how many steps it has, and what a resumed one may not change.

With `num_epochs` a run reads each training row that often, and the last batch is filled up with
empty rows. So the number of steps is known once the data is packed, and before the run is built:
the learning rate's schedule and the precision schedule depend on it.
"""

from collections.abc import Sequence

from absl import logging
from ml_collections import ConfigDict

from fp8jax.lm.corpus import Corpus, build_corpus, own_corpus
from fp8jax.lm.data.byte_tokenizer import Tokenizer
from fp8jax.lm.data.token_rows import OWN, TokenData
from fp8jax.lm.data.tokenizers import for_rows, tokenizer
from fp8jax.lm.interop.folders import shape_of_model
from fp8jax.lm.sources import parse_sources
from fp8jax.lm.training.settings import Settings, check_numbers

# Keys that decide which examples come when; and how config differences name the files.
_ORDER = (
    "data",
    "tokenizer",
    "seq_len",
    "valid.fraction",
    "long_examples",
    "bad_examples",
    "seed",
    "batch_size",
    "num_epochs",
    "(contents of the data)",
)


def tokenizer_of_run(config: ConfigDict) -> Tokenizer:
    """Returns the tokenizer of a run, without special tokens that its model has no row for."""
    shape = shape_of_model(config.model, dict(config.model_overrides))
    return for_rows(tokenizer(config.tokenizer), shape.vocab_size, f"model={config.model}")


def read_corpus(settings: Settings, tokens: Tokenizer) -> Corpus:
    """Returns the corpus of a run; raises ValueError as `build_corpus` does."""
    return build_corpus(
        settings.data,
        tokens,
        seq_len=settings.seq_len,
        valid_fraction=settings.valid_fraction,
        cache_dir=settings.cache_dir,
        long_examples=settings.long_examples,
        bad_examples=settings.bad_examples,
        document_masking=settings.document_masking,
    )


def with_steps(
    config: ConfigDict, data: TokenData | None = None
) -> tuple[ConfigDict, Corpus | None]:
    """Returns the config with the `num_steps` of its `num_epochs`, and the corpus that gives them.

    Without `num_epochs` and `data`, returns the config as it is, and None.

    Args:
      data: a user's own rows of tokens, in place of `config.data`.

    Raises:
      ValueError: a number out of range, sources with weights, or what `build_corpus` or
        `own_corpus` raises.
    """
    if config.num_epochs is None and data is None:
        return config, None
    check_numbers(config)
    settings = Settings.from_config(config, warmup_steps=0)  # which the data does not depend on
    tokens, counted = tokenizer_of_run(config), config.copy_and_resolve_references()
    if data is None:
        weighted = [each.name for each in parse_sources(config.data) if each.weight is not None]
        if weighted:
            raise ValueError(
                f"num_epochs={config.num_epochs} reads all rows equally often, but {weighted} have "
                "weights: remove the weights, or set num_steps and not num_epochs"
            )
        corpus = read_corpus(settings, tokens)
    else:
        counted.data = OWN
        corpus = own_corpus(data, OWN, tokens, settings.seq_len, settings.valid_fraction)
    if config.num_epochs is None:
        return counted, corpus
    counted.num_steps = -(-config.num_epochs * len(corpus.train) // config.batch_size)
    logging.info(
        "num_epochs=%d of %d rows are num_steps=%d of %d rows; num_steps=%s is not read",
        config.num_epochs,
        len(corpus.train),
        counted.num_steps,
        config.batch_size,
        config.num_steps,
    )
    return counted, corpus


def require_same_epochs(changes: Sequence[str]) -> None:
    """Raises ValueError if a change of a resumed run decides which examples come when.

    Its epochs would not be complete.

    Args:
      changes: lines `KEY: BEFORE -> NOW`.
    """
    if wrong := [line for line in changes if line.partition(":")[0] in _ORDER]:
        raise ValueError(
            f"a run of num_epochs reads every example equally often, which it cannot after "
            f"{'; '.join(wrong)}: begin another run, or set num_steps and not num_epochs"
        )
