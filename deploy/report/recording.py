"""Rows that the services of a run left behind, with all times by one clock: the buffer's."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from umbra.deploy.run_folder import RunFolder, read_rows
from umbra.proto.errors import UsageError
from umbra.services.monitor.traces import LifeRow, LifeSpan, LifeSpans
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


class Clocks:
    """How far the clock of each service was off, over the run.

    Services measure it by round trips to the buffer and note it down when it changes: rows
    `{"kind": "clock", "offset_s", "error_s"}`. What happened before the first row has its offset.
    """

    def __init__(self) -> None:
        self._times: defaultdict[str, list[float]] = defaultdict(list)
        self._offsets: defaultdict[str, list[float]] = defaultdict(list)
        self.worst: dict[str, tuple[float, float]] = {}  # largest offset and its error, by service

    def measured(self, row: Mapping[str, Any]) -> None:
        """A row of kind "clock"; those of a service come in their order."""
        service, offset = row["service"], row["offset_s"]
        self._times[service].append(row["time"])
        self._offsets[service].append(offset)
        if abs(offset) >= abs(self.worst.get(service, (0.0, 0.0))[0]):
            self.worst[service] = (offset, row["error_s"])

    def align(self, service: str, at: float) -> float:
        """`at`, a time of the clock of `service`, by the buffer's."""
        times = self._times.get(service)
        if not times:
            return at
        return at + self._offsets[service][max(0, bisect_right(times, at) - 1)]


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
        self.clocks = Clocks()
        for row in self.rows():
            if row["kind"] == "clock":
                self.clocks.measured(row)

    def rows(self) -> Iterator[dict[str, Any]]:
        for path in self._paths:
            yield from read_rows(path)

    def aligned_rows(self) -> Iterator[dict[str, Any]]:
        """All rows; `start` and `end` of spans by the buffer's clock."""
        for row in self.rows():
            if row["kind"] == "span":
                begin, end = (self.clocks.align(row["service"], row[k]) for k in ("start", "end"))
                yield {**row, "start": begin, "end": end}
            else:
                yield row

    def lives(self, run_id: str) -> Iterator[LifeSpan]:
        """The spans of the lives of traced groups."""
        found: list[tuple[float, dict[str, Any]]] = []
        for row in self.rows():
            if row["kind"] in ("life", "push"):
                end = row["end"] if row["kind"] == "life" else row["time"]
                found.append((self.clocks.align(row["service"], end), row))
        spans = LifeSpans(run_id)
        for end, row in sorted(found, key=lambda one: one[0]):
            service = row["service"]
            if row["kind"] == "life":
                start = self.clocks.align(service, row["start"])
                moved = row | {"start": start, "end": end}
                yield from spans.lived(service, msgspec.convert(moved, LifeRow))
            else:
                begin = end - row["total_s"]
                yield from spans.pushed(service, row["version"], row["receiver"], begin, end)
        yield from spans.rest()

    def spans(self, row: Mapping[str, Any]) -> Iterator[ReportSpan]:
        """What `row` says that a service did."""
        service, align = row["service"], self.clocks.align
        match row["kind"]:
            case "span":
                left_out = ("time", "service", "kind", "name", "start", "end", "lengths")
                yield ReportSpan(
                    service,
                    span_name(dict(row)),
                    align(service, row["start"]),
                    align(service, row["end"]),
                    facts={k: v for k, v in row.items() if k not in left_out},
                )
            case "push":
                end = align(service, row["time"])
                yield ReportSpan(
                    service,
                    f"push {row['version']}",
                    end - row["total_s"],
                    end,
                    track=f"to {row['receiver']}",
                    facts={k: v for k, v in row.items() if k not in ("time", "service", "kind")},
                )
            case "eval":
                end = align(service, row["time"])
                name = f"eval of version {row['version']}"
                facts = {"accuracy": row["accuracy"], "answered": row["answered"]}
                yield ReportSpan(service, name, end - row["seconds"], end, "evals", facts)
            case _:
                pass
