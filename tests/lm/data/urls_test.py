"""Data in object stores: S3 as moto serves it on loopback. Nothing here tests gs://."""

import sys
from hashlib import sha256

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from etils import epath
from fsspec.registry import _registry

from fp8jax.lm.data import digests
from fp8jax.lm.data.bad_examples import BAD_EXAMPLES
from fp8jax.lm.data.byte_tokenizer import ByteTokenizer
from fp8jax.lm.data.token_cache import tokenize_sources
from fp8jax.lm.data.urls import as_path, is_url
from fp8jax.lm.sources import parse_sources
from tests.support.commands import command_here
from tests.support.stores import BUCKET, forget_listings, s3_store
from tests.support.text import compressed, generated_text, json_lines


@pytest.fixture
def store(monkeypatch):
    with s3_store(monkeypatch) as client:
        yield client


def test_urls_that_are_refused(monkeypatch):
    assert is_url("s3://a/b") and not is_url("/a/b") and not is_url("c:/b")
    for spec, message in [
        ("jsonl:http://a/b.jsonl", "http:// is not read. There are: gs://, s3://"),
        ("jsonl:s3://bucket", "expected s3://bucket/GLOB, got s3://bucket"),
        ("jsonl:s3://b/**/x", r"\*\* is not for object stores; name each folder"),
        ("jsonl:gs:///x", "expected gs://BUCKET/…, got gs:///x"),
    ]:
        with pytest.raises(ValueError, match=message):
            parse_sources(spec)
    with pytest.raises(ValueError, match="cache_dir=gs://a/b is a URL: name a folder of a mounted"):
        digests.digests([[]], "gs://a/b")
    with pytest.raises(SystemExit, match="--to=hf:s3://a/b is a URL: name a folder here"):
        with command_here("convert") as run:
            run("--from=x", "--to=hf:s3://a/b", "--format=bf16")
    # Without the package; what fsspec and epath keep of it may come from other tests.
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(_registry, "s3", raising=False)
    epath.backend.fsspec_backend._get_filesystem.cache_clear()
    with pytest.raises(ValueError, match="s3:// needs the package s3fs: pip install s3fs"):
        parse_sources("jsonl:s3://bucket/*.jsonl")


@pytest.mark.full
def test_tokens_are_those_of_the_files_here(store, tmp_path):
    texts = generated_text(documents=60)
    (tmp_path / "a").mkdir()
    pq.write_table(pa.table({"text": texts[:20]}), tmp_path / "a" / "x.parquet")
    pq.write_table(pa.table({"text": texts[20:30]}), tmp_path / "a" / "y.parquet")
    (tmp_path / "a" / "z.jsonl.zst").write_bytes(compressed(json_lines(texts[30:50]), ".zst"))
    (tmp_path / "a" / "w.jsonl").write_bytes(json_lines(texts[50:]))
    (tmp_path / "t.txt").write_text("\n\n".join(texts))
    paths = [path for path in tmp_path.rglob("*") if path.is_file()]
    for path in paths:
        store.upload_file(str(path), BUCKET, path.relative_to(tmp_path).as_posix())

    def tokens(root: str, cache: str):
        spec = (
            f"parquet:{root}/a/*.parquet,jsonl:{root}/*/*.jsonl.zst,text:{root}/t.txt#split=blank"
            f",w=jsonl:{root}/a/w.jsonl"
        )
        made = tokenize_sources(
            parse_sources(spec),
            ByteTokenizer(),
            valid_fraction=0.2,
            cache_dir=tmp_path / cache,
            answer=BAD_EXAMPLES["error"],
        )
        streams = made.streams["train"]
        return made.fingerprint, {name: bytes(streams[name].tokens) for name in streams}

    there, here = tokens(f"s3://{BUCKET}", "there"), tokens(str(tmp_path), "here")
    assert there == here


@pytest.mark.full
def test_a_hash_is_kept_until_the_store_has_another_object(store, monkeypatch, tmp_path):
    monkeypatch.setattr(digests, "_SETTLED_NS", -(10**10))
    store.put_object(Bucket=BUCKET, Key="t.txt", Body=b"first")
    files = [[as_path(f"s3://{BUCKET}/t.txt")]]
    assert digests.digests(files, tmp_path) == [[[".txt", sha256(b"first").hexdigest()]]]
    (kept,) = (tmp_path / digests.FOLDER).glob("*.json")
    kept.write_text(kept.read_text().replace(sha256(b"first").hexdigest(), "mark"))
    assert digests.digests(files, tmp_path) == [[[".txt", "mark"]]]
    store.put_object(Bucket=BUCKET, Key="t.txt", Body=b"another")
    forget_listings()
    assert digests.digests(files, tmp_path) == [[[".txt", sha256(b"another").hexdigest()]]]


@pytest.mark.full
def test_what_a_store_does_not_have(store):
    with pytest.raises(ValueError, match=f"no file matches 's3://{BUCKET}/x/"):
        parse_sources(f"text:s3://{BUCKET}/x/*")
    with pytest.raises(ValueError, match="s3://none"):
        parse_sources("text:s3://none/x/*")
