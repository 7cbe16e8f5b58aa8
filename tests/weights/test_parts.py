"""Part hubs as the weight hub sees them: who is there, what each is told, and when pushes wait."""

import pytest

from umbra.proto.bounds import OWNERS
from umbra.proto.messages import HoldArena, OfferSlot, PartState
from umbra.proto.records import BucketsAt
from umbra.services.weight_hub.parts import SILENT_S, Parts
from umbra.services.weight_hub.push import HubPeer, Publication
from umbra.services.weights.manifest import build_manifest

LAYOUT = build_manifest([("a", "F32", [6, 64])], 512, {"a": [(2, 0), (4, 1), (6, 2)]})
ALONE = build_manifest([("a", "F32", [6, 64])], 512)
PATH = "/dev/shm/umbra-run-weights_1"
ONE = HubPeer("part-1", "first")
TWO = HubPeer("part-2", "first")


def state(owner: int, path: str = "", error: str = "", host: str = "") -> PartState:
    buckets = BucketsAt(endpoint=f"tcp://10.0.0.{owner}:5558", key=b"secret")
    return PartState(owner=owner, host=host or f"h{owner}", buckets=buckets, path=path, error=error)


def publication(number: int, slot: int) -> Publication:
    return Publication(number, 10 + number, slot, [number] * len(LAYOUT.buckets), 0.0, 0.0)


class World:
    """Parts and a clock; what each part hub was told, by name."""

    def __init__(self) -> None:
        self.parts = Parts("h0")
        self.now = 100.0
        self.held: dict[int, Publication] = {}

    def says(self, peer: HubPeer, stated: PartState) -> str:
        """Why it is refused; empty if it is not."""
        nack = self.parts.record(peer, stated, self.now)
        assert nack is None or nack.code == "bad_part"
        return "" if nack is None else nack.reason

    def told(self) -> dict[str, list[HoldArena | OfferSlot]]:
        found: dict[str, list[HoldArena | OfferSlot]] = {}
        for name, message in self.parts.tell(self.held, deltas=True):
            found.setdefault(name, []).append(message)
        return found

    def begin(self) -> None:
        self.parts.begin(LAYOUT, PATH, 2)
        for owner, peer in enumerate((ONE, TWO), start=1):
            assert not self.says(peer, state(owner))
        self.told()
        for owner, peer in enumerate((ONE, TWO), start=1):
            assert not self.says(peer, state(owner, PATH))
        assert not self.parts.missing


@pytest.fixture
def world() -> World:
    return World()


HOLD = HoldArena(manifest=LAYOUT, path=PATH, slots=2)
OFFER = OfferSlot(path=PATH, slot=0, checksums=[1] * len(LAYOUT.buckets), deltas=True)


def test_a_layout_is_whole_when_all_part_hubs_hold_theirs(world: World) -> None:
    world.parts.begin(LAYOUT, PATH, 2)
    assert "trainer host 1 has no part hub" in world.parts.missing
    assert not world.says(ONE, state(1))
    assert world.told() == {"part-1": [HOLD]}
    assert world.told() == {}
    assert "still making" in world.parts.missing
    assert not world.says(ONE, state(1, PATH))
    assert "trainer host 2 has no part hub" in world.parts.missing
    assert not world.says(TWO, state(2))
    assert world.told() == {"part-2": [HOLD]}
    assert not world.says(TWO, state(2, PATH))
    assert world.parts.missing == ""
    assert {o: at.endpoint for o, at in world.parts.buckets.items()} == {
        1: "tcp://10.0.0.1:5558",
        2: "tcp://10.0.0.2:5558",
    }
    world.parts.begin(LAYOUT, PATH, 2)
    assert set(world.told()) == {"part-1", "part-2"}, "the same place for another layout"


def test_no_part_hub_is_needed_where_one_host_holds_all(world: World) -> None:
    assert not world.says(ONE, state(1, "/dev/shm/umbra-run-old"))
    assert world.told() == {}, "a trainer may come back to what it holds"
    world.parts.begin(ALONE, PATH, 2)
    assert world.parts.missing == ""
    (message,) = world.told()["part-1"]
    assert isinstance(message, HoldArena)
    assert message.path == ""


