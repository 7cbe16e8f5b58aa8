"""Lossless difference between two contents of one bucket: which elements changed, and by how much.

Elements are taken as unsigned integers, 2 bytes each (bf16, fp16) or 4 (fp32): a step of one unit
in the last place is a difference of 1 whatever the format, so that most differences are 1 or -1.
The format, little-endian:

    u8 item bytes | u8 gap bytes | u8 difference bytes | u8 0 | u32 count | u32 gap stream bytes
    gap stream | difference stream

The gap stream holds, for each changed element, how many elements it lies after the one before it
(the first: after -1), minus one. Where a gap does not fit, entries with difference 0 bridge it. The
difference stream holds `new - old` modulo 2^bits, zigzag (0, -1, 1, -2 become 0, 1, 2, 3). Both are
byte planes (all low bytes first), compressed with zstandard.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from umbra.proto.errors import WireError

Words = NDArray[Any]  # unsigned integers

LEVEL = 1
HEADER = struct.Struct("<BBBBII")
_TYPES = {1: "<u1", 2: "<u2", 4: "<u4"}
_SIGNED = {2: "<i2", 4: "<i4"}
_U8_GAP_DENSITY = 1 / 250  # of changed elements; below, one byte would need too many bridges


def compressor() -> Any:
    """Make a compressor for `encode`: costly, so each thread keeps one."""
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=False)


def encode(
    old: memoryview, new: memoryview, item_bytes: int, limit_bytes: int, compressor: Any
) -> bytes | None:
    """Return the delta from `old` to `new`, which have the same length.

    That is a multiple of `item_bytes`. Returns None where the delta would not be smaller than
    `limit_bytes`; contents with more changes than such a delta could hold are given up before
    anything is compressed.
    """
    before = np.frombuffer(old, _TYPES[item_bytes])
    after = np.frombuffer(new, _TYPES[item_bytes])
    places = np.flatnonzero(before != after)
    # Entropy coding of gap and difference takes at least about 3 bits per change.
    if places.size * 3 // 8 > limit_bytes:
        return None
    differences = _zigzag(after[places] - before[places], item_bytes)
    gaps = np.diff(places, prepend=-1) - 1
    gap_bytes = 1 if places.size >= before.size * _U8_GAP_DENSITY else 2
    gaps, differences = _bridge(gaps, differences, (1 << 8 * gap_bytes) - 1)
    largest = int(differences.max(initial=0))
    wide = 1 if largest < 1 << 8 else 2 if largest < 1 << 16 else 4
    gap_stream = compressor.compress(_planes(gaps, gap_bytes))
    difference_stream = compressor.compress(_planes(differences, wide))
    header = HEADER.pack(item_bytes, gap_bytes, wide, 0, gaps.size, len(gap_stream))
    delta = header + gap_stream + difference_stream
    return delta if len(delta) < limit_bytes else None


def apply(delta: bytes | memoryview, target: memoryview) -> None:
    """Turn the old content in `target` into the new one, in place.

    The delta is not trusted: whatever its bytes, nothing outside of `target` is touched. Only the
    checksum of the result shows whether it is right.

    Raises:
        WireError: this is no delta for a bucket of this length.
    """
    try:
        item_bytes, gap_bytes, wide, _, count, split = HEADER.unpack_from(delta)
        words = np.frombuffer(target, _TYPES[item_bytes])
        if count > words.size or gap_bytes not in _TYPES or wide not in _TYPES:
            raise WireError(f"a delta with {count} changes of {words.size} elements")
        body = memoryview(delta)[HEADER.size :]
        inflate = zstandard.ZstdDecompressor()
        gaps = _unplanes(inflate, body[:split], count, gap_bytes)
        differences = _unplanes(inflate, body[split:], count, wide)
        places = np.cumsum(gaps.astype(np.int64) + 1) - 1
        if count and places[-1] >= words.size:
            raise WireError("a delta that leaves its bucket")
        words[places] += _unzigzag(differences, item_bytes)
    except (struct.error, KeyError, ValueError, zstandard.ZstdError) as error:
        raise WireError(f"not a delta: {error}") from error


def _zigzag(values: Words, item_bytes: int) -> Words:
    signed = values.view(_SIGNED[item_bytes])
    return ((signed << 1) ^ (signed >> (8 * item_bytes - 1))).view(values.dtype)


def _unzigzag(values: Words, item_bytes: int) -> Words:
    wide = values.astype(_TYPES[item_bytes])
    unit = np.ones((), wide.dtype)
    return (wide >> unit) ^ (~(wide & unit) + unit)


def _bridge(
    gaps: NDArray[np.int64], differences: Words, largest: int
) -> tuple[NDArray[np.int64], Words]:
    bridges = gaps // (largest + 1)  # each covers `largest` elements and its own place
    total = int(bridges.sum())
    if total == 0:
        return gaps, differences
    ends = np.cumsum(bridges + 1) - 1  # where the changes come to lie
    all_gaps = np.full(gaps.size + total, largest, dtype=np.int64)
    all_differences = np.zeros(gaps.size + total, dtype=differences.dtype)
    all_gaps[ends] = gaps - bridges * (largest + 1)
    all_differences[ends] = differences
    return all_gaps, all_differences


def _planes(values: NDArray[Any], width: int) -> bytes:
    return values.astype(_TYPES[width]).view("u1").reshape(-1, width).T.tobytes()


def _unplanes(inflate: Any, stream: memoryview, count: int, width: int) -> Words:
    # The size that the frame states is checked first: it is what would be allocated.
    size = zstandard.frame_content_size(stream)
    if size != count * width:
        raise WireError(f"a delta stream of {size} bytes for {count} changes")
    raw = inflate.decompress(stream, max_output_size=size) if size else b""
    planes = np.frombuffer(raw, "u1").reshape(width, count)
    return np.ascontiguousarray(planes.T).view(_TYPES[width])[:, 0]
