"""Documents to cached streams: each once, on one side, rebuilt when and only when need be."""

import builtins
import concurrent.futures
import errno
import io
import itertools
import json
import os
import queue
import re
import shutil
import socket
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from fp8jax.lm.data import cache_folder, digests, token_cache
from fp8jax.lm.data.bad_examples import BAD_EXAMPLES
from fp8jax.lm.data.bpe import load_bpe, train_bpe
from fp8jax.lm.data.byte_tokenizer import ByteTokenizer
from fp8jax.lm.data.documents import HELD_OUT, MIN_DOCUMENT_BYTES, cut
from fp8jax.lm.data.token_cache import TokenizedSources, TokenStream, tokenize_sources
from fp8jax.lm.sources import SOURCES, parse_sources, training_documents
from tests.support.text import generated_text, write_generated_text, write_jsonl

BYTES = ByteTokenizer()


def build(
    data: str, cache: Path, *, valid_fraction=0.2, tokenizer=BYTES, bad_examples="error"
) -> TokenizedSources:
    return tokenize_sources(
        parse_sources(data),
        tokenizer,
        valid_fraction=valid_fraction,
        cache_dir=cache / "cache",
        answer=BAD_EXAMPLES[bad_examples],
    )


def entries(tmp_path: Path) -> list[Path]:
    """What is in the cache besides locks and hashes."""
    return [
        path
        for path in (tmp_path / "cache").iterdir()
        if path.name not in (cache_folder.LOCKS, digests.FOLDER)
    ]


def documents_of(stream: TokenStream) -> list[str]:
    """The documents back from a stream."""
    return [BYTES.decode(part) for part in np.split(stream.tokens, stream.starts)[1:]]


def assert_same(left: TokenizedSources, right: TokenizedSources):
    assert left.streams.keys() == right.streams.keys()
    for split, streams in left.streams.items():
        assert list(streams) == list(right.streams[split])
        for name, stream in streams.items():
            for part in ("tokens", "starts"):
                ours, theirs = (getattr(s, part) for s in (stream, right.streams[split][name]))
                assert ours.dtype == theirs.dtype
                np.testing.assert_array_equal(ours, theirs)


# Streams.


def test_all_documents_arrive_once_in_order(tmp_path):
    texts = generated_text(documents=100)
    corpus = build(write_jsonl(tmp_path / "a.jsonl", texts), tmp_path)
    train, valid = (documents_of(corpus.streams[split]["jsonl-a"]) for split in ("train", "valid"))
    assert sorted(train + valid) == sorted(texts)
    assert train == [text for text in texts if text in train]
    assert valid == [text for text in texts if text in valid]
    tokens = corpus.streams["train"]["jsonl-a"].tokens
    assert (tokens[0], tokens[-1]) == (BYTES.bos, BYTES.eos)
    (stats,) = corpus.stats
    assert stats.documents == {"train": len(train), "valid": len(valid)}
    assert stats.bytes == {"train": len("".join(train)), "valid": len("".join(valid))}
    assert stats.tokens["train"] == stats.bytes["train"] + 2 * len(train)
    assert 5 < len(valid) < 40  # a fifth of a hundred, give or take


def test_adding_a_document_moves_no_other(tmp_path):
    texts = generated_text(documents=60)
    before = build(write_jsonl(tmp_path / "a.jsonl", texts), tmp_path)
    more = ["A new first document.", *texts[:30], "Another one in between.", *texts[30:]]
    after = build(write_jsonl(tmp_path / "a.jsonl", more), tmp_path)
    for split in ("train", "valid"):
        old, new = (documents_of(c.streams[split]["jsonl-a"]) for c in (before, after))
        assert old == [text for text in new if text in texts]


def test_duplicates_stay_on_one_side(tmp_path):
    texts = generated_text(documents=40) * 2
    corpus = build(write_jsonl(tmp_path / "a.jsonl", texts), tmp_path)
    train, valid = (documents_of(corpus.streams[split]["jsonl-a"]) for split in ("train", "valid"))
    assert not set(train) & set(valid)


