"""Which versions are pinned, in a file beside the arena, for the hub that takes the arena over."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

import msgspec

from umbra.proto.errors import UNREADABLE

MOST_BYTES = 64 << 20

log = logging.getLogger(__name__)


class PinRecord(msgspec.Struct, frozen=True):
    """A pinned version: in a slot of the arena, or in a file of its own (`slot` is -1 then)."""

    version: int
    sums: list[int]
    slot: int = -1
    path: str = ""


class PinFile:
    """The records of one arena; there is none while nothing is pinned.

    Locked while its hub lives, as the arena is, so that no other hub takes it for a leftover.

    Args:
        arena: path of the arena, which its hub has locked.
    """

    def __init__(self, arena: Path) -> None:
        self._path = arena.with_name(f"{arena.name}_pins")
        self._fd = -1

    def read(self) -> list[PinRecord]:
        """What the hub before this one had pinned; nothing, with a warning, if that is unknown."""
        if not self._path.exists():
            return []
        self._open()
        line = os.pread(self._fd, MOST_BYTES, 0).partition(b"\n")[0]
        try:
            return msgspec.json.decode(line, type=list[PinRecord])
        except UNREADABLE as error:
            log.warning("%s is damaged (%s): which versions were pinned is lost", self._path, error)
            return []

    def write(self, pins: list[PinRecord]) -> None:
        """These are pinned from now on."""
        if not pins:
            self.remove()
            return
        self._open()
        # A hub that is killed before the rest is cut off leaves this line whole.
        data = msgspec.json.encode(pins) + b"\n"
        os.pwrite(self._fd, data, 0)
        os.ftruncate(self._fd, len(data))

    def remove(self) -> None:
        """Nothing is pinned, or the arena is removed."""
        self._path.unlink(missing_ok=True)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        if self._fd >= 0:
            return
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self._path, flags, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)  # nobody else has it: the arena is ours
