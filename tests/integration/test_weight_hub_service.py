"""Hub, publisher and receivers over real sockets and shared memory; also one hub after another."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from fakes.hub_bench import LAYOUT, WAIT_S, Bench, load, publish, push
from fakes.slowness import until

from umbra.proto import messages as m
from umbra.proto.errors import RejectedError
from umbra.services.weights.arena import Arena
from umbra.services.weights.manifest import build_manifest
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


def test_whoever_asks_a_daemon_that_ends_is_refused(bench: Bench) -> None:
    bench.start()
    bench.stop()
    waiting = bench.hub.ask(m.AcquireSlot(version=0))
    assert not waiting.done()
    bench.hub.leave()
    for answer in (waiting, bench.hub.ask(m.AcquireSlot(version=0))):
        nack = answer.result(0)
        assert isinstance(nack, m.Nack) and nack.code == "leaving"


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
