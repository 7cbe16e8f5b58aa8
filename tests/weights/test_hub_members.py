"""Members of a weight hub: part hubs, daemons with an upstream, and whose name is whose."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from fakes import broker_world
from fakes.hub_bench import WAIT_S, Bench, SmallFrames
from fakes.trainer_hosts import layout

from umbra.proto import messages as m
from umbra.proto.access import KeyRole
from umbra.proto.bounds import OWNERS
from umbra.proto.errors import DeadlineError, RejectedError, UsageError
from umbra.proto.messages import (
    Header,
    Heartbeat,
    HoldArena,
    Message,
    OfferSlot,
    PartState,
    Ready,
    Subscribe,
)
from umbra.proto.net.server import Request
from umbra.proto.records import BucketsAt
from umbra.services.buffer.effects import NackError
from umbra.services.weight_hub.command import _identify
from umbra.services.weight_hub.daemon import PartHub, UpstreamEnd
from umbra.services.weight_hub.parts import SILENT_S, Parts
from umbra.services.weight_hub.push import HubPeer, Publication
from umbra.services.weight_hub.service import MOST_NAMES, Bindings
from umbra.services.weights.arena import Arena
from umbra.services.weights.gpu.worker import result
from umbra.services.weights.manifest import build_manifest, checksums, owned_buckets, owned_ranges
from umbra.services.weights.planes.bucket_fetch import TcpReceiver
from umbra.services.weights.planes.bucket_wire import grant
from umbra.services.weights.planes.plane import Receipt, Receiving

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
    assert parts.next_deadline() is None
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
        assert parts.next_deadline() == serving.now, "of the first to be silent"
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


# -- a part hub -----------------------------------------------------------------------------------

MANIFEST = layout(2)
SIZE = MANIFEST.total_bytes


class TrainerHost:
    """Trainer host 1 with its part hub, and the weight hub above that."""

    def __init__(self, run_id: str) -> None:
        self.path = f"/dev/shm/umbra-{run_id}-part"
        self.above = Mock(peer="weight hub", pushes=queue.SimpleQueue[m.Message]())
        config = Bench.config(delta="off")
        self.part = PartHub("part-1", 1, "tcp://127.0.0.1:1", config, "elsewhere")
        self.part._hub = self.above

    def state(self, *orders: m.Message) -> m.PartState:
        """Have orders handled; return the state that the weight hub is told then."""
        for order in orders:
            self.above.pushes.put(order)
        self.part._listen(threading.Event(), time.monotonic() + 0.05)
        self.part._state(threading.Event())
        return self.above.call.call_args.args[0]

    def hold(self, path: str | None = None) -> m.PartState:
        """Order an arena, an empty path for none; return the state once it is made, or not."""
        path = self.path if path is None else path
        state = self.state(m.HoldArena(manifest=MANIFEST, path=path, slots=2))
        while state.path != path:
            state = self.state()
        return state

    def offer(self, slot: int, sums: list[int], path: str = "") -> bool:
        """Offer the content of a slot; return whether anything is handed out then."""
        at = path or self.path
        self.state(m.OfferSlot(path=at, slot=slot, checksums=sums, deltas=False))
        assert self.part._tcp.server.store is not None
        return self.part._tcp.server.store._last is not None

    def fetch(self, sums: list[int]) -> bytes:
        """Fetch the buckets of this host from the part hub, as a receiver does."""
        data = memoryview(bytearray(SIZE))
        pull = TcpReceiver(MANIFEST, [data], SmallFrames())
        at = BucketsAt(endpoint=self.part.buckets.endpoint, key=grant(self.part.buckets.key))
        prepare = m.Prepare(epoch=1, version=1, slot=0, checksums=sums, sources=[at, at])
        with closing(pull), closing(pull.receive(prepare)) as steps:
            mine, came = set(owned_buckets(MANIFEST)[1]), set[int | None]()
            while not mine <= came:
                came.add(next(steps))
            assert came - {None} == mine, "the rest is another host's"
        return bytes(data)


@pytest.fixture
def host(run_id: str) -> Iterator[TrainerHost]:
    host = TrainerHost(run_id)
    with closing(host.part):
        yield host
    assert not Path(host.path).exists()


def test_a_part_hub_holds_its_own_rows_and_hands_out_what_it_is_told(
    host: TrainerHost, caplog: pytest.LogCaptureFixture
) -> None:
    state = host.hold()
    assert (state.owner, state.host, state.error) == (1, "elsewhere", "")
    assert state.buckets == host.part.buckets
    own = owned_ranges(MANIFEST, 1)
    memory = Path(host.path).stat().st_blocks * 512
    assert sum(end - start for start, end in own) <= memory // 2 < SIZE
    with closing(Arena.attach(host.path, slot_bytes=SIZE)) as arena:
        for start, end in own:
            arena.slot(1)[start:end] = bytes([7]) * (end - start)
    sums = checksums(MANIFEST, memoryview(bytearray([7]) * SIZE))
    for slot, given in ((2, sums), (-1, sums), (1, sums[1:])):
        assert not host.offer(slot, given)
    assert not host.offer(1, sums, "another arena")
    assert "offers slot 2 of 2" in caplog.text and "offers slot -1 of 2" in caplog.text
    assert f"{len(sums) - 1} checksums for {len(sums)} buckets" in caplog.text
    assert host.offer(1, sums)
    data = host.fetch(sums)
    assert all(set(data[start:end]) == {7} for start, end in own)
    assert not host.offer(1, []), "it is about to be written"
    host.state(m.Ok())  # nothing that it knows
    assert host.hold("") and not Path(host.path).exists()


def test_a_part_hub_says_why_it_cannot_hold_an_arena(host: TrainerHost, run_id: str) -> None:
    other = Arena.create(run_id, "part", slot_bytes=SIZE, slots=2)
    assert "File exists" in host.hold().error
    other.close()  # as if its part hub had been killed
    assert not host.hold().error
    inode = Path(host.path).stat().st_ino
    host.hold()
    assert Path(host.path).stat().st_ino == inode, "it holds that one already"


def test_an_arena_in_the_making_is_not_held(
    host: TrainerHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, create = threading.Event(), Arena.create

    def slow(*args: Any, **options: Any) -> Arena:
        assert make.wait(WAIT_S)
        return create(*args, **options)

    monkeypatch.setattr(Arena, "create", slow)
    order = m.HoldArena(manifest=MANIFEST, path=host.path, slots=2)
    assert not host.state(order).path and not host.state().path
    make.set()
    assert not host.hold().error


def test_a_hub_that_is_away_for_longer_than_its_patience_ends_the_part_hub(
    host: TrainerHost,
) -> None:
    host.above.call.side_effect = DeadlineError("silent")
    with pytest.raises(DeadlineError, match="no answer from the weight hub"):
        host.part.run(threading.Event(), 0.0)


# -- a daemon with an upstream --------------------------------------------------------------------


PREPARE = m.Prepare(epoch=1, version=8, slot=0, checksums=[5, 6])


def upstream_end(wait_s: float, *answers: m.Message) -> tuple[Mock, UpstreamEnd]:
    """A daemon's own hub, which answers so and then no more and fills its arena; and the end."""
    futures = [Future[m.Message]() for _ in range(len(answers) + 1)]
    for future, answer in zip(futures, answers, strict=False):
        future.set_result(answer)
    own = Mock(slot=lambda index: memoryview(bytes([index])))
    own.receive = lambda _, slot: filled(Receipt(wire_s=3.0, wire_bytes=9, data=own.slot(slot)))
    own.ask.side_effect = futures
    return own, UpstreamEnd(own, own, own, own, wait_s)


