"""What is to be sent, in portions of which each fits into a message."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from umbra.proto.bounds import SUBMITTED
from umbra.proto.records import Trajectory
from umbra.proto.sizes import SUBMIT_BYTES

T = TypeVar("T")

FILL_BYTES = SUBMIT_BYTES // 4  # of a portion: what is in it besides arrays comes on top


def portions(
    items: Sequence[T], size: Callable[[T], int], most: int = SUBMITTED, fill: int = FILL_BYTES
) -> Iterator[list[T]]:
    """`items` in order, in lists of at most `most` and of about `fill` bytes, by `size` of each."""
    portion: list[T] = []
    filled = 0
    for item in items:
        length = size(item)
        if portion and (len(portion) == most or filled + length > fill):
            yield portion
            portion, filled = [], 0
        portion.append(item)
        filled += length
    if portion:
        yield portion


def array_bytes(trajectory: Trajectory | None) -> int:
    """Bytes of all arrays of a trajectory, those of its branches included."""
    if trajectory is None:
        return 0
    arrays = (
        trajectory.prompt_ids, trajectory.response_ids, trajectory.loss_mask, trajectory.logprobs,
        trajectory.ref_logprobs or b"", trajectory.proximal_logprobs or b"",
        trajectory.routing.chosen if trajectory.routing is not None else b"",
    )  # fmt: skip
    lines = (
        len(array)
        for one in trajectory.branches
        for array in (one.prompt_ids, one.response_ids, one.loss_mask, one.logprobs)
    )
    return sum(map(len, arrays)) + sum(lines)
