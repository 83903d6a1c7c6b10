"""Tokenizers of other people: those that lose text are refused, and dropout is off."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from fp8jax.lm.chat.chat_template import load_chat_template
from fp8jax.lm.data.bpe import load_bpe, train_bpe
from tests.support.chat_templates import CHATML, write_chat_folder

TEXTS = ["the cat sat on the mat, and the dog sat on the cat.\n"] * 10
SPECIAL = ["<s>", "</s>"]
SPACE = normalizers.Replace(" ", "▁")


def byte_level(**parts):
    """A byte-level tokenizer; `parts` are others than it would have."""
    made = train_bpe(iter(TEXTS), 270, special_tokens=SPECIAL)
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def with_splits(*before):
    """A byte-level tokenizer that splits texts before."""
    last = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return byte_level(pre_tokenizer=pre_tokenizers.Sequence([*before, last]))


def without_alphabet():
    """Learned as courses teach it: the vocabulary has the bytes of the text alone."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(special_tokens=SPECIAL, vocab_size=60))
    return made


def sentencepiece(*, number=256, byte_fallback=True, unk="<unk>", normalizer=SPACE):
    """A tokenizer in SentencePiece's way, with the first bytes."""
    pieces = ["<unk>", *SPECIAL, *(f"<0x{i:02X}>" for i in range(number)), "▁", *"abcdefghi"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocab, merges=[], unk_token=unk, byte_fallback=byte_fallback)
    made = tokenizers.Tokenizer(model)
    made.normalizer = normalizer
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.add_special_tokens(SPECIAL)
    return made


def saved(folder, made):
    path = folder / "tokenizer.json"
    made.save(str(path))
    return path


LOSES = [
    ("no alphabet", without_alphabet, r"its vocabulary lacks 2\d\d of the 256 bytes, such as"),
    ("no byte_fallback", lambda: sentencepiece(byte_fallback=False), "byte_fallback is off"),
    ("no unk", lambda: sentencepiece(byte_fallback=False, unk=None), "byte_fallback is off"),
    ("a byte short", lambda: sentencepiece(number=255), "lacks 1 of the 256 bytes, .*'<0xFF>'"),
    ("no bytes", lambda: sentencepiece(number=0), "lacks 256 of the 256 bytes"),
    ("strip", lambda: byte_level(normalizer=normalizers.Strip()), "loses text"),
    (
        "accents",
        lambda: byte_level(
            normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
        ),
        "loses text: 'Übung",
    ),
    ("control characters", lambda: byte_level(normalizer=normalizers.Nmt()), "loses text"),
    ("BERT's", lambda: byte_level(normalizer=normalizers.BertNormalizer()), "loses text"),
    (
        "spaces within",
        lambda: sentencepiece(
            normalizer=normalizers.Sequence(
                [normalizers.Replace(tokenizers.Regex(" +"), " "), SPACE]
            )
        ),
        "loses text",
    ),
    ("words", lambda: with_splits(pre_tokenizers.WhitespaceSplit()), "loses text"),
    ("words and punctuation", lambda: with_splits(pre_tokenizers.Whitespace()), "loses text"),
    ("no punctuation", lambda: with_splits(pre_tokenizers.Punctuation("removed")), "loses text"),
]


@pytest.mark.parametrize(("make", "message"), [r[1:] for r in LOSES], ids=[r[0] for r in LOSES])
def test_tokenizers_that_lose_text(tmp_path, make, message):
    path = saved(tmp_path, make())
    with pytest.raises(ValueError, match=f"^{path}.*{message}") as error:
        load_bpe(path)
    assert "\n" not in str(error.value)


KEEPS = [
    ("NFC", lambda: byte_level(normalizer=normalizers.NFC())),
    ("NFKC", lambda: byte_level(normalizer=normalizers.NFKC())),
    ("lower case", lambda: byte_level(normalizer=normalizers.Lowercase())),
    ("a space in front", lambda: byte_level(pre_tokenizer=pre_tokenizers.ByteLevel())),
    ("digits", lambda: with_splits(pre_tokenizers.Digits(individual_digits=True))),
    ("punctuation", lambda: with_splits(pre_tokenizers.Punctuation())),
    ("bytes", sentencepiece),
    (
        "a space put in front",
        lambda: sentencepiece(normalizer=normalizers.Sequence([normalizers.Prepend("▁"), SPACE])),
    ),
]


@pytest.mark.parametrize("make", [row[1] for row in KEEPS], ids=[row[0] for row in KEEPS])
def test_tokenizers_that_keep_all_text(tmp_path, make):
    bpe = load_bpe(saved(tmp_path, make()))
    ids = bpe.encode("x 日本 \n é")
    decoded = bpe.decode(ids)
    assert decoded.removeprefix(" ") == "x 日本 \n é"
    assert bpe.token_bytes[ids].sum() == len(decoded.encode())


def test_dropout_is_off(tmp_path):
    path = saved(tmp_path, byte_level())
    kept = load_bpe(path)
    spec = json.loads(path.read_text())
    spec["model"]["dropout"] = 0.5
    path.write_text(json.dumps(spec))
    drawing = tokenizers.Tokenizer.from_file(str(path))
    drawn = {tuple(drawing.encode(TEXTS[0]).ids) for _ in range(10)}
    assert len(drawn) > 1  # there is something to switch off
    bpe = load_bpe(path)
    for _ in range(10):
        assert bpe.encode(TEXTS[0]).tolist() == kept.encode(TEXTS[0]).tolist()
    assert bpe.fingerprint.startswith("bpe-2-") and kept.fingerprint.startswith("bpe-1-")
    # The copies that render conversations have none, either.
    folder = write_chat_folder(tmp_path, CHATML)
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["model"]["dropout"] = 0.5
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    template = load_chat_template(folder, load_bpe(folder / "tokenizer.json"))
    messages = [{"role": "user", "content": TEXTS[0] + "</s>"}]
    assert len({tuple(template.prompt(messages).tolist()) for _ in range(10)}) == 1


def test_byte_order_marks_of_a_folder(tmp_path):
    folder = write_chat_folder(tmp_path, CHATML)
    plain = load_chat_template(folder, load_bpe(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHATML)
    for path in folder.iterdir():
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    marked = load_chat_template(folder, load_bpe(folder / "tokenizer.json"))
    messages = [{"role": "user", "content": "Hi"}]
    assert marked.prompt(messages).tolist() == plain.prompt(messages).tolist()
