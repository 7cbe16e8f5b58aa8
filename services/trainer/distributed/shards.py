"""How the ranks of a trainer make one snapshot together.

Rank 0 has a slot of the arena, tells the others where it is, and all write their rows. When all
have, each computes the checksums of an equal share of its host's buckets (which may hold rows of
several ranks), and rank 0 collects them for Publish. They meet in a `torch.distributed` store,
which is neither the training's process group nor the hub, and wait for each other as long as the
other lives (`heartbeat.py`): no collective hangs here, and a version may be of any size.

On several hosts each has an arena of its own under the same path, in which the rows of its ranks
are. No bucket holds rows of two hosts, and its checksum is computed on its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from torch import nn

from umbra.proto.records import Manifest
from umbra.services.trainer.distributed.heartbeat import Liveness, RankMessages, RankStore
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.distributed.rendezvous import RankPlace
from umbra.services.trainer.snapshot import write_shards, written_rows
from umbra.services.weights.arena import Arena
from umbra.services.weights.manifest import checksum, owned_buckets


class ShardSync:
    """One rank's view of the meeting place.

    Args:
        store: shared by all ranks, for this purpose alone (`PrefixStore`).
        heartbeat: how the ranks wait for each other.
    """

    def __init__(self, store: RankStore, rank: int, world: int, heartbeat: Liveness) -> None:
        self.rank = rank
        self.world = world
        self._messages = RankMessages(store, rank, heartbeat)
        self._meetings = 0

    def set(self, what: str, value: Any) -> None:
        """Leave `value`, which JSON can say, for the other ranks; `what` names it once."""
        self._messages.put(what, json.dumps(value))

    def get(self, what: str, rank: int) -> Any:
        """What `rank` left.

        Raises:
            DeadlineError: it is silent.
        """
        return json.loads(self._messages.get(rank, what, f"the {what}"))

    def agree(self, place: tuple[str, int] | None) -> tuple[str, int]:
        """Path of the arena and slot, given by rank 0 (None elsewhere), for the next snapshot.

        Raises:
            DeadlineError: rank 0 is silent.
        """
        self._meetings += 1
        what = f"slot of snapshot {self._meetings}"
        if self.rank == 0:
            if place is None:
                raise ValueError("rank 0 has to name the slot")
            self.set(what, place)
            self._forget(self._meetings - 1)
            return place
        path, slot = self.get(what, 0)
        return path, slot

    def barrier(self, what: str) -> None:
        """Go on when all ranks are here.

        Raises:
            DeadlineError: one of them is silent.
        """
        key = f"{what} of snapshot {self._meetings}"
        self.set(key, "here")
        for rank in range(self.world):
            self.get(key, rank)

    def collect(self, sums: dict[int, int]) -> dict[int, int]:
        """On rank 0 the checksums of all ranks by bucket; on the others none.

        Raises:
            DeadlineError: a rank is silent.
        """
        what = f"checksums of snapshot {self._meetings}"
        if self.rank:
            self.set(what, list(sums.items()))
            return {}
        for rank in range(1, self.world):
            sums = sums | dict(self.get(what, rank))
        return sums

    def _forget(self, meeting: int) -> None:
        """Keep the store small: all ranks are past that meeting when rank 0 begins the next."""
        for what in ("slot", "written", "checksums"):
            self._messages.forget(range(self.world), f"{what} of snapshot {meeting}")


def own_buckets(manifest: Manifest, place: RankPlace) -> list[int]:
    """The buckets whose checksums a rank computes: its share of those of its host, in order."""
    owned = owned_buckets(manifest).get(place.node(place.rank), [])
    local = place.rank % place.per_host
    return owned[local * len(owned) // place.per_host : (local + 1) * len(owned) // place.per_host]


def row_owners(
    model: nn.Module, ranks: Ranks, *, adapter: bool = False
) -> dict[str, list[tuple[int, int]]]:
    """Which host's ranks write which rows of each tensor, for `build_manifest`; none on one host.

    By name `(end, node)`, with ends that ascend up to the number of rows. All ranks have to call
    it.
    """
    place = ranks.hosts.place
    if place.nodes == 1:
        return {}
    mine = msgspec.json.encode(written_rows(model, ranks.rank, ranks.holders, adapter=adapter))
    decode = msgspec.json.Decoder(dict[str, tuple[int, int]]).decode
    return owners_of([decode(some) for some in ranks.collect(mine)], place)


def owners_of(
    written: Sequence[Mapping[str, tuple[int, int]]], place: RankPlace
) -> dict[str, list[tuple[int, int]]]:
    """As `row_owners`, given what each rank writes."""
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


def snapshot_shards(
    model: nn.Module, manifest: Manifest, slot: memoryview, sync: ShardSync, ranks: Ranks
) -> list[int]:
    """Write this rank's rows into `slot`, wait for the others; all checksums on rank 0, else none.

    Raises:
        DeadlineError: another rank is silent.
    """
    write_shards(model, manifest, slot, ranks.rank, ranks.holders)
    sync.barrier("written")
    sums: dict[int, int] = {}
    for bucket in own_buckets(manifest, ranks.hosts.place):
        start, end = manifest.buckets[bucket]
        sums[bucket] = checksum(slot[start:end])
    found = sync.collect(sums)
    return [found[bucket] for bucket in range(len(found))]


class Snapshots:
    """Writes versions of `model`, on every rank of `ranks` its own rows."""

    def __init__(self, model: nn.Module, manifest: Manifest, ranks: Ranks) -> None:
        self._model = model
        self._manifest = manifest
        self._ranks = ranks
        self._sync: ShardSync | None = None
        if ranks.store is not None:
            self._sync = ShardSync(ranks.store, ranks.rank, ranks.world, ranks.heartbeat)
        self._arena: tuple[str, Arena] | None = None

    def write(
        self,
        slot: memoryview | None = None,
        place: tuple[str, int] | None = None,
        wrote: Callable[[int], None] | None = None,
    ) -> list[int] | None:
        """Write the current weights; the checksum of every bucket where they are known already.

        Args:
            slot: rank 0's memory.
            place: where that is (path of the arena, number of the slot), for the other ranks.
            wrote: told up to which byte the slot is complete, where there is one rank.

        Raises:
            DeadlineError: another rank is silent.
        """
        if self._sync is None:
            assert slot is not None
            write_shards(self._model, self._manifest, slot, wrote=wrote)
            return None
        path, number = self._sync.agree(place)
        if slot is None:
            slot = self._attached(path).slot(number)
        return snapshot_shards(self._model, self._manifest, slot, self._sync, self._ranks)

    def close(self) -> None:
        if self._arena is not None:
            self._arena[1].close()
            self._arena = None

    def _attached(self, path: str) -> Arena:
        if self._arena is None or self._arena[0] != path:
            self.close()
            self._arena = path, Arena.attach(path, slot_bytes=self._manifest.total_bytes)
        return self._arena[1]
