"""What the worked examples learn: the model is made, warm-started and trained as their files say.

python benchmarks/worked_examples.py [--quick] [--json FILE] [NAME ...]

Named examples are run anew, and what FILE has of the others stays.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from report import Report

from umbra.deploy.run_folder import read_rows

FOLDER = Path(__file__).parents[1] / "examples"


@dataclass(frozen=True)
class Example:
    """A run file below `examples`, and the warm start that it begins with.

    Attributes:
        run: the run file.
        data: the program that writes its data; the folder that it makes has the program's name.
        warm_steps: of `umbra sft`.
    """

    run: str
    data: str
    warm_steps: int


EXAMPLES = {
    "search": Example("search/run.toml", "search/search.py", 400),
    "search, Anthropic client": Example("search/agent.toml", "search/search.py", 400),
    "coding": Example("coding/run.toml", "coding/coding.py", 120),
}
LAST = 5  # steps whose mean reward is that of the end
BELOW_S = 3600.0


def prepare(folder: Path, example: Example, *, quick: bool) -> None:
    """Data and the base model of an example, in `folder`."""
    program = FOLDER / example.data
    made = program.stem
    if (folder / made).exists():  # another example has the same
        return
    _python(folder, str(program), made)
    _umbra(folder, "make-model", f"{made}/random")
    steps = "4" if quick else str(example.warm_steps)
    how = ["--steps", steps, "--schedule", "linear", "--threads", "1"]
    data = ["--data", f"{made}/demos.jsonl", "--out", f"{made}/base"]
    _umbra(folder, "sft", f"{made}/random", *data, *how)


def learn(folder: Path, name: str, *, quick: bool) -> list[dict[str, Any]]:
    """Run an example; its rows."""
    few = ["--set", "run.steps=2", "--set", "eval.samples=8"] if quick else []
    prepare(folder, EXAMPLES[name], quick=quick)
    _umbra(folder, "up", str(FOLDER / EXAMPLES[name].run), "--quiet", *few)
    run = max((folder / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
    return rows_of(name, run)


def rows_of(name: str, run: Path) -> list[dict[str, Any]]:
    """A row for each step of an example's run, and one of what it came to."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    steps = [row for row in read_rows(run / "metrics.jsonl") if row["kind"] == "step"]
    rows = [{"example": name, "step": row["step"], "reward": row["reward/mean"]} for row in steps]
    accuracies = {key: summary[key] for key in ("accuracy_before", "accuracy_after")}
    return [*rows, {"example": name, "samples": summary["samples"], **accuracies}]


def _umbra(folder: Path, *arguments: str) -> None:
    _python(folder, "-m", "umbra", *arguments)


def _python(folder: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], cwd=folder, check=True, timeout=BELOW_S)


def summarise(report: Report) -> None:
    """Accuracies before and after, and the reward at both ends."""
    lines: list[Sequence[Any]] = []
    for name in dict.fromkeys(row["example"] for row in report.rows):
        rows = [row for row in report.rows if row["example"] == name]
        rewards = [row["reward"] for row in rows if "step" in row]
        (end,) = (row for row in rows if "step" not in row)
        before, after = end["accuracy_before"], end["accuracy_after"]
        lines.append(
            (
                name,
                len(rewards),
                f"{end['samples']:,}",
                f"{mean(rewards[:LAST]):.2f} -> {mean(rewards[-LAST:]):.2f}",
                f"{before:.2f} -> {after:.2f}",
            )
        )
        report.goal(f"{name}: accuracy after less before", after - before, ">", 0.2)
    columns = ["example", "steps", "samples", "reward", "held-out accuracy"]
    report.table("examples", columns, lines)


def main() -> int:
    """All of them, or those that are named; 0 if all have learned."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(EXAMPLES))
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument(
        "--quick", action="store_true", help="two steps of a base that knows little"
    )
    args = parser.parse_args()
    report = Report.begin("worked_examples", args.json)
    names = args.names or list(EXAMPLES)
    report.rows = [row for row in report.rows if row["example"] not in names]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            for row in learn(Path(folder), name, quick=args.quick):
                report.add(**row)
            report.restate(summarise)
            if args.json:  # what there is so far
                report.write(args.json)
    return 0 if report.show(args.json) else 1


if __name__ == "__main__":
    sys.exit(main())
