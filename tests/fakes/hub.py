"""A hub of Hugging Face on a local port, with what `huggingface_hub` asks of it, and no more."""

from __future__ import annotations

import base64
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
    commits: dict[str, dict[str, bytes]]
    branches: dict[str, str]
    token: str = ""  # without which files are refused
    private: bool = False

    def at(self, revision: str) -> str | None:
        commit = self.branches.get(revision, revision)
        return commit if commit in self.commits else None


@dataclass
class Hub:
    repos: dict[str, Repo] = field(default_factory=dict)  # "models/ORG/NAME", "datasets/..."
    files: dict[str, bytes] = field(default_factory=dict)  # by path, for anyone
    requests: list[str] = field(default_factory=list)
    asked: dict[str, Any] = field(default_factory=dict)  # bodies of posts, by path
    url: str = ""
    cut_after: int | None = None  # bytes of an answer

    def add(self, name: str, files: dict[str, bytes], **settings: Any) -> str:
        """A repository at its first commit, or one more commit of its branch main."""
        text = repr(sorted((path, hashlib.sha1(data).hexdigest()) for path, data in files.items()))
        commit = hashlib.sha1(text.encode()).hexdigest()
        repo = self.repos.setdefault(name, Repo({}, {}, **settings))
        repo.commits[commit] = files
        repo.branches["main"] = commit
        return commit

    def add_model(self, name: str, folder: Path, **settings: Any) -> str:
        """The model in `folder` as ORG/NAME."""
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
        if path in self.hub.files:
            return self._data(self.hub.files[path])
        parts = path.split("/")
        if parts[0] == "api":
            kind, repo, rest = parts[1], "/".join(parts[2:4]), parts[4:]
        elif "resolve" in parts:
            kind = "datasets" if parts[0] == "datasets" else "models"
            parts = parts[kind == "datasets" :]
            repo, rest = "/".join(parts[:2]), parts[2:]
        else:
            return self._json({"error": "no such place"}, 404)
        found = self.hub.repos.get(f"{kind}/{repo}")
        if found is None or (found.private and not self._allowed(found)):
            return self._error("RepoNotFound", 401)
        what, revision = (*rest, "", "")[:2]
        commit = found.at(revision or "main")
        if commit is None:
            return self._error("RevisionNotFound", 404)
        files = found.commits[commit]
        if what == "resolve":
            name = "/".join(rest[2:])
            if found.token and not self._allowed(found):
                return self._error("GatedRepo", 403)
            if name not in files:
                return self._error("EntryNotFound", 404)
            headers = {"X-Repo-Commit": commit, "ETag": _etag(files[name])}
            return self._data(files[name], 200, **headers)
        if what == "tree":
            return self._json(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": _etag(data)[1:-1]}
                    for name, data in files.items()
                ]
            )
        siblings = [
            {"rfilename": name, "size": len(data), "blobId": _etag(data)[1:-1]}
            for name, data in files.items()
        ]
        facts = {"id": repo, "sha": commit, "siblings": siblings, "tags": []}
        return self._json(facts | {"private": found.private, "downloads": 0, "likes": 0})

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.requests.append(f"POST {path}")
        text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") is None:
            return self._json({"error": "who are you?"}, 401)
        parts = path.split("/")
        if path == "api/repos/create":
            asked = json.loads(text)
            name = f"models/{asked.get('organization') or 'me'}/{asked['name']}"
            private = bool(asked.get("private")) or asked.get("visibility") == "private"
            if name in self.hub.repos:
                return self._json({"error": "it is there", "url": self._page(name)}, 409)
            token = self.headers["Authorization"].removeprefix("Bearer ") if private else ""
            self.hub.add(name, {}, private=private, token=token)
            return self._json({"url": self._page(name)})
        if path == "api/validate-yaml":  # of a card
            return self._json({"errors": [], "warnings": []})
        if "preupload" in parts:
            files = json.loads(text)["files"]
            modes = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                for f in files
            ]
            return self._json({"files": modes})
        if "commit" in parts:
            name = "/".join(parts[1:4])
            lines = [json.loads(line) for line in text.splitlines()]
            files = {
                one["value"]["path"]: base64.b64decode(one["value"]["content"])
                for one in lines
                if one["key"] == "file"
            }
            self.hub.asked[name] = lines[0]["value"]
            commit = self.hub.add(name, files)
            url = f"{self._page(name)}/commit/{commit}"
            return self._json({"commitUrl": url, "commitOid": commit, "success": True})
        return self._json({"error": "no such place"}, 404)

    def _page(self, name: str) -> str:
        return f"{self.hub.url}/{name.removeprefix('models/')}"

    def _allowed(self, repo: Repo) -> bool:
        return self.headers.get("Authorization") == f"Bearer {repo.token}"

    def _error(self, code: str, status: int) -> None:
        self._json({"error": code}, status, **{"X-Error-Code": code, "X-Error-Message": code})

    def _json(self, value: Any, status: int = 200, **headers: str) -> None:
        self._data(
            json.dumps(value).encode(), status, **{"Content-Type": "application/json"}, **headers
        )

    def _data(self, data: bytes, status: int = 200, **headers: str) -> None:
        span = self.headers.get("Range", "")
        if span.startswith("bytes="):
            first, _, last = span.removeprefix("bytes=").partition("-")
            end = int(last) if last else len(data) - 1
            whole, data, status = len(data), data[int(first) : end + 1], 206
            headers["Content-Range"] = f"bytes {first}-{end}/{whole}"
        self.send_response(status)
        for name, text in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: self.hub.cut_after])
        self.close_connection = self.hub.cut_after is not None


def _etag(data: bytes) -> str:
    checksum = hashlib.sha1(b"blob %d\0" % len(data) + data)
    return f'"{checksum.hexdigest()}"'


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
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
