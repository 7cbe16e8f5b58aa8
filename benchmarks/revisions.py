"""Two revisions of this project beside each other: has a redesign made anything slower?

    python benchmarks/revisions.py BEFORE [AFTER] [--rounds 3] [--json FILE]

Each revision is checked out into a folder of its own and runs its own short benchmarks, in turns
with the other: the buffer's CPU time per trajectory, a push over shared memory and over tcp, the
generator's loop, and the time that `umbra up` takes to train a single step. Only ratios mean
something, and only of costs that stand out from the spread of the rounds, which is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from report import Report, spread

ROOT = Path(__file__).resolve().parents[1]
SLOWER = 1.03  # what a redesign may cost at most
LIMIT_S = 900.0

BUFFER = ("buffer_throughput.py", "--only", "scale", "latency", "--seconds", "4", "--rounds", "1")
PUSH = ("weight_push.py", "--size-mib", "384", "--passes", "5", "--receivers", "1")
LOOP = ("generator_overhead.py", "--engines", "torch", "--requests", "128", "--passes", "2")

Costs = Iterator[tuple[str, str, float]]  # what, unit, how much


class Tree:
    """A revision that was checked out, and commands that run its code."""

    def __init__(self, revision: str, folder: Path) -> None:
        self.revision = revision
        self._folder = folder
        git("worktree", "add", "--detach", "--force", str(folder), revision)

    def run(self, *argv: str, cwd: Path | None = None) -> None:
        """Run Python with `argv` on this revision's code."""
        path = os.pathsep.join([str(self._folder / "src"), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, *argv],
            cwd=cwd or self._folder,
            env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode not in (0, 1):  # 1: a goal was missed
            raise SystemExit(f"{self.revision}: {' '.join(argv)} failed:\n{done.stderr[-2000:]}")

    def benchmark(self, script: str, *arguments: str) -> list[dict[str, Any]]:
        """Rows of a benchmark of this revision."""
        file = self._folder / "rows.json"
        self.run(f"benchmarks/{script}", *arguments, "--json", str(file))
        return json.loads(file.read_text(encoding="utf-8"))["rows"]

    def remove(self) -> None:
        """Take the checkout away."""
        git("worktree", "remove", "--force", str(self._folder))


def buffer_costs(tree: Tree, _: Path) -> Costs:
    """CPU of the buffer, and how soon a trajectory is acknowledged."""
    for row in tree.benchmark(*BUFFER):
        if row["part"] == "scale":
            yield f"buffer, {row['what']} generators", "us of CPU", row["buffer_us"][0]
        elif row["what"] == "acknowledgement":
            yield "acknowledgement at 1,000/s, median", "ms", row["p50_ms"]
            yield "acknowledgement at 1,000/s, p99", "ms", row["p99_ms"]


def push_costs(tree: Tree, _: Path) -> Costs:
    """A push of 384 MiB, from the trainer's tensors to the receiver's."""
    for plane in ("`shm`", "`tcp`"):
        for row in tree.benchmark(*PUSH, "--only", plane):
            if row["link"] == "same host" and row["method"] in ("`shm`", "`tcp`, all bytes"):
                yield f"push over {row['method']}", "s", row["push_s"]


def loop_costs(tree: Tree, _: Path) -> Costs:
    """The generator's loop around the torch engine, as time over that of the bare engine."""
    for row in tree.benchmark(*LOOP):
        yield "generator's loop / bare engine", "times", 1 / row["ratio"]


def start_costs(tree: Tree, task: Path) -> Costs:
    """`umbra up` from its start to the end of a run of one step."""
    run = ("-m", "umbra", "up", str(ROOT / "examples" / "sort.toml"))
    few = ("run.steps=1", "eval.samples=8", "run.dir=runs", "model.path=sort/random")
    started = time.perf_counter()
    tree.run(*run, *(word for setting in few for word in ("--set", setting)), cwd=task)
    yield "umbra up, one step", "s", time.perf_counter() - started


PARTS: dict[str, Callable[[Tree, Path], Costs]] = {
    "buffer": buffer_costs,
    "push": push_costs,
    "loop": loop_costs,
    "start": start_costs,
}


def git(*argv: str) -> str:
    """What `git` says in this repository."""
    done = subprocess.run(["git", *argv], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout.strip()


def summarise(report: Report) -> None:
    """What each thing costs before and after, and their ratio, by the medians of the rounds."""
    costs: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in report.rows:
        of = costs.setdefault((row["what"], row["unit"]), {"before": [], "after": []})
        of[row["side"]].append(row["cost"])
    lines: list[list[Any]] = []
    for (what, unit), of in costs.items():
        ratio = median(of["after"]) / median(of["before"])
        lines.append([what, unit, spread(of["before"]), spread(of["after"]), ratio])
        report.goal(f"{what}: after / before", ratio, "<=", SLOWER)
    report.table("costs", ["what", "in", "before", "after", "ratio of medians"], lines)


def main() -> int:
    """Measure, print, write; 1 if something got slower than a redesign may make it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", help="a revision of this repository")
    parser.add_argument("after", nargs="?", default="HEAD")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    report = Report("revisions")
    sides = {"before": args.before, "after": args.after}
    report.facts = {side: git("log", "-1", "--format=%h %cs", rev) for side, rev in sides.items()}
    with tempfile.TemporaryDirectory(prefix="umbra-revisions-") as name:
        folder = Path(name)
        trees = {side: Tree(rev, folder / side) for side, rev in sides.items()}
        try:
            task = folder / "task"
            task.mkdir()
            trees["before"].run("-m", "umbra", "make-model", "sort/random", cwd=task)
            trees["before"].run("-m", "umbra", "make-task", "sort", "--out", "sort", cwd=task)
            for turn in range(args.rounds):
                order = ["before", "after"] if turn % 2 == 0 else ["after", "before"]
                for part in args.parts:
                    for side in order:
                        for what, unit, cost in PARTS[part](trees[side], task):
                            report.add(side=side, round=turn, what=what, unit=unit, cost=cost)
                            print(f"{turn} {side:<6}  {what}: {cost:.4g} {unit}", flush=True)
        finally:
            for tree in trees.values():
                tree.remove()
    report.restate(summarise)
    return 0 if report.show(args.json) else 1


if __name__ == "__main__":
    raise SystemExit(main())
