"""Files: changes that outlive the machine, a lock on a folder, and JSON lines.

A disk that loses its power keeps all synced data, and any part of the rest in any order: the data
of a file counts after `sync`, its name after `sync_directory` of the folder that it is in. `Disk`
writes all that must not be lost, but for the store; `tests/fakes/lossy_disk.py` takes its place.
"""

from __future__ import annotations

import codecs
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from umbra.proto.errors import UNREADABLE, UmbraError, UsageError
from umbra.services.config import RunSection
from umbra.services.config.loader import decode_json

FILE_MODE, FOLDER_MODE = 0o600, 0o700  # what a run keeps is its owner's
READABLE_MODE = 0o644  # of what other users of the machine may look at
LOCK = "lock"  # the file that a process locks in its folder


class Disk:
    """The file system as it is. All methods raise `OSError` as the system calls do."""

    def open(self, path: Path, *, new: bool = False, mode: int = FILE_MODE) -> int:
        """Return a descriptor of the file, made if need be; with `new` it must not be there."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if new else 0)
        return os.open(path, flags, mode)

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def rename(self, old: Path, new: Path) -> None:
        old.rename(new)

    def remove(self, path: Path) -> None:
        path.unlink()

    def make_folder(self, path: Path) -> None:
        path.mkdir(mode=FOLDER_MODE)

    def remove_folder(self, path: Path) -> None:
        path.rmdir()

    def sync_directory(self, path: Path) -> None:
        with _closing(os.open(path, os.O_RDONLY | os.O_DIRECTORY)) as fd:
            os.fsync(fd)

    # -- made of these ----------------------------------------------------------------------------

    def write_all(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data).cast("B")
        while view:
            written = self.write(fd, view, offset)
            view, offset = view[written:], offset + written

    def make_folders(self, path: Path) -> None:
        """Make the folder, and those above it, as far as they are missing; the disk has them."""
        if not path.is_dir():
            self.make_folders(path.parent)
            with suppress(FileExistsError):  # by another process
                self.make_folder(path)
            self.sync_directory(path.parent)

    def remove_tree(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            for entry in list(path.iterdir()):
                self.remove_tree(entry)
            self.remove_folder(path)
        else:
            self.remove(path)

    def sync_tree(self, path: Path) -> None:
        """Return when the disk has a folder, with all that is in it, but for the folder's name."""
        for entry in list(path.iterdir()):
            if entry.is_dir():
                self.sync_tree(entry)
            else:
                with self.opened(entry) as fd:
                    self.sync(fd)
        self.sync_directory(path)

    def replace(self, path: Path, data: bytes, *, mode: int = FILE_MODE) -> None:
        """Write `data` to the file atomically."""
        part = path.with_name(f"{path.name}.part")
        with self.opened(part, mode=mode) as fd:
            self.truncate(fd, 0)
            self.write_all(fd, data, 0)
            self.sync(fd)
        self.rename(part, path)
        self.sync_directory(path.parent)

    def opened(
        self, path: Path, *, new: bool = False, mode: int = FILE_MODE
    ) -> AbstractContextManager[int]:
        return _closing(self.open(path, new=new, mode=mode))


@contextmanager
def _closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


DISK = Disk()


@contextmanager
def explained(fault: str, remedy: str = "") -> Iterator[None]:
    """Raise UsageError for an OSError in the block: the fault, the system's reason, the remedy."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{fault}: {error.strerror}{remedy and f'; {remedy}'}") from error


@contextmanager
def folder_lock(
    folder: Path, fault: str, remedy: str = "", error: type[UmbraError] = UsageError
) -> Iterator[None]:
    """Hold the lock of `folder` for the block; raise `error` if another process does.

    That says the `fault`, the process, and the `remedy`. The kernel takes the lock from a process
    that is killed.
    """
    with DISK.opened(folder / LOCK) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as held:
            pid = os.read(fd, 32).decode(errors="replace")
            holder = f"process {pid}" if pid.isdecimal() else "another process"
            raise error(f"{fault} {holder}{remedy and f': {remedy}'}") from held
        os.ftruncate(fd, 0)
        with suppress(OSError):  # a full disk: the lock holds, and names nobody
            os.write(fd, str(os.getpid()).encode())
        yield


def open_regular(path: Path) -> int:
    """Open a file to read; OSError if it is a pipe or device, which would hang its reader."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return fd


def read_regular(path: Path, limit: int = 64 << 20) -> bytes:
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"more than {limit} bytes", str(path))
    return data


def is_held(folder: Path) -> bool:
    """Return whether a process locks `folder`. A shared lock is tried, for some microseconds."""
    try:
        with _closing(open_regular(folder / LOCK)) as fd:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass  # nobody ever did
    return False


def named_run(path: Path) -> Path:
    """Return `path`; if nothing is there and `runs/` here has a run of that id, its folder."""
    folder = Path(RunSection().dir) / path
    return folder if not path.exists() and (folder / "config.json").is_file() else path


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Return the objects in `path`, one per line; UsageError for anything else but blank lines."""
    return [row for _, row in read_numbered(path)]


def read_numbered(path: str | Path) -> list[tuple[int, dict[str, Any]]]:
    """Read as `read_jsonl` does, with the line number (1-based) of every object."""
    with explained(f"{path} cannot be read"), os.fdopen(open_regular(Path(path)), "rb") as file:
        lines = file.read().removeprefix(codecs.BOM_UTF8).splitlines()
    rows: list[tuple[int, dict[str, Any]]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append((number, decode_json(line, dict[str, Any])))
        except UNREADABLE as error:
            raise UsageError(
                f"{path}, line {number}: not a JSON object ({error}); write one object per line, "
                "no array around them and no other format (data.prompts takes Parquet too)"
            ) from error
    if not rows:
        raise UsageError(f"{path} is empty: it needs one JSON object per line")
    return rows
