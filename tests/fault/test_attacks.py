"""A run with keys among attackers: generation goes on, and each of them is counted and named."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import msgpack
import pytest
from fakes.costly_frames import costly_bodies
from fakes.crash_run import BufferProcess, CrashRun, crash_run, memory
from fakes.keys import of
from fakes.slowness import limit, until

from umbra.proto import messages as m
from umbra.proto import sockets
from umbra.proto.access import KEY_ROLES, SOCKETS, KeyRole, allowed_bytes, may_connect
from umbra.proto.codec import Encoder, decode
from umbra.proto.messages import FinishRun, Leave, Message, Nack, Role
from umbra.proto.net.keys import make_keys
from umbra.proto.records import PROTOCOL_MAJOR, PROTOCOL_MINOR
from umbra.proto.sockets import Context, Socket

WAIT_S = limit(30.0)
GRACE_S = 0.1  # for the answer to what was thrown; not everything is answered
REFUSED_BYTES = 64 << 10  # of a frame that its role may not send
ENDS = (FinishRun, Leave)  # said by nobody whom the run knows


def begin_peak(pid: int) -> int:
    """Reset the peak of a process; return the bytes that it holds now."""
    before = memory(pid, "VmRSS")
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="utf-8")
    return before


def costly_bytes(kind: type[Message], role: KeyRole, most: int) -> int:
    """Bytes of a costly body of `kind` from `role`: what it may have, `most` at most."""
    return min(allowed_bytes(kind, role), most) or REFUSED_BYTES


class HostilePeer:
    """One socket of somebody who holds the key of `role`, connected to a `server`.

    Args:
        name: of the process that it pretends to be.
    """

    def __init__(
        self,
        context: Context,
        keys: Path,
        role: KeyRole,
        endpoint: str,
        server: Role,
        name: str,
        incarnation: str = "1",
    ) -> None:
        self.name = name
        curve = of(keys, role).connecting(server)
        self.socket = sockets.dealer(context, endpoint, f"{name}.0".encode(), curve)
        self._encoder = Encoder(name, incarnation)
        self._next = self._thrown = 1 << 20
        self._is_open = False  # what was thrown last, and was not answered yet

    def call(self, body: Message) -> Message:
        """The answer to `body`, a sound message."""
        number, frames = self._encoder.encode(body)
        self.socket.send_multipart(frames)
        return self._answer(number)

    def throw(self, kind: str, body: bytes, sender: str) -> None:
        """Send `body` as a message of `kind`, and wait until the server is through with it."""
        self._thrown = self._next + 1
        self._is_open = True
        for one, content in ((kind, body), ("Nothing", b"\x80")):
            self._next += 1
            header = {
                "major": PROTOCOL_MAJOR, "minor": PROTOCOL_MINOR, "type": one, "id": self._next,
                "sender": sender, "incarnation": self._encoder.incarnation,
            }  # fmt: skip
            self.socket.send_multipart([msgpack.packb(header), content])
        answer = self._answer(self._next)  # a peer's messages are done in their order
        assert isinstance(answer, Nack) and answer.code == "unknown_type"
        deadline = time.monotonic() + GRACE_S  # what was carried out is answered after that
        while self._is_open and (left := deadline - time.monotonic()) > 0:
            if self.socket.poll(round(1000 * left)):
                self._take(-1)

    def close(self) -> None:
        self.socket.close(linger=0)

    def _answer(self, number: int) -> Message:
        deadline = time.monotonic() + WAIT_S
        while (left := deadline - time.monotonic()) > 0:
            if self.socket.poll(round(1000 * left)) and (body := self._take(number)) is not None:
                return body
        raise AssertionError(f"no answer to {self.name}")

    def _take(self, number: int) -> Message | None:
        """Take what has come; the message, if it is the answer to request `number`."""
        envelope = decode(self.socket.recv_multipart())
        body, asked = envelope.body, envelope.header.reply_to
        if asked == number:
            return body
        if (asked is None and isinstance(body, Nack)) or asked == self._thrown:
            self._is_open = False
        return None


CONNECTIONS = 300
GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" * 32
HUGE_COMMAND = b"\x06" + (200 << 20).to_bytes(8, "big")  # a handshake command of 200 MiB to come


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "run" / "keys")  # where the buffer looks for them by itself
    return tmp_path / "run" / "keys"


@pytest.fixture
def run(tmp_path: Path, keys: Path) -> Iterator[CrashRun]:
    with crash_run(tmp_path, seed=3, keys=keys) as made:
        yield made


def address(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def still_works(run: CrashRun) -> m.Status:
    """Honest peers train on, and the run can be brought to its end; its status before."""
    before = run.version
    until(lambda: run.version >= before + 5, "honest peers are served on", run.turn)
    status = run.status()
    run.finish()
    return status


def test_a_generators_key_decides_nothing_over_the_run(
    run: CrashRun, keys: Path, zmq_context: Context
) -> None:
    """It claims to be the trainer, under the trainer's own name and incarnation."""
    run.work(0.3)
    members = run.status().members
    (trainer,) = (member for member in members if member.role == "trainer")
    (victim, *_) = (member for member in members if member.role == "generator")

    def join(role: m.Role) -> m.Join:
        return m.Join(role=role, name=trainer.name, pid=1, host="h")

    def posing(as_whom: m.Member, endpoint: str) -> HostilePeer:
        name, incarnation = as_whom.name, as_whom.incarnation
        return HostilePeer(
            zmq_context, keys, "generator", endpoint, "buffer", name, incarnation=incarnation
        )

    control, data = posing(trainer, run.buffer.broker), posing(trainer, run.data_endpoint)
    generator = posing(victim, run.buffer.broker)
    beat = m.Heartbeat(state="ready", activity="x", progress=1, idle_s=0.0)
    for peer, body, code in (
        (data, m.CommitBatch(step=run.version + 1), "not_allowed"),
        (data, m.FinishRun(reason="mine"), "not_allowed"),
        (control, join("trainer"), "not_allowed"),
        (control, join("generator"), "name_taken"),
        (control, m.Leave(reason="mine"), "not_allowed"),
        (control, beat, "not_allowed"),
        (generator, m.Leave(reason="mine"), "not_allowed"),  # nobody speaks for another one
    ):
        answer = peer.call(body)
        assert isinstance(answer, m.Nack) and answer.code == code, (body, answer)
    for peer in (control, data, generator):
        peer.close()
    status = still_works(run)
    assert {member.name for member in status.members} == {"g0", "g1", "g2", "trainer"}
    assert status.counters["not_allowed"] == 6
    assert "CommitBatch of 'trainer', which has the generator key" in status.refused


