"""Serves what a monitor knows to browsers and to Prometheus; made once for all who ask."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from umbra.services.http import HttpServer, is_local, listen, url_at
from umbra.services.monitor.client import Look, look_dict
from umbra.services.monitor.view import page_file
from umbra.services.process.loop_thread import LoopThread
from umbra.services.reporting import PHASES, busy

Series = Sequence[tuple[Mapping[str, str], float]]
Figure = tuple[str, str, Series]  # name, meaning, and values by their labels


def prometheus_text(look: Look, *, lost: bool = False) -> bytes:
    """Return all figures of `look`; `lost` says that the run does not answer any more."""
    registry = CollectorRegistry()
    registry.register(_Figures(look.status.run_id, [*_of_run(look, lost), *_of_members(look)]))
    return generate_latest(registry)


def _by_label(label: str, values: Mapping[str, float | None]) -> Series:
    return [({label: name}, float(value)) for name, value in values.items() if value is not None]


def _single(value: float) -> Series:
    return [({}, float(value))]


def _of_run(look: Look, lost: bool) -> Iterator[Figure]:
    status, ledger = look.status, look.status.ledger
    newest = {push.receiver: push for push in look.pushes}.values()
    yield "up", "Whether the run answers.", _single(not lost)
    yield "paused", "Whether the run is paused.", _single(bool(status.paused))
    yield "uptime_seconds", "Since the buffer started.", _single(status.uptime_s)
    yield "version", "Optimizer steps committed.", _single(status.version)
    yield "steps", "The run's goal.", _single(status.steps)
    yield "samples_issued_total", "Samples ever made.", _single(ledger.issued)
    yield "samples_trained_total", "Samples in committed batches.", _single(ledger.trained)
    meaning = "Samples that are over without being trained on."
    yield "samples_ended_total", meaning, _by_label("reason", ledger.ended)
    flight = _by_label("state", ledger.in_flight)
    yield "samples_in_flight", "Samples under way, by state.", flight
    yield "ledger_balance", "Samples unaccounted for; not 0 is a bug.", _single(ledger.balance)
    stale = _by_label("figure", status.staleness)
    yield "staleness_steps", "Of the samples trained so far.", stale
    counts = {str(steps): count for steps, count in enumerate(status.staleness_counts)}
    by_steps = _by_label("staleness", counts)
    yield "trained_by_staleness_total", "Trained samples, by staleness in steps.", by_steps
    yield "events_total", "What the buffer has counted.", _by_label("kind", status.counters)
    rates = msgspec.structs.asdict(status.rates)
    yield "rate", "Recent rates per second.", _by_label("figure", rates)
    teach = "Shares of groups, answers and samples that teach nothing."
    yield "health", teach, _by_label("figure", status.health)
    warnings = {one.name: one.until < 0 for one in status.warnings}
    yield "warning", "1 while a warning holds, 0 once it is over.", _by_label("name", warnings)
    yield "stuck", "Things that are overdue.", _single(len(status.stuck))
    curves = {name: values[-1] for name, values in status.curves.values.items() if values}
    yield "curve", "The newest point of each curve.", _by_label("name", curves)
    phases = [
        ({"receiver": push.receiver, "phase": phase}, getattr(push, f"{phase}_s"))
        for push in newest
        for phase in PHASES
    ]
    yield "push_seconds", "Phases of the last push to each receiver.", phases


def _of_members(look: Look) -> Iterator[Figure]:
    members = look.status.members
    states = [({"member": m.name, "role": m.role, "state": m.state}, 1.0) for m in members]
    yield "member_up", "A member of the run, by state.", states
    silent = _by_label("member", {m.name: m.silent_s for m in members})
    yield "member_silent_seconds", "Since its last message.", silent
    idle = _by_label("member", {m.name: m.idle_s for m in members})
    yield "member_idle_seconds", "Without progress.", idle
    worked = "Share of a member's last 10 s in which it did anything but wait."
    shares = {m.name: busy(m.shares) for m in members if m.shares}
    yield "member_busy", worked, _by_label("member", shares)
    progress = _by_label("member", {m.name: m.progress_per_s for m in members})
    yield "member_progress_per_second", "Recent units of work per second.", progress
    by_activity = [
        ({"member": m.name, "activity": name}, share)
        for m in members
        for name, share in m.shares.items()
    ]
    yield "member_share", "Share of a member's last 10 s, by activity.", by_activity
    stats = [
        ({"member": m.name, "name": name}, value)
        for m in members
        for name, value in m.stats.items()
    ]
    yield "member_stat", "What members tell of themselves.", stats


class _Figures(Collector):
    """Counters, whose names end in _total, grow until the buffer is started without its store."""

    def __init__(self, run: str, figures: Iterable[Figure]) -> None:
        self._run = run
        self._figures = list(figures)

    def collect(self) -> Iterator[Metric]:
        for name, meaning, series in self._figures:
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(f"umbra_{name}", meaning)
            for labels, value in series:
                family.add_sample(f"umbra_{name}", {"run": self._run, **labels}, value)
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


Resource: TypeAlias = tuple[str, Callable[[], bytes]]  # media type, and a function for its bytes


@dataclass(frozen=True)
class _Shown:
    """A look, with what the page gets of it."""

    look: Look
    lost: bool = False

    @cached_property
    def json(self) -> bytes:
        spans = self.look.spans
        newest = max((of_member[-1].end for of_member in spans.values() if of_member), default=0.0)
        recent = {
            name: [span for span in of_member if span.end >= newest - TIMELINE_S]
            for name, of_member in spans.items()
        }
        timeline = {name: of_member for name, of_member in recent.items() if of_member}
        return msgspec.json.encode({**look_dict(self.look), "spans": timeline, "lost": self.lost})


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
        def read() -> bytes:
            now = self._now
            return prometheus_text(now.look, lost=now.lost)

        return {"/metrics": (CONTENT_TYPE_LATEST, read)}


def _file(name: str, media_type: str) -> Resource:
    body = page_file(name).encode()
    return media_type, lambda: body


class PageServer:
    """A server of `resources`, by path, in a thread of its own until it is closed.

    `address` is `[HOST]:PORT`, without a host this machine alone; errors name its `flag`.

    Raises:
        UsageError: it is no address.
        StartupError: the address is taken, or not ours.
    """

    def __init__(self, address: str, flag: str, resources: Mapping[str, Resource]) -> None:
        bound = listen(address, flag, default_host="127.0.0.1")
        self.url = url_at(*bound.getsockname()[:2])
        self.is_local = is_local(bound)
        app = Starlette(routes=[Route(path, _answer(one)) for path, one in resources.items()])
        self._server = HttpServer(app, bound, requests=_REQUESTS)
        self._thread = LoopThread("http")
        self._thread.wait(self._server.start(), _WAIT_S)

    def close(self) -> None:
        self._thread.wait(self._server.stop(), _WAIT_S)
        self._thread.close()


def _answer(resource: Resource) -> Callable[[Request], Awaitable[Response]]:
    media_type, body = resource

    async def answer(_request: Request) -> Response:
        # Given as a header, for starlette adds a charset to a media type of text.
        return Response(body(), headers={**_HEADERS, "Content-Type": media_type})

    return answer
