"""Trajectories and their scores in the store, in the very bytes in which they came.

A message of a generator or a scorer is checked once, before it is acknowledged, and never packed
again: `as_arrived` cuts out the values, and `Packed` values go to the store, from there into
a batch or to a scorer. The trainer puts trajectory and scores together (`BatchLease.scored`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
import xxhash

from umbra.proto.messages import SubmitResults
from umbra.proto.net.server import Request
from umbra.proto.records import Score, Trajectory
from umbra.services.buffer.store import Store

PREFIX = "t/"
SCORE = "x/"
MORE_BYTES = 64 << 10  # of a packed record, besides its arrays: more than all else can take
BRANCH_BYTES = 8 << 10  # the same of each of its branches

Packed: TypeAlias = bytes  # a trajectory or a score, in MessagePack

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Trajectory).decode


class PackedBatch(NamedTuple):
    """Trajectories as they came, and the scores of each stage, in order."""

    trajectories: list[Trajectory]
    scores: dict[str, list[Score]]
    digest: str  # over all bytes of both


class _Results(msgspec.Struct):
    trajectories: list[msgspec.Raw] = []
    scores: list[msgspec.Raw] = []


_cut = msgspec.msgpack.Decoder(_Results).decode


def as_arrived(
    request: Request, body: SubmitResults
) -> tuple[list[tuple[Trajectory, Packed]], list[tuple[Score, Packed]]]:
    """Cut the trajectories and scores out of a message, byte by byte as they came.

    They are copies: a message must not stay in memory for one small part of it.
    """
    cut = _cut(request.frame or _encode(body))
    return (
        list(zip(body.trajectories, map(bytes, cut.trajectories), strict=True)),
        list(zip(body.scores, map(bytes, cut.scores), strict=True)),
    )


def pack(record: Trajectory | Score) -> Packed:
    return _encode(record)


def size_fault(packed: Packed, array_bytes: int, branches: int = 0) -> str | None:
    """Return the fault in the size of a record whose arrays have `array_bytes`, or None.

    MessagePack can say a thing in more bytes than it needs: a key twice, for example.
    """
    if len(packed) <= array_bytes + MORE_BYTES + branches * BRANCH_BYTES:
        return None
    return f"it has {len(packed)} bytes, far more than its arrays ({array_bytes})"


class TrajectoryStore:
    """The newest trajectory of each sample, complete or partial, and its scores."""

    def __init__(self, store: Store, stages: Sequence[str] = ()) -> None:
        self._store = store
        self.stages = tuple(stages)

    def put(self, sample_id: str, packed: Packed) -> None:
        self._store.put(PREFIX + sample_id, packed)

    def put_score(self, sample_id: str, stage: str, packed: Packed) -> None:
        self._store.put(score_key(sample_id, stage), packed)

    def get(self, sample_id: str) -> Trajectory:
        return _decode(self._store.get(PREFIX + sample_id))

    def packed(self, sample_id: str) -> bytes | memoryview:
        return self._store.get(PREFIX + sample_id)

    def batch(self, sample_ids: Sequence[str]) -> PackedBatch:
        """Return the packed batch of these samples. Raises KeyError."""
        checksum = xxhash.xxh3_64()

        def raw(keys: list[str]) -> list[Any]:
            values = self._store.get_all(keys)
            for value in values:
                checksum.update(value)
            return list(map(msgspec.Raw, values))

        trajectories = raw([PREFIX + sample_id for sample_id in sample_ids])
        scores = {
            stage: raw([score_key(sample_id, stage) for sample_id in sample_ids])
            for stage in self.stages
        }
        return PackedBatch(trajectories, scores, checksum.hexdigest())

    def drop(self, sample_id: str) -> None:
        self._store.delete(PREFIX + sample_id)
        for stage in self.stages:
            self._store.delete(score_key(sample_id, stage))

    def scored(self, prefix: str) -> dict[str, int]:
        """Return how many stages are scored, from the first on, by sample id with `prefix`."""
        scores = set(self._store.keys(SCORE + prefix))
        counts: dict[str, int] = {}
        for key in self._store.keys(PREFIX + prefix):
            name, stages = key.removeprefix(PREFIX), 0
            while stages < len(self.stages) and score_key(name, self.stages[stages]) in scores:
                stages += 1
            counts[name] = stages
        return counts


def score_key(sample_id: str, stage: str) -> str:
    return f"{SCORE}{sample_id}/{stage}"
