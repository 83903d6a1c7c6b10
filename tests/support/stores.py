"""S3 as moto serves it on loopback."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BUCKET = "data"


@contextlib.contextmanager
def s3_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of a store with the empty bucket `BUCKET`, which epath finds as well."""
    boto3 = pytest.importorskip("boto3", reason="a peer; pip install -e '.[peers]'")
    pytest.importorskip("s3fs", reason="a peer; pip install -e '.[peers]'")
    server_of = pytest.importorskip("moto.server", reason="a peer; pip install -e '.[peers]'")
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


def upload(store: Any, folder: Path, name: str) -> None:
    """Puts the files of a folder into the bucket, below a name."""
    for path in folder.rglob("*"):
        if path.is_file():
            store.upload_file(str(path), BUCKET, f"{name}/{path.relative_to(folder).as_posix()}")


def forget_listings() -> None:
    """What another process does not have: epath's client, and what it knows of the store."""
    import s3fs
    from etils import epath

    epath.backend.fsspec_backend._get_filesystem.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()
