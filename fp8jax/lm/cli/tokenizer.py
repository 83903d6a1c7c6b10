"""Trains a tokenizer: fp8jax tokenizer --data='jsonl:/text/*.jsonl' \\
    --vocab_size=8192 --output=tokenizer.json

The tokenizer is a byte-level BPE, learned from the training split only. A run uses it with
--config.tokenizer=bpe:tokenizer.json. The run's data and valid.fraction should be the same as here.

--chat makes one for conversations: with the special tokens of ChatML, a token for each digit, and
its tokenizer_config.json and chat_template.jinja beside it. A folder should hold nothing else.
"""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from absl import flags, logging

from fp8jax.lm.chat.chat_tokenizer import write_chat_tokenizer
from fp8jax.lm.cli import command
from fp8jax.lm.data import tokenizers
from fp8jax.lm.data.bpe import train_bpe
from fp8jax.lm.sources import training_documents

_DATA = flags.DEFINE_string(
    "data", None, "The text, in the syntax of the config key data.", required=True
)
_VALID_FRACTION = flags.DEFINE_float(
    "valid_fraction", 0.05, "Fraction of the documents held out, as the key valid.fraction."
)
_VOCAB_SIZE = flags.DEFINE_integer(
    "vocab_size", 8192, "Number of tokens, including special tokens."
)
_OUTPUT = flags.DEFINE_string(
    "output", None, "The tokenizer.json to write; must not exist.", required=True
)
_CHAT = flags.DEFINE_bool("chat", False, "Make one for conversations, with a chat template.")

ERRORS = command.ERRORS
VERBOSITY = logging.WARNING

_SAMPLE = 1000  # documents on which bytes per token are measured


def main(arguments: Sequence[str]) -> None:
    command.refuse_arguments(arguments)
    output = os.path.expanduser(_OUTPUT.value)
    if os.path.exists(output):
        raise ValueError(f"--output={output} exists and is not overwritten")
    os.makedirs(os.path.dirname(output) or ".", exist_ok=True)  # fails before the long work
    documents = training_documents(_DATA.value, _VALID_FRACTION.value)
    if _CHAT.value:
        write_chat_tokenizer(Path(output), documents, _VOCAB_SIZE.value)
    else:
        learned = train_bpe(documents, _VOCAB_SIZE.value)
        with open(output, "x", encoding="utf-8") as file:
            file.write(learned.to_str(pretty=True))
    _print_summary(output)


def _print_summary(path: str) -> None:
    """Prints the tokenizer's size, and its bytes per token on the start of the training split."""
    made = tokenizers.tokenizer(f"bpe:{path}")
    documents = training_documents(_DATA.value, _VALID_FRACTION.value)
    ids = [made.encode(document) for document in itertools.islice(documents, _SAMPLE)]
    num_tokens = max(1, sum(map(len, ids)))
    num_bytes = sum(int(made.token_bytes[document].sum()) for document in ids)
    print(f"{path}: {made.vocab_size} tokens, {num_bytes / num_tokens:.2f} bytes a token")
    print(f"on the first {len(ids)} documents of the training split ({num_bytes:,} bytes)")
