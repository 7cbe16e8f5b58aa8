"""The production push protocol at work in simulated time: the hub, and one more in every relay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from umbra.deploy.simulator.timeline import Timeline
from umbra.proto.deadline import Pace
from umbra.proto.messages import (
    Abort,
    Commit,
    Committed,
    Message,
    Prepare,
    Publish,
    Ready,
    SlotGranted,
)
from umbra.services.weight_hub.effects import Admit, Effect, Failed, HubPeer, HubReply, Pushed, Send
from umbra.services.weight_hub.push import PushProtocol

LAYOUT = "simulated"  # digest of the manifest


class Subscriber(Protocol):
    """Who gets weights."""

    @property
    def peer(self) -> HubPeer:
        """Its name, and which start of it."""
        ...

    @property
    def is_alive(self) -> bool: ...

    def told(self, message: Prepare | Commit | Abort) -> None:
        """The hub says what to do next."""
        ...


class Hub:
    """A push protocol, and the way to it and back.

    Args:
        timeline: of the simulation.
        slots: versions that its arena holds.
        pace: how long each phase of a push may take.
        nbytes: of a version.
        latency_s: of a message, either way.
        left: called with the name of a receiver that is not subscribed any longer.
    """

    def __init__(
        self,
        timeline: Timeline,
        slots: int,
        pace: Pace,
        nbytes: int,
        latency_s: float,
        left: Callable[[str], None] = lambda _name: None,
    ) -> None:
        self.protocol = PushProtocol(slots, pace)
        self._nbytes = nbytes
        self._timeline = timeline
        self._latency_s = latency_s
        self._left = left
        self._receivers: dict[str, Subscriber] = {}
        self._armed = False

    # -- who publishes ----------------------------------------------------------------------------

    def register(self, publisher: HubPeer) -> None:
        """`publisher` writes versions from now on."""
        self._later(lambda now: self.protocol.register(publisher, LAYOUT, now, nbytes=self._nbytes))

    def acquire(self, publisher: HubPeer, version: int, granted: Callable[[int], None]) -> None:
        """Ask for a slot; `granted` gets it once one is free."""

        def ticket(message: Message) -> None:
            if isinstance(message, SlotGranted):  # else the publisher has asked again, or is gone
                granted(message.slot)

        self._later(lambda now: self.protocol.acquire(ticket, publisher, version, now))

    def publish(self, publisher: HubPeer, version: int, slot: int, snapshot_s: float = 0.0) -> None:
        """The slot holds `version`: push it."""
        message = Publish(version=version, slot=slot, checksums=[version], snapshot_s=snapshot_s)
        self._later(
            lambda now: self.protocol.publish(lambda _message: None, publisher, message, now)
        )

    # -- who receives -----------------------------------------------------------------------------

    def subscribe(self, receiver: Subscriber) -> None:
        """`receiver` wants every new version."""
        peer = receiver.peer

        def arrive(now: float) -> list[Effect]:
            self._receivers[peer.name] = receiver
            return self.protocol.subscribe(lambda _message: None, peer, now)

        self._later(arrive)

    def ready(self, peer: HubPeer, message: Ready) -> None:
        """`peer` has staged a version, or could not."""
        self._later(lambda now: self.protocol.ready(peer, message, now))

    def committed(self, peer: HubPeer, message: Committed) -> None:
        """`peer` serves a version, or could not load it."""
        self._later(lambda now: self.protocol.committed(peer, message, now))

    # -- inside -----------------------------------------------------------------------------------

    def _later(self, event: Callable[[float], list[Effect]]) -> None:
        def arrive() -> None:
            self._carry_out(event(self._timeline.now))

        self._timeline.after(self._latency_s, arrive)

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case HubReply(ticket, message):
                    assert callable(ticket)
                    self._timeline.after(self._latency_s, lambda t=ticket, m=message: t(m))
                case Send(name, message):
                    self._send(name, message)
                case Failed(receiver=name, dropped=True):
                    self._left(name)
                case Failed() | Admit() | Pushed():
                    pass
        self._arm()

    def _send(self, name: str, message: Prepare | Commit | Abort) -> None:
        receiver = self._receivers[name]
        peer = receiver.peer

        def arrive() -> None:
            if receiver.is_alive and receiver.peer == peer:
                receiver.told(message)
            elif self.protocol.knows(peer):
                reason = "it cannot be reached"
                self._carry_out(self.protocol.lost(name, reason, self._timeline.now))

        self._timeline.after(self._latency_s, arrive)

    def _arm(self) -> None:
        """Look at the deadlines of pushes when the next one is over."""
        if self._armed:
            return
        deadline = self.protocol.next_deadline()
        if deadline is None:
            return
        self._armed = True

        def look() -> None:
            self._armed = False
            self._carry_out(self.protocol.tick(self._timeline.now))

        self._timeline.at(deadline, look)


class SimulatedWire:
    """The links between nodes, along which relays fetch versions from one another.

    A relay has all bytes when its own link has let them through, but not before one bucket's time
    after the relay that it fetches from.

    Args:
        timeline: of the simulation.
        source: names the relay that a relay fetches from, "" for the hub.
        alive: whether a relay is.
        wire_bytes: of a version.
        bucket_bytes: that a relay hands on as soon as it has them.
        bytes_per_s: of a link.
        latency_s: of a message.
    """

    def __init__(
        self,
        timeline: Timeline,
        *,
        source: Callable[[str], str],
        alive: Callable[[str], bool],
        wire_bytes: float,
        bucket_bytes: float,
        bytes_per_s: float,
        latency_s: float,
    ) -> None:
        self.wire_bytes = wire_bytes
        self._timeline = timeline
        self._source = source
        self._alive = alive
        self._own_s = wire_bytes / bytes_per_s + latency_s
        self._hop_s = min(bucket_bytes, wire_bytes) / bytes_per_s + latency_s
        self._has: dict[str, tuple[int, float]] = {}  # by relay: version, and when it is all there
        self._waiting: dict[str, list[Callable[[], None]]] = {}  # by source

    def fetch(self, name: str, version: int, done: Callable[[str], None]) -> None:
        """Bring `version` to relay `name`; `done` is told why that failed, or nothing."""
        source = self._source(name)
        if source and not self._alive(source):
            self._timeline.after(self._hop_s, lambda: done("the source is gone"))
            return
        now = self._timeline.now
        at = now + self._own_s
        if source:
            has, there = self._has.get(source, (-1, 0.0))
            if has < version:  # it will fetch it: go on when it is known when that ends
                again = lambda: self.fetch(name, version, done)  # noqa: E731
                self._waiting.setdefault(source, []).append(again)
                return
            if has > version:
                self._timeline.after(self._hop_s, lambda: done("the source has a newer version"))
                return
            at = max(at, there + self._hop_s)
        self._has[name] = (version, at)
        for again in self._waiting.pop(name, []):
            again()

        def end() -> None:
            lost = bool(source) and not self._alive(source)
            done("the source is gone" if lost else "")

        self._timeline.at(at, end)

    def forget(self, name: str) -> None:
        """Relay `name` is gone: who waits for it has lost its source."""
        self._has.pop(name, None)
        for again in self._waiting.pop(name, []):
            again()


class NodeRelay:
    """Brings versions to a node: a receiver of the hub, with a hub of its own for the engines."""

    def __init__(
        self,
        timeline: Timeline,
        name: str,
        hub: Hub,
        own: Hub,
        wire: SimulatedWire,
        chained: Callable[[str], None],
    ) -> None:
        self.name = name
        self.own = own
        self.is_alive = False
        self._timeline = timeline
        self._hub = hub
        self._wire = wire
        self._chained = chained
        self._starts = 0
        self._slot = -1
        self._epoch = -1

    @property
    def peer(self) -> HubPeer:
        """Its name, and which start of it."""
        return HubPeer(self.name, str(self._starts))

    def start(self) -> None:
        self._starts += 1
        self.is_alive = True
        self.own.register(self.peer)
        self._chained(self.name)
        self._hub.subscribe(self)

    def die(self) -> None:
        self.is_alive = False
        self._epoch = -1
        self._wire.forget(self.name)

    def told(self, message: Prepare | Commit | Abort) -> None:
        """The hub says what to do next."""
        match message:
            case Prepare():
                self._fetch(message)
            case Commit(epoch=epoch, version=version):
                self.own.publish(self.peer, version, self._slot)
                self._hub.committed(
                    self.peer, Committed(epoch=epoch, version=version, commit_s=0.0)
                )
            case Abort(dropped=dropped):
                self._epoch = -1
                if dropped:
                    self._chained(self.name)
                    self._hub.subscribe(self)

    def _fetch(self, message: Prepare) -> None:
        epoch, version, began = message.epoch, message.version, self._timeline.now
        self._epoch = epoch

        def granted(slot: int) -> None:
            if self._epoch == epoch:
                self._slot = slot
                self._wire.fetch(self.name, version, done)

        def done(error: str) -> None:
            if self._epoch == epoch:
                ready = Ready(
                    epoch=epoch,
                    version=version,
                    wire_s=self._timeline.now - began,
                    stage_s=0.0,
                    error=error,
                    wire_bytes=int(self._wire.wire_bytes),
                    source_lost=error == "the source is gone",
                )
                self._hub.ready(self.peer, ready)

        self.own.acquire(self.peer, version, granted)
