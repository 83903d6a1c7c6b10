"""The interface `Tokenizer`, and the tokenizer whose tokens are bytes."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32, Integer


@runtime_checkable
class Tokenizer(Protocol):
    """The interface of tokenizers.

    Attributes:
      name: its key in `TOKENIZERS`.
      vocab_size: ids are 0 <= id < vocab_size, special ids included.
      bos: the id before every document.
      eos: the id after every document.
      token_bytes: int32 [vocab_size], the number of bytes of UTF-8 text that each id stands for; 0
        for special ids. It converts nats a token to bits a byte, which can be compared between
        tokenizers.
      fingerprint: changes whenever the same documents would get other ids, bos and eos included.

    Example:
      >>> from fp8jax.lm.data.byte_tokenizer import Tokenizer
      >>> from fp8jax.lm.data.tokenizers import tokenizer
      >>> isinstance(tokenizer("bytes"), Tokenizer)
      True
    """

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos(self) -> int: ...

    @property
    def eos(self) -> int: ...

    @property
    def token_bytes(self) -> Int32[np.ndarray, " vocab"]: ...

    @property
    def fingerprint(self) -> str: ...

    def encode(self, text: str) -> Int32[np.ndarray, " length"]:
        """Returns the ids of a text, without special ids."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]:
        """Returns the ids of each text, as `encode` does."""
        ...

    def decode(self, ids: Sequence[int] | Integer[np.ndarray, " length"]) -> str:
        """Returns the text of ids; special ids are dropped."""
        ...


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """One id for each byte of UTF-8: 0 to 255 are the bytes, 256 is BOS, 257 is EOS."""

    name: str = dataclasses.field(default="bytes", init=False)
    vocab_size: int = dataclasses.field(default=258, init=False)
    bos: int = dataclasses.field(default=256, init=False)
    eos: int = dataclasses.field(default=257, init=False)

    @property
    def token_bytes(self) -> Int32[np.ndarray, " vocab"]:
        """Int32 [258]: 1 for the bytes, 0 for the two special ids."""
        return (np.arange(self.vocab_size) < 256).astype(np.int32)

    @property
    def fingerprint(self) -> str:
        """A constant, since nothing about this tokenizer can change."""
        return "bytes-1"

    def encode(self, text: str) -> Int32[np.ndarray, " length"]:
        """Returns the UTF-8 bytes of `text` as int32.

        Raises:
          UnicodeEncodeError (a ValueError): a lone surrogate, which UTF-8 cannot encode.
        """
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]:
        """Returns the bytes of each text, as `encode` does."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | Integer[np.ndarray, " length"]) -> str:
        """Returns the text of `ids`, without special ids; bytes that are not UTF-8 become U+FFFD.

        Any sequence of ids can be decoded, so that samples of an untrained model can be shown.

        Raises:
          ValueError: an id is not in [0, vocab_size), or not a whole number.
        """
        ids = require_ids(ids, self.vocab_size)
        return ids[ids < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


def require_ids(ids: Any, vocab_size: int) -> Integer[np.ndarray, " length"]:
    """Returns `ids` as an array; ValueError unless they are whole numbers in [0, vocab_size)."""
    ids = np.asarray(ids)
    if ids.size == 0:
        return ids.astype(np.int32)
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"token ids must be whole numbers, got {ids.dtype}")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(f"token ids must be in [0, {vocab_size}), got {ids.min()} to {ids.max()}")
    return ids
