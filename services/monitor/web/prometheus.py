"""A look at a run in Prometheus' text format.

Format: "Exposition formats" of the Prometheus documentation, version 0.0.4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from umbra.services.monitor.watch import Look
from umbra.services.reporting.figures import PHASES, busy

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Series = Iterable[tuple[Mapping[str, str], float]]


def prometheus_text(look: Look, *, lost: bool = False) -> bytes:
    """All figures of `look`; `lost` says that the run does not answer any more."""
    status = look.status
    text = _Text({"run": status.run_id})
    text.gauge("up", "Whether the run answers.", [({}, float(not lost))])
    text.gauge("paused", "Whether the run is paused.", [({}, float(bool(status.paused)))])
    text.gauge("uptime_seconds", "Since the buffer started.", [({}, status.uptime_s)])
    text.gauge("version", "Optimizer steps committed.", [({}, status.version)])
    text.gauge("steps", "The run's goal.", [({}, status.steps)])
    ledger = status.ledger
    text.counter("samples_issued", "Samples ever made.", [({}, ledger.issued)])
    text.counter("samples_trained", "Samples in committed batches.", [({}, ledger.trained)])
    text.counter(
        "samples_ended",
        "Samples that are over without being trained on.",
        [({"reason": reason}, count) for reason, count in ledger.ended.items()],
    )
    text.gauge(
        "samples_in_flight",
        "Samples under way, by state.",
        [({"state": state}, count) for state, count in ledger.in_flight.items()],
    )
    text.gauge("ledger_balance", "Samples unaccounted for; not 0 is a bug.", [({}, ledger.balance)])
    text.gauge(
        "staleness_steps",
        "Of the samples trained so far.",
        [({"figure": name}, value) for name, value in status.staleness.items()],
    )
    text.counter(
        "trained_by_staleness",
        "Trained samples, by staleness in steps.",
        [({"staleness": str(i)}, count) for i, count in enumerate(status.staleness_counts)],
    )
    text.counter(
        "events",
        "What the buffer has counted.",
        [({"kind": k}, v) for k, v in status.counters.items()],
    )
    text.gauge(
        "rate",
        "Recent rates per second.",
        [({"figure": name}, value) for name, value in msgspec.structs.asdict(status.rates).items()],
    )
    text.gauge(
        "health",
        "Shares of groups, answers and samples that teach nothing.",
        [({"figure": name}, value) for name, value in status.health.items()],
    )
    text.gauge(
        "warning",
        "1 while a warning holds, 0 once it is over.",
        [({"name": one.name}, float(one.until < 0)) for one in status.warnings],
    )
    text.gauge("stuck", "Things that are overdue.", [({}, len(status.stuck))])
    text.gauge(
        "curve",
        "The newest point of each curve.",
        [
            ({"name": name}, values[-1])
            for name, values in status.curves.values.items()
            if values and values[-1] is not None
        ],
    )
    _members(text, look)
    text.gauge(
        "push_seconds",
        "Phases of the last push to each receiver.",
        [
            ({"receiver": push.receiver, "phase": phase}, getattr(push, f"{phase}_s"))
            for push in {push.receiver: push for push in look.pushes}.values()
            for phase in PHASES
        ],
    )
    return text.encode()


def _members(text: _Text, look: Look) -> None:
    members = look.status.members
    text.gauge(
        "member_up",
        "A member of the run, by state.",
        [({"member": m.name, "role": m.role, "state": m.state}, 1) for m in members],
    )
    text.gauge(
        "member_silent_seconds",
        "Since its last message.",
        [({"member": m.name}, m.silent_s) for m in members],
    )
    text.gauge(
        "member_idle_seconds",
        "Without progress.",
        [({"member": m.name}, m.idle_s) for m in members],
    )
    text.gauge(
        "member_busy",
        "Share of a member's last 10 s in which it did anything but wait.",
        [({"member": m.name}, busy(m.shares)) for m in members if m.shares],
    )
    text.gauge(
        "member_progress_per_second",
        "Recent units of work per second.",
        [({"member": m.name}, m.progress_per_s) for m in members],
    )
    text.gauge(
        "member_share",
        "Share of a member's last 10 s, by activity.",
        [
            ({"member": m.name, "activity": name}, share)
            for m in members
            for name, share in m.shares.items()
        ],
    )
    text.gauge(
        "member_stat",
        "What members tell of themselves.",
        [
            ({"member": m.name, "name": name}, value)
            for m in members
            for name, value in m.stats.items()
        ],
    )


class _Text:
    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._lines: list[str] = []

    def gauge(self, name: str, meaning: str, series: Series) -> None:
        """What may go up and down."""
        self._add(f"umbra_{name}", "gauge", meaning, series)

    def counter(self, name: str, meaning: str, series: Series) -> None:
        """What only goes up, until the buffer is started anew without its store."""
        self._add(f"umbra_{name}_total", "counter", meaning, series)

    def encode(self) -> bytes:
        return ("\n".join(self._lines) + "\n").encode()

    def _add(self, name: str, kind: str, meaning: str, series: Series) -> None:
        self._lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
        for labels, value in series:
            pairs = {**self._labels, **labels}
            told = ",".join(f'{key}="{_escape(text)}"' for key, text in pairs.items())
            self._lines.append(f"{name}{{{told}}} {_value(value)}")


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _value(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))
