"""Link, channel, session and server over real sockets; also when a peer misbehaves."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import closing

import msgpack
import pytest
from fakes.serving import ServerThread
from fakes.slowness import limit, until

from umbra.proto import messages as m
from umbra.proto import sockets
from umbra.proto.access import SOCKETS
from umbra.proto.codec import Encoder, decode
from umbra.proto.errors import DeadlineError, RejectedError, WireError
from umbra.proto.net import server as server_module
from umbra.proto.net.io_thread import IoThread
from umbra.proto.net.server import Request, Server
from umbra.proto.net.session import Session
from umbra.proto.records import PROTOCOL_MAJOR
from umbra.proto.sockets import Context

ANY_PORT = "tcp://127.0.0.1:*"
WAIT_S = limit(20.0)
WAIT_MS = round(1000 * WAIT_S)
PONG = m.Pong(role="buffer", state="ready")


class Broker(ServerThread):
    """A small broker; `default_answer` is that to members."""

    def __init__(self, context: Context) -> None:
        server = Server(context, "broker", "b1")
        self.endpoint = server.bind("control", ANY_PORT, SOCKETS["control"])
        self.data = server.bind("data", ANY_PORT, SOCKETS["data"])
        super().__init__(server, self.default_answer)

    def default_answer(self, request: Request) -> m.Message | None:
        match request.body:
            case m.Join():
                return m.Welcome(run_id="r", heartbeat_s=0.05, data=self.data)
            case m.Heartbeat():
                return m.HeartbeatAck(version=7, weights="tcp://127.0.0.1:1")
            case m.Leave():
                return m.Ok()
            case _:
                return PONG

    def drain(self, request: Request) -> m.Message | None:
        """Answer as always, and have the sender drain."""
        command = m.Command(kind="drain", reason="enough")
        assert self.server.push("control", request.identity, command)
        return self.default_answer(request)

    @property
    def beats(self) -> list[m.Heartbeat]:
        return [body for body in self.bodies if isinstance(body, m.Heartbeat)]


class Bench:
    """A server that the test polls itself, its clock, and a bare socket to it."""

    def __init__(self, context: Context) -> None:
        self.now = 0.0
        self.server = Server(context, "broker", "b1", clock=lambda: self.now)
        endpoint = self.server.bind("data", ANY_PORT, (*SOCKETS["data"], m.Ping, m.Event))
        self.socket = sockets.dealer(context, endpoint, b"peer")
        self.encoder = Encoder("peer", "i1")

    def encode(self, body: m.Message) -> list[bytes]:
        return self.encoder.encode(body)[1]

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

    def replies_to(self, number: int, count: int = 1) -> list[object]:
        """Wait for `count` answers to request `number`; return all that have come."""
        bodies: list[object] = []
        while self.socket.poll(0 if len(bodies) >= count else WAIT_MS):
            envelope = decode(self.socket.recv_multipart())
            if envelope.header.reply_to == number:
                bodies.append(envelope.body)
        return bodies

    def close(self) -> None:
        self.socket.close(linger=0)
        self.server.close()


@pytest.fixture
def broker(zmq_context: Context) -> Iterator[Broker]:
    with closing(Broker(zmq_context)) as made:
        yield made


@pytest.fixture
def bench(zmq_context: Context) -> Iterator[Bench]:
    with closing(Bench(zmq_context)) as made:
        yield made


@pytest.fixture
def link() -> Iterator[IoThread]:
    with closing(IoThread("tester", "i1")) as made:
        yield made


def joined(broker: Broker, name: str = "m") -> Session:
    return Session(role="monitor", name=name, broker=broker.endpoint)


def test_a_call_nobody_answers_ends_with_its_deadline_or_the_process(
    broker: Broker, link: IoThread
) -> None:
    broker.answer = lambda _request: None
    channel, stopping = link.channel(broker.endpoint, "broker"), threading.Event()
    with pytest.raises(DeadlineError, match=r"broker at tcp://.* to Ping within 0.2 s"):
        channel.call(m.Ping(), m.Pong, timeout_s=0.2)
    seen: list[weakref.ref[Exception]] = []
    try:
        channel.call(m.Ping(), m.Pong, timeout_s=0.0)
    except DeadlineError as error:
        seen.append(weakref.ref(error))
    until(lambda: seen[0]() is None, "it keeps what its callers held")
    stopping.set()
    with pytest.raises(DeadlineError, match="stopped while waiting for broker at"):
        channel.call(m.Ping(), m.Pong, timeout_s=WAIT_S, stopping=stopping.is_set)
    broker.answer = broker.default_answer
    assert channel.call(m.Ping(), m.Pong, timeout_s=WAIT_S, stopping=stopping.is_set) == PONG


def test_who_asks_when_a_link_is_closed_is_told_so(broker: Broker) -> None:
    """Nobody would ever have answered, whatever the deadline."""
    link = IoThread("late", "i1")
    channel = link.channel(broker.endpoint, "broker")
    link.close()
    asked = channel.request(m.Ping(), timeout_s=WAIT_S)
    assert isinstance(asked.exception(WAIT_S), DeadlineError)
    with pytest.raises(DeadlineError, match="is closing while waiting for hub at"):
        link.channel(broker.endpoint, "hub")


def test_a_resent_request_is_answered_once_more_but_done_once(bench: Bench) -> None:
    number, frames = bench.encoder.encode(m.CommitBatch(step=1))
    (request,) = bench.send(frames)
    bench.server.reply(request, m.Ok())
    assert bench.send(frames) == bench.send(frames) == []
    assert bench.replies_to(number, count=3) == [m.Ok()] * 3
    assert bench.server.counters["resent"] == 2


def test_bad_frames_are_counted_answered_and_forgotten(bench: Bench) -> None:
    misplaced, unknown = bench.encode(m.Leave(reason="wrong socket")), bench.encode(m.Ok())
    unknown[0] = unknown[0].replace(b"\xa2Ok", b"\xa2Xx")
    header, body = bench.encode(m.Ping())
    newer = msgpack.packb({**msgpack.unpackb(header), "major": PROTOCOL_MAJOR + 1})
    for count in (1, 2):
        for frames, code in (
            ([b"junk"], "frames"),
            ([b"\xc1", b"\xc1"], "malformed"),
            (unknown, "unknown_type"),
            (misplaced, "wrong_socket"),
            (bench.encode(m.CommitAck(version=1, ledger=m.Ledger())), "unexpected"),
            ([newer, body], "protocol"),
            ([*bench.encode(m.Ping()), *[b""] * 50_000], "frames"),
        ):
            assert bench.send(frames) == []
            refusal, pong = (decode(bench.socket.recv_multipart()).body for _ in range(2))
            assert isinstance(refusal, m.Nack) and refusal.code == code
            assert isinstance(pong, m.Ok)
        assert bench.server.counters["protocol"] == count
    assert bench.server.counters["frames"] == 4


def test_a_session_beats_as_seldom_as_it_is_asked_to(broker: Broker) -> None:
    """However many were under way before its answer came, it is silent from then on."""

    def answer(request: Request) -> m.Message | None:
        is_slow = request.header.sender == "slow"
        if isinstance(request.body, m.Heartbeat):
            return m.HeartbeatAck(version=0, heartbeat_s=3600.0 if is_slow else 0.0)
        return broker.default_answer(request)

    def is_silent() -> bool:
        senders = [one.header.sender for one in broker.seen if isinstance(one.body, m.Heartbeat)]
        return "slow" in senders and senders[-20:] == ["fast"] * 20

    broker.answer = answer
    with joined(broker, "slow"), joined(broker, "fast"):
        until(is_silent, "the slow one falls silent")


def test_a_session_joins_beats_and_leaves(broker: Broker) -> None:
    with joined(broker) as session:
        session.progress("testing", 3)
        session.stats(speed=2.0)
        until(lambda: any(beat.stats for beat in broker.beats), "a beat that tells what was done")
        told = len(broker.beats)
        until(lambda: len(broker.beats) > told + 3, "it goes on")
        assert session.weights(deadline_s=WAIT_S).peer.startswith("weight hub")
        assert session.version == 7
    assert isinstance(broker.bodies[-1], m.Leave)
    last = broker.beats[-1]
    assert (last.progress, last.stats, last.activity) == (3, {"speed": 2.0}, "testing")


def test_a_session_drains_when_told_to_and_fails_where_nobody_knows_it(broker: Broker) -> None:
    with joined(broker) as session:
        broker.answer = broker.drain
        assert session.stopping.wait(WAIT_S)
        assert session.stop_reason == "enough"
        assert session.failure is None
    broker.answer = broker.default_answer
    with joined(broker) as session:
        broker.answer = lambda _request: m.Nack(code="not_member", reason="who are you?")
        assert session.stopping.wait(WAIT_S)
        assert isinstance(session.failure, RejectedError)


def test_requests_do_not_pile_up_and_one_that_is_resent_stays_known(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "REQUESTS_KEPT", 4)
    number, lease = bench.encoder.encode(m.LeaseTasks(capacity=1, version=0, wait_s=30))
    once = bench.encode(m.LeaseBatch(step=1, wait_s=30))
    (request,) = bench.send(lease)
    assert len(bench.send(once)) == 1
    for _ in range(10):
        assert bench.send(bench.encode(m.LeaseBatch(step=2, wait_s=30)))
        assert bench.send(lease) == []
    assert len(bench.server.resends) == 4 and bench.server.counters["resent"] == 10
    assert len(bench.send(once)) == 1, "nobody asked for it in a long time"
    bench.server.reply(request, m.Ok())
    assert bench.replies_to(number) == [m.Ok()]


def test_of_large_answers_the_last_one_is_kept(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "REPLY_BYTES_KEPT", 1000)
    asked = [bench.encode(m.LeaseBatch(step=step, wait_s=1)) for step in (1, 2)]
    for frames in asked:
        (request,) = bench.send(frames)
        answer = m.BatchLease(step=1, trajectories=[], waiting_for="x" * 2000)
        bench.server.reply(request, answer)
    assert bench.send(asked[1]) == []
    assert len(bench.send(asked[0])) == 1


def test_time_in_which_the_server_did_not_listen_is_no_silence(bench: Bench) -> None:
    bench.now += 600.0  # stopped, say
    bench.server.poll(0)
    assert bench.server.listened_s == server_module.LISTENED_S


def test_what_cannot_be_encoded_is_refused_at_its_end(
    bench: Bench, broker: Broker, link: IoThread
) -> None:
    event = m.Event(kind="x", fields={"a": object()})
    number, frames = bench.encoder.encode(m.CommitBatch(step=1))
    (request,) = bench.send(frames)
    bench.server.reply(request, event)
    (answer,) = bench.replies_to(number)
    assert isinstance(answer, m.Nack) and answer.code == "unencodable"
    assert bench.server.counters["unencodable"] == 1
    # A request fails, and the link lives.
    channel = link.channel(broker.endpoint, "broker")
    with pytest.raises(WireError, match="Event cannot be encoded"):
        channel.call(event, m.Ok, timeout_s=WAIT_S)
    channel.send(event)
    with pytest.raises(WireError, match="answered Pong instead of Ok"):
        channel.call(m.Ping(), m.Ok, timeout_s=WAIT_S)


def test_a_server_of_another_major_version_is_a_refusal(
    zmq_context: Context, link: IoThread
) -> None:
    router, endpoint = sockets.router(zmq_context, ANY_PORT)
    future = link.channel(endpoint, "broker").request(m.Ping(), timeout_s=WAIT_S)
    assert router.poll(WAIT_MS)
    identity, *_ = router.recv_multipart()
    header = {"major": PROTOCOL_MAJOR + 1, "minor": 0, "sender": "buffer", "kind": "new"}
    header |= {"type": "New", "id": 1, "incarnation": "i"}
    router.send_multipart([identity, msgpack.packb(header), b""])
    with pytest.raises(RejectedError, match=r"buffer speaks protocol .* upgrade the umbra-rl here"):
        future.result(WAIT_S)
    router.close()