@pytest.mark.parametrize(
    "rubbish",
    [
        pytest.param(lambda n: GREETING + os.urandom(4096), id="noise for a handshake"),
        pytest.param(lambda n: GREETING + HUGE_COMMAND + b"x" * 65536, id="an endless handshake"),
    ],
)
def test_a_flood_of_connections(run: CrashRun, rubbish: Callable[[int], bytes]) -> None:
    """To both sockets, with rubbish on each."""
    run.work(0.3)
    before = memory(run.buffer.popen.pid, "VmRSS")
    targets = [address(run.buffer.broker), address(run.data_endpoint)]
    with ExitStack() as opened:
        for number in range(CONNECTIONS):
            one = socket.create_connection(targets[number % 2], timeout=WAIT_S)
            opened.enter_context(one).setblocking(False)
            with suppress(BlockingIOError, ConnectionError):  # it has closed, or reads no more
                one.send(rubbish(number))
            run.turn()
        assert memory(run.buffer.popen.pid, "VmRSS") - before < CONNECTIONS * 1e6, "one MB for each"
    still_works(run)


def test_a_flood_of_outsiders_is_counted_and_named(
    run: CrashRun, others: Path, zmq_context: Context
) -> None:
    """ZeroMQ clients without keys and with wrong ones, as fast as they can connect."""
    wrong = of(others, "trainer").connecting("buffer")
    hello = Encoder("outsider", "s1").encode(m.StatusRequest())[1]
    run.work(0.3)
    outsiders: list[Socket] = []
    for number in range(100):
        curve = wrong if number % 2 else None
        outsiders.append(sockets.dealer(zmq_context, run.buffer.broker, b"%d" % number, curve))
        outsiders[-1].send_multipart(hello)
        run.turn()
    refused = lambda: run.status().refused  # noqa: E731
    until(lambda: sum(refused().values()) >= 100, refused, run.turn)
    assert not any(one.poll(0) for one in outsiders)
    for one in outsiders:
        one.close(linger=0)
    status = still_works(run)
    assert all(what.endswith(" on control") for what in status.refused)


