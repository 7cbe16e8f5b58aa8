"""Relays and part hubs are members of the run: seen, drained, and over when the run is."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from fakes.commands import SEARCH, UMBRA, call
from fakes.crash_run import BufferProcess, Peer
from fakes.slowness import limit, seconds, until

from umbra.proto.messages import FinishRun, Member, RunFinished
from umbra.services.monitor.client import StatusClient

WAIT_S = limit(40.0)
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[BufferProcess]:
    process = BufferProcess(tmp_path)
    yield process
    process.close()


@pytest.fixture
def start(buffer: BufferProcess) -> Iterator[Start]:
    """Starts a daemon that never finds its hub, and waits until it is a member."""
    started: list[subprocess.Popen[str]] = []

    def start(name: str, *words: str) -> subprocess.Popen[str]:
        own = ("--upstream", "tcp://127.0.0.1:9", "--set", "weight_hub.listen=tcp://127.0.0.1:*")
        started.append(
            subprocess.Popen(
                [*UMBRA, "weight-hub", *own, "--broker", buffer.broker, *words],
                env={**os.environ, "PYTHONPATH": SEARCH},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        members(buffer, lambda found: name in found)
        return started[-1]

    yield start
    for popen in started:
        popen.kill()
        popen.communicate()


def members(
    buffer: BufferProcess, done: Callable[[dict[str, Member]], object]
) -> dict[str, Member]:
    """The members, once they are as they should be."""
    with StatusClient(buffer.broker) as client:

        def found() -> list[dict[str, Member]]:
            members = {member.name: member for member in client.status(WAIT_S).members}
            return [members] if done(members) else []

        return until(found, lambda: client.status(WAIT_S).members)[0]


def drain(buffer: BufferProcess, *whom: str) -> subprocess.CompletedProcess[str]:
    return call([*UMBRA, "drain", *whom, "--broker", buffer.broker])


@pytest.mark.parametrize(
    ("name", "role", "words"),
    [("relay-b", "relay", ("--name", "relay-b")), ("part-1", "part", ("--owner", "1"))],
)
def test_it_ends_with_a_run_that_ends_at_once(
    buffer: BufferProcess, start: Start, zmq_context: zmq.Context[zmq.Socket[bytes]],
    name: str, role: str, words: tuple[str, ...],
) -> None:  # fmt: skip
    """Nobody else has to leave, so the buffer stays no longer than for it."""
    daemon = start(name, *words)
    assert members(buffer, lambda found: found)[name].role == role
    if role == "part":
        told = "part-1 is the part, without which the run cannot go on"
        assert told in drain(buffer, "--member", name).stderr
    trainer = Peer(zmq_context, buffer.broker, "trainer", "trainer")
    assert isinstance(trainer.call(FinishRun(reason="done")), RunFinished)
    trainer.close()
    _, errors = daemon.communicate(timeout=WAIT_S)
    assert daemon.returncode == 0, errors


def test_a_relay_that_lost_the_buffer_fails(buffer: BufferProcess, start: Start) -> None:
    grace_s = round(seconds(1.0))  # it must be seen before a busy buffer is taken for a lost one
    relay = start("relay-b", "--name", "relay-b", "--set", f"run.broker_grace_s={grace_s}")
    buffer.kill()
    _, errors = relay.communicate(timeout=WAIT_S)
    assert relay.returncode == 5, errors
    assert errors.splitlines()[-1].endswith(f"is silent for {grace_s} s")


def test_a_relay_is_drained_alone(
    buffer: BufferProcess, start: Start, zmq_context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    peers = [Peer(zmq_context, buffer.broker, role, role) for role in ("trainer", "generator")]
    relay = start("relay-b", "--name", "relay-b")
    refused = drain(buffer, "--member", "relay-b", "--member", "nobody")
    assert (refused.returncode, refused.stdout) == (2, "relay-b is draining\n")
    assert "'nobody' is not a member" in refused.stderr
    _, errors = relay.communicate(timeout=WAIT_S)
    assert relay.returncode == 0, errors
    members(buffer, lambda found: set(found) == {"trainer", "generator"})
    for peer in peers:
        peer.close()
