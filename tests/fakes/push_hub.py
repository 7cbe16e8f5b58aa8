"""A push protocol with a clock that is set by hand, and words for what it says."""

from __future__ import annotations

from umbra.proto import messages as m
from umbra.proto.deadline import Pace
from umbra.services.weight_hub.push import Effect, HubPeer, HubReply, PushProtocol, Send

TRAINER = HubPeer("trainer", "t1")
A = HubPeer("a", "a1")
B = HubPeer("b", "b1")
DEADLINE_S = 10.0
PACE = Pace(DEADLINE_S, least_rate=100.0)


def taken(protocol: PushProtocol) -> list[Effect]:
    effects = list(protocol.effects)
    protocol.effects.clear()
    return effects


class Hub:
    def __init__(self, slots: int = 2) -> None:
        self.protocol = PushProtocol(slots, PACE)
        self.now = 100.0

    def registered(
        self, digest: str = "d1", publisher: HubPeer = TRAINER, nbytes: int = 0
    ) -> list[Effect]:
        self.protocol.register(publisher, digest, self.now, nbytes)
        return taken(self.protocol)

    def acquire(self, version: int, publisher: HubPeer = TRAINER) -> list[Effect]:
        self.protocol.acquire(f"acquire {version}", publisher, version, self.now)
        return taken(self.protocol)

    def publish(self, version: int, slot: int, publisher: HubPeer = TRAINER) -> list[Effect]:
        message = m.Publish(version=version, slot=slot, checksums=[version], snapshot_s=0.5)
        self.protocol.publish("publish", publisher, message, self.now)
        return taken(self.protocol)

    def new_version(self, version: int) -> list[Effect]:
        """Acquire and publish; the effects of both but the answers."""
        effects = self.acquire(version)
        slot = granted(effects)
        assert slot is not None, effects
        effects += self.publish(version, slot)
        return [effect for effect in effects if not isinstance(effect, HubReply)]

    def subscribe(self, peer: HubPeer) -> list[Effect]:
        self.protocol.subscribe(peer, self.now)
        return taken(self.protocol)

    def ready(
        self, peer: HubPeer, epoch: int, version: int, error: str = "", *, in_place: bool = False
    ) -> list[Effect]:
        message = m.Ready(
            epoch=epoch, version=version, wire_s=1.0, stage_s=2.0, error=error, in_place=in_place
        )
        self.protocol.ready(peer, message, self.now)
        return taken(self.protocol)

    def committed(
        self, peer: HubPeer, epoch: int, version: int, error: str = "", commit_s: float = 3.0
    ) -> list[Effect]:
        message = m.Committed(epoch=epoch, version=version, commit_s=commit_s, error=error)
        self.protocol.committed(peer, message, self.now)
        return taken(self.protocol)

    def hold_back(self, reason: str) -> list[Effect]:
        self.protocol.hold_back(reason, self.now)
        return taken(self.protocol)

    def withdraw(self, reason: str) -> list[Effect]:
        self.protocol.withdraw(reason)
        return taken(self.protocol)

    def lost(self, peer: HubPeer, reason: str) -> list[Effect]:
        self.protocol.lost(peer.name, reason, self.now)
        return taken(self.protocol)

    @property
    def epoch(self) -> int:
        return self.protocol._epoch

    def tick(self, seconds: float) -> list[Effect]:
        self.now += seconds
        self.protocol.tick(self.now)
        return taken(self.protocol)


def pushing(*versions: int, slots: int = 2) -> Hub:
    """A hub whose receiver A is being pushed the first of these versions."""
    hub = Hub(slots)
    hub.registered()
    hub.subscribe(A)
    for version in versions:
        hub.new_version(version)
    return hub


def serving(version: int) -> Hub:
    """One whose receiver A serves this version."""
    hub = pushing(version)
    hub.ready(A, 1, version)
    hub.committed(A, 1, version)
    return hub


def granted(effects: list[Effect]) -> int | None:
    for effect in effects:
        if isinstance(effect, HubReply) and isinstance(effect.message, m.SlotGranted):
            return effect.message.slot
    return None


def refusal(effects: list[Effect]) -> tuple[object, str]:
    """The ticket of the one request that is refused, and the code."""
    nacks = [(e.ticket, e.message) for e in effects if isinstance(e, HubReply)]
    ((ticket, code),) = [(ticket, said.code) for ticket, said in nacks if isinstance(said, m.Nack)]
    return ticket, code


def sent(effects: list[Effect], name: str) -> list[m.Message]:
    return [e.message for e in effects if isinstance(e, Send) and e.receiver == name]


def prepare(epoch: int, version: int, slot: int) -> m.Prepare:
    return m.Prepare(epoch=epoch, version=version, slot=slot, checksums=[version])
