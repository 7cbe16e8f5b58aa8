"""Part hubs, one on each further host of the trainer, with its share of every version.

Decisions only. What each was told is compared with what it should hold again and again, so that one
that was lost, restarted or cut off is brought up to date as a new one is:

    no part hub -> PartState -> told HoldArena -> PartState with the path: ready -> told OfferSlot
         ^                                                                              |
         '---------------- silent for SILENT_S, or not to be reached -------------------'

One that was cut off still holds its arena when it comes back. One that was started again does not,
and a part of every version is lost: then the layout has to be registered again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from umbra.proto.bounds import OWNERS
from umbra.proto.messages import HoldArena, Nack, OfferSlot, PartState
from umbra.proto.records import BucketsAt, Manifest
from umbra.services.weight_hub.push import HubPeer, Publication

SILENT_S = 6.0  # without a word from a part hub, which says one every second: it is gone

NOTHING = Manifest(tensors=[], buckets=[], total_bytes=0, digest="")
NO_ARENA = HoldArena(manifest=NOTHING, path="", slots=0)


@dataclass(slots=True)
class _PartHub:
    peer: HubPeer
    state: PartState
    last_state_at: float
    held: str | None = None  # path of the arena that it was told to hold; None: nothing said yet
    offered: dict[int, int] = field(default_factory=dict[int, int])  # slot -> publication's number


class Parts:
    """The part hubs of one hub; `host` names its own /dev/shm, that of trainer host 0."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._parts: dict[int, _PartHub] = {}  # by owner
        self._wanted: HoldArena | None = None  # the arena that all owners must hold
        self._owners: frozenset[int] = frozenset()  # of its buckets, without the hub's host
        self._made: set[int] = set()  # owners that have had that arena

    # -- what it knows ----------------------------------------------------------------------------

    @property
    def buckets(self) -> Mapping[int, BucketsAt]:
        return {owner: part.state.buckets for owner, part in self._parts.items()}

    @property
    def missing(self) -> str:
        """Return why no version is whole now, or ""."""
        return next((why for one in sorted(self._owners) if (why := self._lacks(one))), "")

    @property
    def broken(self) -> str:
        """Return why a part hub cannot make the arena, or ""."""
        for owner, part in self._parts.items():
            if owner in self._owners and part.state.error and self._wanted is not None:
                if part.state.path == part.held == self._wanted.path:
                    return self._lacks(owner)
        return ""

    @property
    def loss(self) -> str:
        """Return why the published versions are lost with the memory of a host, or ""."""
        for owner, part in self._parts.items():
            if owner in self._made and not self._holds(part):
                return f"the part hub of trainer host {owner} was started again"
        return ""

    def next_deadline(self) -> float | None:
        return min((part.last_state_at + SILENT_S for part in self._parts.values()), default=None)

    # -- what happens -----------------------------------------------------------------------------

    def begin(self, manifest: Manifest, path: str, slots: int) -> None:
        """Set the arena to hold."""
        self._wanted = HoldArena(manifest=manifest, path=path, slots=slots)
        self._owners = frozenset(manifest.owners) - {0}
        self._made = set()
        for part in self._parts.values():
            part.held = None

    def forget(self) -> None:
        self._wanted, self._owners, self._made = None, frozenset(), set()

    def ask_again(self) -> None:
        """Let part hubs that could not make the arena retry."""
        for part in self._parts.values():
            if part.state.error:
                part.held, part.state = None, replace(part.state, path="", error="")

    def record(self, peer: HubPeer, state: PartState, now: float) -> Nack | None:
        """Record the state of a part hub; returns why it is refused, if it is."""
        owner = state.owner
        if not 0 < owner < OWNERS:
            return _bad(f"trainer hosts with a part hub count from 1, below {OWNERS}")
        part = self._parts.get(owner)
        if part is not None and part.peer.name != peer.name:
            return _bad(f"trainer host {owner} has a part hub already: {part.peer.name}")
        others = {other: p for other, p in self._parts.items() if other != owner}
        if any(p.peer.name == peer.name for p in others.values()):
            return _bad(f"{peer.name} is the part hub of another trainer host")
        hosts = {p.state.host: other for other, p in others.items()} | {self._host: 0}
        if (other := hosts.get(state.host)) is not None:
            return _bad(
                f"trainer hosts {other} and {owner} share /dev/shm: a part hub is for "
                "a machine without the weight hub and without another part hub"
            )
        if part is None or part.peer != peer:
            part = self._parts[owner] = _PartHub(peer, state, now)
        part.state, part.last_state_at = state, now
        if self._holds(part):
            self._made.add(owner)
        return None

    def lost(self, name: str) -> None:
        self._parts = {owner: p for owner, p in self._parts.items() if p.peer.name != name}

    def tick(self, now: float) -> list[str]:
        silent = [p.peer.name for p in self._parts.values() if now >= p.last_state_at + SILENT_S]
        for name in silent:
            self.lost(name)
        return silent

    def tell(
        self, held: Mapping[int, Publication], *, deltas: bool
    ) -> list[tuple[str, HoldArena | OfferSlot]]:
        """Return the news for part hubs, by name, where slots hold `held`."""
        messages: list[tuple[str, HoldArena | OfferSlot]] = []
        if (wanted := self._wanted) is None:
            return []  # a trainer may still come back to what they hold
        for owner, part in self._parts.items():
            name, path = part.peer.name, wanted.path if owner in self._owners else ""
            if part.held != path:
                part.held = path
                part.offered.clear()
                messages.append((name, wanted if path else NO_ARENA))
            if not self._holds(part):
                continue
            for slot in [slot for slot in part.offered if slot not in held]:
                del part.offered[slot]
                messages.append((name, OfferSlot(path=path, slot=slot, checksums=[])))
            for slot, publication in sorted(held.items(), key=lambda pair: pair[1].number):
                if part.offered.get(slot) != publication.number:
                    part.offered[slot] = publication.number
                    sums = publication.checksums
                    offer = OfferSlot(path=path, slot=slot, checksums=sums, deltas=deltas)
                    messages.append((name, offer))
        return messages

    # -- inside -----------------------------------------------------------------------------------

    def _holds(self, part: _PartHub) -> bool:
        state, wanted = part.state, self._wanted
        is_path = wanted is not None and state.path == wanted.path
        return is_path and state.owner in self._owners and not state.error

    def _lacks(self, owner: int) -> str:
        part = self._parts.get(owner)
        if part is None:
            return (
                f"trainer host {owner} has no part hub, or it is silent: start "
                f"`umbra weight-hub --upstream HUB --owner {owner}` there"
            )
        if self._holds(part):
            return ""
        problem = part.state.error or "it is still making its shared memory"
        return f"the part hub of trainer host {owner}, {part.peer.name}: {problem}"


def _bad(reason: str) -> Nack:
    return Nack(code="bad_part", reason=reason, path="owner")