def test_several_sources(tmp_path):
    first = write_generated_text(tmp_path, seed=1)
    for number, text in enumerate(generated_text(documents=50, seed=2)):
        (tmp_path / f"{number:03}.txt").write_text(text)
    corpus = build(f"{first}, notes=text:{tmp_path}/*.txt", tmp_path)
    alone = [build(first, tmp_path), build(f"notes=text:{tmp_path}/*.txt", tmp_path)]
    for split, streams in corpus.streams.items():
        assert list(streams) == ["jsonl-generated-1", "notes"]
        for (name, stream), single in zip(streams.items(), alone, strict=True):
            assert documents_of(stream) == documents_of(single.streams[split][name])
    assert len({corpus.fingerprint, alone[0].fingerprint, alone[1].fingerprint}) == 3
    assert corpus.stats[1].skipped() == (
        "skipped 0 of 50 files (not UTF-8) and 0 documents under 16 bytes"
    )


def test_large_vocabularies_are_stored_in_32_bits(tmp_path):
    class Wide(ByteTokenizer):
        fingerprint = "wide"

        def __init__(self):
            for name, value in {"vocab_size": 70_000, "bos": 69_998, "eos": 69_999}.items():
                object.__setattr__(self, name, value)

        def encode(self, text):
            return super().encode(text) + 69_000

    wide = Wide()
    spec = write_generated_text(tmp_path)
    stream = build(spec, tmp_path, tokenizer=wide).streams["train"]["jsonl-generated-0"]
    narrow = build(spec, tmp_path).streams["train"]["jsonl-generated-0"]
    assert (stream.tokens.dtype, narrow.tokens.dtype) == (np.uint32, np.uint16)
    text = narrow.tokens < 256
    np.testing.assert_array_equal(stream.tokens[text], narrow.tokens[text].astype(int) + 69_000)
    assert stream.tokens[0] == 69_998


def test_python_stdlib_builds(tmp_path, capsys):
    corpus = build("python_stdlib", tmp_path, valid_fraction=0.05)
    assert corpus.stats[0].bytes["train"] > 5e6
    assert "import " in documents_of(corpus.streams["valid"]["python_stdlib"])[0]
    assert capsys.readouterr().err == ""  # no progress bar where stderr is no terminal


# The cache.


class CountingTokenizer(ByteTokenizer):
    """Counts calls, and does `hook(call number)` before each."""

    def __init__(self, hook=lambda call: None):
        super().__init__()
        object.__setattr__(self, "calls", 0)
        object.__setattr__(self, "hook", hook)

    def encode(self, text):
        object.__setattr__(self, "calls", self.calls + 1)
        self.hook(self.calls)
        return super().encode(text)


def rebuilds(data: str, cache: Path, **options) -> bool:
    """Whether building tokenizes anything; checks that the result is right either way."""
    counting = CountingTokenizer()
    corpus = build(data, cache, tokenizer=counting, **options)
    fresh = cache / "fresh"
    assert_same(corpus, build(data, fresh, **options))
    shutil.rmtree(fresh)
    return counting.calls > 0


def test_the_size_of_batches_changes_nothing(tmp_path, monkeypatch):
    """Of a byte-pair encoding, which encodes a batch on all cores."""
    spec = write_generated_text(tmp_path)
    train_bpe(iter(generated_text(documents=40)), 300).save(str(tmp_path / "bpe.json"))
    words = load_bpe(tmp_path / "bpe.json")
    monkeypatch.setattr(token_cache, "_BATCH_CHARACTERS", 1)  # one document
    single = build(spec, tmp_path / "single", tokenizer=words)
    for characters in (300, 2**22):
        monkeypatch.setattr(token_cache, "_BATCH_CHARACTERS", characters)
        assert_same(build(spec, tmp_path / str(characters), tokenizer=words), single)


def test_cache_is_used(tmp_path):
    spec = write_generated_text(tmp_path)
    assert rebuilds(spec, tmp_path)
    assert not rebuilds(spec, tmp_path)
    assert not rebuilds(f"jsonl-generated-0=0.7*{spec}", tmp_path)  # streams have no weights
    assert rebuilds(spec, tmp_path, valid_fraction=0.3)
    assert rebuilds(f"other={spec}", tmp_path)
    assert not rebuilds(spec, tmp_path)


