"""A streamed version in parts of whole tensors, each in memory that vLLM's workers can map."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from umbra.proto.records import Manifest


def cut(manifest: Manifest, part_bytes: int) -> list[Manifest]:
    """Layouts of consecutive parts, in whole tensors, of at most `part_bytes` where they allow it.

    Each has one bucket, which says where in the version the part lies; offsets count from there.
    """
    ends = [entry.offset for entry in manifest.tensors[1:]] + [manifest.total_bytes]
    parts: list[Manifest] = []
    start, taken = 0, 0
    for index, end in enumerate(ends):
        following = ends[index + 1] if index + 1 < len(ends) else None
        if following is not None and following - start <= part_bytes:
            continue
        entries = [
            msgspec.structs.replace(entry, offset=entry.offset - start)
            for entry in manifest.tensors[taken : index + 1]
        ]
        parts.append(
            Manifest(tensors=entries, buckets=[(start, end)], total_bytes=end - start, digest="")
        )
        start, taken = end, index + 1
    return parts


def filled(
    manifest: Manifest,
    buckets: Iterable[tuple[int, memoryview]],
    allocate: Callable[[int], memoryview],
) -> Iterator[tuple[Manifest, memoryview]]:
    """Each part of a version and its bytes, as soon as its last bucket is there.

    Args:
        manifest: the layout.
        buckets: start and bytes of each, in order, good until the next is asked for.
        allocate: gives so many writable bytes.
    """
    parts = iter(cut(manifest, max(end - start for start, end in manifest.buckets)))
    part = next(parts, None)
    memory = allocate(part.total_bytes) if part is not None else memoryview(b"")
    for start, data in buckets:
        end = start + len(data)
        while part is not None:
            (begin, stop) = part.buckets[0]
            first, last = max(start, begin), min(end, stop)
            memory[first - begin : last - begin] = data[first - start : last - start]
            if stop > end:
                break  # the rest is in the next bucket
            yield part, memory
            part = next(parts, None)
            if part is not None:
                memory = allocate(part.total_bytes)
