"""Trajectories and scores in the very bytes in which they came.

A message of a generator or a scorer is checked once, before it is acknowledged, and never packed
again: `as_arrived` cuts out the values, and `Packed` values go to the store (`journal.py`), from
there into a batch or to a scorer. The trainer puts trajectory and scores together
(`BatchLease.scored`).
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from umbra.proto.messages import SubmitResults
from umbra.proto.net.server import Request
from umbra.proto.records import Score, Trajectory

MORE_BYTES = 64 << 10  # of a packed record, besides its arrays: more than all else can take
BRANCH_BYTES = 8 << 10  # the same of each of its branches

Packed: TypeAlias = bytes  # a trajectory or a score, in MessagePack

pack = msgspec.msgpack.Encoder().encode


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
    cut = _cut(request.frame or pack(body))
    return (
        list(zip(body.trajectories, map(bytes, cut.trajectories), strict=True)),
        list(zip(body.scores, map(bytes, cut.scores), strict=True)),
    )


def size_fault(packed: Packed, array_bytes: int, branches: int = 0) -> str | None:
    """Return the fault in the size of a record whose arrays have `array_bytes`, or None.

    MessagePack can say a thing in more bytes than it needs: a key twice, for example.
    """
    if len(packed) <= array_bytes + MORE_BYTES + branches * BRANCH_BYTES:
        return None
    return f"it has {len(packed)} bytes, far more than its arrays ({array_bytes})"
