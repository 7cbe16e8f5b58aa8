"""Hub, publisher and receivers over real sockets and real shared memory."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fakes.hub_bench import (
    LAYOUT,
    OTHER_LAYOUT,
    PROGRAMS,
    WAIT_S,
    Bench,
    content,
    load,
    publish,
    take,
    whole,
)
from fakes.slowness import seconds
from fakes.waiting import until

from umbra.proto import messages as m
from umbra.proto.errors import DeadlineError, RejectedError, UsageError
from umbra.proto.records import Manifest
from umbra.services.weights.arena import SHM, Arena
from umbra.services.weights.manifest import build_manifest
from umbra.services.weights.planes.plane import PLANES, Side, check_plane, choose_plane
from umbra.services.weights.planes.receiving import StagedPlanes
from umbra.services.weights.publisher import Publisher
from umbra.services.weights.receiver import Receiver


def test_every_receiver_gets_every_byte(bench: Bench) -> None:
    bench.start()
    publisher = bench.publisher()
    receivers = [bench.receiver(name) for name in ("gen-0", "gen-1")]
    for version in range(4):
        publish(publisher, version)
        for receiver in receivers:
            load(receiver, version)
    status = bench.channel("probe").call(m.HubStatusRequest(), m.HubStatus, timeout_s=WAIT_S)
    assert status.version == 3
    assert set(status.receivers) == {"gen-0", "gen-1"}
    assert not status.subscribed
    bench.finish()
    rows = bench.rows()
    assert {(row["version"], row["receiver"]) for row in rows} == {
        (version, name) for version in range(4) for name in ("gen-0", "gen-1")
    }
    assert all(row["bytes"] == LAYOUT.total_bytes and row["snapshot_s"] == 0.25 for row in rows)
    assert all(row["commit_s"] == 0.125 and row["plane"] == "shm" for row in rows)


def test_receivers_may_subscribe_before_there_is_a_trainer(bench: Bench) -> None:
    bench.start()
    receivers: list[Receiver] = []
    thread = threading.Thread(target=lambda: receivers.append(bench.receiver("gen-0")))
    thread.start()
    publisher = bench.publisher()
    thread.join(WAIT_S)
    publish(publisher, 0)
    load(receivers[0], 0)


def test_a_late_joiner_gets_the_newest_version(bench: Bench) -> None:
    bench.start()
    publisher = bench.publisher()
    for version in range(3):
        publish(publisher, version)
    receiver = bench.receiver("gen-0")
    staged = take(receiver)
    assert staged.version == 2
    assert whole(staged) == content(2)


def test_memory_that_is_being_loaded_is_left_alone(bench: Bench) -> None:
    """A receiver's own, that is; `test_verify.py` has loads from the arena."""
    # The hub drops who takes long to load, and pushes the next.
    bench.start(plane="tcp", deadline_s=seconds(0.2))
    publisher = bench.publisher()
    receiver = bench.receiver("gen-0", planes=["tcp"])
    publish(publisher, 0)
    loading = take(receiver)
    for version in range(1, 6):
        publish(publisher, version)
        assert receiver.poll() is None
        assert whole(loading) == content(0)
    receiver.committed(loading, 0.0)
    load(receiver, 5)


def test_corrupted_bytes_are_never_loaded(bench: Bench, run_id: str) -> None:
    bench.start()
    publisher = bench.publisher()
    publish(publisher, 0)
    (path,) = SHM.glob(f"umbra-{run_id}-*")
    with path.open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff\xff\xff\xff\xff")
    receiver = bench.receiver("gen-0")
    until(lambda: bench.hub.protocol.counters["failed"] >= 2, "it is tried again")
    with pytest.raises(DeadlineError, match="no weights from the weight hub"):
        receiver.wait_first(0.3, threading.Event())
    publish(publisher, 1)
    load(receiver, 1)


def test_a_dropped_receiver_comes_back(bench: Bench) -> None:
    bench.start(deadline_s=seconds(0.2))
    publisher = bench.publisher()
    receiver = bench.receiver("gen-0")
    publish(publisher, 0)
    staged = take(receiver)
    dropped = threading.Event()
    while not bench.hub.protocol.counters["dropped"]:
        dropped.wait(0.01)
    receiver.committed(staged, 1.0)
    publish(publisher, 1)
    load(receiver, 1)


def test_one_that_was_lost_without_a_word_comes_back(bench: Bench) -> None:
    bench.start()
    publisher = bench.publisher()
    receiver = bench.receiver("gen-0")
    publish(publisher, 0)
    load(receiver, 0)
    bench.start()
    publish(publisher, 1)
    load(receiver, 1)


def test_another_layout_reaches_those_who_had_the_old(bench: Bench, run_id: str) -> None:
    bench.start()
    publisher = bench.publisher()
    receiver = bench.receiver("gen-0")
    publish(publisher, 0)
    loading = take(receiver)
    publisher.close()
    publish(bench.publisher(OTHER_LAYOUT, "trainer-2"), 7)
    receiver.committed(loading, 0.0)
    assert whole(loading) == content(0)
    staged = take(receiver)
    assert staged.manifest == OTHER_LAYOUT
    assert staged.version == 7
    assert whole(staged) == content(7, OTHER_LAYOUT.total_bytes)
    assert len(list(SHM.glob(f"umbra-{run_id}-*"))) == 1
    with pytest.raises(RejectedError) as caught:
        publisher._channel.call(
            m.Prepare(epoch=1, version=1, slot=0, checksums=[]), m.Ok, timeout_s=WAIT_S
        )
    assert caught.value.code == "wrong_socket"


def test_a_slot_is_waited_for_until_the_deadline(bench: Bench) -> None:
    bench.start()
    publisher = bench.publisher()
    command = [sys.executable, str(PROGRAMS / "stuck_receiver.py"), bench.endpoint, "gen-stuck"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stuck:
        assert stuck.stdout is not None
        assert stuck.stdout.readline() == "subscribed\n"
        publish(publisher, 0)
        assert stuck.stdout.readline() == "staging\n"
        publish(publisher, 1)
        with pytest.raises(DeadlineError, match="no free slot for version 2"):
            publisher.slot(2, 0.2)
        stuck.kill()


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


def test_a_closed_hub_is_named(bench: Bench) -> None:
    bench.start()
    publisher = bench.publisher()
    publish(publisher, 0)
    bench.stop()
    receiver = Receiver(bench.channel("gen-0"), StagedPlanes())
    with pytest.raises(DeadlineError, match="no answer from weight hub at tcp://"):
        receiver.subscribe(0.2)


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
    """1. A trainer registers. 2. It starts anew. 3. Others are answered. 4. The arena is there."""
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
        assert other.call(m.HubStatusRequest(), m.HubStatus, timeout_s=WAIT_S).version == -1
        make.set()
        first.result(WAIT_S)
        publisher = second.result(WAIT_S)
    assert len(made) == 1
    publish(publisher, 0)
    load(bench.receiver("gen-0"), 0)
