"""Data in object stores: S3 as moto serves it on loopback. Nothing here tests gs://."""

import sys
from hashlib import sha256

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fp8jax.lm.data import digests
from fp8jax.lm.data.bad_examples import BAD_EXAMPLES
from fp8jax.lm.data.byte_tokenizer import ByteTokenizer
from fp8jax.lm.data.token_cache import tokenize_sources
from fp8jax.lm.data.urls import as_path, is_url
from fp8jax.lm.sources import parse_sources
from tests.support.text import compressed, generated_text, json_lines

BUCKET = "data"


def test_urls_that_are_refused(monkeypatch):
    assert is_url("s3://a/b") and not is_url("/a/b") and not is_url("c:/b")
    for spec, message in [
        ("jsonl:http://a/b.jsonl", "http:// is not read. There are: gs://, s3://"),
        ("jsonl:s3://bucket", "expected s3://BUCKET/GLOB, got s3://bucket"),
        ("jsonl:s3://b/**/x", r"\*\* is not for object stores; name each folder"),
        ("jsonl:gs:///x", "expected gs://BUCKET/GLOB, got gs:///x"),
    ]:
        with pytest.raises(ValueError, match=message):
            parse_sources(spec)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ValueError, match="s3:// needs the package s3fs: pip install s3fs"):
        parse_sources("jsonl:s3://bucket/*.jsonl")


@pytest.fixture
def store(monkeypatch):
    """A client of an empty bucket, which epath finds as well."""
    boto3 = pytest.importorskip("boto3", reason="a peer; pip install 'fp8jax[peers]'")
    pytest.importorskip("s3fs", reason="a peer; pip install 'fp8jax[peers]'")
    server_of = pytest.importorskip("moto.server", reason="a peer; pip install 'fp8jax[peers]'")
    server = server_of.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    forget_listings()
    yield client
    forget_listings()
    server.stop()


def forget_listings() -> None:
    """What another process does not have: epath's client, and what it knows of the store."""
    import s3fs
    from etils import epath

    epath.backend.fsspec_backend._get_filesystem.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()


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
