"""What the push protocol knows of slots, receivers and pushes under way."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from umbra.proto.messages import Ready
from umbra.services.weight_hub.effects import HubPeer, Publication


@dataclass(slots=True)
class PushInProgress:
    """A push under way."""

    epoch: int
    publication: Publication
    attempt: int
    deadline: float
    phase: Literal["staging", "committing"] = "staging"
    ready: Ready | None = None


@dataclass(slots=True)
class ReceiverState:
    """A subscribed receiver."""

    peer: HubPeer
    since: float
    push: PushInProgress | None = None
    served: Publication | None = None  # what it serves of what this hub pushed
    offered: int = 0  # number of the last publication that was pushed to it

    def reads(self, slot: int) -> bool:
        """Return whether it is staging the version in `slot`."""
        push = self.push
        return push is not None and push.publication.slot == slot and push.phase == "staging"


@dataclass(slots=True)
class Grant:
    """A slot that the trainer may write into."""

    slot: int
    version: int


class Slots:
    """Which slot holds what, and which may be written next."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.held: dict[int, Publication] = {}  # until the slot is written again

    def free(self, taken: Collection[int]) -> int | None:
        """A slot that is not in `taken`: an empty one, or the one with the oldest content."""
        ages = {slot: publication.number for slot, publication in self.held.items()}
        free = [slot for slot in range(self.count) if slot not in taken]
        return min(free, key=lambda slot: ages.get(slot, 0), default=None)

    def clear(self) -> None:
        """All slots are empty."""
        self.held.clear()
