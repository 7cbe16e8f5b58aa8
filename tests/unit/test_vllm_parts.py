"""Versions cut into parts of whole tensors."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbra.proto.records import Manifest
from umbra.services.generator.vllm_parts import cut, filled
from umbra.services.runtime.weights.manifest import build_manifest

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

    def buckets() -> Iterator[tuple[int, memoryview]]:
        for start, end in manifest.buckets:
            lane[: end - start] = version[start:end]
            yield start, memoryview(lane)[: end - start]

    got: dict[str, bytes] = {}
    for part, memory in filled(manifest, buckets(), lambda size: memoryview(bytearray(size))):
        for entry in part.tensors:
            got[entry.name] = bytes(memory[entry.offset : entry.offset + entry.nbytes])
    assert got == {
        entry.name: version[entry.offset : entry.offset + entry.nbytes]
        for entry in manifest.tensors
    }


def test_a_source_that_breaks_off_gives_only_parts_that_are_complete() -> None:
    manifest = layout([(8, 8)] * 4, 256)  # a tensor a bucket

    def buckets() -> Iterator[tuple[int, memoryview]]:
        yield 0, memoryview(bytes(256))
        yield 256, memoryview(bytes(100))
        raise ConnectionError

    parts = filled(manifest, buckets(), lambda size: memoryview(bytearray(size)))
    assert [e.name for e in next(parts)[0].tensors] == ["t0"]
    with pytest.raises(ConnectionError):
        next(parts)
