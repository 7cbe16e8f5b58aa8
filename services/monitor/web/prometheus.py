"""A look at a run as metrics of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from umbra.services.monitor.feed import Look
from umbra.services.reporting.figures import PHASES, busy

Series = Iterable[tuple[Mapping[str, str], float]]


def prometheus_text(look: Look, *, lost: bool = False) -> bytes:
    """Return all figures of `look`; `lost` says that the run does not answer any more."""
    status = look.status
    figures = _Figures(status.run_id)
    figures.gauge("up", "Whether the run answers.", [({}, float(not lost))])
    figures.gauge("paused", "Whether the run is paused.", [({}, float(bool(status.paused)))])
    figures.gauge("uptime_seconds", "Since the buffer started.", [({}, status.uptime_s)])
    figures.gauge("version", "Optimizer steps committed.", [({}, status.version)])
    figures.gauge("steps", "The run's goal.", [({}, status.steps)])
    ledger = status.ledger
    figures.counter("samples_issued", "Samples ever made.", [({}, ledger.issued)])
    figures.counter("samples_trained", "Samples in committed batches.", [({}, ledger.trained)])
    figures.counter(
        "samples_ended",
        "Samples that are over without being trained on.",
        [({"reason": reason}, count) for reason, count in ledger.ended.items()],
    )
    figures.gauge(
        "samples_in_flight",
        "Samples under way, by state.",
        [({"state": state}, count) for state, count in ledger.in_flight.items()],
    )
    figures.gauge(
        "ledger_balance", "Samples unaccounted for; not 0 is a bug.", [({}, ledger.balance)]
    )
    figures.gauge(
        "staleness_steps",
        "Of the samples trained so far.",
        [({"figure": name}, value) for name, value in status.staleness.items()],
    )
    figures.counter(
        "trained_by_staleness",
        "Trained samples, by staleness in steps.",
        [({"staleness": str(i)}, count) for i, count in enumerate(status.staleness_counts)],
    )
    figures.counter(
        "events",
        "What the buffer has counted.",
        [({"kind": k}, v) for k, v in status.counters.items()],
    )
    figures.gauge(
        "rate",
        "Recent rates per second.",
        [({"figure": name}, value) for name, value in msgspec.structs.asdict(status.rates).items()],
    )
    figures.gauge(
        "health",
        "Shares of groups, answers and samples that teach nothing.",
        [({"figure": name}, value) for name, value in status.health.items()],
    )
    figures.gauge(
        "warning",
        "1 while a warning holds, 0 once it is over.",
        [({"name": one.name}, float(one.until < 0)) for one in status.warnings],
    )
    figures.gauge("stuck", "Things that are overdue.", [({}, len(status.stuck))])
    figures.gauge(
        "curve",
        "The newest point of each curve.",
        [
            ({"name": name}, values[-1])
            for name, values in status.curves.values.items()
            if values and values[-1] is not None
        ],
    )
    _members(figures, look)
    figures.gauge(
        "push_seconds",
        "Phases of the last push to each receiver.",
        [
            ({"receiver": push.receiver, "phase": phase}, getattr(push, f"{phase}_s"))
            for push in {push.receiver: push for push in look.pushes}.values()
            for phase in PHASES
        ],
    )
    registry = CollectorRegistry()
    registry.register(figures)
    return generate_latest(registry)


def _members(figures: _Figures, look: Look) -> None:
    members = look.status.members
    figures.gauge(
        "member_up",
        "A member of the run, by state.",
        [({"member": m.name, "role": m.role, "state": m.state}, 1) for m in members],
    )
    figures.gauge(
        "member_silent_seconds",
        "Since its last message.",
        [({"member": m.name}, m.silent_s) for m in members],
    )
    figures.gauge(
        "member_idle_seconds",
        "Without progress.",
        [({"member": m.name}, m.idle_s) for m in members],
    )
    figures.gauge(
        "member_busy",
        "Share of a member's last 10 s in which it did anything but wait.",
        [({"member": m.name}, busy(m.shares)) for m in members if m.shares],
    )
    figures.gauge(
        "member_progress_per_second",
        "Recent units of work per second.",
        [({"member": m.name}, m.progress_per_s) for m in members],
    )
    figures.gauge(
        "member_share",
        "Share of a member's last 10 s, by activity.",
        [
            ({"member": m.name, "activity": name}, share)
            for m in members
            for name, share in m.shares.items()
        ],
    )
    figures.gauge(
        "member_stat",
        "What members tell of themselves.",
        [
            ({"member": m.name, "name": name}, value)
            for m in members
            for name, value in m.stats.items()
        ],
    )


class _Figures(Collector):
    def __init__(self, run: str) -> None:
        self._run = run
        self._families: list[Metric] = []

    def collect(self) -> Iterator[Metric]:
        yield from self._families

    def gauge(self, name: str, meaning: str, series: Series) -> None:
        self._add(GaugeMetricFamily(f"umbra_{name}", meaning), series)

    def counter(self, name: str, meaning: str, series: Series) -> None:
        """Add a figure that grows until the buffer is started without its store."""
        self._add(CounterMetricFamily(f"umbra_{name}", meaning), series)

    def _add(self, family: Metric, series: Series) -> None:
        ending = "_total" if family.type == "counter" else ""
        for labels, value in series:
            family.add_sample(family.name + ending, {"run": self._run, **labels}, value)
        self._families.append(family)
