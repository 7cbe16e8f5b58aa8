"""Versions that lie on several trainer hosts: whole at every receiver, or not there.

The other hosts are mount namespaces with a /dev/shm of their own, in which real part hubs run. They
are stopped, or killed in each phase of a push and started again; for those that are cut off, see
`programs/cut_push.py`.
"""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from fakes.hub_bench import OTHER_LAYOUT, WAIT_S, Bench, Relay, content, load, publish, take, whole
from fakes.keys import of
from fakes.slowness import until
from fakes.trainer_hosts import Trainer, TrainerHost, layout, skip_without_namespaces

from umbra.proto.errors import PeerLostError, RejectedError
from umbra.proto.net.keys import OPEN, Security
from umbra.services.weights.manifest import owned_ranges
from umbra.services.weights.planes import bucket_fetch
from umbra.services.weights.planes.bucket_fetch import Assembly, BucketSource, fetch_together
from umbra.services.weights.receiver import Receiver

skip_without_namespaces()

Start = Callable[..., Trainer]


@pytest.fixture
def start(bench: Bench, tmp_path: Path) -> Start:
    return lambda hosts=2, **keys: Trainer(bench, tmp_path, hosts, **keys)


def receiver(bench: Bench, name: str, host: str = "", security: Security = OPEN) -> Receiver:
    return bench.receiver(name, ["shm", "tcp"], host, channel=bench.channel(name, security))


Served = tuple[Trainer, Receiver, TrainerHost]


@pytest.fixture
def served(start: Start) -> Served:
    """A trainer of two hosts, a receiver that has version 0, and the other host."""
    trainer = start()
    one = receiver(trainer.bench, "gen-0")
    trainer.publish(0)
    load(one, 0, trainer.versions)
    (host,) = trainer.hosts
    return trainer, one, host


def test_every_bit_of_every_host_arrives_as_deltas_too(start: Start) -> None:
    trainer = start(3)
    receivers = [receiver(trainer.bench, name) for name in ("gen-0", "gen-1")]
    for version in range(3):
        trainer.publish(version)
        for one in receivers:
            load(one, version, trainer.versions)
    late = receiver(trainer.bench, "late")
    load(late, 2, trainer.versions)
    total = trainer.manifest.total_bytes
    for host in trainer.hosts:
        own = sum(end - start for start, end in owned_ranges(trainer.manifest, host.owner))
        assert own < host.memory() / 2 < total / 2, "memory of two slots is for its own alone"
    assert Path(trainer.path).stat().st_blocks * 512 < total, (
        "nor has the hub read what others have"
    )
    trainer.bench.finish()
    rows = [row for row in trainer.bench.rows() if row["receiver"] == "gen-0"]
    assert [row["plane"] for row in rows] == ["tcp"] * 3
    sizes = [int(str(row["wire_bytes"])) for row in rows]
    assert sizes[0] == total
    assert 0 < max(sizes[1:]) < total / 4


def relay_of(bench: Bench, name: str) -> Relay:
    return Relay(bench, name, plane="tcp", delta="always")


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """How many bytes were fetched in this process from a source, by its endpoint."""
    made: list[tuple[str, Assembly]] = []

    def noted(fetches: Sequence[tuple[BucketSource, Assembly]]) -> Iterator[int | None]:
        made.extend((source.at.endpoint, assembly) for source, assembly in fetches)
        return fetch_together(fetches)

    monkeypatch.setattr(bucket_fetch, "fetch_together", noted)
    return lambda endpoint: sum(one.wire_bytes for source, one in made if source == endpoint)


def test_each_host_sends_its_bytes_once_for_a_chain_of_relays(
    start: Start, fetched: Callable[[str], int]
) -> None:
    """The first relay fetches from all hosts, and has versions whole; the next one from it."""
    trainer = start(3)
    bench = trainer.bench
    chain = [relay_of(bench, name) for name in ("relay-1", "relay-2", "relay-3")]
    near = [receiver(bench, f"gen-{name}", name) for name in ("relay-1", "relay-2", "relay-3")]
    trainer.publish(0)
    for one in near:
        load(one, 0, trainer.versions)
    total = trainer.manifest.total_bytes
    hosts = {0: bench.hub.planes.open_tcp().buckets, **bench.hub._parts.buckets}
    assert len(hosts) == 3
    for owner, at in hosts.items():
        own = sum(end - start for start, end in owned_ranges(trainer.manifest, owner))
        assert fetched(at.endpoint) == own > 0
    assert [fetched(one.buckets) for one in chain] == [total, total, 0]
    trainer.publish(1)
    for one in near:
        load(one, 1, trainer.versions)
    for relay in chain:
        assert '"plane":"shm"' in relay.metrics_path.read_text()
    # Those near a relay may have a version before it has told the hub that it has.
    serving = bench.hub.protocol
    names = ("relay-1", "relay-2", "relay-3")
    until(lambda: [serving.serving.get(name) for name in names] == [1] * 3, "relays are behind")
    bench.finish()
    rows = bench.rows()
    wire = {(row["receiver"], row["version"]): int(str(row["wire_bytes"])) for row in rows}
    assert [wire[name, 0] for name in names] == [total] * 3
    deltas = [wire[name, 1] for name in names]
    assert 0 < deltas[0] < total / 4
    assert deltas == [deltas[0]] * 3, "they are handed on as they come"


