"""The store of a run: keys and values, changed in groups, all of one or nothing.

Changes wait in memory until a commit writes them in one LMDB transaction and returns once the disk
has them; replies leave only then, so acknowledged means synced. LMDB overwrites nothing that its
last synced transaction refers to: a crash or a power cut leaves the state before or after a commit.
A folder holds

    data.mdb       keys and values; xxh3-64 of key and value before each value
    acknowledged   id of the store and number of its newest commit, which tell an older data.mdb
    lock           held by the process that has the store

LMDB reads through a memory map, where damage would crash or mislead. So a store is checked as a
whole before it is opened, and every value again when it is read. LMDB's own lock ties a transaction
to a thread, so it is off: one thread fills the transaction of a commit and reads by another of the
commit before, whose pages LMDB does not reuse before the next.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias, cast

import lmdb
import msgspec
from lmdb.verify import VerifyError
from lmdb.verify import verify as verify_file  # pyright: ignore[reportUnknownVariableType]
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from umbra.proto.errors import UNREADABLE, UmbraError, UsageError
from umbra.services.process.files import DISK, FILE_MODE, folder_lock

DATA = "data.mdb"
ACKNOWLEDGED = "acknowledged"
MARK = "store.json"  # in the folder of the run: its `RunMark`
SCHEMA = 15  # of what the broker puts into a store
HEADER = b"store"  # key of the `StoreHeader`
MAP_BYTES = 1 << 30  # address space at first; grown before a commit that may need more
PAGE_BYTES = 4096
PAGES_PER_KEY = 8  # that a change may copy or split on its way to the root, at most
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# There a memory map may differ from the data written, and a lock may not hold.
NETWORK = ("nfs", "cifs", "smb", "9p", "afs", "coda", "ncp", "fuse.")
DIGEST_BYTES = 8
OPTIONS: dict[str, Any] = {"mode": FILE_MODE, "lock": False, "lib_version": 0}  # of LMDB

Value: TypeAlias = bytes | memoryview
Group: TypeAlias = dict[str, bytes | None]  # None deletes the key


class StoreError(UmbraError):
    """The store on disk is damaged, foreign, or in use by another process."""


class StoreFullError(UmbraError):
    """There is no room on the disk; nothing is lost, and the commit may be tried again."""


class StoreHeader(msgspec.Struct, frozen=True):
    schema: int
    store: str  # its id
    commit: int  # LMDB's number of the transaction that wrote it, which is the newest

    def put(self, transaction: lmdb.Transaction) -> None:
        transaction.put(HEADER, _seal(HEADER, msgspec.msgpack.encode(self)))


class MemoryStore:
    """A store that ends with the process; `durable` ones stand in for a real one in tests."""

    def __init__(self, *, durable: bool = False) -> None:
        self.durable = durable
        self.waiting_bytes = 0
        self.size_bytes = 0
        self.values: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        self.delete(key)
        self.values[key] = value
        self.size_bytes += len(key) + len(value)

    def get(self, key: str) -> bytes:
        return self.values[key]

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        return [self.values[key] for key in keys]

    def delete(self, key: str) -> None:
        value = self.values.pop(key, None)
        if value is not None:
            self.size_bytes -= len(key) + len(value)

    def keys(self, prefix: str) -> list[str]:
        return sorted(key for key in self.values if key.startswith(prefix))

    def freeze(self, *_: object) -> None:
        """Do nothing: memory is as stored as it gets."""

    commit = settle = close = freeze


class LmdbStore:
    """Keys and values in `directory`, which is made if need be.

    Reads see all values that were put, committed or not. Keys have at most 511 bytes.

    Raises:
        StoreError: the store is damaged, of another schema or in use, or its file system is a
            network's.
    """

    durable = True  # outlives the process

    def __init__(self, directory: Path, *, map_bytes: int = MAP_BYTES) -> None:
        DISK.make_folders(directory)
        if (kind := file_system(directory)).startswith(NETWORK):
            raise StoreError(
                f"the store in {directory} would be on a network file system ({kind}), where a "
                "commit may be lost: set buffer.store to a folder on a disk of this machine"
            )
        self.directory = directory
        self._data = directory / DATA
        self.waiting_bytes = 0  # put since the last commit began
        self.size_bytes = 0  # in use; the file may be larger, as it never shrinks
        self._pending: Group = {}
        self._frozen: Group = {}  # being written
        with ExitStack() as held:
            fault = f"the store in {directory} is in use by"
            held.enter_context(folder_lock(directory, fault, error=StoreError))
            if not self._data.exists():
                self._make()
            self._check_pages()
            with _system_errors():
                self._env = lmdb.open(str(directory), map_bytes, **OPTIONS)
            held.enter_context(closing(self._env))
            self._settle_file()
            header = self._check_values()
            self.id, self._commits = header.store, header.commit
            self._check_acknowledged()
            self._acknowledged = DISK.open(directory / ACKNOWLEDGED)
            held.callback(os.close, self._acknowledged)
            self._reader = self._env.begin()  # of the newest settled commit
            held.callback(lambda: self._reader.abort())
            self._measure()
            self._held = held.pop_all()

    def put(self, key: str, value: bytes) -> None:
        self._pending[key] = value
        self.waiting_bytes += len(value)

    def get(self, key: str) -> Value:
        return self.get_all([key])[0]

    def get_all(self, keys: Sequence[str]) -> list[Value]:
        """Return the values of `keys`, in order.

        Raises:
            StoreError: bytes have changed on the disk.
        """
        values: list[Value] = []
        for key in keys:
            changes = self._pending if key in self._pending else self._frozen
            if key in changes:
                value = changes[key]
            else:
                name = key.encode()
                sealed = self._reader.get(name)
                value = None if sealed is None else _unseal(name, sealed)
                if sealed is not None and value is None:
                    raise self._damaged(f"the value of {key} has a wrong checksum")
            if value is None:
                raise KeyError(key)
            values.append(value)
        return values

    def delete(self, key: str) -> None:
        self._pending[key] = None

    def keys(self, prefix: str) -> list[str]:
        first = prefix.encode()
        with self._reader.cursor() as cursor:
            cursor.set_range(first)
            stored = takewhile(lambda name: name.startswith(first), cursor.iternext(values=False))
            names = {name.decode() for name in stored}
        for key, value in (*self._frozen.items(), *self._pending.items()):
            if key.startswith(prefix):
                (names.discard if value is None else names.add)(key)
        return sorted(names)

    def commit(self) -> None:
        """Write the changes and wait for the disk.

        Raises:
            StoreFullError: the disk is full; all is kept for the next commit.
            StoreError: the disk failed.
        """
        write = self.freeze()
        if write is None:
            return
        failure: OSError | None = None
        try:
            write()
        except OSError as error:
            failure = error
        self.settle(failure)

    def freeze(self) -> Callable[[], None] | None:
        """Begin a commit: call the returned function on any thread, then `settle`.

        None if there is nothing to store. Reads and writes may go on. The values are handed to LMDB
        here, which gives up the interpreter's lock for each: another thread would wait for it up to
        5 ms a value. Raises as `commit`.
        """
        assert not self._frozen
        if not self._pending:
            return None
        self._frozen, self._pending = self._pending, {}
        self.waiting_bytes = 0
        needed = self._file_bytes(self._frozen)
        if needed > self._env.info()["map_size"]:
            self._reader.abort()
            self._env.set_mapsize(2 * needed)  # while no transaction is open
            self._reader = self._env.begin()
        try:
            return partial(self._write, self._frozen, self._fill(self._frozen))
        except OSError as error:
            self.settle(error)
            raise

    def settle(self, error: OSError | None = None) -> None:
        """End a commit, whose function has returned or has raised `error`; raises as `commit`."""
        frozen, self._frozen = self._frozen, {}
        if error is None:
            self._reader.abort()
            self._reader = self._env.begin()
            self._measure()
            return
        self._pending = frozen | self._pending
        if error.errno in NO_ROOM:
            raise StoreFullError(
                f"no room for the store in {self.directory}: {error.strerror}"
            ) from error
        raise StoreError(f"the store in {self.directory} failed: {error}") from error

    def close(self) -> None:
        self._held.close()

    def _write(self, group: Group, filled: lmdb.Transaction) -> None:
        try:
            self._commit(filled)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            # A full disk takes a part of a write at first, which LMDB calls an error of the disk.
            # Allocating the room shows which it was; if there is room, the second try shows it.
            with DISK.opened(self._data) as fd:
                os.posix_fallocate(fd, 0, self._file_bytes(group))
            self._commit(self._fill(group))
        with suppress(OSError):  # then it names an earlier commit, which loses nothing
            DISK.write_all(self._acknowledged, self._acknowledgement(), 0)

    def _fill(self, group: Group) -> lmdb.Transaction:
        """Return a transaction with all of `group`, which any thread may commit."""
        with _system_errors():
            transaction = self._env.begin(write=True)
            try:
                for key, value in group.items():
                    name = key.encode()
                    if value is None:
                        transaction.delete(name)
                    else:
                        transaction.put(name, _seal(name, value))
                StoreHeader(SCHEMA, self.id, transaction.id()).put(transaction)
            except lmdb.Error:
                transaction.abort()
                raise
        return transaction

    def _commit(self, filled: lmdb.Transaction) -> None:
        number = filled.id()
        with _system_errors():
            filled.commit()
        self._commits = number

    def _file_bytes(self, group: Group) -> int:
        """Return the size of the file after a commit of `group` that reuses no page, at most."""
        pages = self._env.info()["last_pgno"] + 1 + PAGES_PER_KEY * len(group)
        pages += sum(len(value) // PAGE_BYTES + 1 for value in group.values() if value)
        return pages * self._env.stat()["psize"]

    def _measure(self) -> None:
        stat = self._env.stat()
        pages = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        self.size_bytes = pages * stat["psize"]

    def _make(self) -> None:
        """Make an empty store, whose file gets its name once it is whole on the disk."""
        if (self.directory / ACKNOWLEDGED).exists():
            raise self._damaged(f"{DATA} is missing")
        part = self.directory / f"{DATA}.part"
        part.unlink(missing_ok=True)
        with _system_errors(), closing(lmdb.open(str(part), subdir=False, **OPTIONS)) as env:
            with env.begin(write=True) as transaction:
                StoreHeader(SCHEMA, secrets.token_hex(8), 1).put(transaction)
        DISK.rename(part, self._data)
        DISK.sync_directory(self.directory)

    def _check_pages(self) -> None:
        """Check that all pages are there and fit together: a memory map would crash on others."""
        try:
            problems = cast("list[str]", verify_file(str(self._data), subdir=False))
        except VerifyError as error:
            problems = [str(error)]
        if problems:
            raise self._damaged(f"{DATA}: {problems[0]}", len(problems))

    def _settle_file(self) -> None:
        """Make the file as long as its pages, and wait for the disk.

        Pages that are missing at its end hold zeros then, which the checksums tell: reading beyond
        the end of a mapped file would end the process. A buffer that was killed has not waited for
        the disk, and what it has written must not be lost once this one has told of it.
        """
        size = self._file_bytes({})
        with DISK.opened(self._data) as fd:
            if os.fstat(fd).st_size < size:
                DISK.truncate(fd, size)
            DISK.sync(fd)

    def _check_values(self) -> StoreHeader:
        with self._env.begin(buffers=True) as transaction:
            content = _unseal(HEADER, transaction.get(HEADER, b""))
            if content is None:
                raise self._damaged(f"{DATA} has no header of a store, or a damaged one")
            header = msgspec.msgpack.decode(content, type=StoreHeader)
            if header.schema != SCHEMA:
                raise StoreError(
                    f"the store in {self.directory} has schema {header.schema}, this umbra-rl "
                    f"knows schema {SCHEMA} only: begin a new run, or use the version that wrote it"
                )
            if header.commit != transaction.id():
                numbers = f"{transaction.id()} instead of {header.commit}"
                raise self._damaged(f"the head of {DATA} names commit {numbers}")
            wrong = [
                str(name, "utf-8", "replace")
                for name, sealed in transaction.cursor()
                if _unseal(name, sealed) is None
            ]
        if wrong:
            raise self._damaged(f"the value of {wrong[0]} has a wrong checksum", len(wrong))
        return header

    def _check_acknowledged(self) -> None:
        path = self.directory / ACKNOWLEDGED
        if not path.exists():
            DISK.replace(path, self._acknowledgement())  # new, or to go on with an older copy
            return
        content = _unseal(ACKNOWLEDGED.encode(), path.read_bytes())
        if content is None:
            raise self._damaged(f"{path} has a wrong checksum")
        store, acknowledged = str(content, "ascii").split()
        if store != self.id:
            raise self._damaged(f"{DATA} is that of store {self.id}, {path} of {store}")
        if int(acknowledged) > self._commits:
            raise self._damaged(
                f"{DATA} ends with commit {self._commits}, but commit {int(acknowledged)} was "
                f"acknowledged (remove {path} to go on without what came after)"
            )

    def _acknowledgement(self) -> bytes:
        """Return the file's bytes, as many each time, since it is overwritten in place."""
        return _seal(ACKNOWLEDGED.encode(), f"{self.id} {self._commits:016}".encode())

    def _damaged(self, what: str, count: int = 1) -> StoreError:
        more = f" (and {count - 1} more)" if count > 1 else ""
        return StoreError(
            f"the store in {self.directory} is damaged: {what}{more}; bring back a copy of the "
            "folder, or begin a new run from the newest checkpoint (`umbra export`)"
        )


