"""Snapshots that the ranks of a trainer make together.

Rank 0 has a slot of the arena and says where it is, and all write their rows. When all have, each
computes the checksums of an equal share of its host's buckets (which may hold rows of several
ranks), and compares them, piece by piece, with the checksums of the data the ranks meant to write;
all ranks get all checksums. On several hosts each has an arena of its own under the same path, with
the rows of its ranks. No bucket holds rows of two hosts.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn

from umbra.proto.records import Manifest
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.distributed.rendezvous import RankPlace
from umbra.services.trainer.snapshot import write_shards, written_rows
from umbra.services.weights.arena import Arena
from umbra.services.weights.manifest import checksum, owned_buckets
from umbra.services.weights.verify import THREADS, Checksums, Piece

log = logging.getLogger(__name__)


def own_buckets(manifest: Manifest, place: RankPlace) -> list[int]:
    """Return the buckets whose checksums a rank computes: its share of its host's buckets."""
    owned = owned_buckets(manifest).get(place.node(place.rank), [])
    local = place.rank % place.per_host
    return owned[local * len(owned) // place.per_host : (local + 1) * len(owned) // place.per_host]


def row_owners(
    model: nn.Module, ranks: Ranks, *, adapter: bool = False
) -> dict[str, list[tuple[int, int]]]:
    """Return the host that writes each range of rows, for `build_manifest`; nothing on one host.

    By name `(end, node)`, with ends that ascend up to the number of rows. All ranks call it.
    """
    place = ranks.place
    if place.nodes == 1:
        return {}
    mine = written_rows(model, ranks.rank, ranks.world, adapter=adapter)
    return owners_of(ranks.collect(mine, dict[str, tuple[int, int]]), place)


def owners_of(
    written: Sequence[Mapping[str, tuple[int, int]]], place: RankPlace
) -> dict[str, list[tuple[int, int]]]:
    """Return the same as `row_owners`, given the rows that each rank writes."""
    parts: dict[str, list[tuple[int, int, int]]] = {}
    for rank, rows in enumerate(written):
        for name, (first, end) in rows.items():
            parts.setdefault(name, []).append((first, end, place.node(rank)))
    owners: dict[str, list[tuple[int, int]]] = {}
    for name, some in parts.items():
        ends = owners[name] = list[tuple[int, int]]()
        for _, end, node in sorted(some):
            if ends and ends[-1][1] == node:
                ends.pop()
            ends.append((end, node))
    return owners


def checked(slot: memoryview, start: int, end: int, pieces: Sequence[Piece]) -> int:
    """Return the checksum of bucket `[start, end)`; an invalid one if a piece has changed.

    `pieces` are of all its writers, in order; receivers refuse an invalid checksum.
    """
    data = memoryview(bytes(slot[start:end]))
    own = pieces[bisect_left(pieces, (start,)) : bisect_left(pieces, (end,))]
    changed = [at for at, stop, meant in own if checksum(data[at - start : stop - start]) != meant]
    if changed:
        log.error("another process changed a version in shared memory, at byte %d", changed[0])
    return checksum(data) ^ bool(changed)


class Snapshots:
    """A writer of versions of `model`, on every rank of `ranks` its own rows."""

    def __init__(self, model: nn.Module, manifest: Manifest, ranks: Ranks) -> None:
        self._model = model
        self._manifest = manifest
        self._ranks = ranks
        self._arena: tuple[str, Arena] | None = None

    def write(self, place: tuple[str, int], slot: memoryview | None = None) -> list[int]:
        """Write the current weights; return the checksum of every bucket.

        `place` is the slot's: the path of the arena, and its number. Rank 0 has its memory.
        """
        ranks, manifest = self._ranks, self._manifest
        if slot is None:
            slot = self._attached(place[0]).slot(place[1])
        threads = max(1, THREADS // ranks.place.per_host)
        if torch.get_num_threads() > 1 and all(p.is_cpu for p in self._model.parameters()):
            threads = 1  # torch divides each copy among its own
        meant = Checksums(manifest, slot, threads, is_whole=ranks.world == 1)
        write_shards(self._model, manifest, slot, ranks.rank, ranks.world, meant)
        if ranks.world == 1:
            return meant.result()
        # When all have told theirs, all have written.
        told = ranks.collect(meant.pieces(), list[Piece])
        pieces = sorted(piece for some in told for piece in some)
        sums = np.zeros(len(manifest.buckets), np.uint64)
        for bucket in own_buckets(manifest, ranks.place):
            start, end = manifest.buckets[bucket]
            sums[bucket] = checked(slot, start, end, pieces)
        ranks.sum_ranks(torch.from_numpy(sums.view(np.int64)))
        return sums.tolist()

    def close(self) -> None:
        if self._arena is not None:
            self._arena[1].close()
            self._arena = None

    def _attached(self, path: str) -> Arena:
        if self._arena is None or self._arena[0] != path:
            self.close()
            self._arena = path, Arena.attach(path, slot_bytes=self._manifest.total_bytes)
        return self._arena[1]
