"""A push protocol with a clock that is set by hand, and words for what it says."""

from __future__ import annotations

from collections.abc import Callable

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
    """Each of its calls returns the effects."""

    def __init__(self, slots: int = 2) -> None:
        self.protocol = PushProtocol(slots, PACE)
        self.now = 100.0

    def do(self, call: Callable[..., None], *args: object) -> list[Effect]:
        """Call a method of the protocol, now."""
        call(*args, self.now)
        return taken(self.protocol)

    def registered(
        self, digest: str = "d1", publisher: HubPeer = TRAINER, nbytes: int = 0
    ) -> list[Effect]:
        self.protocol.register(publisher, digest, self.now, nbytes)
        return taken(self.protocol)

    def acquire(self, version: int, publisher: HubPeer = TRAINER) -> list[Effect]:
        return self.do(self.protocol.acquire, f"acquire {version}", publisher, version)

    def publish(self, version: int, slot: int, publisher: HubPeer = TRAINER) -> list[Effect]:
        message = m.Publish(version=version, slot=slot, checksums=[version], snapshot_s=0.5)
        return self.do(self.protocol.publish, "publish", publisher, message)

    def new_version(self, version: int) -> list[Effect]:
        """Acquire and publish; the effects of both but the answers."""
        effects = self.acquire(version)
        slot = granted(effects)
        assert slot is not None, effects
        effects += self.publish(version, slot)
        return [effect for effect in effects if not isinstance(effect, HubReply)]

    def subscribe(self, peer: HubPeer) -> list[Effect]:
        return self.do(self.protocol.subscribe, peer)

    def ready(
        self, peer: HubPeer, epoch: int, version: int, error: str = "", *, in_place: bool = False
    ) -> list[Effect]:
        took = {"wire_s": 1.0, "stage_s": 2.0, "in_place": in_place}
        message = m.Ready(epoch=epoch, version=version, error=error, **took)
        return self.do(self.protocol.ready, peer, message)

    def committed(
        self, peer: HubPeer, epoch: int, version: int, error: str = "", commit_s: float = 3.0
    ) -> list[Effect]:
        message = m.Committed(epoch=epoch, version=version, commit_s=commit_s, error=error)
        return self.do(self.protocol.committed, peer, message)

    def served(self, peer: HubPeer, epoch: int, version: int) -> list[Effect]:
        """`peer` stages and commits the version of `epoch`."""
        return self.ready(peer, epoch, version) + self.committed(peer, epoch, version)

    def hold_back(self, reason: str) -> list[Effect]:
        return self.do(self.protocol.hold_back, reason)

    def withdraw(self, reason: str) -> list[Effect]:
        self.protocol.withdraw(reason)
        return taken(self.protocol)

    @property
    def epoch(self) -> int:
        return self.protocol._epoch

    def tick(self, seconds: float) -> list[Effect]:
        self.now += seconds
        return self.do(self.protocol.tick)


def pushing(*versions: int, slots: int = 2) -> Hub:
    """A hub whose receiver A is being pushed the first of these versions."""
    hub = Hub(slots)
    hub.registered()
    hub.subscribe(A)
    for version in versions:
        hub.new_version(version)
    return hub


def granted(effects: list[Effect]) -> int | None:
    replies = [effect.message for effect in effects if isinstance(effect, HubReply)]
    return next((said.slot for said in replies if isinstance(said, m.SlotGranted)), None)


def refusal(effects: list[Effect]) -> tuple[object, str]:
    """The ticket of the one request that is refused, and the code."""
    nacks = [(e.ticket, e.message) for e in effects if isinstance(e, HubReply)]
    ((ticket, code),) = [(ticket, said.code) for ticket, said in nacks if isinstance(said, m.Nack)]
    return ticket, code


def sent(effects: list[Effect], name: str) -> list[m.Message]:
    return [e.message for e in effects if isinstance(e, Send) and e.receiver == name]


def prepare(epoch: int, version: int, slot: int) -> m.Prepare:
    return m.Prepare(epoch=epoch, version=version, slot=slot, checksums=[version])
