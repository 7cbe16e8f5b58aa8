"""Held-out accuracy by staleness, for several objectives, in real asynchronous runs.

    python benchmarks/staleness.py --json FILE                       the whole grid: hours
    python benchmarks/staleness.py --json FILE --seeds 0 --tasks sort --staleness 0 8

A cell is a run of `umbra up` with one thread per process. FILE is written after each, and cells
that it has are skipped. The staleness that
a run really had is measured and stands in its row beside the intended one. With run_ahead =
max_staleness = k and a generator that is faster than the trainer the queue is full: a sample waits
for k commits after the weights that made it, no more (`stale_policy = "wait"`) and no fewer.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from report import Report
from whole_runs import base_model, umbra

from umbra.deploy.commands.demo import DEMOS
from umbra.deploy.run_folder import read_rows

SAMPLES = 2048  # of an accuracy: a standard error of 0.01
CLAIM = 0.5  # versions by which the measured mean may differ from the intended staleness
POINTS = 2.0  # of accuracy that staleness may cost
# The same advantages and the same mean for all, so that only the correction differs.
SAME = ("advantage=dr_grpo", "aggregation=token_mean", "denominator=trained")

OBJECTIVES = ("naive", "ppo", "tis", "decoupled", "tis_opsm")
# On-policy the proximal policy is the sampling policy: one run stands for all of these.
ALIKE = ("naive", "ppo", "tis", "decoupled")
BASE, CHOSEN = "naive", "tis_opsm"
# M2PO is in the results of that time.
ORDER = [CHOSEN, "ppo", "tis", "m2po", "decoupled", BASE]
PANELS = [(task, updates) for task in ("sort", "guess") for updates in (1, 4)]
STEPS = 60
# Chosen on-policy and then left alone. Constant rates, so that a late step hurts as much as an
# early one.
RATES = {"sort": 3e-4, "guess": 2e-3}
MINIBATCH_RATE = 0.5  # of the rate, where a version is several updates


@dataclass(frozen=True)
class Cell:
    task: str
    objective: str
    staleness: int
    minibatches: int
    seed: int

    @property
    def key(self) -> str:
        """Name the cell in files."""
        return f"{self.task}-{self.objective}-k{self.staleness}-m{self.minibatches}-s{self.seed}"

    def overrides(self) -> list[str]:
        """Return the settings that differ from the demo's."""
        rate = RATES[self.task] * (MINIBATCH_RATE if self.minibatches > 1 else 1.0)
        return [
            *(f"trainer.{key}" for key in (f"objective={self.objective}", *SAME)),
            f"trainer.minibatches={self.minibatches}",
            f"trainer.learning_rate={rate:g}",
            "trainer.schedule=constant",
            "trainer.max_grad_norm=1",
            f"run.steps={STEPS}",
            f"run.seed={self.seed}",
            f"buffer.run_ahead={self.staleness}",
            f"buffer.max_staleness={self.staleness}",
            "buffer.stale_policy=wait",
            "buffer.store=memory",
            "generator.slots=256",
        ]


def cells(
    tasks: Sequence[str],
    objectives: Sequence[str],
    levels: Sequence[int],
    minibatches: Sequence[int],
    seeds: Sequence[int],
) -> Iterator[Cell]:
    """Yield all combinations, seeds outermost, so that a slice of the grid is a grid.

    Equal runs are made once: on-policy every objective has the same gradient with one update, and
    those that are `ALIKE` with several.
    """
    for seed, level, task, updates in product(seeds, levels, tasks, minibatches):
        same = [one for one in objectives if level == 0 and (updates == 1 or one in ALIKE)]
        for objective in objectives:
            if objective not in same[1:]:
                yield Cell(task, objective, level, updates, seed)


def run_cell(cell: Cell, work: Path) -> dict[str, Any]:
    """Run a cell, remove its folder, and return its row."""
    folder = base_model(work, cell.task, cell.seed)
    paths = (
        f"run.dir={work / 'runs'}",
        f"run.name={cell.key}",
        f"model.path={folder / 'base'}",
        f"data.prompts={folder / 'prompts.jsonl'}",
        f"eval.prompts={folder / 'heldout.jsonl'}",
        "eval.at_ends=false",
    )
    chosen = [item for one in (*paths, *cell.overrides()) for item in ("--set", one)]
    summary = json.loads(umbra("up", str(DEMOS / f"{cell.task}.toml"), *chosen, "--json"))
    run = work / "runs" / summary["run_id"]
    accuracy = measure(summary["model"], run / "config.json", folder)
    rows = [row for row in read_rows(run / "metrics.jsonl") if row["kind"] == "step"]
    shutil.rmtree(run)
    # The first k batches are all made by version 0: staleness rises to k there.
    steady = [row for row in rows if row["step"] > 2 * cell.staleness]
    return {
        "cell": cell.key,
        "task": cell.task,
        "objective": cell.objective,
        "staleness": cell.staleness,
        "minibatches": cell.minibatches,
        "seed": cell.seed,
        "accuracy": accuracy,
        "measured": mean(row["staleness/total/mean"] for row in steady),
        "measured_max": max(row["staleness/total/max"] for row in rows),
    }


