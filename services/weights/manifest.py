"""The layout of one version of the weights in memory, and the checksums over it.

Tensors lie in the caller's order, each at a multiple of 64 bytes. Buckets are the units of transfer
and verification: consecutive byte ranges, cut between tensors and, within larger ones, between
rows. Where the trainer runs on several hosts, each bucket has an owner: the host whose ranks write
it, and whose hub hands it out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import cast

import msgspec
import xxhash
from msgspec.structs import replace

from umbra.proto.bounds import BUCKETS, OWNERS
from umbra.proto.errors import UsageError, WireError
from umbra.proto.records import AdapterFacts, DType, Manifest, TensorEntry
from umbra.services.weights.gpu.cuda import DeviceMemory

ALIGN_BYTES = 64  # a cache line, and what GPU copies like
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

Part = memoryview | DeviceMemory
"""Consecutive bytes of a version, in memory of this process or on its GPU."""

RowOwners = Sequence[tuple[int, int]]
"""The owners of a tensor's rows: `(end, owner)`, ends ascending up to the number of rows."""


def build_manifest(
    tensors: Iterable[tuple[str, str, Sequence[int]]],
    bucket_bytes: int,
    owners: Mapping[str, RowOwners] | None = None,
    adapter: AdapterFacts | None = None,
) -> Manifest:
    """Return the manifest of `tensors`, given as `(name, dtype, shape)`, in buckets of at most
    `bucket_bytes`.

    Args:
        owners: by tensor which trainer host has which rows; the others are host 0's.
        adapter: what the tensors belong to, if they are the factors of one.

    Raises:
        ValueError: no tensors, or owners of other rows than a tensor has.
        UsageError: `bucket_bytes` is so small that there are too many buckets.
    """
    entries: list[TensorEntry] = []
    offset = 0
    for name, dtype, shape in tensors:
        nbytes, kind, sizes = prod(shape) * ITEM_BYTES[dtype], cast(DType, dtype), list(shape)
        entry = TensorEntry(name=name, dtype=kind, shape=sizes, offset=offset, nbytes=nbytes)
        entries.append(entry)
        offset += -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
    if offset == 0:
        raise ValueError("a manifest needs at least one tensor that is not empty")
    cut = list(_buckets(_stretches(entries, offset, owners or {}), bucket_bytes))
    if len(cut) > BUCKETS:
        raise UsageError(
            f"{len(cut)} buckets of {bucket_bytes} bytes, at most {BUCKETS}: raise "
            "weight_hub.bucket_bytes"
            + (", or spread the trainer over fewer hosts" if owners else "")
        )
    made = Manifest(
        tensors=entries,
        buckets=[(start, end) for start, end, _ in cut],
        total_bytes=offset,
        digest="",
        owners=[owner for *_, owner in cut] if any(owner for *_, owner in cut) else [],
        adapter=adapter,
    )
    return replace(made, digest=_digest(made))


def check_manifest(manifest: Manifest) -> None:
    """Check a manifest that came over the wire, in time linear in its size.

    The decoder has bounded its counts, its dimensions and its sizes, and knows no other types.

    Raises:
        WireError: tensors that are all empty, overlap, leave the slot or do not have the size
            of their shape, buckets that do not cover the slot in order, owners of other buckets or
            beyond `OWNERS`, or another layout's digest.
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
    owners = manifest.owners
    if owners and (len(owners) != len(manifest.buckets) or not 0 < max(owners) < OWNERS):
        raise WireError(
            f"manifest: {len(owners)} owners up to {max(owners)} of {len(manifest.buckets)} "
            f"buckets; each bucket has one below {OWNERS}",
            path="owners",
        )
    if manifest.digest != _digest(manifest):
        raise WireError("manifest: the digest is not that of the layout", path="digest")


def owned_buckets(manifest: Manifest) -> dict[int, list[int]]:
    """Return the buckets of each owner that has any, in order."""
    owned: dict[int, list[int]] = {}
    for bucket, owner in enumerate(manifest.owners or [0] * len(manifest.buckets)):
        owned.setdefault(owner, []).append(bucket)
    return owned


def owned_ranges(manifest: Manifest, owner: int) -> list[tuple[int, int]]:
    """Return the byte ranges of a version that trainer host `owner` holds, in order."""
    ranges: list[tuple[int, int]] = []
    for bucket in owned_buckets(manifest).get(owner, []):
        start, end = manifest.buckets[bucket]
        if ranges and ranges[-1][1] == start:
            start, _ = ranges.pop()
        ranges.append((start, end))
    return ranges


def held_whole(manifest: Manifest) -> Manifest:
    """Return the same layout without owners, for a relay, which holds whole versions."""
    if not manifest.owners:
        return manifest
    whole = replace(manifest, owners=[])
    return replace(whole, digest=_digest(whole))


def check_dtype(manifest: Manifest, dtype: str) -> None:
    """Check that the trainer serves `manifest` in `dtype` (of `weight_hub.dtype`).

    Raises:
        UsageError: it is not, so that trainer and generators would round differently.
    """
    if all(entry.dtype != _NAMES[dtype] for entry in manifest.tensors):
        raise UsageError(
            f"the trainer does not serve {dtype}, in which this process computes, because one of "
            "them is on a GPU and the other on a CPU: set weight_hub.dtype to what both are to use"
        )


def checksum(data: memoryview) -> int:
    """Return the xxh3-64 of one bucket's bytes."""
    return xxhash.xxh3_64_intdigest(data)


