"""Serves what a monitor knows to browsers and to Prometheus; made once for all who ask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from umbra.services.http import HttpServer, is_local, listen, url_at
from umbra.services.monitor.client import Look
from umbra.services.monitor.view import look_dict, page_file
from umbra.services.process.loop_thread import LoopThread
from umbra.services.reporting import PHASES, busy

# Name, meaning, names of labels, and values by these labels' values (a tuple if there are several).
Figure = tuple[str, str, str, Mapping[Any, float | None]]


def prometheus_text(look: Look, *, lost: bool = False) -> bytes:
    """Return all figures of `look`; `lost` says that the run does not answer any more."""
    registry = CollectorRegistry()
    registry.register(_Figures(look.status.run_id, [*_of_run(look, lost), *_of_members(look)]))
    return generate_latest(registry)


def _of_run(look: Look, lost: bool) -> Iterator[Figure]:
    status, ledger = look.status, look.status.ledger
    for name, meaning, value in (
        ("up", "Whether the run answers.", not lost),
        ("uptime_seconds", "Since the buffer started.", status.uptime_s),
        ("version", "Optimizer steps committed.", status.version),
        ("steps", "The run's goal.", status.steps),
        ("samples_issued_total", "Samples ever made.", ledger.issued),
        ("samples_trained_total", "Samples in committed batches.", ledger.trained),
        ("ledger_balance", "Samples unaccounted for; not 0 is a bug.", ledger.balance),
        ("stuck", "Things that are overdue.", len(status.stuck)),
    ):
        yield name, meaning, "", {(): value}
    meaning = "Samples that are over without being trained on."
    yield "samples_ended_total", meaning, "reason", ledger.ended
    yield "samples_in_flight", "Samples under way, by state.", "state", ledger.in_flight
    yield "staleness_steps", "Of the samples trained so far.", "figure", status.staleness
    meaning = "Trained samples, by staleness in steps."
    counts = {str(steps): count for steps, count in enumerate(status.staleness_counts)}
    yield "trained_by_staleness_total", meaning, "staleness", counts
    yield "events_total", "What the buffer has counted.", "kind", status.counters
    yield "rate", "Recent rates per second.", "figure", msgspec.structs.asdict(status.rates)
    meaning = "Shares of groups, answers and samples that teach nothing."
    yield "health", meaning, "figure", status.health
    warnings = {warning.name: warning.until < 0 for warning in status.warnings}
    yield "warning", "1 while a warning holds, 0 once it is over.", "name", warnings
    curves = {name: values[-1] for name, values in status.curves.values.items() if values}
    yield "curve", "The newest point of each curve.", "name", curves
    phases = {(p.receiver, name): getattr(p, f"{name}_s") for p in look.pushes for name in PHASES}
    yield "push_seconds", "Phases of the last push to each receiver.", "receiver phase", phases


def _of_members(look: Look) -> Iterator[Figure]:
    members = look.status.members
    states = {(m.name, m.role, m.state): 1.0 for m in members}
    yield "member_up", "A member of the run, by state.", "member role state", states
    silent, idle = {m.name: m.silent_s for m in members}, {m.name: m.idle_s for m in members}
    yield "member_silent_seconds", "Since its last message.", "member", silent
    yield "member_idle_seconds", "Without progress.", "member", idle
    meaning = "Share of a member's last 10 s in which it did anything but wait."
    yield "member_busy", meaning, "member", {m.name: busy(m.shares) for m in members if m.shares}
    shares = {(m.name, name): share for m in members for name, share in m.shares.items()}
    yield "member_share", "Share of a member's last 10 s, by activity.", "member activity", shares
    stats = {(m.name, name): value for m in members for name, value in m.stats.items()}
    yield "member_stat", "What members tell of themselves.", "member name", stats


class _Figures(Collector):
    """Counters, whose names end in _total, grow until the buffer is started without its store."""

    def __init__(self, run: str, figures: Iterable[Figure]) -> None:
        self._run = run
        self._figures = list(figures)

    def collect(self) -> Iterator[Metric]:
        for name, meaning, labels, values in self._figures:
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(f"umbra_{name}", meaning)
            for key, value in values.items():
                if value is not None:
                    parts = key if isinstance(key, tuple) else (key,)
                    labelled = {"run": self._run, **dict(zip(labels.split(), parts, strict=True))}
                    family.add_sample(f"umbra_{name}", labelled, float(value))
            yield family


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


@dataclass(frozen=True)
class _Shown:
    """A look, with what the page and Prometheus get of it."""

    look: Look
    lost: bool = False

    @cached_property
    def json(self) -> bytes:
        spans = {name: spans for name, spans in self.look.spans.items() if spans}
        since = max((own[-1].end for own in spans.values()), default=0.0) - TIMELINE_S
        timeline = {
            name: [span for span in own if span.end >= since]
            for name, own in spans.items()
            if own[-1].end >= since
        }
        return msgspec.json.encode({**look_dict(self.look), "spans": timeline, "lost": self.lost})

    @cached_property
    def figures(self) -> bytes:
        return prometheus_text(self.look, lost=self.lost)


def _file(path: str, name: str, kind: str) -> Route:
    body = page_file(name).encode()
    return _route(path, f"text/{kind}; charset=utf-8", lambda: body)


def _route(path: str, media_type: str, body: Callable[[], bytes]) -> Route:
    async def answer(_request: Request) -> Response:
        # Given as a header, for starlette adds a charset to a media type of text.
        return Response(body(), headers={**_HEADERS, "Content-Type": media_type})

    return Route(path, answer)


class PageServer:
    """A server of the page and of /metrics in a thread of its own: of a look, until the next one.

    `address` is `[HOST]:PORT`, without a host this machine alone. Raises StartupError or UsageError
    if it can't be bound.
    """

    def __init__(self, address: str, look: Look) -> None:
        self.show(look)
        routes = [
            _file("/", "page.html", "html"),
            _file("/page.css", "page.css", "css"),
            _file("/page.js", "page.js", "javascript"),
            _route("/look.json", "application/json", lambda: self._now.json),
            _route("/metrics", CONTENT_TYPE_LATEST, lambda: self._now.figures),
        ]
        bound = listen(address, "--web", default_host="127.0.0.1")
        self.url = url_at(*bound.getsockname()[:2])
        self.is_local = is_local(bound)
        self._server = HttpServer(Starlette(routes=routes), bound, requests=_REQUESTS)
        self._thread = LoopThread("http")
        self._thread.wait(self._server.start(), _WAIT_S)

    def show(self, look: Look) -> None:
        self._now = _Shown(look)

    def lose(self) -> None:
        """Mark the run as not answering: the last look stays, and says so."""
        self._now = replace(self._now, lost=True)

    def close(self) -> None:
        self._thread.wait(self._server.stop(), _WAIT_S)
        self._thread.close()
