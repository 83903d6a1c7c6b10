"""TODO docstring."""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Int32, Integer
from tokenizers import AddedToken

from fp8jax.data.byte_tokenizer import require_ids

# Byte-pair encodings, of Hugging Face's tokenizer.json.

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"  # what train_bpe calls them, as Llama 3 does


# Where no tokenizer_config.json says which, the first of these that is a special token.
BEGINS = (BEGIN, "<s>", "<bos>", "<|startoftext|>", "<|endoftext|>")


ENDS = (END, "</s>", "<eos>", "<|endoftext|>")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BPETokenizer:
    """A byte-pair encoding from a tokenizer.json; `load_bpe` makes it.

    Two ways of spelling bytes are understood: byte-level ones (GPT-2, Llama 3, Qwen), where each
    character of a token stands for a byte, and SentencePiece's (Llama 2, Gemma), where "▁" is a
    space and <0xAB> a byte. Where the file normalizes text (NFC, a space put in front), it is the
    normalized text that ids and `token_bytes` speak of.

    Attributes: those of `Tokenizer`. vocab_size is the highest id + 1, added tokens included; an
    id in between that no token has stands for no text. fingerprint holds the hash of the file.
    """

    name: str = dataclasses.field(default="bpe", init=False)
    vocab_size: int
    bos: int
    eos: int
    token_bytes: Int32[np.ndarray, " vocab"]
    fingerprint: str
    backend: tokenizers.Tokenizer = dataclasses.field(repr=False)

    def encode(self, text: str) -> Int32[np.ndarray, " length"]:
        """The ids of `text` as int32, no special ones, whatever the text spells.

        Raises:
          UnicodeEncodeError (a ValueError): a lone surrogate, which UTF-8 cannot hold.
        """
        text.encode("utf-8")  # the backend's own error says that text must be a string
        return np.array(self.backend.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Sequence[int] | Integer[np.ndarray, " length"]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD, special ids vanish.

        Any ids below `vocab_size` decode, so that samples of an untrained model can be shown.

        Raises:
          ValueError: an id outside 0 <= id < vocab_size, or something that is not a whole number.
        """
        listed = require_ids(ids, self.vocab_size).tolist()
        return self.backend.decode(listed, skip_special_tokens=True)


def load_bpe(path: str | os.PathLike[str]) -> BPETokenizer:
    """The byte-pair encoding of a tokenizer.json.

    Which special tokens begin and end a document is said by a tokenizer_config.json beside it
    (`bos_token`, `eos_token`; without a bos_token, eos does for both, as in GPT-2 and Qwen), or
    else found by name (`BEGINS`, `ENDS`).

    Raises:
      ValueError: a file is missing, damaged or no BPE; an added token's id cannot be honoured; its
        tokens are spelt in an unknown way; no special token, or none that exists, begins or ends a
        document.
    """
    path = Path(path).expanduser()
    content, spec = _read_json(path)
    try:
        backend = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises bare ones
        raise ValueError(f"{path} is no tokenizer: {error}") from error
    if (model := type(backend.model).__name__) != "BPE":
        raise ValueError(f"{path} holds a {model} tokenizer, only BPE is known")
    backend.encode_special_tokens = True  # text that spells a special token stays text
    backend.no_truncation()
    backend.no_padding()
    added = backend.get_added_tokens_decoder()
    for token in spec["added_tokens"] if "added_tokens" in spec else ():
        # The library counts on from the model's last token, whatever the file says.
        if (index := backend.token_to_id(token["content"])) != token["id"]:
            raise ValueError(
                f"{path}: {token['content']!r} has the id {token['id']}, the library gives {index}"
            )
    vocab = backend.get_vocab(with_added_tokens=True)
    bos, eos = _bos_and_eos(path, added)
    token_bytes = np.zeros(max(vocab.values()) + 1, np.int32)
    spelt_bytes = _spelling(path, spec)
    for piece, index in vocab.items():
        if index not in added:
            token_bytes[index] = spelt_bytes(piece)
        elif not added[index].special:
            token_bytes[index] = len(piece.encode("utf-8"))  # these are spelt as they are
    token_bytes.flags.writeable = False
    fingerprint = f"bpe-1-{hashlib.sha256(content).hexdigest()}-{bos}-{eos}"
    return BPETokenizer(
        vocab_size=len(token_bytes), bos=bos, eos=eos, token_bytes=token_bytes,
        fingerprint=fingerprint, backend=backend,
    )  # fmt: skip


def train_bpe(documents: Iterator[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Learns a byte-level byte-pair encoding; `save` it and load it with `bpe:PATH`.

    Ids 0 and 1 begin and end a document, the next 256 are the bytes, so that any text can be
    encoded, the others pairs that occur at least twice. Words are cut as in GPT-2. The same
    documents give the same file.

    Raises:
      ValueError: vocab_size is less than 258, or more than the text gives.
    """
    if vocab_size < 258:
        raise ValueError(f"{vocab_size=} must be at least 258: the 256 bytes, begin and end")
    learned = tokenizers.Tokenizer(tokenizers.models.BPE())
    learned.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, special_tokens=[BEGIN, END],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )  # fmt: skip
    learned.train_from_iterator(documents, trainer)
    if (found := learned.get_vocab_size()) < vocab_size:
        raise ValueError(f"the text gives only {found} tokens, {vocab_size=} needs more text")
    return learned


