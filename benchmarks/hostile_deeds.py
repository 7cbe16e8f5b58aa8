"""What hostile peers do in `hostile.py`: each deed is of one key's holder, against one service."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import zmq
from fakes.broker_world import trajectory
from fakes.costly_frames import costly_bodies
from fakes.hostile_peer import (
    ENDS,
    REFUSED_BYTES,
    HostilePeer,
    begin_peak,
    costly_bytes,
    header_of,
    memory,
)

from umbra.proto import sockets
from umbra.proto.access import KEY_ROLES, SENDERS, SOCKETS, KeyRole, may_connect
from umbra.proto.codec import Encoder
from umbra.proto.messages import (
    Event,
    Join,
    LeaseSamples,
    Message,
    Ping,
    Prepare,
    ReturnedSample,
    ReturnSamples,
    Role,
    SampleLeases,
    Status,
    StatusRequest,
    SubmitTrajectories,
    Subscribe,
)
from umbra.proto.net.keys import Security, load_keys, make_keys
from umbra.proto.records import Sampling, pack_float32, pack_int32
from umbra.services.weights.manifest import build_manifest

GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" * 32
RUBBISH = (b"GET / HTTP/1.1\r\n\r\n", GREETING[:40], GREETING + b"x" * 4096, b"")
STRANGER = "no key"
# What a key may do by right: done soundly it is no attack, but the end of the run, say.
BY_RIGHT: tuple[KeyRole, ...] = ("trainer", "operator", "buffer", "weight_hub")
POISON: tuple[dict[str, Any], ...] = (
    {"prompt_ids": b""},
    {"response_ids": pack_int32([7, 2**31 - 1])},
    {"response_ids": pack_int32([7, -1])},
    {"sampling": Sampling(temperature=0.0)},
    {"reward": 1e308},
    {"logprobs": pack_float32([-0.5, 5.0])},
    {"turns": 2**63},
    {"finish_reason": "x\nERROR all is lost"},
    {"generator": "\x1b[2J"},
)


@dataclass
class Target:
    """A service under attack."""

    role: Role
    pid: int
    endpoints: dict[str, str]  # by socket


@dataclass
class Done:
    """What a deed came to: frames and bytes that were sent, answers by kind."""

    frames: int = 0
    sent_bytes: int = 0
    answers: Counter[str] = field(default_factory=Counter[str])
    beyond: int = 0  # bytes that a frame took beyond four times its size, at most


Run = Callable[["Ground"], Done]


@dataclass(frozen=True)
class Deed:
    """One thing that the holder of a key does to `server`; what it is called in the table."""

    role: str
    what: str
    server: Role
    run: Run


class Ground:
    """The run that is attacked, and the connections to it."""

    def __init__(
        self, keys: Path, scratch: Path, targets: dict[Role, Target], *, most: int, many: int
    ) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, 8192)
        self.keys = keys
        self.targets = targets
        self.most = most  # bytes of a frame
        self.many = many  # connections at once
        self.others = scratch / "other-keys"
        if not self.others.exists():
            make_keys(self.others)
        self._peers: dict[tuple[str, str, str], HostilePeer] = {}

    def peer(self, role: KeyRole, on: str, name: str = "") -> HostilePeer:
        """A connection with the key of `role`; its holder joins first where it may."""
        server: Role = "weight_hub" if on in ("weights", "buckets") else "buffer"
        name = name or f"evil-{role}"
        key = (role, on, name)
        if key not in self._peers:
            endpoint = self.targets[server].endpoints[on]
            made = HostilePeer(self.context, self.keys, role, endpoint, server, name)
            self._peers[key] = made
            if on == "control" and role not in ("buffer", "weight_hub", "operator"):
                made.call(Join(role=role, name=name, pid=1, host="h", package_version="0"))
        return self._peers[key]

    def forget(self) -> None:
        """Close all connections."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def close(self) -> None:
        """The same for good."""
        self.forget()
        self.context.destroy(linger=0)


def deeds() -> list[Deed]:
    """All of them: those of the schema, one for each key and message, come last."""
    return [*_contents(), *_strangers(), *_floods(), *_schema()]


def _schema() -> Iterator[Deed]:
    for role in KEY_ROLES:
        for on, kinds in SOCKETS.items():
            if on not in ("control", "data", "weights") or not may_connect(role, on):
                continue
            server: Role = "weight_hub" if on == "weights" else "buffer"
            for kind in kinds:
                yield Deed(role, kind.__name__, server, partial(_costly, role, on, kind))


