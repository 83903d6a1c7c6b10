"""What a tokenizer is, and the one whose tokens are bytes."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32, Integer


@runtime_checkable
class Tokenizer(Protocol):
    """What the library asks of a tokenizer.

    Attributes:
      name: key in `TOKENIZERS`, without the argument of a spec.
      vocab_size: ids are 0 <= id < vocab_size, special ones included.
      bos: id put before every document.
      eos: id put after every document.
      token_bytes: int32 [vocab_size], the bytes of UTF-8 text each id stands for, 0 for special
        ones. It turns nats a token into bits a byte, which compare across tokenizers.
      fingerprint: changes whenever the same text, or where it begins and ends, would give other
        ids.
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
        """Text to ids, no special ones."""
        ...

    def decode(self, ids: Sequence[int] | Integer[np.ndarray, " length"]) -> str:
        """Ids to text; special ones are dropped."""
        ...


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """One id a byte of UTF-8: 0 to 255 are the bytes, 256 begins and 257 ends a document."""

    name: str = dataclasses.field(default="bytes", init=False)
    vocab_size: int = dataclasses.field(default=258, init=False)
    bos: int = dataclasses.field(default=256, init=False)
    eos: int = dataclasses.field(default=257, init=False)

    @property
    def token_bytes(self) -> Int32[np.ndarray, " vocab"]:
        """int32 [258]: 1 for the bytes, 0 for the two special ids."""
        return (np.arange(self.vocab_size) < 256).astype(np.int32)

    @property
    def fingerprint(self) -> str:
        """A constant: nothing about this tokenizer can vary."""
        return "bytes-1"

    def encode(self, text: str) -> Int32[np.ndarray, " length"]:
        """The UTF-8 bytes of `text` as int32.

        Raises:
          UnicodeEncodeError (a ValueError): a lone surrogate, which UTF-8 cannot hold.
        """
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | Integer[np.ndarray, " length"]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD, special ids vanish.

        Any ids below `vocab_size` decode, so that samples of an untrained model can be shown.

        Raises:
          ValueError: an id outside 0 <= id < vocab_size, or something that is not a whole number.
        """
        ids = require_ids(ids, self.vocab_size)
        return ids[ids < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


def require_ids(ids: Any, vocab_size: int) -> Integer[np.ndarray, " length"]:
    """`ids` as an array; raises ValueError for what is no id."""
    ids = np.asarray(ids)
    if ids.size == 0:
        return ids.astype(np.int32)
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"token ids must be whole numbers, got {ids.dtype}")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(f"token ids must be in [0, {vocab_size}), got {ids.min()} to {ids.max()}")
    return ids
