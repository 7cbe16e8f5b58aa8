"""The HTTP server against clients that hold it up, and a legitimate one beside them."""

import asyncio
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest
from fakes.slowness import limit, seconds, until
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from umbra.proto.errors import StartupError, UsageError
from umbra.services import http as http_server
from umbra.services.http import HttpServer, is_local, listen, url_at
from umbra.services.process.loop_thread import LoopThread

WAIT_S = limit(30.0)
HEAD = b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
LONG = 256 << 20  # bytes; no socket's buffers hold so many
MAX_BODY = 1 << 20


def asking(path: str) -> bytes:
    return b"GET %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % path.encode()


class Served:
    """A server on a thread of its own.

    `/echo` sends back the body, `/wait` never answers, and `/long` answers with `LONG` bytes.
    """

    def __init__(self, *, key: str = "", requests: int = 1000) -> None:
        self.calls = 0  # requests that got as far as the application
        bound = listen("127.0.0.1:0", "the server of a test")
        self.port: int = bound.getsockname()[1]
        routes = [Route("/wait", self._wait), Route("/long", self._long)]
        routes.append(Route("/echo", self._echo, methods=["POST"]))
        app = Starlette(routes=routes)
        self._server = HttpServer(app, bound, key=key, max_body=MAX_BODY, requests=requests)
        self.refusals = self._server.refusals
        self._thread = LoopThread("http of a test")
        self._thread.wait(self._server.start(), WAIT_S)

    def close(self) -> None:
        if not self._thread.closed:
            self._thread.wait(self._server.stop(), WAIT_S)
            self._thread.close()

    def connect(self, sent: bytes = b"") -> socket.socket:
        """A connection on which `sent` was sent."""
        made = socket.create_connection(("127.0.0.1", self.port), WAIT_S)
        made.sendall(sent)
        return made

    def ask(self, body: bytes = b"{}", **headers: str) -> tuple[int, bytes]:
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        with closing(client):
            client.request("POST", "/echo", body, {"content-type": "application/json", **headers})
            answer = client.getresponse()
            return answer.status, answer.read()

    def refused(self, reason: str) -> int:
        """How many were refused for `reason`."""
        return self.refusals.counts[f"an HTTP request from 127.0.0.1: {reason}"]

    def until(self, condition: Callable[[], bool]) -> None:
        until(condition, lambda: (self.calls, self.refusals.counts))

    async def _echo(self, request: Request) -> Response:
        self.calls += 1
        return Response(await request.body())

    async def _wait(self, _request: Request) -> None:
        self.calls += 1
        await asyncio.Event().wait()

    async def _long(self, _request: Request) -> Response:
        self.calls += 1
        return StreamingResponse(iter([bytes(1 << 20)] * (LONG >> 20)))


Serve = Callable[..., Served]


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(closing(Served(**options)))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "BODY_S", seconds(0.5))


def read_to_end(client: socket.socket) -> bytes:
    data = bytearray()
    with suppress(ConnectionError):
        while chunk := client.recv(1 << 16):
            data += chunk
    return bytes(data)