def _costly(role: KeyRole, on: str, kind: type[Message], ground: Ground) -> Done:
    """Costly frames of one message; what a key may do by right is left to its holder."""
    peer, done = ground.peer(role, on), Done()
    pid = ground.targets["weight_hub" if on == "weights" else "buffer"].pid
    bodies = _bodies(kind, costly_bytes(kind, role, ground.most))
    if role in BY_RIGHT and role in SENDERS.get(kind, ()):
        bodies = bodies[1:]
    for body in bodies:
        before = begin_peak(pid)
        peer.throw(kind.__name__, body, "nobody" if kind in ENDS else peer.name)
        grown = memory(pid, "VmHWM") - before
        done.frames += 1
        done.sent_bytes += len(body)
        done.beyond = max(done.beyond, grown - 4 * len(body))
    return _answered(peer, done)


def _bodies(kind: type[Message], limit: int) -> list[bytes]:
    return _small(kind) if limit == REFUSED_BYTES else list(costly_bodies(kind, limit))


@cache
def _small(kind: type[Message]) -> list[bytes]:
    """They take longer to make than to be refused."""
    return list(costly_bodies(kind, REFUSED_BYTES))


def _answered(peer: HostilePeer, done: Done) -> Done:
    done.answers += peer.answers
    peer.answers.clear()
    return done


def _thrown(peer: HostilePeer, *messages: tuple[str, dict[str, Any], str]) -> Done:
    """Messages with contents that no honest process sends: type, body, sender."""
    done = Done()
    for kind, body, sender in messages:
        packed = msgpack.packb(body)
        assert isinstance(packed, bytes)
        peer.throw(kind, packed, sender or peer.name)
        done.frames += 1
        done.sent_bytes += len(packed)
    return _answered(peer, done)


def _contents() -> Iterator[Deed]:
    yield Deed("generator", "poisoned trajectories", "buffer", _poison)
    yield Deed("generator", "stolen names", "buffer", _steal)
    yield Deed("generator", "stolen names", "weight_hub", _steal_at_hub)
    yield Deed("generator", "claims to be a relay", "weight_hub", _claim)
    yield Deed("generator", "subscribes and fetches without end", "weight_hub", _fetch)
    yield Deed("trainer", "manifests that make no sense", "weight_hub", _layouts)
    yield Deed("monitor", "names and figures that forge", "buffer", _forge)
    yield Deed("generator", "telemetry without measure", "buffer", _tell)
    yield Deed("operator", "misspelt orders", "buffer", _misspell)


def _poison(ground: Ground) -> Done:
    control, data = ground.peer("generator", "control"), ground.peer("generator", "data")
    control.call(Join(role="generator", name=control.name, pid=1, host="h", package_version="0"))
    done = Done()
    for changes in POISON:
        status = control.call(StatusRequest())
        assert isinstance(status, Status)
        leases = data.call(LeaseSamples(capacity=1, version=status.version, wait_s=3.0))
        if not isinstance(leases, SampleLeases) or not leases.tasks:
            done.answers["no lease"] += 1
            continue
        (task,) = leases.tasks
        made = trajectory(task, status.version, **changes)
        body = msgspec.msgpack.encode(SubmitTrajectories(trajectories=[made]))
        data.throw("SubmitTrajectories", body, data.name)
        back = ReturnedSample(sample_id=task.sample_id, attempt=task.attempt, reason="evil")
        data.call(ReturnSamples(samples=[back]))
        done.frames += 1
        done.sent_bytes += len(body)
    return _answered(data, done)


def _steal(ground: Ground) -> Done:
    peer = ground.peer("generator", "control")
    beat = {"state": "ready", "activity": "x", "progress": 1, "idle_s": 0.0}
    hello = {"pid": 1, "host": "h", "package_version": "0"}
    return _thrown(
        peer,
        ("Join", hello | {"role": "trainer", "name": "trainer"}, "trainer"),
        ("Join", hello | {"role": "generator", "name": "trainer"}, "trainer"),
        ("Heartbeat", beat, "trainer"),
        ("Heartbeat", beat, "generator-0"),
        ("Leave", {"reason": "mine"}, "generator-0"),
        ("Leave", {"reason": "mine"}, "trainer"),
    )


def _steal_at_hub(ground: Ground) -> Done:
    ready = {"epoch": 1, "version": 1, "wire_s": 0.0, "stage_s": 0.0, "error": "mine"}
    hello = {"host": "h", "planes": ["tcp"]}
    return _thrown(
        ground.peer("generator", "weights"),
        ("Ready", ready, "generator-0"),
        ("Subscribe", hello, "trainer"),
        ("Publish", {"version": 9, "slot": 0, "checksums": []}, "trainer"),
    )


