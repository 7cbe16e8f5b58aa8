"""Trajectories and their scores in the store, in the very bytes in which they came.

What a generator or a scorer has sent is looked at once, before it is acknowledged, and never packed
anew: `as_arrived` cuts it out of its message, and `Packed` values go to the store, from there into
a batch or to a scorer. The trainer puts trajectory and scores together (`BatchLease.scored`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import msgspec
import xxhash

from umbra.proto.messages import SubmitScores, SubmitTrajectories
from umbra.proto.net.server import Request
from umbra.proto.records import Score, Trajectory
from umbra.services.buffer.store.api import Store

PREFIX = "t/"
SCORE = "x/"
MORE_BYTES = 64 << 10  # of a packed record, besides its arrays: more than all else can take
BRANCH_BYTES = 8 << 10  # the same of each of its branches

Packed: TypeAlias = bytes  # a trajectory or a score, in MessagePack

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Trajectory).decode


class PackedBatch(NamedTuple):
    """Trajectories as they came, and what each stage has found of them, in order."""

    trajectories: list[Trajectory]
    scores: dict[str, list[Score]]
    digest: str  # over all bytes of both


class _Trajectories(msgspec.Struct):
    trajectories: list[msgspec.Raw]


class _Scores(msgspec.Struct):
    scores: list[msgspec.Raw]


_cut_trajectories = msgspec.msgpack.Decoder(_Trajectories).decode
_cut_scores = msgspec.msgpack.Decoder(_Scores).decode


def as_arrived(request: Request) -> list[Packed]:
    """The trajectories or scores of a message, in the bytes in which they came.

    They are copies: a message must not stay in memory for one small part of it.
    """
    frame = request.frame or _encode(request.body)
    if isinstance(request.body, SubmitTrajectories):
        return list(map(bytes, _cut_trajectories(frame).trajectories))
    assert isinstance(request.body, SubmitScores)
    return list(map(bytes, _cut_scores(frame).scores))


def pack(record: Trajectory | Score) -> Packed:
    """Its bytes, where none have come."""
    return _encode(record)


def size_fault(packed: Packed, array_bytes: int, branches: int = 0) -> str | None:
    """What is wrong with the size of a record with so many bytes of arrays; None if nothing is.

    MessagePack can say a thing in more bytes than it needs: a key twice, for example.
    """
    if len(packed) <= array_bytes + MORE_BYTES + branches * BRANCH_BYTES:
        return None
    return f"{len(packed)} bytes for arrays of {array_bytes}"


class TrajectoryStore:
    """The newest trajectory of each sample: complete, or a partial to continue from; and scores.

    Args:
        stages: that a trajectory may have scores of.
    """

    def __init__(self, store: Store, stages: Sequence[str] = ()) -> None:
        self._store = store
        self._stages = tuple(stages)

    def put(self, sample_id: str, packed: Packed) -> None:
        """Keep a trajectory instead of an earlier one of its sample."""
        self._store.put(PREFIX + sample_id, packed)

    def put_score(self, sample_id: str, stage: str, packed: Packed) -> None:
        """Keep what `stage` has found, instead of what it had found before."""
        self._store.put(score_key(sample_id, stage), packed)

    def get(self, sample_id: str) -> Trajectory:
        """The newest trajectory of the sample, without its scores.

        Raises:
            KeyError: there is none.
        """
        return _decode(self._store.get(PREFIX + sample_id))

    def packed(self, sample_id: str) -> Trajectory:
        """The same, to be sent: a message may hold it, it serves nothing else.

        Raises:
            KeyError: there is none.
        """
        return cast(Trajectory, msgspec.Raw(self._store.get(PREFIX + sample_id)))

    def batch(self, sample_ids: Sequence[str]) -> PackedBatch:
        """What a batch of these samples is sent as.

        Raises:
            KeyError: there is no trajectory of one of them, or a stage has not scored it.
        """
        checksum = xxhash.xxh3_64()

        def raw(keys: list[str]) -> list[Any]:
            values = self._store.get_all(keys)
            for value in values:
                checksum.update(value)
            return list(map(msgspec.Raw, values))

        trajectories = raw([PREFIX + one for one in sample_ids])
        scores = {
            stage: raw([score_key(one, stage) for one in sample_ids]) for stage in self._stages
        }
        return PackedBatch(trajectories, scores, checksum.hexdigest())

    def drop(self, sample_id: str) -> None:
        """Forget it, and its scores; there need not be one."""
        self._store.delete(PREFIX + sample_id)
        for stage in self._stages:
            self._store.delete(score_key(sample_id, stage))

    def scored(self, prefix: str) -> dict[str, int]:
        """Of the samples whose ids begin with `prefix`, those with a trajectory: how many stages,
        from the first on, there are scores of.
        """
        scores = set(self._store.keys(SCORE + prefix))
        found: dict[str, int] = {}
        for key in self._store.keys(PREFIX + prefix):
            name, stages = key.removeprefix(PREFIX), 0
            while stages < len(self._stages) and score_key(name, self._stages[stages]) in scores:
                stages += 1
            found[name] = stages
        return found


def score_key(sample_id: str, stage: str) -> str:
    """Where the store has the score of a sample."""
    return f"{SCORE}{sample_id}/{stage}"
