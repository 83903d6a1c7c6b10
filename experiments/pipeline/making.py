"""What is made before training: the tokenizer with its chat template, and arithmetic problems."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from fp8jax.data import tokenizers
from fp8jax.data.chat import load_chat_template
from fp8jax.data.chat_tokenizer import CHAT_TOKENS, write_chat_tokenizer
from fp8jax.data.documents import training_documents
from fp8jax.interop.folders import shape_of_model


def check_tokenizer(config: ConfigDict) -> None:
    """Checks the tokenizer of a pipeline, as far as it can be before one is learned.

    Raises ValueError: a folder has no tokenizer or no chat template, or the model has too few
    tokens.
    """
    settings = config.tokenizer
    size, least = settings.vocab_size, 256 + len(CHAT_TOKENS)
    if settings.folder:
        folder = Path(settings.folder).expanduser()
        words = tokenizers.tokenizer(f"bpe:{folder / 'tokenizer.json'}")
        load_chat_template(folder, words)
        size = words.vocab_size
    elif size < least:
        raise ValueError(f"tokenizer.vocab_size={size} must be at least {least}")
    if config.cpt.model.startswith("hf:") and not settings.folder:
        raise ValueError(
            f"cpt.model={config.cpt.model} has a tokenizer: name its folder with tokenizer.folder"
        )
    model = shape_of_model(config.cpt.model, dict(config.cpt.model_overrides))
    if model.vocab_size < size:
        raise ValueError(
            f"the tokenizer has {size} tokens, more than the model's vocab_size={model.vocab_size}:"
            " raise cpt.model_overrides.vocab_size or lower tokenizer.vocab_size"
        )


def make_tokenizer(config: ConfigDict, folder: Path) -> Mapping[str, Any]:
    """Learns a tokenizer from the training split of `tokenizer.data`."""
    settings = config.tokenizer
    documents = training_documents(settings.data, config.cpt.valid_fraction)
    write_chat_tokenizer(folder / "tokenizer.json", documents, settings.vocab_size)
    return {"vocab_size": settings.vocab_size}


def check_problems(config: ConfigDict, name: str) -> None:
    """Raises ValueError, with the key, for problems that cannot be made."""


def make_problems(config: ConfigDict, folder: Path) -> Mapping[str, Any]:
    """Writes train.jsonl and the test files."""
    raise NotImplementedError("problems")
