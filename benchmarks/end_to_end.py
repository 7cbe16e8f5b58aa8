"""Whole runs: synchronous, one step off and asynchronous, on the same resources.

    python benchmarks/end_to_end.py --json FILE [--form replay real] [--seeds 0 1 2] [--jobs 2]
    python benchmarks/end_to_end.py --quick                 one seed, few modes, short runs

Two forms. "replay": real processes and sockets, but engines and a trainer that take known times and
share no cores, so that the ideal can be computed (`replay_cells.py`). "real": the sort task of the
demo with the torch engine and trainer on this machine's cores (`demo_cells.py`); on these nothing
else may run, so they are done one at a time.

FILE is written after each run; runs that are in it are skipped, so that it can be made in slices
(`--minutes`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

import demo_cells
import replay_cells
from report import Report
from whole_runs import Cell, cells

RUN_LIMIT_S = 900.0
SHOWN = ("samples_per_s", "tokens_per_s", "step_s", "staleness", "staleness_max", "generator_idle")
QUICK_MODES = ("sync, all take turns", "sync, fixed split", "async")


def all_cells(args: argparse.Namespace) -> list[Cell[Any]]:
    """What is to be run."""
    chosen: list[Cell[Any]] = []
    if "replay" in args.form:
        chosen += cells(replay_cells.FORM, replay_cells.MODES, args.mixes, args.seeds, args.modes)
    if "real" in args.form:
        chosen += cells(demo_cells.FORM, demo_cells.MODES, args.tasks, args.seeds, args.modes)
    return chosen


def run_cell(cell: Cell[Any], work: Path, steps: int) -> dict[str, Any]:
    """Do the run in this process; its row."""
    if cell.form == demo_cells.FORM:
        return demo_cells.run_cell(cell, work, steps)
    return replay_cells.run_cell(cell, work)


def in_child(cell: Cell, work: Path, steps: int) -> dict[str, Any]:
    """Do the run in a process of its own; its row.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    argv = [sys.executable, __file__, "--cell", cell.key, "--work", str(work)]
    done = subprocess.run(
        [*argv, "--steps", str(steps)],
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{cell.key} failed: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def make_up(
    missing: Sequence[Cell[Any]], args: argparse.Namespace, keep: Callable[[dict[str, Any]], None]
) -> None:
    """Run what is missing, `args.jobs` at a time; none is begun when the time is over."""
    began = time.monotonic()

    def one(cell: Cell) -> dict[str, Any] | None:
        if args.minutes and time.monotonic() - began > 60 * args.minutes:
            return None
        return in_child(cell, args.work, args.steps)

    with ThreadPoolExecutor(args.jobs) as pool:
        for cell, row in zip(missing, pool.map(one, missing), strict=True):
            if row is None:
                print(f"{cell.key}: left for another call")
                continue
            keep(row)
            print(f"{cell.key}: {row['samples_per_s']:.1f} samples/s", flush=True)


def by_mode(rows: Sequence[dict[str, Any]], key: str) -> dict[tuple[str, str, str], list[float]]:
    """Values of a column over seeds, by form, mix and mode."""
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row in rows:
        if row.get(key) is not None:
            found[row["form"], row["mix"], row["mode"]].append(row[key])
    return found


def text(values: Sequence[float]) -> str:
    """Mean [least-largest]."""
    if len(values) < 2:
        return f"{values[0]:.3g}" if values else "-"
    return f"{mean(values):.3g} [{min(values):.3g}-{max(values):.3g}]"


def show(rows: Sequence[dict[str, Any]]) -> None:
    """A table of means over seeds."""
    columns = (*SHOWN, "trainer_idle", "buffer_idle", "hub_idle", "utilisation", "to_accuracy_s")
    tables = {name: by_mode(rows, name) for name in columns}
    print("| form | mix | mode | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 3) + "|")
    for place in by_mode(rows, "samples_per_s"):
        cells = [text(tables[name].get(place, [])) for name in columns]
        print("| " + " | ".join([*place, *cells]) + " |")


def judge(report: Report, rows: Sequence[dict[str, Any]]) -> None:
    """State the goals that the rows can speak of."""
    speed, use = by_mode(rows, "samples_per_s"), by_mode(rows, "utilisation")
    place = ("replay", "long-tailed")
    fast = speed.get((*place, replay_cells.ASYNCHRONOUS))
    for name in replay_cells.SYNCHRONOUS:
        if fast and (slow := speed.get((*place, name))):
            report.goal(f"long-tailed: async over {name}", mean(fast) / mean(slow), ">=", 2.0)
            mode = next(one for one in replay_cells.MODES if one.name == name)
            best = replay_cells.SAMPLES / replay_cells.turns_s(mode, "long-tailed")
            what = f"long-tailed: async over {name}, if that lost nothing"
            report.goal(what, mean(fast) / best, ">=", 2.0)
    for mix in replay_cells.MIXES:
        if values := use.get(("replay", mix, replay_cells.ASYNCHRONOUS)):
            report.goal(f"{mix}: bottleneck's use over the ideal", min(values), ">=", 0.95)
    times = by_mode(rows, "to_accuracy_s")
    for task in ("sort", "guess"):
        quick = times.get(("real", task, demo_cells.ASYNCHRONOUS))
        slow = [times.get(("real", task, name), []) for name in demo_cells.SYNCHRONOUS]
        best = min((mean(values) for values in slow if values), default=None)
        if quick and best is not None:
            report.goal(
                f"{task}: time to 90 %, best sync over async", best / mean(quick), ">=", 1.5
            )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="rows; continued if it exists")
    parser.add_argument("--work", type=Path, default=Path("runs/end-to-end"), help="models, runs")
    parser.add_argument("--form", nargs="+", default=["replay", "real"], choices=["replay", "real"])
    parser.add_argument("--mixes", nargs="+", default=list(replay_cells.MIXES))
    parser.add_argument("--tasks", nargs="+", default=["sort"], choices=["sort", "guess"])
    parser.add_argument("--modes", nargs="+", default=[])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=0, help="of real runs; 0 = the task's own")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once; for replay alone")
    parser.add_argument("--minutes", type=float, default=0.0, help="start no run later; 0 = all")
    parser.add_argument("--quick", action="store_true", help="replay alone, one seed, three modes")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.quick:
        args.form, args.seeds, args.modes = ["replay"], [0], list(QUICK_MODES)
        args.mixes, args.jobs = ["long-tailed"], 3
    return args


def main() -> int:
    """Run what is missing, print tables."""
    args = parse()
    if args.cell:
        args.seeds = [int(args.cell.rpartition("/")[2])]
        cell = next(one for one in all_cells(args) if one.key == args.cell)
        print(json.dumps(run_cell(cell, args.work, args.steps)))
        return 0
    report = Report("end_to_end")
    if args.json and args.json.exists():
        report.rows = json.loads(args.json.read_text(encoding="utf-8"))["rows"]
    done = {row["cell"] for row in report.rows}
    missing = [cell for cell in all_cells(args) if cell.key not in done]
    if "replay" in args.form and missing:
        replay_cells.prepare(args.work)

    def keep(row: dict[str, Any]) -> None:
        report.add(**row)
        if args.json:
            report.write(args.json)

    make_up(missing, args, keep)
    show(report.rows)
    judge(report, report.rows)
    rows, report.rows = report.rows, []  # the table is printed already
    met = report.show()
    report.rows = rows
    if args.json:
        report.write(args.json)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
