"""Files of other people: a bad record costs that record or stops the run, in every format.

Each row is a file that public bug reports name, made here.
"""

import bz2
import gzip
import io
import json
import logging
import lzma
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fp8jax.lm.chat.conversation import read_chats
from fp8jax.lm.corpus import build_corpus
from fp8jax.lm.data import files, readers
from fp8jax.lm.data.bad_examples import BAD_EXAMPLES
from fp8jax.lm.data.bpe import train_bpe
from fp8jax.lm.data.byte_tokenizer import ByteTokenizer
from fp8jax.lm.data.files import Tally
from fp8jax.lm.inference.problems import read_problems
from fp8jax.lm.interop.config_json import load_json
from fp8jax.lm.sources import parse_sources, training_documents
from tests.support.text import compressed

TEXTS = [f"document {i} of some, with é and 日本 in it" for i in range(12)]
LINES = [json.dumps({"text": text}, ensure_ascii=False).encode() for text in TEXTS]
GOOD = b"\n".join(LINES)


def read(spec, answer="error"):
    """The documents of a source, and its tally."""
    (source,) = parse_sources(spec)
    tally = Tally(answer=BAD_EXAMPLES[answer])
    return list(source.reader.documents(tally)), tally


def with_line(line):
    """The good lines, with another one before the sixth."""
    return b"\n".join([*LINES[:5], line, *LINES[5:]])


# A bad line costs that line ----------------------------------------------------------------------

BAD_LINES = [
    ("latin-1", b'{"text": "caf\xe9"}', "UnicodeDecodeError: .* byte 0xe9"),
    ("null", b'{"text": null}', "AttributeError"),
    ("a number", b'{"text": 3}', "AttributeError"),
    ("no field", b'{"body": "x"}', "KeyError: 'text'"),
    ("a list", b'["x"]', "TypeError"),
    ("cut", b'{"text": "x', "JSONDecodeError"),
    ("pretty printed", b"{", "JSONDecodeError"),
    ("deep", b'{"text": "x", "tree": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion"),
    ("a lone surrogate", b'{"text": "\\ud800"}', "UnicodeEncodeError"),
    ("long", b'{"text": "' + b"x" * 3000 + b'"}', "longer than 2,000 bytes"),
    ("two values", b'{"text": "x"} {"text": "y"}', "JSONDecodeError: Extra data"),
    ("twice", b'{"text": "x", "a": 1, "text": "y"}', "'text' comes twice"),
    ("a huge integer", b'{"n": ' + b"9" * 5000 + b', "text": "x"}', "Exceeds the limit"),
    ("a lone mark", b"\xef\xbb\xbf", "JSONDecodeError"),
    ("UTF-16 inside", '{"text": "é"}'.encode("utf-16-le"), "JSONDecodeError|UnicodeDecodeError"),
]


@pytest.mark.parametrize(("line", "message"), [r[1:] for r in BAD_LINES], ids=lambda v: str(v)[:9])
def test_a_bad_line_costs_that_line(tmp_path, line, message, monkeypatch):
    monkeypatch.setattr(files, "LONGEST_LINE", 2000 if b"xxx" in line else 2**27)
    path = tmp_path / "a.jsonl"
    path.write_bytes(with_line(line))
    place = rf'^{path}, line 6: expected {{"text": "…"}}, got .*{message}.*'
    with pytest.raises(ValueError, match=f"{place}; config.bad_examples=skip leaves such"):
        read(f"jsonl:{path}")
    texts, tally = read(f"jsonl:{path}", "skip")
    assert texts == TEXTS and (tally.no_text, tally.not_utf8) == (1, 0)
    ((named, rest),) = tally.first
    assert named == path and rest.startswith(", line 6: ")


def test_a_long_last_line(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONGEST_LINE", 200)
    (tmp_path / "a.jsonl").write_bytes(GOOD + b'\n{"text": "' + b"x" * 200)
    texts, tally = read(f"jsonl:{tmp_path}/a.jsonl", "skip")
    assert texts == TEXTS and tally.no_text == 1
    assert tally.bytes_read == (tmp_path / "a.jsonl").stat().st_size


# The same for every reader -----------------------------------------------------------------------


def write_parquet(path, values):
    column = pa.array(values, pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), path, row_group_size=5)


def bad_source(folder, kind):
    """A source with the good texts and two bad records; and the place of the first."""
    if kind == "jsonl":
        (folder / "a.jsonl").write_bytes(with_line(b'{"text": "caf\xe9"}\nnull'))
        return f"jsonl:{folder}/a.jsonl", "a.jsonl, line 6: "
    if kind == "parquet":
        raw = [text.encode() for text in TEXTS]
        write_parquet(folder / "a.parquet", [*raw[:5], b"caf\xe9", None, *raw[5:]])
        return f"parquet:{folder}/a.parquet", "a.parquet, row 6: it is not UTF-8"
    if kind == "files":
        for i, text in enumerate(TEXTS):
            (folder / f"{i:02}.txt").write_text(text)
        for name in "ab":
            (folder / f"04{name}.txt").write_bytes(b"caf\xe9")
        return f"text:{folder}/*.txt", "04a.txt: it is not UTF-8"
    parts = [text.encode() for text in TEXTS]
    between = b"\n\n" if kind == "blank" else kind.encode()
    (folder / "a.txt").write_bytes(between.join([*parts[:5], b"caf\xe9", b"\xff", *parts[5:]]))
    return f"text:{folder}/a.txt#split={kind}", "a.txt, document 6: not UTF-8"


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "files", "blank", "###"])
def test_the_config_says_what_a_bad_record_costs(tmp_path, kind, caplog):
    spec, place = bad_source(tmp_path, kind)
    settings = dict(seq_len=16, valid_fraction=0.3, cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match=f"{place}.*; config.bad_examples=skip leaves such"):
        build_corpus(f"x={spec}", ByteTokenizer(), **settings)
    with caplog.at_level(logging.WARNING, logger="absl"):
        skipping = build_corpus(f"x={spec}", ByteTokenizer(), bad_examples="skip", **settings)
    (stats,) = skipping.stats
    assert sum(stats.documents.values()) == len(TEXTS)
    assert stats.no_text + stats.not_utf8 == 2
    assert "source 'x': bad records skipped: 2: " in caplog.text and place in caplog.text
    # The cache of a run that skips serves none that stops, and says the same again.
    with pytest.raises(ValueError, match=place):
        build_corpus(f"x={spec}", ByteTokenizer(), **settings)
    caplog.clear()
    again = build_corpus(f"x={spec}", ByteTokenizer(), bad_examples="skip", **settings)
    assert again.fingerprint == skipping.fingerprint and place in caplog.text
    caplog.clear()
    assert len(list(training_documents(spec, 0.3))) == stats.documents["train"]
    assert place in caplog.text


