"""The journal of requests, answers and objects in one SQLite file, for a start after a kill.

A request is written before its future is sent, and its answer together with its changes. A
request that comes again finds itself here, so it is applied once. Bodies of passes and steps stay
until a snapshot of their model covers them: models are brought back by doing these again.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import xxhash

from umbra.proto.errors import UmbraError, UsageError

RETAIN_S = 3600.0  # answers stay so long, however often they are fetched
SCHEMA = 1  # of these tables
_TABLES = """
CREATE TABLE IF NOT EXISTS requests (
    id TEXT PRIMARY KEY, lane TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL,
    body BLOB, digest TEXT NOT NULL, state TEXT NOT NULL, media TEXT, answer BLOB, at REAL
);
CREATE INDEX IF NOT EXISTS by_lane ON requests (lane, seq);
CREATE TABLE IF NOT EXISTS objects (
    kind TEXT NOT NULL, id TEXT NOT NULL, parent TEXT NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (kind, id)
);
"""

State = Literal["queued", "done", "failed"]
Kind = Literal["session", "model", "sampler", "checkpoint"]


class ConflictError(UmbraError):
    """A request has the number of another one that differs."""


@dataclass(frozen=True, slots=True)
class FutureRequest:
    """A request as it was accepted: number `seq` of its model or sampling session."""

    id: str
    lane: str
    seq: int
    kind: str
    body: bytes
    state: State = "queued"


@dataclass(frozen=True, slots=True)
class FutureAnswer:
    """The answer to a future: the bytes of a media type."""

    body: bytes
    media: str = "application/json"
    failed: bool = False

    @classmethod
    def json(cls, value: Any) -> FutureAnswer:
        return cls(msgspec.json.encode(value))

    @classmethod
    def failure(cls, why: str, category: Literal["user", "server"]) -> FutureAnswer:
        body = msgspec.json.encode({"error": why, "category": category})
        return cls(body, failed=True)


class FuturesJournal:
    """The file, used by all threads of the server."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._file = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        (schema,) = self._file.execute("PRAGMA user_version").fetchone()
        if schema not in (0, SCHEMA):
            raise UsageError(f"{path} has schema {schema}, not {SCHEMA}: name another --dir")
        self._file.execute(f"PRAGMA user_version = {SCHEMA}")
        self._file.execute("PRAGMA journal_mode=WAL")
        self._file.execute("PRAGMA synchronous=FULL")  # acknowledged requests are on the disk
        self._file.executescript(_TABLES)

    def close(self) -> None:
        with self._lock:
            self._file.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all that happens within, or nothing of it."""
        with self._lock:
            if not self._depth:
                self._file.execute("BEGIN IMMEDIATE")
            self._depth += 1
            try:
                yield
            except BaseException:
                self._depth -= 1
                if not self._depth:
                    self._file.execute("ROLLBACK")
                raise
            self._depth -= 1
            if not self._depth:
                self._file.execute("COMMIT")

    def accept(self, request: FutureRequest) -> bool:
        """Write `request`; return false if it is here already.

        Raises:
            ConflictError: another one has its id.
        """
        digest = xxhash.xxh3_128_hexdigest(request.kind.encode() + b"\0" + request.body)
        with self.transaction():
            found = self._one("SELECT digest FROM requests WHERE id = ?", request.id)
            if found is not None:
                if found[0] != digest:
                    raise ConflictError(
                        f"request {request.id} came before with another content: a client has to "
                        "number its requests"
                    )
                return False
            self._file.execute(
                "INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?, 'queued', NULL, NULL, ?)",
                (request.id, request.lane, request.seq, request.kind, request.body, digest, _now()),
            )
        return True

    def finish(self, request: FutureRequest, answer: FutureAnswer, *, keep: bool = False) -> None:
        """Write an answer; the body stays only if `keep`."""
        with self.transaction():
            self._file.execute(
                "UPDATE requests SET state = ?, media = ?, answer = ?, at = ?, "
                "body = CASE WHEN ? THEN body END WHERE id = ?",
                (
                    "failed" if answer.failed else "done",
                    answer.media,
                    answer.body,
                    _now(),
                    keep,
                    request.id,
                ),
            )

    def answer(self, request_id: str) -> FutureAnswer | Literal["unknown"] | None:
        """Return the answer; None while there is none."""
        with self._lock:
            row = self._one("SELECT state, media, answer FROM requests WHERE id = ?", request_id)
        if row is None:
            return "unknown"
        return None if row[0] == "queued" else FutureAnswer(row[2], row[1], row[0] == "failed")

    def requests(self, state: str, lane: str = "", after: int = -1) -> list[FutureRequest]:
        """Return those that are "queued", or not ("past") and still have a body, in order."""
        if state == "queued":
            where, values = "state = 'queued' ORDER BY rowid", ()
        else:
            where = "state != 'queued' AND body IS NOT NULL AND lane = ? AND seq > ? ORDER BY seq"
            values = (lane, after)
        with self._lock:
            rows = self._file.execute(
                f"SELECT id, lane, seq, kind, body, state FROM requests WHERE {where}", values
            ).fetchall()
        return [FutureRequest(*row) for row in rows]

    def trim(self, lane: str, seq: int) -> None:
        """Drop the bodies that a snapshot after request `seq` covers."""
        with self.transaction():
            self._file.execute(
                "UPDATE requests SET body = NULL WHERE lane = ? AND seq <= ? AND state != 'queued'",
                (lane, seq),
            )

    def purge(self) -> None:
        """Drop answers that are older than `RETAIN_S`."""
        with self.transaction():
            self._file.execute(
                "DELETE FROM requests WHERE state != 'queued' AND body IS NULL AND at < ?",
                (_now() - RETAIN_S,),
            )

    def put(self, kind: Kind, name: str, data: dict[str, Any], parent: str = "") -> None:
        with self.transaction():
            self._file.execute(
                "INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?)",
                (kind, name, parent, msgspec.json.encode(data)),
            )

    def get(self, kind: Kind, name: str) -> dict[str, Any] | None:
        with self._lock:
            row = self._one("SELECT data FROM objects WHERE kind = ? AND id = ?", kind, name)
        return None if row is None else msgspec.json.decode(row[0])

    def all(self, kind: Kind, parent: str | None = None) -> dict[str, dict[str, Any]]:
        """Return the objects of a kind by their names, in the order in which they were written."""
        with self._lock:
            rows = self._file.execute(
                "SELECT id, data FROM objects WHERE kind = ? AND (? IS NULL OR parent = ?) "
                "ORDER BY rowid",
                (kind, parent, parent),
            ).fetchall()
        return {name: msgspec.json.decode(data) for name, data in rows}

    def end(self, session: str) -> None:
        """Drop a session and its sampling sessions, unless a request of it is pending."""
        lanes = f"{session}:*"
        with self.transaction():
            pending = "SELECT 1 FROM requests WHERE state = 'queued' AND lane GLOB ? LIMIT 1"
            if self._one(pending, lanes) is None:
                self._file.execute("UPDATE requests SET body = NULL WHERE lane GLOB ?", (lanes,))
                self._file.execute(
                    "DELETE FROM objects WHERE kind = 'sampler' AND parent = ? "
                    "OR kind = 'session' AND id = ?",
                    (session, session),
                )

    def drop(self, kind: Kind, name: str) -> None:
        with self.transaction():
            self._file.execute("DELETE FROM objects WHERE kind = ? AND id = ?", (kind, name))

    def _one(self, query: str, *values: object) -> Any:
        return self._file.execute(query, values).fetchone()


def _now() -> float:
    return time.time()