def filled(receipt: Receipt) -> Receiving:
    yield 4
    return receipt


def test_a_version_is_handed_on_bucket_by_bucket_and_published_when_it_is_whole() -> None:
    refusal = m.Nack(code="leaving", reason="it ends")
    own, end = upstream_end(WAIT_S, m.SlotGranted(slot=1), refusal, m.Ok())
    with pytest.raises(RejectedError, match="version 8 is not the one"):
        end.publish(8)
    receipt = result(end.receive(PREPARE))
    own.ask.assert_called_once_with(m.AcquireSlot(version=8))
    (offered,) = own.offer.call_args.args
    assert (offered.slot, list(offered.contents)) == (1, [5, 6])
    assert offered.absent == {0, 1}, "nothing is there yet"
    own.arrived.assert_called_once_with(1, 4)
    assert replace(receipt, stage_s=0.0) == Receipt(wire_s=3.0, wire_bytes=9, data=own.slot(1))
    assert 0.0 < receipt.stage_s < WAIT_S, "the wait for a slot counts"
    with pytest.raises(RejectedError, match="version 7 is not the one"):
        end.publish(7)
    with pytest.raises(RejectedError, match="it ends") as caught:
        end.publish(8)
    assert caught.value.code == "leaving"
    end.publish(8)
    own.ask.assert_called_with(m.Publish(version=8, slot=1, checksums=[5, 6], snapshot_s=0.0))
    end.close()
    assert own.close.call_count == 2, "the end and the arena"