# -- costly frames of every message and role, on real sockets of a buffer and a hub --------------

LEGITIMATE_CPU_S = 1.0  # of the service, until it has answered somebody who is honest
TIMES = 4
SPARE = 16 << 20
KEPT = 96 << 20  # of a service that began with 35 MiB
MOST_BYTES = 1 << 20  # of any other: larger ones cost no more per byte


@pytest.fixture
def buffer(tmp_path: Path, keys: Path) -> Iterator[BufferProcess]:
    process = BufferProcess(tmp_path)
    yield process
    process.close()


@pytest.fixture
def hub(tmp_path: Path, keys: Path, buffer: BufferProcess) -> Iterator[subprocess.Popen[bytes]]:
    with (tmp_path / "hub.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "umbra", "weight-hub", "--broker", buffer.broker,
             "--keys", str(keys), "--name", "the-hub"],
            stdout=log, stderr=log, env={**os.environ},
        )  # fmt: skip
    yield process
    process.kill()
    process.wait()


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process so far: no load of the machine makes it more."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def attack(
    pid: int,
    context: Context,
    keys: Path,
    server: m.Role,
    endpoints: dict[str, str],
    legitimate: HostilePeer,
) -> int:
    """Throw all there is at a process, each by the first role that may, or as large as no role
    before it could; how many frames it took.
    """
    thrown, levels, limits = 0, list[int](), dict[tuple[str, str], int]()
    for role in KEY_ROLES:
        for on, endpoint in endpoints.items():
            if not may_connect(role, on):
                continue
            attacker = HostilePeer(context, keys, role, endpoint, server, f"evil-{role}")
            if on == "control" and role not in ("buffer", "weight_hub", "operator"):
                join = m.Join(role=role, name=attacker.name, pid=1, host="h")
                assert isinstance(attacker.call(join), m.Welcome)
            for cls in SOCKETS[on]:
                limit = costly_bytes(cls, role, MOST_BYTES)
                if limit <= limits.get((on, cls.__name__), 0):
                    continue
                limits[on, cls.__name__] = limit
                sender = "nobody" if cls in ENDS else attacker.name
                for body in costly_bodies(cls, limit):
                    before = begin_peak(pid)
                    attacker.throw(cls.__name__, body, sender)
                    grown = memory(pid, "VmHWM") - before
                    assert grown <= TIMES * len(body) + SPARE, (role, cls, body[:60], grown)
                    thrown += 1
                worked = cpu_s(pid)
                assert isinstance(legitimate.call(m.Ping()), m.Pong)
                assert cpu_s(pid) - worked < LEGITIMATE_CPU_S, (role, cls)
            attacker.close()
        levels.append(memory(pid, "VmRSS"))
    assert levels[-1] - levels[0] < SPARE, levels
    return thrown


@pytest.mark.timeout(900)
def test_no_frame_costs_a_service_more_than_it_is(
    keys: Path, buffer: BufferProcess, hub: subprocess.Popen[bytes], zmq_context: Context
) -> None:
    honest = HostilePeer(zmq_context, keys, "monitor", buffer.broker, "buffer", "honest")
    welcome = honest.call(m.Join(role="monitor", name="honest", pid=1, host="h"))
    assert isinstance(welcome, m.Welcome)

    def weights() -> str:
        status = honest.call(m.StatusRequest())
        assert isinstance(status, m.Status)
        return status.weights

    endpoint = until(weights, "the hub has joined")
    at_hub = HostilePeer(zmq_context, keys, "monitor", endpoint, "weight_hub", "honest")
    assert isinstance(at_hub.call(m.Ping()), m.Pong)
    at_buffer = {"control": buffer.broker, "data": welcome.data}
    targets: list[tuple[int, m.Role, dict[str, str], HostilePeer]] = [
        (buffer.popen.pid, "buffer", at_buffer, honest),
        (hub.pid, "weight_hub", {"weights": endpoint}, at_hub),
    ]
    for pid, server, endpoints, legitimate in targets:
        assert attack(pid, zmq_context, keys, server, endpoints, legitimate) > 100
        assert memory(pid, "VmRSS") < KEPT, "it is kept after its sender is gone"
    assert weights()
    assert buffer.popen.poll() is None
    assert hub.poll() is None
    for peer in (honest, at_hub):
        peer.close()