def test_a_cache_that_lost_whole_files_is_built_again(tmp_path, caplog):
    spec, _ = bad_source(tmp_path, "jsonl")
    settings = dict(seq_len=16, valid_fraction=0.3, cache_dir=tmp_path / "cache")
    built = build_corpus(spec, ByteTokenizer(), bad_examples="skip", **settings)
    (manifest,) = (tmp_path / "cache").glob("*/manifest.json")
    content = json.loads(manifest.read_text())
    del content["stats"][0]["first"]  # as versions wrote it that knew no bad lines
    manifest.write_text(json.dumps(content))
    again = build_corpus(spec, ByteTokenizer(), bad_examples="skip", **settings)
    assert "lacks files with a bad record" in caplog.text
    assert again.stats[0] == built.stats[0]


# How files are written ---------------------------------------------------------------------------


def utf(encoding):
    return lambda raw: raw.decode().encode(encoding)


WRITTEN = [
    ("a.jsonl.bz2", bz2.compress),
    ("a.jsonl.xz", lzma.compress),
    ("a.jsonl", gzip.compress),
    ("a.jsonl", bz2.compress),
    ("a.jsonl", lzma.compress),
    ("a.jsonl", lambda raw: compressed(raw, ".zst")),
    ("a.jsonl.gz", lambda raw: compressed(raw, ".zst")),
    ("a.jsonl.bz2", lambda raw: bz2.compress(raw[:100]) + bz2.compress(raw[100:])),
    ("a.jsonl.xz", lambda raw: lzma.compress(raw[:100]) + lzma.compress(raw[100:])),
    ("a.jsonl", lambda raw: b"\xef\xbb\xbf" + raw),
    ("a.jsonl.gz", lambda raw: gzip.compress(b"\xef\xbb\xbf" + raw)),
    ("a.jsonl", utf("utf-16")),
    ("a.jsonl", lambda raw: b"\xfe\xff" + utf("utf-16-be")(raw)),
    ("a.jsonl", utf("utf-16-le")),
    ("a.jsonl", utf("utf-32")),
    ("a.jsonl.xz", lambda raw: lzma.compress(utf("utf-16")(raw))),
]


