"""The byte tokenizer as a tokenizer.json: a byte-level BPE that has learned nothing.

Its 256 tokens are the bytes, with the ids of `ByteTokenizer`, and it joins none of them. Programs
that read Hugging Face folders then give text the ids that the run was trained on.
"""

from typing import Any

import tokenizers
from tokenizers import AddedToken

from fp8jax.lm.data.bpe import BEGIN, END
from fp8jax.lm.data.byte_tokenizer import ByteTokenizer


def byte_level_bpe() -> tokenizers.Tokenizer:
    """Returns the tokenizer; its special tokens are those that `train_bpe` names."""
    text_tokenizer = ByteTokenizer()
    vocab = {character: byte for byte, character in enumerate(_characters())}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in (BEGIN, END)])
    assert (made.token_to_id(BEGIN), made.token_to_id(END)) == (
        text_tokenizer.bos,
        text_tokenizer.eos,
    )
    return made


def _characters() -> list[str]:
    """Returns the character that stands for each byte in byte-level vocabularies.

    A byte that Latin-1 prints is its own character; the others are numbered from 256 on.
    """
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in prints else chr(next(others)) for byte in range(256)]


def tokenizer_config(begin: str, end: str) -> dict[str, Any]:
    """Returns the tokenizer_config.json of a tokenizer.json without one."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
    }