def wrong_checksum(manifest: Manifest, bucket: int) -> str:
    start, end = manifest.buckets[bucket]
    return f"checksum of bucket {bucket} [{start}, {end}) is wrong"


def checksums(manifest: Manifest, view: memoryview) -> list[int]:
    return [checksum(view[start:end]) for start, end in manifest.buckets]


def item_bytes(manifest: Manifest) -> list[int]:
    """Return the element size of each bucket: 4 where all are fp32, else 2."""
    starts = [entry.offset for entry in manifest.tensors]
    ends = [entry.offset + entry.nbytes for entry in manifest.tensors]
    sizes = [ITEM_BYTES[entry.dtype] for entry in manifest.tensors]
    return [
        min(sizes[bisect_right(ends, start) : bisect_left(starts, end)], default=4)
        for start, end in manifest.buckets
    ]


def _stretches(
    entries: list[TensorEntry], total: int, owners: Mapping[str, RowOwners]
) -> Iterator[tuple[TensorEntry, int, int]]:
    """Yield tensor, end (padding included) and owner of all bytes of one tensor and one owner."""
    ends = [*(entry.offset for entry in entries[1:]), total]
    for entry, end in zip(entries, ends, strict=True):
        rows = entry.shape[0] if entry.shape else 1
        row_owners = owners.get(entry.name, [(rows, 0)])
        row_ends = [row for row, _ in row_owners]
        if row_ends != sorted(row_ends) or row_ends[-1:] != [rows] or row_ends[0] < 0:
            raise ValueError(f"owners of rows up to {row_ends} of {entry.name}, which has {rows}")
        if not all(0 <= owner < OWNERS for _, owner in row_owners):
            raise ValueError(f"an owner of {entry.name} is not one of 0 to {OWNERS - 1}")
        start, row_bytes = entry.offset, entry.nbytes // max(1, rows)
        for row, owner in row_owners:
            stop = entry.offset + row * row_bytes if row < rows else end
            if start < stop:
                yield entry, stop, owner
                start = stop


def _buckets(
    stretches: Iterable[tuple[TensorEntry, int, int]], bound: int
) -> Iterator[tuple[int, int, int]]:
    """Yield start, end and owner of each bucket."""
    start = end = owner = 0
    for entry, stop, its_owner in stretches:
        if start < end and (its_owner != owner or stop - start > bound):
            yield start, end, owner
            start = end
        end, owner = stop, its_owner
        if end - start <= bound:
            continue  # the bucket stays open for what follows
        step = _step(entry, bound - ALIGN_BYTES)  # room for the padding after the last row
        while end - start > bound:
            yield start, start + step, owner
            start += step
    yield start, end, owner  # there is some: a manifest has a tensor that is not empty


def _step(entry: TensorEntry, room: int) -> int:
    """Return the bytes of a large tensor per bucket: whole rows, or elements of too large rows."""
    row = entry.nbytes // entry.shape[0] if entry.shape else entry.nbytes
    unit = row if row <= room else ITEM_BYTES[entry.dtype]
    return room // unit * unit


def _digest(manifest: Manifest) -> str:
    layout: list[object] = [manifest.tensors, manifest.buckets]
    layout += [manifest.owners] * bool(manifest.owners)
    layout += [manifest.adapter] * (manifest.adapter is not None)
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(layout))
