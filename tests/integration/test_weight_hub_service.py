"""Hub, publisher and receivers over real sockets and shared memory; also one hub after another."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from fakes.hub_bench import (
    LAYOUT,
    WAIT_S,
    Bench,
    content,
    load,
    publish,
    publish_slot,
    push,
    take,
    whole,
)

from umbra.proto import messages as m
from umbra.proto.errors import DeadlineError, RejectedError, UsageError
from umbra.services.weights.arena import Arena
from umbra.services.weights.manifest import build_manifest
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
    stopping.set()
    with pytest.raises(DeadlineError, match="stopped while waiting"):
        publisher.publish(1, 0.0, [0] * len(LAYOUT.buckets))
    with pytest.raises(DeadlineError, match="stopped while waiting"):
        publisher.slot(2, WAIT_S)
    publisher.close()


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


# -- a hub dies without a word, and another takes its place ---------------------------------------


def receiver_of(bench: Bench) -> Receiver:
    """One that looks after its hub once a minute: it has to hear that there is another."""
    return bench.receiver("a", check_s=60.0)


def replace(bench: Bench, slots: int = 2) -> None:
    bench.start(slots=slots)
    for channel in bench.channels:
        channel.move(bench.endpoint)


@pytest.mark.parametrize("slots", [2, 3])
def test_the_trainer_copies_what_it_has_into_the_new_arena(bench: Bench, slots: int) -> None:
    bench.start(slots=2)
    publisher, receiver = bench.publisher(), receiver_of(bench)
    push(publisher, 0, receiver)
    path = bench.kill()
    replace(bench, slots)
    load(receiver, 0)
    assert not path.exists()
    push(publisher, 1, receiver)


def test_what_is_being_written_is_published_to_the_new_hub(bench: Bench) -> None:
    bench.start()
    publisher, receiver = bench.publisher(), receiver_of(bench)
    push(publisher, 0, receiver)
    slot = publisher.slot(1, WAIT_S)
    path = bench.kill()
    replace(bench)
    slot[:] = content(1)
    publish_slot(publisher, 1)
    load(receiver, 1)  # version 0 may come first: pushed before the trainer was done
    assert publisher._arena is not None and publisher._arena.path != path
    push(publisher, 2, receiver)


def test_a_trainer_that_comes_back_after_the_hub_starts_afresh(bench: Bench) -> None:
    bench.start()
    publish(bench.publisher(), 5)
    path = bench.kill()
    bench.start()
    again = bench.publisher()
    assert not path.exists(), "nobody has it any more"
    publish(again, 0)
    staged = take(receiver_of(bench))
    assert (staged.version, whole(staged)) == (0, content(0))
