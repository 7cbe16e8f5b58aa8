"""Weights over sockets: every bit arrives, as deltas where they pay, past whatever goes wrong."""

import socket
from pathlib import Path

import pytest
from fakes.hub_bench import LAYOUT, Bench, Weights, publish, take
from fakes.keys import of
from fakes.relays import Relay
from fakes.slowness import seconds, until

from umbra.services.weights.planes import bucket_server
from umbra.services.weights.planes.bucket_wire import Records


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


@pytest.fixture
def sealed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    found: list[bool] = []
    admit = Records.admit

    def noted(records: Records, secret: bytes, *, sealed: bool) -> None:
        found.append(sealed)
        admit(records, secret, sealed=sealed)

    monkeypatch.setattr(Records, "admit", noted)
    return found


def test_weights_are_sealed_on_their_way_through_a_relay(
    bench: Bench, keys: Path, sealed: list[bool]
) -> None:
    """Hub, relay and a generator that fetches from it, whole and by deltas."""
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
    assert set(sealed) == {True}
    assert bench.hub.stats()["refused"] == 0
    node.stop()
    sizes = wire_bytes(bench, "node-0")
    assert sizes[0] == LAYOUT.total_bytes
    assert max(sizes[2:]) < LAYOUT.total_bytes / 5


def test_a_port_that_is_closed_is_named(
    bench: Bench, keys: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        port = taken.getsockname()[1]
        monkeypatch.setattr(bucket_server, "reachable", lambda _endpoint: f"tcp://127.0.0.1:{port}")

        bench.security = of(keys, "weight_hub")
        bench.start(plane="tcp", delta="off")
        publisher = bench.publisher(channel=bench.channel("trainer", of(keys, "trainer")))
        channel = bench.channel("gen-0", of(keys, "generator"))
        bench.receiver("gen-0", ["tcp"], channel=channel)
        publish(publisher, 0)
        counters = bench.hub.protocol.counters
        until(lambda: counters["dropped"] > 0, "the push did not fail")
    said = f"127.0.0.1:{port} is gone, or cannot be reached"
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert any(said in text and "open that port" in text for text in told)


def test_relays_hand_on_what_they_get(bench: Bench) -> None:
    """Three relays in a chain; each generator asks the hub, and is sent to the relay beside it.

    Then the first relay goes away: the others are relinked, its generator goes to the hub.
    """
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
