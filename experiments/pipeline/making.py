"""What is made before training: the tokenizer with its chat template, and arithmetic problems."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from experiments.arithmetic.files import ProblemFile, problem_files, write_problems
from experiments.arithmetic.problems import Difficulty
from fp8jax.lm.chat.chat_template import load_chat_template
from fp8jax.lm.chat.chat_tokenizer import CHAT_TOKENS, write_chat_tokenizer
from fp8jax.lm.data import tokenizers
from fp8jax.lm.interop.folders import shape_of_model
from fp8jax.lm.sources import training_documents


def check_tokenizer(config: ConfigDict) -> None:
    """Checks the tokenizer of a pipeline, as far as it can be before one is learned.

    Raises ValueError: a folder has no tokenizer or no chat template, or the model has too few
    tokens.
    """
    settings = config.tokenizer
    size, least = settings.vocab_size, 256 + len(CHAT_TOKENS)
    if settings.folder:
        folder = Path(settings.folder).expanduser()
        text_tokenizer = tokenizers.tokenizer(f"bpe:{folder / 'tokenizer.json'}")
        load_chat_template(folder, text_tokenizer)
        size = text_tokenizer.vocab_size
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


def tokenizer_digest(config: ConfigDict) -> str:
    """Returns a hash of the user's tokenizer and chat template."""
    folder = Path(config.tokenizer.folder).expanduser()
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".jinja"))
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()


def make_tokenizer(config: ConfigDict, folder: Path) -> Mapping[str, Any]:
    """Learns a tokenizer from the training split of its text."""
    documents = training_documents(tokenizer_text(config), config.cpt.valid.fraction)
    size = config.tokenizer.vocab_size
    write_chat_tokenizer(folder / "tokenizer.json", documents, size)
    return {"vocab_size": size}


def tokenizer_text(config: ConfigDict) -> str:
    """Returns what the tokenizer learns from: its own text, or that of pre-training."""
    return config.tokenizer.data or config.cpt.data


def check_problems(config: ConfigDict, name: str) -> None:
    """Raises ValueError, with the key, for problems that cannot be made."""
    try:
        _problem_files(config)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def make_problems(config: ConfigDict, folder: Path) -> Mapping[str, Any]:
    """Writes train.jsonl and the test files."""
    files = _problem_files(config)
    write_problems(folder, files, seed=config.seed)
    return {each.name: each.count for each in files}


def _problem_files(config: ConfigDict) -> tuple[ProblemFile, ...]:
    parts = re.fullmatch(r"(\d{1,3}):(\d{1,3})", config.steps, re.ASCII)
    if parts is None:
        raise ValueError(f"steps={config.steps!r} must be A:B, such as 1:3")
    least, most = map(int, parts.groups())
    difficulty = Difficulty(least_steps=least, most_steps=most, largest=config.largest)
    return problem_files(train=config.train, test=config.test, difficulty=difficulty)
