"""Runs of the demo's task with its real engine and trainer on two cores: what is compared, and how.

A time to an accuracy is that from the first decoded token to the commit of the first step at which
the mean reward of the last WINDOW batches, 2,560 samples drawn at temperature 1, is ACCURACY.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from staleness import base_model
from whole_runs import Cell, cpu_idle, run, steady

from umbra.deploy.demo import DEMOS
from umbra.deploy.run_folder import RunFolder, read_rows
from umbra.services.config.loader import load_config

FORM = "real"
CORES = 2  # of the machine that this is for
ACCURACY = 0.9
WINDOW = 10
WARM = 5
LAST = 20  # batches whose mean reward is the final one


@dataclass(frozen=True)
class Mode:
    """Settings on top of the demo's."""

    name: str
    settings: tuple[str, ...]


SYNC = "buffer.run_ahead=0"
AHEAD = ("buffer.run_ahead=2", "buffer.max_staleness=4")
MODES = (
    Mode("sync, all take turns", (SYNC, "generator.threads=2", "trainer.threads=2")),
    Mode("sync, fixed split", (SYNC,)),
    Mode(
        "one step off",
        ("buffer.run_ahead=1", "buffer.max_staleness=1", "buffer.stale_policy=wait"),
    ),
    Mode("async", AHEAD),
    Mode("async, 2 generators", (*AHEAD, "generator.count=2")),
)


@dataclass(frozen=True)
class TrlMode:
    """TRL's trainer, which generates and trains in turns with all of its threads."""

    name: str
    threads: int


TRL_MODES = (TrlMode("TRL, 1 thread", 1), TrlMode("TRL, 2 threads", 2))
SYNCHRONOUS = MODES[0].name, MODES[1].name
ASYNCHRONOUS = MODES[-2].name, MODES[-1].name


def reached(rewards: Sequence[float], accuracy: float = ACCURACY) -> int | None:
    """The first step, from 1, after which the last WINDOW batches have this mean; None if never."""
    for step in range(WINDOW, len(rewards) + 1):
        if mean(rewards[step - WINDOW : step]) >= accuracy:
            return step
    return None


def run_cell(cell: Cell[Mode], work: Path, steps: int = 0) -> dict[str, Any]:
    """Do the run, of `steps` steps if not the task's own; its row."""
    work = work.resolve()
    base = base_model(work, cell.mix, cell.seed)
    chosen = [
        f"run.dir={work / 'runs'}",
        f"run.seed={cell.seed}",
        f"model.path={base / 'base'}",
        f"data.prompts={base / 'prompts.jsonl'}",
        "eval.prompts=",
        *cell.mode.settings,
        *([f"run.steps={steps}"] if steps else []),
    ]
    config = load_config(DEMOS / f"{cell.mix}.toml", overrides=chosen)
    # Else the threads of two processes that take turns wait for each other in loops, which can
    # make a step take seconds where there are as many cores as threads of one.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    summary, folder = run(config, {})
    count = config.generator.count
    done = steady(folder, first=WARM, last=config.run.steps, generators=count)
    rewards, times = curve(folder)
    step = reached(rewards)
    return {
        "cell": cell.key,
        "form": FORM,
        "mode": cell.mode.name,
        "mix": cell.mix,
        "seed": cell.seed,
        "to_accuracy_s": None if step is None else times[step - 1],
        "to_accuracy_steps": step,
        "final_reward": mean(rewards[-LAST:]),
        "samples_per_s": done.samples / done.seconds,
        "tokens_per_s": done.tokens / done.seconds,
        "step_s": done.step_s,
        "steps": config.run.steps,
        "generation_s": done.step_s * (1 - done.generator_idle),
        "training_s": done.step_s * (1 - done.trainer_idle),
        "generator_idle": done.generator_idle,
        "trainer_idle": done.trainer_idle,
        "buffer_idle": cpu_idle(summary, "buffer"),
        "hub_idle": cpu_idle(summary, "weight-hub"),
        "staleness": done.staleness,
        "staleness_max": done.staleness_max,
        "dropped": sum(summary["ledger"]["ended"].values()),
        "cpu_s": {name: used["cpu"] for name, used in summary["seconds"]["services"].items()},
        "steady": asdict(done),
        "curve": [[round(t, 2), round(r, 4)] for t, r in zip(times, rewards, strict=True)],
    }


def curve(folder: RunFolder) -> tuple[list[float], list[float]]:
    """Mean reward of each step's batch, and seconds from the first decoding to its commit."""
    rows = list(read_rows(folder.metrics))
    began = min(r["start"] for r in rows if r["kind"] == "span" and r["name"] == "decode")
    steps = sorted((row for row in rows if row["kind"] == "step"), key=lambda row: row["step"])
    return [row["reward/mean"] for row in steps], [row["time"] - began for row in steps]
