"""Final accuracy versus staleness, for several objectives, in real asynchronous runs.

    python benchmarks/staleness.py --json FILE --jobs 2              the whole grid: hours
    python benchmarks/staleness.py --json FILE --seeds 0 --tasks sort --staleness 0 8 --minutes 20

Every cell is a whole run (`umbra up`: buffer, hub, generator, trainer as processes), which has a
core to itself; `--jobs` is how many there are at once. FILE is written after each; cells that are
in it already are skipped, so the grid can be made in slices: go on with a copy of
`benchmarks/results/staleness.json`. What staleness a run really had is measured and stands in its
row next to what it was meant to have.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from statistics import mean
from typing import Any

from report import Report
from staleness_cells import CLAIM, DEFAULT, OBJECTIVES, Cell, cells
from staleness_tables import summarise
from warm_process import warm_up

from umbra.deploy import stage
from umbra.deploy.demo import DEMOS, HELDOUT, RECIPES
from umbra.services.process.child import umbra_argv

RUN_LIMIT_S = 900.0
SAMPLES = 2048  # of an accuracy: a standard error of 0.01


def umbra(log: Path, *arguments: str) -> str:
    """Run an `umbra` command; its standard output.

    Raises:
        RuntimeError: it failed, or took too long; with the end of what it said.
    """
    out = log.with_suffix(".out")
    log.write_text("")
    out.write_text("")
    process = stage.ChildProcess(
        umbra_argv(*arguments), stdout=out, stderr=log
    )  # a `WarmProcess` in a worker
    deadline = time.monotonic() + RUN_LIMIT_S
    while (code := process.poll()) is None:
        if time.monotonic() > deadline:
            process.kill()
        time.sleep(0.02)
    if code:
        raise RuntimeError(f"umbra {arguments[0]} failed: {log.read_text().strip()[-2000:]}")
    return out.read_text()


def base_model(work: Path, task: str, seed: int) -> Path:
    """A folder with the task's data and the warm-started model, made once per task and seed."""
    folder = work / f"{task}-s{seed}"
    if (folder / "base" / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "made.log"
    recipe = RECIPES[task]
    counts = ("--prompts", str(recipe.prompts), "--heldout", str(HELDOUT))
    umbra(
        log,
        *("make-task", task, "--out", str(folder), "--seed", str(seed)),
        *(*counts, "--demos", str(recipe.demos)),
    )
    if not (folder / "random").exists():
        umbra(log, "make-model", str(folder / "random"), "--seed", str(seed))
    umbra(
        log,
        *("sft", str(folder / "random"), "--data", str(folder / "demos.jsonl")),
        *("--out", str(folder / "base"), "--steps", str(recipe.sft_steps)),
        *("--schedule", recipe.sft_schedule, "--seed", str(seed)),
        *("--threads", "1", "--device", "cpu"),
    )
    return folder


def run_cell(cell: Cell, work: Path) -> dict[str, Any]:
    """Do the run; its row. Nothing of it is left."""
    folder = base_model(work, cell.task, cell.seed)
    log = work / f"{cell.key}.log"
    paths = (
        f"run.dir={work / 'runs'}",
        f"run.name={cell.key}",
        f"model.path={folder / 'base'}",
        f"data.prompts={folder / 'prompts.jsonl'}",
        f"eval.prompts={folder / 'heldout.jsonl'}",
    )
    chosen = [item for one in (*paths, *cell.overrides()) for item in ("--set", one)]
    began = time.monotonic()
    run_file = str(DEMOS / f"{cell.task}.toml")
    summary = json.loads(umbra(log, "up", run_file, *chosen, "--no-eval", "--json"))
    run = work / "runs" / summary["run_id"]
    accuracy = measure(log, summary["model"], run / "config.json", folder)
    seconds = time.monotonic() - began
    if not (before := folder / "before.json").exists():
        first = measure(log, str(folder / "base"), run / "config.json", folder)
        before.write_text(json.dumps(first))
    rows = steps_of(run / "metrics.jsonl")
    shutil.rmtree(run)
    # The first k batches are all made by version 0: staleness rises to k there.
    steady = [row for row in rows if row["step"] > 2 * cell.staleness]
    late = rows[-len(rows) // 4 :]
    row = {
        "cell": cell.key,
        "task": cell.task,
        "objective": cell.objective,
        "staleness": cell.staleness,
        "minibatches": cell.minibatches,
        "seed": cell.seed,
        "accuracy": accuracy,
        "before": json.loads(before.read_text()),
        "curve": " ".join(f"{mean(one):.2f}" for one in tenths([r["reward/mean"] for r in rows])),
        "reward_best": max(
            mean(r["reward/mean"] for r in rows[i : i + 5]) for i in range(len(rows) - 4)
        ),
        "measured": mean(row["staleness/total/mean"] for row in steady),
        "measured_max": max(row["staleness/total/max"] for row in rows),
        "ess": average(late, "ess"),
        "k3": average(late, "mismatch/k3"),
        "clip": average(late, "clip_fraction"),
        "masked": average(late, "mask_fraction"),
        "ratio_max": max((row["ratio/max"] or 0.0) for row in rows if "ratio/max" in row),
        "skipped": sum(row["skipped"] or 0.0 for row in rows if "skipped" in row),
        "seconds": seconds,
        "cpu_s": sum(one["cpu"] for one in summary["seconds"]["services"].values()),
    }
    return {name: round(v, 5) if isinstance(v, float) else v for name, v in row.items()}


def measure(log: Path, model: str, config: Path, folder: Path) -> float:
    """Accuracy of a model on held-out prompts, sampled at temperature 1."""
    text = umbra(
        log,
        *("eval", model, "--config", str(config), "--json"),
        *("--prompts", str(folder / "heldout.jsonl"), "--samples", str(SAMPLES)),
    )
    return json.loads(text)["accuracy"]


def steps_of(metrics: Path) -> list[dict[str, Any]]:
    """The rows of kind "step"."""
    rows = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    return [row for row in rows if row["kind"] == "step"]


def tenths(values: list[float]) -> list[list[float]]:
    """Ten slices of nearly the same length; fewer of fewer values."""
    ends = [len(values) * n // 10 for n in range(11)]
    return [values[a:b] for a, b in pairwise(ends) if b > a]


def average(rows: list[dict[str, Any]], name: str) -> float:
    """The mean of a column where it has numbers; 0 where it has none."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return mean(values) if values else 0.0


def run_all(
    grid: Sequence[Cell], work: Path, jobs: int, deadline: float
) -> Iterator[dict[str, Any]]:
    """The rows of the cells that could be begun before the deadline, as they come."""
    cores = sorted(os.sched_getaffinity(0))
    context = get_context("fork")
    free = context.SimpleQueue()
    for job in range(jobs):
        free.put(cores[job % len(cores)])
    tasks = [(cell, work, deadline) for cell in grid]
    with context.Pool(jobs, initializer=begin, initargs=(free,)) as pool:
        bases = sorted({(work, cell.task, cell.seed) for cell in grid})
        pool.starmap(base_model, bases, chunksize=1)
        yield from filter(None, pool.imap_unordered(run_in_time, tasks))


def begin(free: SimpleQueue[int]) -> None:
    """A worker has a core and a session to itself, and everything imported."""
    os.setsid()
    os.sched_setaffinity(0, {free.get()})
    warm_up()


def run_in_time(task: tuple[Cell, Path, float]) -> dict[str, Any] | None:
    """The row of a cell, unless it is too late."""
    cell, work, deadline = task
    return run_cell(cell, work) if time.monotonic() < deadline else None


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
    parser.add_argument("--minutes", type=float, default=0.0, help="start no run later; 0 = all")
    parser.add_argument("--retry", action="store_true", help="again what missed its staleness")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, a core each")
    args = parser.parse_args()
    report = Report.begin("staleness", args.json)
    if args.retry:
        report.rows = [r for r in report.rows if abs(r["measured"] - r["staleness"]) <= CLAIM]
    done = {row["cell"] for row in report.rows}
    grid = cells(args.tasks, args.objectives, args.staleness, args.minibatches, args.seeds)
    missing = [cell for cell in grid if cell.key not in done]
    deadline = time.monotonic() + 60 * args.minutes if args.minutes else math.inf
    work = args.work.resolve()
    (work / "runs").mkdir(parents=True, exist_ok=True)
    for number, row in enumerate(run_all(missing, work, args.jobs, deadline), 1):
        report.add(**row)
        report.restate(summarise)
        report.write(args.json)
        print(
            f"{number}/{len(missing)} {row['cell']}: accuracy {row['accuracy']:.3f}, staleness "
            f"{row['measured']:.2f} of {row['staleness']}, {row['seconds']:.0f} s",
            flush=True,
        )
    report.restate(summarise)
    report.show(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
