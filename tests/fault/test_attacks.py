"""A run among attackers, with keys and without: it goes on, and each is counted and named."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import msgpack
import pytest
from fakes.broker_world import trajectory
from fakes.costly_frames import mutate
from fakes.crash_run import CrashRun, Peer, memory
from fakes.keys import of
from fakes.slowness import limit

from umbra.proto import messages as m
from umbra.proto import sockets
from umbra.proto.codec import Encoder
from umbra.proto.errors import RejectedError
from umbra.proto.net.io_thread import IoThread
from umbra.proto.net.keys import make_keys
from umbra.proto.records import Task
from umbra.proto.sockets import Context

WAIT_S = limit(30.0)


CONNECTIONS = 300
GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" * 32
HUGE_COMMAND = b"\x06" + (200 << 20).to_bytes(8, "big")  # a handshake command of 200 MiB to come


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "run" / "keys")  # where the buffer looks for them by itself
    return tmp_path / "run" / "keys"


@pytest.fixture
def run(tmp_path: Path, keys: Path) -> Iterator[CrashRun]:
    with closing(CrashRun(tmp_path, seed=3, keys=keys)) as made:
        yield made


def still_works(run: CrashRun) -> m.Status:
    """Honest peers train on, and the run can be brought to its end; its status before."""
    run.train(5)
    status = run.status()
    run.finish()
    return status


def test_a_generators_key_decides_nothing_over_the_run(run: CrashRun, keys: Path) -> None:
    """It claims to be the trainer, under the trainer's own name and incarnation."""
    run.work(0.3)
    members = run.status().members
    (trainer,) = (member for member in members if member.role == "trainer")
    (victim, *_) = (member for member in members if member.role == "generator")

    def join(role: m.Role) -> m.Join:
        return m.Join(role=role, name=trainer.name, pid=1, host="h")

    beat = m.Heartbeat(state="ready", activity="x", progress=1, idle_s=0.0)
    for posing_as, endpoint, body, code in (
        (trainer, run.data_endpoint, m.CommitBatch(step=run.version + 1), "not_allowed"),
        (trainer, run.data_endpoint, m.FinishRun(reason="mine"), "not_allowed"),
        (trainer, run.buffer.broker, join("trainer"), "not_allowed"),
        (trainer, run.buffer.broker, join("generator"), "name_taken"),
        (trainer, run.buffer.broker, m.Leave(reason="mine"), "not_allowed"),
        (trainer, run.buffer.broker, beat, "not_allowed"),
        (victim, run.buffer.broker, m.Leave(reason="mine"), "not_allowed"),
    ):
        link = IoThread(posing_as.name, posing_as.incarnation, security=of(keys, "generator"))
        with closing(link), pytest.raises(RejectedError) as refused:
            link.channel(endpoint, "buffer").call(body, m.Ok, timeout_s=WAIT_S)
        assert refused.value.code == code, body
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


FRAMES = 80_000
GROWTH = 30 << 20  # allocators need some; 80,000 leaked messages would take far more


HEADERS: list[tuple[str, object]] = [
    ("major", 2), ("minor", 99), ("sender", "x" * 300), ("sender", "x" * 5000), ("incarnation", ""),
    ("id", -1), ("id", 1 << 39), ("type", "Nothing"), ("reply_to", 7),
]  # fmt: skip


def seeds() -> list[list[bytes]]:
    encoder = Encoder("outsider", "outsider-1")
    task = Task(sample_id="s-1", group_id="g-0", prompt_id="1", attempt=1, row={}, lease_s=1.0)
    made = trajectory(task, 0, 1)
    returned = m.ReturnedSample(sample_id="s-1", attempt=1, reason="x", partial=made)
    bodies = [
        m.Join(role="generator", name="outsider", pid=1, host="h"),
        m.Heartbeat(state="ready", activity="x", progress=1, idle_s=0.0),
        m.LeaseTasks(capacity=4, version=0, wait_s=0.0),
        m.SubmitResults(trajectories=[made, made]),
        m.ReturnTasks(samples=[returned]),
        m.RenewLeases(leases=[("s-1", 1)]),
        m.LeaseBatch(step=1, wait_s=0.0),
        m.CommitBatch(step=1),
    ]
    return [encoder.encode(body)[1] for body in bodies]


def mutated(frames: list[bytes], chance: random.Random) -> list[bytes]:
    frames = list(frames)
    match chance.randrange(9):
        case 0:  # too few or too many frames
            return frames[:1] if chance.random() < 0.5 else [*frames, b"more"]
        case 1:  # not MessagePack at all
            frames[chance.randrange(2)] = chance.randbytes(chance.randrange(64))
        case 2:  # another version, sender, incarnation or id, far away or out of order
            header = msgpack.unpackb(frames[0]) | dict([chance.choice(HEADERS)])
            frames[0] = msgpack.packb(header)
        case 3:  # a wrong type, or a field left out
            body = msgpack.unpackb(frames[1])
            key = chance.choice(list(body))
            if chance.random() < 0.5:
                body[key] = chance.choice([None, -1, "text", [], {}, 2**63, float("nan")])
            else:
                del body[key]
            frames[1] = msgpack.packb(body)
        case 4:  # as it was: replayed
            pass
        case _:
            which = chance.randrange(len(frames))
            frames[which] = mutate(frames[which], chance)
    return frames


def test_no_message_hurts(tmp_path: Path, zmq_context: Context) -> None:
    """While honest peers work, an outsider sends mutated frames to both sockets."""
    chance = random.Random(11)
    base = seeds()
    answers = early = 0
    with closing(CrashRun(tmp_path, seed=11)) as run:
        pid = run.buffer.pid
        outsiders = [
            sockets.dealer(zmq_context, endpoint, b"outsider")
            for endpoint in (run.buffer.broker, run.data_endpoint)
        ]
        for number in range(FRAMES):
            outsider = outsiders[number % 2]
            outsider.send_multipart(mutated(chance.choice(base), chance))
            while outsider.poll(0):
                answers += 1
                outsider.recv_multipart()
            if number % 100 == 0:
                run.turn()
            if number == FRAMES // 5:
                early = memory(pid, "VmRSS")
        status = run.status()
        assert memory(pid, "VmRSS") - early < GROWTH
        counted = sum(status.counters.get(code, 0) for code in ("malformed", "frames", "protocol"))
        assert counted > FRAMES // 10
        named = ("malformed", "frames", "protocol", "too_large", "unknown_type", "resent")
        assert all(status.counters.get(code) for code in named), status.counters
        assert answers > FRAMES // 10
        for outsider in outsiders:
            outsider.close(linger=0)
        # Its sound messages have made the outsider a member: it leaves what it was given.
        member = Peer(zmq_context, run.buffer.broker, "generator", "outsider")
        member.call(m.Leave(reason="done"), "control")
        member.close()
        still_works(run)
