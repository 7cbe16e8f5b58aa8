"""What every benchmark shares: rows, the figures, tables and goals made of them, one JSON file.

A script that measures something adds rows as it goes and has a function `summarise(report)`, which
states everything that is published from the rows alone: so a file that is continued is judged as a
whole, and a test makes the figures of every file in `benchmarks/results/` again from its rows.
"""

from __future__ import annotations

import json
import math
import operator
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from umbra.services.reporting.numbers import number
from umbra.services.reporting.tables import aligned

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_ORIGIN = ("date", "command", "hardware", "load")
Table = dict[str, list[Any]]  # "columns": names; "rows": lists of cells


@dataclass
class Report:
    """Rows of one benchmark, and what follows from them.

    Attributes:
        rows: what was measured, a dict each.
        figures: single values that documents name, by name.
        tables: what documents show, by name; cells are text as it is published.
        goals: what was hoped for, and whether it came true.
        facts: of the run as a whole, such as its options.
    """

    benchmark: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    goals: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    _load: list[float] = field(default_factory=lambda: [os.getloadavg()[0]])
    _origin: dict[str, Any] | None = None  # of a file that nothing was added to

    @staticmethod
    def begin(benchmark: str, file: Path | None) -> Report:
        """The report in `file`, to be continued; an empty one if there is none."""
        return Report.read(file) if file is not None and file.exists() else Report(benchmark)

    @staticmethod
    def read(file: Path) -> Report:
        """The rows and facts of a file; its figures, tables and goals are left to be made again."""
        content = json.loads(file.read_text(encoding="utf-8"))
        report = Report(content["benchmark"], rows=content["rows"], facts=content.get("facts", {}))
        report._load = content.get("load", []) + report._load
        report._origin = {name: content[name] for name in _ORIGIN if name in content}
        return report

    def add(self, **row: Any) -> None:
        """One line of the table."""
        self.rows.append(row)
        self._load.append(os.getloadavg()[0])
        self._origin = None

    def goal(self, name: str, value: float, op: str, goal: float) -> None:
        """State what was hoped for: `value op goal`, with op one of > >= < <=."""
        met = _OPERATORS[op](value, goal)
        self.goals.append({"name": name, "value": value, "op": op, "goal": goal, "met": met})

    def figure(self, name: str, value: Any) -> None:
        """State a value that documents name."""
        self.figures[name] = value

    def table(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """State a table that documents show; numbers are written with three digits."""
        cells = [[text(cell) for cell in row] for row in rows]
        self.tables[name] = {"columns": list(columns), "rows": cells}

    def restate(self, summarise: Callable[[Report], None]) -> None:
        """Make figures, tables and goals anew from the rows."""
        self.goals, self.figures, self.tables = [], {}, {}
        summarise(self)

    def show(self, file: Path | None = None) -> bool:
        """Print everything, write `file`; whether all goals are met."""
        print(f"{self.benchmark} ({hardware()})")
        tables = self.tables or {"": _as_table(self.rows)}
        for name, table in tables.items():
            print("\n".join([name, *aligned([table["columns"], *table["rows"]])]).strip())
        for name, value in self.figures.items():
            print(f"{name}: {text(value)}")
        for goal in self.goals:
            print(f"goal {goal_text(goal)}")
        if file is not None:
            self.write(file)
        return all(goal["met"] for goal in self.goals)

    def write(self, file: Path) -> None:
        """Write what there is so far.

        `load` is the machine's load, the least and the most while it was measured: beside other
        work, ratios within a run say more than rates.
        """
        origin = self._origin or {
            "date": time.strftime("%Y-%m-%d"),
            "command": _command(sys.argv),
            "hardware": hardware(),
            "load": [round(min(self._load), 1), round(max(self._load), 1)],
        }
        content = {
            "benchmark": self.benchmark,
            **origin,
            "facts": self.facts,
            "figures": self.figures,
            "tables": self.tables,
            "goals": self.goals,
            "rows": self.rows,
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _command(argv: Sequence[str]) -> str:
    """How the script was called, but for where its results go."""
    words = list(argv[1:])
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    return " ".join(["python", f"benchmarks/{Path(argv[0]).name}", *words])


def goal_text(goal: dict[str, Any]) -> str:
    """A goal in words: what came of it, and what was hoped for."""
    verdict = "met" if goal["met"] else "MISSED"
    return f"{goal['name']}: {text(goal['value'])} {goal['op']} {text(goal['goal'])}: {verdict}"


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


def text(value: Any) -> str:
    """A value as it is published: numbers with three digits, thousands apart; "-" for none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return number(value) if is_number or value is None else str(value)


def percentile_ms(seconds: Sequence[float], share: float) -> float:
    """A percentile of `seconds`, in milliseconds; NaN without values."""
    if not seconds:
        return math.nan
    return 1e3 * sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))]


def spread(values: Sequence[float], form: str = "") -> str:
    """Mean [least-largest], as it is published; of a single value, that."""
    write = (lambda value: format(value, form)) if form else text
    if len(values) < 2:
        return write(values[0]) if values else "-"
    return f"{write(mean(values))} [{write(min(values))}-{write(max(values))}]"


def _as_table(rows: Sequence[dict[str, Any]]) -> Table:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return {"columns": columns, "rows": [[text(row.get(name)) for name in columns] for row in rows]}