def test_cache_depends_on_the_field(tmp_path):
    texts = generated_text(documents=40)
    lines = [json.dumps({"text": text, "body": text.upper()}) for text in texts]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    for field in ("text", "body"):
        assert rebuilds(f"jsonl:{tmp_path}/a.jsonl#{field}", tmp_path)
        assert not rebuilds(f"jsonl:{tmp_path}/a.jsonl#{field}", tmp_path)


def test_cache_of_a_corpus_that_moved_is_used(tmp_path):
    before = build(write_generated_text(tmp_path), tmp_path)
    (tmp_path / "elsewhere").mkdir()
    moved = f"jsonl:{shutil.move(tmp_path / 'generated-0.jsonl', tmp_path / 'elsewhere')}"
    assert not rebuilds(moved, tmp_path)
    assert build(moved, tmp_path).fingerprint == before.fingerprint


def test_an_edit_in_place_is_noticed(tmp_path):
    spec = write_generated_text(tmp_path)
    before = build(spec, tmp_path)
    path = tmp_path / "generated-0.jsonl"
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    content = path.read_bytes()
    path.write_bytes(content.replace(b".", b"!", 1))  # same size
    os.utime(path, ns=times)  # and the same date
    assert rebuilds(spec, tmp_path)
    assert build(spec, tmp_path).fingerprint != before.fingerprint
    path.write_bytes(content)
    assert not rebuilds(spec, tmp_path)  # the old streams are still there


def truncate(path: Path):
    os.truncate(path, path.stat().st_size - 2)


@pytest.mark.parametrize(
    ("pattern", "damage"),
    [
        ("*.train.tokens", truncate),
        ("*.valid.starts", truncate),
        ("*.train.starts", Path.unlink),
        ("manifest.json", Path.unlink),
        ("manifest.json", truncate),
        ("manifest.json", lambda path: path.write_text("{}")),
        ("manifest.json", lambda path: path.write_text("[]")),
        (".", lambda path: shutil.rmtree(path) or path.write_text("a file, not a folder")),
    ],
)
def test_a_damaged_cache_is_rebuilt(tmp_path, caplog, pattern, damage):
    spec = write_generated_text(tmp_path, documents=60)
    build(spec, tmp_path)
    (folder,) = entries(tmp_path)
    damage(folder if pattern == "." else next(folder.glob(pattern)))
    assert rebuilds(spec, tmp_path)
    assert "is damaged and will be rebuilt" in caplog.text
    assert not rebuilds(spec, tmp_path)
    assert [path.name for path in entries(tmp_path)] == [folder.name]


def test_an_interrupted_build_leaves_nothing(tmp_path):
    spec = write_generated_text(tmp_path)

    def interrupt(call):
        if call == 50:
            assert len(entries(tmp_path)) == 1  # the scratch folder
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(spec, tmp_path, tokenizer=CountingTokenizer(interrupt))
    assert entries(tmp_path) == []
    assert rebuilds(spec, tmp_path)


@pytest.mark.parametrize("damaged", [False, True])
def test_two_builds_at_once(tmp_path, damaged, monkeypatch):
    """On a file system without locks."""
    refuse = mock.Mock(side_effect=OSError(errno.ENOLCK, "no locks"))
    monkeypatch.setattr(cache_folder.fcntl, "flock", refuse)
    spec = write_generated_text(tmp_path)

    def build_meanwhile(call):
        if call == 50:
            build(spec, tmp_path)
            if damaged:
                truncate(next((tmp_path / "cache").glob("*/*.tokens")))

    corpus = build(spec, tmp_path, tokenizer=CountingTokenizer(build_meanwhile))
    assert not rebuilds(spec, tmp_path)
    (stream,) = corpus.streams["train"].values()
    assert len(documents_of(stream)) == corpus.stats[0].documents["train"]
    assert len(entries(tmp_path)) == 1


def test_one_builds_and_the_others_wait_and_say_so(tmp_path, monkeypatch, capsys):
    """Each of them a thread, whose files are its own."""
    monkeypatch.setattr(cache_folder, "_LOOK_EVERY_S", 0.01)
    spec, calls, others = write_generated_text(tmp_path), [], []

    def others_come(call):
        calls.append(call)
        if call == 50:
            for _ in range(2):
                others.append(pool.submit(build, spec, tmp_path))
            while capsys_said.count("waiting: ") < 2:
                capsys_said.extend(line[:9] for line in capsys.readouterr().err.splitlines())

    capsys_said: list[str] = []
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = build(spec, tmp_path, tokenizer=CountingTokenizer(others_come))
        for other in others:
            assert_same(first, other.result())
    assert len(calls) == sum(first.stats[0].documents.values())  # nobody else tokenized


