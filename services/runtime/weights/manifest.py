"""The layout of one version of the weights in memory, and the checksums over it.

Tensors lie in the caller's order (layer by layer), each at a multiple of 64 bytes. Buckets are the
units of transfer and verification: consecutive byte ranges, cut between tensors and, within a
tensor that is larger than a bucket, between rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import TypeVar, cast

import msgspec
import xxhash

from umbra.proto.bounds import BUCKETS, DIMENSIONS, TENSORS
from umbra.proto.errors import PeerLostError, UsageError, WireError
from umbra.proto.records import DType, Manifest, TensorEntry
from umbra.services.runtime.gpu.cuda import DeviceMemory

ALIGN_BYTES = 64  # a cache line, and what GPU copies like
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

Part = memoryview | DeviceMemory
"""Consecutive bytes of a version, in memory of this process or on its GPU."""

P = TypeVar("P", bound=Part)


def build_manifest(
    tensors: Iterable[tuple[str, str, Sequence[int]]], bucket_bytes: int
) -> Manifest:
    """The manifest of `tensors`, given as `(name, dtype, shape)`, in buckets of at most
    `bucket_bytes`.

    Raises:
        ValueError: no tensors or too many, a name twice, an unknown dtype, too many dimensions, or
            `bucket_bytes` below 128.
        UsageError: `bucket_bytes` is so small that there are too many buckets.
    """
    if bucket_bytes < 2 * ALIGN_BYTES:
        raise ValueError(f"buckets of {bucket_bytes} bytes are too small")
    entries: list[TensorEntry] = []
    names: set[str] = set()
    offset = 0
    for name, dtype, shape in tensors:
        if dtype not in ITEM_BYTES:
            raise ValueError(f"tensor {name} has dtype {dtype}; known: {', '.join(ITEM_BYTES)}")
        if name in names:
            raise ValueError(f"two tensors are named {name}")
        if len(shape) > DIMENSIONS:
            raise ValueError(f"tensor {name} has {len(shape)} dimensions, at most {DIMENSIONS}")
        names.add(name)
        nbytes = prod(shape) * ITEM_BYTES[dtype]
        entries.append(
            TensorEntry(
                name=name,
                dtype=cast(DType, dtype),
                shape=list(shape),
                offset=offset,
                nbytes=nbytes,
            )
        )
        offset = _aligned(offset + nbytes)
    if offset == 0:
        raise ValueError("a manifest needs at least one tensor that is not empty")
    if len(entries) > TENSORS:
        raise ValueError(f"{len(entries)} tensors, at most {TENSORS}")
    buckets = list(_buckets(entries, offset, bucket_bytes))
    if len(buckets) > BUCKETS:
        raise UsageError(
            f"{len(buckets)} buckets of {bucket_bytes} bytes, at most {BUCKETS}: raise "
            "weight_hub.bucket_bytes"
        )
    return Manifest(
        tensors=entries, buckets=buckets, total_bytes=offset, digest=_digest(entries, buckets)
    )


def check_manifest(manifest: Manifest) -> None:
    """Check a manifest that came over the wire, in time linear in its size.

    The decoder has bounded its counts, its dimensions and its sizes, and knows no other types.

    Raises:
        WireError: tensors that are all empty, overlap, leave the slot or do not have the size
            of their shape, buckets that do not cover the slot in order, or another layout's digest.
    """
    end = 0
    names: set[str] = set()
    for entry in manifest.tensors:
        size = prod(entry.shape) * ITEM_BYTES.get(entry.dtype, -1)
        is_sized = size == entry.nbytes and min(size, *entry.shape, 0) == 0
        if not is_sized or entry.offset < end or entry.name in names:
            raise WireError(f"manifest: bad layout of tensor {entry.name}", path="tensors")
        end = entry.offset + entry.nbytes
        names.add(entry.name)
    covered = 0
    for start, stop in manifest.buckets:
        if start != covered or stop <= start:
            raise WireError(f"manifest: bucket [{start}, {stop}) is out of order", path="buckets")
        covered = stop
    if not 0 < end <= manifest.total_bytes == covered:
        raise WireError("manifest: buckets do not cover the tensors", path="total_bytes")
    if manifest.digest != _digest(manifest.tensors, manifest.buckets):
        raise WireError("manifest: the digest is not that of the layout", path="digest")


def check_dtype(manifest: Manifest, dtype: str) -> None:
    """Check that what `manifest` lays out is served in `dtype`, as `weight_hub.dtype` names it.

    Raises:
        UsageError: it is not, so that trainer and generators would round differently.
    """
    if all(entry.dtype != _NAMES[dtype] for entry in manifest.tensors):
        raise UsageError(
            f"the trainer does not serve {dtype}, in which this process computes, because one of "
            "them is on a GPU and the other on a CPU: set weight_hub.dtype to what both are to use"
        )


def with_starts(manifest: Manifest, parts: Iterable[P]) -> Iterator[tuple[int, P]]:
    """Each part of a version, and at which byte it begins.

    Raises:
        PeerLostError: together they are not as long as the version.
    """
    end = 0
    for part in parts:
        start, end = end, end + len(part)
        yield start, part
    if end != manifest.total_bytes:
        raise PeerLostError(f"{end} bytes came of a version of {manifest.total_bytes}")


def checksum(data: memoryview) -> int:
    """xxh3-64 of one bucket's bytes."""
    return xxhash.xxh3_64_intdigest(data)


