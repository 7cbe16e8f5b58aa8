"""Costly frames of every message and role on real sockets of a buffer and a hub with keys."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from fakes.costly_frames import costly_bodies
from fakes.crash_run import BufferProcess
from fakes.hostile_peer import ENDS, HostilePeer, begin_peak, costly_bytes, memory
from fakes.slowness import limit

from umbra.proto import messages as m
from umbra.proto.access import KEY_ROLES, SOCKETS, may_connect
from umbra.proto.net.keys import make_keys

WAIT_S = limit(30.0)
LEGITIMATE_CPU_S = 1.0  # of the service, until it has answered somebody who is honest
TIMES = 4
SPARE = 16 << 20
KEPT = 96 << 20  # of a service that began with 35 MiB
MOST_BYTES = 1 << 20  # of any other: larger ones cost no more per byte


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "run" / "keys")
    return tmp_path / "run" / "keys"


@pytest.fixture
def buffer(tmp_path: Path, keys: Path) -> Iterator[BufferProcess]:
    process = BufferProcess(tmp_path)
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


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process so far: no load of the machine makes it more."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def attack(
    pid: int,
    context: zmq.Context[zmq.Socket[bytes]],
    keys: Path,
    server: m.Role,
    endpoints: dict[str, str],
    legitimate: HostilePeer,
) -> int:
    """Throw all there is at a process, each by the first role that may, or as large as no role
    before it could; how many frames it took.
    """
    thrown, levels, limits = 0, list[int](), dict[tuple[str, str], int]()
    for role in KEY_ROLES:
        for on, endpoint in endpoints.items():
            if not may_connect(role, on):
                continue
            attacker = HostilePeer(context, keys, role, endpoint, server, f"evil-{role}")
            if on == "control" and role not in ("buffer", "weight_hub", "operator"):
                join = m.Join(role=role, name=attacker.name, pid=1, host="h")
                assert isinstance(attacker.call(join), m.Welcome)
            for cls in SOCKETS[on]:
                limit = costly_bytes(cls, role, MOST_BYTES)
                if limit <= limits.get((on, cls.__name__), 0):
                    continue
                limits[on, cls.__name__] = limit
                sender = "nobody" if cls in ENDS else attacker.name
                for body in costly_bodies(cls, limit):
                    before = begin_peak(pid)
                    attacker.throw(cls.__name__, body, sender)
                    grown = memory(pid, "VmHWM") - before
                    assert grown <= TIMES * len(body) + SPARE, (role, cls, body[:60], grown)
                    thrown += 1
                worked = cpu_s(pid)
                assert isinstance(legitimate.call(m.Ping()), m.Pong)
                assert cpu_s(pid) - worked < LEGITIMATE_CPU_S, (role, cls)
            attacker.close()
        levels.append(memory(pid, "VmRSS"))
    assert levels[-1] - levels[0] < SPARE, levels
    return thrown


@pytest.mark.timeout(900)
def test_no_frame_costs_a_service_more_than_it_is(
    keys: Path, buffer: BufferProcess, hub: subprocess.Popen[bytes]
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        honest = HostilePeer(context, keys, "monitor", buffer.broker, "buffer", "honest")
        welcome = honest.call(m.Join(role="monitor", name="honest", pid=1, host="h"))
        assert isinstance(welcome, m.Welcome)
        until = time.monotonic() + WAIT_S
        while not (status := honest.call(m.StatusRequest())).weights:  # type: ignore[union-attr]
            assert time.monotonic() < until, "the hub has not joined"
            time.sleep(0.1)
        assert isinstance(status, m.Status)
        at_hub = HostilePeer(context, keys, "monitor", status.weights, "weight_hub", "honest")
        assert isinstance(at_hub.call(m.Ping()), m.Pong)
        at_buffer = {"control": buffer.broker, "data": welcome.data}
        targets: list[tuple[int, m.Role, dict[str, str], HostilePeer]] = [
            (buffer.popen.pid, "buffer", at_buffer, honest),
            (hub.pid, "weight_hub", {"weights": status.weights}, at_hub),
        ]
        for pid, server, endpoints, legitimate in targets:
            assert attack(pid, context, keys, server, endpoints, legitimate) > 100
            assert memory(pid, "VmRSS") < KEPT, "it is kept after its sender is gone"
        assert isinstance(honest.call(m.StatusRequest()), m.Status)
        assert buffer.popen.poll() is None
        assert hub.poll() is None
    finally:
        context.destroy(linger=0)
