"""The demo's sort task by our processes and by a synchronous program: who makes more of two cores.

    python benchmarks/whole_machine.py --json FILE [--seeds 0 1 2]

`synchronous.py` generates and trains in turns, in one process; with a thread for each core it is
run too, for the first seed, and so are two generators of ours in place of one. Runs of a seed
begin with the same model and follow each other, so that the machine is the same for all; nothing
else should run meanwhile. Speed and CPU time are those between the first steps and the last
commit, over all processes of a run, its supervisor (this one) included; "whole" is the CPU time
from start to end, imports and all, without the supervisor. The floor is what a sample costs the
synchronous program: less is not known to be possible with these models, so that cores / floor is a
bound on samples/s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from demo_cells import LAST, curve
from report import Report, spread
from staleness import base_model
from synchronous import LEFT_OUT
from whole_runs import run

from umbra.deploy.demo import DEMOS
from umbra.deploy.run_folder import read_rows
from umbra.services.config.loader import load_config

CORES = 2  # of the machine that this is for
TASK = "sort"
QUICK_STEPS = 16
LOOK_S = 0.1


@dataclass(frozen=True)
class Mode:
    """One of the programs that are compared."""

    name: str
    threads: int = 0  # of the synchronous program; 0: ours
    settings: tuple[str, ...] = ()
    each_seed: bool = True


PEER, OURS = "synchronous", "umbra"
MODES = (
    Mode(PEER, threads=1),
    Mode(OURS),
    Mode(f"{PEER}, {CORES} threads", threads=CORES, each_seed=False),
    Mode(f"{OURS}, 2 generators", settings=("generator.count=2",), each_seed=False),
)


class CpuClock:
    """CPU seconds of this process and all below it, as they grow."""

    def __init__(self) -> None:
        self._times: list[float] = []  # seconds since the epoch
        self._used: list[float] = []
        self._over = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Look at them, every LOOK_S, until the end of the block."""
        thread = threading.Thread(target=self._main, name="cpu clock", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def at(self, moment: float) -> float:
        """What was used until `moment`, in between two looks in proportion."""
        after = min(max(1, bisect_left(self._times, moment)), len(self._times) - 1)
        (a, b), (low, high) = self._times[after - 1 : after + 1], self._used[after - 1 : after + 1]
        return low + (high - low) * (moment - a) / (b - a)

    def _main(self) -> None:
        while not self._over.wait(LOOK_S):
            self._times.append(time.time())
            self._used.append(cpu_of_family())


def cpu_of_family() -> float:
    """CPU seconds of the processes that are there: this one and those below it."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        pid = int(folder.name)
        parents[pid] = int(fields[1])
        used[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    me, total = os.getpid(), 0.0
    for pid, seconds in used.items():
        above = pid
        while above > 1 and above != me:
            above = parents.get(above, 0)
        total += seconds if above == me else 0.0
    return total


def ours(mode: Mode, work: Path, base: Path, seed: int, steps: int) -> dict[str, Any]:
    """A run of ours; its row."""
    chosen = [
        f"run.dir={work / 'runs'}",
        f"run.seed={seed}",
        f"model.path={base / 'base'}",
        f"data.prompts={base / 'prompts.jsonl'}",
        "eval.prompts=",
        *([f"run.steps={steps}"] if steps else []),
        *mode.settings,
    ]
    config = load_config(DEMOS / f"{TASK}.toml", overrides=chosen)
    clock = CpuClock()
    with clock.running():
        summary, folder = run(config, {})
    rewards, _ = curve(folder)
    commits = {
        row["step"]: row["time"] for row in read_rows(folder.metrics) if row["kind"] == "step"
    }
    first, last = min(LEFT_OUT, config.run.steps - 1), config.run.steps
    seconds = commits[last] - commits[first]
    samples = config.buffer.batch_groups * config.buffer.group_size
    cpu = clock.at(commits[last]) - clock.at(commits[first])
    services = {name: used["cpu"] for name, used in summary["seconds"]["services"].items()}
    return {
        "steps": config.run.steps,
        "samples_per_s": samples * (last - first) / seconds,
        "cpu_ms": 1e3 * cpu / (samples * (last - first)),
        "all_cpu_ms": 1e3 * sum(services.values()) / summary["samples"],
        "cores": cpu / seconds,
        "final_reward": mean(rewards[-LAST:]),
        "staleness": summary["staleness"]["mean"],
        "services_ms": {name: 1e3 * used / summary["samples"] for name, used in services.items()},
    }


def peer(mode: Mode, base: Path, seed: int, steps: int) -> dict[str, Any]:
    """A run of the synchronous program; its row."""
    steps = steps or load_config(DEMOS / f"{TASK}.toml").run.steps
    argv = [sys.executable, str(Path(__file__).with_name("synchronous.py"))]
    argv += [str(base / "base"), str(base / "prompts.jsonl")]
    argv += ["--steps", str(steps), "--seed", str(seed), "--threads", str(mode.threads)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"synchronous.py failed: {done.stderr[-2000:]}")
    row = json.loads(done.stdout)
    del row["rewards"], row["samples"]
    return row


def summarise(report: Report) -> None:
    """The table, and what follows from it."""
    rows = {
        mode.name: found
        for mode in MODES
        if (found := [row for row in report.rows if row["mode"] == mode.name])
    }

    def means(name: str, key: str) -> float:
        return mean(row[key] for row in rows[name])

    table: list[list[Any]] = []
    for name, some in rows.items():
        seeds = {row["seed"] for row in some}
        same = [row for row in rows[PEER] if row["seed"] in seeds]
        ratio = mean(row["samples_per_s"] for row in some) / mean(
            row["samples_per_s"] for row in same
        )
        table.append(
            [
                name,
                len(some),
                spread([row["samples_per_s"] for row in some], ",.0f"),
                f"{ratio:.2f}",
                spread([row["cpu_ms"] for row in some], ".2f"),
                spread([row["all_cpu_ms"] for row in some], ".2f"),
                f"{mean(row['cores'] for row in some) / CORES:.0%}",
                f"{mean(row['final_reward'] for row in some):.3f}",
            ]
        )
    columns = ["program", "seeds", "samples/s", "times synchronous", "CPU ms a sample", "whole"]
    report.table("programs", [*columns, "of two cores", "reward at the end"], table)
    services = [row["services_ms"] for row in rows[OURS]]
    report.table(
        "services",
        ["process", "CPU ms a sample, whole"],
        [[name, f"{mean(each[name] for each in services):.3f}"] for name in services[0]],
    )
    floor = means(PEER, "cpu_ms")
    best = max(means(name, "samples_per_s") for name in rows if name.startswith(PEER))
    report.figure("peer_samples_per_s", best)
    report.figure("samples_per_s", means(OURS, "samples_per_s"))
    report.figure("ratio", means(OURS, "samples_per_s") / best)
    report.figure("floor_ms", floor)
    report.figure("bound_samples_per_s", 1e3 * CORES / floor)
    report.figure("cpu_ms", means(OURS, "cpu_ms"))
    report.figure("whole_ms", means(OURS, "all_cpu_ms"))
    report.figure("times_floor", means(OURS, "cpu_ms") / floor)
    report.figure("busy", means(OURS, "cores") / CORES)
    report.goal("CPU ms a sample, whole", report.figures["whole_ms"], "<=", 0.90)
    report.goal("samples/s, times the synchronous program's", report.figures["ratio"], ">=", 1.7)
    report.goal("share of both cores that is used", report.figures["busy"], ">=", 0.9)


def main() -> int:
    """Run what is missing, print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="rows; continued if it exists")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--work", type=Path, help="folder for models and runs, kept")
    parser.add_argument("--quick", action="store_true", help="one seed, few steps")
    args = parser.parse_args()
    steps = QUICK_STEPS if args.quick else 0
    seeds = args.seeds[:1] if args.quick else args.seeds
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:CORES])
    report = Report.begin("whole_machine", args.json)
    done = {(row["mode"], row["seed"]) for row in report.rows}
    with tempfile.TemporaryDirectory() as scratch:
        work = (args.work or Path(scratch)).resolve()
        for seed in seeds:
            for mode in MODES:
                if (mode.name, seed) in done or not (mode.each_seed or seed == seeds[0]):
                    continue
                base = base_model(work, TASK, seed)
                if mode.threads:
                    row = peer(mode, base, seed, steps)
                else:
                    row = ours(mode, work, base, seed, steps)
                report.add(mode=mode.name, seed=seed, **row)
                print(report.rows[-1], flush=True)
                if args.json:
                    report.write(args.json)
    report.restate(summarise)
    report.show(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