def wrong_checksum(manifest: Manifest, bucket: int) -> str:
    """What is said of a bucket whose bytes are not those that were published."""
    start, end = manifest.buckets[bucket]
    return f"checksum of bucket {bucket} [{start}, {end}) is wrong"


def largest_bucket(manifest: Manifest) -> int:
    """Bytes of the largest bucket."""
    return max(end - start for start, end in manifest.buckets)


def checksums(manifest: Manifest, view: memoryview) -> list[int]:
    """The checksum of every bucket of the version in `view`, `[total_bytes]`."""
    return [checksum(view[start:end]) for start, end in manifest.buckets]


def item_bytes(manifest: Manifest) -> list[int]:
    """By bucket the size of its elements: 4 where all are fp32, else 2."""
    sizes: list[int] = []
    index = 0
    for start, end in manifest.buckets:
        while manifest.tensors[index].offset + manifest.tensors[index].nbytes <= start:
            if index + 1 == len(manifest.tensors):
                break
            index += 1
        least, at = ITEM_BYTES["F32"], index
        while at < len(manifest.tensors) and manifest.tensors[at].offset < end:
            least = min(least, ITEM_BYTES[manifest.tensors[at].dtype])
            at += 1
        sizes.append(least)
    return sizes


def _buckets(entries: list[TensorEntry], total: int, bound: int) -> Iterator[tuple[int, int]]:
    start = 0
    ends = [*(entry.offset for entry in entries[1:]), total]
    for entry, end in zip(entries, ends, strict=True):
        if end - start <= bound:
            continue  # it still fits into the bucket that is open
        if start < entry.offset:
            yield start, entry.offset
            start = entry.offset
        step = _step(entry, bound - ALIGN_BYTES)  # room for the padding after the last row
        while end - start > bound:
            yield start, start + step
            start += step
    if start < total:
        yield start, total


def _step(entry: TensorEntry, room: int) -> int:
    """Bytes of a large tensor per bucket: whole rows, or elements where a row is too large."""
    row = entry.nbytes // entry.shape[0] if entry.shape else entry.nbytes
    unit = row if row <= room else ITEM_BYTES[entry.dtype]
    return room // unit * unit


def _digest(entries: list[TensorEntry], buckets: list[tuple[int, int]]) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode([entries, buckets]))


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN_BYTES) * ALIGN_BYTES
