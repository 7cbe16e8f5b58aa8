"""A run with keys among attackers: generation goes on, and each of them is counted and named."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from fakes.crash_run import CrashRun, crash_run
from fakes.hostile_peer import HostilePeer, memory
from fakes.keys import of
from fakes.slowness import limit
from fakes.waiting import until

from umbra.proto import messages as m
from umbra.proto import sockets
from umbra.proto.codec import Encoder
from umbra.proto.net.keys import make_keys
from umbra.proto.sockets import Context, Socket

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
