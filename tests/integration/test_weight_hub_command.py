"""`umbra weight-hub` as a process: it serves, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from fakes.commands import UMBRA, call
from fakes.hub_bench import (
    WAIT_S,
    Bench,
    load,
    publish,
)

from umbra.proto import messages as m
from umbra.proto.errors import UsageError
from umbra.proto.net.server import Server
from umbra.services.weights.arena import SHM


@pytest.fixture
def broker(
    zmq_context: zmq.Context[zmq.Socket[bytes]], run_id: str
) -> Iterator[tuple[str, dict[str, str]]]:
    """A broker that lets everyone join; its address, and the endpoints that were announced."""
    server = Server(zmq_context, "broker", "b1")
    endpoint = server.bind("control", "tcp://127.0.0.1:*", m.CONTROL)
    data = server.bind("data", "tcp://127.0.0.1:*", m.DATA)
    events_in, events_out = server.relay_events("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    announced: dict[str, str] = {}
    stop = threading.Event()

    def main() -> None:
        while not stop.is_set():
            for request in server.poll(0.02):
                match request.body:
                    case m.Join(endpoints=endpoints):
                        announced.update(endpoints)
                        welcome = m.Welcome(
                            run_id=run_id,
                            heartbeat_s=0.1,
                            data=data,
                            events_in=events_in,
                            events_out=events_out,
                        )
                        server.reply(request, welcome)
                    case m.Heartbeat():
                        server.reply(request, m.HeartbeatAck(version=0))
                    case m.Leave():
                        server.reply(request, m.Ok())
                    case _:
                        pass

    thread = threading.Thread(target=main)
    thread.start()
    yield endpoint, announced
    stop.set()
    thread.join(WAIT_S)
    server.close()


def test_the_command_serves_and_leaves_nothing_behind(
    broker: tuple[str, dict[str, str]], bench: Bench, run_id: str
) -> None:
    address, announced = broker
    read, write = os.pipe()
    command = [*UMBRA, "weight-hub", "--broker", address]
    with subprocess.Popen(
        command,
        pass_fds=[write],
        env={**os.environ, "UMBRA_READY_FD": str(write)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(write)
        with os.fdopen(read) as ready:
            facts = json.loads(ready.readline())
        assert facts == announced
        bench.endpoint = facts["weights"]
        assert bench.channel("probe").call(m.Ping(), m.Pong, timeout_s=WAIT_S).role == "weight_hub"
        publisher = bench.publisher()
        receiver = bench.receiver("gen-0")
        publish(publisher, 0)
        load(receiver, 0)
        assert list(SHM.glob(f"umbra-{run_id}-*"))
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode in (0, -signal.SIGTERM), errors
    assert not list(SHM.glob(f"umbra-{run_id}-*"))


def test_the_command_refuses_a_plane_that_is_not_there(tmp_path: Path) -> None:
    command = [*UMBRA, "weight-hub", "--set", "weight_hub.plane=nccl"]
    done = call([*command, "--broker", "tcp://127.0.0.1:1"], cwd=tmp_path)
    assert done.returncode == UsageError.exit_code, done.stderr
    assert "weight_hub.plane" in done.stderr
    assert "Traceback" not in done.stderr
