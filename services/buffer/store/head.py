"""The head of a store: a small file that names the newest group that may have been acknowledged.

It is written, and on the disk, after the group and before the acknowledgement. So what the segments
lack of what the head names is lost, and what they have beyond it is one group at most, of which
nobody was told: whole, or torn by a crash. It also names the oldest segment that counts.

The file has two slots, which are written in turn; a crash can spoil the one that is being written
and no other. The sound one with the higher turn counts.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path

from xxhash import xxh3_64_intdigest

from umbra.services.buffer.store.record_format import SCHEMA
from umbra.services.process.files import Disk

NAME = "head"
MAGIC = b"UMBRAHED"
SLOT_BYTES = 512  # a sector, so that one slot's write cannot touch the other
_HEAD = struct.Struct("<8sI7Q")
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Head:
    """What the store holds, up to what was acknowledged."""

    store: int  # id of the store, in the header of each of its segments too
    turn: int = 0
    oldest: int = 0  # the first segment that counts
    segment: int = 0  # where the newest group is
    end: int = 0  # of it, in that segment; 0 until the segment is there
    commit: int = 0  # its number
    chain: int = 0  # checksum over it and all groups before it

    def pack(self) -> bytes:
        """One slot."""
        data = _HEAD.pack(
            MAGIC, SCHEMA, self.store, self.turn, self.oldest, self.segment, self.end, self.commit,
            self.chain,
        )  # fmt: skip
        return data + _CHECKSUM.pack(xxh3_64_intdigest(data))


def read_head(directory: Path) -> Head | str:
    """The head of the store in `directory`, or what is wrong with it."""
    try:
        data = (directory / NAME).read_bytes()
    except FileNotFoundError:
        return "the file is missing"
    found = [head for slot in (0, 1) if (head := _unpack(data[slot * SLOT_BYTES :])) is not None]
    return max(found, key=lambda head: head.turn, default="it holds nothing sound")


def _unpack(data: bytes) -> Head | None:
    body = data[: _HEAD.size]
    if len(data) < _HEAD.size + _CHECKSUM.size:
        return None
    magic, schema, *numbers = _HEAD.unpack(body)
    (checksum,) = _CHECKSUM.unpack_from(data, _HEAD.size)
    if magic != MAGIC or schema != SCHEMA or checksum != xxh3_64_intdigest(body):
        return None
    return Head(*numbers)


class HeadFile:
    """Writes the head.

    Args:
        head: what the file holds now; turn 0 if there is none.
    """

    def __init__(self, directory: Path, head: Head, disk: Disk) -> None:
        if not head.turn:
            head = replace(head, turn=2)  # of the first slot
            disk.replace(directory / NAME, head.pack())
        self.head = head
        self._disk = disk
        self._fd = disk.open(directory / NAME)

    def write(self, head: Head) -> None:
        """Return when the disk has `head`.

        Raises:
            OSError: what the disk says; the head of before counts.
        """
        head = replace(head, turn=self.head.turn + 1)
        self._disk.write_all(self._fd, head.pack(), head.turn % 2 * SLOT_BYTES)
        self._disk.sync(self._fd)
        self.head = head

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
