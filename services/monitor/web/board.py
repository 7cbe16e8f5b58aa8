"""The newest look at a run, made into what the HTTP servers hand out; made once for all who ask."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import msgspec

from umbra.services.monitor.feed import Look, look_dict

WEB = "umbra.services.monitor.web"  # the package with the page, which report.html has too
TIMELINE_S = 25.0  # of spans that go to the page


@dataclass(frozen=True, slots=True)
class Resource:
    """What is at one path: its media type, and a function for its bytes."""

    media_type: str
    read: Callable[[], bytes]


class Board:
    """Holds a look; threads of the servers read it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._look: Look | None = None
        self._lost = False
        self._json: bytes | None = None

    def show(self, look: Look) -> None:
        """From now on this one is handed out."""
        with self._lock:
            self._look, self._lost, self._json = look, False, None

    def lose(self) -> None:
        """The run does not answer any more: the last look stays, and says so."""
        with self._lock:
            self._lost, self._json = True, None

    def page(self) -> dict[str, Resource]:
        """The page and what it asks for."""
        return {
            "/": _file("page.html", "text/html; charset=utf-8"),
            "/page.css": _file("page.css", "text/css; charset=utf-8"),
            "/page.js": _file("page.js", "text/javascript; charset=utf-8"),
            "/look.json": Resource("application/json", self._look_json),
        }

    def metrics(self) -> dict[str, Resource]:
        from prometheus_client import CONTENT_TYPE_LATEST  # few ask for it

        return {"/metrics": Resource(CONTENT_TYPE_LATEST, self._prometheus)}

    def _look_json(self) -> bytes:
        with self._lock:
            if self._json is None:
                self._json = msgspec.json.encode({**_shown(self._look), "lost": self._lost})
            return self._json

    def _prometheus(self) -> bytes:
        from umbra.services.monitor.web.prometheus import prometheus_text

        with self._lock:
            look, lost = self._look, self._lost
        return b"" if look is None else prometheus_text(look, lost=lost)


def _shown(look: Look | None) -> dict[str, Any]:
    if look is None:
        return {}
    newest = max((spans[-1].end for spans in look.spans.values() if spans), default=0.0)
    spans = {
        name: [span for span in own if span.end >= newest - TIMELINE_S]
        for name, own in look.spans.items()
    }
    return {**look_dict(look), "spans": {name: own for name, own in spans.items() if own}}


def _file(name: str, media_type: str) -> Resource:
    body = files(WEB).joinpath(name).read_bytes()
    return Resource(media_type, lambda: body)
