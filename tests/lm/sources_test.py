"""The specs of sources: names, weights and kinds, and every bad one refused with its name."""

import errno
import os
import sysconfig
from fractions import Fraction
from pathlib import Path

import pytest

from fp8jax.lm.data.files import Tally
from fp8jax.lm.sources import SOURCES, Source, parse_sources

TEXTS = ["the first document", "é and \u2028 in the second one", "a third, with\nlines\r\n"]


def read(spec: str, tally: Tally | None = None) -> list[str]:
    """All documents of one source."""
    (source,) = parse_sources(spec)
    return list(source.reader.documents(Tally() if tally is None else tally))


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
        Fraction(7, 10),
        Fraction(1, 4),
        Fraction(3),
    ]
    assert weights("text:DIR/a[*]b.txt,python_stdlib") == [None, None]


@pytest.mark.parametrize("pattern", ["sub/*.txt", "**/*.txt", "sub/a.txt"])
def test_a_folder_that_cannot_be_read_is_refused(tmp_path, monkeypatch, pattern):
    """`glob` passes over it: the run would train on less text."""
    (tmp_path / "sub").mkdir()
    for place in ("a.txt", "sub/a.txt"):
        (tmp_path / place).write_text("text")
    scandir = os.scandir

    def without_sub(path):
        if "sub" in os.fspath(path):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return scandir(path)

    (source,) = parse_sources(f"text:{tmp_path}/{pattern}")
    assert source.reader.files()
    monkeypatch.setattr(os, "scandir", without_sub)
    with pytest.raises(ValueError, match=r"the folder '.*sub.*' cannot be read: Permission denied"):
        parse_sources(f"text:{tmp_path}/{pattern}")[0].reader.files()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("jsnol:DIR/a.txt", "unknown source 'jsnol'; did you mean 'jsonl'"),
        ("x=python_stdlb", "unknown source 'python_stdlb'; did you mean 'python_stdlib'"),
        ("/no/*.py", "has no kind in front of its path: text:/no/..py reads files"),
        ("", "unknown source ''. There are: python_stdlib, text, jsonl, parquet, tfds"),
        ("text:DIR/a.txt,", "unknown source ''"),
        ("text:DIR/none-*.txt", r"no file matches '.*none-\*\.txt'"),
        ("text:DIR", "no file matches"),
        ("text", "no file matches '', in the source 'text'"),
        ("jsonl:", "no file matches ''"),
        ("text:DIR/a.txt#split=", "#split= needs a separator, such as blank, in the source 'text:"),
        ("parquet:DIR/none#text", "no file matches '.*/none', in the source .*/none#text'"),
        ("python_stdlib:3.11", "takes no argument, got '3.11'"),
        ("tfds", r"expected NAME\[@SPLIT\]\[#FIELD\], got ''"),
        ("tfds:squad@", r"expected NAME\[@SPLIT\]\[#FIELD\], got 'squad@'"),
        ("text:DIR/a.txt,text:DIR/a.*", "two sources have the name {'text-a'}"),
        ("x=text:DIR/a.txt,x=python_stdlib", "two sources have the name {'x'}.*NAME=text:GLOB"),
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
            "a, c have a weight and b have none in .*to all sources.*or to none",
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


def test_a_link_to_what_is_not_there_is_named(tmp_path):
    (tmp_path / "0.txt").write_text("text")
    (tmp_path / "1.txt").symlink_to(tmp_path / "0.txt")
    assert len(parse_sources(f"text:{tmp_path}/*.txt")) == 1
    (tmp_path / "2.txt").symlink_to("gone.txt")
    with pytest.raises(ValueError, match="/2.txt is a link to gone.txt, which is not there"):
        parse_sources(f"text:{tmp_path}/*.txt")


def test_a_link_to_a_folder_is_followed_but_never_twice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("elsewhere", "data/a", "data/.hidden"):
        Path(folder).mkdir(parents=True)
        Path(folder, "0.txt").write_text(folder)
    Path("data/b").symlink_to(tmp_path / "elsewhere")
    assert read("text:data/**/*.txt") == ["data/a", "elsewhere"]
    Path("data/.hidden/a").symlink_to("../a")  # ** does not go there
    assert len(read("text:data/**/*.txt")) == 2
    Path("data/c").symlink_to("a")
    for pattern in ("data/**/*.txt", "data/../data/*/*.txt", f"{tmp_path}/data/**/*.txt"):
        with pytest.raises(
            ValueError, match="twice, since a link makes .*data/[ac] and .*data/[ac]"
        ):
            parse_sources(f"text:{pattern}")
    assert read("text:data/b/**/*.txt") == ["elsewhere"]
    Path("data/c").unlink()
    Path("elsewhere/back").symlink_to("../data")
    with pytest.raises(ValueError, match="has no end: 'data/b/back' leads back to 'data'"):
        parse_sources("text:data/**/*.txt")
