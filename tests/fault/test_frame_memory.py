"""Costly frames of every message and role on real sockets of a buffer and a hub with keys."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import zmq
from fakes.costly_frames import costly_bodies
from fakes.crash_run import CONFIG, BufferProcess
from fakes.slowness import seconds

from umbra.proto import sockets
from umbra.proto.access import KEY_ROLES, SOCKETS, KeyRole, may_connect
from umbra.proto.codec import Encoder, decode
from umbra.proto.messages import (
    FinishRun,
    Join,
    Leave,
    Message,
    Nack,
    Ping,
    Pong,
    Role,
    Status,
    StatusRequest,
    Welcome,
)
from umbra.proto.sizes import allowed_bytes
from umbra.proto.version import PROTOCOL_MAJOR, PROTOCOL_MINOR
from umbra.services.runtime.keys import Security, load_keys, make_keys

WAIT_S = seconds(30.0)
LEGITIMATE_WAIT_S = seconds(1.0)
TIMES = 4
SPARE = 16 << 20
KEPT = 96 << 20  # of a service that began with 35 MiB
REFUSED_BYTES = 64 << 10  # of a frame that its role may not send
MOST_BYTES = 2 << 20  # of any other: larger ones cost no more per byte
ENDS = (FinishRun, Leave)  # said by nobody whom the run knows


def memory(pid: int, which: str) -> int:
    """`VmRSS` or `VmHWM` (the peak) of a process, bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(which):
            return int(line.split()[1]) << 10
    raise AssertionError(which)


class Client:
    """Somebody with a key on one socket of a server."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: Path,
        role: KeyRole,
        endpoint: str,
        server: Role,
        name: str,
    ) -> None:
        curve = Security(load_keys(keys, role)).connecting(server)
        self.name = name
        self.socket = sockets.dealer(context, endpoint, f"{name}.0".encode(), curve)
        self._encoder = Encoder(name, f"{name}-1")
        self._next = 1 << 20

    def call(self, body: Message) -> Message:
        number, frames = self._encoder.encode(body)
        self.socket.send_multipart(frames)
        return self._answer(number)

    def throw(self, cls: type[Message], body: bytes, sender: str) -> None:
        """Send `body` as a message of `cls`, and wait until the server is through with it."""
        for kind, content in ((cls.__name__, body), ("Nothing", b"\x80")):
            self._next += 1
            header = {
                "major": PROTOCOL_MAJOR, "minor": PROTOCOL_MINOR, "type": kind, "id": self._next,
                "sender": sender, "incarnation": f"{self.name}-1",
            }  # fmt: skip
            self.socket.send_multipart([msgpack.packb(header), content])
        answer = self._answer(self._next)  # a peer's messages are done in their order
        assert isinstance(answer, Nack) and answer.code == "unknown_type"

    def _answer(self, number: int) -> Message:
        until = time.monotonic() + WAIT_S
        while (left := until - time.monotonic()) > 0:
            if self.socket.poll(round(1000 * left)):
                envelope = decode(self.socket.recv_multipart())
                if envelope.header.reply_to == number:
                    return envelope.body
        raise AssertionError(f"no answer to {self.name}")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "run" / "keys")
    return tmp_path / "run" / "keys"


@pytest.fixture
def buffer(tmp_path: Path, keys: Path) -> Iterator[BufferProcess]:
    process = BufferProcess(tmp_path, CONFIG.replace("dead_after_s = 60.0", "dead_after_s = 900.0"))
    yield process
    process.close()


@pytest.fixture
def hub(tmp_path: Path, keys: Path, buffer: BufferProcess) -> Iterator[subprocess.Popen[bytes]]:
    with (tmp_path / "hub.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "umbra", "weight-hub", "--broker", buffer.broker,
             "--keys", str(keys), "--name", "the-hub"],
            stdout=log, stderr=log, env={**os.environ},
        )  # fmt: skip
    yield process
    process.kill()
    process.wait()


def attack(
    pid: int,
    context: zmq.Context[zmq.Socket[bytes]],
    keys: Path,
    server: Role,
    endpoints: dict[str, str],
    legitimate: Client,
) -> int:
    """Throw all there is at a process; how many frames it took."""
    thrown, levels = 0, list[int]()
    for role in KEY_ROLES:
        for on, endpoint in endpoints.items():
            if not may_connect(role, on):
                continue
            attacker = Client(context, keys, role, endpoint, server, f"evil-{role}")
            if on == "control" and role not in ("buffer", "weight_hub", "operator"):
                join = Join(role=role, name=attacker.name, pid=1, host="h", package_version="0")
                assert isinstance(attacker.call(join), Welcome)
            for cls in SOCKETS[on]:
                limit = min(allowed_bytes(cls, role), MOST_BYTES) or REFUSED_BYTES
                sender = "nobody" if cls in ENDS else attacker.name
                for body in costly_bodies(cls, limit):
                    before = memory(pid, "VmRSS")
                    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
                    attacker.throw(cls, body, sender)
                    grown = memory(pid, "VmHWM") - before
                    assert grown <= TIMES * len(body) + SPARE, (role, cls, body[:60], grown)
                    thrown += 1
                began = time.monotonic()
                assert isinstance(legitimate.call(Ping()), Pong)
                assert time.monotonic() - began < LEGITIMATE_WAIT_S
            attacker.socket.close(linger=0)
        levels.append(memory(pid, "VmRSS"))
    assert levels[-1] - levels[0] < SPARE, levels
    return thrown


@pytest.mark.fault
@pytest.mark.timeout(600)
def test_no_frame_costs_a_service_more_than_it_is(
    keys: Path, buffer: BufferProcess, hub: subprocess.Popen[bytes]
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        honest = Client(context, keys, "monitor", buffer.broker, "buffer", "honest")
        welcome = honest.call(
            Join(role="monitor", name="honest", pid=1, host="h", package_version="0")
        )
        assert isinstance(welcome, Welcome)
        until = time.monotonic() + WAIT_S
        while not (status := honest.call(StatusRequest())).weights:  # type: ignore[union-attr]
            assert time.monotonic() < until, "the hub has not joined"
            time.sleep(0.1)
        assert isinstance(status, Status)
        at_hub = Client(context, keys, "monitor", status.weights, "weight_hub", "honest")
        assert isinstance(at_hub.call(Ping()), Pong)
        at_buffer = {"control": buffer.broker, "data": welcome.data}
        targets: list[tuple[int, Role, dict[str, str], Client]] = [
            (buffer.popen.pid, "buffer", at_buffer, honest),
            (hub.pid, "weight_hub", {"weights": status.weights}, at_hub),
        ]
        for pid, server, endpoints, legitimate in targets:
            assert attack(pid, context, keys, server, endpoints, legitimate) > 100
            assert memory(pid, "VmRSS") < KEPT, "it is kept after its sender is gone"
        assert isinstance(honest.call(StatusRequest()), Status)
        assert buffer.popen.poll() is None
        assert hub.poll() is None
    finally:
        context.destroy(linger=0)
