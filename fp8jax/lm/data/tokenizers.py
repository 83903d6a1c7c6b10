"""Tokenizers by name: `tokenizer` turns a spec, such as `bytes`, into a `Tokenizer`.

`TOKENIZERS` holds the kinds. Encoding never adds special tokens: token_cache.py marks where a
document begins and ends, not the tokenizer. Text that spells a special token, such as
"<|endoftext|>" in an article about tokenizers, does not become that token.

Texts are encoded one by one: Hugging Face's batch encoding starts threads, and then warns about
every fork (TOKENIZERS_PARALLELISM).
"""

import dataclasses
from collections.abc import Callable

from absl import logging

from fp8jax.lm.data.byte_tokenizer import ByteTokenizer, Tokenizer
from fp8jax.lm.data.hub import tokenizer_json
from fp8jax.lookup import lookup


def _bytes(argument: str) -> Tokenizer:
    if argument:
        raise ValueError(f"tokenizer bytes takes no argument, got {argument!r}")
    return ByteTokenizer()


def _bpe(argument: str) -> Tokenizer:
    if not argument:
        raise ValueError("tokenizer bpe needs the path of a tokenizer.json: give bpe:PATH")
    from fp8jax.lm.data.bpe import load_bpe  # imports the package tokenizers

    return load_bpe(tokenizer_json(f"bpe:{argument}"))


def _hf(argument: str) -> Tokenizer:
    from fp8jax.lm.data.bpe import load_bpe

    return load_bpe(tokenizer_json(f"hf:{argument}"))


# Kind -> a function from the ARGUMENT of a spec ("" if there is none) to a tokenizer.
TOKENIZERS: dict[str, Callable[[str], Tokenizer]] = {"bytes": _bytes, "bpe": _bpe, "hf": _hf}


def tokenizer(spec: str) -> Tokenizer:
    """Returns the tokenizer of a spec.

    Args:
      spec: KIND[:ARGUMENT]: `bytes`; `bpe:PATH` of a tokenizer.json; `hf:DIR` of a folder with one,
        or `hf:ORG/NAME[@REVISION]` of the hub. PATH and DIR may be URLs, s3://… or gs://….

    Returns:
      A `Tokenizer`.

    Raises:
      ValueError: the kind is unknown, the argument is missing or not allowed, or the file is not a
        tokenizer.

    Example:
      >>> from fp8jax.lm.data.tokenizers import tokenizer
      >>> text = tokenizer("bytes")
      >>> text.encode("FP8"), text.vocab_size
      (array([70, 80, 56], dtype=int32), 258)
      >>> text.decode([text.bos, 70, 80, 56, text.eos])
      'FP8'
    """
    kind, _, argument = spec.partition(":")
    return lookup("tokenizer", kind, TOKENIZERS)(argument)


def for_rows(made: Tokenizer, rows: int, name: str) -> Tokenizer:
    """Returns the tokenizer of a model whose embedding has that many rows.

    Special tokens that are not BOS or EOS and have no row are left out, with a warning: no text has
    them, and a chat that has one is refused. Others are left, and the tokenizer stays too large.

    Args:
      made: its ids may be too high.
      rows: of the embedding.
      name: of the model, for people.
    """
    from fp8jax.lm.data.bpe import BPETokenizer

    if not isinstance(made, BPETokenizer) or not (special := made.special_from(rows)):
        return made
    logging.warning(
        "%s has %d rows, and none for the special tokens %s: left out, since no text has them",
        name,
        rows,
        ", ".join(special),
    )
    return dataclasses.replace(
        made,
        vocab_size=rows,
        token_bytes=made.token_bytes[:rows],
        fingerprint=f"{made.fingerprint}-{rows}",  # a cache of chats may have the others
    )


def begins_texts(made: Tokenizer) -> bool:
    """Whether a tokenizer.json puts `bos` before every text. That of bytes has no such file."""
    from fp8jax.lm.data.bpe import BPETokenizer

    return not isinstance(made, BPETokenizer) or made.backend.encode("a").ids[0] == made.bos


def difference(ours: Tokenizer, theirs: Tokenizer) -> str:
    """Returns how many ids stand for other text in two tokenizers, and the first; "" for none.

    Ids that only one of them has and tokens that were added to a vocabulary do not count, so that a
    tokenizer for chats is that of its base.
    """
    from fp8jax.lm.data.bpe import BPETokenizer

    if ours.fingerprint == theirs.fingerprint:
        return ""
    if not (isinstance(ours, BPETokenizer) and isinstance(theirs, BPETokenizer)):
        text = "".join(map(chr, range(1, 2048)))  # a BPE without merges may be the bytes
        same = ours.encode(text).tolist() == theirs.encode(text).tolist()
        return "" if same else f"tokenizer {theirs.name} -> {ours.name}"
    new = {i: piece for piece, i in ours.backend.get_vocab(with_added_tokens=False).items()}
    old = {i: piece for piece, i in theirs.backend.get_vocab(with_added_tokens=False).items()}
    others = sorted(i for i in new.keys() & old.keys() if new[i] != old[i])
    if not others:
        return ""
    first = others[0]
    return f"{len(others)} of {len(new)} ids, such as {first}: {old[first]!r} -> {new[first]!r}"
