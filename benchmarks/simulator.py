"""What `umbra simulate` predicts against what real runs did, mode by mode.

    python benchmarks/end_to_end.py --form replay --json FILE
    python benchmarks/simulator.py [--measured FILE] [--json FILE]
    python benchmarks/simulator.py --quick                       measures two runs itself

The real runs are those of `replay_cells.py`: buffer, hub, generators and trainer are processes, the
engines and the trainer take known times. The simulation gets these times, the same configuration,
and three times of this machine, which come from elsewhere: how long `fdatasync` takes, tried here;
how long a snapshot takes, and how far the generators are apart when they load a version, from a run
that is not predicted. It is told nothing of the predicted runs but how long their prompts are.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import replay_cells
from report import Report
from whole_runs import Cell, cells, run

from umbra.deploy.run_folder import read_rows
from umbra.deploy.simulator.compare import simulate
from umbra.deploy.simulator.prediction import Prediction
from umbra.deploy.simulator.scenario import Scenario
from umbra.deploy.simulator.tables import (
    BrokerSpeed,
    ClusterTable,
    DecodeSpeed,
    Network,
    Samples,
    Speed,
    Tables,
    TrainingSpeed,
)
from umbra.services.config.loader import load_config

GOAL = 0.10
SYNCS = 200
# A run of its own, like none of those that are predicted: another mode, other lengths, other seeds.
CALIBRATION = replay_cells.Mode("calibration", 8, 4, 16, 2, ("buffer.max_staleness=4",))
CALIBRATION_SEED = 1000
MEASURED = Path(__file__).parent / "results" / "end_to_end_replay.json"
QUICK = ("sync, fixed split", "async")

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Machine:
    """Seconds that a reply waits for the disk, of a snapshot, and between the first and the last
    generator that begins to load a version.
    """

    commit_s: float
    snapshot_s: float
    spread_s: float


def calibrate(work: Path) -> Machine:
    """Measure this machine, by what is not predicted.

    A group commit may begin while another one is under way, half of which it waits for on average:
    so a reply waits for one and a half of them.
    """
    with tempfile.NamedTemporaryFile(dir=work) as file:
        took: list[float] = []
        for _ in range(SYNCS):
            file.write(b"x" * 9000)
            file.flush()
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - began)
    replay_cells.prepare(work)
    cell = Cell(replay_cells.FORM, CALIBRATION, "uniform", CALIBRATION_SEED)
    config = load_config(None, overrides=replay_cells.overrides(cell, work), environ={})
    summary, folder = run(config, CALIBRATION.scripts)
    loads: dict[int, list[float]] = defaultdict(list)
    for row in read_rows(folder.metrics):
        if row["kind"] == "span" and row["name"] == "load_weights":
            loads[row["version"]].append(row["start"])
    spreads = [max(some) - min(some) for some in loads.values() if len(some) > 1]
    return Machine(1.5 * median(took), summary["push_seconds"]["snapshot"], median(spreads))


def scenario_of(cell: Cell[replay_cells.Mode], prompt_tokens: int, machine: Machine) -> Scenario:
    """The cell as a simulation."""
    mode = cell.mode
    colocated = mode.generators == mode.training == replay_cells.ACCELERATORS
    tables = Tables(
        cluster=ClusterTable(
            gpus=replay_cells.ACCELERATORS,
            gpus_per_node=replay_cells.ACCELERATORS,
            trainer_gpus=0 if colocated else mode.training,
        ),
        speed=Speed(
            decode=DecodeSpeed(),
            training=TrainingSpeed(
                step_s=mode.train_step_s,
                tokens_per_s=1 / replay_cells.TRAIN_TOKEN_S,
                snapshot_s=machine.snapshot_s,
            ),
            network=Network(spread_s=machine.spread_s),
            broker=BrokerSpeed(commit_s=machine.commit_s),
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


def compare(report: Report, measured: Rows, machine: Machine) -> None:
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
            simulate(scenario_of(cell, round(prompts), machine))
            for cell in (Cell(replay_cells.FORM, mode, mix, row["seed"]) for row in rows)
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


def summarise(report: Report) -> None:
    """The table, and the largest error."""
    columns = ["lengths", "mode", "seeds", "measured", "predicted", "error"]
    columns += ["staleness measured / predicted", "trainer idle measured / predicted"]
    report.table(
        "predictions",
        columns,
        [
            [
                row["mix"], row["mode"], row["seeds"], row["measured"], row["predicted"],
                f"{row['error_percent']:+.1f} %",
                f"{row['staleness']:.2f} / {row['predicted_staleness']:.2f}",
                f"{row['trainer_idle']:.0%} / {row['predicted_idle']:.0%}",
            ]
            for row in report.rows
        ],
    )  # fmt: skip
    for name, seconds in report.facts.items():
        report.figure(name.replace("_s", "_ms"), 1e3 * seconds)
    errors = [abs(row["error_percent"]) / 100 for row in report.rows]
    report.figure("within", sum(error <= GOAL for error in errors))
    report.figure("modes", len(errors))
    report.goal("largest error", max(errors), "<=", GOAL)


def main() -> int:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--measured", type=Path, default=MEASURED, help="rows of end_to_end.py")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--work", type=Path, default=Path("runs/simulator"), help="models, runs")
    parser.add_argument("--quick", action="store_true", help="measure two runs, and compare these")
    args = parser.parse_args()
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    machine = calibrate(work)
    if args.quick:
        chosen = cells(replay_cells.FORM, replay_cells.MODES, ["uniform"], [0], QUICK)
        measured = [replay_cells.run_cell(cell, work) for cell in chosen]
    else:
        measured = json.loads(args.measured.read_text(encoding="utf-8"))["rows"]
    report = Report("simulator: samples/s of whole runs, measured and predicted")
    report.facts |= asdict(machine)
    compare(report, measured, machine)
    report.restate(summarise)
    return 0 if report.show(args.json) else 1


if __name__ == "__main__":
    sys.exit(main())
