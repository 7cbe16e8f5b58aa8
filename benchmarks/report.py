"""Rows of a benchmark, and the figures, tables and goals that follow from them, in one JSON file.

A script adds rows as it measures, and its `summarise(report)` states everything that is published
from the rows alone: so a file can be continued, and a test computes the figures of every file in
`benchmarks/results/` again.
"""

from __future__ import annotations

import json
import math
import operator
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import psutil

from umbra.services.reporting import aligned, number

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
OTHERS_MOST = 0.05  # of the machine's CPU time, that others may take while something is measured
SHARE_S = 1.0  # least time that a share is of: counters of CPU time move by 10 ms
_ORIGIN = ("date", "commit", "command", "hardware", "load", "others")
Table = dict[str, list[Any]]  # "columns": names; "rows": lists of cells


@dataclass
class Report:
    """Rows of one benchmark, and its results.

    Attributes:
        rows: the measurements, a dict each.
        figures: single values that documents name.
        tables: tables that documents show; cells are text.
        goals: a value, its bound, and whether it was met.
        facts: of the run as a whole, such as its options.
    """

    benchmark: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    goals: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    timed: bool = True  # refused where other processes took more than OTHERS_MOST of the CPU
    _load: list[float] = field(default_factory=lambda: [os.getloadavg()[0]])
    _others: float | None = None  # largest share that others took between two rows
    _share: CpuShare = field(default_factory=lambda: CpuShare())
    _origin: dict[str, Any] | None = None  # of a file that nothing was added to

    @staticmethod
    def begin(benchmark: str, file: Path | None, *, timed: bool = True) -> Report:
        """Return the report in `file`, to be continued; an empty one if there is none."""
        if file is None or not file.exists():
            return Report(benchmark, timed=timed)
        report = Report.read(file)
        report.timed = timed
        return report

    @staticmethod
    def read(file: Path) -> Report:
        """Read rows and facts of a file; `restate` makes its figures, tables and goals again."""
        content = json.loads(file.read_text(encoding="utf-8"))
        report = Report(content["benchmark"], rows=content["rows"], facts=content.get("facts", {}))
        report._load = content.get("load", []) + report._load
        report._others = content.get("others")
        report._origin = {name: content[name] for name in _ORIGIN if name in content}
        return report

    def add(self, **row: Any) -> None:
        """Add a row; others' share of the CPU is taken of the time since the last one."""
        self.rows.append(row)
        self._load.append(os.getloadavg()[0])
        self._origin = None
        if self._others is None or self._share.seconds >= SHARE_S:
            self._others = max(self._others or 0.0, self._share.others())
            self._share = CpuShare()

    def count(self, seconds: float) -> None:
        """Count CPU seconds of processes that this one has started, but not seen end."""
        self._share.count(seconds)

    def disturbed(self) -> bool:
        """Return whether others took too much CPU since the last row; if so count from now on."""
        if self._share.others() <= OTHERS_MOST:
            return False
        self._share = CpuShare()
        return True

    def goal(self, name: str, value: float, op: str, goal: float) -> None:
        """State the goal `value op goal`, with op one of > >= < <=."""
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
        """Compute figures, tables and goals from the rows."""
        self.goals, self.figures, self.tables = [], {}, {}
        summarise(self)

    def show(self, file: Path | None = None) -> bool:
        """Print everything, write `file`; return whether all goals are met."""
        print(f"{self.benchmark} ({hardware()})")
        tables = self.tables or {"": _as_table(self.rows)}
        for name, table in tables.items():
            print("\n".join([name, *aligned([table["columns"], *table["rows"]])]).strip())
        for name, value in self.figures.items():
            print(f"{name}: {text(value)}")
        for goal in self.goals:
            print(f"goal {goal_text(goal)}")
        others = self._others or 0.0
        if self.timed and others > OTHERS_MOST:
            print(f"refused: others took {100 * others:.0f} % of the CPU; run it alone")
            return False
        if file is not None:
            self.write(file)
        return all(goal["met"] for goal in self.goals)

    def write(self, file: Path) -> None:
        """Write the rows and results so far, with the least and highest load of the machine."""
        origin = self._origin or {
            "date": time.strftime("%Y-%m-%d"),
            "commit": commit(),
            "command": _command(sys.argv),
            "hardware": hardware(),
            "load": [round(min(self._load), 1), round(max(self._load), 1)],
            "others": self._others,
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


def cpu_seconds(pid: int | None = None) -> float:
    """Return the CPU seconds of a process (None: this one) and all its descendants so far."""
    process, total = psutil.Process(pid), 0.0
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += sum(one.cpu_times()[:4])  # user, system, ended children included
    return total


class CpuShare:
    """Shares of the machine's CPU time since it was made."""

    def __init__(self) -> None:
        self._began, self._own, self._all = time.monotonic(), cpu_seconds(), _busy_seconds()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def count(self, seconds: float) -> None:
        """Count CPU seconds that `cpu_seconds` has lost."""
        self._own -= seconds

    def others(self) -> float:
        """Return the share that processes took which this one did not start."""
        taken = _busy_seconds() - self._all - (cpu_seconds() - self._own)
        cores = psutil.cpu_count() or 1
        return max(0.0, taken) / (cores * self.seconds)


def _busy_seconds() -> float:
    busy = ("user", "nice", "system", "irq", "softirq", "steal")
    return sum(getattr(psutil.cpu_times(), name) for name in busy)


def free_port() -> int:
    """Return a port that nobody uses at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def commit() -> str:
    """Return the short hash of the commit that is measured; with + where files were changed."""
    root = Path(__file__).parent
    git = ("git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*")
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _command(argv: Sequence[str]) -> str:
    """Return the command line without `--json FILE`."""
    words = list(argv[1:])
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    return shlex.join(["python", f"benchmarks/{Path(argv[0]).name}", *words])


def goal_text(goal: dict[str, Any]) -> str:
    """Return a goal as a line: value, bound, met or missed."""
    verdict = "met" if goal["met"] else "MISSED"
    return f"{goal['name']}: {text(goal['value'])} {goal['op']} {text(goal['goal'])}: {verdict}"


def hardware() -> str:
    """Return GPU if torch sees one, processor, cores that are allowed, and version of Python."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
                break
    cores = len(os.sched_getaffinity(0))
    torch: Any = sys.modules.get("torch")
    gpu = f"{torch.cuda.get_device_name()}, " if torch and torch.cuda.is_available() else ""
    return f"{gpu}{processor}, {cores} cores, Python {platform.python_version()}"


def text(value: Any) -> str:
    """Format a value as it is published: numbers with three digits; "-" for None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return number(value) if is_number or value is None else str(value)


def percentile_ms(seconds: Sequence[float], share: float) -> float:
    """Return a percentile of `seconds` in milliseconds; NaN without values."""
    if not seconds:
        return math.nan
    return 1e3 * sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))]


def spread(values: Sequence[float], form: str = "") -> str:
    """Format as mean [least-largest]; a single value alone."""
    write = (lambda value: format(value, form)) if form else text
    if len(values) < 2:
        return write(values[0]) if values else "-"
    return f"{write(mean(values))} [{write(min(values))}-{write(max(values))}]"


def _as_table(rows: Sequence[dict[str, Any]]) -> Table:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return {"columns": columns, "rows": [[text(row.get(name)) for name in columns] for row in rows]}
