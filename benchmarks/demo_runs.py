"""The demo as a user runs it, start to finish: accuracy, seconds, staleness, cost of a push.

    python benchmarks/demo_runs.py --json FILE [--tasks sort guess] [--seeds 0 1 2]

The loop is from the first decoded token, of the evaluation of 1,024 held-out samples before
training, to the last commit; the demo adds model, task, warm start, imports and an evaluation. Runs
that are in FILE are skipped. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from end_to_end import WARM
from report import Report, text
from whole_runs import curve, steady

from umbra.deploy.commands.demo import RECIPES
from umbra.deploy.run_folder import RunFolder
from umbra.services.process.child import umbra_argv

SERVICES = ("generator-0", "trainer", "buffer", "weight-hub")


def run(task: str, seed: int) -> dict[str, Any]:
    """Run one demo; return its row."""
    with tempfile.TemporaryDirectory() as scratch:
        argv = [*umbra_argv("demo"), "--task", task, "--seed", str(seed), "--dir", scratch]
        began = time.monotonic()
        done = subprocess.run([*argv, "--json"], capture_output=True, text=True, check=False)
        seconds = time.monotonic() - began
        if done.returncode:
            raise RuntimeError(f"umbra demo --task {task} failed: {done.stderr[-2000:]}")
        summary = json.loads(done.stdout)
        folder = RunFolder(Path(scratch) / summary["run_id"])
        _, times = curve(folder)
        found = steady(folder, first=WARM, last=summary["steps"], generators=1)
    return {
        "task": task,
        "seed": seed,
        **{name: summary[name] for name in ("accuracy_before", "accuracy_after")},
        **{name: summary[name] for name in ("steps", "samples", "pushes")},
        "loop_s": times[-1],
        "demo_s": seconds,
        "samples_s": found.samples / found.seconds,
        "staleness": summary["staleness"]["mean"],
        "staleness_max": summary["staleness"]["max"],
        "generator_idle": found.generator_idle,
        "trainer_idle": found.trainer_idle,
        "k3": summary["mismatch_k3_on_policy"],
        "mixed": summary["mixed_version_trajectories"] / summary["samples"],
        "push_s": summary["push_seconds"],
        "cpu_s": [summary["seconds"]["services"][name]["cpu"] for name in SERVICES],
    }


def summarise(report: Report) -> None:
    """State the table of tasks, and the cost of a push."""
    tasks = dict.fromkeys(row["task"] for row in report.rows)
    report.table(
        "tasks",
        ["task", "accuracy before -> after", "steps", "loop s", "staleness mean (max)",
         "push: trainer / generator waits"],
        [_of_task([row for row in report.rows if row["task"] == task]) for task in tasks],
    )  # fmt: skip
    for task in tasks:
        some = [row for row in report.rows if row["task"] == task]
        for name in ("accuracy_before", "accuracy_after", "loop_s", "demo_s", "samples_s"):
            figure = f"{task}_{name.removeprefix('accuracy_')}"
            report.figure(figure, mean(row[name] for row in some))
        for name in ("samples", "steps", "pushes"):
            report.figure(f"{task}_{name}", some[0][name])
    report.figure("k3_most", max(row["k3"] for row in report.rows))
    report.figure("mixed", mean(row["mixed"] for row in report.rows))
    for phase in report.rows[0]["push_s"]:
        value = median(1e3 * row["push_s"][phase] for row in report.rows)
        report.figure(f"push_{phase}_ms", value)


def _of_task(rows: Sequence[dict[str, Any]]) -> list[Any]:
    before, after = (mean(row[f"accuracy_{name}"] for row in rows) for name in ("before", "after"))
    loops = [row["loop_s"] for row in rows]
    waits = [median(1e3 * row["push_s"][phase] for row in rows) for phase in ("snapshot", "commit")]
    most = max(row["staleness_max"] for row in rows)
    return [
        rows[0]["task"],
        f"{before:.2f} -> {after:.2f}",
        rows[0]["steps"],
        f"{min(loops):.0f}-{max(loops):.0f}",
        f"{mean(row['staleness'] for row in rows):.1f} ({most:.0f})",
        " / ".join(f"{text(wait)} ms" for wait in waits),
    ]


def main() -> int:
    """Run the missing seeds, print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="rows; continued if it exists")
    parser.add_argument("--tasks", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = parser.parse_args()
    report = Report.begin("demo_runs", args.json)
    done = {(row["task"], row["seed"]) for row in report.rows}
    for task in args.tasks:
        for seed in args.seeds:
            if (task, seed) in done:
                continue
            report.add(**run(task, seed))
            report.restate(summarise)
            if args.json:
                report.write(args.json)
    report.restate(summarise)
    report.show(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