@pytest.mark.parametrize(("name", "write"), WRITTEN)
def test_files_are_read_by_what_they_hold(tmp_path, name, write):
    path = tmp_path / name
    path.write_bytes(write(GOOD))
    texts, tally = read(f"jsonl:{path}")
    assert texts == TEXTS and tally.bytes_read == path.stat().st_size
    pairs = [json.dumps({"prompt": text, "response": "x", "answer": "1"}) for text in TEXTS]
    path.write_bytes(write("\n".join(pairs).encode()))
    assert [chat.messages[0]["content"] for chat in read_chats(path)] == TEXTS
    assert [problem.prompt for problem in read_problems(path).problems] == TEXTS
    path.write_bytes(write(TEXTS[0].encode()))
    if not path.read_bytes().startswith(b"d\0"):  # text without a mark may have such characters
        assert read(f"text:{path}")[0] == TEXTS[:1]


def tar(raw):
    """An archive with one file."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        info = tarfile.TarInfo("a.jsonl")
        info.size = len(raw)
        archive.addfile(info, io.BytesIO(raw))
    return made.getvalue()


DAMAGED = [
    ("a.jsonl", tar(GOOD), "it is a tar archive: unpack its files"),
    ("a.jsonl.gz", gzip.compress(tar(GOOD)), "it is a tar archive"),
    ("a.jsonl.xz", lzma.compress(tar(GOOD)), "it is a tar archive"),
    ("a.jsonl.bz2", bz2.compress(GOOD)[:-20], "damaged or not bzip2 data: it ends within a stream"),
    ("a.jsonl.xz", lzma.compress(GOOD)[:-20], "damaged or not xz data: it ends within a stream"),
    ("a.jsonl.bz2", bz2.compress(GOOD) + b"more", "damaged or not bzip2 data: Invalid data"),
    ("a.jsonl.xz", lzma.compress(GOOD) + b"more" * 9, "damaged or not xz data: Input format not"),
    ("a.jsonl.xz", GOOD, "damaged or not xz data"),
    ("a.jsonl.bz2", b"", "damaged or not bzip2 data: it is empty"),
    ("a.jsonl", gzip.compress(GOOD, mtime=0)[:-20], "damaged or not gzip data"),
    ("a.jsonl", GOOD.decode().encode("utf-16")[:-1], "damaged or not UTF-16: .*truncated data"),
    ("a.jsonl", b"\xff\xfe{\0\x00\xd8}\0", "damaged or not UTF-16: .*illegal"),
]


@pytest.mark.parametrize(("name", "content", "message"), DAMAGED)
def test_damaged_files_stop_every_run(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    for answer in ("error", "skip"):
        with pytest.raises(ValueError, match=f"^{tmp_path / name}: {message}"):
            read(f"jsonl:{tmp_path / name}", answer)


def test_a_byte_order_mark_changes_the_cache(tmp_path):
    """Caches of before kept it as text."""
    settings = dict(seq_len=16, valid_fraction=0.3, cache_dir=tmp_path / "cache")
    text = "".join(f"{text}\n" for text in TEXTS * 40).encode()
    (tmp_path / "a.txt").write_bytes(text)
    plain = build_corpus(f"text:{tmp_path}/a.txt", ByteTokenizer(), **settings)
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text)
    marked = build_corpus(f"text:{tmp_path}/a.txt", ByteTokenizer(), **settings)
    assert marked.fingerprint != plain.fingerprint
    assert marked.stats[0].bytes == plain.stats[0].bytes


def test_files_put_together(tmp_path):
    """Each with a mark, with ends of lines as Windows has them, and a field within a field."""
    path, mark = tmp_path / "a.jsonl", b"\xef\xbb\xbf"
    path.write_bytes(b"\r\n".join(mark + line for line in LINES))
    assert read(f"jsonl:{path}")[0] == TEXTS
    nested = [line[:-1] + b', "meta": {"text": "no"}, "a": 1, "a": 2}' for line in LINES]
    path.write_bytes(b"\n".join(nested))
    assert read(f"jsonl:{path}")[0] == TEXTS


ODD_COLUMNS = [
    (pa.table([[*TEXTS], ["x"] * 12], names=["text", "text"]), "'text' comes twice"),
    (pa.table({"text": [{"text": "x"}]}), "is struct<text: string>, not string"),
    (pa.table({"text": [["x"]]}), r"is list<.*: string>, not string"),
    (pa.table({"text": [b"x"]}), "is binary, not string"),
    (pa.table({"text": pa.nulls(2)}), "is null, not string"),
    (pa.table({"text": pa.array([[("a", "b")]], pa.map_(pa.string(), pa.string()))}), "is map<"),
    (pa.table({"Text": ["x"]}), r"no column 'text'. There are: Text \(string\)"),
    (pa.table({"meta": [{"text": "x"}]}), r"no column 'text'. There are: meta \(struct<text: s"),
]


@pytest.mark.parametrize(("table", "message"), ODD_COLUMNS, ids=range(len(ODD_COLUMNS)))
def test_columns_that_are_no_text(tmp_path, table, message):
    pq.write_table(table, tmp_path / "a.parquet")
    for answer in ("error", "skip"):
        with pytest.raises(ValueError, match=f"^{tmp_path}/a.parquet: .*{message}"):
            read(f"parquet:{tmp_path}/a.parquet", answer)


def test_columns_beside_others_and_without_rows(tmp_path):
    table = pa.table({"meta": [{"text": "no"}] * 12, "text": TEXTS, "text.text": ["no"] * 12})
    pq.write_table(table, tmp_path / "a.parquet")
    assert read(f"parquet:{tmp_path}/a.parquet")[0] == TEXTS
    pq.write_table(table.slice(0, 0), tmp_path / "a.parquet")
    assert read(f"parquet:{tmp_path}/a.parquet")[0] == []


def test_a_byte_order_mark_of_a_config(tmp_path):
    (tmp_path / "config.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert load_json(tmp_path / "config.json") == {"a": 1}


def test_views_of_strings(tmp_path):
    column = pa.array([*TEXTS, None]).cast(pa.string_view())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert read(f"parquet:{tmp_path}/a.parquet", "skip")[0] == TEXTS


# Streams -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", ["", "blank", "<|end|>"])
@pytest.mark.parametrize("newline", ["\n", " ", ""])
def test_documents_that_are_too_large_are_cut(tmp_path, separator, newline, monkeypatch, caplog):
    monkeypatch.setattr(readers, "LARGEST", 4000)
    monkeypatch.setattr(readers, "_PIECE", 500)
    monkeypatch.setattr(readers, "_CHUNK", 700)
    between = "\n \n" if separator == "blank" else separator
    texts = [newline.join(["é日本語x"] * 900), "a short one, whole\n", newline.join(["日本"] * 800)]
    texts = texts[:1] if not separator else texts
    (tmp_path / "a.txt").write_text(between.join(texts), newline="")
    spec = f"text:{tmp_path}/a.txt" + (f"#split={separator}" if separator else "")
    found, tally = read(spec)
    assert "".join(found).replace("\n", "") == "".join(texts).replace("\n", "")
    assert not tally.first and all(len(text.encode()) <= 500 for text in found)
    assert ("a short one, whole\n" in found) == bool(separator)
    assert "documents over 0 MiB are cut" in caplog.text
    if newline:
        assert sum(text.endswith(newline) for text in found) > len(found) - 4


def test_memory_does_not_grow_with_a_file(tmp_path, monkeypatch):
    """No read of a stream asks for all of it."""
    sizes = []

    class Watched(io.BufferedReader):
        def read(self, size=-1):
            sizes.append(size)
            return super().read(size)

    monkeypatch.setattr(files.io, "BufferedReader", Watched)
    for name, write in WRITTEN:
        (tmp_path / name).write_bytes(write(GOOD))
        read(f"jsonl:{tmp_path / name}")
        read(f"text:{tmp_path / name}", "skip")
    assert sizes and -1 not in sizes and None not in sizes


def test_a_tokenizer_is_trained_on_what_is_good(tmp_path):
    spec, _ = bad_source(tmp_path, "parquet")
    assert train_bpe(training_documents(spec, 0.3), 260).get_vocab_size() == 260
