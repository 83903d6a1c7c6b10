"""Specs and file formats: every document in order, every bad input refused with its name."""

import functools
import gzip
import json
import os
import subprocess
import sys
import sysconfig
import warnings
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fp8jax.data import readers
from fp8jax.data.readers import Tally
from fp8jax.data.sources import SOURCES, Source, parse_sources

TEXTS = ["the first document", "é and \u2028 in the second one", "a third, with\nlines\r\n"]


def read(spec: str, tally: Tally | None = None) -> list[str]:
    """All documents of one source."""
    (source,) = parse_sources(spec)
    return list(source.reader.documents(Tally() if tally is None else tally))


def json_lines(texts: list[str], field: str = "text") -> bytes:
    return "".join(json.dumps({field: text}) + "\n" for text in texts).encode()


def compressed(content: bytes, suffix: str) -> bytes:
    if suffix == ".zst":
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(content)
        return sink.getvalue().to_pybytes()
    return gzip.compress(content) if suffix == ".gz" else content


# Specs.


def test_python_stdlib():
    (source,) = parse_sources("python_stdlib")
    files = source.reader.files()
    root = Path(sysconfig.get_path("stdlib"))
    relative = [path.relative_to(root) for path in files]
    assert source.name == "python_stdlib"
    assert sum(path.stat().st_size for path in files) > 5e6
    assert relative == sorted(relative, key=Path.as_posix)
    assert {Path("ast.py"), Path("json/decoder.py"), Path("unittest/mock.py")} <= set(relative)
    folders = {part for path in relative for part in path.parts[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "__pycache__"}


def test_names_of_sources(tmp_path):
    for name in ("books-1.jsonl", "books-2.jsonl", "été.jsonl", "b.jsonl.zst", "c.txt.gz"):
        (tmp_path / name).write_text("")

    def names(data):
        return [source.name for source in parse_sources(data.replace("DIR", str(tmp_path)))]

    assert names("jsonl:DIR/books-*.jsonl") == ["jsonl-books"]
    assert names("jsonl:DIR/*.jsonl,python_stdlib") == ["jsonl", "python_stdlib"]
    assert names("text:DIR/books-1.jsonl, b.2=text:DIR/books-2.*") == ["text-books-1", "b.2"]
    assert names("jsonl:DIR/b.jsonl.zst#body,text:DIR/c.txt.gz") == ["jsonl-b", "text-c"]
    assert names("jsonl:DIR/*.jsonl.zst") == ["jsonl"]
    assert names("parquet:DIR/books-1.*#x") == ["parquet-books-1"]
    assert names("tfds:glue/sst2:1.0.0@train[:10%]#sentence") == ["tfds-glue_sst2_1.0.0_train_10"]
    assert names("tfds:squad") == ["tfds-squad"]
    (tmp_path / "k=v").mkdir()
    (tmp_path / "k=v" / "été.txt").write_text("")
    assert names("text:DIR/k=v/été.txt") == ["text-t"]  # an "=" of the glob names nothing
    assert names("text:DIR/**/*.txt,x=text:DIR/**/**/*.txt") == ["text", "x"]
    (source,) = parse_sources(f"text:{tmp_path}/**/**/*.txt")
    assert len(source.reader.files()) == 1  # that such a glob finds twice


def test_weights_are_exact(tmp_path):
    (tmp_path / "a*b.txt").write_text("text")

    def weights(data):
        return [s.weight for s in parse_sources(data.replace("DIR", str(tmp_path)))]

    assert weights("a=0.7*text:DIR/*.txt,b=.25*python_stdlib,3*tfds:squad") == [
        Fraction(7, 10), Fraction(1, 4), Fraction(3),
    ]  # fmt: skip
    assert weights("text:DIR/a[*]b.txt,python_stdlib") == [None, None]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("jsnol:DIR/a.txt", "unknown source 'jsnol'; did you mean 'jsonl'"),
        ("x=python_stdlb", "unknown source 'python_stdlb'; did you mean 'python_stdlib'"),
        ("", "unknown source ''. There are: python_stdlib, text, jsonl, parquet, tfds"),
        ("text:DIR/a.txt,", "unknown source ''"),
        ("text:DIR/none-*.txt", r"no file matches '.*none-\*\.txt'"),
        ("text:DIR", "no file matches"),
        ("text", "no file matches '', the argument of the source 'text'"),
        ("jsonl:", "no file matches ''"),
        ("parquet:DIR/none#text", "no file matches '.*/none', the argument of .*/none#text'"),
        ("python_stdlib:3.11", "takes no argument, got '3.11'"),
        ("tfds", r"expected NAME\[@SPLIT\]\[#FIELD\], got ''"),
        ("tfds:squad@", r"expected NAME\[@SPLIT\]\[#FIELD\], got 'squad@'"),
        ("text:DIR/a.txt,text:DIR/a.*", "two sources are called {'text-a'}"),
        ("x=text:DIR/a.txt,x=python_stdlib", "two sources are called {'x'}.*NAME=text:GLOB"),
        ("../x=text:DIR/a.txt", "source name '../x'"),
        ("=text:DIR/a.txt", "source name ''"),
        ("a b=text:DIR/a.txt", "source name 'a b'"),
        ("0*python_stdlib", r"weight '0' in '0\*python_stdlib': expected a positive decimal"),
        ("0.0*python_stdlib", "weight '0.0'"),
        ("-1*python_stdlib", "weight '-1'"),
        ("x=*python_stdlib", "weight ''"),
        ("1/3*python_stdlib", "weight '1/3'"),
        ("nan*python_stdlib", "weight 'nan'"),
        ("2*x=python_stdlib", r"source name '2\*x'"),
        (
            "a=1*python_stdlib,b=text:DIR/a.txt,c=2*tfds:squad",
            "a, c with a weight and b without in .*to all sources.*or to none",
        ),
    ],
)
def test_bad_specs(tmp_path, data, message):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=message):
        parse_sources(data.replace("DIR", str(tmp_path)))


