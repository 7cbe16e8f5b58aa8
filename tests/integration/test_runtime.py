"""Link, channel, session and server over real sockets, against a small broker in a thread."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import zmq
from fakes.slowness import limit
from fakes.waiting import until

from umbra.proto import messages as m
from umbra.proto import sockets
from umbra.proto.access import SOCKETS
from umbra.proto.codec import Encoder, decode
from umbra.proto.errors import DeadlineError, RejectedError
from umbra.proto.net.io_thread import IoThread
from umbra.proto.net.server import Request, Server
from umbra.proto.net.session import Session

WAIT_S = limit(20.0)
WAIT_MS = round(1000 * WAIT_S)


class Broker:
    """A server in a thread that answers with `answer` and remembers what it got."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.server = Server(context, "broker", "b1")
        self.endpoint = self.server.bind("control", "tcp://127.0.0.1:*", SOCKETS["control"])
        self.data = self.server.bind("data", "tcp://127.0.0.1:*", m.DATA)
        self.seen: list[m.Message] = []
        self.left = threading.Event()
        self.beats = threading.Semaphore(0)
        self.drain = threading.Event()
        self.answer: Callable[[Request], m.Message | None] = self.default_answer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main)
        self._thread.start()

    def default_answer(self, request: Request) -> m.Message | None:
        match request.body:
            case m.Join():
                return m.Welcome(run_id="r", heartbeat_s=0.05, data=self.data)
            case m.Heartbeat():
                self.beats.release()
                return m.HeartbeatAck(version=7, weights="tcp://127.0.0.1:1")
            case m.Leave():
                self.left.set()
                return m.Ok()
            case _:
                return m.Pong(role="buffer", state="ready")

    def close(self) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
        self.server.close()

    def _main(self) -> None:
        identity = b""
        while not self._stop.is_set():
            for request in self.server.poll(0.02):
                self.seen.append(request.body)
                identity = request.identity
                body = self.answer(request)
                if body is not None:
                    self.server.reply(request, body)
            if self.drain.is_set() and identity:
                self.drain.clear()
                self.server.push("control", identity, m.Command(kind="drain", reason="enough"))


@pytest.fixture
def broker(zmq_context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Broker]:
    broker = Broker(zmq_context)
    yield broker
    broker.close()


@pytest.fixture
def link() -> Iterator[IoThread]:
    link = IoThread("tester", "i1")
    yield link
    link.close()


def test_a_call_nobody_answers_names_what_it_waited_for(broker: Broker, link: IoThread) -> None:
    broker.answer = lambda _request: None
    channel = link.channel(broker.endpoint, "broker")
    with pytest.raises(DeadlineError, match=r"broker at tcp://.* to Ping within 0.2 s"):
        channel.call(m.Ping(), m.Pong, timeout_s=0.2)


def test_pushes_arrive_in_order(broker: Broker, link: IoThread) -> None:
    channel = link.channel(broker.endpoint, "broker")
    channel.call(m.Ping(), m.Pong, timeout_s=WAIT_S)
    broker.drain.set()
    assert channel.pushes.get(timeout=WAIT_S) == m.Command(kind="drain", reason="enough")


def test_who_asks_when_a_link_is_closed_is_told_so(broker: Broker) -> None:
    """Nobody would ever have answered, whatever the deadline."""
    link = IoThread("late", "i1")
    channel = link.channel(broker.endpoint, "broker")
    link.close()
    asked = channel.request(m.Ping(), timeout_s=WAIT_S)
    assert isinstance(asked.exception(WAIT_S), DeadlineError)
    with pytest.raises(DeadlineError, match="is closing while waiting for hub at"):
        link.channel(broker.endpoint, "hub")


