"""Versions cut into parts of whole tensors."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbra.proto.errors import PeerLostError
from umbra.proto.records import Manifest
from umbra.services.weights.manifest import build_manifest
from umbra.services.weights.shared_memory import MappedBlocks, SharedMemory, cut, shared

SHAPES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=12)


def layout(shapes: list[tuple[int, int]], bucket_bytes: int) -> Manifest:
    return build_manifest(((f"t{i}", "F32", s) for i, s in enumerate(shapes)), bucket_bytes)


@given(SHAPES, st.integers(128, 2000))
def test_parts_hold_every_tensor_once_and_are_no_larger_than_they_must(
    shapes: list[tuple[int, int]], part_bytes: int
) -> None:
    manifest = layout(shapes, 256)
    parts = cut(manifest, part_bytes)
    assert [e.name for part in parts for e in part.tensors] == [e.name for e in manifest.tensors]
    edges = [part.buckets[0] for part in parts]
    assert [start for start, _ in edges] == [0, *(end for _, end in edges[:-1])]
    assert edges[-1][1] == manifest.total_bytes
    assert all(part.total_bytes <= part_bytes or len(part.tensors) == 1 for part in parts)
    for part, following in itertools.pairwise(parts):
        first = (*following.tensors[1:2], None)[0]
        size = first.offset if first is not None else following.total_bytes  # with its padding
        assert part.total_bytes + size > part_bytes  # else it would have been in `part`


@given(SHAPES, st.integers(128, 2000))
def test_parts_have_the_bytes_of_the_version(
    shapes: list[tuple[int, int]], bucket_bytes: int
) -> None:
    manifest = layout(shapes, bucket_bytes)
    version = bytes(k % 251 for k in range(manifest.total_bytes))
    lane = bytearray(manifest.total_bytes)

    def buckets() -> Iterator[memoryview]:
        for start, end in manifest.buckets:
            lane[: end - start] = version[start:end]
            yield memoryview(lane)[: end - start]

    got: dict[str, bytes] = {}
    blocks, memory = MappedBlocks(), SharedMemory()
    paths = set[str]()
    for path, part in shared(manifest, buckets(), memory, part_bytes=0):
        paths.add(path)
        block = blocks.view(path)
        for entry in part.tensors:
            got[entry.name] = bytes(block[entry.offset : entry.offset + entry.nbytes])
    assert len(paths) == 1, "parts take each other's place"
    assert got == {
        entry.name: version[entry.offset : entry.offset + entry.nbytes]
        for entry in manifest.tensors
    }


@pytest.mark.parametrize("offset", [0, 64])
def test_a_version_in_shared_memory_is_one_part_where_it_lies(offset: int) -> None:
    manifest, memory = layout([(8, 8)] * 4, 256), SharedMemory()
    block = memory.allocate(offset + manifest.total_bytes + 64)
    data = block[offset : offset + manifest.total_bytes]
    ((path, part),) = shared(manifest, [data], memory)
    assert memory.locate(block) == (path, 0)
    assert [e.offset for e in part.tensors] == [e.offset + offset for e in manifest.tensors]
    assert len(memory._blocks) == 1  # no copy was made


def test_a_source_that_breaks_off_gives_only_parts_that_are_complete() -> None:
    manifest = layout([(8, 8)] * 4, 256)  # a tensor a bucket

    def buckets(end: type[Exception] | None) -> Iterator[memoryview]:
        yield memoryview(bytearray(256))
        yield memoryview(bytearray(100))
        if end is not None:
            raise end

    for end, error in ((ConnectionError, ConnectionError), (None, PeerLostError)):
        parts = shared(manifest, buckets(end), SharedMemory(), part_bytes=0)
        assert [e.name for e in next(parts)[1].tensors] == ["t0"]
        with pytest.raises(error):
            next(parts)
