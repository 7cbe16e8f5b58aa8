"""A relay is a member of the run: it is seen, may be drained, and ends when the run does."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from fakes.commands import UMBRA, call
from fakes.crash_run import BufferProcess, Peer
from fakes.slowness import limit, seconds
from fakes.waiting import until

from umbra.proto.messages import FinishRun, Member, RunFinished
from umbra.services.monitor.client import StatusClient

WAIT_S = limit(40.0)
HOST = socket.gethostname()


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[BufferProcess]:
    process = BufferProcess(tmp_path)
    yield process
    process.close()


@pytest.fixture
def relay(buffer: BufferProcess, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """One that has not found a hub yet."""
    nobody = "tcp://127.0.0.1:9"
    own = ("weight-hub", "--upstream", nobody, "--set", "weight_hub.listen=tcp://127.0.0.1:*")
    with (tmp_path / "relay.log").open("wb") as log:
        popen = subprocess.Popen(
            [*UMBRA, *own, "--broker", buffer.broker, "--name", "relay-b"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=log,
            stderr=log,
        )
    yield popen
    popen.kill()
    popen.wait()


def members(broker: str, done: Callable[[dict[str, Member]], object]) -> dict[str, Member]:
    """The members, once they are as they should be."""
    with StatusClient(broker) as client:

        def found() -> list[dict[str, Member]]:
            members = {member.name: member for member in client.status(WAIT_S).members}
            return [members] if done(members) else []

        return until(found, lambda: client.status(WAIT_S).members)[0]


def test_a_relay_ends_with_a_run_that_ends_at_once(
    buffer: BufferProcess,
    relay: subprocess.Popen[bytes],
    tmp_path: Path,
    zmq_context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    """Nobody else has to leave, so the buffer stays no longer than for the relay."""
    (member,) = members(buffer.broker, lambda found: "relay-b" in found).values()
    assert member.role == "relay"
    trainer = Peer(zmq_context, buffer.broker, "trainer", "trainer")
    assert isinstance(trainer.call(FinishRun(reason="done")), RunFinished)
    trainer.close()
    assert relay.wait(WAIT_S) == 0, (tmp_path / "relay.log").read_text()


def test_a_part_hub_ends_with_the_run_too(
    buffer: BufferProcess, tmp_path: Path, zmq_context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """Also if it has not found the weight hub."""
    own = (
        "weight-hub",
        "--upstream",
        "tcp://127.0.0.1:9",
        "--set",
        "weight_hub.listen=tcp://127.0.0.1:*",
    )
    with (tmp_path / "part.log").open("wb") as log:
        part = subprocess.Popen(
            [*UMBRA, *own, "--owner", "1", "--broker", buffer.broker], stdout=log, stderr=log
        )
    try:
        (member,) = members(buffer.broker, lambda found: "part-1" in found).values()
        assert member.role == "part"
        drain = ("drain", "--member", "part-1", "--broker", buffer.broker)
        done = call([*UMBRA, *drain])
        assert "part-1 is the part, without which the run cannot go on" in done.stderr
        trainer = Peer(zmq_context, buffer.broker, "trainer", "trainer")
        assert isinstance(trainer.call(FinishRun(reason="done")), RunFinished)
        trainer.close()
        assert part.wait(WAIT_S) == 0, (tmp_path / "part.log").read_text()
    finally:
        part.kill()
        part.wait()


def test_a_relay_is_drained_alone(buffer: BufferProcess, relay: subprocess.Popen[bytes]) -> None:
    members(buffer.broker, lambda found: "relay-b" in found)
    drain = ("drain", "--member", "relay-b", "--broker", buffer.broker)
    call([*UMBRA, *drain], check=True)
    assert relay.wait(WAIT_S) == 0
    members(buffer.broker, lambda found: not found)


def test_a_relay_that_lost_the_buffer_fails(buffer: BufferProcess, tmp_path: Path) -> None:
    listen = ("--set", "weight_hub.listen=tcp://127.0.0.1:*")
    own = ("--upstream", "tcp://127.0.0.1:9", *listen, "--name", "relay-b")
    grace_s = round(seconds(1.0))  # it must be seen before a busy buffer is taken for a lost one
    popen = subprocess.Popen(
        [*UMBRA, "weight-hub", *own, "--broker", buffer.broker,
         "--set", f"run.broker_grace_s={grace_s}"],
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    members(buffer.broker, lambda found: "relay-b" in found)
    buffer.kill()
    _, errors = popen.communicate(timeout=WAIT_S)
    assert popen.returncode == 5, errors
    assert errors.splitlines()[-1].endswith(f"is silent for {grace_s} s")


def test_a_node_is_drained_unless_the_trainer_is_there(
    buffer: BufferProcess,
    relay: subprocess.Popen[bytes],
    zmq_context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    def drain(node: str) -> subprocess.CompletedProcess[str]:
        words = ("drain", "--node", node, "--broker", buffer.broker)
        return call([*UMBRA, *words])

    trainer = Peer(zmq_context, buffer.broker, "trainer", "trainer")  # on host "h"
    generator = Peer(zmq_context, buffer.broker, "generator", "generator-0")
    members(buffer.broker, lambda found: "relay-b" in found)
    refused = drain("h")
    assert refused.returncode == 2
    assert "--node h: trainer runs there, and the run cannot do without it" in refused.stderr
    unknown = drain("nowhere")
    assert unknown.returncode == 2
    assert f"no member runs there; members are on {', '.join(sorted({'h', HOST}))}" in (
        unknown.stderr
    )
    done = drain(HOST)
    assert (done.returncode, done.stdout) == (0, "relay-b is draining\n")
    assert relay.wait(WAIT_S) == 0
    members(buffer.broker, lambda found: set(found) == {"trainer", "generator-0"})
    trainer.close()
    generator.close()
