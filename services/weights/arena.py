"""Shared memory that holds versions of the weights: a file in /dev/shm, divided into slots.

Pages are allocated when the arena is made: the first touch of a tmpfs page costs 20 to 60 times a
copy, and a full tmpfs must be an error here and not a SIGBUS later. Where the trainer runs on
several hosts, each has the file of the whole layout, with memory for the bytes of its own ranks:
every byte has the same place on all hosts, and the holes must not be read.

After the slots comes a page with a sequence number for each of them, odd while the slot is written:
the hub sets it. Mappings outlive the file's name. Not `multiprocessing.shared_memory`: its resource
tracker removes segments that others still use.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import re
import secrets
import weakref
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from umbra.proto.errors import StartupError
from umbra.services.process.host import ask_for
from umbra.services.weights.memory import Mapping, share

SHM = Path("/dev/shm")
PAGE_BYTES = mmap.PAGESIZE
TOKEN_CHARS = 32
SMALLER = (
    'set weight_hub.slots = 2 or weight_hub.dtype = "bfloat16", or use a host with more memory'
)
MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's `mmap`

Ranges = Sequence[tuple[int, int]]

log = logging.getLogger(__name__)


def shm_host() -> str:
    """Name the very /dev/shm that this process sees: the same string means shared memory works.

    A random token in a file there, which the first process of a user makes. Neither host nor mount
    would do: containers with a /dev/shm each on one disk have both in common. A process that cannot
    have the file shares memory with nobody, and returns a name of its own.
    """
    path = SHM / f".umbra-host-{os.geteuid()}"
    token = secrets.token_hex(TOKEN_CHARS // 2)
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with open(os.open(path, flags, 0o600), "rb+", buffering=0) as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                raise PermissionError("it is another user's")
            fcntl.flock(file, fcntl.LOCK_EX)  # two may be the first at once
            if len(written := os.pread(file.fileno(), TOKEN_CHARS, 0)) == TOKEN_CHARS:
                return written.decode("ascii")
            os.pwrite(file.fileno(), token.encode("ascii"), 0)
    except (OSError, UnicodeDecodeError) as error:
        log.warning("no shared memory with other processes: %s: %s", path, error)
    return token


class Arena:
    """`slots` slots of `slot_bytes` bytes, mapped writable into this process.

    The hub makes it by `create`; trainer and receivers `attach`. One without a name, made by
    `anonymous`, other processes get by `inherited` alone.
    """

    def __init__(
        self, path: Path, fd: int, slot_bytes: int, slots: int, *, populate: bool = True
    ) -> None:
        self.path = path
        self.slot_bytes = slot_bytes
        self.slots = slots
        self._fd = fd
        size = _size(slot_bytes, slots)
        has_holes = os.fstat(fd).st_blocks * 512 < size
        # MAP_POPULATE fills the page table at once; else every page faults at its first write,
        # and sixteen together at their first read. Holes it would fill with memory.
        self._map = Mapping(
            fd,
            size,
            flags=mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate and not has_holes else 0),
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
        # While anybody holds a slot, `locate` gives the file's number away.
        weakref.finalize(self._map, os.close, fd)
        self._view = memoryview(self._map)
        self._sequences = self._view[size - PAGE_BYTES :].cast("Q")
        if has_holes:
            self._map.ranges = list(_extents(fd, size))
            if populate:
                self._populate(self._map.ranges)

    @classmethod
    def create(
        cls, run_id: str, suffix: str, *, slot_bytes: int, slots: int, own: Ranges | None = None
    ) -> Arena:
        """Return a new arena at `/dev/shm/umbra-<run_id>-<suffix>`, mode 0600.

        All of it is allocated, or of each slot the bytes `own` alone.

        Raises:
            StartupError: /dev/shm has too little room, or the name is taken.
            ValueError: `suffix` is not made of letters, digits and underscores.
        """
        if not re.fullmatch(r"\w+", suffix):
            raise ValueError(f"suffix {suffix!r} of an arena: letters, digits and _ only")
        path = SHM / f"{_prefix(run_id)}{suffix}"
        stride, size = _stride(slot_bytes), _size(slot_bytes, slots)
        ranges = [(0, size)]
        if own is not None:
            ranges = [*_pages(own, slots, stride), (size - PAGE_BYTES, size)]
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartupError(f"cannot make shared memory {path}: {error.strerror}") from error
        with _closed_on_error(fd, made=path):
            fcntl.flock(fd, fcntl.LOCK_EX)  # for as long as we live: see `remove_leftovers`
            os.ftruncate(fd, size)
            _allocate(fd, ranges)
            arena = cls(path, fd, slot_bytes, slots)
            if own is not None:
                arena._populate(ranges)  # they are no extents yet
            return arena

    @classmethod
    def attach(cls, path: str | Path, *, slot_bytes: int, populate: bool = True) -> Arena:
        """Return the arena at `path` of another process.

        With `populate`, for who writes, all of it is mapped at once, at the price of a copy of it.

        Raises:
            StartupError: it is not there, or not one of slots of `slot_bytes` bytes.
        """
        fd, slots = _open(Path(path), slot_bytes)
        with _closed_on_error(fd):
            arena = cls(Path(path), fd, slot_bytes, slots, populate=populate)
            share(arena._map, len(arena._view), fd)
            return arena

    @classmethod
    def anonymous(cls, *, slot_bytes: int, slots: int) -> Arena:
        """Return a new arena without a name, all of it allocated; StartupError without room."""
        size = _size(slot_bytes, slots)
        ask_for(size, "the slots of the weights", SMALLER)
        fd = os.memfd_create("umbra-weights", os.MFD_CLOEXEC)
        with _closed_on_error(fd):
            try:
                os.posix_fallocate(fd, 0, size)
                arena = cls(Path(), fd, slot_bytes, slots)
            except OSError as error:
                raise StartupError(f"cannot allocate {size} bytes: {error.strerror}") from error
            share(arena._map, size, fd)
            return arena

    @classmethod
    def inherited(cls, fd: int, *, slot_bytes: int) -> Arena:
        """Take over the arena in `fd`, which another process has sent."""
        slots = (os.fstat(fd).st_size - PAGE_BYTES) // _stride(slot_bytes)
        return cls(Path(), fd, slot_bytes, slots)

    def fileno(self) -> int:
        return self._fd

    def slot(self, index: int) -> memoryview:
        """Return the bytes of slot `index`, `[slot_bytes]`, writable; raises IndexError."""
        self._check_slot(index)
        start = index * _stride(self.slot_bytes)
        return self._view[start : start + self.slot_bytes]

    def sequence(self, index: int) -> memoryview:
        """Return the sequence number of a slot, as a view of one u64 that outlives `close`."""
        self._check_slot(index)
        return self._sequences[index : index + 1]

    def _check_slot(self, index: int) -> None:
        if not 0 <= index < self.slots:
            raise IndexError(f"slot {index} of an arena with {self.slots} slots")

    def begin(self, index: int) -> None:
        """Make the sequence number of slot `index` odd: it is about to be written."""
        self._sequences[index] += 1 + self._sequences[index] % 2

    def end(self, index: int) -> None:
        """Make the sequence number of slot `index` even: its version is complete."""
        self._sequences[index] += self._sequences[index] % 2

    def lock(self, index: int) -> None:
        """Tell the hub that this process writes slot `index`, until it unlocks it or ends."""
        self._lock(index, fcntl.LOCK_SH)

    def unlock(self, index: int) -> None:
        self._lock(index, fcntl.LOCK_UN)

    def is_locked(self, index: int) -> bool:
        """Return whether another process has locked slot `index`."""
        try:
            self._lock(index, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        self.unlock(index)
        return False

    def _lock(self, index: int, kind: int) -> None:
        fcntl.lockf(self._fd, kind, self.slot_bytes, index * _stride(self.slot_bytes))

    def check(self) -> None:
        """Raise StartupError if the file has become shorter: to read past its end is a SIGBUS."""
        if os.fstat(self._fd).st_size < _size(self.slot_bytes, self.slots):
            raise StartupError("the weight hub's shared memory has become shorter")

    def close(self) -> None:
        """Unmap as soon as the last view of a slot is gone, as if nobody referred to this any more.

        Does not remove the file.
        """
        if self._fd >= 0:
            self._fd = -1
            del self._map, self._view, self._sequences

    @property
    def has_name(self) -> bool:
        """False once its file was removed: nobody else can attach."""
        return os.fstat(self._fd).st_nlink > 0

    def unlink(self) -> None:
        self.path.unlink(missing_ok=True)

    def _populate(self, ranges: Iterable[tuple[int, int]]) -> None:
        with suppress(OSError):  # an older kernel: they are filled as they are used
            for start, end in ranges:
                self._map.madvise(MADV_POPULATE_WRITE, start, end - start)


@contextmanager
def _closed_on_error(fd: int, made: Path | None = None) -> Generator[None]:
    """Close `fd` if the block fails, and remove the file that was made for it."""
    try:
        yield
    except BaseException:
        os.close(fd)
        if made is not None:
            made.unlink()
        raise


def run_and_suffix(path: str) -> tuple[str, str]:
    """Return run id and suffix from which `Arena.create` makes `path`; StartupError without."""
    run_id, _, suffix = path.removeprefix(f"{SHM}/umbra-").rpartition("-")
    if not re.fullmatch(r"\w+", suffix) or path != f"{SHM}/{_prefix(run_id)}{suffix}":
        raise StartupError(f"{path} is no arena of Umbra's")
    return run_id, suffix


def remove_leftovers(run_id: str) -> list[str]:
    """Remove the arenas of a run whose hub was killed; return their paths.

    A running hub holds a lock on its own: two runs on one machine may have the same id.
    """
    removed: list[str] = []
    for path in SHM.glob(f"{_prefix(run_id)}*"):
        if "-" in path.name.removeprefix(_prefix(run_id)):
            continue  # the arena of another run, whose id begins with ours
        with suppress(OSError):  # gone already, another user's, or locked
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(fd)
            removed.append(str(path))
    return removed


def _prefix(run_id: str) -> str:
    return f"umbra-{re.sub(r'[^A-Za-z0-9._-]', '_', run_id)}-"


def _stride(slot_bytes: int) -> int:
    return -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES


def _size(slot_bytes: int, slots: int) -> int:
    return slots * _stride(slot_bytes) + PAGE_BYTES


def _pages(own: Ranges, slots: int, stride: int) -> Iterator[tuple[int, int]]:
    """Yield the page ranges of the bytes `own` of every slot, in order."""
    begun, until = 0, 0
    for slot in range(slots):
        for start, end in own:
            first = slot * stride + start // PAGE_BYTES * PAGE_BYTES
            if first > until:
                if begun < until:
                    yield begun, until
                begun = first
            until = slot * stride + _stride(end)
    if begun < until:
        yield begun, until


def _extents(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the file that have memory."""
    end = 0
    with suppress(OSError):  # no more
        while end < size:
            start = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, start, os.SEEK_HOLE)
            yield start, end


