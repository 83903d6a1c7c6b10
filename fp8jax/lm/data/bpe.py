"""Byte-pair encodings: loads and trains the tokenizer.json files of Hugging Face's tokenizers."""

import dataclasses
import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Int32, Integer
from tokenizers import AddedToken

from fp8jax.lm.data.byte_tokenizer import require_ids

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"  # BOS and EOS of train_bpe, named as in Llama 3

# Known names of BOS and EOS. Without a tokenizer_config.json, the first of them is used that is a
# special token of the file.
BEGINS = (BEGIN, "<s>", "<bos>", "<|startoftext|>", "<|endoftext|>")
ENDS = (END, "</s>", "<eos>", "<|endoftext|>")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BPETokenizer:
    """A byte-pair encoding from a tokenizer.json; `load_bpe` creates it.

    Two spellings of bytes are supported: byte-level (GPT-2, Llama 3, Qwen), where each character of
    a token stands for a byte, and SentencePiece's (Llama 2, Gemma), where "▁" is a space and <0xAB>
    a byte. If the file normalizes text (NFC, a space in front), then ids and `token_bytes` describe
    the normalized text, of which no byte is lost.

    Attributes: those of `Tokenizer`. `vocab_size` is the highest id + 1, added tokens included; an
    id that no token has stands for no text. `fingerprint` contains the hash of the file, and
    `folder` is where it lies, perhaps with a chat template.
    """

    name: str = dataclasses.field(default="bpe", init=False)
    vocab_size: int
    bos: int
    eos: int
    token_bytes: Int32[np.ndarray, " vocab"]
    fingerprint: str
    folder: Path
    backend: tokenizers.Tokenizer = dataclasses.field(repr=False)

    def encode(self, text: str) -> Int32[np.ndarray, " length"]:
        """Returns the ids of `text` as int32, without special ids even if the text spells them.

        Raises:
          UnicodeEncodeError (a ValueError): a lone surrogate, which UTF-8 cannot encode.
        """
        (ids,) = self.encode_batch([text])
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]:
        """Returns the ids of each text, as `encode` does; several texts on all cores."""
        for text in texts:
            text.encode("utf-8")  # raises a clear error; the backend's says that it needs a string
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | Integer[np.ndarray, " length"]) -> str:
        """Returns the text of `ids`, without special ids; bytes that are not UTF-8 become U+FFFD.

        Any sequence of ids can be decoded, so that samples of an untrained model can be shown.

        Raises:
          ValueError: an id is not in [0, vocab_size), or not a whole number.
        """
        listed = require_ids(ids, self.vocab_size).tolist()
        return self.backend.decode(listed, skip_special_tokens=True)

    def special_from(self, rows: int) -> list[str]:
        """Returns the tokens with ids from `rows` on if no text has one; [] if some text may.

        Published models have such tokens: Gemma 3 1B's tokenizer names a token for images, which is
        that of its larger siblings, and the model has no row for it.
        """
        beyond = {i: t for i, t in self.backend.get_added_tokens_decoder().items() if i >= rows}
        text = {i for i in range(rows, self.vocab_size) if i not in beyond or not beyond[i].special}
        if text or max(self.bos, self.eos) >= rows:
            return []
        return [beyond[i].content for i in sorted(beyond)]


def load_bpe(path: str | os.PathLike[str]) -> BPETokenizer:
    """Returns the byte-pair encoding of a tokenizer.json.

    A tokenizer_config.json in the same folder names the special tokens that begin and end a
    document (`bos_token`, `eos_token`; without a bos_token, eos_token is both, as in GPT-2 and
    Qwen). Without such a file they are found by name (`BEGINS`, `ENDS`).

    Raises:
      ValueError: a file is missing, damaged or not a BPE; the library gives an added token another
        id than the file; the spelling of tokens is unknown; some text cannot be spelled, so that it
        would be lost; or the special tokens that begin and end a document are unknown or do not
        exist.
    """
    path = Path(path).expanduser()
    content, spec = _read_json(path)
    backend = _backend(path, content)
    # Dropout draws another encoding of a text in each call, which a cache would keep.
    drops, backend.model.dropout = backend.model.dropout is not None, None
    _require_same_ids(path, spec, backend)
    added = backend.get_added_tokens_decoder()
    bos, eos = _bos_and_eos(path, added)
    spelling = _spelling(path, spec)
    _require_bytes(path, backend, spelling)
    _require_text(path, backend)
    token_bytes = _token_bytes(backend, added, spelling)
    # Caches of before dropout was switched off hold what it drew.
    version = 2 if drops else 1
    fingerprint = f"bpe-{version}-{hashlib.sha256(content).hexdigest()}-{bos}-{eos}"
    return BPETokenizer(
        vocab_size=len(token_bytes),
        bos=bos,
        eos=eos,
        token_bytes=token_bytes,
        fingerprint=fingerprint,
        folder=path.parent,
        backend=backend,
    )


