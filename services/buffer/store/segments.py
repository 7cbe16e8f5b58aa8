"""The segment files of a store and its head: finding them, and reading back what they hold."""

from __future__ import annotations

import logging
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import msgspec
from xxhash import xxh3_64_intdigest

from umbra.services.buffer.store.api import StoreError
from umbra.services.buffer.store.records import (
    SCHEMA,
    SEGMENT_HEADER_BYTES,
    Entry,
    SegmentHeader,
    chain_on,
    read_header,
    scan,
    value_of,
)
from umbra.services.process.files import Disk

log = logging.getLogger(__name__)

HEAD = "head"
MAGIC = b"UMBRAHED"
SLOT_BYTES = 512  # a sector, so that one slot's write cannot touch the other
_HEAD = struct.Struct("<8sI7Q")
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Head:
    """The newest acknowledged group."""

    store: int  # id of the store, in the header of each of its segments too
    turn: int = 0
    oldest: int = 0  # the first segment that counts
    segment: int = 0  # where the newest group is
    end: int = 0  # of it, in that segment; 0 until the segment is there
    commit: int = 0  # its number
    chain: int = 0  # checksum over it and all groups before it

    def pack(self) -> bytes:
        data = _HEAD.pack(
            MAGIC, SCHEMA, self.store, self.turn, self.oldest, self.segment, self.end, self.commit,
            self.chain,
        )  # fmt: skip
        return data + _CHECKSUM.pack(xxh3_64_intdigest(data))


def read_head(directory: Path) -> Head | str:
    """Read the head of the store in `directory`, or return what is wrong with it."""
    try:
        data = (directory / HEAD).read_bytes()
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
    """Writes the head; `head` is what the file holds now, with turn 0 if there is none."""

    def __init__(self, directory: Path, head: Head, disk: Disk) -> None:
        if not head.turn:
            head = replace(head, turn=2)  # of the first slot
            disk.replace(directory / HEAD, head.pack())
        self.head = head
        self._disk = disk
        self._fd = disk.open(directory / HEAD)

    def write(self, head: Head) -> None:
        """Write `head` and wait for the disk. Raises OSError; then the old head counts."""
        head = replace(head, turn=self.head.turn + 1)
        self._disk.write_all(self._fd, head.pack(), head.turn % 2 * SLOT_BYTES)
        self._disk.sync(self._fd)
        self.head = head

    def close(self) -> None:
        os.close(self._fd)


READ_BYTES = 256 << 10  # read at once, about
GAP_BYTES = 8 << 10  # of other records between two that are read at once
Extent: TypeAlias = tuple[int, int, int, str]  # segment, begin and end of a record, and its key
_NAME = re.compile(r"(\d{8})\.seg")


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"{number:08d}.seg"


