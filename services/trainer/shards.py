"""How the ranks of a trainer make one snapshot together.

Rank 0 has a slot of the arena, tells the others where it is, and all write their rows. When all
have, each computes the checksums of an equal share of the buckets (buckets may hold rows of several
ranks), and rank 0 collects them for Publish. They meet in a `torch.distributed` store, which is
neither the training's process group nor the hub, and wait for each other as long as the other lives
(`pulse.py`): no collective hangs here, and a version may be of any size.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from umbra.proto.records import Manifest
from umbra.services.runtime.weights.arena import Arena
from umbra.services.runtime.weights.manifest import checksum
from umbra.services.trainer.pulse import Pulse
from umbra.services.trainer.ranks import Ranks
from umbra.services.trainer.snapshot import write_shards


class ShardStore(Protocol):
    """What is needed of a `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...


class ShardSync:
    """One rank's view of the meeting place.

    Args:
        store: shared by all ranks, for this purpose alone (`PrefixStore`).
        pulse: how the ranks wait for each other.
    """

    def __init__(self, store: ShardStore, rank: int, world: int, pulse: Pulse) -> None:
        self.rank = rank
        self.world = world
        self._store = store
        self._pulse = pulse
        self._meetings = 0

    def set(self, what: str, value: Any) -> None:
        """Leave `value`, which JSON can say, for the other ranks; `what` names it once."""
        self._store.set(f"{what}/{self.rank}", json.dumps(value))

    def get(self, what: str, rank: int) -> Any:
        """What `rank` left.

        Raises:
            DeadlineError: it is silent.
        """
        key = f"{what}/{rank}"
        return json.loads(self._pulse.wait(rank, lambda: self._look(key), f"the {what}"))

    def _look(self, key: str) -> bytes | None:
        return self._store.get(key) if self._store.check([key]) else None

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

    def collect(self, sums: list[int]) -> list[int]:
        """On rank 0 the checksums of all ranks in order; on the others none.

        Raises:
            DeadlineError: a rank is silent.
        """
        what = f"checksums of snapshot {self._meetings}"
        if self.rank:
            self.set(what, sums)
            return []
        for rank in range(1, self.world):
            sums = sums + self.get(what, rank)
        return sums

    def _forget(self, meeting: int) -> None:
        """Keep the store small: all ranks are past that meeting when rank 0 begins the next."""
        for what in ("slot", "written", "checksums"):
            for rank in range(self.world):
                self._store.delete_key(f"{what} of snapshot {meeting}/{rank}")


def own_buckets(count: int, rank: int, world: int) -> range:
    """The buckets of `count` whose checksums `rank` computes: equal shares, in order."""
    return range(rank * count // world, (rank + 1) * count // world)


def snapshot_shards(
    model: nn.Module, manifest: Manifest, slot: memoryview, sync: ShardSync
) -> list[int]:
    """Write this rank's rows into `slot`, wait for the others; all checksums on rank 0, else none.

    Raises:
        DeadlineError: another rank is silent.
    """
    write_shards(model, manifest, slot, sync.rank, sync.world)
    sync.barrier("written")
    mine = own_buckets(len(manifest.buckets), sync.rank, sync.world)
    sums = [checksum(slot[start:end]) for start, end in (manifest.buckets[i] for i in mine)]
    return sync.collect(sums)


class Snapshots:
    """Writes versions of `model`, on every rank of `ranks` its own rows."""

    def __init__(self, model: nn.Module, manifest: Manifest, ranks: Ranks) -> None:
        self._model = model
        self._manifest = manifest
        self._sync: ShardSync | None = None
        if ranks.store is not None:
            self._sync = ShardSync(ranks.store, ranks.rank, ranks.world, ranks.pulse)
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
        return snapshot_shards(self._model, self._manifest, slot, self._sync)

    def close(self) -> None:
        """Let go of the arena."""
        if self._arena is not None:
            self._arena[1].close()
            self._arena = None

    def _attached(self, path: str) -> Arena:
        if self._arena is None or self._arena[0] != path:
            self.close()
            self._arena = path, Arena.attach(path, slot_bytes=self._manifest.total_bytes)
        return self._arena[1]
