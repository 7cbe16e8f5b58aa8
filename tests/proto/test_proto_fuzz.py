"""Whatever arrives, decoding ends with a message or a WireError, in bounded memory."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import msgpack
import pytest

from umbra.proto.codec import decode
from umbra.proto.errors import WireError

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "frames.json"
MESSAGES = {
    name: [bytes.fromhex(frame) for frame in frames]
    for name, frames in json.loads(GOLDEN.read_text(encoding="utf-8")).items()
}
EVENT_HEADER, LEASES_HEADER = MESSAGES["Event"][0], MESSAGES["TaskLeases"][0]
MUTATIONS = 10_000
# msgpack makes room for at most 10,000 items when it reads a length, at each of 1,024 levels.
SMALL_FRAME_BOUND = 96 << 20
LENGTH_PREFIXES = [
    b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x05", b"\xdb\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdd\x00\x0f\xff\xff", b"\xdc\xff\xff",
    b"\xde\xff\xff", b"\xc0", b"\xc1", b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00", b"\xd6\xff\0\0\0\0",
]  # fmt: skip


@contextmanager
def memory_below(bound: int) -> Iterator[None]:
    """Fail when the block's peak of allocations is above `bound` bytes."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < bound


def decode_or_refuse(frames: list[bytes]) -> bool:
    """Decode; return whether it was a message. Any error other than WireError gets out."""
    try:
        decode(frames)
    except WireError as error:
        assert str(error)
        assert error.path
        return False
    return True


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


def test_mutated_messages() -> None:
    rng = random.Random(0)
    decoded = 0
    with memory_below(SMALL_FRAME_BOUND):
        for number, frames in zip(range(MUTATIONS), cycle(MESSAGES.values())):
            mutated = list(frames)
            which = 0 if number % 3 == 0 else 1
            mutated[which] = mutate(frames[which], rng)
            decoded += decode_or_refuse(mutated)
    # Both outcomes happen, or the mutations are no test.
    assert MUTATIONS / 100 < decoded < MUTATIONS / 2


def test_the_body_of_one_message_under_the_header_of_another() -> None:
    taken = {
        (name, other)
        for name, (header, _) in MESSAGES.items()
        for other, (_, body) in MESSAGES.items()
        if decode_or_refuse([header, body])
    }
    assert {(name, name) for name in MESSAGES} < taken
    # A message whose fields all have defaults is in every body; most are not.
    assert len(taken) < len(MESSAGES) ** 2 / 3


LEVELS = (
    b"\x91", b"\x81\xa1a", b"\xdd\x00\x00\x00\x01", b"\xdd\x00\x0f\xff\xff",
    b"\xdf\x00\x0f\xff\xff\xa1a",
)  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("depth", [500, 1024, 200_000])
def test_deep_nesting(level: bytes, depth: int) -> None:
    body = b"\x82\xa4kind\xa1x\xa6fields\x81\xa1a" + level * depth + b"\xc0"
    with memory_below(SMALL_FRAME_BOUND + 2 * len(body)):
        decode_or_refuse([EVENT_HEADER, body])
    # And where the type of the field is known.
    assert not decode_or_refuse([LEASES_HEADER, b"\x81\xa5tasks" + level * depth + b"\xc0"])


@pytest.mark.parametrize("prefix", LENGTH_PREFIXES)
def test_huge_declared_lengths(prefix: bytes) -> None:
    with memory_below(1 << 20):
        assert not decode_or_refuse([EVENT_HEADER, prefix])
        assert not decode_or_refuse([prefix, msgpack.packb({})])
        assert not decode_or_refuse([EVENT_HEADER, b"\x81\xa6fields" + prefix])
