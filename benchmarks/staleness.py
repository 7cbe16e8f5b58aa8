"""Final accuracy versus staleness, for several objectives, in real asynchronous runs.

    python benchmarks/staleness.py --json FILE                    the whole grid: hours
    python benchmarks/staleness.py --json FILE --short --seeds 0 --tasks sort --minutes 20

Every cell is a whole run (`umbra up`: buffer, hub, generator, trainer as processes). FILE is
written after each; cells that are in it already are skipped, so the grid can be made in slices.
What staleness a run really had is measured and stands in its row next to what it was meant to have.
`docs/plot_staleness.py FILE` draws the picture.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

from report import Report
from staleness_cells import DEFAULT, OBJECTIVES, Cell, cells

from umbra.deploy.demo import DEMOS, HELDOUT, RECIPES

CLAIM = 0.5  # versions by which the measured mean may differ from what the row says
RUN_LIMIT_S = 900.0


def umbra(*arguments: str) -> str:
    """Run an `umbra` command; its standard output.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    done = subprocess.run(
        [sys.executable, "-m", "umbra", *arguments],
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"umbra {arguments[0]} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout


def base_model(work: Path, task: str, seed: int) -> Path:
    """A folder with the task's data and the warm-started model, made once per task and seed."""
    folder = work / f"{task}-s{seed}"
    if (folder / "base" / "config.json").exists():
        return folder
    recipe = RECIPES[task]
    counts = ("--prompts", str(recipe.prompts), "--heldout", str(HELDOUT))
    umbra(
        *("make-task", task, "--out", str(folder), "--seed", str(seed)),
        *(*counts, "--demos", str(recipe.demos)),
    )
    if not (folder / "random").exists():
        umbra("make-model", str(folder / "random"), "--seed", str(seed))
    umbra(
        *("sft", str(folder / "random"), "--data", str(folder / "demos.jsonl")),
        *("--out", str(folder / "base"), "--steps", str(recipe.sft_steps)),
        *("--schedule", recipe.sft_schedule, "--seed", str(seed)),
        *("--threads", "1", "--device", "cpu"),
    )
    return folder


def run_cell(cell: Cell, work: Path) -> dict[str, Any]:
    """Do the run; its row."""
    folder = base_model(work, cell.task, cell.seed)
    paths = (
        f"run.dir={work / 'runs'}",
        f"run.name={cell.key}",
        f"model.path={folder / 'base'}",
        f"data.prompts={folder / 'prompts.jsonl'}",
        f"eval.prompts={folder / 'heldout.jsonl'}",
    )
    chosen = [item for one in (*paths, *cell.overrides()) for item in ("--set", one)]
    began = time.monotonic()
    summary = json.loads(umbra("up", str(DEMOS / f"{cell.task}.toml"), *chosen, "--json"))
    seconds = time.monotonic() - began
    rows = steps_of(work / "runs" / summary["run_id"] / "metrics.jsonl")
    # The first k batches are all made by version 0: staleness rises to k there.
    steady = [row for row in rows if row["step"] > 2 * cell.staleness]
    late = rows[-len(rows) // 4 :]
    return {
        "cell": cell.key,
        "task": cell.task,
        "form": cell.form,
        "objective": cell.objective,
        "staleness": cell.staleness,
        "minibatches": cell.minibatches,
        "seed": cell.seed,
        "accuracy": summary["accuracy_after"],
        "greedy": summary["greedy_after"],
        "before": summary["accuracy_before"],
        "measured": mean(row["staleness/total/mean"] for row in steady),
        "measured_max": max(row["staleness/total/max"] for row in rows),
        "ess": average(late, "ess"),
        "k3": average(late, "mismatch/k3"),
        "clip": average(late, "clip_fraction"),
        "masked": average(late, "mask_fraction"),
        "ratio_max": max((row["ratio/max"] or 0.0) for row in rows if "ratio/max" in row),
        "dropped": sum(summary["ledger"]["ended"].values()),
        "seconds": seconds,
    }


def steps_of(metrics: Path) -> list[dict[str, Any]]:
    """The rows of kind "step"."""
    rows = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    return [row for row in rows if row["kind"] == "step"]


def average(rows: list[dict[str, Any]], name: str) -> float:
    """The mean of a column where it has numbers; 0 where it has none."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return mean(values) if values else 0.0


def show(rows: list[dict[str, Any]]) -> None:
    """Mean [least-largest] accuracy over seeds: objectives down, staleness across."""
    tables: dict[tuple[str, str, int], dict[str, dict[int, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for row in rows:
        table = tables[row["task"], row["form"], row["minibatches"]]
        table[row["objective"]][row["staleness"]].append(row["accuracy"])
    for (task, form, minibatches), table in tables.items():
        levels = sorted({level for column in table.values() for level in column})
        print(f"\n{task}, {form}, {minibatches} minibatch(es) per version")
        print("| objective | " + " | ".join(f"k = {level}" for level in levels) + " |")
        print("|---" * (len(levels) + 1) + "|")
        for objective, column in table.items():
            print(f"| {objective} | " + " | ".join(_text(column[k]) for k in levels) + " |")


def _text(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.3f}" if values else ""
    return f"{mean(values):.3f} [{min(values):.3f}-{max(values):.3f}]"


def main() -> int:
    """Run what is missing, print tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="rows; continued if it exists")
    parser.add_argument("--work", type=Path, default=Path("runs/staleness"), help="models and runs")
    parser.add_argument("--tasks", nargs="+", default=["sort", "guess"], choices=list(RECIPES))
    parser.add_argument("--objectives", nargs="+", default=list(DEFAULT), choices=list(OBJECTIVES))
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1, 2, 4, 8])
    parser.add_argument("--minibatches", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--short", action="store_true", help="fewer steps per run")
    parser.add_argument("--minutes", type=float, default=0.0, help="start no run later; 0 = all")
    parser.add_argument("--retry", action="store_true", help="again what missed its staleness")
    args = parser.parse_args()
    report = Report("staleness")
    if args.json.exists():
        report.rows = json.loads(args.json.read_text(encoding="utf-8"))["rows"]
    if args.retry:
        report.rows = [r for r in report.rows if abs(r["measured"] - r["staleness"]) <= CLAIM]
    done = {row["cell"] for row in report.rows}
    form = "short" if args.short else "full"
    grid = cells(args.tasks, form, args.objectives, args.staleness, args.minibatches, args.seeds)
    missing = [cell for cell in grid if cell.key not in done]
    began = time.monotonic()
    for number, cell in enumerate(missing, 1):
        if args.minutes and time.monotonic() - began > 60 * args.minutes:
            print(f"{len(missing) - number + 1} cells left: call it again")
            break
        row = run_cell(cell, args.work.resolve())
        report.add(**row)
        report.write(args.json)
        print(
            f"{number}/{len(missing)} {cell.key}: accuracy {row['accuracy']:.3f}, staleness "
            f"{row['measured']:.2f} of {cell.staleness}, {row['seconds']:.0f} s",
            flush=True,
        )
    show(report.rows)
    worst = max((abs(row["measured"] - row["staleness"]) for row in report.rows), default=0.0)
    report.goal("measured staleness is the row's, within", worst, "<=", CLAIM)
    report.show(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
