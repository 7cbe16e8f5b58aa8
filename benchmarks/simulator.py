"""What `umbra simulate` predicts against what real runs did, mode by mode.

    python benchmarks/end_to_end.py --form replay --json FILE
    python benchmarks/simulator.py --measured FILE [--json FILE]
    python benchmarks/simulator.py --quick                       measures two runs itself

The real runs are those of `replay_cells.py`: buffer, hub, generators and trainer are processes, the
engines and the trainer take known times. The simulation gets these times, the same configuration,
and two times of this machine that are measured apart: how long a reply of the buffer waits for the
disk, and how far the generators are apart when they load a version. It is told nothing of the runs
but how long their prompts are.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import replay_cells
from report import Report
from whole_runs import Cell, cells

from umbra.deploy.simulator.compare import simulate
from umbra.deploy.simulator.prediction import Prediction
from umbra.deploy.simulator.scenario import Scenario
from umbra.deploy.simulator.tables import (
    BrokerSpeed,
    Cluster,
    DecodeSpeed,
    Network,
    Samples,
    Speed,
    Tables,
    TrainingSpeed,
)
from umbra.services.runtime.config_loader import load_config

COMMIT_S = 5e-3  # fdatasync takes 4 ms here (median), and a group commit waits for the one before
SPREAD_S = 10e-3  # spans "load_weights" of eight generators begin within 9 ms (median)
SNAPSHOT_S = 2.5e-3  # of the tiny model, from the summaries of the runs
GOAL = 0.10
QUICK = ("sync, fixed split", "async")

Rows = Sequence[Mapping[str, Any]]


def scenario_of(cell: Cell[replay_cells.Mode], prompt_tokens: int) -> Scenario:
    """The cell as a simulation."""
    mode = cell.mode
    colocated = mode.generators == mode.training == replay_cells.ACCELERATORS
    tables = Tables(
        cluster=Cluster(
            gpus=replay_cells.ACCELERATORS,
            gpus_per_node=replay_cells.ACCELERATORS,
            trainer_gpus=0 if colocated else mode.training,
        ),
        speed=Speed(
            decode=DecodeSpeed(),
            training=TrainingSpeed(
                step_s=mode.train_step_s,
                tokens_per_s=1 / replay_cells.TRAIN_TOKEN_S,
                snapshot_s=SNAPSHOT_S,
            ),
            network=Network(spread_s=SPREAD_S),
            broker=BrokerSpeed(commit_s=COMMIT_S),
        ),
        samples=Samples(prompt_tokens=prompt_tokens),
    )
    config = load_config(None, overrides=replay_cells.overrides(cell, Path()), environ={})
    return Scenario(config, tables, replay_cells.replay_model(cell.mix))


def rate(prediction: Prediction, mode: replay_cells.Mode) -> float:
    """Samples per second between the steps between which the real run is measured."""
    first, last = replay_cells.WARM, mode.steps - 1 - mode.ahead
    samples = (last - first) * replay_cells.BATCH_GROUPS * replay_cells.GROUP_SIZE
    return samples / (prediction.commits[last - 1] - prediction.commits[first - 1])


def compare(report: Report, measured: Rows) -> None:
    """A row for each mode and mix that was measured, over all its seeds."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in measured:
        if row["form"] == "replay":
            found[row["mix"], row["mode"]].append(row)
    modes = {mode.name: mode for mode in replay_cells.MODES}
    for (mix, name), rows in found.items():
        if name not in modes:
            continue
        mode = modes[name]
        prompts = mean(r["steady"]["prompt_tokens"] / r["steady"]["samples"] for r in rows)
        predictions = [
            simulate(scenario_of(Cell(replay_cells.FORM, mode, mix, row["seed"]), round(prompts)))
            for row in rows
        ]
        real = mean(row["samples_per_s"] for row in rows)
        predicted = mean(rate(one, mode) for one in predictions)
        report.add(
            mix=mix,
            mode=name,
            seeds=len(rows),
            measured=real,
            predicted=predicted,
            error_percent=100 * (predicted / real - 1),
            staleness=mean(row["staleness"] for row in rows),
            predicted_staleness=mean(one.staleness["mean"] for one in predictions),
            trainer_idle=mean(row["trainer_idle"] for row in rows),
            predicted_idle=mean(1 - one.trainer["train"] for one in predictions),
        )


def main() -> int:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--measured", type=Path, help="rows of end_to_end.py")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--work", type=Path, default=Path("runs/simulator"), help="of --quick")
    parser.add_argument("--quick", action="store_true", help="measure two runs, and compare these")
    args = parser.parse_args()
    if args.quick:
        chosen = cells(replay_cells.FORM, replay_cells.MODES, ["uniform"], [0], QUICK)
        measured = [replay_cells.run_cell(cell, args.work) for cell in chosen]
    elif args.measured:
        measured = json.loads(args.measured.read_text(encoding="utf-8"))["rows"]
    else:
        parser.error("name the rows of end_to_end.py by --measured, or measure two by --quick")
    report = Report("simulator: samples/s of whole runs, measured and predicted")
    compare(report, measured)
    worst = max(abs(row["error_percent"]) for row in report.rows)
    report.goal("largest error", worst / 100, "<=", GOAL)
    return 0 if report.show(args.json) else 1


if __name__ == "__main__":
    sys.exit(main())