def test_who_loses_the_relay_before_it_fetches_from_all_hosts(
    start: Start, fetched: Callable[[str], int]
) -> None:
    """1. The first relay has half of a version, which the second has from it. 2. The first ends."""
    trainer = start()
    bench = trainer.bench
    first, second = relay_of(bench, "relay-1"), relay_of(bench, "relay-2")
    near = receiver(bench, "gen-relay-2", "relay-2")
    trainer.publish(0)
    load(near, 0, trainer.versions)
    (host,) = trainer.hosts
    sums, before = trainer.write(1), fetched(first.buckets)
    host.signal_part(signal.SIGSTOP)
    trainer.publisher.publish(1, 0.0, sums)
    until(lambda: fetched(first.buckets) > before, "the second relay got nothing")
    first.stop()
    assert near.poll() is None
    host.signal_part(signal.SIGCONT)
    load(near, 1, trainer.versions)
    trainer.publish(2)
    load(near, 2, trainer.versions)
    assert fetched(second.buckets) == 0


def test_nothing_is_published_while_a_part_hub_is_away(served: Served) -> None:
    trainer, one, host = served
    sums = trainer.write(1)
    host.signal_part(signal.SIGSTOP)
    assert "trainer host 1 has no part hub" in trainer.until_held_back()
    assert trainer.bench.hub.stats()["held_back"] == 1
    publishing = threading.Thread(target=trainer.publisher.publish, args=(1, 0.0, sums))
    publishing.start()
    until(lambda: trainer.bench.hub.protocol.counters["published"] == 1, "it was published")
    host.signal_part(signal.SIGCONT)  # goes on with what it has of both versions
    load(one, 1, trainer.versions)
    publishing.join(WAIT_S)
    assert not publishing.is_alive()


def test_another_layout_takes_the_place_of_the_one_before(served: Served) -> None:
    """A trainer that starts again on fewer hosts; the part hub holds nothing any more."""
    trainer, one, host = served
    assert host.memory()
    alone = trainer.bench.publisher(OTHER_LAYOUT, "alone")
    publish(alone, 1)
    staged = take(one)
    assert whole(staged) == content(1, OTHER_LAYOUT.total_bytes)
    until(lambda: not host.memory(), "the part hub holds its arena still")


def test_a_plane_that_takes_weights_from_one_host_is_refused(bench: Bench) -> None:
    bench.start(plane="shm")
    with pytest.raises(RejectedError, match=r'plane = "shm".*trainer\.nodes > 1'):
        bench.publisher(layout(2))


def test_with_keys_all_hosts_serve_what_is_sealed(start: Start, bench: Bench, keys: Path) -> None:
    bench.security = of(keys, "weight_hub")
    trainer = start(keys=keys)
    one = receiver(bench, "gen-0", security=of(keys, "generator"))
    for version in range(2):
        trainer.publish(version)
        load(one, version, trainer.versions)


@pytest.mark.parametrize("phase", ["idle", "published", "part hub and hub"])
def test_a_host_that_lost_its_memory_takes_the_version_with_it(served: Served, phase: str) -> None:
    """The part hub dies, at rest or while receivers fetch, or the hub with it."""
    trainer, one, host = served
    bench = trainer.bench
    if phase == "published":
        sums = trainer.write(1)
        host.signal_part(signal.SIGSTOP)
        trainer.publisher.publish(1, 0.0, sums)
    host.signal_part(signal.SIGKILL)
    if phase == "part hub and hub":
        bench.kill()
        bench.start(**trainer.options)
        for link in bench.channels:
            link.move(bench.endpoint)
    host.start_part()

    def told() -> bool:
        try:
            trainer.publisher.check()
        except PeerLostError as error:
            return "start again from its newest checkpoint" in str(error)
        return False

    until(told, "the trainer was not told")
    with pytest.raises(PeerLostError):
        trainer.publisher.slot(1, WAIT_S)
    assert one.poll() is None, "a part of a version is none"
    trainer.publisher.close()
    trainer.publisher = bench.publisher(trainer.manifest, "trainer-again")
    trainer.publish(0)
    load(one, 0, trainer.versions)
