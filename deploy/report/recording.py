"""Rows that the services of a run left behind; times are by the clock of each one's machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from umbra.deploy.files.run_folder import RunFolder, read_rows
from umbra.proto.errors import UsageError
from umbra.services.process.metrics import span_name


@dataclass(frozen=True, slots=True)
class ReportSpan:
    """Something that `service` did from `start` to `end`, seconds since the epoch.

    `track` keeps apart what a service does at the same time.
    """

    service: str
    name: str
    start: float
    end: float
    track: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Recording:
    """The rows of a run, read from its folders as often as needed; never held all at once.

    Args:
        folders: of the run; one per node, if it ran on several.

    Raises:
        UsageError: a folder has no metrics.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._paths = [RunFolder(folder).metrics for folder in folders]
        for path in self._paths:
            if not path.exists():
                raise UsageError(f"{path} does not exist: name the folder of a run")

    def rows(self) -> Iterator[dict[str, Any]]:
        for path in self._paths:
            yield from read_rows(path)

    def spans(self, row: Mapping[str, Any]) -> Iterator[ReportSpan]:
        """Yield the spans in `row`."""
        service = row["service"]
        match row["kind"]:
            case "span":
                left_out = ("time", "service", "kind", "name", "start", "end")
                yield ReportSpan(
                    service,
                    span_name(dict(row)),
                    row["start"],
                    row["end"],
                    facts={k: v for k, v in row.items() if k not in left_out},
                )
            case "push":
                end = row["time"]
                yield ReportSpan(
                    service,
                    f"push {row['version']}",
                    end - row["total_s"],
                    end,
                    track=f"to {row['receiver']}",
                    facts={k: v for k, v in row.items() if k not in ("time", "service", "kind")},
                )
            case "eval":
                end = row["time"]
                name = f"eval of version {row['version']}"
                facts = {"accuracy": row["accuracy"], "answered": row["answered"]}
                yield ReportSpan(service, name, end - row["seconds"], end, "evals", facts)
            case _:
                pass


Row = dict[str, Any]


@dataclass
class Figures:
    """The figures of a report; `seconds` are by service and activity."""

    steps: list[Row] = field(default_factory=list[Row])
    pushes: dict[str, list[Row]] = field(default_factory=dict[str, list[Row]])  # by receiver
    evals: list[Row] = field(default_factory=list[Row])
    warnings: list[Row] = field(default_factory=list[Row])  # as they were first raised
    seconds: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])


def gather(recording: Recording) -> Figures:
    figures, steps = Figures(), dict[int, Row]()
    for row in recording.rows():
        match row["kind"]:
            case "step":  # a trainer that started again has repeated some: the last one counts
                steps[row["step"]] = row
            case "push":
                figures.pushes.setdefault(row["receiver"], []).append(row)
            case "eval":
                figures.evals.append(row)
            case "warning":
                figures.warnings.append(row)
            case _:
                pass
        for span in recording.spans(row):
            if not span.track:
                spent = figures.seconds.setdefault(span.service, {})
                took = max(0.0, span.end - span.start)
                spent[span.name] = spent.get(span.name, 0.0) + took
    figures.steps = [steps[number] for number in sorted(steps)]
    return figures


def write_trace(recording: Recording, path: Path) -> int:
    """Write the spans in Chromium's Trace Event Format (microseconds); return their number."""
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
    """Number the track of `span`, and its service if it is new; yield their names."""
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
    """Return the numbers of samples by state when a batch was formed."""
    return {
        "ph": "C",
        "name": "samples in flight",
        "ts": round(1e6 * row["time"], 1),
        "pid": 0,
        "args": row["in_flight"],
    }