def _backend(path: Path, content: bytes) -> tokenizers.Tokenizer:
    """Returns the library's tokenizer of a tokenizer.json; ValueError unless it is a BPE."""
    try:
        backend = tokenizers.Tokenizer.from_str(content.decode("utf-8-sig"))
    except Exception as error:  # the library raises plain exceptions
        raise ValueError(f"{path} is not a tokenizer: {error}") from error
    if (model := type(backend.model).__name__) != "BPE":
        raise ValueError(f"{path} has a {model} tokenizer, but only BPE is supported")
    backend.encode_special_tokens = True  # text that spells a special token stays text
    backend.no_truncation()
    backend.no_padding()
    return backend


def _require_same_ids(path: Path, spec: Mapping[str, Any], backend: tokenizers.Tokenizer) -> None:
    """Raises ValueError if the library gives an added token another id than the file.

    The library numbers added tokens after the model's last token, whatever ids the file has.
    """
    for token in spec["added_tokens"] if "added_tokens" in spec else ():
        if (index := backend.token_to_id(token["content"])) != token["id"]:
            raise ValueError(
                f"{path}: {token['content']!r} has the id {token['id']}, the library gives {index}"
            )


def _token_bytes(
    backend: tokenizers.Tokenizer,
    added: Mapping[int, AddedToken],
    spelling: "_Spelling",
) -> Int32[np.ndarray, " vocab"]:
    """Returns how many bytes of text each id stands for, as a read-only array."""
    vocab = backend.get_vocab(with_added_tokens=True)
    token_bytes = np.zeros(max(vocab.values()) + 1, np.int32)
    for piece, index in vocab.items():
        if index not in added:
            token_bytes[index] = spelling.length(piece)
        elif not added[index].special:
            token_bytes[index] = len(piece.encode("utf-8"))  # an added token is stored as text
    token_bytes.flags.writeable = False
    return token_bytes


def train_bpe(
    documents: Iterator[str],
    vocab_size: int,
    *,
    special_tokens: Sequence[str] = (BEGIN, END),
    single_digits: bool = False,
) -> tokenizers.Tokenizer:
    """Learns a byte-level byte-pair encoding; `save` it and load it with `bpe:PATH`.

    The special tokens have the first ids. The next 256 ids are the bytes, so that any text can be
    encoded. The others are pairs that occur at least twice. Text is split into words as in GPT-2.
    The same documents give the same file.

    Args:
      special_tokens: by default those that begin and end a document.
      single_digits: whether each digit is a word, so that no token has two digits, as in Qwen's.

    Raises:
      ValueError: vocab_size is less than 256 and the special tokens, or the text does not have
        that many tokens.
    """
    least = 256 + len(special_tokens)
    if vocab_size < least:
        names = "BOS and EOS" if len(special_tokens) == 2 else ", ".join(special_tokens)
        raise ValueError(f"{vocab_size=} must be at least {least}: the 256 bytes, {names}")
    learned = tokenizers.Tokenizer(tokenizers.models.BPE())
    split_words = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.pre_tokenizer = split_words
    if single_digits:
        split_digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
        learned.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split_digits, split_words])
    learned.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learned.train_from_iterator(documents, trainer)
    if (size := learned.get_vocab_size()) < vocab_size:
        raise ValueError(f"the text gives only {size} tokens, {vocab_size=} needs more text")
    return learned


def _read_json(path: Path) -> tuple[bytes, dict[str, Any]]:
    """Returns a JSON file as bytes and parsed; ValueError unless it holds a JSON object."""
    try:
        content = path.read_bytes()
        parsed = json.loads(content)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{path} must hold a JSON object, got {content[:40]!r}")
    return content, parsed


