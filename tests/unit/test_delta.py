"""The delta codec: bit-exact for every format, and safe against any bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbra.proto.errors import WireError
from umbra.services.runtime import delta

COMPRESSOR = delta.compressor()


def advance(old: bytearray, new: bytes, item: int, limit: int = 1 << 30) -> bytes | None:
    return delta.advance(memoryview(old), memoryview(new), item, limit, COMPRESSOR)


@settings(max_examples=60, deadline=None)
@given(
    item=st.sampled_from([2, 4]),
    count=st.integers(1, 3000),
    changes=st.lists(st.tuples(st.integers(0, 2999), st.integers(0, 2**32 - 1)), max_size=40),
    seed=st.integers(0, 99),
)
def test_every_bit_comes_back(
    item: int, count: int, changes: list[tuple[int, int]], seed: int
) -> None:
    """Whatever changes by whatever difference, NaNs and signs included."""
    old = np.random.default_rng(seed).integers(0, 256, count * item, dtype=np.uint8).tobytes()
    words = np.frombuffer(old, f"<u{item}").copy()
    for place, difference in changes:
        at = place % count
        words[at] = (int(words[at]) + difference) % (1 << 8 * item)
    new = words.tobytes()
    held = bytearray(old)
    made = advance(held, new, item)
    assert made is not None
    assert held == new
    target = bytearray(old)
    delta.apply(made, memoryview(target))
    assert target == new


@pytest.mark.parametrize("places", [[0], [99_999], [0, 99_999], [70_000, 70_001], []])
def test_gaps_beyond_16_bits(places: list[int]) -> None:
    old = np.zeros(100_000, np.uint16)
    new = old.copy()
    new[places] = 65535
    made = advance(bytearray(old.tobytes()), new.tobytes(), 2)
    assert made is not None
    assert len(made) < 64
    target = bytearray(old.tobytes())
    delta.apply(made, memoryview(target))
    assert target == new.tobytes()


def test_what_does_not_pay_is_not_encoded() -> None:
    random = np.random.default_rng(0)
    old, new = (random.integers(0, 256, 1 << 16, dtype=np.uint8).tobytes() for _ in range(2))
    held = bytearray(old)
    assert advance(held, new, 2, 1 << 15) is None
    assert held == new


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=64), place=st.integers(0, 40), value=st.integers(0, 255))
def test_nonsense_is_refused_and_nothing_else_breaks(data: bytes, place: int, value: int) -> None:
    """Random bytes, and a real delta with one byte changed: WireError, or wrong content."""
    old = bytes(range(256)) * 4
    new = bytearray(old)
    new[100], new[700] = 1, 2
    made = advance(bytearray(old), bytes(new), 2)
    assert made is not None
    spoiled = bytearray(made)
    spoiled[place % len(made)] = value
    for candidate in (data, bytes(spoiled), bytes(spoiled[: place % len(made)])):
        target = bytearray(old)
        try:
            delta.apply(candidate, memoryview(target))
        except WireError:
            pass
        assert len(target) == len(old)
