"""Hub, publisher and receivers over real sockets and real shared memory."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fakes.hub_bench import LAYOUT, WAIT_S, Bench, load, publish, push, take

from umbra.proto import messages as m
from umbra.proto.errors import DeadlineError, RejectedError, UsageError
from umbra.proto.records import Manifest
from umbra.services.weights.arena import Arena
from umbra.services.weights.manifest import build_manifest
from umbra.services.weights.planes.plane import PLANES, Side, check_plane, choose_plane
from umbra.services.weights.planes.receiving import StagedPlanes
from umbra.services.weights.publisher import Publisher
from umbra.services.weights.receiver import Receiver


def test_receivers_may_subscribe_before_there_is_a_trainer(bench: Bench) -> None:
    bench.start()
    receivers: list[Receiver] = []
    thread = threading.Thread(target=lambda: receivers.append(bench.receiver("gen-0")))
    thread.start()
    publisher = bench.publisher()
    thread.join(WAIT_S)
    push(publisher, 0, receivers[0])


def test_who_stops_does_not_wait_for_a_hub_that_has_ended(bench: Bench) -> None:
    bench.start()
    stopping = threading.Event()
    publisher = Publisher(bench.channel("trainer"), LAYOUT, stopping)
    publisher.register(WAIT_S)
    publish(publisher, 0)
    publisher.slot(1, WAIT_S)
    bench.stop()
    publisher.publish_soon(1, 0.0, [0] * len(LAYOUT.buckets))
    stopping.set()
    for _ in range(2):  # the publication first, then the slot
        with pytest.raises(DeadlineError, match="stopped while waiting"):
            publisher.slot(2, WAIT_S)
    publisher.close()


def test_a_manifest_with_another_digest_is_refused(bench: Bench) -> None:
    bench.start()
    wrong = Manifest(
        tensors=LAYOUT.tensors,
        buckets=LAYOUT.buckets,
        total_bytes=LAYOUT.total_bytes,
        digest="0" * 32,
    )
    with pytest.raises(RejectedError, match="digest"):
        bench.channel("trainer").call(
            m.RegisterManifest(manifest=wrong), m.ArenaReady, timeout_s=WAIT_S
        )


def test_too_little_shared_memory_is_the_trainers_error(bench: Bench) -> None:
    bench.start()
    huge = build_manifest([("w", "F32", [1 << 44])], 1 << 44)
    with pytest.raises(RejectedError, match="bytes free") as caught:
        bench.publisher(huge)
    assert caught.value.code == "no_room"


def test_a_receiver_elsewhere_is_told_why_there_is_no_way(bench: Bench) -> None:
    bench.start()
    receiver = Receiver(bench.channel("gen-0"), StagedPlanes(), host="elsewhere")
    with pytest.raises(RejectedError, match=r"shm: the hub's /dev/shm is not the receiver's"):
        receiver.subscribe(WAIT_S)


def test_planes_are_chosen_and_refused_with_reasons() -> None:
    here, there = Side("h"), Side("other")
    assert choose_plane("auto", here, here, ["tcp", "shm"]) == "shm"
    assert choose_plane("auto", here, there, ["shm", "tcp"]) == "tcp"
    with pytest.raises(RejectedError, match="shm: the hub's /dev/shm is not the receiver's"):
        choose_plane("auto", here, there, ["shm"])
    with pytest.raises(RejectedError, match="plane shm is set"):
        choose_plane("shm", here, here, ["tcp"])
    check_plane("auto")
    check_plane("shm")
    check_plane("tcp")
    for name in set(PLANES) - {"shm", "tcp"}:
        with pytest.raises(UsageError, match=f'weight_hub.plane = "{name}" cannot be used'):
            check_plane(name)


def test_a_version_without_a_checksum_for_each_bucket_is_refused(bench: Bench) -> None:
    bench.start()
    publisher = bench.publisher()
    publisher.slot(0, WAIT_S)
    with pytest.raises(RejectedError, match=f"1 checksums for {len(LAYOUT.buckets)} buckets"):
        publisher.publish(0, 0.0, [1])
    publish(publisher, 0)
    load(bench.receiver("gen-0"), 0)


def test_whoever_asks_a_daemon_that_ends_is_refused(bench: Bench) -> None:
    bench.start()
    bench.stop()
    waiting = bench.hub.ask(m.AcquireSlot(version=0))
    assert not waiting.done()
    bench.hub.leave()
    for answer in (waiting, bench.hub.ask(m.AcquireSlot(version=0))):
        nack = answer.result(0)
        assert isinstance(nack, m.Nack) and nack.code == "leaving"


def test_a_closed_hub_is_named(bench: Bench) -> None:
    bench.start()
    publisher = bench.publisher()
    publish(publisher, 0)
    bench.stop()
    receiver = Receiver(bench.channel("gen-0"), StagedPlanes())
    with pytest.raises(DeadlineError, match="no answer from weight hub at tcp://"):
        receiver.subscribe(0.2)


def test_a_version_that_can_be_loaded_is_news(bench: Bench) -> None:
    """An idle generator sleeps until then."""
    bench.start()
    publisher, news = bench.publisher(), threading.Event()
    receiver = bench.receiver("gen-0")
    receiver.on_news = news.set
    publish(publisher, 0)
    assert news.wait(WAIT_S) and receiver.poll() is not None


def test_a_trainer_that_serves_what_the_engine_does_not_compute_in_is_refused(
    bench: Bench,
) -> None:
    bench.start()
    publisher = bench.publisher()
    with pytest.raises(UsageError, match=r"does not serve float16.*set weight_hub\.dtype"):
        bench.receiver("gen-0", dtype="float16")
    publish(publisher, 0)
    assert take(bench.receiver("gen-1", dtype="bfloat16")).version == 0


def test_while_an_arena_is_made_others_are_answered(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A trainer registers. 2. It restarts. 3. Others are answered. 4. The arena is there."""
    make, create, made = threading.Event(), Arena.create, list[str]()

    def slow(run_id: str, suffix: str, **sizes: Any) -> Arena:
        assert make.wait(WAIT_S)
        made.append(suffix)
        return create(run_id, suffix, **sizes)

    def registering(count: int) -> None:
        look = threading.Event()
        while len(bench.hub._registering) < count:
            look.wait(0.01)

    monkeypatch.setattr(Arena, "create", slow)
    bench.start()
    with ThreadPoolExecutor(2) as executor:
        first = executor.submit(bench.publisher)
        registering(1)
        second = executor.submit(bench.publisher, name="trainer-again")
        registering(2)
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
