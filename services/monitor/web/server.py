"""Serves what a monitor knows to browsers and to Prometheus; made once for all who ask."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from typing import TypeAlias

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from umbra.services.http import HttpServer, is_local, listen, url_at
from umbra.services.monitor.feed import Look, look_dict
from umbra.services.monitor.web import WEB
from umbra.services.process.loop_thread import LoopThread

TIMELINE_S = 25.0  # of spans that go to the page
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


Resource: TypeAlias = tuple[str, Callable[[], bytes]]  # media type, and a function for its bytes


@dataclass(frozen=True)
class _Shown:
    """A look, with what the page gets of it."""

    look: Look
    lost: bool = False

    @cached_property
    def json(self) -> bytes:
        spans = self.look.spans
        newest = max((own[-1].end for own in spans.values() if own), default=0.0)
        recent = {
            name: [span for span in own if span.end >= newest - TIMELINE_S]
            for name, own in spans.items()
        }
        shown = {name: own for name, own in recent.items() if own}
        return msgspec.json.encode({**look_dict(self.look), "spans": shown, "lost": self.lost})


class Board:
    """The holder of a look, read by threads of the servers."""

    def __init__(self, look: Look) -> None:
        self.show(look)

    def show(self, look: Look) -> None:
        self._now = _Shown(look)

    def lose(self) -> None:
        """Mark the run as not answering: the last look stays, and says so."""
        self._now = replace(self._now, lost=True)

    def page(self) -> dict[str, Resource]:
        return {
            "/": _file("page.html", "text/html; charset=utf-8"),
            "/page.css": _file("page.css", "text/css; charset=utf-8"),
            "/page.js": _file("page.js", "text/javascript; charset=utf-8"),
            "/look.json": ("application/json", lambda: self._now.json),
        }

    def metrics(self) -> dict[str, Resource]:
        from prometheus_client import CONTENT_TYPE_LATEST  # few ask for it

        from umbra.services.monitor.web.prometheus import prometheus_text

        def read() -> bytes:
            now = self._now
            return prometheus_text(now.look, lost=now.lost)

        return {"/metrics": (CONTENT_TYPE_LATEST, read)}


def _file(name: str, media_type: str) -> Resource:
    body = files(WEB).joinpath(name).read_bytes()
    return media_type, lambda: body


class PageServer:
    """A server of `resources`, by path, in a thread of its own until it is closed.

    Args:
        address: `[HOST]:PORT`; without a host it is this machine alone.
        flag: that says it, for errors.
        resources: by path.

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
    media_type, read = what

    async def answer(_request: Request) -> Response:
        # Given as a header, for starlette adds a charset to a media type of text.
        return Response(read(), headers={**_HEADERS, "Content-Type": media_type})

    return answer
