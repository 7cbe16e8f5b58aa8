"""Bad input on the real socket: counted, named, answered, and nothing else happens."""

import random
from collections import Counter
from pathlib import Path

import msgpack
import zmq
from fakes.broker_world import trajectory
from fakes.crash_run import BufferProcess, CrashRun, check
from fakes.waiting import until

from umbra.proto import messages as m
from umbra.proto import sockets
from umbra.proto.codec import Encoder, decode
from umbra.proto.records import Task

FRAMES = 80_000
GROWTH_MB = 30  # allocators need some; 80,000 leaked messages would take far more


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


def mutate(frames: list[bytes], chance: random.Random) -> list[bytes]:
    frames = list(frames)
    which = chance.randrange(len(frames))
    frame = bytearray(frames[which])
    match chance.randrange(9):
        case 0:  # flipped bits
            for _ in range(chance.randrange(1, 5)):
                frame[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)
        case 1:  # cut off
            del frame[chance.randrange(len(frame)) :]
        case 2:  # something inserted
            at = chance.randrange(len(frame))
            frame[at:at] = chance.randbytes(chance.randrange(1, 9))
        case 3:  # a length that promises gigabytes
            at = chance.randrange(len(frame))
            frame[at : at + 1] = chance.choice([b"\xdd", b"\xdf", b"\xc6", b"\xdb"]) + b"\x7f" * 4
        case 4:  # too few or too many frames
            frames = frames[:1] if chance.random() < 0.5 else [*frames, b"more"]
            which = 0
            frame = bytearray(frames[0])
        case 5:  # not MessagePack at all
            frame = bytearray(chance.randbytes(chance.randrange(64)))
        case 6:  # another version, sender, incarnation or id, far away or out of order
            header = msgpack.unpackb(frames[0])
            key, value = chance.choice(
                [
                    ("major", 2),
                    ("minor", 99),
                    ("sender", "x" * 300),
                    ("sender", "x" * 5000),  # oversized: a header has 4 KiB at most
                    ("incarnation", ""),
                    ("id", -1),
                    ("id", chance.randrange(1 << 40)),
                    ("type", "Nothing"),
                    ("reply_to", 7),
                ]
            )
            header[key] = value
            which, frame = 0, bytearray(msgpack.packb(header))
        case 7:  # a wrong type, or a field left out
            body = msgpack.unpackb(frames[1])
            if body:
                key = chance.choice(list(body))
                if chance.random() < 0.5:
                    body[key] = chance.choice([None, -1, "text", [], {}, 2**63, float("nan")])
                else:
                    del body[key]
            which, frame = 1, bytearray(msgpack.packb(body))
        case _:  # as it was: replayed
            pass
    frames[which] = bytes(frame)
    return frames


def leave(control: zmq.Socket[bytes]) -> None:
    """The outsider, which its sound messages have made a member, leaves what it was given."""
    encoder = Encoder("outsider", "outsider-1")
    encoder._next_id = 1 << 41
    number, frames = encoder.encode(m.Leave(reason="done"))
    control.send_multipart(frames)
    until(
        lambda: control.poll(0) and decode(control.recv_multipart()).header.reply_to == number,
        "the outsider has left",
        lambda: control.poll(20),
    )


def rss_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def test_no_message_hurts(tmp_path: Path) -> None:
    """While honest peers work, an outsider sends mutated frames to both sockets."""
    chance = random.Random(11)
    buffer = BufferProcess(tmp_path)
    run = CrashRun(buffer, seed=11)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        data = run.data_endpoint
        outsiders = [
            sockets.dealer(context, endpoint, b"outsider") for endpoint in (buffer.broker, data)
        ]
        base = seeds()
        answers: Counter[str] = Counter()
        early = 0.0
        for number in range(FRAMES):
            outsider = outsiders[number % 2]
            outsider.send_multipart(mutate(chance.choice(base), chance))
            while outsider.poll(0):
                answers["some"] += 1
                outsider.recv_multipart()
            if number % 100 == 0:
                run.turn()
            if number == FRAMES // 5:
                early = rss_mb(buffer.popen.pid)
        status = run.status()
        assert rss_mb(buffer.popen.pid) - early < GROWTH_MB
        counted = sum(status.counters.get(code, 0) for code in ("malformed", "frames", "protocol"))
        assert counted > FRAMES // 10
        named = ("malformed", "frames", "protocol", "too_large", "unknown_type", "resent")
        assert all(status.counters.get(code) for code in named), status.counters
        assert answers["some"] > FRAMES // 10
        leave(outsiders[0])
        run.work(0.5)
        before = run.version
        until(lambda: run.version > before, "honest peers are served on", run.turn)
        check(run, run.finish())
    finally:
        context.destroy(linger=0)
        run.close()
        buffer.close()
