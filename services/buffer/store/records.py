"""How records lie in a segment file of the durable store, and what is wrong with a broken one.

A segment begins with its header: which store it is of, its number, and the last group before it,
with the checksum over all groups up to that one (`chain`). Then come records, each of them

    magic 4s | checksum u64 | commit u64 | value bytes u32 | key bytes u16 | kind u8 | key | value

little-endian; `checksum` (xxh3-64) covers everything behind it. A deletion has no key of its own:
its value is the MessagePack array of the deleted keys, as thousands go together. `commit` numbers
the group commits of a store; the last record of a group has the flag `END` in its kind. A group
counts as a whole or not at all, and an answer goes out only after its group is on disk and the head
(see `head`) names it. So a group without its end behind what the head names was never acknowledged:
it is a torn tail, which a crash leaves and which is cut off. All else that is broken is damage to
what was promised.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
from xxhash import xxh3_64_intdigest

SCHEMA = 7  # of the records and of what the broker puts into them
SEGMENT_MAGIC = b"UMBRASTO"
RECORD_MAGIC = b"\xf5uR\xfa"
DELETE, END = 1, 2

Value: TypeAlias = bytes | memoryview

_encode_keys = msgspec.msgpack.Encoder().encode
_decode_keys = msgspec.msgpack.Decoder(list[str]).decode
_SEGMENT = struct.Struct("<8sI4QQ")  # magic, schema, store, number, commit, chain; a checksum
_PREFIX = struct.Struct("<4sQ")
_REST = struct.Struct("<QIHB")
PREFIX_BYTES = _PREFIX.size
HEAD_BYTES = _PREFIX.size + _REST.size
SEGMENT_HEADER_BYTES = _SEGMENT.size
_SCHEMA_END = len(SEGMENT_MAGIC) + 4
MAX_VALUE_BYTES = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Entry:
    """A sound record: a key and its value, or deleted keys."""

    offset: int
    end: int
    commit: int
    checksum: int
    key: str
    deleted: list[str]
    is_last: bool  # of its group


@dataclass(frozen=True, slots=True)
class Fault:
    """Bytes `[offset, end)` of a segment that are no sound record."""

    offset: int
    end: int
    reason: str


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """Header of a segment."""

    store: int
    number: int
    commit: int  # the last group before it
    chain: int  # over all groups up to that one

    def pack(self) -> bytes:
        facts = (SEGMENT_MAGIC, SCHEMA, self.store, self.number, self.commit, self.chain)
        checksum = xxh3_64_intdigest(_SEGMENT.pack(*facts, 0))
        return _SEGMENT.pack(*facts, checksum)


def read_header(data: memoryview, number: int) -> SegmentHeader | str:
    """Read the header of segment `number`, or return what is wrong with it."""
    if bytes(data[: len(SEGMENT_MAGIC)]) != SEGMENT_MAGIC[: len(data)]:
        return "it is not a segment of an Umbra store"
    if len(data) >= _SCHEMA_END:
        (schema,) = struct.unpack_from("<I", data, len(SEGMENT_MAGIC))
        if schema != SCHEMA:
            return f"it has schema {schema}, this umbra-rl knows schema {SCHEMA} only"
    if len(data) < SEGMENT_HEADER_BYTES:
        return f"its header has {len(data)} of {SEGMENT_HEADER_BYTES} bytes"
    magic, schema, store, found, commit, chain, checksum = _SEGMENT.unpack_from(data)
    facts = (magic, schema, store, found, commit, chain)
    if checksum != xxh3_64_intdigest(_SEGMENT.pack(*facts, 0)):
        return "its header has a wrong checksum"
    return (
        SegmentHeader(store, number, commit, chain)
        if found == number
        else (f"it says that it is segment {found}")
    )


def chain_on(chain: int, checksums: Iterable[int]) -> int:
    """Extend the checksum over all groups by one with records of these `checksums`."""
    each = (chain, *checksums)
    return xxh3_64_intdigest(struct.pack(f"<{len(each)}Q", *each))


def checksum_of(head: bytes) -> int:
    """Read the checksum from a record header."""
    return _PREFIX.unpack_from(head)[1]


def pack_group(
    commit: int, values: Mapping[str, Value], deleted: Sequence[str]
) -> list[tuple[bytes, Value]]:
    """Return the records of a group, each as (header and key, value); `values` first, in order."""
    records: list[tuple[bytes, Value, int]] = [(key.encode(), v, 0) for key, v in values.items()]
    if deleted:
        records.append((b"", _encode_keys(deleted), DELETE))
    name, value, kind = records[-1]
    records[-1] = (name, value, kind | END)
    return [(_pack_head(commit, *record), record[1]) for record in records]


def _pack_head(commit: int, name: bytes, value: Value, kind: int) -> bytes:
    rest = _REST.pack(commit, len(value), len(name), kind) + name
    return _PREFIX.pack(RECORD_MAGIC, xxh3_64_intdigest(rest + value)) + rest


def value_of(record: memoryview, key: str) -> memoryview | str:
    """Return the value in the record of `key`, or what is wrong with it."""
    name = key.encode()
    begin = HEAD_BYTES + len(name)
    magic, checksum = _PREFIX.unpack_from(record)
    if magic != RECORD_MAGIC or xxh3_64_intdigest(record[PREFIX_BYTES:]) != checksum:
        return parse_reason(record, 0) or "another length"
    return record[begin:] if bytes(record[HEAD_BYTES:begin]) == name else "another key"


def parse(data: memoryview, offset: int) -> Entry | str:
    """Parse the record at `offset`, or return why there is none."""
    left = len(data) - offset
    if left < HEAD_BYTES:
        return "cut off in the head of a record"
    magic, checksum = _PREFIX.unpack_from(data, offset)
    if magic != RECORD_MAGIC:
        return "no record begins here"
    commit, value_bytes, key_bytes, kind = _REST.unpack_from(data, offset + PREFIX_BYTES)
    end = offset + HEAD_BYTES + key_bytes + value_bytes
    if end > len(data):
        return "cut off in a record"
    if xxh3_64_intdigest(data[offset + PREFIX_BYTES : end]) != checksum:
        return "wrong checksum"
    begin = offset + HEAD_BYTES
    try:
        key = str(data[begin : begin + key_bytes], "utf-8")
        deleted = _decode_keys(data[begin:end]) if kind & DELETE else []
    except (UnicodeDecodeError, msgspec.DecodeError):
        return "the key is not text"
    return Entry(offset, end, commit, checksum, key, deleted, bool(kind & END))


def scan(data: memoryview) -> Iterator[Entry | Fault]:
    """Yield all records of a segment in order, and the stretches between them that are none."""
    whole: bytes | None = None
    offset = SEGMENT_HEADER_BYTES
    while offset < len(data):
        found = parse(data, offset)
        if isinstance(found, Entry):
            yield found
            offset = found.end
            continue
        whole = bytes(data) if whole is None else whole
        begin = offset
        while isinstance(found, str):  # on to the next sound record, if there is one
            offset = whole.find(RECORD_MAGIC, offset + 1)
            if offset < 0:
                yield Fault(begin, len(data), parse_reason(data, begin))
                return
            found = parse(data, offset)
        yield Fault(begin, offset, parse_reason(data, begin))


def parse_reason(data: memoryview, offset: int) -> str:
    found = parse(data, offset)
    return found if isinstance(found, str) else ""