def test_a_builder_that_fails_lets_the_next_one_build(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_folder, "_LOOK_EVERY_S", 0.01)
    lines = queue.SimpleQueue()  # not capsys, which loses what is written while it is read
    monkeypatch.setattr(cache_folder, "print", lambda line, **_: lines.put(line), raising=False)
    spec, others = write_generated_text(tmp_path), []

    def fail(call):
        others.append(pool.submit(build, spec, tmp_path))
        said = lines.get(timeout=30)
        name = f"process {os.getpid()} on {socket.gethostname()}"
        folder = f"{tmp_path}/cache/corpus-[0-9a-f]{{16}}"
        assert re.fullmatch(rf"waiting: {name} makes the token cache {folder} \(0 s\)", said)
        raise KeyboardInterrupt

    with concurrent.futures.ThreadPoolExecutor() as pool:
        with pytest.raises(KeyboardInterrupt):
            build(spec, tmp_path, tokenizer=CountingTokenizer(fail))
        assert others[0].result().stats[0].documents["train"]


# Hashes that are kept.


@pytest.fixture
def reads(monkeypatch):
    """The files that were hashed, in order; all files are settled."""
    monkeypatch.setattr(digests, "_SETTLED_NS", -1)
    read, found = digests._read, []
    monkeypatch.setattr(digests, "_read", lambda path: found.append(Path(path).name) or read(path))
    return found


def some_files(folder: Path) -> str:
    for name, text in zip("abc", generated_text(documents=3), strict=True):
        (folder / f"{name}.txt").write_text(text * 9)
    return f"text:{folder}/*.txt"


def test_a_later_start_reads_no_text(tmp_path, reads, monkeypatch):
    spec = some_files(tmp_path)
    first = build(spec, tmp_path)
    assert reads == ["a.txt", "b.txt", "c.txt"]
    opened, open_file = [], io.open

    def watched(file, *arguments, **options):
        opened.append(str(file))
        return open_file(file, *arguments, **options)

    for module in (io, builtins):
        monkeypatch.setattr(module, "open", watched)
    again = build(spec, tmp_path)
    assert again.fingerprint == first.fingerprint and len(reads) == 3
    assert opened and not any(name.endswith(".txt") for name in opened)
    (kept,) = (tmp_path / "cache" / digests.FOLDER).glob("*.json")
    mode = (tmp_path / "a.txt").stat().st_mode
    assert kept.stat().st_mode == mode  # other users of the cache may read it


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_text(path.read_text().replace("e", "a")),
        lambda path: path.write_text(path.read_text() + "."),
        lambda path: (path.replace(path.with_suffix(".old")), path.write_text("other " * 99)),
    ],
)
def test_a_change_that_keeps_the_date_is_read(tmp_path, reads, change):
    spec = some_files(tmp_path)
    first, path = build(spec, tmp_path), tmp_path / "b.txt"
    before = path.stat()
    time.sleep(0.02)  # the clock of files ticks
    change(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert build(spec, tmp_path).fingerprint != first.fingerprint
    assert reads == ["a.txt", "b.txt", "c.txt", "b.txt"]
    del reads[:]
    build(spec, tmp_path)
    assert reads == []


def test_a_file_that_has_just_changed_is_not_kept(tmp_path, reads, monkeypatch):
    spec = some_files(tmp_path)
    monkeypatch.setattr(digests, "_SETTLED_NS", 2 * 10**9)
    build(spec, tmp_path)
    build(spec, tmp_path)
    assert reads == ["a.txt", "b.txt", "c.txt"] * 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 3}', "null"])
def test_damaged_hashes_are_made_again(tmp_path, reads, text):
    spec = some_files(tmp_path)
    first = build(spec, tmp_path)
    (kept,) = (tmp_path / "cache" / digests.FOLDER).glob("*.json")
    good = kept.read_text()
    kept.write_text(text if text != '{"a": 3}' else good.replace('"file"', '"fil"'))
    assert build(spec, tmp_path).fingerprint == first.fingerprint
    assert len(reads) == 6 and kept.read_text() == good


