"""What a process did lately, and how far its clock is from the buffer's."""

import random
from typing import Any

import pytest

from umbra.services.process.clock import ClockOffset
from umbra.services.process.metrics import MetricsFile
from umbra.services.process.spans import KEPT, Span, SpanLog


def test_shares_of_the_last_seconds() -> None:
    now = 100.0
    log = SpanLog(lambda: now)
    assert log.shares() == {}
    log.add(Span("old", 50.0, 80.0))
    log.add(Span("train", 88.0, 95.0))  # of which 5 s count
    log.add(Span("idle: work", 95.0, 98.0))
    log.begin("train", 98.0)
    assert log.shares() == {"train": pytest.approx(0.7), "idle: work": pytest.approx(0.3)}


def test_shares_of_a_process_that_has_just_begun() -> None:
    log = SpanLog(lambda: 4.0)
    log.add(Span("train", 2.0, 3.0))
    assert log.shares() == {"train": pytest.approx(0.5)}


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


def test_the_fastest_round_trip_is_believed() -> None:
    clock = ClockOffset()
    assert clock.best is None
    clock.measured(sent=100.0, read=107.0, received=104.0)  # waited on the way back
    clock.measured(sent=110.0, read=115.01, received=110.02)
    clock.measured(sent=120.0, read=125.9, received=121.0)
    assert clock.best is not None
    assert clock.best.seconds == pytest.approx(5.0)
    assert clock.best.error_s == pytest.approx(0.01)


def test_a_clock_that_was_set_back_is_no_round_trip() -> None:
    clock = ClockOffset()
    clock.measured(sent=100.0, read=107.0, received=50.0)
    assert clock.best is None


@pytest.mark.parametrize("skew_s", [-3600.0, -0.5, 0.0, 12.25])
def test_the_offset_is_right_to_within_its_error(skew_s: float) -> None:
    """Round trips of 1 to 200 ms, however lopsided, and a buffer that is slow to answer."""
    draw = random.Random(0)
    clock, now = ClockOffset(), 1_000.0
    for _ in range(50):
        there, stay, back = (draw.uniform(0.0005, 0.07) for _ in range(3))
        sent, read, received = now, now + there + skew_s, now + there + stay + back
        clock.measured(sent=sent, read=read, received=received)
        best = clock.best
        assert best is not None
        assert abs(best.seconds - skew_s) <= best.error_s + 1e-9
        now = received + 2.0
    assert clock.best is not None
    assert clock.best.error_s < 0.05
