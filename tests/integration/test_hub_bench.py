"""A hub with publishers and receivers over real sockets and shared memory, and its plane tcp."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fakes.hub_bench import LAYOUT, WAIT_S, Bench, Relay, Weights, load, publish, push, take
from fakes.keys import of
from fakes.slowness import seconds, until

from umbra.proto import messages as m
from umbra.proto.errors import RejectedError
from umbra.services.weights.arena import Arena
from umbra.services.weights.manifest import build_manifest
from umbra.services.weights.planes import plane
from umbra.services.weights.planes.bucket_wire import Records
from umbra.services.weights.planes.receiving import StagedPlanes
from umbra.services.weights.receiver import Receiver


def test_a_receiver_may_be_there_first_and_sleeps_until_a_version_comes(bench: Bench) -> None:
    bench.start()
    news = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        subscribing = executor.submit(bench.receiver, "gen-0")
        publisher = bench.publisher()
        receiver = subscribing.result(WAIT_S)
    receiver.on_news = news.set
    publish(publisher, 0)
    assert news.wait(WAIT_S) and receiver.poll() is not None


def test_what_a_hub_cannot_take_is_refused_with_the_reason(bench: Bench) -> None:
    bench.start()
    wrong = m.RegisterManifest(manifest=msgspec.structs.replace(LAYOUT, digest="0" * 32))
    with pytest.raises(RejectedError, match="digest"):
        bench.channel("trainer").call(wrong, m.ArenaReady, timeout_s=WAIT_S)
    with pytest.raises(RejectedError, match="bytes free") as caught:
        bench.publisher(build_manifest([("w", "F32", [1 << 44])], 1 << 44))
    assert caught.value.code == "no_room"
    far = Receiver(bench.channel("far"), StagedPlanes(), host="elsewhere")
    with pytest.raises(RejectedError, match=r"shm: the hub's /dev/shm is not the receiver's"):
        far.subscribe(WAIT_S)
    publisher = bench.publisher()
    publisher.slot(0, WAIT_S)
    with pytest.raises(RejectedError, match=f"1 checksums for {len(LAYOUT.buckets)} buckets"):
        publisher.publish(0, 0.0, [1])
    publish(publisher, 0)
    load(bench.receiver("gen-0"), 0)
    bench.publisher(name="trainer-2")
    with pytest.raises(RejectedError, match="trainer-2 has registered since trainer did"):
        publisher.slot(1, WAIT_S)


def test_whoever_asks_a_daemon_that_ends_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even while its arena is made."""
    make, create = threading.Event(), Arena.create
    monkeypatch.setattr(Arena, "create", lambda *a, **b: make.wait(WAIT_S) and create(*a, **b))
    bench.start()
    making = bench.hub.ask(m.RegisterManifest(manifest=LAYOUT))
    until(lambda: bench.hub._registering, "no arena is made")
    bench._kills = True
    bench.stop()
    waiting = bench.hub.ask(m.AcquireSlot(version=0))
    assert not waiting.done() and not making.done()
    bench.hub.leave()
    for answer in (making, waiting, bench.hub.ask(m.AcquireSlot(version=0))):
        nack = answer.result(0)
        assert isinstance(nack, m.Nack) and nack.code == "leaving"
    make.set()
    bench.hub.close()