def _read_json(path: Path) -> tuple[bytes, dict[str, Any]]:
    """A JSON object as it is and parsed; raises ValueError with the path."""
    try:
        content = path.read_bytes()
        parsed = json.loads(content)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{path} must hold a JSON object, got {content[:40]!r}")
    return content, parsed


def _bos_and_eos(path: Path, added: Mapping[int, AddedToken]) -> tuple[int, int]:
    """The ids that begin and end a document, from the file beside `path` or by name."""
    ids = {token.content: index for index, token in added.items() if token.special}
    said: dict[str, str] = {}
    config_path = path.with_name("tokenizer_config.json")
    if config_path.exists():
        config = _read_json(config_path)[1]
        for key in ("bos_token", "eos_token"):
            token = config[key] if key in config else None
            if isinstance(token, dict) and "content" in token:
                token = token["content"]
            if token is not None:
                if not isinstance(token, str) or token not in ids:
                    raise ValueError(
                        f"{config_path}: {key} {token!r} is no special token of {path}, which are: "
                        f"{', '.join(ids)}"
                    )
                said[key] = token
        if "eos_token" in said and "bos_token" not in said:
            said["bos_token"] = said["eos_token"]
    for key, names in (("bos_token", BEGINS), ("eos_token", ENDS)):
        if key not in said:
            known = [name for name in names if name in ids]
            if not known:
                raise ValueError(
                    f"{path}: none of {', '.join(names)} is a special token; there are: "
                    f"{', '.join(ids) or 'none'}. Name the {key} in {config_path}"
                )
            said[key] = known[0]
    return ids[said["bos_token"]], ids[said["eos_token"]]


def _spelling(path: Path, spec: Mapping[str, Any]) -> Callable[[str], int]:
    """How many bytes a token of the model stands for, told from how the file decodes it."""
    decoder = json.dumps(spec["decoder"] if "decoder" in spec else None, ensure_ascii=False)
    alphabet = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())

    def byte_level(token: str) -> int:
        # A token with another character is decoded as it is.
        return len(token) if set(token) <= alphabet else len(token.encode("utf-8"))

    def sentencepiece(token: str) -> int:
        is_byte = re.fullmatch("<0x[0-9A-Fa-f]{2}>", token)
        return 1 if is_byte else len(token.replace("▁", " ").encode("utf-8"))

    if '"ByteLevel"' in decoder:
        return byte_level
    if "▁" in decoder:
        return sentencepiece
    raise ValueError(
        f"{path} spells its tokens in an unknown way: its decoder is neither ByteLevel nor one "
        f"that replaces ▁, but {decoder[:200]}"
    )
