"""Whole runs: synchronous, one step off and asynchronous, on the same resources.

    python benchmarks/end_to_end.py --json FILE [--form replay real trl] [--seeds 0 1 2] [--jobs 2]
    python benchmarks/end_to_end.py --quick                 one seed, few modes, short runs

Three forms. "replay": real processes and sockets, but engines and a trainer that take known times
and share no cores, so that the ideal can be computed (`replay_cells.py`). "real": the sort task of
the demo with the torch engine and trainer on this machine's cores (`demo_cells.py`); on these
nothing else may run, so they are done one at a time. "trl": the same with TRL's trainer
(`trl_peer.py`).

FILE is written after each run; runs that are in it are skipped, so that it can be made in slices
(`--minutes`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import demo_cells
import replay_cells
from end_to_end_tables import summarise
from report import Report
from whole_runs import Cell, cells

RUN_LIMIT_S = 900.0
FORMS = ("replay", "real", "trl")
QUICK_MODES = ("sync, all take turns", "sync, fixed split", "async", "TRL, 1 thread")
QUICK_STEPS = 12
TASKS = ("sort", "guess")


def all_cells(args: argparse.Namespace) -> list[Cell[Any]]:
    """What is to be run."""
    chosen: list[Cell[Any]] = []
    if "replay" in args.form:
        chosen += cells(replay_cells.FORM, replay_cells.MODES, args.mixes, args.seeds, args.modes)
    if "real" in args.form:
        chosen += cells(demo_cells.FORM, demo_cells.MODES, args.tasks, args.seeds, args.modes)
    if "trl" in args.form:
        chosen += cells(demo_cells.FORM, demo_cells.TRL_MODES, args.tasks, args.seeds, args.modes)
    return chosen


def cell_of(key: str) -> Cell[Any]:
    """The cell of that key, of any form, mode and seed."""
    args = parse(["--form", *FORMS, "--tasks", *TASKS, "--seeds", key.rpartition("/")[2]])
    return next(cell for cell in all_cells(args) if cell.key == key)


def run_cell(cell: Cell[Any], work: Path, steps: int) -> dict[str, Any]:
    """Do the run in this process; its row."""
    if isinstance(cell.mode, demo_cells.TrlMode):
        import trl_peer  # imports TRL

        return trl_peer.run_cell(cell, work, steps)
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


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="rows; continued if it exists")
    parser.add_argument("--work", type=Path, default=Path("runs/end-to-end"), help="models, runs")
    parser.add_argument("--form", nargs="+", default=["replay", "real"], choices=FORMS)
    parser.add_argument("--mixes", nargs="+", default=list(replay_cells.MIXES))
    parser.add_argument("--tasks", nargs="+", default=["sort"], choices=TASKS)
    parser.add_argument("--modes", nargs="+", default=[])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=0, help="of real runs; 0 = the task's own")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once; for replay alone")
    parser.add_argument("--minutes", type=float, default=0.0, help="start no run later; 0 = all")
    parser.add_argument("--quick", action="store_true", help="no real runs, one seed, few modes")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.quick:
        args.form, args.seeds, args.modes = ["replay", "trl"], [0], list(QUICK_MODES)
        args.mixes, args.jobs, args.steps = ["long-tailed"], 3, QUICK_STEPS
    return args


def main() -> int:
    """Run what is missing, print tables."""
    args = parse()
    if args.cell:
        print(json.dumps(run_cell(cell_of(args.cell), args.work, args.steps)))
        return 0
    there = args.json and args.json.exists()
    report = Report.read(args.json) if there else Report("end_to_end")
    done = {row["cell"] for row in report.rows}
    missing = [cell for cell in all_cells(args) if cell.key not in done]
    if "replay" in args.form and missing:
        replay_cells.prepare(args.work)

    def keep(row: dict[str, Any]) -> None:
        report.add(**row)
        if args.json:
            report.write(args.json)

    make_up(missing, args, keep)
    report.restate(summarise)
    return 0 if report.show(args.json) else 1


if __name__ == "__main__":
    sys.exit(main())
