"""Frames that are broken, or cost their receiver as much as the schema allows, made from it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgpack
import msgspec.inspect as introspect

from umbra.proto.messages import Message

LEAST = b"\x80"  # an empty map: one byte, and an object where it is decoded
LEAVES: dict[type[introspect.Type], Any] = {
    introspect.StrType: "ab", introspect.BytesType: b"ab", introspect.BoolType: True,
    introspect.IntType: 70_000, introspect.FloatType: 1.5,
}  # fmt: skip
MOST_PARTS = 1 << 20
LENGTH_PREFIXES = [
    b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x05", b"\xdb\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdd\x00\x0f\xff\xff", b"\xdc\xff\xff",
    b"\xde\xff\xff", b"\xc0", b"\xc1", b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00", b"\xd6\xff\0\0\0\0",
]  # fmt: skip


def fill(kind: introspect.Type, cap: int) -> Any:
    """A value of `kind` with as many and as small parts as it may have, `cap` in each list or map.

    Small, but large enough that each part is an object of its own.
    """
    match kind:
        case introspect.ListType():
            return [fill(kind.item_type, cap)] * min(kind.max_length or 0, cap)
        case introspect.DictType() if isinstance(kind.value_type, introspect.AnyType):
            return {f"{n:x}": [] for n in range(min(kind.max_length or 0, cap))}
        case introspect.DictType():
            value = fill(kind.value_type, cap)
            return {f"{n:x}": value for n in range(min(kind.max_length or 0, cap))}
        case introspect.StructType():
            return {field.encode_name: fill(field.type, cap) for field in kind.fields}
        case introspect.TupleType():
            return [fill(item, cap) for item in kind.item_types]
        case introspect.UnionType():
            return fill(kind.types[0], cap)
        case introspect.LiteralType():
            return kind.values[0]
        case _:
            return LEAVES[type(kind)]


def costly_bodies(cls: type[Message], limit: int) -> Iterator[bytes]:
    """Bodies of `cls` of at most `limit` bytes: a sound one, and ones with too much in a field."""
    info = introspect.type_info(cls)
    assert isinstance(info, introspect.StructType)
    cap, sound = 1, b""
    while cap <= MOST_PARTS and len(packed := msgpack.packb(fill(info, cap))) <= limit:
        cap, sound = 2 * cap, packed
    if sound:
        yield sound
    count = max(limit - 100, 0)
    for field in [*(field.encode_name for field in info.fields), "unknown"]:
        begin = b"\x81" + msgpack.packb(field)
        yield begin + b"\xdd" + count.to_bytes(4, "big") + LEAST * count
        yield begin + b"\x91" * count
        yield begin + b"\xdf" + (count // 3).to_bytes(4, "big") + b"\xa1a\xc0" * (count // 3)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Change `data` in one to four places."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, start = (rng.randrange(len(changed) + 1) for _ in range(2))
        kind = rng.randrange(5)
        if kind == 0 and changed:
            changed[at % len(changed)] ^= 1 << rng.randrange(8)
        elif kind == 1 and changed:
            changed[at % len(changed)] = rng.randrange(256)
        elif kind == 2:
            del changed[at : at + rng.randint(1, 8)]
        elif kind == 3:
            changed[at:at] = changed[start : start + rng.randint(1, 32)]
        else:
            changed[at : at + rng.randrange(2)] = rng.choice(LENGTH_PREFIXES)
    return bytes(changed)
