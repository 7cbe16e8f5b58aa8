"""Watching a run over real sockets, with keys and without, while it is not disturbed."""

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from fakes.looks import PUSH, status
from fakes.serving import ServerThread
from fakes.slowness import limit, until

from umbra.proto.access import SOCKETS, KeyRole
from umbra.proto.messages import Heartbeat, HeartbeatAck, Join, Message, Ok, StatusRequest, Welcome
from umbra.proto.net.keys import OPEN, Security, make_keys, open_security
from umbra.proto.net.server import Request, Server
from umbra.proto.net.session import Session
from umbra.proto.records import Role
from umbra.proto.sockets import Context
from umbra.services.monitor.client import Look, Watch
from umbra.services.process.metrics import MetricsFile

WAIT_S = limit(20.0)

SecurityOf = Callable[[KeyRole], Security]


@pytest.fixture(params=["keys", "no keys"])
def security(request: pytest.FixtureRequest, tmp_path: Path) -> SecurityOf:
    if request.param == "no keys":
        return lambda _role: OPEN
    make_keys(tmp_path)
    return lambda role: open_security(str(tmp_path), [role])


class Buffer(ServerThread):
    def __init__(self, context: Context, security: Security) -> None:
        server = Server(context, "buffer", "b1", security)
        self.endpoint = server.bind("control", "tcp://127.0.0.1:*", SOCKETS["control"])
        self.events = server.bind_events("tcp://127.0.0.1:*")
        super().__init__(server, self._answer)

    def _answer(self, request: Request) -> Message:
        match request.body:
            case StatusRequest():
                return status(events=self.events)
            case Join():
                return Welcome(run_id="r", heartbeat_s=0.05, data=self.endpoint)
            case Heartbeat():
                return HeartbeatAck(version=7)
            case _:
                return Ok()


@pytest.fixture
def buffer(zmq_context: Context, security: SecurityOf) -> Iterator[Buffer]:
    with closing(Buffer(zmq_context, security("buffer"))) as made:
        yield made


def test_any_number_watch_and_see_the_same(buffer: Buffer, security: SecurityOf) -> None:
    metrics = MetricsFile(None, "generator-0")
    watches = [Watch(buffer.endpoint, security("monitor")) for _ in range(3)]
    role: Role = "generator"
    name, key = metrics.service, security(role)
    with Session(role=role, name=name, broker=buffer.endpoint, metrics=metrics, security=key):

        def both(watch: Watch) -> Look | None:
            metrics.write("push", **PUSH)
            metrics.write("span", name="decode", start=1.0, end=2.0)
            look = watch.look(WAIT_S)
            seen = {span.name for span in look.spans.get("generator-0", [])}
            return look if seen == {"push", "decode"} else None

        for watch in watches:
            with watch:
                look = until(partial(both, watch), "a look at both")  # telemetry may be lost
                assert look.pushes[0].wire_s == PUSH["wire_s"]
    senders = {key[1].partition(b".")[0] for key in buffer.server.resends._known}
    assert senders == {b"generator-0"}, "of the watchers nothing stays"


@pytest.mark.parametrize("security", ["no keys"], indirect=True)
def test_the_page_and_the_figures(buffer: Buffer) -> None:
    """Both are served at the address that is printed, until Ctrl-C."""
    command = ["--broker", buffer.endpoint, "--web", "127.0.0.1:0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "umbra", "monitor", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    )
    try:
        assert process.stderr is not None
        page = process.stderr.readline().strip()
        with urllib.request.urlopen(page, timeout=WAIT_S) as answer:
            assert b"page.js" in answer.read()
        with urllib.request.urlopen(f"{page}metrics", timeout=WAIT_S) as answer:
            assert b'umbra_up{run="run-1"} 1.0' in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()
