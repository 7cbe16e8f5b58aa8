"""Rows and buckets of a version that several ranks and hosts write; see `divided_rank.py`."""

from umbra.services.trainer.distributed.rendezvous import RankPlace
from umbra.services.trainer.snapshot import checked, own_buckets, owners_of
from umbra.services.weights.manifest import build_manifest, checksum
from umbra.services.weights.verify import Checksums, Piece


def test_buckets_are_divided_among_the_ranks() -> None:
    for rows in (1, 2, 5, 16):
        manifest = build_manifest([("rows", "F32", (rows, 32))], 192)
        for world in (1, 2, 3, 4):
            parts = [own_buckets(manifest, RankPlace(rank, world, world)) for rank in range(world)]
            assert [bucket for part in parts for bucket in part] == list(range(rows))


def test_the_buckets_of_a_host_are_its_ranks_alone() -> None:
    """Two hosts with two ranks: each rank writes rows [r, r + 1) of 4; buckets are single rows."""
    layout = [("rows", "F32", (4, 32)), ("few", "F32", (1, 32)), ("number", "F32", ())]
    written: list[dict[str, tuple[int, int]]] = [{"rows": (r, r + 1)} for r in range(4)]
    written[0] |= {"few": (0, 1), "number": (0, 1)}
    owners = owners_of(written, RankPlace(0, 4, 2))
    assert owners == {"rows": [(2, 0), (4, 1)], "few": [(1, 0)], "number": [(1, 0)]}
    manifest = build_manifest(layout, 192, owners)
    assert manifest.owners[:4] == [0, 0, 1, 1]
    found = [own_buckets(manifest, RankPlace(rank, 4, 2)) for rank in range(4)]
    assert sorted(bucket for part in found for bucket in part) == [*range(len(manifest.buckets))]
    assert all(manifest.owners[b] == rank // 2 for rank in range(4) for b in found[rank])
    assert found[2:] == [[2], [3]]


def test_rows_of_a_host_need_not_lie_together() -> None:
    """Of eight rows two ranks of the first host have the first and the last ones."""
    written = [{"x": (0, 2)}, {"x": (6, 8)}, {"x": (2, 4)}, {"x": (4, 6)}]
    assert owners_of(written, RankPlace(0, 4, 2)) == {"x": [(2, 0), (6, 1), (8, 0)]}


def test_what_another_process_wrote_between_ranks_gets_no_valid_checksum() -> None:
    """A bucket of two ranks' rows is changed after they wrote it and before it is hashed."""
    manifest = build_manifest([("x", "F32", (8, 64)), ("y", "F32", (3, 5))], 1024)
    slot = memoryview(bytearray(manifest.total_bytes))
    pieces = list[Piece]()
    for first, last in ((0, 1500), (1500, manifest.total_bytes)):
        meant = Checksums(manifest, slot)
        for start in range(first, last, 100):
            block = memoryview(bytes([start % 251]) * min(100, last - start))
            slot[start : start + len(block)] = block
            meant.copy(start, start + len(block), lambda at, end, block=block: block[at:end])
        pieces += meant.pieces()
    assert len(pieces) == len(manifest.buckets) + 1  # one bucket has rows of both
    for start, stop in manifest.buckets:
        right = checksum(slot[start:stop])
        assert checked(slot, start, stop, pieces) == right
        for at in (start, stop - 1):
            slot[at] ^= 1
            assert checked(slot, start, stop, pieces) not in (right, checksum(slot[start:stop]))
            slot[at] ^= 1
