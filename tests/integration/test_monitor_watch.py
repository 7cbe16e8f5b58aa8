"""Watching a run over real sockets, with keys and without, while it is not disturbed."""

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from fakes.looks import PUSH, status
from fakes.slowness import limit

from umbra.proto.access import SOCKETS, KeyRole
from umbra.proto.messages import Heartbeat, HeartbeatAck, Join, Message, Ok, StatusRequest, Welcome
from umbra.proto.messages import Status as StatusMessage
from umbra.proto.net.keys import OPEN, Security, make_keys, open_security
from umbra.proto.net.server import Server
from umbra.proto.net.session import Session
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


class Buffer:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], security: Security) -> None:
        self.server = Server(context, "buffer", "b1", security)
        self.endpoint = self.server.bind("control", "tcp://127.0.0.1:*", SOCKETS["control"])
        self.events = self.server.bind_events("tcp://127.0.0.1:*")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
        self.server.close()

    def _main(self) -> None:
        while not self._stop.is_set():
            for request in self.server.poll(0.02):
                self.server.reply(request, self._answer(request.body))

    def _answer(self, body: Message) -> Message:
        match body:
            case StatusRequest():
                return status(events=self.events)
            case Join():
                return Welcome(run_id="r", heartbeat_s=0.05, data=self.endpoint)
            case Heartbeat():
                return HeartbeatAck(version=7)
            case _:
                return Ok()


@pytest.fixture
def buffer(zmq_context: zmq.Context[zmq.Socket[bytes]], security: SecurityOf) -> Iterator[Buffer]:
    buffer = Buffer(zmq_context, security("buffer"))
    yield buffer
    buffer.close()


def until(watch: Watch, done: Callable[[Look], object], act: Callable[[], None]) -> Look:
    """Look until `done`, and `act` in between: telemetry may be lost."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        act()
        look = watch.look(WAIT_S)
        if done(look):
            return look
    raise AssertionError("it never came")


def did(look: Look) -> set[str]:
    return {span.name for span in look.spans.get("generator-0", [])}


def test_any_number_watch_and_see_the_same(buffer: Buffer, security: SecurityOf) -> None:
    metrics = MetricsFile(None, "generator-0")
    watches = [Watch(buffer.endpoint, security("monitor")) for _ in range(3)]
    with Session(
        role="generator",
        name="generator-0",
        broker=buffer.endpoint,
        metrics=metrics,
        security=security("generator"),
    ):

        def act() -> None:
            metrics.write("push", **PUSH)
            metrics.write("span", name="decode", start=1.0, end=2.0)

        for watch in watches:
            with watch:
                look = until(watch, lambda seen: did(seen) == {"push", "decode"}, act)
                assert isinstance(look.status, StatusMessage)
                assert look.pushes[0].wire_s == PUSH["wire_s"]
    senders = {key[1].partition(b".")[0] for key in buffer.server.resends._known}
    assert senders == {b"generator-0"}, "of the watchers nothing stays"


def test_the_page_and_the_figures(zmq_context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Both are served at the addresses that are printed, until Ctrl-C."""
    buffer = Buffer(zmq_context, OPEN)
    command = ["--broker", buffer.endpoint, "--web", "127.0.0.1:0", "--prometheus", ":0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "umbra", "monitor", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    )
    try:
        assert process.stderr is not None
        page, figures = process.stderr.readline().strip(), process.stderr.readline().strip()
        with urllib.request.urlopen(page, timeout=WAIT_S) as answer:
            assert b"page.js" in answer.read()
        assert figures.endswith("/metrics")
        with urllib.request.urlopen(figures, timeout=WAIT_S) as answer:
            assert b'umbra_up{run="run-1"} 1.0' in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()
        buffer.close()
