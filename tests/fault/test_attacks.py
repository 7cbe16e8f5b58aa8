"""A run with keys among attackers: generation goes on, and each of them is counted and named."""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from fakes.crash_run import BufferProcess, CrashRun, check
from fakes.slowness import limit
from fakes.waiting import until

from umbra.proto import messages as m
from umbra.proto import sockets
from umbra.proto.access import KeyRole
from umbra.proto.codec import Encoder, decode
from umbra.proto.net.keys import Security, load_keys, make_keys

WAIT_S = limit(20.0)
CONNECTIONS = 300
GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" * 32
HUGE_COMMAND = b"\x06" + (200 << 20).to_bytes(8, "big")  # a handshake command of 200 MiB to come


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "run" / "keys")  # where the buffer looks for them by itself
    return tmp_path / "run" / "keys"


@pytest.fixture
def run(tmp_path: Path, keys: Path) -> Iterator[CrashRun]:
    buffer = BufferProcess(tmp_path)
    run = CrashRun(buffer, seed=3, keys=keys)
    yield run
    run.close()
    buffer.close()


def address(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def still_works(run: CrashRun) -> m.Status:
    """Honest peers train on, and the run can be brought to its end; its status before."""
    before = run.version
    until(lambda: run.version >= before + 5, "honest peers are served on", run.turn)
    status = run.status()
    check(run, run.finish())
    return status


class Attacker:
    def __init__(
        self, run: CrashRun, keys: Path, role: KeyRole, name: str, incarnation: str
    ) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.encoder = Encoder(name, incarnation)
        curve = Security(load_keys(keys, role)).connecting("buffer")
        self.sockets = {
            "control": sockets.dealer(self.context, run.buffer.broker, b"attacker", curve),
            "data": sockets.dealer(self.context, run.data_endpoint, b"attacker", curve),
        }

    def ask(self, body: m.Message, on: str = "control") -> m.Message:
        number, frames = self.encoder.encode(body)
        self.sockets[on].send_multipart(frames)
        while self.sockets[on].poll(round(1000 * WAIT_S)):
            envelope = decode(self.sockets[on].recv_multipart())
            if envelope.header.reply_to == number:
                return envelope.body
        raise AssertionError(f"no answer to {body}")

    def close(self) -> None:
        self.context.destroy(linger=0)


def test_a_generators_key_decides_nothing_over_the_run(run: CrashRun, keys: Path) -> None:
    """It claims to be the trainer, under the trainer's own name and incarnation."""
    run.work(0.3)
    (trainer,) = (member for member in run.status().members if member.role == "trainer")
    attacker = Attacker(run, keys, "generator", trainer.name, trainer.incarnation)

    def join(role: m.Role, name: str = trainer.name) -> m.Join:
        return m.Join(role=role, name=name, pid=1, host="h")

    beat = m.Heartbeat(state="ready", activity="x", progress=1, idle_s=0.0)
    wanted: list[tuple[m.Message, str, str]] = [
        (m.CommitBatch(step=run.version + 1), "data", "not_allowed"),
        (m.FinishRun(reason="mine"), "data", "not_allowed"),
        (join("trainer"), "control", "not_allowed"),
        (join("generator"), "control", "name_taken"),
        (m.Leave(reason="mine"), "control", "not_allowed"),
        (beat, "control", "not_allowed"),
    ]
    for body, on, code in wanted:
        answer = attacker.ask(body, on)
        assert isinstance(answer, m.Nack), body
        assert answer.code == code, answer
    attacker.close()
    # Not even another generator can speak for one.
    (victim, *_) = (member for member in run.status().members if member.role == "generator")
    attacker = Attacker(run, keys, "generator", victim.name, victim.incarnation)
    answer = attacker.ask(m.Leave(reason="mine"))
    assert isinstance(answer, m.Nack) and answer.code == "not_allowed"
    attacker.close()
    status = still_works(run)
    assert {member.name for member in status.members} == {"g0", "g1", "g2", "trainer"}
    assert status.counters["not_allowed"] == 6
    assert "CommitBatch of 'trainer', which has the generator key" in status.refused


def memory_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def flood(run: CrashRun, rubbish: Callable[[int], bytes]) -> float:
    """Open many connections to both sockets, say `rubbish` on each; growth of the buffer in MB."""
    before = memory_mb(run.buffer.popen.pid)
    targets = [address(run.buffer.broker), address(run.data_endpoint)]
    opened: list[socket.socket] = []
    for number in range(CONNECTIONS):
        one = socket.create_connection(targets[number % 2], timeout=WAIT_S)
        one.setblocking(False)
        opened.append(one)
        try:
            one.send(rubbish(number))
        except (BlockingIOError, ConnectionError):
            pass  # it has closed already, or reads no more
        run.turn()
    grown = memory_mb(run.buffer.popen.pid) - before
    for one in opened:
        one.close()
    return grown


@pytest.mark.parametrize(
    "rubbish",
    [
        pytest.param(lambda n: GREETING + os.urandom(4096), id="noise for a handshake"),
        pytest.param(lambda n: GREETING + HUGE_COMMAND + b"x" * 65536, id="an endless handshake"),
    ],
)
def test_a_flood_of_connections(run: CrashRun, rubbish: Callable[[int], bytes]) -> None:
    run.work(0.3)
    grown = flood(run, rubbish)
    assert grown < CONNECTIONS, "MB: one for each connection"
    still_works(run)


def test_a_flood_of_outsiders_is_counted_and_named(run: CrashRun, tmp_path: Path) -> None:
    """ZeroMQ clients without keys and with wrong ones, as fast as they can connect."""
    make_keys(tmp_path / "other")
    wrong = Security(load_keys(tmp_path / "other", "trainer")).connecting("buffer")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    hello = Encoder("outsider", "s1").encode(m.StatusRequest())[1]
    run.work(0.3)
    outsiders: list[zmq.Socket[bytes]] = []
    for number in range(100):
        curve = wrong if number % 2 else None
        outsiders.append(sockets.dealer(context, run.buffer.broker, b"%d" % number, curve))
        outsiders[-1].send_multipart(hello)
        run.turn()
    refused = lambda: run.status().refused  # noqa: E731
    until(lambda: sum(refused().values()) >= 100, refused, run.turn)
    assert not any(one.poll(0) for one in outsiders)
    context.destroy(linger=0)
    status = still_works(run)
    assert all(what.endswith(" on control") for what in status.refused)
