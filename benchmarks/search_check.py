"""Whether what `umbra simulate --search` chooses is the best for real processes too.

    python benchmarks/search_check.py [--json FILE] [--quick]

Eight accelerators are modelled by replay engines and a timed trainer (`replay_cells.py`); buffer,
hub, generators and trainer are processes. The search gets the times of engine and trainer, and is
told nothing of any run. Then its choice, and the ways around it (other divisions, more and less
run-ahead, taking turns) are run for real: how far is the choice from the fastest of them, and
how far off is each prediction?
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import replay_cells
from replay_cells import ACCELERATORS, Mode
from report import Report
from simulator import Machine, rate, scenario_of
from whole_runs import Cell

from umbra.deploy.simulator.compare import simulate
from umbra.deploy.simulator.scenario import Scenario
from umbra.deploy.simulator.search import TOLERANCE, TURNS, Choice, best, search

MIX = "long-tailed"
SEED = 0
MOST = 8  # the loosest bound
PROMPT_TOKENS = 8  # of the task, about
IDLE = Machine(commit_s=5e-4, snapshot_s=1e-3, spread_s=5e-3)  # a quiet machine's, roughly
GOAL = 0.9  # of the fastest that was tried for real
ERROR = 0.1


def mode_of(choice: Choice) -> Mode:
    """The choice as processes."""
    if choice == TURNS:
        return Mode(str(choice), ACCELERATORS, ACCELERATORS, 13, 0)
    return Mode(
        str(choice),
        ACCELERATORS - choice.trainer_gpus,
        choice.trainer_gpus,
        20 + 3 * choice.run_ahead,
        choice.run_ahead,
        (f"buffer.max_staleness={choice.max_staleness}",),
    )


def scenario(choice: Choice) -> Scenario:
    """The simulation of `choice`."""
    return scenario_of(cell_of(choice), PROMPT_TOKENS, IDLE)


def cell_of(choice: Choice) -> Cell[Mode]:
    """The run of `choice`."""
    return Cell(replay_cells.FORM, mode_of(choice), MIX, SEED)


def around(chosen: Choice) -> Iterator[Choice]:
    """`chosen`, and what one would try instead."""
    found = [chosen, TURNS]
    if chosen != TURNS:
        gpus, ahead, bound = chosen.trainer_gpus, chosen.run_ahead, chosen.max_staleness
        found += [Choice(gpus + more, ahead, bound) for more in (-1, 1)]
        found += [Choice(gpus, 2 * ahead, max(bound, 2 * ahead)), Choice(gpus, ahead // 2, bound)]
    for one in dict.fromkeys(found):
        divides = 0 < one.trainer_gpus < ACCELERATORS and one.run_ahead > 0
        if one == TURNS or divides:
            yield one


def summarise(report: Report) -> None:
    """The table; what the choice is worth; the errors."""
    report.table(
        "ways",
        ["", "measured samples/s", "predicted", "error", "staleness measured / predicted"],
        [
            [
                row["way"] + (" (chosen)" if row["chosen"] else ""),
                row["measured"],
                row["predicted"],
                f"{row['predicted'] / row['measured'] - 1:+.1%}",
                f"{row['staleness']:.2f} / {row['predicted_staleness']:.2f}",
            ]
            for row in report.rows
        ],
    )
    chosen = next(row for row in report.rows if row["chosen"])
    fastest = max(row["measured"] for row in report.rows)
    report.figure("chosen", chosen["way"])
    report.figure("tried", report.facts["tried"])
    report.figure("over_turns", chosen["measured"] / _turns(report))
    report.goal("the choice, of the fastest way that was run", chosen["measured"] / fastest, ">=",
                GOAL)  # fmt: skip
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in report.rows]
    report.goal("largest error of a prediction", max(errors), "<=", ERROR)


def _turns(report: Report) -> float:
    return next(row["measured"] for row in report.rows if row["way"] == str(TURNS))


def main() -> int:
    """Search, run, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--work", type=Path, default=Path("runs/search_check"), help="models, runs")
    parser.add_argument("--quick", action="store_true", help="the choice and taking turns alone")
    args = parser.parse_args()
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    tried = list(search(scenario(Choice(ACCELERATORS // 2, MOST, MOST))))
    chosen = best(tried)
    print(f"{len(tried)} ways tried; chosen within {TOLERANCE:.0%}: {chosen}", flush=True)
    report = Report("search_check")
    report.facts["tried"] = len(tried)
    ways = [chosen, TURNS] if args.quick else list(around(chosen))
    for way in dict.fromkeys(ways):
        predicted = simulate(scenario(way))
        row: dict[str, Any] = replay_cells.run_cell(cell_of(way), work)
        report.add(
            way=str(way),
            chosen=way == chosen,
            measured=row["samples_per_s"],
            predicted=rate(predicted, mode_of(way)),
            staleness=row["staleness"],
            predicted_staleness=predicted.staleness["mean"],
            trainer_idle=row["trainer_idle"],
        )
    report.restate(summarise)
    return 0 if report.show(args.json) else 1


if __name__ == "__main__":
    sys.exit(main())
