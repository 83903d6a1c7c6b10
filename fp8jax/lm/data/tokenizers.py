"""Tokenizers by name: `tokenizer` turns a spec, such as `bytes`, into a `Tokenizer`.

`TOKENIZERS` holds the kinds. Encoding never adds special tokens: token_cache.py marks where a
document begins and ends, not the tokenizer. Text that spells a special token, such as
"<|endoftext|>" in an article about tokenizers, does not become that token.

Texts are encoded one by one: Hugging Face's batch encoding starts threads, and then warns about
every fork (TOKENIZERS_PARALLELISM).
"""

from collections.abc import Callable

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
