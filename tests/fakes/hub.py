"""A hub of Hugging Face on a local port, with what downloads by `huggingface_hub` ask of it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest


@dataclass
class Repo:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    newest: str = ""  # of its branch main
    token: str = ""  # without which files are refused
    private: bool = False


@dataclass
class Hub:
    url: str
    repos: dict[str, Repo] = field(default_factory=dict)  # "models/ORG/NAME", "datasets/..."
    requests: list[str] = field(default_factory=list)

    def add(self, name: str, files: dict[str, bytes], **settings: Any) -> str:
        """Add a repository with its first commit, or one more commit of its branch main."""
        text = repr(sorted((path, _etag(data)) for path, data in files.items()))
        repo = self.repos.setdefault(name, Repo(**settings))
        repo.newest = hashlib.sha1(text.encode()).hexdigest()
        repo.commits[repo.newest] = files
        return repo.newest

    def add_model(self, name: str, folder: Path, **settings: Any) -> str:
        """Add the model in `folder` as ORG/NAME."""
        files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
        return self.add(f"models/{name}", files, **settings)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.requests.append(f"{self.command} {path}")
        is_page = not path.startswith(("api/", "datasets/"))
        parts = ["models", *path.split("/")] if is_page else path.removeprefix("api/").split("/")
        name, (kind, revision, *rest) = "/".join(parts[:3]), [*parts[3:], "", ""]
        repo = self.hub.repos.get(name)
        if repo is None:
            return self._error("RepoNotFound", 401)
        allowed = self.headers.get("Authorization") == f"Bearer {repo.token}"
        if repo.private and not allowed:
            return self._error("RepoNotFound", 401)
        commit = repo.newest if revision in ("", "main") else revision
        if commit not in repo.commits:
            return self._error("RevisionNotFound", 404)
        files = repo.commits[commit]
        if kind == "resolve":
            file = "/".join(rest).rstrip("/")
            if repo.token and not allowed:
                return self._error("GatedRepo", 403)
            if file not in files:
                return self._error("EntryNotFound", 404)
            about = {"X-Repo-Commit": commit, "ETag": f'"{_etag(files[file])}"'}
            return self._answer(files[file], 200, **about)
        sizes = {path: {"size": len(data), "oid": _etag(data)} for path, data in files.items()}
        if kind == "tree":
            return self._json([{"type": "file", "path": path} | one for path, one in sizes.items()])
        siblings = [{"rfilename": path} | one for path, one in sizes.items()]
        facts = {"id": name.partition("/")[2], "sha": commit, "siblings": siblings, "tags": []}
        return self._json(facts | {"private": repo.private, "downloads": 0, "likes": 0})

    def _error(self, code: str, status: int) -> None:
        self._json({"error": code}, status, **{"X-Error-Code": code, "X-Error-Message": code})

    def _json(self, value: Any, status: int = 200, **headers: str) -> None:
        headers["Content-Type"] = "application/json"
        self._answer(json.dumps(value).encode(), status, **headers)

    def _answer(self, data: bytes, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, text in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _etag(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def serving() -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    server.RequestHandlerClass = type("Handler", (_Handler,), {"hub": hub})
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def environment(hub: Hub, home: Path) -> dict[str, str]:
    """The variables with which a process asks `hub`, its cache below `home`."""
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_TOKEN": ""}


def ask_there(hub: Hub, home: Path, patch: pytest.MonkeyPatch) -> None:
    """Have this process, which has read its variables long ago, ask `hub`."""
    constants: Any = pytest.importorskip("huggingface_hub.constants")
    for name, value in environment(hub, home).items():
        patch.setenv(name, value)
    patch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
