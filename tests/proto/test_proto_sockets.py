"""Sockets: the options that are promised, real endpoints, and errors a person can act on."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import zmq
from fakes.serving import FakeChannel
from fakes.slowness import limit
from fakes.trajectories import trajectory
from zmq.utils.monitor import recv_monitor_message

from umbra.proto import sockets
from umbra.proto.access import MOST_BYTES, socket_bytes
from umbra.proto.bounds import SPANS
from umbra.proto.codec import Encoder, decode
from umbra.proto.deadline import Deadline
from umbra.proto.errors import DeadlineError, StartupError, UsageError
from umbra.proto.messages import RenewLeases, ReturnedSample, ReturnTasks, SubmitResults
from umbra.proto.net.io_thread import EVENTS
from umbra.proto.net.task_client import MIXED, TaskClient
from umbra.proto.records import Trajectory, VersionSpan

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]
Kept = Callable[[Socket], Socket]

HWM_MESSAGES = 1000  # libzmq's own
ANY_PORT = "tcp://127.0.0.1:*"
WAIT_MS = int(1000 * limit(10.0))


def receive(socket: Socket) -> list[bytes]:
    assert socket.poll(WAIT_MS), "no message came"
    return socket.recv_multipart()


@pytest.fixture
def kept() -> Iterator[Kept]:
    """Closes the sockets of a test, without waiting for what they still have to send."""
    with ExitStack() as stack:

        def keep(socket: Socket) -> Socket:
            stack.callback(socket.close, linger=0)
            return socket

        yield keep


def test_options(zmq_context: Context, kept: Kept) -> None:
    router, endpoint = sockets.router(zmq_context, ANY_PORT, frame_bytes=1000)
    publisher, endpoint_out = sockets.publisher(zmq_context, ANY_PORT)
    waker = sockets.Waker(zmq_context, "wake")
    dealer = sockets.dealer(zmq_context, endpoint, b"me")
    subscriber = sockets.subscriber(zmq_context, endpoint_out)
    for socket, limit_bytes in (
        (router, 1000),
        (dealer, MOST_BYTES),
        (publisher, socket_bytes("events")),
        (subscriber, MOST_BYTES),
        (waker.socket, MOST_BYTES),
        (waker._outward, MOST_BYTES),
    ):
        own = {zmq.MAXMSGSIZE: limit_bytes, zmq.SNDHWM: HWM_MESSAGES, zmq.RCVHWM: HWM_MESSAGES}
        own[zmq.HEARTBEAT_IVL] = 0  # libzmq aborts on some of them
        if socket is router:
            own[zmq.RCVHWM] = sockets.ROUTER_OPTIONS[zmq.RCVHWM]
        for option, value in {**sockets.OPTIONS, **own}.items():
            assert kept(socket).get(option) == value, (socket, option)
    assert dealer.get(zmq.IDENTITY) == b"me"


@pytest.mark.parametrize("endpoint", [ANY_PORT, "tcp://127.0.0.1:0"])
def test_a_free_port_is_told(zmq_context: Context, kept: Kept, endpoint: str) -> None:
    router, actual = sockets.router(zmq_context, endpoint)
    dealer = kept(sockets.dealer(zmq_context, actual, b"me"))
    assert actual.startswith("tcp://127.0.0.1:")
    assert int(actual.rpartition(":")[2]) > 0
    dealer.send_multipart([b"header", b"body"])
    assert receive(kept(router)) == [b"me", b"header", b"body"]


@pytest.mark.parametrize("host", ["127.0.0.1", "*"])
def test_an_occupied_port_is_named_with_a_remedy(
    zmq_context: Context, kept: Kept, host: str
) -> None:
    """Also before it is bound."""
    router, actual = sockets.router(zmq_context, f"tcp://{host}:*")
    kept(router)
    endpoint = actual.replace("0.0.0.0", "*")
    said = f"{endpoint} is in use by another process: stop it or choose another port"
    for bind in (partial(sockets.router, zmq_context), sockets.check_port_free):
        with pytest.raises(StartupError, match=f"^{re.escape(said)}$"):
            bind(endpoint)


@pytest.mark.parametrize(
    ("opens", "endpoint", "said"),
    [
        # Kept for documentation: never ours.
        (sockets.router, "tcp://192.0.2.1:5555", "cannot bind "),
        (sockets.router, "tcp://no such host:5555", "cannot bind "),
        (sockets.router, "", "cannot bind "),
        (sockets.router, "127.0.0.1:5555", "cannot bind "),
        (partial(sockets.dealer, identity=b"me"), "tcp://127.0.0.1", "cannot connect to "),
        (sockets.subscriber, ANY_PORT, "cannot connect to "),
    ],
)
def test_an_impossible_address_is_named(
    zmq_context: Context, opens: Callable[..., object], endpoint: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        opens(zmq_context, endpoint)
    assert endpoint in str(caught.value)


def test_a_restarted_peer_takes_over_its_identity(zmq_context: Context, kept: Kept) -> None:
    router, endpoint = sockets.router(zmq_context, ANY_PORT)
    kept(router)
    for word in (b"old", b"new"):
        dealer = kept(sockets.dealer(zmq_context, endpoint, b"generator-0"))
        dealer.send(word)
        assert receive(router) == [b"generator-0", word]
    router.send_multipart([b"generator-0", b"answer"])
    assert receive(dealer) == [b"answer"]


def test_nobody_gets_in_while_nobody_answers_for_the_domain(
    zmq_context: Context, kept: Kept
) -> None:
    (public, secret), (public_b, secret_b) = zmq.curve_keypair(), zmq.curve_keypair()
    curve = sockets.Curve(public, secret, domain="control")
    router, endpoint = sockets.router(zmq_context, ANY_PORT, curve)
    monitor = sockets.handshakes(zmq_context, router, EVENTS)
    own = sockets.Curve(public_b, secret_b, server=public)
    kept(sockets.dealer(zmq_context, endpoint, b"me", own))
    assert kept(monitor).poll(WAIT_MS)
    event = recv_monitor_message(monitor)["event"]
    assert event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    kept(router).disable_monitor()


def of_versions(name: str, count: int) -> Trajectory:
    spans = [VersionSpan(version=n, start=n, end=n + 1) for n in range(count)]
    return trajectory([1], [5] * count, [-1.0] * count, sample_id=name, spans=spans)


def test_a_sample_of_too_many_versions_fails_and_the_others_are_delivered() -> None:
    """A frame with it was refused as a whole, which ended the generator; a restart goes on from its
    partial, which has as many."""
    channel: Any = FakeChannel()
    client = TaskClient(channel, threading.Event(), gather_s=0.0)
    mixed, good = of_versions("mixed", SPANS + 1), of_versions("good", SPANS)
    client.submit([mixed, good])
    client.save([mixed, good])
    client.give_back([ReturnedSample(sample_id="s", attempt=1, reason="r", partial=mixed)])
    back, submitted, saved, stopped = [body for body, _ in channel.open]
    assert isinstance(back, ReturnTasks) and back.samples[0].reason == MIXED
    assert back.samples[0].failed
    assert isinstance(submitted, SubmitResults)
    assert [one.sample_id for one in submitted.trajectories] == ["good"]
    assert isinstance(saved, RenewLeases)
    assert [one.sample_id for one in saved.partials] == ["good"]
    assert isinstance(stopped, ReturnTasks) and stopped.samples[0].partial is None
    for body, _ in channel.open:
        decode(Encoder("a", "b").encode(body)[1])


def test_a_deadline_names_what_did_not_happen() -> None:
    now = 100.0
    deadline = Deadline(2.5, "no batch for step 3", clock=lambda: now)
    now += 2.4
    deadline.check()
    assert not deadline.passed and deadline.left_s == pytest.approx(0.1)
    now += 0.1
    assert deadline.passed and deadline.left_s == 0
    with pytest.raises(DeadlineError, match=r"^no batch for step 3 within 2\.5 s: no scorer$"):
        deadline.check(": no scorer")
    deadline.restart()
    assert deadline.left_s == 2.5
    with pytest.raises(StartupError, match="the buffer was not up within 0 s"):
        Deadline(0, "the buffer was not up", error=StartupError).check()
