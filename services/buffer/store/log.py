"""The durable store: an append-only log in segment files, with an index in memory.

A commit appends one group of records and waits for the disk, however many requests it stands for.
A value is read back from its place in the file, unless it is small. The oldest segment is cleaned
when much of the log is outdated: what still counts in it is appended anew, then the file goes. As
it is always the oldest, no deletion in it has anything left to delete.

What was acknowledged is named by the head of the store (see `head`), which is written, and on the
disk, after the group and before the answer: nothing of it can be gone without a word.

Why a log (benchmarks/store.py): bytes are written once, where SQLite and LMDB write them several
times, damage is told from a torn tail, and no package is needed. LMDB takes less CPU time.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TypeAlias

from umbra.services.buffer.store.api import StoreError, StoreFullError
from umbra.services.buffer.store.records import (
    MAX_VALUE_BYTES,
    SEGMENT_HEADER_BYTES,
    SegmentHeader,
    Value,
    chain_on,
    checksum_of,
    pack_group,
)
from umbra.services.buffer.store.segments import (
    Extent,
    Head,
    HeadFile,
    Image,
    Place,
    Replay,
    read_values,
    refuse_damage,
    segment_path,
)
from umbra.services.process.files import DISK, Disk, HeldError, folder_lock

SEGMENT_BYTES = 16 << 20
SLACK_SEGMENTS = 3
SMALL_BYTES = 1024  # records up to this size stay in memory too, so that moving them is cheap
GARBAGE = 1.5  # bytes on disk for each byte that counts, beyond the slack
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

Group: TypeAlias = dict[str, Value | None]  # None deletes the key

log = logging.getLogger(__name__)


class LogStore:
    """Keys and values in the files of `directory`, which is made if need be.

    Args:
        segment_bytes: size from which a new segment is begun.
        store: id of a store that is made; one at random by default.

    Raises:
        StoreError: the store is damaged, of another schema, or in use.
    """

    durable = True

    def __init__(
        self,
        directory: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        store: int | None = None,
        disk: Disk = DISK,
    ) -> None:
        self.directory = directory
        self.id = ""  # what tells it from all other stores
        self.commits = 0  # since it was opened
        self.waiting_bytes = 0  # put since the last commit began
        self._segment_bytes = segment_bytes
        self._disk = disk
        disk.make_folders(directory)
        self._held = ExitStack()
        self._held.enter_context(store_lock(directory))
        self._fds: dict[int, int] = {}
        self._head: HeadFile | None = None
        self._pending: Group = {}
        self._frozen: Group = {}  # being written
        self._append: _Append | None = None
        try:
            image = Replay(directory).run()
            refuse_damage(directory, image)
            self._sizes = image.sizes
            self._places = image.places
            self._commit = image.commit
            self._chain = image.chain
            self._live: dict[int, int] = dict.fromkeys(self._sizes, 0)
            for place in self._places.values():
                self._live[place.segment] += place.end - place.offset
            if image.torn is not None:
                log.warning("cut off what a crash left unfinished: %s", image.torn)
            self._open_files(image, secrets.randbits(64) if store is None else store)
        except BaseException:
            self.close()
            raise

    def put(self, key: str, value: bytes) -> None:
        if len(value) > MAX_VALUE_BYTES:
            raise ValueError(f"{key} has {len(value)} bytes")
        self._pending[key] = value
        self.waiting_bytes += len(value)

    def get(self, key: str) -> Value:
        return self.get_all([key])[0]

    def get_all(self, keys: Sequence[str]) -> list[Value]:
        """Return the values of `keys`, in order.

        Raises:
            KeyError: there is no such key.
            StoreError: bytes have changed on the disk.
        """
        pending, frozen, places = self._pending, self._frozen, self._places
        values: dict[str, Value] = {}
        on_disk: list[Extent] = []
        for key in keys:
            if key in pending:
                value = pending[key]
            elif key in frozen:
                value = frozen[key]
            else:
                place = places[key]
                value = place.value
                if value is None:
                    on_disk.append((place.segment, place.offset, place.end, key))
                    continue
            if value is None:
                raise KeyError(key)
            values[key] = value
        if on_disk:
            values.update(read_values(self.directory, self._fds, on_disk))
        return [values[key] for key in keys]

    def delete(self, key: str) -> None:
        if key in self._places or key in self._frozen:
            self._pending[key] = None
        else:
            self._pending.pop(key, None)

    def keys(self, prefix: str) -> list[str]:
        found = {key for key in self._places if key.startswith(prefix)}
        for key, value in (*self._frozen.items(), *self._pending.items()):
            if key.startswith(prefix):
                (found.discard if value is None else found.add)(key)
        return list(found)

    @property
    def size_bytes(self) -> int:
        """Most that the files take, given what they have to keep."""
        live = sum(self._live.values())
        return round(GARBAGE * live) + SLACK_SEGMENTS * self._segment_bytes

    @property
    def disk_bytes(self) -> int:
        return sum(self._sizes.values())

    def commit(self) -> None:
        """Append what has changed and wait for the disk.

        Raises:
            StoreFullError: the disk is full; nothing was appended, all is kept for the next commit.
            StoreError: the disk failed.
        """
        write = self.freeze()
        if write is not None:
            try:
                write()
            except OSError as error:
                self.settle(error)
            else:
                self.settle()

    def freeze(self) -> Callable[[], None] | None:
        """Begin a commit: the returned function writes it, on any thread; then call `settle`."""
        assert not self._frozen
        if not self._pending:
            return None
        self._frozen, self._pending = self._pending, {}
        self.waiting_bytes = 0
        try:
            if self._sizes[self._newest] >= self._segment_bytes:
                self._add_segment(self._newest + 1)
            self._frozen |= self._still_needed(self._frozen)
        except OSError as error:
            with suppress(OSError):
                self._remove(
                    self._take_dead(), self._oldest
                )  # that may be the room that is missing
            self.settle(error)
        number = self._newest
        fd, size, head = self._fds[number], self._sizes[number], self._head
        append = self._append = _Append(self._frozen, self._commit + 1, self._chain, number, size)
        dead, oldest = self._take_dead(), self._oldest
        assert head is not None

        def write() -> None:
            self._remove(dead, oldest)
            append.write(fd, head, self._disk)

        return write

    def settle(self, error: OSError | None = None) -> None:
        """End a commit, whose function has returned or has raised `error`; raises as `commit`."""
        frozen, self._frozen = self._frozen, {}
        if error is not None:
            self._pending = frozen | self._pending
            if error.errno in NO_ROOM:
                raise StoreFullError(
                    f"no room for the store in {self.directory}: {error.strerror}"
                ) from error
            raise StoreError(f"the store in {self.directory} failed: {error}") from error
        assert self._append is not None
        self._index(frozen, self._append)
        self.commits += 1

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        if self._head is not None:
            self._head.close()
            self._head = None
        self._held.close()

    # -- files ------------------------------------------------------------------------------------

    @property
    def _newest(self) -> int:
        return next(reversed(self._sizes))

    @property
    def _oldest(self) -> int:
        return next(iter(self._sizes))

    def _open_files(self, image: Image, new_id: int) -> None:
        """Open the segments, begin missing ones, and write the head."""
        for number in image.leftovers:
            self._disk.remove(segment_path(self.directory, number))
        self._head = HeadFile(self.directory, image.head or Head(new_id), self._disk)
        self.id = f"{self._head.head.store:016x}"
        for number, size in self._sizes.items():
            fd = self._fds[number] = self._disk.open(segment_path(self.directory, number))
            if not size:
                self._begin(number)
            elif os.fstat(fd).st_size != size:
                self._disk.truncate(fd, size)
        if not self._sizes:
            self._add_segment(0)
        # What a crash left behind the head is cut off or taken over. It has to be so on the disk
        # before anything is appended: the head allows for one group that it does not name.
        for fd in self._fds.values():
            self._disk.sync(fd)
        self._disk.sync_directory(self.directory)
        place = {"segment": self._newest, "end": self._sizes[self._newest]}
        head = replace(self._head.head, **place, commit=self._commit, chain=self._chain)
        self._head.write(head)

    def _add_segment(self, number: int) -> None:
        path = segment_path(self.directory, number)
        self._fds[number] = self._disk.open(path)
        try:
            self._begin(number)
        except OSError:
            os.close(self._fds.pop(number))
            self._sizes.pop(number, None)
            self._disk.remove(path)
            raise
        self._live[number] = 0

    def _begin(self, number: int) -> None:
        assert self._head is not None
        fd = self._fds[number]
        header = SegmentHeader(self._head.head.store, number, self._commit, self._chain)
        self._disk.truncate(fd, 0)
        self._sizes[number] = SEGMENT_HEADER_BYTES
        self._disk.write_all(fd, header.pack(), 0)
        self._disk.sync(fd)
        self._disk.sync_directory(self.directory)

    def _index(self, group: Group, append: _Append) -> None:
        """Point the keys of `group` to where `append` has put them."""
        places, live, number = self._places, self._live, append.segment
        for key in group:
            before = places.pop(key, None)
            if before is not None:
                live[before.segment] -= before.end - before.offset
        end = append.offset
        for (key, value), (head, _) in zip(append.values.items(), append.records, strict=False):
            offset, end = end, end + len(head) + len(value)
            small = value if end - offset <= SMALL_BYTES else None
            places[key] = Place(number, offset, end, small)
        live[number] += end - append.offset
        self._commit, self._chain = append.commit, append.chain
        self._sizes[number] = append.offset + append.size

    # -- cleaning ---------------------------------------------------------------------------------

    def _still_needed(self, group: Group) -> Group:
        """Return the live values of the oldest segment, if much of the log is outdated.

        One segment per commit, so that no commit takes long. Its keys are the first ones, as a key
        that is written again goes to the end.
        """
        oldest = self._oldest
        bound = GARBAGE * sum(self._live.values()) + (SLACK_SEGMENTS - 1) * self._segment_bytes
        if oldest == self._newest or self.disk_bytes <= bound or not self._live[oldest]:
            return {}
        in_oldest = takewhile(lambda item: item[1].segment == oldest, self._places.items())
        keys = [key for key, _ in in_oldest if key not in group]
        return dict(zip(keys, self.get_all(keys), strict=True))

    def _take_dead(self) -> list[tuple[int, Path]]:
        """Take the files of the oldest segments that hold nothing live."""
        dead: list[tuple[int, Path]] = []
        while (oldest := self._oldest) != self._newest and not self._live[oldest]:
            dead.append((self._fds.pop(oldest), segment_path(self.directory, oldest)))
            del self._sizes[oldest], self._live[oldest]
        return dead

    def _remove(self, dead: list[tuple[int, Path]], oldest: int) -> None:
        """Remove these files after writing `oldest` to the head. Takes long."""
        if not dead:
            return
        assert self._head is not None
        try:
            self._head.write(replace(self._head.head, oldest=oldest))
            for _, path in dead:
                self._disk.remove(path)
        finally:
            for fd, _ in dead:
                os.close(fd)


class _Append:
    """The records of one group and where they go."""

    def __init__(self, group: Group, commit: int, chain: int, segment: int, offset: int) -> None:
        self.commit = commit
        self.segment = segment
        self.offset = offset
        self.values = {key: value for key, value in group.items() if value is not None}
        deleted = [key for key, value in group.items() if value is None]
        self.records = pack_group(commit, self.values, deleted)
        self.size = sum(len(head) + len(value) for head, value in self.records)
        self.chain = chain_on(chain, (checksum_of(head) for head, _ in self.records))

    def write(self, fd: int, head: HeadFile, disk: Disk) -> None:
        """Write the records, all or none, and the head."""
        data = b"".join([part for record in self.records for part in record])
        end = self.offset + self.size
        try:
            disk.write_all(fd, data, self.offset)
            disk.sync(fd)
            place = {"segment": self.segment, "end": end, "commit": self.commit}
            head.write(replace(head.head, **place, chain=self.chain))
        except OSError:
            disk.truncate(fd, self.offset)
            raise


@contextmanager
def store_lock(directory: Path) -> Generator[None]:
    """Keep other processes out of the store; raises StoreError if one has it."""
    with ExitStack() as held:
        try:
            held.enter_context(folder_lock(directory))
        except HeldError as error:
            raise StoreError(f"the store in {directory} is in use by {error}") from error
        yield
