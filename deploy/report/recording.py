"""Rows that the services of a run left behind; times are by the clock of each one's machine."""

from __future__ import annotations

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
        """What `row` says that a service did."""
        service = row["service"]
        match row["kind"]:
            case "span":
                left_out = ("time", "service", "kind", "name", "start", "end", "lengths")
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
    """What a report shows of a run; `seconds` are by service and activity."""

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