def test_a_cache_that_cannot_be_written_is_read(tmp_path, monkeypatch):
    spec = some_files(tmp_path)
    first = build(spec, tmp_path)
    shutil.rmtree(tmp_path / "cache" / digests.FOLDER)
    shutil.rmtree(tmp_path / "cache" / cache_folder.LOCKS)
    mkdir = Path.mkdir

    def refuse(path, *arguments, **options):
        if tmp_path / "cache" in path.parents:
            raise PermissionError(13, "read-only")
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", refuse)  # root may write anywhere
    assert build(spec, tmp_path).fingerprint == first.fingerprint


# What is refused or skipped.


@pytest.mark.parametrize(
    "line",
    [
        '{"text": "no end',
        "not json",
        '{"txt": "another key"}',
        '{"text": 3}',
        '{"text": null}',
        '["text"]',
        '"text"',
        "3",
        r'{"text": "a lone surrogate: \ud800"}',
        '{"text": "two on"} {"text": "one line"}',
    ],
)
def test_a_bad_line_of_json_is_named(tmp_path, line):
    good = json.dumps({"text": "a document that is fine"})
    (tmp_path / "a.jsonl").write_text(f"{good}\n\n{line}\n{good}\n")
    with pytest.raises(ValueError, match=r'a\.jsonl, line 3: expected {"text": "…"}, got '):
        build(f"jsonl:{tmp_path}/a.jsonl", tmp_path)
    assert entries(tmp_path) == []


def test_files_that_are_not_utf8_are_skipped_and_named(tmp_path, caplog):
    for number, text in enumerate(generated_text(documents=40)):
        (tmp_path / f"{number:02}.txt").write_text(text)
    wanted = build(f"x=text:{tmp_path}/*.txt", tmp_path)
    (tmp_path / "latin.txt").write_bytes("é, and enough text beyond it".encode("latin-1"))
    (tmp_path / "cut.txt").write_bytes(b"ends in mid-character, at \xc3")
    (tmp_path / "short-1.txt").write_text("x" * (MIN_DOCUMENT_BYTES - 1))
    (tmp_path / "short-2.txt").write_text("")
    with pytest.raises(ValueError, match="cut.txt: it is not UTF-8.*; config.bad_examples=skip"):
        build(f"x=text:{tmp_path}/*.txt", tmp_path)
    corpus = build(f"x=text:{tmp_path}/*.txt", tmp_path, bad_examples="skip")
    (stats,) = corpus.stats
    assert (stats.files, stats.not_utf8, stats.too_short) == (44, 2, 2)
    assert stats.brief().endswith("; 2 left out, under 16 bytes")
    assert "latin.txt: it is not UTF-8" in caplog.text and "cut.txt" in caplog.text
    assert_same(corpus, wanted)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 5.0, float("nan")])
def test_bad_fractions(tmp_path, fraction):
    with pytest.raises(ValueError, match=f"between 0 and 1, got {fraction}"):
        build(write_generated_text(tmp_path), tmp_path, valid_fraction=fraction)
    with pytest.raises(ValueError, match=f"between 0 and 1, got {fraction}"):
        training_documents(write_generated_text(tmp_path), fraction)


def test_a_source_without_documents_has_empty_streams(tmp_path, caplog):
    (tmp_path / "a.txt").write_bytes(b"\xff" * 100)
    corpus = build(f"x=text:{tmp_path}/*.txt", tmp_path, bad_examples="skip")
    assert [len(s["x"].tokens) + len(s["x"].starts) for s in corpus.streams.values()] == [0, 0]
    assert "a.txt: it is not UTF-8" in caplog.text


def test_records_without_text_are_counted(tmp_path, monkeypatch):
    class Reader:
        label, reads = "", ()

        def files(self):
            return []

        def documents(self, tally):
            tally.no_text += 3
            return iter(["a document that is fine", "short"])

    monkeypatch.setitem(SOURCES, "odd", lambda argument: Reader())
    (stats,) = build("odd", tmp_path).stats
    assert stats.skipped() == (
        "skipped 0 of 0 files (not UTF-8) and 1 documents under 16 bytes, "
        "and 3 records without text"
    )


# Documents for a tokenizer.