def _bos_and_eos(path: Path, added: Mapping[int, AddedToken]) -> tuple[int, int]:
    """Returns the ids that begin and end a document.

    A tokenizer_config.json in the folder of `path` names them, or else they are found by name.
    """
    ids = {token.content: index for index, token in added.items() if token.special}
    config_path = path.with_name("tokenizer_config.json")
    named = _named_tokens(path, config_path, ids) if config_path.exists() else {}
    if "eos_token" in named and "bos_token" not in named:
        named["bos_token"] = named["eos_token"]
    for key, names in (("bos_token", BEGINS), ("eos_token", ENDS)):
        if key not in named:
            known = [name for name in names if name in ids]
            if not known:
                raise ValueError(
                    f"{path}: none of {', '.join(names)} is a special token; there are: "
                    f"{', '.join(ids) or 'none'}. Name the {key} in {config_path}"
                )
            named[key] = known[0]
    return ids[named["bos_token"]], ids[named["eos_token"]]


def _named_tokens(path: Path, config_path: Path, ids: Mapping[str, int]) -> dict[str, str]:
    """Returns the bos_token and eos_token that a tokenizer_config.json names, if it does.

    Raises:
      ValueError: one of them is not among `ids`, the special tokens of `path`.
    """
    config = _read_json(config_path)[1]
    named = {}
    for key in ("bos_token", "eos_token"):
        token = config[key] if key in config else None
        if isinstance(token, dict) and "content" in token:
            token = token["content"]
        if token is None:
            continue
        if not isinstance(token, str) or token not in ids:
            raise ValueError(
                f"{config_path}: {key} {token!r} is not a special token of {path}, which are: "
                f"{', '.join(ids)}"
            )
        named[key] = token
    return named


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Spelling:
    """How the tokens of a model are spelled.

    Attributes:
      length: a function from a token of the model to the number of bytes it stands for.
      bytes: the tokens of the 256 bytes.
    """

    length: Callable[[str], int]
    bytes: Sequence[str]


def _spelling(path: Path, spec: Mapping[str, Any]) -> _Spelling:
    """Returns how tokens are spelled, which the decoder in the file tells."""
    decoder = json.dumps(spec["decoder"] if "decoder" in spec else None, ensure_ascii=False)
    alphabet = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())

    def byte_level(token: str) -> int:
        # A token with a character outside the alphabet is decoded unchanged.
        return len(token) if set(token) <= alphabet else len(token.encode("utf-8"))

    def sentencepiece(token: str) -> int:
        is_byte = re.fullmatch("<0x[0-9A-Fa-f]{2}>", token)
        return 1 if is_byte else len(token.replace("▁", " ").encode("utf-8"))

    if '"ByteLevel"' in decoder:
        return _Spelling(length=byte_level, bytes=sorted(alphabet))
    if "▁" in decoder:
        return _Spelling(length=sentencepiece, bytes=[f"<0x{i:02X}>" for i in range(256)])
    raise ValueError(
        f"{path} spells its tokens in an unknown way: its decoder must be ByteLevel or one that "
        f"replaces ▁, but is {decoder[:200]}"
    )


def _require_bytes(path: Path, backend: tokenizers.Tokenizer, spelling: _Spelling) -> None:
    """Raises ValueError if the model has no token for some byte: text that needs it would vanish.

    Models in SentencePiece's way spell bytes only with `byte_fallback`.
    """
    vocab = backend.get_vocab(with_added_tokens=False)
    if missing := [token for token in spelling.bytes if token not in vocab]:
        raise ValueError(
            f"{path}: its vocabulary lacks {len(missing)} of the 256 bytes, such as "
            f"{missing[0]!r}, so characters that need them would be lost: take a tokenizer with "
            "all bytes (BpeTrainer's initial_alphabet, or byte_fallback)"
        )
    if spelling.bytes[0].startswith("<0x") and not backend.model.byte_fallback:
        raise ValueError(
            f"{path}: byte_fallback is off, so characters that are no tokens would be lost"
        )


# Each has what some normalizer or splitter removes: control characters, accents, white space.
_PROBES = (
    "Übung macht 日本 👍 e\u0301\u2028x\ufffd",
    " \n\ta  b \r\n",
    "".join(map(chr, range(1, 128))),
    "no, 'no': 1,000.5 (x_y) <a/> -- don't!",
)


def _require_text(path: Path, backend: tokenizers.Tokenizer) -> None:
    """Raises ValueError if text does not come back from its ids, but for normal forms and case."""
    for text in _PROBES:
        decoded = backend.decode(
            backend.encode(text, add_special_tokens=False).ids, skip_special_tokens=True
        )
        if _normal(text) not in (_normal(decoded), _normal(decoded.removeprefix(" "))):
            raise ValueError(
                f"{path} loses text: {text[:40]!r} becomes {decoded[:40]!r}, by its "
                f"normalizer or its pre-tokenizer"
            )


def _normal(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()