def _claim(ground: Ground) -> Done:
    claim = {"host": "h", "planes": ["tcp"], "serves": "tcp://1.2.3.4:5", "buckets": "tcp://h:6"}
    return _thrown(ground.peer("generator", "weights"), ("Subscribe", claim, ""))


def _fetch(ground: Ground) -> Done:
    """Subscribes from another host, answers no push, and fetches in frames of one byte."""
    name = f"evil-fetcher-{time.monotonic_ns()}"
    peer, done = ground.peer("generator", "weights", name), Done(frames=1)
    peer.call(Subscribe(host="elsewhere", planes=["tcp"]))
    source, until = "", time.monotonic() + 5
    while not source and (left := until - time.monotonic()) > 0:
        pushed = peer.pushed(left)
        source = pushed.source if isinstance(pushed, Prepare) else ""
    if not source:
        done.answers["no push"] += 1
        return _answered(peer, done)
    with closing(
        HostilePeer(ground.context, ground.keys, "generator", source, "weight_hub", name)
    ) as buckets:
        order = {"wanted": [0] * 32768, "contents": [1] * 32768, "credit_bytes": 1 << 62}
        orders = [
            ("FetchBuckets", order | {"number": n, "frame_bytes": size}, "")
            for n, size in enumerate((1, 1 << 10, 1 << 62, -1))
        ]
        fetched = _thrown(buckets, *orders)
    done.frames += fetched.frames
    done.sent_bytes += fetched.sent_bytes
    done.answers += fetched.answers
    return _answered(peer, done)


def _layouts(ground: Ground) -> Done:
    good = build_manifest([("a", "F32", [64])], 1024)
    manifest: dict[str, Any] = msgspec.to_builtins(good)
    (tensor,) = manifest["tensors"]
    wrong = (
        {"tensors": [tensor | {"shape": [2**62] * 4}] * 1000},
        {"tensors": [tensor | {"dtype": "X9", "nbytes": -16}]},
        {"tensors": []},
        {"total_bytes": 1 << 62},
    )
    messages = [("RegisterManifest", {"manifest": manifest | one}, "") for one in wrong]
    return _thrown(ground.peer("trainer", "weights"), *messages)


def _forge(ground: Ground) -> Done:
    beat = {"state": "ready", "activity": "x", "progress": 1, "idle_s": 0.0}
    hello = {"role": "monitor", "pid": 1, "host": "h", "package_version": "0"}
    done = _thrown(
        ground.peer("monitor", "control"),
        ("Join", hello | {"name": "a\nERROR all is lost"}, ""),
        ("Join", hello | {"name": "\x1b[2J"}, ""),
        ("Join", hello | {"name": "a", "host": "x" * 300}, ""),
        ("Heartbeat", beat | {"stats": {"i": float("inf")}}, ""),
        ("Heartbeat", beat | {"idle_s": float("nan")}, ""),
        ("Heartbeat", beat | {"stats": {f"{n}": 1.0 for n in range(5000)}}, ""),
    )
    security = Security(load_keys(ground.keys, "monitor"))
    endpoint = ground.targets["buffer"].endpoints["events_out"]
    watcher = sockets.subscriber(ground.context, endpoint, [], security.connecting("buffer"))
    for number in range(ground.many):
        watcher.set(zmq.SUBSCRIBE, b"%0128d" % number)
    done.frames += ground.many
    time.sleep(0.5)
    watcher.close(linger=0)
    return done


def _tell(ground: Ground) -> Done:
    """Telemetry as large as it may be, rubbish, and messages of many frames; nobody answers."""
    curve = Security(load_keys(ground.keys, "generator")).connecting("buffer")
    endpoint = ground.targets["buffer"].endpoints["events_in"]
    teller, done = sockets.publisher(ground.context, endpoint, curve), Done()
    time.sleep(1.0)  # what is sent before it is connected is dropped
    bodies = [*_bodies(Event, costly_bytes(Event, "generator", ground.most)), b"\xc1", b""]
    for body in bodies:
        for frames in ([b"step", header_of("Event"), body], [b"step", *[body] * 20]):
            teller.send_multipart(frames)
            done.frames += len(frames)
            done.sent_bytes += sum(map(len, frames))
    time.sleep(0.5)
    teller.close(linger=0)
    return done


