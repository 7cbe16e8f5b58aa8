"""Whole runs of the demo's tasks and of SmolLM2: synchronous, one step off, asynchronous, with TRL.

    python benchmarks/end_to_end.py --json FILE [--tasks sort guess smollm] [--seeds 0 1 2]

All modes train the same warm-started model on the same prompts, batches, optimizer and schedule,
one run at a time on two cores. The time to a reward is that from the first decoded token to the
commit of the first step at which the mean of the last WINDOW batches, drawn at temperature 1, is
that of GOALS. FILE is written after each run; runs that it has are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

from report import Report, spread, text
from whole_runs import RUN_LIMIT_S, base_model, curve, run, run_file, steady

from umbra.deploy.run_folder import RunFolder
from umbra.services.config import RunConfig
from umbra.services.config.loader import load_config

CORES = 2  # of the machine that this is for
DEMO = ("sort", "guess")
GOALS = {"sort": 0.9, "guess": 0.9, "smollm": 0.5, "long": 0.5}  # mean rewards
WINDOW = 10
WARM = 5  # steps before the rates are taken
LAST = 20  # batches whose mean reward is the final one

SYNC = "buffer.run_ahead=0"
AHEAD = ("buffer.run_ahead=2", "buffer.max_staleness=4")
MODES: dict[str, tuple[str, ...]] = {  # settings on top of the demo's
    "sync, all take turns": (SYNC, "generator.threads=2", "trainer.threads=2"),
    "sync, fixed split": (SYNC,),
    "one step off": (
        "buffer.run_ahead=1",
        "buffer.max_staleness=1",
        "buffer.stale_policy=wait",
    ),
    "async": AHEAD,
    "async, 2 generators": (*AHEAD, "generator.count=2"),
}
TRL_THREADS = {"TRL, 1 thread": 1, "TRL, 2 threads": 2}
PROGRAM_THREADS = {"one process, 1 thread": 1, "one process, 2 threads": 2}
SYNCHRONOUS = ("sync, all take turns", "sync, fixed split")
ASYNCHRONOUS = ("async", "async, 2 generators")


def reached(rewards: Sequence[float], accuracy: float) -> int | None:
    """Return the first step, from 1, at which the last WINDOW batches have this mean, if any."""
    for step in range(WINDOW, len(rewards) + 1):
        if mean(rewards[step - WINDOW : step]) >= accuracy:
            return step
    return None


def learning(task: str, rewards: Sequence[float], times: Sequence[float]) -> dict[str, Any]:
    """Return the columns of a row that say how a run learned."""
    step = reached(rewards, GOALS[task])
    return {
        "to_accuracy_s": None if step is None else times[step - 1],
        "to_accuracy_steps": step,
        "final_reward": mean(rewards[-LAST:]),
        "curve": [[round(t, 2), round(r, 4)] for t, r in zip(times, rewards, strict=True)],
    }


def run_mode(mode: str, task: str, seed: int, work: Path, steps: int) -> dict[str, Any]:
    """Train with Umbra, for `steps` steps (0 = the task's own), and return the row."""
    base = base_model(work, task, seed)
    chosen = [
        f"run.dir={work / 'runs'}",
        f"run.seed={seed}",
        f"model.path={base / 'base'}",
        f"data.prompts={base / 'prompts.jsonl'}",
        "eval.prompts=" + (str(base / "heldout.jsonl") if task == "smollm" else ""),
        *(MODES[mode] if mode != "async" or task in DEMO else ()),
        *([f"run.steps={steps}"] if steps else []),
    ]
    config = load_config(run_file(task), overrides=chosen)
    # Threads of processes that take turns must not spin: a step took seconds where they did.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    return row_of(task, config, *run(config, [run_file(task).parent]))


def row_of(task: str, config: RunConfig, summary: Any, folder: RunFolder) -> dict[str, Any]:
    """Return the row of a run that has ended."""
    done = steady(folder, first=WARM, last=config.run.steps, generators=config.generator.count)
    step_s, used = done.seconds / done.steps, summary["seconds"]["services"]
    return {
        **learning(task, *curve(folder)),
        "samples_per_s": done.samples / done.seconds,
        "tokens_per_s": done.tokens / done.seconds,
        "step_s": step_s,
        "steps": config.run.steps,
        "generation_s": step_s * (1 - done.generator_idle),
        "training_s": step_s * (1 - done.trainer_idle),
        "generator_idle": done.generator_idle,
        "trainer_idle": done.trainer_idle,
        "staleness": done.staleness,
        "staleness_max": done.staleness_max,
        "cpu_s": {name: one["cpu"] for name, one in used.items()},
        "right": [100 * one["scores"]["pass@1"] for one in summary["evals"]],  # percent
        "cpu_step_s": sum(one["cpu"] for one in used.values()) / config.run.steps,
    }


def program_row(
    task: str,
    rewards: Sequence[float],
    lengths: Sequence[float],
    clocks: Sequence[tuple[float, float]],
    samples: int,
) -> dict[str, Any]:
    """Return the row of a program that has ended; its rates are taken after WARM steps."""
    first = min(WARM, len(rewards) - 1)
    seconds, cpu_s = (clocks[-1][i] - clocks[first][i] for i in (0, 1))
    steps = len(rewards) - first
    return {
        **learning(task, rewards, [wall - clocks[0][0] for wall, _ in clocks[1:]]),
        "samples_per_s": samples * steps / seconds,
        "tokens_per_s": samples * sum(lengths[first:]) / seconds,
        "step_s": seconds / steps,
        "cpu_step_s": cpu_s / steps,
        "staleness": 0.0,
        "staleness_max": 0.0,
    }


def run_cell(mode: str, task: str, seed: int, work: Path, steps: int) -> dict[str, Any]:
    """Run one mode in this process and return its row."""
    work = work.resolve()
    if mode in MODES:
        row = run_mode(mode, task, seed, work, steps)
    elif mode in PROGRAM_THREADS:
        import one_process

        row = one_process.train_task(task, seed, work, steps, PROGRAM_THREADS[mode])
    else:
        import trl_peer  # imports TRL

        row = trl_peer.train_task(task, seed, work, steps, TRL_THREADS[mode])
    return {"mode": mode, "mix": task, "seed": seed, **row}


def in_child(cell: Sequence[str], work: Path, steps: int) -> dict[str, Any]:
    """Run a cell in a process of its own.

    Raises:
        RuntimeError: it failed; with the end of its standard error.
    """
    argv = [sys.executable, __file__, "--cell", *cell, "--work", str(work), "--steps", str(steps)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(cell)} failed: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# -- figures ---------------------------------------------------------------------------------------


def summarise(report: Report) -> None:
    """State a table of each task, and the asynchronous mode over the others."""
    columns = ["mode", "s to it", "steps", "CPU s", "samples/s", "step s"]
    columns += ["final reward", "idle: generators / trainer", "staleness mean (max)"]
    for task in dict.fromkeys(row["mix"] for row in report.rows):
        modes: dict[str, list[dict[str, Any]]] = {}
        for row in report.rows:
            if row["mix"] == task:
                modes.setdefault(row["mode"], []).append(row)
        report.table(task, columns, [_line(name, some) for name, some in modes.items()])
        _compare(report, task, modes)
        known = [row for row in modes.get("async", []) if row.get("right")]
        if known:
            report.figure(f"{task}_minutes", median(row["curve"][-1][0] for row in known) / 60)
            for at, name in enumerate(("before", "after")):
                right = [row["right"][at] for row in known]
                report.figure(f"{task}_right_{name}", mean(right))
                report.figure(f"{task}_right_{name}_each", spread(right, ".0f"))


def _line(name: str, rows: Sequence[dict[str, Any]]) -> list[Any]:
    times = _column(rows, "to_accuracy_s")
    short = f", {len(times)} of {len(rows)}" if len(times) < len(rows) else ""
    idle = staleness = "-"
    if "generator_idle" in rows[0]:
        shares = (mean(_column(rows, f"{one}_idle")) for one in ("generator", "trainer"))
        idle = " / ".join(f"{100 * share:.0f}" for share in shares) + " %"
        most = max(row["staleness_max"] for row in rows)
        staleness = f"{text(mean(_column(rows, 'staleness')))} ({most:.0f})"
    return [
        name,
        spread(times, ".1f") + short,
        spread(_column(rows, "to_accuracy_steps"), ".0f"),
        spread(_cpu_to_it(rows), ".0f"),
        spread(_column(rows, "samples_per_s")),
        mean(_column(rows, "step_s")),
        f"{mean(_column(rows, 'final_reward')):.3f}",
        idle,
        staleness,
    ]


def _compare(report: Report, task: str, modes: dict[str, list[dict[str, Any]]]) -> None:
    """State how much faster the asynchronous mode is, and the bound of that on these cores.

    Each side has what suits it best: the split of the synchronous mode, TRL's number of threads,
    our number of generators. A run of TRL that misses the accuracy counts with all of its time.
    """
    _over_programs(report, task, modes)
    times = {
        name: mean(_column(some, "to_accuracy_s"))
        for name, some in modes.items()
        if all(row["to_accuracy_s"] is not None for row in some)
    }
    synchronous = [name for name in SYNCHRONOUS if name in times]
    asynchronous = [name for name in ASYNCHRONOUS if name in times]
    if not synchronous or not asynchronous:
        return
    best, ahead = (min(some, key=times.__getitem__) for some in (synchronous, asynchronous))
    over = times[best] / times[ahead]
    report.figure(f"{task}_better_synchronous", best)
    report.figure(f"{task}_over_the_better_synchronous", over)
    report.goal(f"{task}: time to the reward, over the better synchronous", over, ">=", 1.5)
    peers = [
        mean(row["to_accuracy_s"] or row["curve"][-1][0] for row in some)
        for name, some in modes.items()
        if name in TRL_THREADS
    ]
    if peers:
        over = min(peers) / times[ahead]
        report.figure(f"{task}_over_the_better_trl", over)
        report.goal(f"{task}: time to the reward, over the better of TRL", over, ">=", 3.0)
    # A step can be no shorter than its generation, nor than its CPU seconds on all cores.
    slow, fast = modes[best], modes[ahead]
    step_s, now_s = mean(_column(slow, "step_s")), mean(_column(fast, "step_s"))
    cpu_s = mean(sum(row["cpu_s"].values()) / row["steps"] for row in fast)
    bound_s = max(mean(_column(slow, "generation_s")), cpu_s / CORES)
    report.figure(f"{task}_step_speed_up", step_s / now_s)
    report.figure(f"{task}_bound", step_s / bound_s)


def _over_programs(report: Report, task: str, modes: dict[str, list[dict[str, Any]]]) -> None:
    """State the rate of the asynchronous mode over that of the better program of one process."""
    rates = {name: mean(_column(some, "samples_per_s")) for name, some in modes.items()}
    ours, theirs = (
        [rates[name] for name in names if name in rates]
        for names in (ASYNCHRONOUS, PROGRAM_THREADS)
    )
    if ours and theirs:
        over = max(ours) / max(theirs)
        report.figure(f"{task}_over_one_process", over)
        least = 1.0 if task in DEMO else 1.6
        report.goal(f"{task}: samples/s, over the better program of one process", over, ">=", least)


def _cpu_to_it(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Return the CPU seconds up to the reward; rows of older files lack a step's."""
    steps = [row for row in rows if row["to_accuracy_steps"] and "cpu_step_s" in row]
    return [row["to_accuracy_steps"] * row["cpu_step_s"] for row in steps]


def _column(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if row[name] is not None]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="rows; continued if it exists")
    parser.add_argument("--work", type=Path, default=Path("runs/end-to-end"), help="models, runs")
    parser.add_argument("--tasks", nargs="+", default=list(DEMO), choices=GOALS)
    parser.add_argument("--modes", nargs="+", default=[*MODES, *PROGRAM_THREADS, *TRL_THREADS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=0, help="0 = the task's own")
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> int:
    """Run the missing cells, print the tables; return 0 if every goal is met."""
    args = parse()
    if args.cell:
        mode, task, seed = args.cell
        print(json.dumps(run_cell(mode, task, int(seed), args.work, args.steps)))
        return 0
    report = Report.begin("end_to_end", args.json)
    done = {(row["mode"], row["mix"], row["seed"]) for row in report.rows}
    for seed, task, mode in product(args.seeds, args.tasks, args.modes):
        if (mode, task, seed) in done:
            continue
        row = in_child((mode, task, str(seed)), args.work, args.steps)
        if report.disturbed():
            print(f"{mode}, {task}, {seed}: refused, others took too much CPU; run it again alone")
            continue
        report.add(**row)
        if args.json:
            report.write(args.json)
        print(f"{mode}, {task}, {seed}: {row['samples_per_s']:.1f} samples/s", flush=True)
    report.restate(summarise)
    return 0 if report.show(args.json) else 1


if __name__ == "__main__":
    sys.exit(main())
