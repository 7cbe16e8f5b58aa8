"""The timeline of a run in the Trace Event Format, which Perfetto and chrome://tracing open.

Format: "Trace Event Format" of the Chromium project; times are in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from umbra.deploy.report.recording import Recording, ReportSpan


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


def _events(recording: Recording) -> Iterator[dict[str, Any]]:
    numbers: dict[tuple[str, str], tuple[int, int]] = {}  # process and thread, as the format wants
    for row in recording.rows():
        for span in recording.spans(row):
            if (span.service, span.track) not in numbers:
                yield from _name(span, numbers)
            yield _complete(span, *numbers[span.service, span.track])
        if row["kind"] == "batch":
            yield _counter(row)


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


def _counter(row: dict[str, Any]) -> dict[str, Any]:
    """Where the samples were when a batch was formed."""
    return {
        "ph": "C",
        "name": "samples in flight",
        "ts": round(1e6 * row["time"], 1),
        "pid": 0,
        "args": row["in_flight"],
    }
