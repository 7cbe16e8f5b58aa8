"""How far the replay engine is from the engine it was fitted to, in a run of the same size.

    python benchmarks/replay_fit.py [--json FILE] [--steps 80]

The sort task with an untrained model: a run with the torch engine, a replay model fitted to its
decode spans, and the run again with the replay engine. Trainer, hub and environments are real in
both. What is compared is tokens per second of decoding, the time in which an engine has no work
left out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from click.testing import CliRunner
from report import Report
from whole_runs import run

from umbra.deploy.demo import DEMOS
from umbra.deploy.run_folder import RunFolder, read_rows
from umbra.services.config.loader import load_config
from umbra.services.generator.replay_fit import fit_run
from umbra.services.generator.tasks import write_task
from umbra.services.trainer.make_model import command as make_model

GOAL = 0.1


def measure(folder: Path, name: str, steps: int, *more: str) -> RunFolder:
    """A run of `steps` steps in `folder`."""
    chosen = (
        f"run.dir={folder / name}",
        f"run.steps={steps}",
        f"model.path={folder / 'model'}",
        f"data.prompts={folder / 'task' / 'prompts.jsonl'}",
        "eval.prompts=",
        *more,
    )
    _, made = run(load_config(DEMOS / "sort.toml", overrides=chosen), {})
    return made


def decoding(folder: RunFolder) -> dict[str, Any]:
    """Tokens and seconds of all decode spans."""
    spans = [r for r in read_rows(folder.metrics) if r["kind"] == "span" and r["name"] == "decode"]
    return {
        "tokens": sum(row["tokens"] for row in spans),
        "seconds": sum(row["end"] - row["start"] for row in spans),
    }


def summarise(report: Report) -> None:
    """Rates of both, and the error of the fit."""
    rates = {row["engine"]: row["tokens"] / row["seconds"] for row in report.rows}
    report.table("rates", ["engine", "tokens/s while decoding"], [list(r) for r in rates.items()])
    off = abs(rates["replay"] / rates["torch"] - 1)
    report.figure("off", off)
    report.figure("fit_error", report.facts["fit_error"])
    report.goal("replay engine's rate off the measured one, share", off, "<=", GOAL)


def main() -> int:
    """Both runs; 0 if the goal is met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--steps", type=int, default=80)
    args = parser.parse_args()
    report = Report("replay_fit")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        CliRunner().invoke(make_model, [str(folder / "model")], catch_exceptions=False)
        write_task("sort", folder / "task", seed=0, prompts=4096, heldout=8, demos=8)
        real = measure(folder, "torch", args.steps)
        report.add(engine="torch", **decoding(real))
        model = fit_run(real.path)
        report.facts["fit_error"] = model.error
        (folder / "replay.json").write_bytes(msgspec.json.encode(model))
        replay = ("generator.engine=replay", f"generator.replay={folder / 'replay.json'}")
        again = measure(folder, "replay", args.steps, *replay)
        report.add(engine="replay", **decoding(again))
    report.restate(summarise)
    return 0 if report.show(args.json) else 1


if __name__ == "__main__":
    sys.exit(main())
