"""Serves what a monitor knows to browsers and to Prometheus."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from umbra.services.http import HttpServer, is_local, listen, url_at
from umbra.services.monitor.web.board import Resource
from umbra.services.process.loop_thread import LoopThread

_REQUESTS = 64
_WAIT_S = 10.0
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
}


class PageServer:
    """Serves `resources`, by path, from a thread of its own until it is closed.

    Args:
        address: `[HOST]:PORT`; without a host it is this machine alone.
        flag: that says it, for errors.
        resources: what is at each path.

    Raises:
        UsageError: it is no address.
        StartupError: the address is taken, or not ours.
    """

    def __init__(self, address: str, flag: str, resources: Mapping[str, Resource]) -> None:
        bound = listen(address, flag, default_host="127.0.0.1")
        self.url = url_at(*bound.getsockname()[:2])
        self.is_local = is_local(bound)
        app = Starlette(routes=[Route(path, _answer(what)) for path, what in resources.items()])
        self._server = HttpServer(app, bound, requests=_REQUESTS)
        self._thread = LoopThread("http")
        self._thread.wait(self._server.start(), _WAIT_S)

    def close(self) -> None:
        self._thread.wait(self._server.stop(), _WAIT_S)
        self._thread.close()


def _answer(what: Resource) -> Callable[[Request], Awaitable[Response]]:
    async def answer(_request: Request) -> Response:
        # Given as a header, for starlette adds a charset to a media type of text.
        return Response(what.read(), headers={**_HEADERS, "Content-Type": what.media_type})

    return answer