def test_while_an_arena_is_made_others_are_answered(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A trainer registers. 2. It restarts. 3. Others are answered. 4. The arena is there."""
    make, create, made = threading.Event(), Arena.create, list[str]()

    def slow(run_id: str, suffix: str, **sizes: Any) -> Arena:
        assert make.wait(WAIT_S)
        made.append(suffix)
        return create(run_id, suffix, **sizes)

    monkeypatch.setattr(Arena, "create", slow)
    bench.start()
    with ThreadPoolExecutor(2) as executor:
        first = executor.submit(bench.publisher)
        until(lambda: len(bench.hub._registering) == 1, "no trainer registers")
        second = executor.submit(bench.publisher, name="trainer-again")
        until(lambda: len(bench.hub._registering) == 2, "no other trainer registers")
        other = bench.channel("monitor")
        assert other.call(m.Ping(), m.Pong, timeout_s=WAIT_S).role == "weight_hub"
        status = other.call(m.HubStatusRequest(), m.HubStatus, timeout_s=WAIT_S)
        assert not status.subscribed
        make.set()
        first.result(WAIT_S)
        publisher = second.result(WAIT_S)
    assert len(made) == 1
    publish(publisher, 0)
    load(bench.receiver("gen-0"), 0)


def test_one_hub_and_one_trainer_come_after_another(bench: Bench) -> None:
    """1. A hub dies without a word; the next one has more slots. 2. It dies, and the trainer too.

    `test_weight_push_faults.py` has hubs that are killed in phases of a push.
    """
    bench.start(slots=2)
    publisher = bench.publisher()
    # It looks after its hub once a minute: it has to hear that there is another.
    receiver = bench.receiver("a", check_s=60.0)
    push(publisher, 0, receiver)
    path = bench.kill()
    bench.start(slots=3)
    bench.move()
    load(receiver, 0)
    assert not path.exists()
    push(publisher, 5, receiver)
    path = bench.kill()
    bench.start()
    again = bench.publisher()
    assert not path.exists(), "nobody has it any more"
    push(again, 0, bench.receiver("b"))


def wire_bytes(bench: Bench, name: str) -> list[int]:
    return [int(str(r["wire_bytes"])) for r in bench.rows() if r["receiver"] == name]


def test_small_changes_travel_as_deltas_and_large_ones_whole(bench: Bench) -> None:
    bench.start(plane="tcp", delta="always")
    weights = Weights(bench.publisher())
    receiver = bench.receiver("gen-0", ["tcp"])
    for share in (0.0, 0.01, 0.01, 1.0, 0.0, 0.001):
        weights.load(receiver, weights.publish(share))
    bench.finish()
    sizes = wire_bytes(bench, "gen-0")
    assert sizes[0] == LAYOUT.total_bytes
    assert max(sizes[1:3]) < LAYOUT.total_bytes / 10
    assert sizes[3] > LAYOUT.total_bytes / 10
    assert sizes[4] == 0


def test_versions_that_were_skipped_and_a_late_joiner(bench: Bench) -> None:
    """gen-0 goes from version 0 to 3 by three deltas in a chain; gen-1 gets all bytes of 3."""
    bench.start(plane="tcp", delta="always", slots=3)
    weights = Weights(bench.publisher())
    receiver = bench.receiver("gen-0", ["tcp"])
    watcher = bench.receiver("gen-2", ["tcp"])
    weights.load(watcher, weights.publish(0.0))
    loading = take(receiver)
    for _ in range(3):
        weights.load(watcher, weights.publish(0.01))
    receiver.committed(loading, 0.0)
    weights.load(receiver, 3)
    weights.load(bench.receiver("gen-1", ["tcp"]), 3)
    bench.finish()
    assert wire_bytes(bench, "gen-0")[-1] < LAYOUT.total_bytes / 5
    assert wire_bytes(bench, "gen-1") == [LAYOUT.total_bytes]


def test_weights_are_sealed_on_their_way_through_a_relay(
    bench: Bench, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hub, relay and a generator that fetches from it, whole and by deltas."""
    found, admit = set[bool](), Records.admit

    def noted(records: Records, secret: bytes, *, sealed: bool) -> None:
        found.add(sealed)
        admit(records, secret, sealed=sealed)

    monkeypatch.setattr(Records, "admit", noted)
    bench.security = of(keys, "weight_hub")
    bench.start(plane="tcp", delta="always")
    trainer = bench.channel("trainer", of(keys, "trainer"))
    weights = Weights(bench.publisher(channel=trainer))
    weights.publish()
    node = Relay(bench, "node-0", security=of(keys, "relay"))
    channel = bench.channel("gen", of(keys, "generator"))
    receiver = bench.receiver("gen", ["tcp"], "node-0", channel=channel)
    weights.load(receiver, 0)
    for _ in range(3):
        weights.load(receiver, weights.publish(0.01))
    assert found == {True}
    assert bench.hub.stats()["refused"] == 0
    node.stop()
    sizes = wire_bytes(bench, "node-0")
    assert sizes[0] == LAYOUT.total_bytes
    assert max(sizes[2:]) < LAYOUT.total_bytes / 5


def test_relays_hand_on_what_they_get(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three relays in a chain; each generator asks the hub, and is sent to the relay beside it.

    Then the first relay goes away: the others are relinked, its generator goes to the hub.
    """
    monkeypatch.setattr(plane, "Checksums", None)  # buckets are verified as they come, and once
    bench.start(plane="tcp", delta="always", deadline_s=seconds(5.0))
    weights = Weights(bench.publisher())
    weights.publish()
    nodes = [Relay(bench, f"node-{index}") for index in range(3)]
    receivers = [bench.receiver(f"gen-{i}", ["shm", "tcp"], f"node-{i}") for i in range(3)]
    for receiver in receivers:
        weights.load(receiver, 0)
    for _ in range(3):
        version = weights.publish(0.01)
        for receiver in receivers:
            weights.load(receiver, version)
    assert list(bench.hub.planes.open_tcp().chain) == ["node-0", "node-1", "node-2"]
    nodes[0].stop()
    for _ in range(3):
        version = weights.publish(0.01)
        for receiver in receivers:
            weights.load(receiver, version)
    assert sorted(bench.hub.planes.open_tcp().chain) == ["node-1", "node-2"]
    assert set(bench.hub.protocol.serving) == {"node-1", "node-2", "gen-0"}
