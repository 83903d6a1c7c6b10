"""Tokenizers: text to int32 ids and back.

A tokenizer is an object with the attributes of `Tokenizer`; `TOKENIZERS` holds the kinds that exist
and `tokenizer` resolves a spec, `bytes` or `bpe:PATH`. Encoding never adds special tokens: where a
document begins and ends is the packing's affair (loader.py), not the text's. Nor does text that
happens to spell one, "<|endoftext|>" in an article about tokenizers, become it.

Texts are encoded one by one: Hugging Face's batches start threads, and then complain about every
fork (TOKENIZERS_PARALLELISM).
"""

from collections.abc import Callable

from fp8jax.data.byte_tokenizer import ByteTokenizer, Tokenizer
from fp8jax.lookup import lookup


def _bytes(argument: str) -> Tokenizer:
    if argument:
        raise ValueError(f"tokenizer bytes takes no argument, got {argument!r}")
    return ByteTokenizer()


def _bpe(argument: str) -> Tokenizer:
    if not argument:
        raise ValueError("tokenizer bpe needs the path of a tokenizer.json, bpe:PATH; got none")
    from fp8jax.data.bpe import load_bpe  # needs the package tokenizers

    return load_bpe(argument)


# Each makes a tokenizer of what follows its name and a colon, "" where nothing does.
TOKENIZERS: dict[str, Callable[[str], Tokenizer]] = {"bytes": _bytes, "bpe": _bpe}


def tokenizer(spec: str) -> Tokenizer:
    """The tokenizer of a spec, KIND[:ARGUMENT]: `bytes`, or `bpe:PATH` of a tokenizer.json.

    Raises:
      ValueError: an unknown kind, an argument too many or missing, or a file that is no tokenizer.
    """
    kind, _, argument = spec.partition(":")
    return lookup("tokenizer", kind, TOKENIZERS)(argument)
