"""The segment files of a store: finding them, and reading back what they hold."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import msgspec

from umbra.services.buffer.frames import (
    SEGMENT_HEADER_BYTES,
    Entry,
    Fault,
    header_fault,
    scan,
    value_of,
)
from umbra.services.buffer.store import StoreError

READ_BYTES = 256 << 10  # read at once, about
GAP_BYTES = 8 << 10  # of other records between two that are read at once
Extent: TypeAlias = tuple[int, int, int, str]  # segment, begin and end of a record, and its key
_NAME = re.compile(r"(\d{8})\.seg")

log = logging.getLogger(__name__)


def segment_path(directory: Path, number: int) -> Path:
    """The file of segment `number`."""
    return directory / f"{number:08d}.seg"


def segment_numbers(directory: Path) -> list[int]:
    """Numbers of the segments in `directory`, oldest first."""
    found = (_NAME.fullmatch(path.name) for path in directory.iterdir())
    return sorted(int(match[1]) for match in found if match)


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a segment that hold nothing sound."""

    segment: int
    offset: int
    end: int
    reason: str

    def __str__(self) -> str:
        name = segment_path(Path(), self.segment).name
        return f"{name}, bytes {self.offset} to {self.end}: {self.reason}"


class Place(msgspec.Struct, frozen=True, gc=False):
    """Where the newest value of a key lies, and the value itself if it is a small one."""

    segment: int
    offset: int  # of the record
    end: int
    value: bytes | memoryview | None = None


@dataclass(slots=True)
class Image:
    """What the segments hold together. Entries of whole groups only, unless it is of a repair."""

    places: dict[str, Place] = field(default_factory=dict[str, Place])  # in the order of the log
    sizes: dict[int, int] = field(default_factory=dict[int, int])  # sound bytes, by segment
    commit: int = 0  # of the newest group
    torn: Damage | None = None  # what a crash left of a group that was never acknowledged
    damages: list[Damage] = field(default_factory=list[Damage])


def segment_bytes(directory: Path, number: int) -> memoryview:
    """All bytes of segment `number`."""
    return memoryview(segment_path(directory, number).read_bytes())


def read_values(
    directory: Path, files: Mapping[int, int], wanted: Iterable[Extent]
) -> Iterator[tuple[str, memoryview]]:
    """Keys with their values, from where they lie in `files`, descriptors by segment.

    What lies side by side is read at once: the records of a batch were written shortly after each
    other, and a call of the system takes longer than to copy one of them.

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
    """Reads all segments of a store.

    Args:
        salvage: take every sound record, also of groups that are not whole.
    """

    def __init__(self, directory: Path, *, salvage: bool = False) -> None:
        self.image = Image()
        self._directory = directory
        self._salvage = salvage
        self._group: list[tuple[int, Entry]] = []
        self._group_commit = 0
        self._suspect: Damage | None = None  # becomes the torn tail, or damage once more follows

    def run(self) -> Image:
        """The whole image; its `damages` say what was not as it must be.

        Raises:
            StoreError: a segment was written by something else than this version of Umbra.
        """
        numbers = segment_numbers(self._directory)
        for number in numbers:
            self.image.sizes[number] = SEGMENT_HEADER_BYTES
            data = segment_bytes(self._directory, number)
            self._read(number, data, is_newest=number == numbers[-1])
        missing = [n for n in range(numbers[0], numbers[-1]) if n not in numbers] if numbers else []
        for number in missing:
            self.image.damages.append(Damage(number, 0, 0, "the file is missing"))
        if self._group and self._suspect is None:
            segment, entry = self._group[0]
            self._suspect = Damage(segment, entry.offset, entry.end, "a group without its end")
        if self._salvage:
            self._apply()
        suspect = self._suspect
        if suspect is not None and numbers and suspect.segment == numbers[-1]:
            self.image.torn = suspect
        elif suspect is not None:
            self.image.damages.append(suspect)
        return self.image

    def _read(self, number: int, data: memoryview, *, is_newest: bool) -> None:
        fault = header_fault(data, number)
        if fault and is_newest and len(data) <= SEGMENT_HEADER_BYTES and not any(data):
            # The file was being made when the process ended.
            self.image.torn = Damage(number, 0, len(data), fault)
            self.image.sizes[number] = 0
            return
        if "schema" in fault:
            path = segment_path(self._directory, number)
            raise StoreError(f"{path}: {fault}; use the version that wrote it, or a new store")
        if fault:
            self.image.damages.append(Damage(number, 0, len(data), fault))
            return
        for found in scan(data):
            if isinstance(found, Fault):
                self._broken(Damage(number, found.offset, found.end, found.reason))
            else:
                self._take(number, found)

    def _broken(self, damage: Damage) -> None:
        if self._suspect is not None:
            self.image.damages.append(self._suspect)
        self._suspect = damage

    def _take(self, number: int, entry: Entry) -> None:
        image = self.image
        expected = image.commit + 1
        if self._group and entry.commit != self._group_commit:
            reason = f"group {self._group_commit} has no end"
            image.damages.append(Damage(number, self._group[0][1].offset, entry.offset, reason))
            self._drop_group()
        elif not self._group and image.commit and entry.commit != expected:
            if self._suspect is None:
                reason = f"group {expected} is missing before group {entry.commit}"
                image.damages.append(Damage(number, entry.offset, entry.offset, reason))
        self._group_commit = entry.commit
        self._group.append((number, entry))
        if not entry.is_last:
            return
        if self._suspect is not None:  # more follows, so it is no torn tail
            image.damages.append(self._suspect)
            self._suspect = None
        self._apply()
        image.commit = entry.commit
        image.sizes[number] = entry.end

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
    """Raise unless `image` is sound.

    Raises:
        StoreError: names the damage and the remedy.
    """
    if image.damages:
        more = f" (and {len(image.damages) - 1} more)" if len(image.damages) > 1 else ""
        raise StoreError(
            f"the store in {directory} is damaged: {image.damages[0]}{more}; "
            f"`umbra buffer --repair --store {directory}` drops what is lost and says what that is"
        )
