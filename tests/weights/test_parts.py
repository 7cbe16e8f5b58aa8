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

    def refusal(self, peer: HubPeer, stated: PartState) -> str:
        """Record a state; return why it is refused, empty if it is not."""
        nack = self.parts.record(peer, stated, self.now)
        assert nack is None or nack.code == "bad_part"
        return "" if nack is None else nack.reason

    def says(self, peer: HubPeer, path: str = "", error: str = "") -> None:
        owner = int(peer.name.removeprefix("part-"))
        assert not self.refusal(peer, state(owner, path, error))

    def told(self) -> dict[str, list[HoldArena | OfferSlot]]:
        found: dict[str, list[HoldArena | OfferSlot]] = {}
        for name, message in self.parts.tell(self.held, deltas=True):
            found.setdefault(name, []).append(message)
        return found


@pytest.fixture
def new() -> World:
    return World()


@pytest.fixture
def world() -> World:
    """All part hubs hold their arenas."""
    world = World()
    world.parts.begin(LAYOUT, PATH, 2)
    for path in ("", PATH):
        for peer in (ONE, TWO):
            world.says(peer, path)
        world.told()
    assert not world.parts.missing
    return world


@pytest.fixture
def serving(world: World) -> World:
    """And hand out a version."""
    world.held = {0: publication(1, 0)}
    assert world.told() == {"part-1": [OFFER], "part-2": [OFFER]}
    assert world.told() == {}
    return world


HOLD = HoldArena(manifest=LAYOUT, path=PATH, slots=2)
OFFER = OfferSlot(path=PATH, slot=0, checksums=[1] * len(LAYOUT.buckets), deltas=True)


def test_a_layout_is_whole_when_all_part_hubs_hold_theirs(new: World) -> None:
    parts = new.parts
    parts.begin(LAYOUT, PATH, 2)
    for number, peer in enumerate((ONE, TWO), start=1):
        assert f"trainer host {number} has no part hub" in parts.missing
        new.says(peer)
        assert new.told() == {peer.name: [HOLD]}
        assert new.told() == {}
        assert "still making" in parts.missing
        new.says(peer, PATH)
    assert parts.missing == ""
    found = {owner: at.endpoint for owner, at in parts.buckets.items()}
    assert found == {1: "tcp://10.0.0.1:5558", 2: "tcp://10.0.0.2:5558"}
    parts.begin(LAYOUT, PATH, 2)
    assert set(new.told()) == {"part-1", "part-2"}, "the same place for another layout"


def test_no_part_hub_is_needed_where_one_host_holds_all(new: World) -> None:
    new.says(ONE, "/dev/shm/umbra-run-old")
    assert new.told() == {}, "a trainer may come back to what it holds"
    new.parts.begin(ALONE, PATH, 2)
    assert new.parts.missing == ""
    (message,) = new.told()["part-1"]
    assert isinstance(message, HoldArena) and message.path == ""


def test_what_slots_hold_is_offered_once_and_withdrawn_before_it_is_written(serving: World) -> None:
    serving.held = {1: publication(2, 1)}
    told = serving.told()["part-2"]
    assert [m.slot for m in told if isinstance(m, OfferSlot) and not m.checksums] == [0]
    sums = [2] * len(LAYOUT.buckets)
    assert told[-1] == OfferSlot(path=PATH, slot=1, checksums=sums, deltas=True)
    serving.held = {1: publication(3, 1)}  # rolled back to, say
    assert len(serving.told()["part-1"]) == 1


@pytest.mark.parametrize("why", ["silent", "unreachable"])
def test_one_that_was_away_goes_on_with_its_arena(serving: World, why: str) -> None:
    parts = serving.parts
    if why == "silent":
        serving.now += SILENT_S
        serving.says(TWO, PATH)
        assert parts.tick(serving.now) == ["part-1"]
    else:
        parts.lost("part-1")
    assert "trainer host 1 has no part hub" in parts.missing
    serving.says(ONE, PATH)
    assert not parts.missing and not parts.loss
    assert serving.told() == {"part-1": [HOLD, OFFER]}


def test_one_that_is_started_again_takes_all_versions_with_it(world: World) -> None:
    parts = world.parts
    world.says(HubPeer("part-1", "second"))  # nobody has missed the first
    assert parts.missing and not parts.broken
    assert parts.loss == "the part hub of trainer host 1 was started again"
    parts.forget()
    assert not parts.loss
    assert world.told() == {}
    other = f"{PATH}_2"
    parts.begin(LAYOUT, other, 2)
    told = world.told()
    assert {m.path for messages in told.values() for m in messages} == {other}
    assert not parts.loss, "what it said was about the arena before"
    assert not parts.broken


def test_one_without_room_is_asked_again(new: World) -> None:
    parts = new.parts
    parts.begin(LAYOUT, PATH, 2)
    new.says(ONE)
    new.told()
    new.says(ONE, PATH, "no room")
    assert "no room" in parts.broken and "no room" in parts.missing
    assert not parts.loss
    parts.ask_again()
    assert not parts.broken
    assert new.told() == {"part-1": [HOLD]}
    new.says(ONE, PATH)
    assert not parts.broken
    new.held = {0: publication(1, 0)}
    assert [type(m) for m in new.told()["part-1"]] == [OfferSlot]


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
    assert reason in world.refusal(peer, stated)
    assert not world.parts.missing, "those that are there stay"


def test_deadlines_are_those_of_the_first_to_be_silent(new: World) -> None:
    assert new.parts.next_deadline() is None
    new.says(ONE)
    new.now += 1
    new.says(TWO)
    assert new.parts.next_deadline() == 100.0 + SILENT_S
