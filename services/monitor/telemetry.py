"""Export to OpenTelemetry by its own SDK: what members did as spans, figures as metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from umbra.services.monitor.feed import SpanSeen
from umbra.services.monitor.watch import Look

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
        self._processor = BatchSpanProcessor(exporter)
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

    def close(self) -> None:
        self._processor.shutdown()
        self._meters.shutdown()

    def _send(self, member: str, span: SpanSeen) -> None:
        provider = self._tracers.get(member)
        if provider is None:
            provider = TracerProvider(resource=self._resource(member), shutdown_on_exit=False)
            provider.add_span_processor(self._processor)
            self._tracers[member] = provider
        tracer = provider.get_tracer("umbra")
        made = tracer.start_span(span.name, start_time=_nanoseconds(span.start))
        made.end(_nanoseconds(span.end))

    def _resource(self, service: str) -> Resource:
        attributes = {"service.name": service, "service.namespace": self._run_id}
        return Resource.create(attributes)

    def _observer(
        self, read: Callable[[Look], Iterable[tuple[float, dict[str, str]]]]
    ) -> Callable[[CallbackOptions], list[Observation]]:
        def observe(_options: CallbackOptions) -> list[Observation]:
            look = self._look
            return [] if look is None else [Observation(v, labels) for v, labels in read(look)]

        return observe


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
