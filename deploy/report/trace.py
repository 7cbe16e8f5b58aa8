"""The timeline of a run in the Trace Event Format, which Perfetto and chrome://tracing open; and
the lives of traced groups for OpenTelemetry.

Format: "Trace Event Format" of the Chromium project; times are in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from umbra.deploy.report.recording import Recording, ReportSpan
from umbra.services.monitor.traces import LifeSpan, otlp_json

LINE_SPANS = 512  # of a line of OTLP


def write_trace(recording: Recording, path: Path) -> int:
    """Write the spans of `recording`; how many there are."""
    count = 0
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = ""
        for event in _events(recording):
            file.write(separator + json.dumps(event, separators=(",", ":")))
            separator = ",\n"
            count += event["ph"] == "X"
        file.write("\n]}\n")
    part.replace(path)
    return count


def write_lives(recording: Recording, run_id: str, path: Path) -> int:
    """Write the lives of traced groups as lines of OTLP in JSON; how many spans. None, no file."""
    spans = list(recording.lives(run_id))
    if not spans:
        return 0
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8") as file:
        for at in range(0, len(spans), LINE_SPANS):
            some: list[LifeSpan] = spans[at : at + LINE_SPANS]
            file.write(json.dumps(otlp_json(run_id, some), separators=(",", ":")) + "\n")
    part.replace(path)
    return len(spans)


def _events(recording: Recording) -> Iterator[dict[str, Any]]:
    numbers: dict[tuple[str, str], tuple[int, int]] = {}  # process and thread, as the format wants
    for row in recording.rows():
        for span in recording.spans(row):
            if (span.service, span.track) not in numbers:
                yield from _name(span, numbers)
            yield _complete(span, *numbers[span.service, span.track])
        if row["kind"] == "batch":
            yield _counter(row, recording)


def _complete(span: ReportSpan, process: int, thread: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.service,
        "ts": round(1e6 * span.start, 1),
        "dur": round(1e6 * max(0.0, span.end - span.start), 1),
        "pid": process,
        "tid": thread,
        "args": dict(span.facts),
    }


def _name(
    span: ReportSpan, numbers: dict[tuple[str, str], tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    """Number the track of `span`, and its service if that is new; say how they are called."""
    known = {service: process for (service, _), (process, _) in numbers.items()}
    process = known.get(span.service, len(known) + 1)
    thread = sum(service == span.service for service, _ in numbers) + 1
    numbers[span.service, span.track] = (process, thread)
    if span.service not in known:
        args = {"name": span.service}
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": args}
    args = {"name": span.track or "main"}
    yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": args}


def _counter(row: dict[str, Any], recording: Recording) -> dict[str, Any]:
    """Where the samples were when a batch was formed."""
    at = recording.clocks.align(row["service"], row["time"])
    return {
        "ph": "C",
        "name": "samples in flight",
        "ts": round(1e6 * at, 1),
        "pid": 0,
        "args": row["in_flight"],
    }
