"""The push protocol where part hubs hold a share of each version."""

from __future__ import annotations

from fakes.push_hub import DEADLINE_S, TRAINER, A, B, Hub, granted, prepare, pushing, sent

from umbra.proto.messages import Abort, Commit, Nack, Ok
from umbra.services.weight_hub.push import Failed, HubPeer, HubReply, Pushed, Send


def test_nothing_is_published_while_a_part_is_missing() -> None:
    hub = Hub()
    hub.registered()
    hub.subscribe(A)
    slot = granted(hub.acquire(0))
    assert slot is not None
    assert hub.protocol.hold_back("host 1 is gone", hub.now) == []
    refused = Nack(code="part_missing", reason="host 1 is gone")
    assert hub.publish(0, slot) == [HubReply("publish", refused)]
    assert hub.protocol.newest is None
    hub.protocol.hold_back("", hub.now)
    answer, send = hub.publish(0, slot)
    assert answer == HubReply("publish", Ok())
    assert isinstance(send, Send)


def test_pushes_wait_while_a_part_is_missing_and_go_on_with_the_newest_version() -> None:
    hub = pushing(0, slots=3)
    hub.protocol.hold_back("gone", hub.now)
    assert hub.subscribe(B) == []
    failed = hub.ready(A, 1, 0, error="the source is gone")
    assert [type(effect) for effect in failed] == [Send, Failed]
    assert sent(failed, "a") == [Abort(epoch=1, version=0, reason="the source is gone")]
    assert set(hub.protocol.serving) == {"a", "b"}, "it is no fault of theirs"
    assert granted(hub.acquire(1)) is not None, "the trainer may write meanwhile"
    effects = hub.protocol.hold_back("", hub.now)
    assert sent(effects, "a") == [prepare(2, 0, 0)]
    assert sent(effects, "b") == [prepare(3, 0, 0)]


def test_what_is_under_way_may_end_well_without_the_part_that_went_away() -> None:
    hub = pushing(0)
    hub.protocol.hold_back("gone", hub.now)
    assert sent(hub.ready(A, 1, 0), "a") == [Commit(epoch=1, version=0)]
    assert isinstance(hub.committed(A, 1, 0)[0], Pushed)
    assert hub.tick(DEADLINE_S) == []


def test_one_that_fails_its_second_attempt_while_a_part_is_missing_is_not_dropped() -> None:
    hub = pushing(0)
    hub.ready(A, 1, 0, error="gone")  # before the hub has noticed
    hub.protocol.hold_back("gone", hub.now)
    hub.ready(A, 2, 0, error="gone")
    assert hub.protocol.serving == {"a": -1}
    assert hub.protocol.next_deadline() is None
    assert sent(hub.protocol.hold_back("", hub.now), "a") == [prepare(3, 0, 0)]


def test_what_is_lost_is_withdrawn_and_has_to_be_registered_again() -> None:
    hub = pushing(0)
    hub.acquire(1)
    assert hub.protocol.knows(TRAINER)
    waiting = hub.acquire(2, HubPeer("trainer", "t1"))
    assert granted(waiting) is not None
    effects = hub.protocol.withdraw("host 1 lost its memory", hub.now)
    (abort,) = sent(effects, "a")
    assert isinstance(abort, Abort)
    assert abort.dropped
    assert hub.protocol.newest is None
    assert not hub.protocol.held
    assert not hub.protocol.knows(TRAINER)
    (nack,) = hub.acquire(3)
    assert isinstance(nack, HubReply)
    assert isinstance(nack.message, Nack)
    assert nack.message.code == "not_registered"
    assert hub.registered() == []


def test_whoever_waits_for_a_slot_hears_that_all_is_withdrawn() -> None:
    hub = pushing(0, 1)
    assert hub.acquire(2) == []
    answers = [e for e in hub.protocol.withdraw("lost", hub.now) if isinstance(e, HubReply)]
    assert [a.ticket for a in answers] == ["acquire 2"]
