"""Part hubs, one on each further host of the trainer, with its share of every version.

Decisions only: which ones are there, which hold the arena of the layout, and the orders to each.
The orders sent to a part hub are compared with its wanted state again and again, so that one that
was lost, restarted or cut off is brought up to date as a new one is.

    no part hub -> PartState -> told HoldArena -> PartState with the path: ready -> told OfferSlot
         ^                                                                              |
         '---------------- silent for SILENT_S, or not to be reached -------------------'

One that comes back holds the arena that its host had before: the file outlives it. If the
file is gone as well, so is a part of every version: then the layout has to be registered again.
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


@dataclass(slots=True)
class _PartHub:
    peer: HubPeer
    state: PartState
    last_state_at: float
    held: str | None = None  # path of the arena that it was told to hold; None: nothing said yet
    offered: dict[int, int] = field(default_factory=dict[int, int])  # slot -> publication's number


@dataclass(slots=True)
class _HeldLayout:
    """The arena that all part hubs must hold."""

    manifest: Manifest
    path: str
    slots: int
    owners: frozenset[int]
    made: set[int]  # owners that have, or had, the arena at `path`


class Parts:
    """The part hubs of one hub.

    Args:
        host: names the /dev/shm of the hub itself, which is trainer host 0's.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._parts: dict[int, _PartHub] = {}  # by owner
        self._layout: _HeldLayout | None = None

    # -- what it knows ----------------------------------------------------------------------------

    @property
    def buckets(self) -> Mapping[int, BucketsAt]:
        return {owner: part.state.buckets for owner, part in self._parts.items()}

    @property
    def missing(self) -> str:
        """Return why no version is whole now, or ""."""
        for owner in sorted(self._layout.owners if self._layout else ()):
            if why := self._lacks(owner):
                return why
        return ""

    @property
    def broken(self) -> str:
        """Return why a part hub cannot make the arena, or ""."""
        return self._error(made=False)

    @property
    def loss(self) -> str:
        """Return why the published versions are lost with the memory of a host, or ""."""
        return self._error(made=True)

    def next_deadline(self) -> float | None:
        return min((part.last_state_at + SILENT_S for part in self._parts.values()), default=None)

    # -- what happens -----------------------------------------------------------------------------

    def begin(self, manifest: Manifest, path: str, slots: int, *, made: bool) -> None:
        """Set the arena to hold; `made`: the hosts have it from a hub before."""
        owners = frozenset(manifest.owners) - {0}
        had = set(owners) if made else set[int]()
        self._layout = _HeldLayout(manifest, path, slots, owners, had)
        for part in self._parts.values():
            part.held = None
            part.offered.clear()

    def forget(self) -> None:
        self._layout = None

    def ask_again(self) -> None:
        """Let part hubs that could not make the arena retry."""
        for part in self._parts.values():
            if part.state.error:
                part.held, part.state = None, replace(part.state, path="", error="")

    def record(self, peer: HubPeer, state: PartState, now: float) -> Nack | None:
        """Record the state of a part hub; returns why it is refused, if it is."""
        if not 0 < state.owner < OWNERS:
            return _bad(f"trainer hosts with a part hub count from 1, below {OWNERS}")
        before = self._parts.get(state.owner)
        if before is not None and before.peer.name != peer.name:
            name = before.peer.name
            return _bad(f"trainer host {state.owner} has a part hub already: {name}")
        others = {owner: p for owner, p in self._parts.items() if owner != state.owner}
        if any(part.peer.name == peer.name for part in others.values()):
            return _bad(f"{peer.name} is the part hub of another trainer host")
        hosts = {part.state.host: owner for owner, part in others.items()} | {self._host: 0}
        if (owner := hosts.get(state.host)) is not None:
            return _bad(
                f"trainer hosts {owner} and {state.owner} share /dev/shm: a part hub is for "
                "a machine without the weight hub and without another part hub"
            )
        if before is None or before.peer != peer:
            self._parts[state.owner] = _PartHub(peer, state, now)
        else:
            before.state, before.last_state_at = state, now
        layout = self._layout
        if layout is not None and self._holds(self._parts[state.owner]):
            layout.made.add(state.owner)
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
        if self._layout is None:
            return []  # a trainer may still come back to what they hold
        for owner, part in self._parts.items():
            order = self._order(self._layout, owner)
            if part.held != order.path:
                part.held = order.path
                part.offered.clear()
                messages.append((part.peer.name, order))
            if not self._holds(part):
                continue
            for slot in [slot for slot in part.offered if slot not in held]:
                del part.offered[slot]
                nothing = OfferSlot(path=order.path, slot=slot, checksums=[])
                messages.append((part.peer.name, nothing))
            for slot, publication in sorted(held.items(), key=lambda pair: pair[1].number):
                if part.offered.get(slot) != publication.number:
                    part.offered[slot] = publication.number
                    sums = publication.checksums
                    offer = OfferSlot(path=order.path, slot=slot, checksums=sums, deltas=deltas)
                    messages.append((part.peer.name, offer))
        return messages

    # -- inside -----------------------------------------------------------------------------------

    @staticmethod
    def _order(layout: _HeldLayout, owner: int) -> HoldArena:
        if owner not in layout.owners:
            return HoldArena(manifest=NOTHING, path="", slots=0, fresh=False)
        return HoldArena(
            manifest=layout.manifest,
            path=layout.path,
            slots=layout.slots,
            fresh=owner not in layout.made,
        )

    def _holds(self, part: _PartHub) -> bool:
        layout = self._layout
        if layout is None or part.state.owner not in layout.owners:
            return False
        return part.state.path == layout.path and not part.state.error

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

    def _error(self, *, made: bool) -> str:
        layout = self._layout
        for owner, part in self._parts.items():
            if layout is None or owner not in layout.owners or (owner in layout.made) != made:
                continue
            if part.state.error and part.state.path == layout.path and part.held == layout.path:
                return self._lacks(owner)
        return ""


def _bad(reason: str) -> Nack:
    return Nack(code="bad_part", reason=reason, path="owner")
