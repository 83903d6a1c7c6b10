"""Trains a tokenizer: python -m experiments.tokenizer --data='jsonl:/text/*.jsonl' \\
    --vocab_size=8192 --output=tokenizer.json

It is a byte-level BPE of the training split alone. A run takes it with
--config.tokenizer=bpe:tokenizer.json, and should have the same data and valid_fraction.
"""

import itertools
import os
import sys

from absl import app, flags

from fp8jax.data import tokenizers
from fp8jax.data.bpe import train_bpe
from fp8jax.data.documents import training_documents

_DATA = flags.DEFINE_string(
    "data", None, "The text, as a config's key data says it.", required=True
)
_VALID_FRACTION = flags.DEFINE_float(
    "valid_fraction", 0.05, "Share of the documents held out, as in configs/base.py."
)
_VOCAB_SIZE = flags.DEFINE_integer("vocab_size", 8192, "Tokens, special ones included.")
_OUTPUT = flags.DEFINE_string(
    "output", None, "The tokenizer.json to write; must not exist.", required=True
)

_SAMPLE = 1000  # documents that bytes a token are counted on


def _run() -> None:
    output = os.path.expanduser(_OUTPUT.value)
    if os.path.exists(output):
        raise ValueError(f"--output={output} exists and is not overwritten")
    os.makedirs(os.path.dirname(output) or ".", exist_ok=True)  # before the work, not after it
    documents = training_documents(_DATA.value, _VALID_FRACTION.value)
    learned = train_bpe(documents, _VOCAB_SIZE.value)
    with open(output, "x", encoding="utf-8") as file:
        file.write(learned.to_str(pretty=True))
    made = tokenizers.tokenizer(f"bpe:{output}")
    documents = training_documents(_DATA.value, _VALID_FRACTION.value)
    ids = [made.encode(document) for document in itertools.islice(documents, _SAMPLE)]
    num_tokens = max(1, sum(map(len, ids)))
    num_bytes = sum(int(made.token_bytes[document].sum()) for document in ids)
    print(f"{output}: {made.vocab_size} tokens, {num_bytes / num_tokens:.2f} bytes a token")
    print(f"on the first {len(ids)} documents of the training split ({num_bytes:,} bytes)")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"arguments that are no flags: {argv[1:]}")
    try:
        _run()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    app.run(main)
