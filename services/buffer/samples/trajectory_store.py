"""Trajectories in the store, in the very bytes in which they travel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import msgspec
import xxhash

from umbra.proto.records import Trajectory
from umbra.services.buffer.store.api import Store

PREFIX = "t/"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Trajectory).decode


class TrajectoryStore:
    """The newest trajectory of each sample: complete, or a partial to continue from."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, trajectory: Trajectory) -> None:
        """Keep `trajectory` instead of an earlier one of its sample."""
        self._store.put(PREFIX + trajectory.sample_id, _encode(trajectory))

    def get(self, sample_id: str) -> Trajectory:
        """The newest trajectory of the sample.

        Raises:
            KeyError: there is none.
        """
        return _decode(self._store.get(PREFIX + sample_id))

    def packed(self, sample_ids: Iterable[str]) -> list[Trajectory]:
        """The same of these samples, to be sent: a message may hold it, it serves nothing else.

        Raises:
            KeyError: there is none of one of them.
        """
        values = self._store.get_all([PREFIX + sample_id for sample_id in sample_ids])
        return cast("list[Trajectory]", list(map(msgspec.Raw, values)))

    def drop(self, sample_id: str) -> None:
        """Forget it; there need not be one."""
        self._store.delete(PREFIX + sample_id)


def digest(packed: Iterable[Trajectory]) -> str:
    """A checksum over what `TrajectoryStore.packed` gave, all bytes in order."""
    checksum = xxhash.xxh3_64()
    for one in packed:
        checksum.update(memoryview(cast(msgspec.Raw, one)))
    return checksum.hexdigest()