Store: TypeAlias = MemoryStore | LmdbStore


class RunMark(msgspec.Struct, frozen=True):
    """The record that the run of a folder has a durable store, with its id and its place.

    Without it a run whose store is gone altogether would look like one that has not begun.
    """

    store: str  # its id
    folder: str  # where it was when the run was last begun


def open_store(run_dir: Path | None, where: Path | None) -> Store:
    """Open the store in folder `where`, None = in memory, which must be that of the run.

    Raises:
        UsageError: it is not the store that the run in `run_dir` has.
        StoreError: as `LmdbStore`.
    """
    mark, path = None, run_dir / MARK if run_dir is not None else None
    if path is not None and path.exists():
        try:
            mark = msgspec.json.decode(path.read_bytes(), type=RunMark)
        except (OSError, *UNREADABLE) as error:
            raise StoreError(
                f"{path}, which names the store of the run, cannot be read ({error}): restore it "
                "from a copy; if the store itself is there, remove the file, and it is rewritten"
            ) from error

    def check(sound: bool, what: str) -> None:
        if mark is not None and not sound:
            raise UsageError(
                f"the run in {run_dir} has the store {mark.store} in {mark.folder}, but {what}: "
                "bring it back, or begin another run"
            )

    if where is None:
        check(False, 'buffer.store is "memory"')
        return MemoryStore()
    check(where.is_dir() and any(where.iterdir()), f"{where} holds none")
    store = LmdbStore(where)
    try:
        check(mark is None or mark.store == store.id, f"{where} holds another one, {store.id}")
        current = RunMark(store.id, str(where.resolve()))
        if path is not None and current != mark:
            DISK.replace(path, msgspec.json.encode(current) + b"\n")
    except BaseException:
        store.close()
        raise
    return store


def _seal(name: bytes, value: Value) -> bytes:
    """Return `value` with the checksum of it and its key before it."""
    return xxh3_64_digest(value, xxh3_64_intdigest(name)) + value


def _unseal(name: Value, sealed: Value) -> memoryview | None:
    """Return the value in `sealed`, or None if its checksum is wrong."""
    data = memoryview(sealed)
    value = data[DIGEST_BYTES:]
    sound = bytes(data[:DIGEST_BYTES]) == xxh3_64_digest(value, xxh3_64_intdigest(name))
    return value if sound else None


@contextmanager
def _system_errors() -> Generator[None]:
    """Turn LMDB's errors into OSError; codes below 0 are LMDB's own."""
    try:
        yield
    except lmdb.Error as error:
        raise OSError(error.code, error.reason) from error


def file_system(directory: Path) -> str:
    """Return the type of the file system of `directory`, empty if unknown."""
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError), open("/proc/self/mountinfo") as mounts:
        for line in mounts:
            fields = line.split()
            if fields[2] == number:
                return fields[fields.index("-") + 1]
    return ""
