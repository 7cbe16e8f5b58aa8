"""The rows that the services of a run left behind, as figures and as a timeline.

Times are by the clock of each service's machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from umbra.deploy.run_folder import Row, RunFolder, read_rows, rewritten
from umbra.proto.errors import UsageError
from umbra.services.process.metrics import span_name
from umbra.services.reporting import is_idle

Interval = tuple[float, float]  # start and end, seconds
JOIN_S = 0.001  # spans that are closer are one
EVENT_FIELDS = ("time", "service", "kind", "name", "start", "end")  # of a row, by the event itself


def recorded(folders: Sequence[Path]) -> Iterator[Row]:
    """Yield the rows of a run from its folders, one per node if it ran on several.

    Raises:
        UsageError: a folder has no metrics.
    """
    paths = [RunFolder(folder).metrics for folder in folders]
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path} does not exist: name the folder of a run")
    for path in paths:
        yield from read_rows(path)


def _span(row: Row) -> tuple[str, float, float, str] | None:
    """Return name, start, end and track of the span in `row`; None if it has none."""
    end = row.get("time", 0.0)
    match row["kind"]:
        case "span":
            return span_name(row), row["start"], row["end"], "main"
        case "push":
            begin, to = end - row["total_s"], f"to {row['receiver']}"
            return f"push {row['version']}", begin, end, to
        case "eval":
            return f"eval of version {row['version']}", end - row["seconds"], end, "evals"
        case _:
            return None


@dataclass
class Figures:
    """The figures of a run; `seconds` are by service and activity.

    `spans` are by service and whether it was busy; contiguous ones are merged, so they stay few.
    """

    steps: list[Row] = field(default_factory=list[Row])
    pushes: list[Row] = field(default_factory=list[Row])
    evals: list[Row] = field(default_factory=list[Row])
    warnings: list[Row] = field(default_factory=list[Row])  # as they were first raised
    seconds: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    spans: dict[tuple[str, bool], list[Interval]] = field(
        default_factory=dict[tuple[str, bool], list[Interval]]
    )
    first_decode: float = float("inf")
    last_train: float = float("-inf")

    def busy(self, doing: str) -> list[Interval]:
        """Return when the services that ever do `doing` were not idle."""
        return [
            span
            for service, seconds in self.seconds.items()
            if any(name.partition(": ")[0] == doing for name in seconds)
            for span in self.spans.get((service, True), ())
        ]


def gather(rows: Iterable[Row]) -> Figures:
    """Return the figures of `rows`; of a step that a trainer has repeated the last one counts."""
    figures, steps = Figures(), dict[int, Row]()
    lists = {"push": figures.pushes, "eval": figures.evals, "warning": figures.warnings}
    for row in rows:
        if row["kind"] == "step":
            steps[row["step"]] = row
        elif row["kind"] == "span":
            _add(figures, row)
        elif row["kind"] in lists:
            lists[row["kind"]].append(row)
    figures.steps = [steps[number] for number in sorted(steps)]
    return figures


def _add(figures: Figures, row: Row) -> None:
    service, name, start, end = row["service"], row["name"], row["start"], row["end"]
    seconds, activity = figures.seconds.setdefault(service, {}), span_name(row)
    seconds[activity] = seconds.get(activity, 0.0) + max(0.0, end - start)
    spans = figures.spans.setdefault((service, not is_idle(name)), [])
    if spans and 0 <= start - spans[-1][1] < JOIN_S:
        spans[-1] = (spans[-1][0], end)
    else:
        spans.append((start, end))
    if name == "decode":
        figures.first_decode = min(figures.first_decode, start)
    elif name == "train_step":
        figures.last_train = max(figures.last_train, end)


def write_trace(rows: Iterable[Row], path: Path) -> None:
    """Write the spans in Chromium's Trace Event Format (microseconds)."""
    separator = ""
    with rewritten(path) as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for event in _events(rows):
            file.write(separator + json.dumps(event, separators=(",", ":")))
            separator = ",\n"
        file.write("\n]}\n")


def _events(rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
    numbers: dict[str, dict[str, int]] = {}  # of the tracks of each service, from 1
    for row in rows:
        if row["kind"] == "batch":  # samples by state when it was formed
            args, at = row["in_flight"], round(1e6 * row["time"], 1)
            yield {"ph": "C", "name": "samples in flight", "ts": at, "pid": 0, "args": args}
        if (span := _span(row)) is None:
            continue
        (name, start, end, track), service = span, row["service"]
        if service not in numbers:
            numbers[service] = {}
            yield _name_event("process", len(numbers), 0, service)
        tracks = numbers[service]
        process = list(numbers).index(service) + 1
        if track not in tracks:
            tracks[track] = len(tracks) + 1
            yield _name_event("thread", process, tracks[track], track)
        yield {
            "ph": "X",
            "name": name,
            "cat": service,
            "ts": round(1e6 * start, 1),
            "dur": round(1e6 * max(0.0, end - start), 1),
            "pid": process,
            "tid": tracks[track],
            "args": {k: v for k, v in row.items() if k not in EVENT_FIELDS},
        }


def _name_event(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    place = {"pid": process, "tid": thread}
    return {"ph": "M", "name": f"{what}_name", **place, "args": {"name": name}}
