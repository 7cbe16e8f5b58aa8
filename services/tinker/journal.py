"""The journal of requests, answers and records in one SQLite file, for a start after a kill.

A request is written before its future is sent, and its answer together with its changes. A
request that comes again finds itself here, so it is applied once. Bodies of passes and steps stay
until a snapshot of their model covers them: models are brought back by doing these again.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import xxhash

from umbra.proto.errors import UsageError
from umbra.services.tinker.wire import Checkpoint, Model, SamplerRecord, SessionRecord

RETAIN_S = 3600.0  # answers stay so long, however often they are fetched
SCHEMA = 3  # of these tables
_TABLES = """
CREATE TABLE requests (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL,
    body BLOB, digest TEXT NOT NULL, state TEXT NOT NULL, media TEXT, answer BLOB, at REAL
);
CREATE INDEX by_owner ON requests (owner, seq);
CREATE INDEX by_turn ON requests (kind) WHERE state = 'queued';
CREATE TABLE records (
    kind TEXT NOT NULL, id TEXT NOT NULL, parent TEXT NOT NULL, data TEXT NOT NULL,
    PRIMARY KEY (kind, id)
);
"""
# Models take turns: the record of one whose request was done is the last row.
_NEXT = """
LEFT JOIN records ON records.kind = 'Model' AND records.id = owner
WHERE state = 'queued' AND r.kind != 'asample' AND seq = coalesce(json_extract(data, '$.next'), 0)
ORDER BY records.rowid LIMIT 1
"""

T = TypeVar("T", SessionRecord, Model, SamplerRecord, Checkpoint)


@dataclass(frozen=True, slots=True)
class FutureRequest:
    """A request as it was accepted: number `seq` of its owner, a model or a sampling session."""

    id: str
    owner: str
    seq: int
    kind: str
    body: bytes
    state: Literal["queued", "done", "failed"] = "queued"


def _identity(request: FutureRequest) -> bytes:
    """Return the content that does not vary when `request` comes again.

    In each try to save for sampling the SDK numbers the sampling session once more.
    """
    if request.kind != "save_weights_for_sampler":
        return request.body
    body = msgspec.json.decode(request.body)
    body.pop("sampling_session_seq_id", None)
    return msgspec.json.encode(body)


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
    def failure(cls, error: Exception | str) -> FutureAnswer:
        """Return the answer that says `error`, and whether the client or the server has to act."""
        category = "user" if isinstance(error, (UsageError, ValueError)) else "server"
        body = msgspec.json.encode({"error": str(error), "category": category})
        return cls(body, failed=True)


class FuturesJournal:
    """The file, used by all threads of the server.

    Attributes:
        announce: called with each request that has an answer, on the thread that wrote it.
    """

    def __init__(self, path: Path) -> None:
        self.announce: Callable[[str], object] = lambda _: None
        self._lock = threading.RLock()
        self._answered: list[str] = []  # in the transaction under way
        self._file = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._file.execute("PRAGMA journal_mode=WAL")
        self._file.execute("PRAGMA synchronous=FULL")  # acknowledged requests are on the disk
        if self._one("SELECT 1 FROM sqlite_master") is None:
            with self.transaction():
                for statement in (*_TABLES.split(";"), f"PRAGMA user_version = {SCHEMA}"):
                    self._file.execute(statement)
        if (schema := self._one("PRAGMA user_version")[0]) != SCHEMA:
            self.close()
            raise UsageError(f"{path} has schema {schema}, not {SCHEMA}: name another --dir")

    def close(self) -> None:
        with self._lock:
            self._file.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all that happens within, or nothing of it."""
        with self._lock:
            if self._file.in_transaction:
                yield
                return
            self._file.execute("BEGIN IMMEDIATE")
            self._answered.clear()
            try:
                yield
            except BaseException:
                self._file.execute("ROLLBACK")
                raise
            self._file.execute("COMMIT")
            for request_id in self._answered:
                self.announce(request_id)

    def accept(self, request: FutureRequest) -> bool:
        """Write `request`; false if it is here already. UsageError: another one has its id."""
        digest = xxhash.xxh3_128_hexdigest(request.kind.encode() + b"\0" + _identity(request))
        with self.transaction():
            known = self._one("SELECT digest FROM requests WHERE id = ?", request.id)
            if known is None:
                insert = "INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?, 'queued', NULL, NULL, ?)"
                columns = request.id, request.owner, request.seq, request.kind, request.body
                self._change(insert, (*columns, digest, time.time()))
        if known not in (None, (digest,)):
            raise UsageError(
                f"request {request.id} came before with another content: a client has to number "
                "its requests"
            )
        return known is None

    def finish(self, request_id: str, answer: FutureAnswer, *, keep: bool = False) -> None:
        """Write an answer; the body stays only if `keep`."""
        state = "failed" if answer.failed else "done"
        with self.transaction():
            self._answered.append(request_id)
            self._change(
                "UPDATE requests SET state = ?, media = ?, answer = ?, at = ?, "
                "body = CASE WHEN ? THEN body END WHERE id = ?",
                (state, answer.media, answer.body, time.time(), keep, request_id),
            )

    def answer(self, request_id: str) -> FutureAnswer | Literal["unknown"] | None:
        """Return the answer; None while there is none."""
        with self._lock:
            row = self._one("SELECT state, media, answer FROM requests WHERE id = ?", request_id)
        if row is None:
            return "unknown"
        return None if row[0] == "queued" else FutureAnswer(row[2], row[1], row[0] == "failed")

    def next(self) -> FutureRequest | None:
        """Return a request of a model whose turn it is, if there is one."""
        return next(iter(self._requests(_NEXT)), None)

    def samples(self) -> list[FutureRequest]:
        """Return the requests for samples without an answer, in order."""
        return self._requests("WHERE state = 'queued' AND kind = 'asample' ORDER BY rowid")

    def past(self, model_id: str, after: int) -> list[FutureRequest]:
        """Return the answered requests of a model after number `after` that have a body."""
        where = "WHERE state != 'queued' AND body IS NOT NULL AND owner = ? AND seq > ?"
        return self._requests(f"{where} ORDER BY seq", model_id, after)

    def trim(self, model_id: str, seq: int) -> None:
        """Drop the bodies that a snapshot after request `seq` covers."""
        self._change(
            "UPDATE requests SET body = NULL WHERE owner = ? AND seq <= ? AND state != 'queued'",
            (model_id, seq),
        )

    def purge(self) -> None:
        """Drop answers that are older than `RETAIN_S`."""
        self._change(
            "DELETE FROM requests WHERE state != 'queued' AND body IS NULL AND at < ?",
            (time.time() - RETAIN_S,),
        )

    def put(self, record: msgspec.Struct, name: str, parent: str) -> None:
        values = type(record).__name__, name, parent, msgspec.json.encode(record).decode()
        self._change("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)", values)

    def get(self, kind: type[T], name: str) -> T | None:
        with self._lock:
            values = kind.__name__, name
            row = self._one("SELECT data FROM records WHERE kind = ? AND id = ?", *values)
        return None if row is None else msgspec.json.decode(row[0], type=kind)

    def all(self, kind: type[T], parent: str | None = None) -> dict[str, T]:
        """Return the records of a kind by their names, in the order in which they were written."""
        query = "SELECT id, data FROM records WHERE kind = ? AND ifnull(?, parent) = parent"
        with self._lock:
            rows = self._file.execute(f"{query} ORDER BY rowid", (kind.__name__, parent)).fetchall()
        return {name: msgspec.json.decode(data, type=kind) for name, data in rows}

    def end(self, session: str) -> None:
        """Drop a session and its sampling sessions, unless a request of it is pending."""
        owners = f"{session}:*"
        with self.transaction():
            pending = "SELECT 1 FROM requests WHERE state = 'queued' AND owner GLOB ? LIMIT 1"
            if self._one(pending, owners) is None:
                self._change("UPDATE requests SET body = NULL WHERE owner GLOB ?", (owners,))
                values = SamplerRecord.__name__, session
                self._change("DELETE FROM records WHERE kind = ? AND parent = ?", values)
                self.drop(SessionRecord, session)

    def drop(self, kind: type[SessionRecord | Model | Checkpoint], name: str) -> None:
        self._change("DELETE FROM records WHERE kind = ? AND id = ?", (kind.__name__, name))

    def _requests(self, where: str, *values: object) -> list[FutureRequest]:
        query = f"SELECT r.id, owner, seq, r.kind, body, state FROM requests r {where}"
        with self._lock:
            return [FutureRequest(*row) for row in self._file.execute(query, values)]

    def _change(self, statement: str, values: tuple[object, ...]) -> None:
        with self.transaction():
            self._file.execute(statement, values)

    def _one(self, query: str, *values: object) -> Any:
        return self._file.execute(query, values).fetchone()