def test_a_kind_is_one_entry(monkeypatch):
    class Numbers:
        label, reads = "", ()

        def files(self):
            return []

        def documents(self, tally):
            return map(str, range(3))

    monkeypatch.setitem(SOURCES, "numbers", lambda argument: Numbers())
    (source,) = parse_sources("x=2*numbers")
    assert isinstance(source, Source) and source.weight == 2
    assert read("numbers") == ["0", "1", "2"]


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


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_utf8_is_checked_across_pieces(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(compressed(b"x" * (2**20 - 1) + "é".encode(), suffix))
    assert readers._is_utf8(path)
    path.write_bytes(compressed(b"x" * (2**20 - 1) + b"\xc3x", suffix))
    assert not readers._is_utf8(path)
    tally = Tally()
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
    tally = Tally()
    assert read(f"parquet:{tmp_path}/*.parquet", tally) == [*filter(None, texts), *TEXTS]
    assert tally.no_text == 250
    assert tally.bytes_read == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_parquet_of_another_column(tmp_path):
    write_parquet(tmp_path / "a.parquet", **{"my-body.x": pa.array(TEXTS), "text": pa.array("abc")})
    assert read(f"parquet:{tmp_path}/a.parquet#my-body.x") == TEXTS


def test_parquet_strings_that_are_not_utf8(tmp_path):
    raw = pa.array([b"good text", b"\xff bad", b"good again"])
    write_parquet(tmp_path / "a.parquet", text=raw.view(pa.string()))
    tally = Tally()
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


def example_texts(first: int, last: int) -> list[str]:
    return [f"document number {i}, é and more" for i in range(first, last)]


SPLITS_OF_EXAMPLES = {"train": example_texts(0, 1500), "test": example_texts(1500, 1510)}


@functools.cache
def import_tfds():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its dependencies' deprecations are not ours
        import tensorflow_datasets
    return tensorflow_datasets


@functools.cache
def examples_class():
    """A builder; once a process, since tfds takes a name only once."""
    tfds = import_tfds()

    class Examples(tfds.core.GeneratorBasedBuilder):
        name = "fp8jax_examples"
        __module__ = "examples"  # tfds looks beside its file for metadata, if there is a file
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {
                "text": tfds.features.Text(),
                "title": np.str_,
                "n": np.int64,
                "names": tfds.features.Sequence(tfds.features.Text()),
                "raw": np.object_,
            }
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, dl_manager):
            return {split: self._generate_examples(t) for split, t in SPLITS_OF_EXAMPLES.items()}

        def _generate_examples(self, texts):
            for i, text in enumerate(texts):
                yield i, {
                    "text": text, "title": f"title {i}", "n": i, "names": [],
                    "raw": b"\xff" if i == 3 else b"raw text",
                }  # fmt: skip

    return Examples


@pytest.fixture(scope="module")
def tfds():
    return import_tfds()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """A dataset that tfds prepared; returns its folder and its builder class."""
    folder = tmp_path_factory.mktemp("tfds")
    examples_class()(data_dir=folder, file_format="array_record").download_and_prepare()
    return folder, examples_class()


@pytest.fixture
def data_dir(tfds, dataset, monkeypatch):
    """Has tfds look where the dataset is, as TFDS_DATA_DIR does where tfds is not imported yet."""
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(dataset[0]))


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
    tally = Tally()
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
        ("no_such_set", "unknown TensorFlow dataset 'no_such_set'.* nor was it prepared in .*tfds"),
        ("fp8jax_examples:9.9.9", "cannot be loaded at version 9.9.9, only: 1.0.0"),
        ("fp8jax_examples@valid", r"Unknown split 'valid'. Should be one of \['train', 'test'\]"),
        ("fp8jax_examples@train[:x]", r"train\[:x\]"),
        ("fp8jax_examples#body", r"no feature 'body'. There are: .*n \(Tensor\)"),
        ("fp8jax_examples#n", r"feature 'n' is no text. There are: .*n \(Tensor\)"),
        ("fp8jax_examples#names", "feature 'names' is no text"),
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
from fp8jax.sources import Tally, parse_sources
(source,) = parse_sources("tfds:fp8jax_examples")
assert "tensorflow_datasets" not in sys.modules
print(len(list(source.reader.documents(Tally()))), len(source.reader.files()))
assert "tensorflow" not in sys.modules
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "TFDS_DATA_DIR": str(dataset[0])},
        capture_output=True,
        text=True,
    )
    assert result.stdout == "1510 2\n", result.stderr
