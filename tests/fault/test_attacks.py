"""A run with keys among attackers: generation goes on, and each of them is counted and named."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import msgpack
import pytest
from fakes.commands import UMBRA
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
from umbra.proto.sockets import Context

WAIT_S = limit(30.0)
GRACE_S = 0.1  # for the answer to what was thrown; not everything is answered
REFUSED_BYTES = 64 << 10  # of a frame that its role may not send
ENDS = (FinishRun, Leave)  # said by nobody whom the run knows


class HostilePeer:
    """One socket of somebody with the key of `role`, who calls himself `name`, at a `server`."""

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
        self._answers: dict[int | None, Message] = {}

    def call(self, body: Message) -> Message:
        """The answer to `body`, a sound message."""
        number, frames = self._encoder.encode(body)
        self.socket.send_multipart(frames)
        answer = self._answer(number, WAIT_S)
        assert answer is not None, f"no answer to {self.name}"
        return answer

    def throw(self, kind: str, body: bytes, sender: str) -> None:
        """Send `body` as a message of `kind`, and wait until the server is through with it."""
        numbers: list[int] = []
        for one, content in ((kind, body), ("Nothing", b"\x80")):
            number, (header, _) = self._encoder.encode(m.Ping())
            changed = {**msgpack.unpackb(header), "type": one, "sender": sender}
            self.socket.send_multipart([msgpack.packb(changed), content])
            numbers.append(number)
        answer = self._answer(numbers[1], WAIT_S)  # a peer's messages are done in their order
        assert isinstance(answer, Nack) and answer.code == "unknown_type"
        self._answer(numbers[0], GRACE_S)  # what was carried out is answered after that

    def close(self) -> None:
        self.socket.close(linger=0)

    def _answer(self, number: int, wait_s: float) -> Message | None:
        deadline = time.monotonic() + wait_s
        while number not in self._answers and (left := deadline - time.monotonic()) > 0:
            if self.socket.poll(round(1000 * left)):
                envelope = decode(self.socket.recv_multipart())
                self._answers[envelope.header.reply_to] = envelope.body
        return self._answers.pop(number, None)


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

    def posing(as_whom: m.Member, at: str) -> HostilePeer:
        name, incarnation = as_whom.name, as_whom.incarnation
        return HostilePeer(zmq_context, keys, "generator", at, "buffer", name, incarnation)

    control, data = posing(trainer, run.buffer.broker), posing(trainer, run.data_endpoint)
    generator = posing(victim, run.buffer.broker)
    beat = m.Heartbeat(state="ready", activity="x", progress=1, idle_s=0.0)
    for peer, body, code in (
        (data, m.CommitBatch(step=run.version + 1), "not_allowed"),
        (data, m.FinishRun(reason="mine"), "not_allowed"),
        (control, m.Join(role="trainer", name=trainer.name, pid=1, host="h"), "not_allowed"),
        (control, m.Join(role="generator", name=trainer.name, pid=1, host="h"), "name_taken"),
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


def test_a_flood_of_connections(run: CrashRun) -> None:
    """To both sockets: half of them send noise for a handshake, half begin an endless one."""
    run.work(0.3)
    before = memory(run.buffer.pid, "VmRSS")
    rubbish = (os.urandom(4096), HUGE_COMMAND + b"x" * 65536)
    with ExitStack() as opened:
        for number in range(CONNECTIONS):
            host, _, port = (run.buffer.broker, run.data_endpoint)[number % 2][6:].rpartition(":")
            one = socket.create_connection((host, int(port)), timeout=WAIT_S)
            opened.enter_context(one).setblocking(False)
            with suppress(BlockingIOError, ConnectionError):  # it has closed, or reads no more
                one.send(GREETING + rubbish[number // 2 % 2])
            run.turn()
        assert memory(run.buffer.pid, "VmRSS") - before < CONNECTIONS * 1e6, "one MB for each"
    still_works(run)


# -- costly frames of every message and role, on real sockets of a buffer and a hub --------------

LEGITIMATE_CPU_S = 1.0  # of the service, until it has answered somebody who is honest
TIMES = 4
SPARE = 16 << 20
KEPT = 96 << 20  # of a service that began with 35 MiB
MOST_BYTES = 1 << 20  # of any other: larger ones cost no more per byte


@pytest.fixture
def buffer(tmp_path: Path, keys: Path) -> Iterator[BufferProcess]:
    with closing(BufferProcess(tmp_path)) as process:
        yield process


@pytest.fixture
def hub(tmp_path: Path, keys: Path, buffer: BufferProcess) -> Iterator[subprocess.Popen[bytes]]:
    own = ("--broker", buffer.broker, "--keys", str(keys), "--name", "the-hub")
    with (tmp_path / "hub.log").open("wb") as log:
        process = subprocess.Popen([*UMBRA, "weight-hub", *own], stdout=log, stderr=log)
    yield process
    process.kill()
    process.wait()


def begin_peak(pid: int) -> int:
    """Reset the peak of a process; return the bytes that it holds now."""
    before = memory(pid, "VmRSS")
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="utf-8")
    return before


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
) -> None:
    """Throw all there is at a process, each by the first role that may, or as large as no role
    before it could.
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
                limit = min(allowed_bytes(cls, role), MOST_BYTES) or REFUSED_BYTES
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
    assert thrown > 100
    assert memory(pid, "VmRSS") < KEPT, "it is kept after its sender is gone"


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
    attack(buffer.pid, zmq_context, keys, "buffer", at_buffer, honest)
    attack(hub.pid, zmq_context, keys, "weight_hub", {"weights": endpoint}, at_hub)
    assert weights()
    assert buffer.process.poll() is None
    assert hub.poll() is None
    for peer in (honest, at_hub):
        peer.close()