def _misspell(ground: Ground) -> Done:
    return _thrown(
        ground.peer("operator", "control"),
        ("DrainRequest", {"membr": "generator-0"}, ""),
        ("DrainRequest", {"member": "nobody-of-this-name"}, ""),
        ("PauseRequest", {"reson": "x"}, ""),
        ("InterruptRequest", {"sample": ["s-1"]}, ""),
        ("EvalRequest", {"x": 1}, ""),
    )


def _strangers() -> Iterator[Deed]:
    for server in ("buffer", "weight_hub"):
        yield Deed(STRANGER, "rubbish and half a handshake", server, partial(_rubbish, server))
        yield Deed(STRANGER, "no key, or of another run", server, partial(_locked_out, server))


def _address(ground: Ground, server: Role) -> tuple[str, int]:
    endpoint = next(iter(ground.targets[server].endpoints.values()))
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def _rubbish(server: Role, ground: Ground) -> Done:
    done = Done()
    opened: list[socket.socket] = []
    for number in range(100):
        one = socket.create_connection(_address(ground, server), timeout=30)
        one.setblocking(False)
        opened.append(one)
        with suppress(BlockingIOError, ConnectionError):
            done.sent_bytes += one.send(RUBBISH[number % len(RUBBISH)] + os.urandom(number))
        done.frames += 1
    for one in opened:
        one.close()
    return done


def _locked_out(server: Role, ground: Ground) -> Done:
    done = Done()
    wrong = Security(load_keys(ground.others, "trainer")).connecting(server)
    endpoint = next(iter(ground.targets[server].endpoints.values()))
    strangers = [
        sockets.dealer(ground.context, endpoint, b"stranger-%d" % n, wrong if n % 2 else None)
        for n in range(50)
    ]
    for one in strangers:
        with suppress(zmq.Again):  # between two tries to connect there is nothing to send to
            one.send_multipart(Encoder("stranger", "s1").encode(Ping())[1], zmq.NOBLOCK)
            done.frames += 1
    time.sleep(1.0)
    for one in strangers:
        done.answers["let in"] += bool(one.poll(0))
        one.close(linger=0)
    done.answers += Counter()  # without what is 0
    return done


def _floods() -> Iterator[Deed]:
    yield Deed("generator", "messages of many parts", "buffer", _parts)
    yield Deed("generator", "connections", "buffer", partial(_connections, "generator"))
    yield Deed(STRANGER, "connections", "buffer", partial(_connections, None))


def _parts(ground: Ground) -> Done:
    peer, done = ground.peer("generator", "control"), Done()
    for parts in ([b""] * (20 * ground.many), [bytes(1 << 16)] * 128):
        peer.throw("Ping", b"\x80", peer.name, parts)
        done.frames += len(parts)
        done.sent_bytes += sum(map(len, parts))
    return _answered(peer, done)


def _connections(role: KeyRole | None, ground: Ground) -> Done:
    """Many that say nothing, for a while."""
    if role is None:
        raw = [
            socket.create_connection(_address(ground, "buffer"), timeout=30)
            for _ in range(ground.many)
        ]
        time.sleep(1.0)
        for one in raw:
            one.close()
        return Done(frames=len(raw))
    curve = Security(load_keys(ground.keys, role)).connecting("buffer")
    endpoint = ground.targets["buffer"].endpoints["control"]
    held = [
        sockets.dealer(ground.context, endpoint, b"idle-%d" % number, curve)
        for number in range(ground.many)
    ]
    for one in held:
        one.send_multipart(Encoder("idle", "i1").encode(Ping())[1])
    done = Done(frames=len(held))
    for one in held:
        done.answers["Pong"] += bool(one.poll(30_000))
    for one in held:
        one.close(linger=0)
    return done


def find_targets(broker: str, keys: Path, pids: dict[str, int]) -> dict[Role, Target]:
    """The services of a run, and where their sockets are."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with closing(HostilePeer(context, keys, "monitor", broker, "buffer", "surveyor")) as surveyor:
        hello = Join(role="monitor", name="surveyor", pid=1, host="h", package_version="0")
        welcome: Any = surveyor.call(hello)
        while not (status := surveyor.call(StatusRequest())).weights:  # type: ignore[union-attr]
            time.sleep(0.2)
    context.destroy(linger=0)
    assert isinstance(status, Status)
    at_buffer = {
        "control": broker,
        "data": welcome.data,
        "events_in": welcome.events_in,
        "events_out": welcome.events_out,
    }
    return {
        "buffer": Target("buffer", pids["buffer"], at_buffer),
        "weight_hub": Target("weight_hub", pids["weight-hub"], {"weights": status.weights}),
    }