SLOW_BODIES = [
    HEAD + b"content-length: 9999\r\n\r\n{",
    HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{",
]


def stays_open(client: socket.socket) -> bool:
    client.setblocking(False)
    with pytest.raises(BlockingIOError):
        client.recv(1)
    return True


@pytest.mark.parametrize("sent", [b"", SLOW_BODIES[0]])
def test_half_open_connections_hold_nobody_up(sent: bytes, serve: Serve) -> None:
    served = serve()
    with ExitStack() as stack:
        half = [stack.enter_context(served.connect(sent)) for _ in range(300)]
        assert served.ask(b'"one"') == (200, b'"one"')
        assert all(map(stays_open, half))
    assert not served.refusals.counts


@pytest.mark.parametrize(
    ("sent", "more"), [(SLOW_BODIES[0], b" "), (SLOW_BODIES[1], b"\r\n1\r\n ")]
)
@pytest.mark.usefixtures("impatient")
def test_a_byte_now_and_then_does_not_help(sent: bytes, more: bytes, serve: Serve) -> None:
    served = serve()
    with served.connect(sent) as client, suppress(ConnectionError):
        client.settimeout(0.02)
        end = time.monotonic() + WAIT_S
        while True:
            assert time.monotonic() < end, "it goes on for ever"
            client.sendall(more)
            with suppress(TimeoutError):
                if not client.recv(1 << 16):
                    break
    assert sum(served.refusals.counts.values()) == 1


@pytest.mark.usefixtures("impatient")
def test_an_answer_may_take_its_time(serve: Serve) -> None:
    """The deadlines are for clients: one that waits for the model has none."""
    served = serve()
    with served.connect(asking("/wait")) as waiting:
        served.until(lambda: served.calls == 1)
        with served.connect(SLOW_BODIES[0]) as slow:
            # That one's time was over, and it came later.
            assert read_to_end(slow).startswith(b"HTTP/1.1 400 ")
            assert "its body did not come within" in "".join(served.refusals.counts)
        assert stays_open(waiting)


def test_when_all_are_at_work_the_next_is_told_so(serve: Serve) -> None:
    served = serve(requests=4)
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(served.connect(asking("/wait")))
        served.until(lambda: served.calls == 4)
        assert served.ask()[0] == 503
    assert served.calls == 4


def test_bodies_of_all_requests_have_a_bound(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HELD_BYTES", 50)
    served, body = serve(), b'"%b"' % bytes([120] * 30)
    with served.connect(HEAD + b"content-length: 40\r\n\r\n" + bytes(30)):
        served.until(lambda: served.ask(body)[0] == 503)
        assert served.ask(b'"small"')[0] == 200
    served.until(lambda: served.ask(body)[0] == 200)
    assert served.refused("requests under way hold 50 B, the most: repeat this one later")


def test_a_wrong_key_costs_nothing(serve: Serve) -> None:
    """It is refused from the head alone, and its connection ends, whatever would come."""
    served = serve(key="secret")
    for given in (b"", b"authorization: Bearer wrong\r\n"):
        for length in (b"content-length: 1000000\r\n", b"transfer-encoding: chunked\r\n"):
            with served.connect(HEAD + given + length + b"\r\n") as client:
                answer = read_to_end(client)
            assert answer.startswith(b"HTTP/1.1 401 ")
            assert b"\r\nconnection: close\r\n" in answer
            assert b'"invalid_api_key"' in answer
    assert served.calls == 0
    assert served.refused("the API key is wrong or missing") == 4
    assert served.ask(authorization="Bearer secret") == (200, b"{}")


def test_what_is_too_long_is_not_read(serve: Serve) -> None:
    served = serve()
    with served.connect(HEAD + b"content-length: %d\r\n\r\n" % (MAX_BODY + 1)) as client:
        assert read_to_end(client).startswith(b"HTTP/1.1 413 ")
    chunk = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
    with served.connect(HEAD + b"transfer-encoding: chunked\r\n\r\n") as client:
        with suppress(ConnectionError):
            for _ in range((MAX_BODY >> 16) + 1):
                client.sendall(chunk)
        assert read_to_end(client).startswith(b"HTTP/1.1 413 ")
    assert served.calls == 0
    assert served.ask(bytes(MAX_BODY)) == (200, bytes(MAX_BODY))


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),  # TLS
        b"GET / HTTP/1.1\r\n\r\n",  # no host
        HEAD + b"content-length: " + b"9" * 5000 + b"\r\n\r\n",
        HEAD + b"x: " + b"x" * 100_000,  # longer than a head may be
        HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\nzz\r\n",
        HEAD.replace(b"/echo", b"/none") + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"content-length: 2\r\n\r\n{}GARBAGE\r\n\r\n",
        HEAD + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n\xff\xff",
    ],
)
def test_what_is_not_http_ends_its_connection_and_nothing_else(
    sent: bytes, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve()
    with served.connect() as client:
        with suppress(ConnectionError):
            client.sendall(sent)
        read_to_end(client)
    assert served.ask() == (200, b"{}")
    assert [record for record in caplog.records if record.name.startswith("uvicorn")] == []


@pytest.mark.parametrize("sent", [b"", HEAD, asking("/wait"), asking("/long")])
def test_it_stops_whatever_is_open(sent: bytes, serve: Serve) -> None:
    before = threading.active_count()
    served = serve()
    with ExitStack() as stack:
        clients = [stack.enter_context(served.connect(sent)) for _ in range(5)]
        served.ask()
        served.close()
        for client in clients:
            assert len(read_to_end(client)) < LONG
    # Those in which answers were made end by themselves, once they are told.
    until(lambda: threading.active_count() <= before, threading.enumerate)
    listen(f"127.0.0.1:{served.port}", "the port").close()  # nobody has the port any more


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen(":0", "--web", default_host="127.0.0.1") as here:
        assert is_local(here)
        port = here.getsockname()[1]
        with pytest.raises(StartupError, match=rf"--web .*cannot listen on 127\.0\.0\.1:{port}: "):
            listen(f":{port}", "--web", default_host="127.0.0.1")
        with listen(f"127.0.0.1:{port}", "--web", ports=64) as another:
            assert another.getsockname()[1] > port
    with closing(listen("0.0.0.0:0", "--web")) as everywhere:
        assert not is_local(everywhere)
    for bad in ("8080", "host:", ":x", ":70000", ""):
        with pytest.raises(UsageError, match=r"--web .*: write it as :PORT or HOST:PORT"):
            listen(bad, "--web", default_host="127.0.0.1")
    with pytest.raises(UsageError, match=r"generator\.serve = :80: write it as HOST:PORT"):
        listen(":80", "generator.serve =")
    with pytest.raises(StartupError, match=r"cannot listen on 192\.0\.2\.1:0"):  # none of ours
        listen("192.0.2.1:0", "--web")
    made = list[tuple[Any, ...]]()
    monkeypatch.setattr(socket, "create_server", lambda *args, **options: made.append(args))
    listen("[::1]:8", "--web")
    assert made == [(("::1", 8),)]
    assert url_at("::1", 8) == "http://[::1]:8"
