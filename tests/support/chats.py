"""Conversations in files, and a tokenizer with a template for them."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8jax.lm.corpus import Corpus, build_corpus
from fp8jax.lm.data.tokenizers import tokenizer
from tests.support.chat_templates import CHATML, write_chat_folder


def pairs(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Prompts and responses of many lengths, all of them different."""
    draw = random.Random(seed)
    return [
        {"prompt": f"say {i}" + " x" * draw.randint(0, 9), "response": "no " * draw.randint(1, 30)}
        for i in range(count)
    ]


def write_chats(folder: Path, lines: Sequence[Any], template: str = CHATML) -> str:
    """Writes lines into chats.jsonl, beside a tokenizer and a template; returns the source."""
    folder.mkdir(parents=True, exist_ok=True)
    write_chat_folder(folder, template)
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "chats.jsonl").write_text("\n".join(text) + "\n", encoding="utf-8")
    return f"chat:{folder}/chats.jsonl"


def chat_corpus(
    folder: Path, lines: Sequence[Any], template: str = CHATML, **others: Any
) -> Corpus:
    """The corpus of some lines; `others` are arguments of `build_corpus`."""
    settings = dict(seq_len=160, valid_fraction=0.2, cache_dir=folder / "cache") | others
    spec = write_chats(folder, lines, template)
    return build_corpus(spec, tokenizer(f"bpe:{folder}/tokenizer.json"), **settings)
