"""Byte-pair encodings, trained or loaded: every byte, every special token, and what is refused."""

import argparse
import ast
import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from fp8jax.lm.data.bpe import load_bpe, train_bpe
from fp8jax.lm.data.byte_tokenizer import Tokenizer
from fp8jax.lm.data.tokenizers import difference, for_rows, tokenizer

BYTES = tokenizer("bytes")
TEXTS = [Path(module.__file__).read_text() for module in (argparse, ast, json)]
ODD_TEXTS = ["", " a", "Füße, 数学, 🙂", "a\r\nb\x00c\u2028d", "\ufeffbom", "e\u0301  \t\n\n x"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The path of an encoding of 400 tokens."""
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(iter(TEXTS), 400).save(str(path))
    return path


def altered(trained, folder, config=None, **changes):
    """A copy of the file with other values, and the content of a tokenizer_config.json."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(trained.read_text()) | changes))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def added(*contents, first=0, special=True):
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    return [
        {"id": first + i, "content": content, "special": special, **flags}
        for i, content in enumerate(contents)
    ]


@pytest.mark.parametrize("text", ODD_TEXTS + TEXTS)
def test_bpe_round_trip_and_bytes(trained, text):
    bpe = tokenizer(f"bpe:{trained}")
    ids = bpe.encode(text)
    assert ids.dtype == np.int32
    assert bpe.decode(ids) == text == bpe.decode(ids.tolist())
    assert bpe.token_bytes[ids].sum() == len(text.encode("utf-8"))
    assert not set(ids.tolist()) & {bpe.bos, bpe.eos}
    if len(text) > 1000:
        assert 1.5 < len(text.encode("utf-8")) / len(ids) < 4


def test_what_a_tokenizer_has(trained):
    bpe = tokenizer(f"bpe:{trained}")
    for entry, name, size in ((BYTES, "bytes", 258), (bpe, "bpe", 400)):
        assert isinstance(entry, Tokenizer)
        assert (entry.name, entry.vocab_size) == (name, size)
        assert entry.token_bytes.dtype == np.int32
        special = [i for i in range(size) if entry.token_bytes[i] == 0]
        assert special == [entry.bos, entry.eos]
    assert bpe.token_bytes.max() > 4 and bpe.token_bytes.min() == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        bpe.eos = 3
    with pytest.raises(ValueError, match="read-only"):
        bpe.token_bytes[0] = 3


def test_text_that_spells_a_special_token_stays_text(trained):
    bpe = load_bpe(trained)
    text = "a<|end_of_text|>b <|begin_of_text|>"
    ids = bpe.encode(text)
    assert not set(ids.tolist()) & {bpe.bos, bpe.eos}
    assert bpe.decode(ids) == text and bpe.token_bytes[ids].sum() == len(text)
    # The library's own default does the other thing: there is something to test.
    assert bpe.eos in tokenizers.Tokenizer.from_file(str(trained)).encode(text).ids


def test_bpe_decodes_any_id_and_no_other(trained):
    bpe = load_bpe(trained)
    assert bpe.decode([bpe.bos, *bpe.encode("é").tolist(), bpe.eos]) == "é"
    assert bpe.decode(np.arange(bpe.vocab_size)) and bpe.decode([]) == ""
    for index in range(bpe.vocab_size):  # parts of a character are one U+FFFD or more
        text = bpe.decode([index])
        assert "\ufffd" in text or len(text.encode("utf-8")) == bpe.token_bytes[index]
    for ids in ([400], [-1], [0, 1, 1000]):
        with pytest.raises(ValueError, match=r"must be in \[0, 400\)"):
            bpe.decode(ids)
    with pytest.raises(ValueError, match="surrogates"):
        bpe.encode("a\ud800")


def test_added_tokens_and_holes(trained, tmp_path):
    # Whitespace as GPT-NeoX adds it is spelt as it is; the ids 399 and 403 to 408 have no token.
    model = json.loads(trained.read_text())["model"]
    last = max(model["vocab"], key=model["vocab"].get)
    model["vocab"][last] = 409
    tokens = added("<|begin_of_text|>", "<|end_of_text|>")
    tokens += added("    ", first=400, special=False) + added("<|ü|>", first=401)
    bpe = load_bpe(altered(trained, tmp_path, added_tokens=tokens, model=model))
    assert bpe.vocab_size == 410
    assert bpe.token_bytes[399:].tolist() == [0, 4] + [0] * 8 + [len(last)]
    text = "x    y<|ü|>"
    ids = bpe.encode(text)
    assert 400 in ids and 401 not in ids
    assert bpe.decode(ids) == text and bpe.token_bytes[ids].sum() == len(text.encode("utf-8"))
    assert bpe.decode([405, 401, *bpe.encode("a").tolist()]) == "a"
    tokens[-1]["id"] = 407
    with pytest.raises(ValueError, match="ü.*has the id 407, the library gives 401"):
        load_bpe(altered(trained, tmp_path, added_tokens=tokens))


def test_special_tokens_that_a_model_has_no_row_for_are_left_out(trained, tmp_path, caplog):
    """Gemma 3 1B has one for images."""
    tokens = added("<|begin_of_text|>", "<|end_of_text|>") + added("<image>", "<video>", first=400)
    bpe = load_bpe(altered(trained, tmp_path, added_tokens=tokens))
    cut = for_rows(bpe, 400, "tiny")
    assert "tiny has 400 rows, and none for the special tokens <image>, <video>" in caplog.text
    assert (cut.vocab_size, len(cut.token_bytes)) == (400, 400)
    assert cut.fingerprint != bpe.fingerprint and difference(cut, bpe) == ""
    np.testing.assert_array_equal(cut.encode("a <image>"), bpe.encode("a <image>"))
    with pytest.raises(ValueError, match="400"):
        cut.decode([400])
    assert for_rows(bpe, 402, "tiny") is bpe and for_rows(BYTES, 10, "tiny") is BYTES
    assert for_rows(bpe, 399, "tiny") is bpe  # the last token of text has no row
    tokens[-1]["special"] = False  # text may have it
    assert (
        for_rows(load_bpe(altered(trained, tmp_path, added_tokens=tokens)), 400, "").vocab_size
        == 402
    )


def test_the_difference_of_two_tokenizers_counts_ids_of_other_text(trained, tmp_path):
    model = json.loads(trained.read_text())["model"]
    a, b = (piece for piece, i in model["vocab"].items() if i in (300, 301))
    model["vocab"] |= {a: model["vocab"][b], b: model["vocab"][a]}
    swapped, own = load_bpe(altered(trained, tmp_path, model=model)), load_bpe(trained)
    found = difference(swapped, own)
    assert re.match("2 of 400 ids, such as 300: '.*' -> '.*'$", found)
    assert difference(own, BYTES) == "tokenizer bytes -> bpe"
    assert difference(own, own) == difference(BYTES, BYTES) == ""
    tokens = added("<|begin_of_text|>", "<|end_of_text|>") + added("<|im_end|>", first=400)
    assert difference(load_bpe(altered(trained, tmp_path, added_tokens=tokens)), own) == ""


@pytest.mark.parametrize(
    "config, bos, eos",
    [
        (None, "<|endoftext|>", "</s>"),
        ({}, "<|endoftext|>", "</s>"),
        ({"bos_token": "<a>", "eos_token": {"content": "<b>", "lstrip": False}}, "<a>", "<b>"),
        ({"bos_token": None, "eos_token": "<|endoftext|>"}, "<|endoftext|>", "<|endoftext|>"),
        ({"eos_token": "<b>"}, "<b>", "<b>"),
        ({"bos_token": "<a>", "eos_token": None}, "<a>", "</s>"),
    ],
)
def test_which_tokens_begin_and_end(trained, tmp_path, config, bos, eos):
    names = ("<a>", "<b>", "<|endoftext|>", "</s>")
    tokens = added(*names, first=400)
    bpe = load_bpe(altered(trained, tmp_path, config, added_tokens=tokens))
    assert (bpe.bos, bpe.eos) == (400 + names.index(bos), 400 + names.index(eos))


def test_begin_and_end_must_be_there(trained, tmp_path):
    with pytest.raises(ValueError, match="eos_token '<x>' is not a special token of .*: <a>, <s>"):
        load_bpe(
            altered(
                trained, tmp_path, {"eos_token": "<x>"}, added_tokens=added("<a>", "<s>", first=400)
            )
        )
    for wrong in (["<a>"], {"text": "<a>"}, 3):
        with pytest.raises(
            ValueError, match="tokenizer_config.json: bos_token .* is not a special"
        ):
            load_bpe(
                altered(
                    trained, tmp_path, {"bos_token": wrong}, added_tokens=added("<a>", first=400)
                )
            )
    # Not special: text that spells it would become it.
    plain = added("<a>", first=400, special=False)
    with pytest.raises(ValueError, match="'<a>' is not a special token"):
        load_bpe(altered(trained, tmp_path, {"eos_token": "<a>"}, added_tokens=plain))
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(
        ValueError, match="none of .*</s>.* is a special token; there are: <a>, <s>"
    ):
        load_bpe(altered(trained, tmp_path, added_tokens=added("<a>", "<s>", first=400)))
    with pytest.raises(ValueError, match="there are: none. Name the bos_token in .*_config.json"):
        load_bpe(altered(trained, tmp_path, added_tokens=[]))


def test_sentencepiece_style(tmp_path):
    """As Llama 2 spells its tokens: ▁ is a space, <0xAB> a byte, a space is put in front."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["▁", "h", "i", "ü", "▁h", "▁hi", "▁▁"]
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[("▁", "h"), ("▁h", "i"), ("▁", "▁")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        + [decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(pieces[:3])
    made.save(str(tmp_path / "tokenizer.json"))
    bpe = load_bpe(tmp_path / "tokenizer.json")
    assert (bpe.vocab_size, bpe.bos, bpe.eos) == (len(pieces), 1, 2)
    assert bpe.token_bytes.tolist() == [0] * 3 + [1] * 256 + [1, 1, 1, 2, 2, 3, 2]
    for text in ("hi hi", "hü   数 </s>\n"):
        ids = bpe.encode(text)
        assert bpe.decode([bpe.bos, *ids.tolist(), bpe.eos]) == text
        assert bpe.token_bytes[ids].sum() == len(f" {text}".encode())
    assert bpe.encode("hi hi").tolist() == [pieces.index("▁hi")] * 2


def test_no_truncation_and_no_padding(trained, tmp_path):
    made = tokenizers.Tokenizer.from_file(str(trained))
    made.enable_truncation(4)
    made.enable_padding(length=512)
    made.save(str(tmp_path / "tokenizer.json"))
    for text in ("x", TEXTS[0]):
        ids = load_bpe(tmp_path / "tokenizer.json").encode(text)
        assert np.array_equal(ids, load_bpe(trained).encode(text))


def test_fingerprint_follows_the_content(trained, tmp_path):
    original = load_bpe(trained).fingerprint
    shutil.copy(trained, tmp_path / "other.json")
    assert load_bpe(tmp_path / "other.json").fingerprint == original
    config = {"eos_token": "<|begin_of_text|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    swapped = load_bpe(tmp_path / "other.json").fingerprint
    (tmp_path / "tokenizer_config.json").unlink()
    train_bpe(iter(TEXTS), 399).save(str(tmp_path / "other.json"))
    assert len({original, swapped, load_bpe(tmp_path / "other.json").fingerprint}) == 3


def test_files_that_are_no_bpe(trained, tmp_path):
    path = tmp_path / "tokenizer.json"
    for content, message in [
        (None, "cannot be read: .*No such file"),
        ("{", "cannot be read: "),
        ("[1]", r"must hold a JSON object, got b'\[1\]'"),
        ('{"version": "1.0"}', "is not a tokenizer: Model missing"),
    ]:
        if content is not None:
            path.write_text(content)
        with pytest.raises(ValueError, match=f"{path} {message}"):
            tokenizer(f"bpe:{path}")
    path.unlink()
    path.mkdir()
    with pytest.raises(ValueError, match="cannot be read: .*directory"):
        load_bpe(path)
    path.rmdir()
    tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0})).save(str(path))
    with pytest.raises(ValueError, match="has a WordPiece tokenizer, but only BPE is supported"):
        load_bpe(path)
    with pytest.raises(ValueError, match="spells its tokens in an unknown way: .* but is null"):
        load_bpe(altered(trained, tmp_path, decoder=None))
    (tmp_path / "tokenizer_config.json").write_text("?")
    with pytest.raises(ValueError, match="tokenizer_config.json cannot be read"):
        load_bpe(path)


def test_training_is_deterministic_and_has_all_bytes():
    made = train_bpe(iter(TEXTS), 1000)
    assert made.to_str() == train_bpe(iter(TEXTS), 1000).to_str()
    assert made.get_vocab_size() == 1000
    assert [made.id_to_token(i) for i in (0, 1)] == ["<|begin_of_text|>", "<|end_of_text|>"]
    assert train_bpe(iter([]), 258).get_vocab_size() == 258  # bytes do for any text


def test_training_refuses(trained):
    with pytest.raises(ValueError, match="vocab_size=257 must be at least 258"):
        train_bpe(iter(TEXTS), 257)
    with pytest.raises(ValueError, match="gives only 259 tokens, vocab_size=300 needs more text"):
        train_bpe(iter(["abab"]), 300)
