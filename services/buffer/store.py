"""Where trajectories and the facts about them are kept before anything is acknowledged.

The broker tells the store what happened, and its replies leave only after `flush` has returned. So
a durable store needs no more than to survive with what it was told until its last `flush`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from umbra.proto.records import Trajectory


class Store(Protocol):
    """The facts of a run, in the order in which they happened."""

    def issued(self, group_id: str, prompt_id: str, sample_ids: list[str]) -> None:
        """A group was drawn from the prompts."""
        ...

    def put(self, trajectory: Trajectory) -> None:
        """`trajectory` is the newest of its sample: complete, or a partial to continue from."""
        ...

    def get(self, sample_id: str) -> Trajectory:
        """The newest trajectory of the sample.

        Raises:
            KeyError: there is none.
        """
        ...

    def drop(self, sample_id: str) -> None:
        """The sample starts again from scratch, or is over; it need not have a trajectory."""
        ...

    def ended(self, group_id: str, reason: str) -> None:
        """The group will never be trained."""
        ...

    def formed(self, step: int, group_ids: Iterable[str]) -> None:
        """These groups, in this order, are the batch of `step`."""
        ...

    def trained(self, step: int) -> None:
        """The batch of `step` was committed."""
        ...

    def flush(self) -> None:
        """Return when all of the above is stored."""
        ...


class MemoryStore:
    """Keeps the trajectories of live samples in memory; nothing survives the process."""

    def __init__(self) -> None:
        self._trajectories: dict[str, Trajectory] = {}

    def __len__(self) -> int:
        return len(self._trajectories)

    def issued(self, group_id: str, prompt_id: str, sample_ids: list[str]) -> None:
        """Nothing to keep: the state machine itself knows."""

    def put(self, trajectory: Trajectory) -> None:
        """Keep `trajectory` instead of an earlier one."""
        self._trajectories[trajectory.sample_id] = trajectory

    def get(self, sample_id: str) -> Trajectory:
        """The newest trajectory of the sample."""
        return self._trajectories[sample_id]

    def drop(self, sample_id: str) -> None:
        """Forget the trajectory, if there is one."""
        self._trajectories.pop(sample_id, None)

    def ended(self, group_id: str, reason: str) -> None:
        """Nothing to keep."""

    def formed(self, step: int, group_ids: Iterable[str]) -> None:
        """Nothing to keep."""

    def trained(self, step: int) -> None:
        """Nothing to keep."""

    def flush(self) -> None:
        """Memory is as stored as it gets."""
