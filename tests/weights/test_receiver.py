"""A receiver's decisions, message by message: no thread, no socket, no bytes."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from fakes.hub_bench import LAYOUT, OTHER_LAYOUT, WAIT_S

from umbra.proto import messages as m
from umbra.proto.errors import DeadlineError, PeerLostError, StartupError, UmbraError, UsageError
from umbra.proto.net.keys import OPEN
from umbra.services.weights.planes.plane import Receipt, Receiving
from umbra.services.weights.receiver import RELAY_SILENT_S, Receiver, StagedVersion

SUMS = [1] * len(LAYOUT.buckets)
DATA = memoryview(bytearray(LAYOUT.total_bytes))
TIMEOUT_S = 60.0


def wire(endpoint: str) -> Mock:
    """A channel, whose peer a test plays."""
    pushes = queue.SimpleQueue[m.Message]()
    return Mock(endpoint=endpoint, peer="weight hub", security=OPEN, pushes=pushes)


def asked(wire: Mock) -> list[Any]:
    """Each request: the message, how long an answer may take, and what gets it."""
    return [(*c.args, c.kwargs["timeout_s"], c.kwargs["on_done"]) for c in wire.request.mock_calls]


class End:
    """A receiving end whose steps a test ends with a receipt."""

    def __init__(self) -> None:
        self.receipt: Receipt | None = None
        self.begun: list[m.Prepare] = []
        self.given_up = 0
        self.close = Mock()

    def receive(self, message: m.Prepare) -> Receiving:
        self.begun.append(message)
        try:
            while self.receipt is None:
                yield None
        except GeneratorExit:
            self.given_up += 1
            raise
        receipt, self.receipt = self.receipt, None
        return receipt


class World:
    """A receiver that is subscribed to plane `plane`."""

    def __init__(self, plane: str = "shm", *offered: str, **options: Any) -> None:
        self.offered, self.facts = [plane, *offered], None
        self.ends: list[End] = []
        self.refusal: StartupError | None = None
        self.wire, self.relay = wire("tcp://hub"), wire("tcp://relay")
        self.wire.beside.return_value = self.relay
        self.receiver = Receiver(self.wire, cast(Any, self), "host", **options)
        self.receiver._timeout_s = TIMEOUT_S
        self.hear(subscribed(plane))

    def open(self, _reply: m.Subscribed, _security: object) -> End:
        if self.refusal is not None:
            raise self.refusal
        self.ends.append(End())
        return self.ends[-1]

    def dropped(self) -> str:
        """Return why it was unsubscribed since the last call."""
        reason, self.receiver._dropped = self.receiver._dropped, ""
        return reason

    def serve(self, turns: int, dropped: str) -> None:
        """Have it serve for so many turns without a message."""
        left = iter(range(turns))

        def silent(timeout: float) -> m.Message:
            if next(left) == turns - 1:
                self.receiver._closing.set()
            raise queue.Empty

        self.wire.pushes = SimpleNamespace(get=silent)
        self.receiver._dropped = dropped
        self.receiver._serve()

    @property
    def end(self) -> End:
        return self.ends[-1]

    def sent(self, kind: type[m.Message]) -> Any:
        """Return the one message that was sent since the last call."""
        ((message,),) = [call.args for call in self.wire.send.mock_calls]
        self.wire.send.reset_mock()
        assert isinstance(message, kind), message
        return message

    def hear(self, *messages: m.Message) -> None:
        for message in messages:
            self.receiver._handle(message)
            self.receiver._receive()

    def prepared(self, epoch: int, sums: list[int] = SUMS) -> m.Prepare:
        message = m.Prepare(epoch=epoch, version=10 + epoch, slot=0, checksums=sums)
        self.hear(message)
        return message

    def staged(self, epoch: int, **receipt: Any) -> m.Ready:
        self.prepared(epoch)
        self.end.receipt = Receipt(**{"data": DATA, **receipt})
        self.receiver._receive()
        return self.sent(m.Ready)

    def commit(self, epoch: int) -> StagedVersion | None:
        self.hear(m.Commit(epoch=epoch, version=10 + epoch))
        return self.receiver.poll()


def subscribed(plane: str, path: str = "/a", manifest: Any = LAYOUT) -> m.Subscribed:
    return m.Subscribed(manifest=manifest, plane=plane, path=path)


def aborted(epoch: int, *, dropped: bool = False) -> m.Abort:
    return m.Abort(epoch=epoch, version=10 + epoch, reason="because", dropped=dropped)


def test_ready_says_what_it_took_and_commit_hands_it_over_once() -> None:
    world = World()
    ready = world.staged(1, wire_s=1.5, stage_s=0.5, wire_bytes=7)
    assert (ready.epoch, ready.version, ready.error) == (1, 11, "")
    world.hear(m.HubStatus(subscribed=True), m.Ok())
    assert not world.dropped(), "it is still subscribed"
    request = world.receiver._request()
    assert (request.host, request.planes, request.avoid) == ("host", ["shm"], "")
    assert (ready.wire_s, ready.stage_s, ready.wire_bytes) == (1.5, 0.5, 7)
    assert not ready.in_place and not ready.source_lost
    assert world.receiver.poll() is None, "it is not committed"
    assert world.commit(2) is None, "that is another one's commit"
    staged = world.commit(1)
    assert staged is not None and (staged.version, staged.epoch) == (11, 1)
    assert world.receiver.poll() is None, "it was handed over"
    world.receiver.committed(staged, 0.25, "no")
    done = world.sent(m.Committed)
    assert (done.epoch, done.version, done.commit_s, done.error) == (1, 11, 0.25, "no")
    assert world.staged(2, source_lost=True, error="lost").source_lost
    assert world.commit(2) is None, "there is nothing to load"


def test_memory_that_is_loaded_is_not_written_and_a_staged_version_gives_way() -> None:
    world = World()
    world.staged(1)
    loading = world.commit(1)
    assert loading is not None
    world.prepared(2)
    assert [message.epoch for message in world.end.begun] == [1], "the engine still reads it"
    world.receiver.committed(loading, 0.0)
    world.receiver._receive()
    assert [message.epoch for message in world.end.begun] == [1, 2]
    world.end.receipt = Receipt(data=DATA)
    world.receiver._receive()
    world.prepared(3)
    assert world.commit(2) is None, "its memory is written again"
    world.prepared(4)
    assert world.end.given_up == 1


def test_an_abort_ends_its_own_push_alone() -> None:
    world = World()
    world.prepared(1)
    world.hear(aborted(2))
    assert not world.end.given_up
    world.hear(aborted(1))
    assert world.end.given_up == 1 and not world.dropped()
    world.staged(3)
    world.hear(aborted(2))
    assert world.receiver._staged is not None
    world.hear(aborted(3))
    assert world.commit(3) is None
    world.staged(4)
    assert world.commit(4) is not None
    world.prepared(5)  # waits until 4 is loaded
    world.hear(aborted(5, dropped=True))
    assert world.receiver._waiting is None
    assert world.dropped() == "because" and not world.dropped()


def test_a_version_with_other_buckets_or_of_another_dtype_is_refused() -> None:
    world = World()
    world.prepared(1, SUMS[1:])
    assert world.sent(m.Ready).error == f"{len(SUMS) - 1} checksums for {len(SUMS)} buckets"
    assert not world.end.begun
    with pytest.raises(UsageError, match=r"weight_hub\.dtype"):
        World(dtype="float16")


@pytest.mark.parametrize("when", ["opened", "receiving"])
def test_a_plane_of_a_gpu_that_does_not_work_is_left_for_good(when: str) -> None:
    world = World("nccl", "cuda_ipc", "tcp")
    if when == "opened":
        world.refusal = StartupError("no room")
        world.hear(subscribed("cuda_ipc"))
    else:
        world.hear(subscribed("cuda_ipc"))
        world.staged(1, error="cannot map it", unusable=True)
    ((request, timeout_s, _),) = asked(world.wire)
    assert isinstance(request, m.Subscribe) and request.planes == ["nccl", "tcp"]
    assert timeout_s == TIMEOUT_S
    world.wire.request.reset_mock()
    world.hear(subscribed("tcp")) if when == "receiving" else None
    world.refusal = StartupError("no room")
    with pytest.raises(StartupError):
        world.hear(subscribed("tcp", manifest=OTHER_LAYOUT))
    world.offered[:] = ["nccl"]
    with pytest.raises(StartupError):
        world.hear(subscribed("nccl", manifest=OTHER_LAYOUT))
    assert not asked(world.wire), "there is no other"


@pytest.mark.parametrize(
    ("plane", "reply", "same"),
    [
        ("shm", subscribed("shm"), True),
        ("shm", subscribed("shm", "/b"), False),
        ("tcp", subscribed("tcp", "/b"), True),
        ("tcp", subscribed("tcp", manifest=OTHER_LAYOUT), False),
        ("tcp", subscribed("shm"), False),
    ],
)
def test_what_was_received_counts_while_layout_and_place_stay(
    plane: str, reply: m.Subscribed, same: bool
) -> None:
    world = World(plane)
    world.staged(1)
    world.prepared(2)
    first = world.end
    world.hear(reply)
    assert first.given_up == 1, "the push under way was another hub's"
    assert (world.end is first, first.close.called) == (same, not same)


@pytest.mark.parametrize("error", [None, UmbraError("no slot")])
def test_a_daemon_loads_at_the_commit_and_says_what_went_wrong(error: UmbraError | None) -> None:
    load = Mock(side_effect=error)
    world = World(load=load)
    world.staged(1)
    world.hear(m.Commit(epoch=2, version=12))
    assert not load.called
    world.hear(m.Commit(epoch=1, version=11))
    assert load.call_args.args[0].version == 11
    assert world.sent(m.Committed).error == str(error or "")


def test_a_load_that_fails_is_reported_and_raised() -> None:
    world = World()
    world.staged(1)
    staged = world.commit(1)
    assert staged is not None
    fails = Mock(side_effect=PeerLostError("out of memory"))
    with pytest.raises(PeerLostError):
        world.receiver.load(staged, fails, WAIT_S, threading.Event())
    assert world.sent(m.Committed).error == "out of memory"


def test_a_relay_that_is_gone_is_avoided_and_a_hub_that_is_gone_is_an_error() -> None:
    world = World("tcp")
    world.hear(subscribed("relay", "tcp://relay"))
    assert not asked(world.wire)
    ((request, timeout_s, answer),) = asked(world.relay)
    assert isinstance(request, m.HubStatusRequest) and timeout_s == RELAY_SILENT_S
    done: Future[m.Message] = Future()
    done.set_result(m.HubStatus(subscribed=False))
    answer(done)
    world.hear(world.relay.pushes.get_nowait())
    assert "no subscription" in world.dropped()
    lost: Future[m.Message] = Future()
    lost.set_exception(DeadlineError("silent"))
    world.wire.beside.return_value = wire("tcp://other")
    world.hear(subscribed("relay", "tcp://other"))
    answer(lost)
    assert not world.dropped(), "it had left that one"
    world.hear(subscribed("relay", "tcp://relay"))
    answer(lost)
    assert world.dropped() == "the relay is gone"
    assert world.receiver._request().avoid == "tcp://relay"
    first = world.wire.request.return_value = Future[m.Message]()
    for _ in range(2):
        world.receiver._ask(world.receiver._request())
    (_, timeout_s, answer), _ = asked(world.wire)
    assert timeout_s == TIMEOUT_S
    assert first.cancelled(), "of two that wait for a layout a hub answers the last one"
    answer(first)
    world.receiver.check()
    world.receiver.on_news = Mock()
    answer(lost)
    assert world.receiver.on_news.called
    with pytest.raises(DeadlineError):
        world.receiver.check()


@pytest.mark.parametrize(
    ("check_s", "retry_s", "dropped", "requests"),
    [
        (60.0, 60.0, "", []),
        (0.0, 60.0, "", [m.HubStatusRequest]),  # once, until there is an answer
        (0.0, 0.0, "silent", [m.Subscribe, m.HubStatusRequest]),  # is it there still?
        (0.0, 60.0, "silent", []),
    ],
)
def test_a_silent_hub_is_asked_once_and_one_that_dropped_it_after_a_pause(
    check_s: float, retry_s: float, dropped: str, requests: list[type[m.Message]]
) -> None:
    world = World(check_s=check_s, retry_s=retry_s)
    world.serve(4, dropped)
    assert [type(body) for body, _, _ in asked(world.wire)] == requests


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("plane", ["shm", "tcp"])
def test_who_is_dropped_keeps_no_shared_memory(plane: str, committed: bool) -> None:
    """A restarted hub may have no room beside it. What was fetched may still be loaded."""
    world = World(plane)
    world.staged(1)
    if committed:
        world.hear(m.Commit(epoch=1, version=11))
    world.serve(1, "the weight hub was restarted")
    assert world.end.close.called == (plane == "shm")
    assert (world.receiver._staged is not None) == (plane == "tcp")
    assert (world.receiver.poll() is not None) == (committed and plane == "tcp")


def test_waiting_for_a_version_ends_with_the_run_or_its_deadline() -> None:
    world, stopping = World(), threading.Event()
    with pytest.raises(DeadlineError, match="has the trainer published"):
        world.receiver.wait_first(0.0, stopping)
    stopping.set()
    assert world.receiver.wait_first(WAIT_S, stopping) is None


def test_waiting_for_a_hub_ends_with_the_run_or_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    world, stopping, answered = World(), threading.Event(), threading.Event()
    waiting = Mock(side_effect=stopping.set)
    monkeypatch.setattr(world.receiver, "subscribe", lambda _: answered.wait(WAIT_S))
    assert not world.receiver.subscribe_unless(stopping, WAIT_S, waiting)
    waiting.assert_called_once_with()
    waiting.side_effect = answered.set
    assert world.receiver.subscribe_unless(threading.Event(), WAIT_S, waiting)
    monkeypatch.setattr(world.receiver, "subscribe", Mock(side_effect=UmbraError("no plane")))
    with pytest.raises(UmbraError, match="no plane"):
        world.receiver.subscribe_unless(threading.Event(), WAIT_S, waiting)
