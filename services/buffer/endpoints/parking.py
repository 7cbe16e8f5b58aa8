"""Requests that are answered later: when there is something to give, or when their wait is over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from umbra.proto.messages import Message
from umbra.proto.net.server import Request

B = TypeVar("B", bound=Message)


@dataclass(frozen=True, slots=True)
class Parked(Generic[B]):
    """A request that waits until `deadline`, seconds of the broker's clock."""

    request: Request
    body: B
    deadline: float

    @property
    def name(self) -> str:
        """Of the member that asks."""
        return self.request.header.sender


class ParkedRequests(Generic[B]):
    """Requests of one kind, one per member, oldest first."""

    def __init__(self) -> None:
        self._parked: dict[str, Parked[B]] = {}

    def __len__(self) -> int:
        return len(self._parked)

    def park(self, parked: Parked[B]) -> None:
        """Let it wait; the member has no other."""
        self._parked[parked.name] = parked

    def all(self) -> list[Parked[B]]:
        """Those that wait; any of them may be taken meanwhile."""
        return list(self._parked.values())

    def take(self, name: str) -> Parked[B] | None:
        """The request of `name`, which waits no longer."""
        return self._parked.pop(name, None)

    def take_overdue(self, now: float) -> list[Parked[B]]:
        """Those whose wait is over."""
        overdue = [parked for parked in self._parked.values() if parked.deadline <= now]
        for parked in overdue:
            del self._parked[parked.name]
        return overdue

    def take_all(self) -> list[Parked[B]]:
        """Those that wait, which wait no longer."""
        parked = self.all()
        self._parked.clear()
        return parked
