"""Link and server when the other side or the message is not as it should be."""

from collections.abc import Iterator
from typing import cast

import msgpack
import pytest
import zmq
from fakes.slowness import limit

from umbra.proto import messages as m
from umbra.proto import sockets
from umbra.proto.codec import Encoder, decode
from umbra.proto.errors import RejectedError, WireError
from umbra.proto.net import server as server_module
from umbra.proto.net.io_thread import IoThread, UndecodedError
from umbra.proto.net.server import Request, Server
from umbra.proto.records import PROTOCOL_MAJOR

Context = zmq.Context[zmq.Socket[bytes]]
ANY_PORT = "tcp://127.0.0.1:*"
WAIT_S = limit(20.0)
WAIT_MS = round(1000 * WAIT_S)


class Bench:
    """A server that the test polls itself, its clock, and a bare socket to it."""

    def __init__(self, context: Context) -> None:
        self.now = 0.0
        self.server = Server(context, "broker", "b1", clock=lambda: self.now)
        endpoint = self.server.bind("data", ANY_PORT, (*m.DATA, m.Ping, m.Event))
        self.socket = sockets.dealer(context, endpoint, b"peer")
        self.encoder = Encoder("peer", "i1")

    def send(self, frames: list[bytes]) -> list[Request]:
        """Send `frames` and a Ping behind them; return what the server makes of the former."""
        self.socket.send_multipart(frames)
        number, ping = self.encoder.encode(m.Ping())
        self.socket.send_multipart(ping)
        requests: list[Request] = []
        while not requests or requests[-1].header.id != number:
            requests += self.server.poll(WAIT_S)
        self.server.reply(requests[-1], m.Ok())
        return requests[:-1]

    def replies_to(self, number: int) -> list[object]:
        """Return the answers to request `number` that have come so far."""
        bodies: list[object] = []
        while self.socket.poll(0 if bodies else WAIT_MS):
            envelope = decode(self.socket.recv_multipart())
            if envelope.header.reply_to == number:
                bodies.append(envelope.body)
        return bodies

    def close(self) -> None:
        self.socket.close(linger=0)
        self.server.close()


@pytest.fixture
def bench(zmq_context: Context) -> Iterator[Bench]:
    made = Bench(zmq_context)
    yield made
    made.close()


@pytest.fixture
def link() -> Iterator[IoThread]:
    made = IoThread("tester", "i1")
    yield made
    made.close()


def test_requests_do_not_pile_up_and_one_that_is_resent_stays_known(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "REQUESTS_KEPT", 4)
    number, lease = bench.encoder.encode(m.LeaseTasks(capacity=1, version=0, wait_s=30))
    _, once = bench.encoder.encode(m.LeaseBatch(step=1, wait_s=30))
    (request,) = bench.send(lease)
    assert len(bench.send(once)) == 1
    for _ in range(10):
        assert bench.send(bench.encoder.encode(m.LeaseBatch(step=2, wait_s=30))[1])
        assert bench.send(lease) == []
    assert len(bench.server.resends) == 4 and bench.server.counters["resent"] == 10
    assert len(bench.send(once)) == 1, "nobody asked for it in a long time"
    bench.server.reply(request, m.Ok())
    assert bench.replies_to(number) == [m.Ok()]


def test_of_large_answers_the_last_one_is_kept(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "REPLY_BYTES_KEPT", 1000)
    asked: list[list[bytes]] = []
    for step in (1, 2):
        asked.append(bench.encoder.encode(m.LeaseBatch(step=step, wait_s=1))[1])
        (request,) = bench.send(asked[-1])
        answer = m.BatchLease(step=step, trajectories=[], waiting_for="x" * 2000)
        bench.server.reply(request, answer)
    assert bench.send(asked[1]) == []
    assert len(bench.send(asked[0])) == 1


def test_time_in_which_the_server_did_not_listen_is_no_silence(bench: Bench) -> None:
    bench.now += 600.0  # stopped, say
    bench.server.poll(0)
    assert bench.server.listened_s == server_module.LISTENED_S


def test_an_answer_that_cannot_be_encoded_is_a_refusal(bench: Bench) -> None:
    number, frames = bench.encoder.encode(m.CommitBatch(step=1))
    (request,) = bench.send(frames)
    bench.server.reply(request, m.Event(kind="x", fields={"a": object()}))
    (answer,) = bench.replies_to(number)
    assert isinstance(answer, m.Nack)
    assert answer.code == "unencodable"
    assert bench.server.counters["unencodable"] == 1


def test_a_request_that_cannot_be_encoded_fails_and_the_link_lives(
    zmq_context: Context, link: IoThread
) -> None:
    server = Server(zmq_context, "broker", "b1")
    channel = link.channel(server.bind("control", ANY_PORT, m.CONTROL), "broker")
    with pytest.raises(WireError, match="Event cannot be encoded"):
        channel.call(m.Event(kind="x", fields={"a": object()}), m.Ok, timeout_s=WAIT_S)
    channel.send(m.Event(kind="x", fields={"a": object()}))
    future = channel.request(m.Ping(), timeout_s=WAIT_S)
    (request,) = server.poll(WAIT_S)
    server.reply(request, m.Pong(role="buffer", state="ready"))
    assert future.result(WAIT_S) == m.Pong(role="buffer", state="ready")
    server.close()


def test_a_server_of_another_major_version_is_a_refusal(
    zmq_context: Context, link: IoThread
) -> None:
    router, endpoint = sockets.router(zmq_context, ANY_PORT)
    future = link.channel(endpoint, "broker").request(m.Ping(), timeout_s=WAIT_S)
    assert router.poll(WAIT_MS)
    identity, *_ = router.recv_multipart()
    header = {"major": PROTOCOL_MAJOR + 1, "minor": 0, "sender": "buffer", "kind": "new"}
    router.send_multipart([identity, msgpack.packb(header), b""])
    with pytest.raises(RejectedError, match=r"buffer speaks protocol .* upgrade the umbra-rl here"):
        future.result(WAIT_S)
    router.close()


def test_a_connector_of_another_major_version_is_told(bench: Bench) -> None:
    header, body = bench.encoder.encode(m.Ping())[1]
    changed = msgpack.packb({**msgpack.unpackb(header), "major": PROTOCOL_MAJOR + 1})
    assert bench.send([changed, body]) == []
    assert bench.server.counters["protocol"] == 1
    refusal = decode(bench.socket.recv_multipart()).body
    assert isinstance(refusal, m.Nack)
    assert refusal.code == "protocol"


def test_an_answer_that_cannot_be_decoded_is_refused_and_ends_its_request(
    bench: Bench, link: IoThread
) -> None:
    channel = link.channel(bench.server.endpoint("data"), "buffer")
    future = channel.request(m.LeaseTasks(capacity=1, version=0, wait_s=0), timeout_s=WAIT_S)

    def heard() -> Request:
        while not (found := bench.server.poll(WAIT_S)):
            pass
        return found[0]

    asked, many = heard(), cast(int, "many")
    bench.server.reply(asked, m.TaskLeases(accepted=many))
    with pytest.raises(UndecodedError, match="LeaseTasks cannot be decoded: TaskLeases"):
        future.result(WAIT_S)
    refusal = heard()
    assert isinstance(refusal.body, m.Nack) and refusal.header.reply_to == asked.header.id