def test_training_documents_are_those_of_the_corpus(tmp_path):
    spec = f"2*{write_generated_text(tmp_path, seed=1)}, 1*{write_generated_text(tmp_path, seed=2)}"
    with (tmp_path / "generated-2.jsonl").open("a") as file:
        file.write(json.dumps({"text": "short"}))
    corpus = build(spec, tmp_path)
    streams = corpus.streams["train"].values()
    wanted = list(itertools.chain(*map(documents_of, streams)))
    assert list(training_documents(spec, 0.2)) == wanted
    assert len(wanted) == sum(stats.documents["train"] for stats in corpus.stats)


def test_training_documents_refuse_bad_specs_at_the_call():
    with pytest.raises(ValueError, match="unknown source 'jsnol'"):
        training_documents("jsnol:x", 0.1)


# Sources with too few documents.


def lines(count: int) -> str:
    return "".join(f"{text}\n" for text in generated_text(documents=count))


@pytest.mark.parametrize("seed", range(3))
def test_one_big_file_is_cut_so_that_some_of_it_validates(tmp_path, seed):
    """All of its text arrives, in order, and about 16 of its pieces validate."""
    text = str(seed) + lines(1000)
    (tmp_path / "a.txt").write_text(text)
    corpus = build(f"text:{tmp_path}/a.txt", tmp_path, valid_fraction=0.05)
    (stats,) = corpus.stats
    assert stats.piece_size == int(len(text) * 0.05 / HELD_OUT)
    train, valid = (documents_of(corpus.streams[split]["text-a"]) for split in ("train", "valid"))
    # A binomial number of mean 16 to 32 (a piece is at least half of its size) and a standard
    # deviation below 6: within four of them.
    assert 0 < len(valid) < 32 + 4 * 6 and len(train) > 5 * len(valid)
    left = text
    while left:  # each piece is the next one of its split
        (piece,) = {split[0] for split in (train, valid) if split and left.startswith(split[0])}
        assert len(piece) <= stats.piece_size and piece.endswith("\n")
        (train if train and train[0] == piece else valid).pop(0)
        left = left[len(piece) :]
    assert not train and not valid
    data = f"text:{tmp_path}/a.txt"
    assert_same(corpus, build(data, tmp_path / "again", valid_fraction=0.05))
    learned = list(training_documents(data, 0.05))
    assert learned == documents_of(corpus.streams["train"]["text-a"])


def test_documents_of_both_splits_are_not_cut(tmp_path):
    """However large and few they are: runs of before resume."""
    texts = [lines(200) + str(i) for i in range(8)]
    corpus = build(write_jsonl(tmp_path / "a.jsonl", texts), tmp_path, valid_fraction=0.4)
    (stats,) = corpus.stats
    assert min(stats.documents.values()) > 0 and sum(stats.documents.values()) == 8
    assert stats.piece_size == 0


def test_pieces_end_at_lines_or_words():
    assert list(cut("a" * 100, 40)) == ["a" * 40, "a" * 40, "a" * 20]
    assert list(cut("a" * 55, 40)) == ["a" * 55]  # what is left is too short for a document
    assert list(cut("a" * 30 + "\n" + "b c" * 20, 40))[0] == "a" * 30 + "\n"
    assert list(cut("a" * 10 + "\n" + "b" * 20 + " " + "c" * 60, 40))[0][-2:] == "b "
    assert list(cut("", 40)) == [""]


def test_a_cache_from_before_documents_were_cut_is_rebuilt(tmp_path, caplog):
    (tmp_path / "a.txt").write_text(lines(300))
    data = f"text:{tmp_path}/a.txt"
    corpus = build(data, tmp_path)
    (manifest,) = (tmp_path / "cache").glob("*/manifest.json")
    before = json.loads(manifest.read_text())
    del before["stats"][0]["piece_size"]
    manifest.write_text(json.dumps(before))
    assert not rebuilds(data, tmp_path)  # it has both splits
    before["stats"][0]["documents"] = {"train": 1, "valid": 0}
    manifest.write_text(json.dumps(before))
    assert_same(build(data, tmp_path), corpus)
    assert "was not cut, and has an empty split" in caplog.text
    assert json.loads(manifest.read_text())["stats"][0]["piece_size"] > 0
