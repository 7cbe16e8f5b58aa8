"""Bad input on the real socket: counted, named, answered, and nothing else happens."""

import random
from pathlib import Path

import msgpack
from fakes.broker_world import trajectory
from fakes.costly_frames import mutate
from fakes.crash_run import Peer, crash_run, memory
from fakes.slowness import until

from umbra.proto import messages as m
from umbra.proto import sockets
from umbra.proto.codec import Encoder
from umbra.proto.records import Task
from umbra.proto.sockets import Context

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
    with crash_run(tmp_path, seed=11) as run:
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
        run.work(0.5)
        before = run.version
        until(lambda: run.version > before, "honest peers are served on", run.turn)
        run.finish()