def segment_numbers(directory: Path) -> list[int]:
    """Return the numbers of the segments in `directory`, oldest first."""
    found = (_NAME.fullmatch(path.name) for path in directory.iterdir())
    return sorted(int(match[1]) for match in found if match)


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a file, or all of it, that hold nothing sound."""

    file: str
    offset: int
    end: int
    reason: str

    def __str__(self) -> str:
        where = f", bytes {self.offset} to {self.end}" if self.end else ""
        return f"{self.file}{where}: {self.reason}"


def segment_name(number: int) -> str:
    return segment_path(Path(), number).name


class Place(msgspec.Struct, frozen=True, gc=False):
    """Where the newest value of a key lies, and the value itself if it is small."""

    segment: int
    offset: int  # of the record
    end: int
    value: bytes | memoryview | None = None


@dataclass(slots=True)
class Image:
    """Content of all segments; of whole groups only, unless read for a repair."""

    places: dict[str, Place] = field(default_factory=dict[str, Place])  # in the order of the log
    sizes: dict[int, int] = field(default_factory=dict[int, int])  # sound bytes, by segment
    head: Head | None = None  # None: the store is new, or the file is damaged
    store: int | None = None  # the id, of the head or else of a segment
    commit: int = 0  # of the newest group
    chain: int = 0  # over all groups
    torn: Damage | None = None  # what a crash left of a group that was never acknowledged
    leftovers: list[int] = field(default_factory=list[int])  # segments that do not count any more
    damages: list[Damage] = field(default_factory=list[Damage])


def segment_bytes(directory: Path, number: int) -> memoryview:
    return memoryview(segment_path(directory, number).read_bytes())


def read_values(
    directory: Path, files: Mapping[int, int], wanted: Iterable[Extent]
) -> Iterator[tuple[str, memoryview]]:
    """Yield keys with their values, read from `files`, descriptors by segment.

    Neighbouring records are read at once: a system call takes longer than copying one.

    Raises:
        StoreError: bytes have changed on the disk.
    """
    stretch: list[Extent] = []
    number = near = far = -1  # the segment of the stretch, and what may still be added to it
    for extent in sorted(wanted):
        segment, offset, end, _ = extent
        if segment != number or offset > near or end > far:
            yield from _read_stretch(directory, files, stretch)
            stretch, number, far = [], segment, offset + READ_BYTES
        stretch.append(extent)
        near = end + GAP_BYTES
    yield from _read_stretch(directory, files, stretch)


def _read_stretch(
    directory: Path, files: Mapping[int, int], stretch: list[Extent]
) -> Iterator[tuple[str, memoryview]]:
    if not stretch:
        return
    number, begin = stretch[0][:2]
    data = memoryview(os.pread(files[number], stretch[-1][2] - begin, begin))
    for _, offset, end, key in stretch:
        value = value_of(data[offset - begin : end - begin], key)
        if isinstance(value, str):
            raise StoreError(f"{segment_path(directory, number)}, byte {offset}: {value}")
        yield key, value


class Replay:
    """Reads all segments and compares them with the head.

    Args:
        salvage: take every sound record, also of groups that are not whole.
    """

    def __init__(self, directory: Path, *, salvage: bool = False) -> None:
        self.image = Image()
        self._directory = directory
        self._salvage = salvage
        self._group: list[tuple[int, Entry]] = []
        self._group_commit = 0
        self._reached = False  # what the head names
        self._first = True  # nothing was read yet that says how the chain goes on

    def run(self) -> Image:
        """Read everything; `damages` of the image say what is wrong.

        Raises:
            StoreError: a segment is of another version of Umbra.
        """
        image = self.image
        head = read_head(self._directory)
        numbers = segment_numbers(self._directory)
        if isinstance(head, Head):
            image.head, image.store = head, head.store
            image.leftovers = [number for number in numbers if number < head.oldest]
            numbers = self._expected(head, numbers[len(image.leftovers) :])
        for number in numbers:
            image.sizes[number] = SEGMENT_HEADER_BYTES
            self._read(number, segment_bytes(self._directory, number))
        if self._salvage:
            self._apply()
        if isinstance(head, Head):
            self._compare(head)
        elif numbers or (self._directory / HEAD).exists():
            self._damage(HEAD, head)
        return image

    def _damage(self, file: str, reason: str) -> None:
        self.image.damages.append(Damage(file, 0, 0, reason))

    def _expected(self, head: Head, numbers: list[int]) -> list[int]:
        """Return the segments that the head allows; note the others as damage."""
        if not numbers and head.end == 0:
            return []  # the store was being made when the process ended
        newest = head.segment + 1  # begun, but nothing in it was acknowledged
        for number in range(head.oldest, head.segment + 1):
            if number not in numbers:
                self._damage(segment_name(number), "the file is missing")
        for number in numbers:
            if number > newest:
                what = f"the newest segment is {segment_name(head.segment)}, says the head"
                self._damage(segment_name(number), what)
        return numbers

    def _is_behind_head(self, segment: int, offset: int) -> bool:
        """True if nothing there can have been acknowledged."""
        head = self.image.head
        return head is not None and (segment, offset) >= (head.segment, head.end)

    def _compare(self, head: Head) -> None:
        """Compare the groups read with the head."""
        image, newest = self.image, segment_name(head.segment)
        if image.commit < head.commit:
            if not any(damage.file == newest for damage in image.damages):
                self._damage(
                    newest,
                    f"it ends with group {image.commit}; group {head.commit}, which ended at byte "
                    f"{head.end}, was acknowledged",
                )
        elif not self._reached and not image.damages and head.end:
            self._damage(newest, f"group {head.commit} is not the one that the head names")
        elif image.commit > head.commit + 1:
            what = f"it is older than the segments: it names group {head.commit}"
            self._damage(HEAD, f"{what}, they go on to group {image.commit}")

    def _read(self, number: int, data: memoryview) -> None:
        name, image = segment_name(number), self.image
        header = read_header(data, number)
        if isinstance(header, str):
            where = segment_path(self._directory, number)
            if "schema" in header:
                raise StoreError(
                    f"{where}: {header}; use the version that wrote it, or a new store"
                )
            damage = Damage(name, 0, len(data), header)
            if len(data) <= SEGMENT_HEADER_BYTES and self._is_behind_head(number, len(data)):
                image.torn = damage  # the file was being made when the process ended
                image.sizes[number] = 0
            else:
                image.damages.append(damage)
            return
        self._check_header(name, header)
        self._passed(number, SEGMENT_HEADER_BYTES)
        for found in scan(data):
            if isinstance(found, Entry):
                self._take(number, found)
            elif self._torn(number, found.offset, len(data), found.reason):
                return
            else:
                image.damages.append(Damage(name, found.offset, found.end, found.reason))
        if self._group and not self._torn(number, len(data), len(data), "a group without its end"):
            begin = self._group[0][1].offset
            image.damages.append(Damage(name, begin, len(data), "a group without its end"))
            self._drop_group()

    def _torn(self, number: int, offset: int, end: int, reason: str) -> bool:
        """Drop a broken group that was never acknowledged; False if it was.

        Its sectors may have reached the disk in any order, so sound records may follow.
        """
        begin = self._group[0][1].offset if self._group else offset
        if not self._is_behind_head(number, begin):
            return False
        self._group.clear()
        self.image.torn = Damage(segment_name(number), begin, end, reason)
        return True

    def _check_header(self, name: str, header: SegmentHeader) -> None:
        """Check that the segment continues the one before it."""
        image = self.image
        if image.store is None:
            image.store = header.store
        if header.store != image.store:
            self._damage(name, "it is of another store")
        elif not self._first and header.commit > image.commit and not image.damages:
            before = segment_name(header.number - 1)
            self._damage(before, f"it ends with group {image.commit} instead of {header.commit}")
        elif not self._first and (header.commit, header.chain) != (image.commit, image.chain):
            if not image.damages:  # else that is what was found already
                self._damage(name, "it does not go on where the segment before it ends")
        image.commit, image.chain, self._first = header.commit, header.chain, False

    def _take(self, number: int, entry: Entry) -> None:
        image, name = self.image, segment_name(number)
        expected = image.commit + 1
        if self._group and entry.commit != self._group_commit:
            reason = f"group {self._group_commit} has no end"
            image.damages.append(Damage(name, self._group[0][1].offset, entry.offset, reason))
            self._drop_group()
        elif not self._group and entry.commit != expected and not image.damages:
            reason = f"group {expected} is missing before group {entry.commit}"
            image.damages.append(Damage(name, entry.offset, entry.offset, reason))
        self._group_commit = entry.commit
        self._group.append((number, entry))
        if not entry.is_last:
            return
        image.chain = chain_on(image.chain, (one.checksum for _, one in self._group))
        self._apply()
        image.commit = entry.commit
        image.sizes[number] = entry.end
        self._passed(number, entry.end)

    def _passed(self, number: int, end: int) -> None:
        """Note whether the group that ends here is the one that the head names."""
        head, image = self.image.head, self.image
        if head is not None and (number, end) == (head.segment, head.end):
            self._reached = (image.commit, image.chain) == (head.commit, head.chain)

    def _drop_group(self) -> None:
        if self._salvage:
            self._apply()
        self._group.clear()

    def _apply(self) -> None:
        places = self.image.places
        for number, entry in self._group:
            for key in entry.deleted or [entry.key]:
                places.pop(key, None)
            if not entry.deleted:
                places[entry.key] = Place(number, entry.offset, entry.end)
        self._group.clear()


def refuse_damage(directory: Path, image: Image) -> None:
    """Raise StoreError with damage and remedy unless `image` is sound."""
    if image.damages:
        more = f" (and {len(image.damages) - 1} more)" if len(image.damages) > 1 else ""
        raise StoreError(
            f"the store in {directory} is damaged: {image.damages[0]}{more}; "
            f"`umbra buffer --repair --store {directory}` drops what is lost and says what that is"
        )
