"""Which versions are pinned, in a file beside the arena: a hub that takes the arena over reads it."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

import msgspec

MOST_BYTES = 64 << 20


class PinRecord(msgspec.Struct, frozen=True):
    """A pinned version: in a slot of the arena, or in a file of its own (`slot` is -1 then)."""

    version: int
    sums: list[int]
    slot: int = -1
    path: str = ""


class PinFile:
    """The records of one arena. Locked while its hub lives, as the arena is; small.

    Args:
        arena: path of the arena, which its hub has locked.
    """

    def __init__(self, arena: Path) -> None:
        self._path = arena.with_name(f"{arena.name}_pins")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self._path, flags, 0o600)
        with suppress(OSError):  # that no other hub is here the arena's own lock tells
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def read(self) -> list[PinRecord]:
        """What the hub before this one had pinned; nothing if the file makes no sense."""
        data = os.pread(self._fd, MOST_BYTES, 0)
        try:
            return msgspec.json.decode(data, type=list[PinRecord]) if data else []
        except msgspec.DecodeError:
            return []

    def write(self, pins: list[PinRecord]) -> None:
        """These are pinned from now on."""
        data = msgspec.json.encode(pins)
        os.pwrite(self._fd, data, 0)
        os.ftruncate(self._fd, len(data))

    def remove(self) -> None:
        """The arena is removed, and this with it."""
        self._path.unlink(missing_ok=True)
        os.close(self._fd)
