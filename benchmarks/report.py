"""What every benchmark shares: a table on the screen, one JSON object in a file, goals."""

from __future__ import annotations

import json
import operator
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


@dataclass
class Report:
    """Rows and goals of one benchmark.

    A row is a dict; all rows of a report have the same keys. `show` prints the table and, with a
    file, writes {"benchmark", "date", "hardware", "rows", "goals"}.
    """

    benchmark: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    goals: list[dict[str, Any]] = field(default_factory=list)

    def add(self, **row: Any) -> None:
        """One line of the table."""
        self.rows.append(row)

    def goal(self, name: str, value: float, op: str, goal: float) -> None:
        """State what was hoped for: `value op goal`, with op one of > >= < <=."""
        met = _OPERATORS[op](value, goal)
        self.goals.append({"name": name, "value": value, "op": op, "goal": goal, "met": met})

    def show(self, file: Path | None = None) -> bool:
        """Print everything, write `file`; whether all goals are met."""
        print(f"{self.benchmark} ({hardware()})")
        for line in _table(self.rows):
            print(line)
        for goal in self.goals:
            verdict = "met" if goal["met"] else "MISSED"
            print(
                f"goal {goal['name']}: {_text(goal['value'])} {goal['op']} "
                f"{_text(goal['goal'])}: {verdict}"
            )
        if file is not None:
            self.write(file)
        return all(goal["met"] for goal in self.goals)

    def write(self, file: Path) -> None:
        """Write what there is so far."""
        content = {
            "benchmark": self.benchmark,
            "date": time.strftime("%Y-%m-%d"),
            "hardware": hardware(),
            "rows": self.rows,
            "goals": self.goals,
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def hardware() -> str:
    """The machine in words: processor, cores this process may use, Python."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
                break
    cores = len(os.sched_getaffinity(0))
    return f"{processor}, {cores} cores, Python {platform.python_version()}"


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    cells = [list(rows[0]), *([_text(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(rows[0]))]
    left = [isinstance(value, str) for value in rows[0].values()]
    return [
        "  ".join(
            cell.ljust(width) if flush else cell.rjust(width)
            for cell, width, flush in zip(line, widths, left, strict=True)
        )
        for line in cells
    ]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
