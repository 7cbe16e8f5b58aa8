"""A publisher by its hub's answers, which a test gives one by one."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from copy import copy
from pathlib import Path
from typing import Any, cast

import pytest
from fakes.slowness import until

from umbra.proto import messages as m
from umbra.proto.deadline import Pace
from umbra.proto.errors import DeadlineError, PeerLostError, RejectedError, UmbraError
from umbra.proto.net.io_thread import Channel
from umbra.proto.records import Manifest
from umbra.services.weights import publisher as publisher_module
from umbra.services.weights.arena import Arena
from umbra.services.weights.manifest import build_manifest, checksums
from umbra.services.weights.publisher import Publisher

LAYOUT = build_manifest([("w", "F32", [100, 32])], 4096)
DIVIDED = build_manifest([("w", "F32", [100, 32])], 4096, {"w": [(50, 0), (100, 1)]})
PACE = Pace(30.0, LAYOUT.total_bytes / 100)  # a version takes 100 s more
AWAY = RejectedError("trainer host 1 has no part hub", code="part_missing")
FORGOTTEN = RejectedError("it has not registered", code="not_registered")
Answer = m.Message | UmbraError
SILENT = PeerLostError("no answer before it stops")


class Hub:
    """A hub that answers each kind of message with the next one for it, the last one for ever."""

    peer = "weight hub"
    on_moved: Callable[[], None] | None = None

    def __init__(self, run_id: str) -> None:
        self.arenas = [
            Arena.create(run_id, f"p{n}", slot_bytes=LAYOUT.total_bytes, slots=2) for n in range(3)
        ]
        self.answers: dict[type[m.Message], list[Answer]] = {
            m.RegisterManifest: [self.ready(0)],
            m.AcquireSlot: [m.SlotGranted(slot=1)],
            m.Publish: [m.Ok()],
            m.HubStatusRequest: [m.HubStatus(subscribed=True)],
        }
        self.asked: list[m.Message] = []
        self.limits: dict[type[m.Message], float] = {}  # how long an answer could have taken

    def ready(self, arena: int) -> m.ArenaReady:
        return m.ArenaReady(path=str(self.arenas[arena].path), slots=2)

    def call(
        self, body: m.Message, _: object, *, timeout_s: float, stopping: Callable[[], bool]
    ) -> m.Message:
        self.stopping = stopping
        self.asked.append(body)
        self.limits[type(body)] = timeout_s
        answers = self.answers[type(body)]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer is SILENT:
            until(stopping, "it waits on")
        if isinstance(answer, UmbraError):
            raise copy(answer)  # as each is one of its own
        return answer

    def publisher(self, manifest: Manifest = LAYOUT, **options: Any) -> Publisher:
        made = Publisher(cast(Channel, self), manifest, pace=PACE, **options)
        made.register(1.0)
        return made

    @property
    def mapped(self) -> list[int]:
        """How often each arena is mapped: by its hub, and perhaps by a publisher."""
        maps = Path("/proc/self/maps").read_text()
        return [maps.count(str(arena.path)) for arena in self.arenas]

    def count(self, kind: type[m.Message]) -> int:
        return sum(isinstance(body, kind) for body in self.asked)


@pytest.fixture
def hub(run_id: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in ("RETRY_S", "PARTS_S", "CHECK_S"):
        monkeypatch.setattr(publisher_module, name, 0.01)
    made = Hub(run_id)
    yield made
    for arena in made.arenas:
        arena.unlink()
        arena.close()


def published(publisher: Publisher, version: int) -> list[int]:
    slot = publisher.slot(version, 1.0)
    slot[:] = bytes([version]) * len(slot)
    sums = checksums(LAYOUT, slot)
    publisher.publish(version, 0.5, sums)
    return sums


def test_only_a_version_with_a_slot_is_published_and_once(hub: Hub) -> None:
    with closing(hub.publisher()) as publisher:
        with pytest.raises(ValueError, match="no slot is acquired"):
            _ = publisher.place
        publisher.slot(3, 1.0)
        assert publisher.place == (str(hub.arenas[0].path), 1)
        with pytest.raises(ValueError, match="for version 4"):
            publisher.publish(4, 0.0, [1])
        sums = published(publisher, 3)
        assert hub.asked[-1] == m.Publish(version=3, slot=1, checksums=sums, snapshot_s=0.5)
        assert hub.limits[m.RegisterManifest] == 1.0, "as its caller says"
        assert hub.limits[m.Publish] == 230.0, "it may be a new one, that allocates all slots"
        with pytest.raises(ValueError, match="for version 3"):
            publisher.publish(3, 0.0, sums)


def test_part_hubs_are_awaited_and_named_once(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    hub.answers[m.Publish] = [AWAY, AWAY, RejectedError("another", code="part_missing"), m.Ok()]
    with closing(hub.publisher()) as publisher:
        published(publisher, 1)
        assert hub.count(m.Publish) == 4
        assert [caplog.text.count(text) for text in (str(AWAY), "another")] == [1, 1]


@pytest.mark.parametrize("why", ["too long", "stopping"])
def test_a_part_hub_is_not_waited_for_without_end(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    stopping = threading.Event()
    publisher = hub.publisher(stopping=stopping)
    hub.answers[m.Publish] = [AWAY]
    if why == "stopping":
        stopping.set()
    else:
        monkeypatch.setattr(publisher_module, "PARTS_BACK_S", -1e6)
    with closing(publisher), pytest.raises(RejectedError, match="no part hub"):
        published(publisher, 1)
    assert hub.count(m.Publish) == 1


def test_without_a_free_slot_the_trainer_is_told_why(hub: Hub) -> None:
    stopping = threading.Event()
    with closing(hub.publisher(stopping=stopping)) as publisher:
        hub.answers[m.AcquireSlot] = [DeadlineError("silent")]
        with pytest.raises(DeadlineError, match="no free slot for version 2 within 1 s"):
            publisher.slot(2, 1.0)
        assert not hub.stopping()
        stopping.set()
        assert hub.stopping(), "the wait for an answer ends with it"
        with pytest.raises(DeadlineError, match="silent"):
            publisher.slot(2, 1.0)
        assert hub.mapped == [2, 1, 1]
    assert hub.mapped == [1, 1, 1], "detached, though nothing was published"


def test_a_restarted_hub_gets_the_version_into_its_own_arena(hub: Hub) -> None:
    """It forgot the trainer before a slot was asked for, and then while it was written.

    Both times it is killed again, before it grants a slot and before it has the version.
    """
    granted = [m.SlotGranted(slot=slot) for slot in (0, 1)]
    with closing(hub.publisher()) as publisher:
        hub.answers[m.AcquireSlot][:0] = [FORGOTTEN, FORGOTTEN]
        sums = published(publisher, 1)
        assert hub.count(m.RegisterManifest) == 3
        not_granted = RejectedError("not granted", code="not_granted")
        hub.answers[m.Publish][:0] = [not_granted, FORGOTTEN]
        hub.answers[m.RegisterManifest] = [hub.ready(1), hub.ready(2)]
        hub.answers[m.AcquireSlot] = [granted[1], granted[1], FORGOTTEN, granted[0]]
        sums = published(publisher, 2)
        assert hub.mapped == [1, 1, 2], "of those before nothing is needed any more"
        assert hub.asked[-1] == m.Publish(version=2, slot=0, checksums=sums, snapshot_s=0.0)
        assert set(hub.arenas[2].slot(0)) == {2}
        assert isinstance(hub.asked[-3], m.RegisterManifest)


def moved(hub: Hub) -> None:
    assert hub.on_moved is not None
    hub.asked.clear()
    hub.on_moved()


@pytest.mark.parametrize("arena", [0, 1])
def test_a_moved_hub_gets_the_last_version_again_until_it_answers(hub: Hub, arena: int) -> None:
    with closing(hub.publisher()) as publisher:
        published(publisher, 1)
        hub.answers[m.RegisterManifest] = [DeadlineError("silent"), hub.ready(arena)]
        hub.answers[m.AcquireSlot] = [m.SlotGranted(slot=0)]
        moved(hub)
        until(lambda: hub.count(m.RegisterManifest) == 2, "it was not asked again")
        until(lambda: hub.count(m.Publish) == arena, "published where it is not")
        with publisher._lock:
            assert set(hub.arenas[arena].slot(1 - arena)) == {1}
        publisher.slot(2, 1.0)
        moved(hub)
        until(lambda: not publisher._moved.is_set(), "it was not noticed")
        assert not hub.asked, "the slot that is written is left to its publication"
        publisher.publish(2, 0.5, [])
        hub.answers[m.RegisterManifest] = [SILENT]
        moved(hub)
        until(lambda: hub.count(m.RegisterManifest) == 1, "it was not asked")
    assert hub.on_moved is None, "it does not wait for the one that hangs"


def test_a_hub_without_room_beside_the_memory_of_the_one_before_needs_another_trainer(
    hub: Hub,
) -> None:
    """The first one has no room for anybody, which only its user can mend."""
    refusal = RejectedError("9 bytes free", code="no_room")
    hub.answers[m.RegisterManifest] = [refusal, hub.ready(0), refusal]
    with pytest.raises(RejectedError, match="9 bytes free"):
        hub.publisher()
    with closing(hub.publisher()) as publisher:
        published(publisher, 1)
        moved(hub)
        until(lambda: publisher._failure, "it was not noticed")
        with pytest.raises(PeerLostError, match="a restarted trainer has none: 9 bytes free"):
            publisher.slot(2, 1.0)


def test_a_version_that_is_lost_with_a_host_ends_the_trainer(hub: Hub) -> None:
    with closing(hub.publisher(DIVIDED)) as publisher:
        published(publisher, 1)
        publisher.check()
        hub.answers[m.HubStatusRequest] = [DeadlineError("silent"), m.HubStatus(subscribed=True)]
        asked = hub.count(m.HubStatusRequest)
        until(lambda: hub.count(m.HubStatusRequest) > asked + 2, "it does not ask")
        assert hub.count(m.RegisterManifest) == 1
        hub.answers[m.RegisterManifest] = [hub.ready(1)]
        hub.answers[m.HubStatusRequest] = [m.HubStatus(subscribed=False)]
        until(lambda: publisher._failure, "it was not noticed")
        for call in (publisher.check, lambda: publisher.slot(2, 1.0)):
            with pytest.raises(PeerLostError, match="version 1 is lost with the shared memory"):
                call()
