"""Export to OpenTelemetry by its own SDK: what members did and groups went through as spans,
figures as metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec.structs import replace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags

from umbra.services.monitor.feed import LifeSeen, PushSeen, SpanSeen
from umbra.services.monitor.traces import LifeRow, LifeSpan, LifeSpans, nanoseconds
from umbra.services.monitor.watch import Look, clock_offsets

log = logging.getLogger(__name__)

GAUGES: dict[str, Callable[[Look], Iterable[tuple[float, dict[str, str]]]]] = {
    "umbra.version": lambda look: [(look.status.version, {})],
    "umbra.samples.trained": lambda look: [(look.status.ledger.trained, {})],
    "umbra.samples.in_flight": lambda look: [
        (count, {"state": state}) for state, count in look.status.ledger.in_flight.items()
    ],
    "umbra.staleness.mean": lambda look: [(look.status.staleness.get("mean", 0.0), {})],
    "umbra.rate": lambda look: [
        (value, {"figure": name})
        for name, value in msgspec.structs.asdict(look.status.rates).items()
    ],
    "umbra.health": lambda look: [
        (value, {"figure": name}) for name, value in look.status.health.items()
    ],
    "umbra.warning": lambda look: [
        (float(one.until < 0), {"name": one.name}) for one in look.status.warnings
    ],
    "umbra.stuck": lambda look: [(len(look.status.stuck), {})],
    "umbra.curve": lambda look: [
        (values[-1], {"name": name})
        for name, values in look.status.curves.values.items()
        if values and values[-1] is not None
    ],
    "umbra.member.share": lambda look: [
        (share, {"member": member.name, "activity": name})
        for member in look.status.members
        for name, share in member.shares.items()
    ],
}


class Telemetry:
    """Sends looks on. Each member is a service of its own, in the namespace of the run.

    Args:
        run_id: of the run.
        exporter: where spans go.
        reader: how metrics are read and where they go.
    """

    def __init__(self, run_id: str, exporter: SpanExporter, reader: MetricReader) -> None:
        self._run_id = run_id
        self._exporter = _Counting(exporter)
        self._processor = BatchSpanProcessor(self._exporter)
        self._given = 0  # spans
        self._lost = 0  # rows of lives, before they came here
        self._life_spans = LifeSpans(run_id)
        self._resources: dict[str, Resource] = {}
        self._tracers: dict[str, TracerProvider] = {}
        self._sent: dict[str, float] = {}  # by member: end of its last span that was sent
        self._look: Look | None = None
        self._meters = MeterProvider([reader], resource=self._resource("run"))
        meter = self._meters.get_meter("umbra")
        for name, read in GAUGES.items():
            meter.create_observable_gauge(name, [self._observer(read)])

    @classmethod
    def over_http(cls, run_id: str, endpoint: str) -> Telemetry:
        """Send to the OTLP receiver at `endpoint`, `http://host:4318` for example."""
        base = endpoint.rstrip("/")
        reader = PeriodicExportingMetricReader(OTLPMetricExporter(f"{base}/v1/metrics"))
        return cls(run_id, OTLPSpanExporter(f"{base}/v1/traces"), reader)

    def show(self, look: Look) -> None:
        """Send what is new in `look`; sending happens on threads of the SDK."""
        self._look = look
        for member, spans in look.spans.items():
            sent = self._sent.get(member, 0.0)
            for span in spans:
                if span.end > sent:
                    self._send(member, span)
            if spans:
                self._sent[member] = max(sent, spans[-1].end)
        offsets, self._lost = clock_offsets(look.status), look.lives_lost
        for seen in look.lives:
            self._send_lives(life_spans(self._life_spans, seen, offsets.get(seen.sender, 0.0)))

    def close(self) -> None:
        """Send the rest, for half a minute at most, and say what did not arrive."""
        self._send_lives(self._life_spans.rest())
        self._processor.shutdown()
        self._meters.shutdown()
        if self.dropped:
            log.warning(
                "%d of %d spans did not reach the OpenTelemetry receiver",
                self.dropped,
                self._given + self._lost,
            )

    @property
    def dropped(self) -> int:
        """Spans that were lost: on the way here, because too many waited, or not taken by the
        receiver. Exact once this is closed; before, it counts those that wait too."""
        return self._lost + self._given - self._exporter.taken

    def _send_lives(self, spans: Iterable[LifeSpan]) -> None:
        for span in spans:
            context = _context(span.trace, span.id)
            self._given += 1
            self._processor.on_end(
                ReadableSpan(
                    span.name,
                    context=context,
                    parent=_context(span.trace, span.parent) if span.parent else None,
                    resource=self._resource(span.service),
                    attributes=span.attributes,
                    start_time=nanoseconds(span.start),
                    end_time=nanoseconds(span.end),
                    instrumentation_scope=InstrumentationScope("umbra"),
                )
            )

    def _send(self, member: str, span: SpanSeen) -> None:
        provider = self._tracers.get(member)
        if provider is None:
            provider = TracerProvider(resource=self._resource(member), shutdown_on_exit=False)
            provider.add_span_processor(self._processor)
            self._tracers[member] = provider
        tracer = provider.get_tracer("umbra")
        made = tracer.start_span(span.name, start_time=nanoseconds(span.start))
        self._given += 1
        made.end(nanoseconds(span.end))

    def _resource(self, service: str) -> Resource:
        if service not in self._resources:
            attributes = {"service.name": service, "service.namespace": self._run_id}
            self._resources[service] = Resource.create(attributes)
        return self._resources[service]

    def _observer(
        self, read: Callable[[Look], Iterable[tuple[float, dict[str, str]]]]
    ) -> Callable[[CallbackOptions], list[Observation]]:
        def observe(_options: CallbackOptions) -> list[Observation]:
            look = self._look
            return [] if look is None else [Observation(v, labels) for v, labels in read(look)]

        return observe


class _Counting(SpanExporter):
    """Counts the spans that the receiver has taken."""

    def __init__(self, exporter: SpanExporter) -> None:
        self.taken = 0
        self._exporter = exporter

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self.taken += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _context(trace: int, own: int) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(trace, own, is_remote=False, trace_flags=flags)


def life_spans(spans: LifeSpans, seen: LifeSeen, offset_s: float) -> list[LifeSpan]:
    """The spans that `seen` makes known, of a sender whose clock is `offset_s` behind."""
    match seen.row:
        case LifeRow() as row:
            moved = replace(row, start=row.start + offset_s, end=row.end + offset_s)
            return spans.lived(seen.sender, moved)
        case PushSeen() as push:
            end = seen.sent_at + offset_s
            begin = end - push.total_s
            return spans.pushed(seen.sender, push.version, push.receiver, begin, end)
