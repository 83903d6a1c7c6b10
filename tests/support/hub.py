"""A small server of the API of Hugging Face's hub, for the package huggingface_hub."""

import contextlib
import dataclasses
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

_INFO = re.compile(r"/api/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)/revision/(?P<rev>[^/]+)")
_TREE = re.compile(r"/api/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)/tree/(?P<rev>[^/]+)")
_FILE = re.compile(
    r"/(?P<data>datasets/)?(?P<name>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<path>.+)"
)


@dataclasses.dataclass(kw_only=True)
class Hub:
    """A hub on loopback.

    Attributes:
      url: for HF_ENDPOINT.
      folders: what it serves: ("models" or "datasets", ORG/NAME, revision) -> a folder. A commit is
        the hash of these three.
      gated: names whose files it does not give.
      asked: method and path of every request.
    """

    url: str
    folders: dict[tuple[str, str, str], Path] = dataclasses.field(default_factory=dict)
    gated: set[str] = dataclasses.field(default_factory=set)
    asked: list[str] = dataclasses.field(default_factory=list)

    def commit(self, kind: str, name: str, revision: str = "main") -> str:
        return hashlib.sha1(f"{kind} {name} {revision}".encode()).hexdigest()

    def downloads(self) -> list[str]:
        """The paths of the files that were given, in order of their names."""
        return sorted(_FILE.fullmatch(each[4:])["path"] for each in self.asked if _is_get(each))


def _is_get(asked: str) -> bool:
    return asked.startswith("GET ") and _FILE.fullmatch(asked[4:]) is not None


@contextlib.contextmanager
def hub() -> Iterator[Hub]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.hub = Hub(url=f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_) -> None:
        pass

    def _answer(self) -> None:
        hub, path = self.server.hub, unquote(self.path.partition("?")[0])
        # A revision may have a /, which comes quoted.
        quoted = self.path.partition("?")[0]
        hub.asked.append(f"{self.command} {path}")
        if found := _INFO.fullmatch(quoted):
            self._repository(found["kind"], found["name"], unquote(found["rev"]), "info")
        elif found := _TREE.fullmatch(quoted):
            self._repository(found["kind"], found["name"], found["rev"], "tree")
        elif found := _FILE.fullmatch(quoted):
            self._file(found)
        else:
            self._send(404, b"{}")

    def _repository(self, kind: str, name: str, revision: str, what: str) -> None:
        hub = self.server.hub
        if not any(key[:2] == (kind, name) for key in hub.folders):
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        key = self._key(kind, name, revision)
        if key is None:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        folder = hub.folders[key]
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        names = [path.relative_to(folder).as_posix() for path in files]
        if what == "info":
            siblings = [{"rfilename": each} for each in names]
            answer = {"id": name, "sha": hub.commit(*key), "siblings": siblings}
        else:
            answer = [
                {"type": "file", "path": each, "size": path.stat().st_size, "oid": _etag(path)}
                for each, path in zip(names, files, strict=True)
            ]
        self._send(200, json.dumps(answer).encode())

    def _file(self, found: re.Match) -> None:
        hub, kind = self.server.hub, "datasets" if found["data"] else "models"
        key = self._key(kind, found["name"], found["rev"])
        if key is None:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
            return
        if found["name"] in hub.gated:
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
            return
        path = hub.folders[key] / unquote(found["path"])
        if not path.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        headers = {"ETag": f'"{_etag(path)}"', "X-Repo-Commit": hub.commit(*key)}
        self._send(200, path.read_bytes(), headers)

    def _key(self, kind: str, name: str, revision: str) -> tuple[str, str, str] | None:
        """The key of a revision, which is a name or a commit."""
        hub = self.server.hub
        for key in hub.folders:
            if key[:2] == (kind, name) and revision in (key[2], hub.commit(*key)):
                return key
        return None

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _etag(path: Path) -> str:
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