def test_what_slots_hold_is_offered_once_and_withdrawn_before_it_is_written(world: World) -> None:
    world.begin()
    world.held = {0: publication(1, 0)}
    sums = world.held[0].checksums
    assert sums == OFFER.checksums
    assert world.told() == {"part-1": [OFFER], "part-2": [OFFER]}
    assert world.told() == {}
    world.held = {1: publication(2, 1)}
    told = world.told()["part-2"]
    assert [m.slot for m in told if isinstance(m, OfferSlot) and not m.checksums] == [0]
    assert told[-1] == OfferSlot(path=PATH, slot=1, checksums=[2] * len(sums), deltas=True)
    world.held = {1: publication(3, 1)}  # rolled back to, say
    assert len(world.told()["part-1"]) == 1


def test_one_that_was_silent_goes_on_with_its_arena(world: World) -> None:
    world.begin()
    world.held = {0: publication(1, 0)}
    world.told()
    world.now += SILENT_S
    assert not world.says(TWO, state(2, PATH))
    assert world.parts.tick(world.now) == ["part-1"]
    assert "trainer host 1 has no part hub" in world.parts.missing
    assert not world.says(ONE, state(1, PATH))
    assert not world.parts.missing and not world.parts.loss
    assert world.told() == {"part-1": [HOLD, OFFER]}


def test_one_that_is_started_again_takes_all_versions_with_it(world: World) -> None:
    world.begin()
    assert not world.says(HubPeer("part-1", "second"), state(1)), "nobody has missed the first"
    assert world.parts.missing
    assert world.parts.loss == "the part hub of trainer host 1 was started again"
    assert not world.parts.broken
    world.parts.forget()
    assert not world.parts.loss
    assert world.told() == {}
    other = f"{PATH}_2"
    world.parts.begin(LAYOUT, other, 2)
    told = world.told()
    assert {m.path for messages in told.values() for m in messages} == {other}
    assert not world.parts.loss, "what it said was about the arena before"
    assert not world.parts.broken


def test_one_without_room_is_asked_again(world: World) -> None:
    world.parts.begin(LAYOUT, PATH, 2)
    assert not world.says(ONE, state(1))
    world.told()
    assert not world.says(ONE, state(1, PATH, "no room"))
    assert "no room" in world.parts.broken
    assert "no room" in world.parts.missing
    assert not world.parts.loss
    world.parts.ask_again()
    assert not world.parts.broken
    assert world.told() == {"part-1": [HOLD]}
    assert not world.says(ONE, state(1, PATH))
    assert not world.parts.broken
    world.held = {0: publication(1, 0)}
    assert [type(m) for m in world.told()["part-1"]] == [OfferSlot]


def test_one_that_cannot_be_reached_begins_anew(world: World) -> None:
    world.begin()
    world.held = {0: publication(1, 0)}
    world.told()
    world.parts.lost("part-1")
    assert world.parts.missing
    assert not world.says(ONE, state(1, PATH))
    assert [type(m) for m in world.told()["part-1"]] == [HoldArena, OfferSlot]


@pytest.mark.parametrize(
    ("peer", "stated", "reason"),
    [
        (ONE, state(0), "count from 1"),
        (ONE, state(OWNERS), "count from 1"),
        (HubPeer("part-x", "1"), state(1), "has a part hub already: part-1"),
        (ONE, state(2), "has a part hub already: part-2"),
        (ONE, state(3), "is the part hub of another trainer host"),
        (HubPeer("part-3", "1"), state(3, host="h0"), "trainer hosts 0 and 3 share /dev/shm"),
        (HubPeer("part-3", "1"), state(3, host="h2"), "trainer hosts 2 and 3 share /dev/shm"),
    ],
)
def test_one_that_cannot_be_is_refused(
    world: World, peer: HubPeer, stated: PartState, reason: str
) -> None:
    world.begin()
    assert reason in world.says(peer, stated)
    assert not world.parts.missing, "those that are there stay"


def test_deadlines_are_those_of_the_first_to_be_silent(world: World) -> None:
    assert world.parts.next_deadline() is None
    world.says(ONE, state(1))
    world.now += 1
    world.says(TWO, state(2))
    assert world.parts.next_deadline() == 100.0 + SILENT_S
