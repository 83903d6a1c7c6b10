"""File formats: every document in order, every damaged file refused with its name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fp8jax.lm.data.bad_examples import BAD_EXAMPLES
from fp8jax.lm.data.files import Tally
from fp8jax.lm.sources import parse_sources
from tests.support import ROOT
from tests.support.text import compressed, json_lines
from tests.support.tfds_examples import SPLITS_OF_EXAMPLES

TEXTS = ["the first document", "é and \u2028 in the second one", "a third, with\nlines\r\n"]


def read(spec: str, tally: Tally | None = None) -> list[str]:
    """All documents of one source."""
    (source,) = parse_sources(spec)
    return list(source.reader.documents(Tally() if tally is None else tally))


def skipping() -> Tally:
    """A tally that skips bad records."""
    return Tally(answer=BAD_EXAMPLES["skip"])


# Text and JSON lines.


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_line_ends_and_separators_are_text(tmp_path, suffix):
    texts = [
        "one\u2028two\r\nthree\u0085four",
        "second document \x1e here",
        "third one, plain text",
    ]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    content = ("\r\n \n" + "\r\n\n".join(lines)).encode()  # blank lines, none at the end
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(compressed(content, suffix))
    assert read(f"jsonl:{path}") == texts
    path.write_bytes(compressed(texts[0].encode(), suffix))
    assert read(f"text:{path}") == texts[:1]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_progress_counts_the_bytes_of_the_files(tmp_path, suffix):
    texts = [f"document {i} " + "with some more text " * 20 for i in range(2000)]
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl{suffix}").write_bytes(compressed(json_lines(texts), suffix))
    (source,) = parse_sources(f"jsonl:{tmp_path}/*")
    tally, seen = Tally(), []
    for _ in source.reader.documents(tally):
        seen.append(tally.bytes_read)
    assert len(seen) == 4000
    assert seen == sorted(seen)
    assert tally.bytes_read == sum(path.stat().st_size for path in source.reader.files())
    assert suffix or len(set(seen)) > 50  # it moves while a file is read


def test_two_streams_in_one_compressed_file(tmp_path):
    parts = [json_lines(TEXTS[:1]), json_lines(TEXTS[1:])]
    for suffix in (".gz", ".zst"):
        path = tmp_path / f"a.jsonl{suffix}"
        path.write_bytes(b"".join(compressed(part, suffix) for part in parts))
        assert read(f"jsonl:{path}") == TEXTS


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_damaged_compressed_files_are_named(tmp_path, suffix, kind):
    good = compressed(json_lines([f"document {i * i * i}" for i in range(1000)]), suffix)
    path = tmp_path / f"a.x{suffix}"
    for bad in (good[: len(good) // 2], b"no such header", good + b"more", b""):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=rf"a\.x{suffix}: damaged or not (gzip|zstd) data: "):
            read(f"{kind}:{path}")


def test_field_of_json_lines(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines(TEXTS, "content"))
    assert read(f"jsonl:{tmp_path}/a.jsonl#content") == TEXTS
    with pytest.raises(ValueError, match=r'a\.jsonl, line 1: expected {"text": "…"}, got '):
        read(f"jsonl:{tmp_path}/a.jsonl")
    with pytest.raises(ValueError, match=r'expected {"body": "…"}, got .*KeyError'):
        read(f"jsonl:{tmp_path}/a.jsonl#body")


def test_a_hash_that_begins_no_name_belongs_to_the_glob(tmp_path):
    (tmp_path / "a#1").write_bytes(json_lines(TEXTS))
    assert read(f"jsonl:{tmp_path}/a#1") == TEXTS
    assert read(f"jsonl:{tmp_path}/a#1#text") == TEXTS
    assert read(f"text:{tmp_path}/a#*") == [json_lines(TEXTS).decode()]


def test_separators_of_text_files(tmp_path):
    text = "one\ntwo\n\nthree\n \t\n\r\n\nfour\n<|end|>five<|end|>\n"
    (tmp_path / "a.txt").write_text(text, newline="")
    (tmp_path / "b#c").write_text("six\n\nseven")
    # Only lines without a word between two documents are dropped.
    assert read(f"text:{tmp_path}/a.txt#split=blank") == [
        "one\ntwo\n",
        "three\n",
        "four\n<|end|>five<|end|>\n",
    ]
    assert read(f"text:{tmp_path}/a.txt#split=<|end|>") == [*text.split("<|end|>")]
    assert read(f"text:{tmp_path}/*#split=<|end|>")[-1] == "six\n\nseven"
    assert read(f"text:{tmp_path}/b#c#split=blank") == ["six\n", "seven"]
    (source,) = parse_sources(f"text:{tmp_path}/a.txt#split=blank")
    assert (source.name, source.reader.reads) == ("text-a", ("blank",))
    (source,) = parse_sources(f"text:{tmp_path}/a.txt")
    assert source.reader.reads == ()  # caches of before stay valid


@pytest.mark.parametrize("end", [b"\n", b"   \n"])
def test_the_end_of_a_long_line_is_no_blank_one(tmp_path, end):
    """Lines are read in pieces of a megabyte; this one ends where a piece does."""
    (tmp_path / "a.txt").write_bytes(b"x" * 2**20 + end + b"second line\n\nother")
    first, second = read(f"text:{tmp_path}/a.txt#split=blank")
    assert first == "x" * 2**20 + end.decode() + "second line\n" and second == "other"


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_utf8_is_checked_across_pieces(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    text = "x" * (2**20 - 1) + "é"
    path.write_bytes(compressed(text.encode(), suffix))
    assert read(f"text:{path}") == [text]
    path.write_bytes(compressed(b"x" * (2**20 - 1) + b"\xc3x", suffix))
    tally = skipping()
    assert read(f"text:{path}", tally) == []
    assert (tally.not_utf8, tally.bytes_read) == (1, path.stat().st_size)


# Parquet.


def write_parquet(path: Path, **columns: pa.Array) -> None:
    pq.write_table(pa.table(columns), path, row_group_size=700)


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
)
def test_parquet(tmp_path, kind):
    texts = [f"document {i} é" if i % 10 else None for i in range(2500)]
    numbers = pa.array(range(2500))
    write_parquet(tmp_path / "a.parquet", n=numbers, text=pa.array(texts, pa.string()).cast(kind))
    write_parquet(tmp_path / "b.parquet", text=pa.array(TEXTS, kind))
    tally = skipping()
    assert read(f"parquet:{tmp_path}/*.parquet", tally) == [*filter(None, texts), *TEXTS]
    assert tally.no_text == 250
    assert tally.bytes_read == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_parquet_of_another_column(tmp_path):
    write_parquet(tmp_path / "a.parquet", **{"my-body.x": pa.array(TEXTS), "text": pa.array("abc")})
    assert read(f"parquet:{tmp_path}/a.parquet#my-body.x") == TEXTS


def test_parquet_strings_that_are_not_utf8(tmp_path):
    raw = pa.array([b"good text", b"\xff bad", b"good again"])
    write_parquet(tmp_path / "a.parquet", text=raw.view(pa.string()))
    tally = skipping()
    assert read(f"parquet:{tmp_path}/a.parquet", tally) == ["good text", "good again"]
    assert tally.no_text == 1


def test_bad_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, n=pa.array([1]), raw=pa.array([b"text"]), s=pa.array([{"text": "x"}]))
    for column in ("text", "s.text"):
        with pytest.raises(
            ValueError,
            match=rf"a\.parquet: no column '{column}'. There are: n \(int64\), raw \(binary\), s ",
        ):
            read(f"parquet:{path}#{column}")
    with pytest.raises(ValueError, match=r"a\.parquet: column 'n' is int64, not string. There are"):
        read(f"parquet:{path}#n")
    with pytest.raises(ValueError, match="column 'raw' is binary, not string"):
        read(f"parquet:{path}#raw")
    write_parquet(path, text=pa.array(TEXTS * 1000))
    good = path.read_bytes()
    for bad in (b"", b"no such header", good[: len(good) // 2], good[:4] + bytes(99) + good[103:]):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=r"a\.parquet: damaged or not Parquet: "):
            read(f"parquet:{path}")


# TensorFlow datasets.


def test_tfds(data_dir):
    tally = Tally()
    found = read("tfds:fp8jax_examples", tally)
    both = [SPLITS_OF_EXAMPLES["test"], SPLITS_OF_EXAMPLES["train"]]  # tfds shuffles within each
    assert sorted(found[:10]) == both[0] and sorted(found[10:]) == sorted(both[1])
    assert read("tfds:fp8jax_examples") == found
    assert read("tfds:fp8jax_examples:1.0.0@train") == found[10:]
    assert read("tfds:fp8jax_examples@train[:10%]") == found[10:160]
    assert read("tfds:fp8jax_examples@train[1490:]+test") == [*found[1500:], *found[:10]]
    assert sorted(read("tfds:fp8jax_examples@test#title")) == sorted(
        f"title {i}" for i in range(10)
    )
    (source,) = parse_sources("tfds:fp8jax_examples")
    assert tally.bytes_read == sum(path.stat().st_size for path in source.reader.files())
    with pytest.raises(ValueError, match="^fp8jax_examples@test, example .*: it is not UTF-8"):
        read("tfds:fp8jax_examples@test#raw")
    tally = skipping()
    assert read("tfds:fp8jax_examples@test#raw", tally) == ["raw text"] * 9
    assert tally.no_text == 1


def test_files_and_reads_of_tfds(data_dir):
    def identity(spec):
        (source,) = parse_sources(spec)
        return [path.name for path in source.reader.files()], source.reader.reads

    names = [f"fp8jax_examples-{s}.array_record-00000-of-00001" for s in ("test", "train")]
    assert identity("tfds:fp8jax_examples") == (names, ("", "text"))
    part = (names[1:], ("train[:10%]", "title"))
    assert identity("tfds:fp8jax_examples@train[:10%]#title") == part


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "no_such_set",
            "unknown TensorFlow dataset 'no_such_set'.* no prepared one lies in .*tfds",
        ),
        ("fp8jax_examples:9.9.9", "cannot be loaded at version 9.9.9, only: 1.0.0"),
        ("fp8jax_examples@valid", r"Unknown split 'valid'. Should be one of \['train', 'test'\]"),
        ("fp8jax_examples@train[:x]", r"train\[:x\]"),
        ("fp8jax_examples#body", r"no feature 'body'. There are: .*n \(Tensor\)"),
        ("fp8jax_examples#n", r"feature 'n' is not a text. There are: .*n \(Tensor\)"),
        ("fp8jax_examples#names", "feature 'names' is not a text"),
        ("two words", "two words"),
    ],
)
def test_bad_tfds(data_dir, spec, message):
    (source,) = parse_sources(f"tfds:{spec}")  # nothing is looked up yet
    with pytest.raises(ValueError, match=message):
        source.reader.files()
    with pytest.raises(ValueError, match=message):
        next(source.reader.documents(Tally()))


def test_tfds_in_a_format_without_random_access(dataset, data_dir):
    path = dataset[0] / "fp8jax_examples" / "1.0.0" / "dataset_info.json"
    good = path.read_text()
    path.write_text(good.replace("array_record", "tfrecord"))
    try:
        with pytest.raises(
            ValueError,
            match="fp8jax_examples was prepared in .*1.0.0 as tfrecord, .*file_format=array_record",
        ):
            read("tfds:fp8jax_examples@test")
    finally:
        path.write_text(good)


def test_tfds_that_is_not_prepared(tfds, dataset, monkeypatch, tmp_path):
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path))
    with pytest.raises(
        ValueError,
        match=f"fp8jax_examples was not prepared in {tmp_path}.*run `tfds build fp8jax_examples -",
    ):
        read("tfds:fp8jax_examples")
    with pytest.raises(ValueError, match="imdb_reviews was not prepared in .*/imdb_reviews/plain_"):
        read("tfds:imdb_reviews")  # which tfds knows how to prepare
    assert not list(tmp_path.iterdir())


def test_tfds_without_tensorflow(dataset):
    """In a program of its own, which finds the dataset through TFDS_DATA_DIR and by its files."""
    program = """
import sys
from fp8jax.lm.data.files import Tally
from fp8jax.lm.sources import parse_sources
(source,) = parse_sources("tfds:fp8jax_examples")
assert "tensorflow_datasets" not in sys.modules
print(len(list(source.reader.documents(Tally()))), len(source.reader.files()))
assert "tensorflow" not in sys.modules
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "TFDS_DATA_DIR": str(dataset[0])},
        capture_output=True,
        text=True,
    )
    assert result.stdout == "1510 2\n", result.stderr
