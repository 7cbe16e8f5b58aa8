"""Export to OpenTelemetry, into memory instead of over the network."""

from __future__ import annotations

import pytest
from fakes.looks import header, status

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from umbra.proto.messages import Event
from umbra.services.monitor.feed import Feed
from umbra.services.monitor.telemetry import Telemetry
from umbra.services.monitor.watch import Look


def test_spans_and_figures_are_exported_once() -> None:
    exporter, reader, feed = InMemorySpanExporter(), InMemoryMetricReader(), Feed()
    telemetry = Telemetry("run-1", exporter, reader)

    def did(member: str, name: str, start: float, end: float) -> None:
        spans = {"spans": [[name, start, end]]}
        feed.heard(header(member), Event(kind="spans", fields=spans))

    did("trainer", "train_step", 10.0, 11.5)
    did("generator-0", "idle: work", 10.0, 12.0)
    telemetry.show(Look(status(), spans=feed.spans()))
    did("trainer", "commit", 11.5, 11.75)
    telemetry.show(Look(status(), spans=feed.spans()))
    metrics = reader.get_metrics_data()
    telemetry.close()

    sent = [
        (
            str(span.resource.attributes["service.name"]),
            span.name,
            (span.start_time or 0) / 1e9,
            (span.end_time or 0) / 1e9,
        )
        for span in exporter.get_finished_spans()
    ]
    assert sorted(sent) == [
        ("generator-0", "idle: work", 10.0, 12.0),
        ("trainer", "commit", 11.5, 11.75),
        ("trainer", "train_step", 10.0, 11.5),
    ]
    finished = exporter.get_finished_spans()
    assert {str(span.resource.attributes["service.namespace"]) for span in finished} == {"run-1"}
    assert metrics is not None
    figures = {
        (metric.name, *sorted((point.attributes or {}).items())): getattr(point, "value", None)
        for resource in metrics.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }
    assert figures["umbra.version",] == 40
    assert figures["umbra.samples.in_flight", ("state", "ready")] == 5
    key = ("umbra.member.share", ("activity", "idle: work"), ("member", "generator-0"))
    assert figures[key] == 0.3
