"""What a process did lately, and how far its clock is from the buffer's."""

from typing import Any

import pytest

from umbra.services.process.metrics import KEPT, MetricsFile, Span, SpanLog


def test_shares_of_the_last_seconds() -> None:
    now = 100.0
    log = SpanLog(lambda: now)
    assert log.shares() == {}
    log.add(Span("old", 50.0, 80.0))
    log.add(Span("train", 88.0, 95.0))  # of which 5 s count
    log.add(Span("idle: work", 95.0, 98.0))
    log.begin("train", 98.0)
    assert log.shares() == {"train": pytest.approx(0.7), "idle: work": pytest.approx(0.3)}


def test_who_does_nothing_any_more_has_no_shares() -> None:
    now = 1.0
    log = SpanLog(lambda: now)
    log.add(Span("train", 0.0, 1.0))
    now = 100.0
    assert log.shares() == {}


def test_contiguous_spans_are_joined_and_never_too_many() -> None:
    log = SpanLog(lambda: 0.0)
    log.add(Span("a", 0.0, 1.0))
    log.add(Span("a", 1.0005, 2.0))
    log.add(Span("b", 2.0, 2.5))
    assert log.take() == [Span("a", 0.0, 2.0), Span("b", 2.0, 2.5)]
    assert log.take() == []
    for number in range(2 * KEPT):
        log.add(Span(str(number), float(number), number + 0.5))
    assert len(log.take()) == KEPT


def test_rows_of_the_metrics_file_are_watched() -> None:
    now = 10.0
    file = MetricsFile(None, "generator-0", lambda: now)
    rows: list[tuple[str, dict[str, Any]]] = []
    file.on_row = lambda kind, fields: rows.append((kind, fields))
    file.write("push", version=3)
    file.write("span", name="idle", reason="work", start=8.0, end=9.0)
    with file.span("score"):
        assert "score" in file.spans.shares() or now == 10.0
        now = 11.0
    assert rows == [("push", {"version": 3})]
    assert file.spans.take() == [Span("idle: work", 8.0, 9.0), Span("score", 10.0, 11.0)]
