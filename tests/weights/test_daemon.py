"""Daemons by the orders and answers of their upstream, in one process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from fakes.hub_bench import WAIT_S, Bench, SmallFrames
from fakes.slowness import until
from fakes.trainer_hosts import layout

from umbra.proto import messages as m
from umbra.proto.errors import DeadlineError, RejectedError, UsageError
from umbra.proto.records import BucketsAt
from umbra.services.weight_hub import daemon
from umbra.services.weight_hub.command import _identify
from umbra.services.weight_hub.daemon import PartHub, UpstreamEnd
from umbra.services.weights.arena import Arena
from umbra.services.weights.manifest import checksums, owned_buckets, owned_ranges
from umbra.services.weights.planes.bucket_fetch import TcpReceiver
from umbra.services.weights.planes.bucket_server import BucketStore
from umbra.services.weights.planes.bucket_wire import grant
from umbra.services.weights.planes.plane import Receipt, Receiving

MANIFEST = layout(2)
SIZE = MANIFEST.total_bytes


class World:
    """A part hub of trainer host 1 that runs in a thread."""

    def __init__(self, run_id: str) -> None:
        self.path = f"/dev/shm/umbra-{run_id}-part"
        self.hub = Mock(peer="weight hub", pushes=queue.SimpleQueue[m.Message]())
        self.stopping = threading.Event()
        self.progress: list[tuple[str, int]] = []
        self.ordered = 0
        config = Bench.config(delta="off")
        self.part = PartHub("part-1", 1, "tcp://127.0.0.1:1", config, "elsewhere")
        self.part._hub = self.hub

    @contextmanager
    def running(self) -> Iterator[World]:
        session = Mock(progress=lambda *said: self.progress.append(said))
        with closing(self.part), ThreadPoolExecutor(1) as thread:
            running = thread.submit(self.part.run, self.stopping, WAIT_S, session)
            try:
                yield self
            finally:
                self.stopping.set()
                running.result(WAIT_S)

    @property
    def states(self) -> list[m.PartState]:
        """The states that the hub above was told."""
        return [call.args[0] for call in self.hub.call.call_args_list]

    @property
    def store(self) -> BucketStore:
        assert self.part._tcp.server.store is not None
        return self.part._tcp.server.store

    def hold(self, path: str | None = None) -> m.PartState:
        """Order an arena, an empty path for none; return the state that answers."""
        path = self.path if path is None else path
        self.order(m.HoldArena(manifest=MANIFEST, path=path, slots=2))
        before = len(self.states)

        def answer() -> m.PartState | None:
            return next((state for state in self.states[before:] if state.path == path), None)

        return until(answer, "no answer")

    def offer(self, slot: int, sums: list[int], path: str | None = None) -> None:
        self.order(m.OfferSlot(path=path or self.path, slot=slot, checksums=sums, deltas=False))

    def order(self, message: m.Message) -> None:
        """Send an order; returns when it was handled."""
        self.ordered += 1
        self.hub.pushes.put(message)
        until(lambda: sum(count for _, count in self.progress) >= self.ordered, "not handled")

    def fetch(self, sums: list[int]) -> bytes:
        """Fetch the buckets of this host from the part hub, as a receiver does."""
        data = memoryview(bytearray(SIZE))
        pull = TcpReceiver(MANIFEST, [data], SmallFrames())
        buckets = self.part.buckets
        at = BucketsAt(endpoint=buckets.endpoint, key=grant(buckets.key))
        prepare = m.Prepare(epoch=1, version=1, slot=0, checksums=sums, sources=[at, at])
        with closing(pull), closing(pull.receive(prepare)) as steps:
            mine, came = set(owned_buckets(MANIFEST)[1]), set[int]()
            while not mine <= came:
                bucket = next(steps)
                came |= set() if bucket is None else {bucket}
            assert came == mine, "the rest is another host's"
        return bytes(data)


@pytest.fixture
def world(run_id: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(daemon, "STATE_S", 0.02)
    with World(run_id).running() as world:
        yield world
    assert not Path(world.path).exists()


def test_a_part_hub_holds_its_own_rows_and_hands_out_what_it_is_told(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    state = world.hold()
    assert (state.owner, state.host, state.error) == (1, "elsewhere", "")
    assert state.buckets == world.part.buckets
    own = sum(end - start for start, end in owned_ranges(MANIFEST, 1))
    assert own <= Path(world.path).stat().st_blocks * 512 // 2 < SIZE
    with closing(Arena.attach(world.path, slot_bytes=SIZE)) as arena:
        slot = arena.slot(1)
        for start, end in owned_ranges(MANIFEST, 1):
            slot[start:end] = bytes([7]) * (end - start)
        sums = checksums(MANIFEST, memoryview(bytearray([7]) * SIZE))
        for index, given, path in (
            (2, sums, ""),
            (-1, sums, ""),
            (1, sums[1:], ""),
            (1, sums, "x"),
        ):
            world.offer(index, given, path)
            assert world.store._last is None
        assert "offers slot 2 of 2" in caplog.text and "offers slot -1 of 2" in caplog.text
        assert f"{len(sums) - 1} checksums for {len(sums)} buckets" in caplog.text
        world.offer(1, sums)
        data = world.fetch(sums)
        assert all(data[start:end] == slot[start:end] for start, end in owned_ranges(MANIFEST, 1))
        world.offer(1, [])
        assert world.store._last is None, "it is about to be written"
        slot.release()
    world.order(m.Ok())  # nothing that it knows
    assert world.hold("") and not Path(world.path).exists()
    assert all((word == "handing out") == (count > 0) for word, count in world.progress)


def test_a_part_hub_says_why_it_cannot_hold_an_arena(world: World, run_id: str) -> None:
    other = Arena.create(run_id, "part", slot_bytes=SIZE, slots=2)
    assert "File exists" in world.hold().error
    other.close()  # as if its part hub had been killed
    assert not world.hold().error
    inode = Path(world.path).stat().st_ino
    world.hold()
    assert Path(world.path).stat().st_ino == inode, "it holds that one already"


def test_an_arena_in_the_making_is_not_held(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    make, create = threading.Event(), Arena.create

    def slow(*args: Any, **options: Any) -> Arena:
        assert make.wait(WAIT_S)
        return create(*args, **options)

    monkeypatch.setattr(Arena, "create", slow)
    world.order(m.HoldArena(manifest=MANIFEST, path=world.path, slots=2))
    before = len(world.states)
    until(lambda: len(world.states) > before + 2, "it says nothing")
    assert not any(state.path for state in world.states)
    make.set()
    until(lambda: world.states[-1].path == world.path, "it was not made")


def test_a_hub_that_is_away_for_longer_than_its_patience_ends_the_part_hub(run_id: str) -> None:
    world = World(run_id)
    with closing(world.part):
        world.hub.call.side_effect = DeadlineError("silent")
        with pytest.raises(DeadlineError, match="no answer from the weight hub"):
            world.part.run(world.stopping, 0.0)


# -- a daemon with an upstream --------------------------------------------------------------------


def own_hub(*answers: m.Message) -> Mock:
    """Return the daemon's own hub, which answers so and then no more, and fills its arena."""
    futures = [Future[m.Message]() for _ in range(len(answers) + 1)]
    for future, answer in zip(futures, answers, strict=False):
        future.set_result(answer)

    def receive(_message: m.Prepare, slot: int) -> Receiving:
        yield None
        yield 4
        return Receipt(wire_s=3.0, stage_s=2.0, wire_bytes=9, data=own.slot(slot))

    own = Mock(receive=receive, slot=lambda index: memoryview(bytes([index])))
    own.ask.side_effect = futures
    return own