def _allocate(fd: int, ranges: Ranges) -> None:
    size = sum(end - start for start, end in ranges)
    stats = os.statvfs(fd)
    free = stats.f_bavail * stats.f_frsize
    too_small = StartupError(
        f"{SHM} has {free} bytes free, the weights need {size}: make it larger "
        "(docker: --shm-size), or set weight_hub.slots = 2 or a smaller weight_hub.dtype"
    )
    if size > free:
        raise too_small
    ask_for(size, "the slots of the weights in /dev/shm", SMALLER)
    try:
        for start, end in ranges:
            os.posix_fallocate(fd, start, end - start)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise too_small from error
        raise StartupError(f"cannot allocate {size} bytes in {SHM}: {error.strerror}") from error


def _open(path: Path, slot_bytes: int) -> tuple[int, int]:
    """Open the file at `path`, which came over the wire; returns it and its number of slots."""
    if path.parent != SHM or not path.name.startswith("umbra-"):
        raise StartupError(f"{path} is no arena of Umbra's")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise StartupError(
            f"cannot open the weight hub's shared memory {path}: {error.strerror}; this process "
            "and the hub must run on one host, as one user, and share /dev/shm"
        ) from error
    size = os.fstat(fd).st_size
    slots, rest = divmod(size - PAGE_BYTES, _stride(max(1, slot_bytes)))
    if slot_bytes < 1 or slots < 1 or rest:
        os.close(fd)
        raise StartupError(f"{path} has {size} bytes, which do not fit slots of {slot_bytes}")
    return fd, slots
