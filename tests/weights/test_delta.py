"""The delta codec: bit-exact for every format, and safe against any bytes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbra.proto.errors import WireError
from umbra.services.weights import delta

COMPRESSOR = delta.compressor()
EDGES = (1, 127, 128, 32_767, 32_768, 65_535, 65_536, 1 << 31)  # of widths
DIFFERENCES = st.sampled_from(EDGES) | st.integers(0, 2**32 - 1)


def encode(old: bytes, new: bytes, item: int, limit: int = 1 << 30) -> bytes | None:
    return delta.encode(memoryview(old), memoryview(new), item, limit, COMPRESSOR)


@settings(max_examples=60, deadline=None)
@given(
    item=st.sampled_from([2, 4]),
    count=st.integers(1, 3000),
    changes=st.lists(st.tuples(st.integers(0, 2999), DIFFERENCES), max_size=40),
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
    there_and_back(old, words.tobytes(), item)


def there_and_back(old: bytes, new: bytes, item: int) -> bytes:
    """Return the delta, which leads from `old` to `new`."""
    made = encode(old, new, item)
    assert made is not None
    target = bytearray(old)
    delta.apply(made, memoryview(target))
    assert target == new
    return made


@pytest.mark.parametrize(
    "places", [[0], [65_534], [65_535], [65_536], [99_999], [0, 99_999], [70_000, 70_001], []]
)
def test_gaps_beyond_16_bits(places: list[int]) -> None:
    old = np.zeros(100_000, np.uint16)
    new = old.copy()
    new[places] = 65535
    assert len(there_and_back(old.tobytes(), new.tobytes(), 2)) < 64


def test_what_does_not_pay_is_not_encoded() -> None:
    random = np.random.default_rng(0)
    old, new = (random.integers(0, 256, 1 << 16, dtype=np.uint8).tobytes() for _ in range(2))
    assert encode(old, new, 2, 1 << 15) is None
    new = old[:-2] + b"\x01\x02"
    made = there_and_back(old, new, 2)
    assert encode(old, new, 2, len(made)) is None, "it is no smaller"
    assert encode(old, new, 2, len(made) + 1) == made


def test_a_spoiled_delta_is_refused_or_stays_within_its_bucket() -> None:
    """Only the checksum shows the fault in the bucket; bytes around it are not touched."""
    old = bytes(range(256)) * 4
    new = bytearray(old)
    new[100], new[700] = 1, 2
    made = encode(old, bytes(new), 2)
    assert made is not None
    spoiled = [made[:at] for at in range(len(made))]
    for at, byte in enumerate(made):
        spoiled += [made[:at] + bytes([byte ^ b]) + made[at + 1 :] for b in (1, 16, 128, 255)]
    refused = wrong = 0
    guard = b"\xa5" * 64
    for candidate in spoiled:
        around = bytearray(guard + old + guard)
        try:
            delta.apply(candidate, memoryview(around)[64:-64])
        except WireError as error:
            refused += 1
            assert str(error)
            assert around[64:-64] == old, "a delta that is refused has changed nothing"
        else:
            wrong += around[64:-64] != new
        assert (around[:64], around[-64:]) == (guard, guard)
    assert refused > len(spoiled) / 2
    assert wrong, "or the checksum would not be needed"


def test_a_delta_that_leaves_its_bucket_is_refused() -> None:
    old = bytes(2048)
    made = encode(old, old[:-2] + b"\x01\x02", 2)
    assert made is not None
    shorter = bytearray(1024)
    with pytest.raises(WireError, match="leaves its bucket"):
        delta.apply(made, memoryview(shorter))
    assert shorter == bytes(1024)