def test_a_resent_request_is_answered_once_more_but_done_once(
    broker: Broker, zmq_context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    socket = sockets.dealer(zmq_context, broker.endpoint, b"twice")
    _, frames = Encoder("twice", "i1").encode(m.Operate(kind="pause"))
    for _ in range(3):
        socket.send_multipart(frames)
        assert socket.poll(WAIT_MS)
        assert isinstance(decode(socket.recv_multipart()).body, m.Pong)
    assert broker.seen == [m.Operate(kind="pause")]
    assert broker.server.counters["resent"] == 2
    socket.close()


def test_bad_frames_are_counted_answered_and_forgotten(
    broker: Broker, zmq_context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    socket = sockets.dealer(zmq_context, broker.endpoint, b"outsider")
    encoder = Encoder("outsider", "i1")
    _, unknown = encoder.encode(m.Ping())
    unknown[0] = unknown[0].replace(b"Ping", b"Pong")  # a reply type where a request belongs: fine
    _, misplaced = encoder.encode(m.Ok())
    misplaced[0] = misplaced[0].replace(b"\xa2Ok", b"\xa2Xx")
    counted: Counter[str] = Counter()
    for frames, code in (
        ([b"junk"], "frames"),
        ([b"\xc1", b"\xc1"], "malformed"),
        (misplaced, "unknown_type"),
        ([*encoder.encode(m.Ping())[1], *[b""] * 50_000], "frames"),
    ):
        socket.send_multipart(frames)
        assert socket.poll(WAIT_MS)
        answer = decode(socket.recv_multipart()).body
        assert isinstance(answer, m.Nack)
        assert answer.code == code
        counted[code] += 1
        assert broker.server.counters[code] == counted[code]
    socket.close()


def test_a_session_beats_as_seldom_as_it_is_asked_to(broker: Broker) -> None:
    """However many were under way before its answer came, it is silent from then on."""

    def answer(request: Request) -> m.Message | None:
        nonlocal since
        if isinstance(request.body, m.Heartbeat):
            is_slow = request.header.sender == "slow"
            heard.add(request.header.sender)
            since = 0 if is_slow else since + 1
            if since >= 20 and "slow" in heard:
                done.set()
            return m.HeartbeatAck(version=0, heartbeat_s=3600.0 if is_slow else 0.0)
        return broker.default_answer(request)

    heard: set[str] = set()
    since = 0  # beats of the fast one, since the last one of the slow one
    done = threading.Event()
    broker.answer = answer
    with (
        Session(role="monitor", name="slow", broker=broker.endpoint),
        Session(role="monitor", name="fast", broker=broker.endpoint),
    ):
        assert done.wait(WAIT_S)


def test_a_session_joins_beats_and_leaves(broker: Broker) -> None:
    def beats() -> list[m.Heartbeat]:
        return [body for body in list(broker.seen) if isinstance(body, m.Heartbeat)]

    with Session(role="monitor", name="m", broker=broker.endpoint) as session:
        session.progress("testing", 3)
        session.stats(speed=2.0)
        until(lambda: any(beat.stats for beat in beats()), "a beat that tells what was done")
        for _ in range(3):
            assert broker.beats.acquire(timeout=WAIT_S)
        assert session.weights(deadline_s=WAIT_S).peer.startswith("weight hub")
        assert session.version == 7
    assert broker.left.is_set()
    last = beats()[-1]
    assert (last.progress, last.stats, last.activity) == (3, {"speed": 2.0}, "testing")


def test_a_session_drains_when_told_to(broker: Broker) -> None:
    with Session(role="monitor", name="m", broker=broker.endpoint) as session:
        assert broker.beats.acquire(timeout=WAIT_S)
        broker.drain.set()
        assert session.stopping.wait(WAIT_S)
        assert session.stop_reason == "enough"
        assert session.failure is None


def test_a_session_the_broker_does_not_know_fails(broker: Broker) -> None:
    with Session(role="monitor", name="m", broker=broker.endpoint) as session:
        broker.answer = lambda _request: m.Nack(code="not_member", reason="who are you?")
        assert session.stopping.wait(WAIT_S)
        assert isinstance(session.failure, RejectedError)


def test_status_is_not_a_request_of_another_socket(
    zmq_context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    server = Server(zmq_context, "hub", "h1")
    endpoint = server.bind("weights", "tcp://127.0.0.1:*", (m.Ping,))
    socket = sockets.dealer(zmq_context, endpoint, b"lost")
    _, frames = Encoder("lost", "i1").encode(m.Leave(reason="wrong socket"))
    socket.send_multipart(frames)
    while server.counters["wrong_socket"] == 0:
        assert server.poll(WAIT_S) == []
    assert isinstance(decode(socket.recv_multipart()).body, m.Nack)
    assert m.Status.__name__ in {cls.__name__ for cls in m.CONTROL}
    socket.close()
    server.close()
