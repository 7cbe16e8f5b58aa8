"""The push protocol, case by case: a clock that is set by hand, and words for what it says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from umbra.proto import messages as m
from umbra.proto.deadline import Pace
from umbra.proto.messages import Abort, Commit, Nack, Ok, SlotGranted
from umbra.services.weight_hub.push import (
    LOAD_S,
    PATIENCE_S,
    Effect,
    Failed,
    HubPeer,
    HubReply,
    Pushed,
    PushProtocol,
    Send,
)

TRAINER = HubPeer("trainer", "t1")
A = HubPeer("a", "a1")
B = HubPeer("b", "b1")
DEADLINE_S = 10.0
PACE = Pace(DEADLINE_S, least_rate=100.0)


class Hub:
    """Each of its calls returns the effects."""

    def __init__(self, slots: int = 2) -> None:
        self.protocol = PushProtocol(slots, PACE)
        self.now = 100.0

    def do(self, call: Callable[..., None], *args: object) -> list[Effect]:
        """Call a method of the protocol, now."""
        call(*args, self.now)
        return self.taken()

    def taken(self) -> list[Effect]:
        effects = list(self.protocol.effects)
        self.protocol.effects.clear()
        return effects

    def registered(
        self, digest: str = "d1", publisher: HubPeer = TRAINER, nbytes: int = 0
    ) -> list[Effect]:
        self.protocol.register(publisher, digest, self.now, nbytes)
        return self.taken()

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
        return self.taken()

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


def test_a_push_goes_through_all_phases_and_is_measured() -> None:
    hub = Hub()
    hub.registered()
    assert hub.subscribe(A) == []
    assert hub.acquire(0) == [HubReply("acquire 0", SlotGranted(slot=0))]
    assert hub.publish(0, 0) == [HubReply("publish", Ok()), Send("a", prepare(1, 0, 0))]
    hub.now += 4
    assert hub.ready(A, 1, 0) == [Send("a", Commit(epoch=1, version=0))]
    hub.now += 4
    assert hub.protocol.serving == {"a": -1}
    (pushed,) = hub.committed(A, 1, 0)
    assert isinstance(pushed, Pushed)
    assert (pushed.receiver, pushed.epoch, pushed.publication.version) == ("a", 1, 0)
    phases = pushed.publication.snapshot_s, pushed.ready.wire_s, pushed.ready.stage_s
    assert (*phases, pushed.commit_s, pushed.total_s) == (0.5, 1.0, 2.0, 3.0, 8.0)
    assert hub.protocol.serving == {"a": 0}
    assert hub.protocol.next_deadline() is None
    hub.now += 50
    hub.subscribe(B)
    hub.ready(B, 2, 0)
    hub.now += 3
    (pushed,) = hub.committed(B, 2, 0)
    assert isinstance(pushed, Pushed) and pushed.total_s == 3.0, "since it subscribed"


def test_a_slow_receiver_stalls_nobody_and_skips_what_was_overtaken() -> None:
    hub = Hub(slots=3)
    hub.registered()
    hub.subscribe(A)
    hub.subscribe(B)
    assert sent(hub.new_version(0), "b") == [prepare(2, 0, 0)]
    for version, epoch in ((0, 1), (1, 3), (2, 4)):
        if version:
            assert sent(hub.new_version(version), "b") == []
        hub.served(A, epoch, version)
    assert hub.protocol.serving == {"a": 2, "b": -1}
    # The trainer does not wait for a slot, so only the deadline of its phase counts.
    assert hub.protocol.next_deadline() == hub.now + DEADLINE_S
    assert sent(hub.ready(B, 2, 0), "b") == [Commit(epoch=2, version=0)]
    assert hub.protocol.counters["skipped"] == 0
    assert sent(hub.committed(B, 2, 0), "b") == [prepare(5, 2, 2)]
    assert hub.protocol.counters["skipped"] == 1


def test_a_receiver_that_misses_its_deadline_frees_the_slot_and_may_come_back() -> None:
    hub = pushing(0, 1)
    assert hub.acquire(2) == []
    assert hub.tick(DEADLINE_S - 1) == []
    effects = hub.tick(1)
    why = "no end of staging within 10 s"
    assert sent(effects, "a") == [Abort(epoch=1, version=0, reason=why, dropped=True)]
    assert Failed("a", 0, "staging", why, dropped=True) in effects
    assert granted(effects) == 0
    assert not hub.protocol.knows(A)
    assert hub.ready(A, 1, 0) == []
    counted = {"published": 2, "deadline": 1, "dropped": 1, "late": 1}
    assert +hub.protocol.counters == counted
    assert sent(hub.subscribe(A), "a") == [prepare(2, 1, 1)]


def held_up(hub: Hub, mute: HubPeer, version: int) -> float:
    """Seconds that the trainer waits for a slot that `mute` reads, while A serves `version` + 1."""
    hub.subscribe(mute)
    hub.new_version(version + 1)
    hub.served(A, hub.epoch, version + 1)
    assert granted(hub.acquire(version + 2)) is None
    waited = 0.0
    while True:
        until = hub.protocol.next_deadline()
        assert until is not None
        waited += until - hub.now
        effects = hub.tick(until - hub.now)
        slot = granted(effects)
        if slot is not None:
            assert [e.receiver for e in effects if isinstance(e, Failed)] == [mute.name]
            hub.publish(version + 2, slot)
            hub.served(A, hub.epoch, version + 2)
            return waited


def test_whoever_holds_the_trainer_up_is_dropped_before_its_deadline() -> None:
    """Where stagings take long, the trainer waits for longer."""
    hub = pushing(0)
    hub.served(A, 1, 0)
    waits = [held_up(hub, HubPeer(f"mute{n}", "m"), 2 * n) for n in range(2)]
    assert waits == [PATIENCE_S] * 2
    assert hub.protocol.counters["held_up"] == 2
    for version, staging_s, waited in ((5, 0.75, 6.0), (8, 3, DEADLINE_S)):
        hub.new_version(version)
        hub.tick(staging_s)
        hub.served(A, hub.epoch, version)
        assert held_up(hub, B, version) == waited


@pytest.mark.parametrize(
    ("loads", "waited"), [([], PATIENCE_S), ([0.25], LOAD_S), ([4.0], 8.0), ([4.0, 0.25], 8.0)]
)
def test_a_load_in_place_is_awaited_for_a_few_loads(loads: list[float], waited: float) -> None:
    """A receiver that still loads then is not dropped; one with a copy keeps nobody waiting."""
    hub = pushing(0)
    for version, commit_s in enumerate(loads):
        hub.ready(A, hub.epoch, version, in_place=True)
        hub.committed(A, hub.epoch, version, commit_s=commit_s)
        hub.new_version(version + 1)
    version = len(loads)
    epoch = hub.epoch
    hub.ready(A, epoch, version, in_place=True)
    hub.new_version(version + 1)
    assert granted(hub.acquire(version + 2)) is None
    assert hub.protocol.next_deadline() == hub.now + waited
    assert granted(hub.tick(waited - 0.25)) is None
    (effect,) = hub.tick(0.25)
    assert granted([effect]) == version % 2
    hub.publish(version + 2, version % 2)
    hub.committed(A, epoch, version)
    hub.ready(A, hub.epoch, version + 2)
    hub.acquire(version + 3)
    assert hub.protocol.counters["dropped"] == 0 and hub.protocol._grant is not None
    hub.publish(version + 3, hub.protocol._grant[0])
    assert granted(hub.acquire(version + 4)) == version % 2, "the engine loads its own copy"


def test_where_nobody_has_the_newest_version_the_deadline_alone_counts() -> None:
    hub = pushing(0)
    hub.served(A, 1, 0)
    hub.subscribe(B)
    hub.new_version(1)  # which A does not answer either
    hub.acquire(2)
    assert hub.tick(DEADLINE_S - 1) == []
    assert granted(hub.tick(1)) is not None


@pytest.mark.parametrize("phase", ["ready", "committed"])
def test_a_failed_push_is_tried_once_more(phase: str) -> None:
    hub = pushing(0)

    def fail(epoch: int) -> list[Effect]:
        if phase == "ready":
            return hub.ready(A, epoch, 0, error="broken")
        hub.ready(A, epoch, 0)
        return hub.committed(A, epoch, 0, error="broken")

    effects = fail(1)
    assert sent(effects, "a") == [Abort(epoch=1, version=0, reason="broken"), prepare(2, 0, 0)]
    where = "staging" if phase == "ready" else "committing"
    assert Failed("a", 0, where, "broken", dropped=False) in effects
    effects = fail(2)
    assert sent(effects, "a") == [Abort(epoch=2, version=0, reason="broken", dropped=True)]
    assert Failed("a", 0, where, "broken", dropped=True) in effects
    assert hub.protocol.serving == {}
    assert +hub.protocol.counters == {"published": 1, "failed": 2, "dropped": 1}
    hub = pushing(0, 1)
    for epoch, version in ((1, 0), (2, 1)):  # a newer one has two attempts of its own
        effects = hub.ready(A, epoch, version, error="broken")
        assert sent(effects, "a")[1] == prepare(epoch + 1, 1, 1)


def test_answers_out_of_turn_are_ignored_and_whoever_is_lost_gets_no_word() -> None:
    hub = pushing(0)
    assert hub.committed(A, 1, 0) == []
    assert hub.ready(A, 7, 0) == []
    hub.ready(A, 1, 0)
    assert hub.ready(A, 1, 0) == []
    assert hub.ready(B, 1, 0) == []
    hub.committed(A, 1, 0)
    assert +hub.protocol.counters == {"published": 1, "pushes": 1, "late": 4}
    hub.new_version(1)
    lost = hub.protocol.lost
    assert hub.do(lost, "a", "gone") == [Failed("a", 1, "staging", "gone", dropped=True)]
    assert hub.do(lost, "a", "gone") == []


def test_only_who_registered_last_publishes_and_what_it_was_granted() -> None:
    """A restarted trainer leaves the push under way as it is; another layout does not."""
    hub = Hub()
    assert refusal(hub.acquire(0)) == ("acquire 0", "not_registered")
    hub.registered()
    hub.subscribe(A)
    assert granted(hub.acquire(0)) == granted(hub.acquire(5)) == 0, "asked again, the same slot"
    assert refusal(hub.publish(0, 0)) == ("publish", "not_granted")
    assert hub.publish(5, 0) == [HubReply("publish", Ok()), Send("a", prepare(1, 5, 0))]
    assert granted(hub.acquire(6)) == 1
    restarted = HubPeer("trainer", "t2")
    assert hub.registered(publisher=restarted) == []
    assert refusal(hub.publish(6, 1)) == ("publish", "superseded")
    assert refusal(hub.publish(6, 1, restarted)) == ("publish", "not_granted")
    assert granted(hub.acquire(6, restarted)) == 1
    hub.registered("d2", restarted)
    assert refusal(hub.publish(6, 1, restarted)) == ("publish", "not_granted")
    assert granted(hub.acquire(6, restarted)) == 0


def test_the_slot_with_the_oldest_content_is_written_next() -> None:
    """An empty one before all; with one slot there would be no other than the newest."""
    with pytest.raises(ValueError, match="two slots"):
        PushProtocol(1, PACE)
    hub = Hub(slots=3)
    hub.registered()
    slots: list[int | None] = []
    for version in range(5):
        slots.append(granted(hub.acquire(version)))
        assert slots[-1] is not None
        hub.publish(version, slots[-1])
    assert slots == [0, 1, 2, 0, 1]


def test_a_phase_lasts_longer_the_larger_a_version_is() -> None:
    hub = Hub()
    hub.registered(nbytes=1500)  # 15 s at the least rate
    hub.subscribe(A)
    hub.new_version(1)
    hub.now += DEADLINE_S + 14.9
    assert hub.tick(0) == []
    assert hub.ready(A, 1, 1) == [Send("a", Commit(epoch=1, version=1))]
    hub.now += DEADLINE_S + 14.9
    assert hub.tick(0) == []
    hub.now += 0.2
    (failed,) = [e for e in hub.tick(0) if isinstance(e, Failed)]
    assert failed.dropped and failed.reason == "no end of committing within 25 s"


def test_nothing_is_published_while_a_part_is_missing() -> None:
    hub = Hub()
    hub.registered()
    hub.subscribe(A)
    assert granted(hub.acquire(0)) == 0
    assert hub.hold_back("host 1 is gone") == []
    refused = Nack(code="part_missing", reason="host 1 is gone")
    assert hub.publish(0, 0) == [HubReply("publish", refused)]
    assert hub.protocol.newest is None
    hub.hold_back("")
    assert hub.publish(0, 0) == [HubReply("publish", Ok()), Send("a", prepare(1, 0, 0))]


def test_pushes_wait_while_a_part_is_missing_and_go_on_with_the_newest_version() -> None:
    ending = pushing(0)
    ending.hold_back("gone")
    assert sent(ending.ready(A, 1, 0), "a") == [Commit(epoch=1, version=0)], "it is under way"
    assert isinstance(ending.committed(A, 1, 0)[0], Pushed)
    hub = pushing(0, slots=3)
    hub.hold_back("gone")
    assert hub.subscribe(B) == []
    failed = hub.ready(A, 1, 0, error="the source is gone")
    assert [type(effect) for effect in failed] == [Send, Failed]
    assert sent(failed, "a") == [Abort(epoch=1, version=0, reason="the source is gone")]
    assert set(hub.protocol.serving) == {"a", "b"}, "it is no fault of theirs"
    assert granted(hub.acquire(1)) is not None, "the trainer may write meanwhile"
    effects = hub.hold_back("")
    assert sent(effects, "a") == [prepare(2, 0, 0)]
    assert sent(effects, "b") == [prepare(3, 0, 0)]
    hub.ready(A, 2, 0, error="gone")  # before the hub has noticed
    hub.hold_back("gone")
    hub.ready(A, 4, 0, error="gone")
    assert hub.protocol.serving["a"] == -1, "its second attempt failed, and it is not dropped"
    assert sent(hub.hold_back(""), "a") == [prepare(5, 0, 0)]


def test_another_layout_and_a_loss_drop_everyone() -> None:
    """Lost versions have to be registered again."""
    for change, why in (
        (lambda hub: hub.registered("d2"), "the trainer registered another layout"),
        (lambda hub: hub.withdraw("lost"), "lost"),
    ):
        hub = pushing(0)
        hub.subscribe(B)
        hub.served(B, 2, 0)
        assert granted(hub.acquire(1)) is not None
        effects: list[Effect] = change(hub)
        assert sent(effects, "a") == [Abort(epoch=1, version=0, reason=why, dropped=True)]
        # Nothing is under way to it: no epoch has this number.
        assert sent(effects, "b") == [Abort(epoch=0, version=-1, reason=why, dropped=True)]
        assert Failed("a", 0, "staging", why, dropped=True) in effects
        assert Failed("b", -1, "idle", why, dropped=True) in effects
        assert hub.protocol.newest is None and not hub.protocol.held
        assert hub.protocol.knows(TRAINER) == (why != "lost")
        if why == "lost":
            assert refusal(hub.acquire(3)) == ("acquire 3", "not_registered")
            assert hub.registered() == []
        assert hub.subscribe(A) == []
        assert granted(hub.acquire(0)) == 0


def test_who_waits_for_a_slot_hears_that_it_gets_none() -> None:
    events: list[Callable[[Hub], list[Effect]]] = [
        lambda hub: hub.acquire(3),
        lambda hub: hub.registered(publisher=HubPeer("trainer", "t2")),
        lambda hub: hub.withdraw("lost"),
    ]
    for event in events:
        hub = pushing(0, 1)
        assert hub.acquire(2) == []
        assert refusal(event(hub)) == ("acquire 2", "superseded")