def test_without_a_slot_a_version_is_not_received() -> None:
    superseded = m.Nack(code="x", reason="superseded")
    for answers, error in (([], "no slot was free within 0 s"), ([superseded], "superseded")):
        own, end = upstream_end(0.0, *answers)
        assert result(end.receive(PREPARE)) == Receipt(error=error) and not own.offer.called


def test_role_and_name_follow_from_the_options_if_these_make_sense() -> None:
    for upstream, owner, role, named in (
        ("", None, "weight_hub", "weight-hub"),
        ("tcp://hub:1", 2, "part", "part-2"),
        ("tcp://hub:1", None, "relay", "relay-"),
    ):
        found = _identify({"upstream": upstream, "owner": owner})
        assert found[0] == role and found[1].startswith(named)
    for upstream, owner in (("", 1), ("hub", None)):
        with pytest.raises(UsageError, match="--upstream"):
            _identify({"upstream": upstream, "owner": owner})


# -- names ----------------------------------------------------------------------------------------

SUBSCRIBE = Subscribe(host="h", planes=["tcp"])
READY = Ready(epoch=1, version=1, wire_s=0.0, stage_s=0.0)


def request(
    name: str,
    body: Message,
    *,
    identity: bytes = b"own",
    incarnation: str = "1",
    role: KeyRole | None = "generator",
) -> Request:
    header = Header(major=1, minor=0, type="x", id=1, sender=name, incarnation=incarnation)
    return Request("weights", identity, header, body, role)


def test_nobody_speaks_for_a_receiver() -> None:
    bindings = Bindings()
    assert bindings.check(request("g", SUBSCRIBE)) is None
    for outsider in (
        request("g", READY, identity=b"other"),
        request("g", SUBSCRIBE, identity=b"other"),
        request("g", READY, role="scorer"),
        request("g", SUBSCRIBE, incarnation="2", role="scorer"),
        request("g", READY, identity=b"other", incarnation="2"),
    ):
        nack = bindings.check(outsider)
        assert nack is not None and nack.code == "not_allowed", outsider
    assert bindings.check(request("g", READY)) is None
    again = request("g", SUBSCRIBE, identity=b"new", incarnation="2")
    assert bindings.check(again) is None, "it was started again"
    assert bindings.check(request("g", READY)) is not None, "the one before is superseded"


def test_names_are_bounded() -> None:
    bindings = Bindings()
    for number in range(MOST_NAMES):
        assert bindings.check(request(f"g{number}", SUBSCRIBE)) is None
    assert bindings.check(request("g0", READY)) is None
    assert bindings.check(request("new", SUBSCRIBE)) is None
    outsider = b"other"
    for name, forgotten in (("g1", True), ("g0", False), ("g2", False), ("new", False)):
        nack = bindings.check(request(name, READY, identity=outsider))
        assert (nack is None) is forgotten, f"{name}: who has not spoken for longest is forgotten"
    assert len(bindings.owners) == MOST_NAMES


def test_the_store_holds_nothing_that_opens_a_connection() -> None:
    """Of identities it has digests."""
    run = broker_world.World(durable=True)
    run.join("generator", "a")
    record = run.broker.members.record("a")
    assert record is not None and b"a" not in record.values() and "identity" not in record
    run.broker.members.restore([record], 0.0)
    beat = Heartbeat(state="ready", activity="x", progress=1, idle_s=0.0)
    header = Header(major=1, minor=0, type="x", id=1, sender="a", incarnation="a-1")
    for identity in (record["seal"], b"b"):  # none is empty
        with pytest.raises(NackError, match="joined over another connection"):
            run.broker.members.hear(Request("any", identity, header, beat), 0.0)
    assert run.broker.members.hear(Request("any", b"a", header, beat), 0.0).identity == b"a"
