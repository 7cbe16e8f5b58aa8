"""The push protocol: calls in, `effects` out. No socket, file, thread or clock of its own.

Versions are published into slots of the arena, and every receiver is pushed the newest one, at its
own pace (versions in between are skipped):

    idle -> PREPARE -> staging -> READY -> COMMIT -> committing -> COMMITTED -> idle

An *epoch* names one attempt to bring a version to a receiver, and is never used again.

- *Newest* is the version published last, not the greatest: a trainer that resumed from a checkpoint
  publishes older numbers again.
- A slot may be granted to the trainer when it holds neither the newest version nor one that a
  receiver is staging, and no trainer before this one still writes it. A receiver that loads in
  place reads its slot until COMMITTED too; the trainer waits for that no longer than a few of the
  longest loads, since it may be the end of an evaluation that is waited for. Should one still read
  then, the slot's sequence number shows it.
- A receiver that reads the slot which the trainer needs, while others serve the newest version, is
  dropped when the trainer has waited for eight times as long as the longest staging took, and for
  five seconds at least.
- A failed push is aborted and tried once more; failing again, or missing the deadline of a phase,
  drops the receiver. It may subscribe again.
- Where versions lie on several hosts and one of these is missing, nothing is published, no push
  begins, and none that fails is tried again; one in flight may end well.
- A second registration of the same layout is a restarted trainer: nothing changes but who may
  write. Another layout aborts all pushes and drops all receivers, which subscribe again to it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from umbra.proto import messages as m
from umbra.proto.deadline import Pace

ATTEMPTS = 2  # pushes of one version to one receiver that may fail until it is dropped
STAGINGS = 8  # the trainer waits for a slot at most as long as so many of the longest took
PATIENCE_S = 5.0  # or so long, if that is longer
LOADS = 2  # the trainer waits for a slot that is loaded at most as long as so many of the longest
LOAD_S = 1.0  # or so long, if that is longer


Ticket = Any  # a request that is answered later; opaque here


@dataclass(frozen=True, slots=True)
class HubPeer:
    """Sender of a message: its name in the run and its incarnation."""

    name: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Publication:
    """A version in its slot; `number` counts publications."""

    number: int
    version: int
    slot: int
    checksums: list[int]
    snapshot_s: float
    at: float


@dataclass(frozen=True, slots=True)
class HubReply:
    ticket: Ticket
    message: m.Message


@dataclass(frozen=True, slots=True)
class Send:
    receiver: str
    message: m.Prepare | m.Commit | m.Abort


@dataclass(frozen=True, slots=True)
class Pushed:
    """Effect: a receiver serves a version, `total_s` after its Publish or its own subscription."""

    receiver: str
    epoch: int
    publication: Publication
    ready: m.Ready
    commit_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """Effect: a push failed; with `dropped`, the receiver is unsubscribed."""

    receiver: str
    version: int
    phase: str
    reason: str
    dropped: bool


Effect = HubReply | Send | Pushed | Failed


@dataclass(slots=True)
class PushInProgress:
    epoch: int
    publication: Publication
    attempt: int
    deadline: float
    phase: Literal["staging", "committing"] = "staging"
    ready: m.Ready | None = None


@dataclass(slots=True)
class ReceiverState:
    peer: HubPeer
    since: float
    push: PushInProgress | None = None
    served: Publication | None = None  # what it serves of what this hub pushed
    offered: int = 0  # number of the last publication that was pushed to it

    def reads(self, slot: int, *, loads: bool = False) -> bool:
        """Return whether it stages the version in `slot`; with `loads`, also if it loads there."""
        push = self.push
        if push is None or push.publication.slot != slot:
            return False
        return push.ready is None or (loads and push.ready.in_place)


class PushProtocol:
    """State of one hub.

    Args:
        slots: version slots in the arena, at least 2.
        pace: how long a receiver may take per phase.
        first_epoch: epochs count from the one after it; above the epochs of the hub before.
        is_locked: whether a process still writes a slot.
    """

    def __init__(
        self,
        slots: int,
        pace: Pace,
        first_epoch: int = 0,
        is_locked: Callable[[int], bool] = lambda slot: False,
    ) -> None:
        if slots < 2:
            raise ValueError("a hub needs two slots: one is served while the other is written")
        self.counters: Counter[str] = Counter()
        self.effects: deque[Effect] = deque()  # to be carried out in this order
        self.digest = ""
        self.held_back = ""  # why no push may begin; empty where one may
        self.newest: Publication | None = None
        self.slots = slots
        self.held: dict[int, Publication] = {}  # by slot, until it is written again
        self._pace = pace
        self._is_locked = is_locked
        self._deadline_s = pace.limit_s(0)  # of a phase; with a layout, for its bytes
        self._publisher: HubPeer | None = None
        self._grant: tuple[int, int] | None = None  # slot and version that the trainer writes
        self._parked: tuple[Ticket, int, float] | None = None  # with the version, since when
        self._longest_s = 0.0  # that a staging took
        self._longest_load_s = PATIENCE_S / LOADS  # until one has ended
        self._loads_awaited = True  # the trainer still waits for loads in place
        self._receivers: dict[str, ReceiverState] = {}
        self._epoch = first_epoch
        self._publications = 0

    # -- what it knows ----------------------------------------------------------------------------

    @property
    def serving(self) -> dict[str, int]:
        """Return the version that each receiver serves, -1 for none yet; from any thread."""
        return {
            name: receiver.served.version if receiver.served else -1
            for name, receiver in tuple(self._receivers.items())
        }

    def knows(self, peer: HubPeer) -> bool:
        """Return whether `peer` is the trainer or a subscribed receiver."""
        receiver = self._receivers.get(peer.name)
        return peer == self._publisher or (receiver is not None and receiver.peer == peer)

    def next_deadline(self) -> float | None:
        due = [r.push.deadline for r in self._receivers.values() if r.push]
        if self._parked is not None and self._loads_awaited:
            due.append(self._parked[2] + self._load_patience_s)
        if self._parked is not None and self._holding_up():
            due.append(self._parked[2] + self._patience_s)
        return min(due, default=None)

    # -- the trainer ------------------------------------------------------------------------------

    def register(self, publisher: HubPeer, digest: str, now: float, nbytes: int = 0) -> None:
        """Register the trainer's layout, by which a version has `nbytes` bytes."""
        if self._publisher != publisher:
            self._refuse_parked("another trainer registered")
            self._grant = None  # what the one before left unfinished
            self._publisher = publisher
        if digest != self.digest:
            self._change_layout(digest, "the trainer registered another layout")
            self._deadline_s = self._pace.limit_s(nbytes)
        self._settle(now)

    def withdraw(self, reason: str) -> None:
        """Forget the layout and all versions, until a trainer registers again."""
        self._refuse_parked(reason)
        self._publisher = None
        self._change_layout("", reason)

    def hold_back(self, reason: str, now: float) -> None:
        """Start no push from now on, for this reason; an empty one allows them again."""
        self.held_back = reason
        self._settle(now)

    def acquire(self, ticket: Ticket, publisher: HubPeer, version: int, now: float) -> None:
        if self._may_write(ticket, publisher):
            self._refuse_parked("the trainer asked again")
            if self._grant is not None:  # its last answer was lost, or it gave that version up
                self._grant = self._grant[0], version
                self._answer(ticket, m.SlotGranted(slot=self._grant[0]))
            else:
                self._parked, self._loads_awaited = (ticket, version, now), True
            self._settle(now)

    def publish(self, ticket: Ticket, publisher: HubPeer, message: m.Publish, now: float) -> None:
        if not self._may_write(ticket, publisher):
            return
        if self._grant != (message.slot, message.version):
            reason = f"slot {message.slot} was not granted for version {message.version}"
            self._nack(ticket, "not_granted", reason)
        elif self.held_back:  # the slot stays granted: it can be published later
            self._nack(ticket, "part_missing", self.held_back)
        else:
            self._grant = None
            self._publications += 1
            what = message.version, message.slot, message.checksums, message.snapshot_s
            self.newest = self.held[message.slot] = Publication(self._publications, *what, now)
            self.counters["published"] += 1
            self._answer(ticket, m.Ok())
            self._settle(now)

    # -- receivers --------------------------------------------------------------------------------

    def subscribe(self, peer: HubPeer, now: float) -> None:
        """Push every new version of the layout to a receiver; a second call starts it afresh."""
        self._receivers[peer.name] = ReceiverState(peer, now)
        self._settle(now)

    def ready(self, peer: HubPeer, message: m.Ready, now: float) -> None:
        """Commit the version that a receiver has staged, or count its failure."""
        if (found := self._under_way(peer, message, "staging", now)) is not None:
            receiver, push = found
            self._longest_s = max(self._longest_s, now - push.deadline + self._deadline_s)
            push.phase, push.ready = "committing", message
            push.deadline = now + self._deadline_s
            self._send(receiver, m.Commit(epoch=push.epoch, version=push.publication.version))
        self._settle(now)

    def committed(self, peer: HubPeer, message: m.Committed, now: float) -> None:
        if (found := self._under_way(peer, message, "committing", now)) is not None:
            receiver, push = found
            assert push.ready is not None
            if push.ready.in_place:
                known = self._longest_load_s if self.counters["loads"] else 0.0
                self._longest_load_s = max(known, message.commit_s)
                self.counters["loads"] += 1
            published = push.publication
            receiver.push, receiver.served = None, published
            self.counters["pushes"] += 1
            total_s = now - max(published.at, receiver.since)
            measured = push.ready, message.commit_s, total_s
            self.effects.append(Pushed(peer.name, push.epoch, published, *measured))
        self._settle(now)

    def lost(self, name: str, reason: str, now: float) -> None:
        if (receiver := self._receivers.get(name)) is not None:
            self._drop(receiver, reason, tell=False)
        self._settle(now)

    def tick(self, now: float) -> None:
        """Drop receivers that missed the deadline of their phase, or block the trainer."""
        since = self._parked[2] if self._parked is not None else now
        if now >= since + self._load_patience_s:
            self._loads_awaited = False
        holding_up = self._holding_up()
        impatient = bool(holding_up) and now >= since + self._patience_s
        late = [r for r in self._receivers.values() if r.push and now >= r.push.deadline]
        for receiver in late:
            assert receiver.push is not None
            self.counters["deadline"] += 1
            self._drop(receiver, f"no end of {receiver.push.phase} within {self._deadline_s:.4g} s")
        for receiver in holding_up if impatient else ():
            if receiver not in late:
                self.counters["held_up"] += 1
                self._drop(receiver, f"it held the trainer up for {self._patience_s:.3g} s")
        self._settle(now)

    # -- inside -----------------------------------------------------------------------------------

    def _change_layout(self, digest: str, reason: str) -> None:
        for receiver in list(self._receivers.values()):
            self._drop(receiver, reason)
        self.digest = digest
        self.newest = None
        self._grant = None
        self.held.clear()

    def _may_write(self, ticket: Ticket, publisher: HubPeer) -> bool:
        if publisher == self._publisher:
            return True
        name, other = publisher.name, self._publisher
        if other is None:
            self._nack(ticket, "not_registered", f"{name} has not registered its manifest")
        else:
            self._nack(ticket, "superseded", f"{other.name} has registered since {name} did")
        return False

    def _under_way(
        self, peer: HubPeer, answer: m.Ready | m.Committed, phase: str, now: float
    ) -> tuple[ReceiverState, PushInProgress] | None:
        """Return the push that `answer` carries on; count a late answer, handle a failure."""
        receiver = self._receivers.get(peer.name)
        push = receiver.push if receiver is not None and receiver.peer == peer else None
        if receiver is None or push is None or (push.epoch, push.phase) != (answer.epoch, phase):
            self.counters["late"] += 1
            return None
        if answer.error:
            self._failed(receiver, push, answer.error, now)
            return None
        return receiver, push

    def _failed(
        self, receiver: ReceiverState, push: PushInProgress, reason: str, now: float
    ) -> None:
        self.counters["failed"] += 1
        if push.attempt >= ATTEMPTS and not self.held_back:
            self._drop(receiver, reason)
            return
        name, version = receiver.peer.name, push.publication.version
        self._send(receiver, m.Abort(epoch=push.epoch, version=version, reason=reason))
        self.effects.append(Failed(name, version, push.phase, reason, dropped=False))
        receiver.push = None
        # Else `_settle` starts with a newer version.
        if push.publication is self.newest and not self.held_back:
            self._start(receiver, push.publication, push.attempt + 1, now)

    def _drop(self, receiver: ReceiverState, reason: str, *, tell: bool = True) -> None:
        push = receiver.push
        known = (push.epoch, push.publication.version, push.phase) if push else (0, -1, "idle")
        epoch, version, phase = known
        del self._receivers[receiver.peer.name]
        self.counters["dropped"] += 1
        if tell:
            self._send(receiver, m.Abort(epoch=epoch, version=version, reason=reason, dropped=True))
        self.effects.append(Failed(receiver.peer.name, version, phase, reason, dropped=True))

    def _start(
        self, receiver: ReceiverState, publication: Publication, attempt: int, now: float
    ) -> None:
        if receiver.offered:
            self.counters["skipped"] += max(0, publication.number - receiver.offered - 1)
        receiver.offered = publication.number
        self._epoch += 1
        receiver.push = PushInProgress(self._epoch, publication, attempt, now + self._deadline_s)
        version, slot, sums = publication.version, publication.slot, publication.checksums
        self._send(
            receiver, m.Prepare(epoch=self._epoch, version=version, slot=slot, checksums=sums)
        )

    def _settle(self, now: float) -> None:
        """Start what can start now."""
        newest = self.newest
        if newest is not None and not self.held_back:
            for receiver in self._receivers.values():
                if receiver.push is None and receiver.served is not newest:
                    self._start(receiver, newest, 1, now)
        if self._parked is not None and self._grant is None:
            slot = self._free_slot()
            if slot is not None:
                ticket, version, _ = self._parked
                self._parked = None
                self.held.pop(slot, None)
                self._grant = slot, version
                self._answer(ticket, m.SlotGranted(slot=slot))

    def _free_slot(self) -> int | None:
        """Return an unused slot: an empty one, else that of the oldest version."""
        receivers, loads = self._receivers.values(), self._loads_awaited
        newest = self.newest.slot if self.newest is not None else None
        free = [
            slot
            for slot in range(self.slots)
            if slot != newest and not any(r.reads(slot, loads=loads) for r in receivers)
            if not self._is_locked(slot)
        ]
        ages = {slot: publication.number for slot, publication in self.held.items()}
        return min(free, key=lambda slot: ages.get(slot, 0), default=None)

    def _holding_up(self) -> list[ReceiverState]:
        """Return the receivers that block the trainer while others serve the newest version."""
        newest = self.newest
        if self._parked is None or newest is None:
            return []
        if not any(receiver.served is newest for receiver in self._receivers.values()):
            return []
        older = [slot for slot in self.held if slot != newest.slot]
        return [r for r in self._receivers.values() if any(r.reads(slot) for slot in older)]

    @property
    def _patience_s(self) -> float:
        return min(self._deadline_s, max(PATIENCE_S, STAGINGS * self._longest_s))

    @property
    def _load_patience_s(self) -> float:
        return max(LOAD_S, LOADS * self._longest_load_s)

    def _refuse_parked(self, reason: str) -> None:
        if self._parked is not None:
            self._nack(self._parked[0], "superseded", reason)
            self._parked = None

    def _send(self, receiver: ReceiverState, message: m.Prepare | m.Commit | m.Abort) -> None:
        self.effects.append(Send(receiver.peer.name, message))

    def _answer(self, ticket: Ticket, message: m.Message) -> None:
        self.effects.append(HubReply(ticket, message))

    def _nack(self, ticket: Ticket, code: str, reason: str) -> None:
        self.effects.append(HubReply(ticket, m.Nack(code=code, reason=reason)))
