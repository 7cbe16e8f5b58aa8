"""The buffer as a process of its own, talked to over tcp by hand-made peers."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zmq
from fakes.broker_world import trajectory
from fakes.commands import UMBRA
from fakes.slowness import limit
from fakes.whole_runs import sets

from umbra.proto import messages as m
from umbra.proto import sockets
from umbra.proto.codec import Encoder, decode
from umbra.proto.net.session import Session

WAIT_S = limit(20.0)

M = TypeVar("M", bound=m.Message)


@dataclass
class Buffer:
    """A running `umbra buffer`."""

    process: subprocess.Popen[str]
    facts: dict[str, Any]
    run_dir: Path

    def end(self) -> dict[str, Any]:
        """Wait for an orderly end; the status that it left behind."""
        output, _ = self.process.communicate(timeout=WAIT_S)
        assert self.process.returncode == 0, output
        return json.loads((self.run_dir / "buffer.json").read_text())


@dataclass
class Client:
    """A peer that does what it is told, one DEALER per socket of the buffer."""

    context: zmq.Context[zmq.Socket[bytes]]
    name: str
    control: zmq.Socket[bytes]
    encoder: Encoder
    data: zmq.Socket[bytes] | None = None
    pushes: list[m.Message] = field(default_factory=list[m.Message])

    def join(self, role: m.Role) -> m.Welcome:
        body = m.Join(role=role, name=self.name, pid=1, host="h", package_version="0", replaces=1)
        welcome = self.ask(body, m.Welcome)
        self.data = sockets.dealer(self.context, welcome.data, self.name.encode())
        return welcome

    def send(self, body: m.Message) -> int:
        number, frames = self.encoder.encode(body)
        self.socket_of(body).send_multipart(frames)
        return number

    def receive(self, number: int | None, on: zmq.Socket[bytes]) -> m.Message:
        """The reply to request `number`; with None, the next push."""
        while True:
            assert on.poll(round(1000 * WAIT_S)), f"nothing for {self.name}"
            envelope = decode(on.recv_multipart())
            if envelope.header.reply_to == number:
                return envelope.body
            if envelope.header.reply_to is None:
                self.pushes.append(envelope.body)

    def ask(self, body: m.Message, kind: type[M]) -> M:
        number = self.send(body)
        reply = self.receive(number, self.socket_of(body))
        assert isinstance(reply, kind), reply
        return reply

    def socket_of(self, body: m.Message) -> zmq.Socket[bytes]:
        if isinstance(body, m.Join | m.Leave | m.Heartbeat | m.Ping | m.StatusRequest):
            return self.control
        assert self.data is not None
        return self.data

    def close(self) -> None:
        self.control.close(linger=0)
        if self.data is not None:
            self.data.close(linger=0)


Start = Callable[..., Buffer]
Connect = Callable[[Buffer, str], Client]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    processes: list[subprocess.Popen[str]] = []

    def start_buffer(*flags: str) -> Buffer:
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text("".join(f'{{"prompt": "row {n}"}}\n' for n in range(7)))
        run_dir = tmp_path / "run-1"
        inward, outward = os.pipe()
        process = subprocess.Popen(
            [
                *UMBRA, "buffer", "--run-dir", str(run_dir),
                *sets("buffer.group_size=2", "buffer.batch_groups=2", "buffer.run_ahead=0"),
                "--set", f"data.prompts={prompts}", "--set", "run.steps=2", *flags,
            ],
            pass_fds=[outward],
            env={**os.environ, "UMBRA_READY_FD": str(outward)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        processes.append(process)
        os.close(outward)
        with open(inward) as pipe:
            line = pipe.readline()
        assert line, process.communicate(timeout=WAIT_S)[0]
        return Buffer(process, json.loads(line), run_dir)

    yield start_buffer
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def connect(zmq_context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Connect]:
    clients: list[Client] = []

    def connect_client(buffer: Buffer, name: str) -> Client:
        control = sockets.dealer(zmq_context, buffer.facts["broker"], name.encode())
        clients.append(Client(zmq_context, name, control, Encoder(name, f"{name}-1")))
        return clients[-1]

    yield connect_client
    for client in clients:
        client.close()


def generate(client: Client, version: int) -> None:
    """Lease what there is and answer it."""
    lease = client.ask(m.LeaseTasks(capacity=99, version=version, wait_s=WAIT_S), m.TaskLeases)
    answers = [trajectory(task, version) for task in lease.tasks]
    ack = client.ask(m.SubmitResults(trajectories=answers), m.TaskLeases)
    assert ack.accepted == len(answers) == 4


def test_a_whole_run_over_tcp(start: Start, connect: Connect) -> None:
    buffer = start()
    generator, trainer = connect(buffer, "generator-0"), connect(buffer, "trainer")
    welcome = generator.join("generator")
    assert welcome.run_id == "run-1"
    trainer.join("trainer")
    beat = m.Heartbeat(state="ready", activity="x", progress=1, idle_s=0.0)
    for step in (1, 2):
        parked = trainer.send(m.LeaseBatch(step=step, wait_s=WAIT_S))
        generate(generator, step - 1)
        assert trainer.data is not None
        batch = trainer.receive(parked, trainer.data)
        assert isinstance(batch, m.BatchLease) and len(batch.trajectories) == 4
        assert trainer.ask(m.CommitBatch(step=step), m.CommitAck).version == step
        assert generator.ask(beat, m.HeartbeatAck).version == step
    assert trainer.ask(m.FinishRun(reason="steps reached"), m.RunFinished).ledger.trained == 8
    for client in (generator, trainer):
        assert isinstance(client.receive(None, client.control), m.Command) or client.pushes
        client.ask(m.Leave(reason="drained"), m.Ok)
    status = buffer.end()
    assert status["ledger"]["issued"] == status["ledger"]["trained"] == 8
    assert status["staleness"]["max"] == 0
    assert status["state"] == "stopped"
    assert status["departed"] == {"generator-0": "drained", "trainer": "drained"}
    lines = (buffer.run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["kind"] for row in rows] == ["batch", "handed_out", "batch", "handed_out", "ledger"]


def test_a_session_works_with_it_and_hears_of_the_end(start: Start, connect: Connect) -> None:
    buffer = start(*sets("buffer.dead_after_s=0.75"))
    with Session.join(role="generator", name="g", broker=buffer.facts["broker"]) as session:
        lease = m.LeaseTasks(capacity=1, version=0, wait_s=WAIT_S)
        assert len(session.data.call(lease, m.TaskLeases, timeout_s=WAIT_S).tasks) == 1
        buffer.process.send_signal(signal.SIGTERM)
        assert session.stopping.wait(WAIT_S)
    status = buffer.end()
    assert status["ledger"]["ended"] == {"cancelled": 2}
    assert "g" in status["departed"]