PREPARE = m.Prepare(epoch=1, version=8, slot=0, checksums=[5, 6])


def received(end: UpstreamEnd) -> tuple[list[int | None], Receipt]:
    steps, seen = end.receive(PREPARE), list[int | None]()
    while True:
        try:
            seen.append(next(steps))
        except StopIteration as done:
            return seen, done.value


def test_a_version_is_handed_on_bucket_by_bucket_and_published_when_it_is_whole() -> None:
    refusal = m.Nack(code="leaving", reason="it ends")
    own = own_hub(m.SlotGranted(slot=1), refusal, m.Ok())
    end = UpstreamEnd(own, own, own, own, WAIT_S)
    with pytest.raises(RejectedError, match="version 8 is not the one"):
        end.publish(8)
    seen, receipt = received(end)
    own.ask.assert_called_once_with(m.AcquireSlot(version=8))
    (offered,) = own.offer.call_args.args
    assert (offered.slot, list(offered.contents)) == (1, [5, 6])
    assert offered.absent == {0, 1}, "nothing is there yet"
    assert seen == [None, 4]
    own.arrived.assert_called_once_with(1, 4)
    assert replace(receipt, stage_s=2.0) == Receipt(3.0, 2.0, 9, data=own.slot(1))
    assert 2.0 <= receipt.stage_s < 2.0 + WAIT_S, "the wait for a slot counts"
    with pytest.raises(RejectedError, match="version 7 is not the one"):
        end.publish(7)
    with pytest.raises(RejectedError, match="it ends") as caught:
        end.publish(8)
    assert caught.value.code == "leaving"
    end.publish(8)
    own.ask.assert_called_with(m.Publish(version=8, slot=1, checksums=[5, 6], snapshot_s=0.0))
    end.close()
    assert own.close.call_count == 2, "the end and the arena"


@pytest.mark.parametrize(
    ("answers", "error"),
    [([], "no slot was free within 0 s"), ([m.Nack(code="x", reason="superseded")], "superseded")],
)
def test_without_a_slot_a_version_is_not_received(answers: list[m.Message], error: str) -> None:
    own = own_hub(*answers)
    _, receipt = received(UpstreamEnd(own, own, own, own, 0.0))
    assert receipt == Receipt(error=error) and not own.offer.called


@pytest.mark.parametrize(
    ("upstream", "owner", "role", "named"),
    [
        ("", None, "weight_hub", "weight-hub"),
        ("tcp://hub:1", 2, "part", "part-2"),
        ("tcp://hub:1", None, "relay", "relay-"),
        ("", 1, "", ""),
        ("hub", None, "", ""),
    ],
)
def test_role_and_name_follow_from_the_options_if_these_make_sense(
    upstream: str, owner: int | None, role: str, named: str
) -> None:
    options = {"upstream": upstream, "owner": owner}
    if not role:
        with pytest.raises(UsageError, match="--upstream"):
            _identify(options)
        return
    found = _identify(options)
    assert found[0] == role and found[1].startswith(named)
