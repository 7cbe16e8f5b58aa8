"""A small HTTP server that only ever answers GET with what it is given."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from types import TracebackType
from typing import Any

from umbra.proto.errors import StartupError, UsageError
from umbra.services.runtime.threads import service_thread

AT_ONCE = 32  # connections; more are closed at once
SLOW_S = 10.0  # a client that takes longer to ask is dropped
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True)
class Resource:
    """What is at one path: its media type, and a function for its bytes."""

    media_type: str
    read: Callable[[], bytes]


def parse_address(text: str) -> tuple[str, int]:
    """`[HOST]:PORT`; without a host it is this machine alone.

    Raises:
        UsageError: it is neither.
    """
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{text}: write it as :PORT or HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)


class HttpServer:
    """Serves `resources`, by path, on threads of its own until it is closed; a context manager.

    A server on a loopback address answers only those who call it by such a name, so that no page
    from elsewhere can read it through a browser.

    Raises:
        StartupError: the address is taken, or not ours.
    """

    def __init__(self, host: str, port: int, resources: Mapping[str, Resource]) -> None:
        handler = type("Handler", (_Handler,), {"resources": dict(resources)})
        try:
            self._server = _Server((host, port), handler)
        except OSError as error:
            raise StartupError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        self.port = self._server.server_address[1]
        self.is_local = _is_loopback(host)
        self._server.is_local = self.is_local
        self._thread = service_thread(lambda: self._server.serve_forever(0.1), "http")
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> HttpServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    is_local = False

    def __init__(self, address: tuple[str, int], handler: type[_Handler]) -> None:
        self._slots = threading.BoundedSemaphore(AT_ONCE)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    resources: Mapping[str, Resource]
    timeout = SLOW_S
    server_version = "umbra"
    sys_version = ""

    def do_GET(self) -> None:
        resource = self.resources.get(self.path.partition("?")[0])
        if not self._is_called_rightly():
            self.send_error(HTTPStatus.FORBIDDEN)
        elif resource is None:
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            body = resource.read()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", resource.media_type)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Content-Security-Policy", POLICY)
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the terminal may show the run."""

    def _is_called_rightly(self) -> bool:
        host = self.headers.get("Host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        assert isinstance(self.server, _Server)
        return not self.server.is_local or name in LOOPBACK


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
