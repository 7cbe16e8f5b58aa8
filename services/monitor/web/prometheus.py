"""A look at a run as metrics of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from umbra.services.monitor.feed import Look
from umbra.services.reporting.figures import PHASES, busy

Series = Sequence[tuple[Mapping[str, str], float]]
Figure = tuple[str, str, Series]  # name, meaning, and values by their labels


def prometheus_text(look: Look, *, lost: bool = False) -> bytes:
    """Return all figures of `look`; `lost` says that the run does not answer any more."""
    registry = CollectorRegistry()
    registry.register(_Figures(look.status.run_id, [*_of_run(look, lost), *_of_members(look)]))
    return generate_latest(registry)


def _named(label: str, values: Mapping[str, float | None]) -> Series:
    return [({label: name}, float(value)) for name, value in values.items() if value is not None]


def _one(value: float) -> Series:
    return [({}, float(value))]


def _of_run(look: Look, lost: bool) -> Iterator[Figure]:
    status, ledger = look.status, look.status.ledger
    newest = {push.receiver: push for push in look.pushes}.values()
    yield "up", "Whether the run answers.", _one(not lost)
    yield "paused", "Whether the run is paused.", _one(bool(status.paused))
    yield "uptime_seconds", "Since the buffer started.", _one(status.uptime_s)
    yield "version", "Optimizer steps committed.", _one(status.version)
    yield "steps", "The run's goal.", _one(status.steps)
    yield "samples_issued_total", "Samples ever made.", _one(ledger.issued)
    yield "samples_trained_total", "Samples in committed batches.", _one(ledger.trained)
    ended = "Samples that are over without being trained on."
    yield "samples_ended_total", ended, _named("reason", ledger.ended)
    flight = _named("state", ledger.in_flight)
    yield "samples_in_flight", "Samples under way, by state.", flight
    yield "ledger_balance", "Samples unaccounted for; not 0 is a bug.", _one(ledger.balance)
    stale = _named("figure", status.staleness)
    yield "staleness_steps", "Of the samples trained so far.", stale
    counts = {str(steps): count for steps, count in enumerate(status.staleness_counts)}
    by_steps = _named("staleness", counts)
    yield "trained_by_staleness_total", "Trained samples, by staleness in steps.", by_steps
    yield "events_total", "What the buffer has counted.", _named("kind", status.counters)
    rates = msgspec.structs.asdict(status.rates)
    yield "rate", "Recent rates per second.", _named("figure", rates)
    teach = "Shares of groups, answers and samples that teach nothing."
    yield "health", teach, _named("figure", status.health)
    warnings = {one.name: one.until < 0 for one in status.warnings}
    yield "warning", "1 while a warning holds, 0 once it is over.", _named("name", warnings)
    yield "stuck", "Things that are overdue.", _one(len(status.stuck))
    curves = {name: values[-1] for name, values in status.curves.values.items() if values}
    yield "curve", "The newest point of each curve.", _named("name", curves)
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
    silent = _named("member", {m.name: m.silent_s for m in members})
    yield "member_silent_seconds", "Since its last message.", silent
    idle = _named("member", {m.name: m.idle_s for m in members})
    yield "member_idle_seconds", "Without progress.", idle
    worked = "Share of a member's last 10 s in which it did anything but wait."
    shares = {m.name: busy(m.shares) for m in members if m.shares}
    yield "member_busy", worked, _named("member", shares)
    progress = _named("member", {m.name: m.progress_per_s for m in members})
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