def measure(model: str, config: Path, folder: Path) -> float:
    """Return the accuracy of `model` on the held-out prompts in `folder`."""
    argv = ("eval", model, "--config", str(config), "--samples", str(SAMPLES), "--json")
    return json.loads(umbra(*argv, "--prompts", str(folder / "heldout.jsonl")))["accuracy"]


# -- figures ---------------------------------------------------------------------------------------

Accuracies = Mapping[tuple[str, int, str, int], list[float]]


def summarise(report: Report) -> None:
    """State accuracies, losses in points, and the staleness that the runs really had.

    A loss is the accuracy on-policy less that at a staleness, against the objective's own on-policy
    runs and against `naive`'s.
    """
    found: dict[tuple[str, int, str, int], list[float]] = defaultdict(list)
    for row in report.rows:
        place = (row["task"], row["minibatches"], row["objective"], row["staleness"])
        found[place].append(row["accuracy"])
    off = [row for row in report.rows if abs(row["measured"] - row["staleness"]) > CLAIM]
    names = {row["objective"] for row in report.rows if row["staleness"]}
    objectives = [one for one in ORDER if one in names] + sorted(names - set(ORDER))
    levels = sorted({level for *_, level in found} - {0})
    _losses(report, found, objectives, levels)
    report.figure("runs", len(report.rows))
    report.figure("runs_as_meant", len(report.rows) - len(off))
    gaps = [abs(row["measured"] - row["staleness"]) for row in report.rows]
    report.goal("staleness of every run, versions from the intended", max(gaps), "<=", CLAIM)


def _losses(
    report: Report, found: Accuracies, objectives: Sequence[str], levels: Sequence[int]
) -> None:
    rows: list[list[Any]] = []
    for objective in objectives:
        own_losses: list[float] = []
        base_losses: list[float] = []
        for (task, updates), level in product(PANELS, levels):
            values = found.get((task, updates, objective, level))
            own = _on_policy(found, task, updates, objective)
            base = found.get((task, updates, BASE, 0))
            if values and own and base:
                own_losses.append(100 * (mean(own) - mean(values)))
                base_losses.append(100 * (mean(base) - mean(values)))
        if not own_losses:
            continue
        met = sum(loss <= POINTS for loss in own_losses)
        rows.append(
            [
                f"`{objective}`",
                f"{mean(own_losses):.1f} ({max(own_losses):.1f})",
                f"{mean(base_losses):.1f} ({max(base_losses):.1f})",
                f"{met} of {len(own_losses)}",
            ]
        )
        report.figure(f"{objective}_loss", round(mean(own_losses), 1))
        report.figure(f"{objective}_loss_most", round(max(own_losses), 1))
        report.figure("cells", len(own_losses))
        if objective == CHOSEN:
            report.goal(f"largest loss of `{objective}`, points", max(own_losses), "<=", POINTS)
    columns = ["objective", "its own on-policy runs", f"`{BASE}` on policy", "within 2 points"]
    report.table("losses", columns, rows)


def _on_policy(found: Accuracies, task: str, updates: int, objective: str) -> list[float]:
    own = found.get((task, updates, objective, 0))
    return own or found.get((task, updates, BASE, 0), [])


def main() -> int:
    """Run the missing cells, print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="rows; continued if it exists")
    parser.add_argument("--work", type=Path, default=Path("runs/staleness"), help="models, runs")
    parser.add_argument("--tasks", nargs="+", default=list(RATES), choices=list(RATES))
    parser.add_argument("--objectives", nargs="+", default=OBJECTIVES, choices=OBJECTIVES)
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1, 2, 4, 8])
    parser.add_argument("--minibatches", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = parser.parse_args()
    report = Report.begin("staleness", args.json, timed=False)
    done = {row["cell"] for row in report.rows}
    grid = cells(args.tasks, args.objectives, args.staleness, args.minibatches, args.seeds)
    work = args.work.resolve()
    for cell in (cell for cell in grid if cell.key not in done):
        row = run_cell(cell, work)
        report.add(**row)
        report.restate(summarise)
        report.write(args.json)
        print(f"{cell.key}: accuracy {row['accuracy']:.3f}", flush=True)
    report.restate(summarise)
    report.show(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
