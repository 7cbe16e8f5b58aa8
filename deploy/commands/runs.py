"""`umbra runs`: the runs in a folder and their states, or rollouts of one."""

from __future__ import annotations

import heapq
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import click

from umbra.deploy import run_folder
from umbra.deploy.run_folder import RunFolder
from umbra.deploy.shown import shown_name
from umbra.proto.bounds import printable
from umbra.proto.errors import EXIT_DONE, UsageError
from umbra.services.config import RunSection
from umbra.services.config.loader import load_config
from umbra.services.monitor.run_address import find_run
from umbra.services.process.files import is_held
from umbra.services.process.metrics import parse_row
from umbra.services.reporting import aligned, size

TAIL_BYTES = 1 << 20  # of the metrics, in which a run without a summary has its last steps
STEP = '"kind":"step"'  # in a line of metrics, most of which are spans
RECENT = 10  # steps, of which the mean reward is shown
SIGNALLED = 128  # exit codes above it are of signals
LATEST_S = 253_402_214_400  # the end of the year 9999: files may have any time


@dataclass(frozen=True, slots=True)
class RunEntry:
    """A run in a few words; None for unknown values."""

    id: str
    name: str
    state: Literal["under way", "ended", "failed", "interrupted"]
    steps: int
    goal: int | None
    reward: float | None  # mean of the last steps
    accuracy: float | None  # on held-out prompts, after training
    begun: float  # seconds since the epoch
    bytes: int
    folder: str
    reason: str  # why it ended


@click.command()
@click.argument("run", default="")
@click.option("--samples", "samples", type=click.IntRange(1), metavar="N", help="Print N rollouts.")
@click.option("--step", type=click.IntRange(1), help="Only rollouts of this step.")
@click.option("--worst", is_flag=True, help="Those with the lowest rewards, lowest first.")
@click.option("--best", is_flag=True, help="Those with the highest rewards, highest first.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def command(
    run: str, samples: int | None, step: int | None, worst: bool, best: bool, as_json: bool
) -> int:
    """List the runs in the folder RUN [default: runs], or print rollouts of one.

    A run is under way, ended, failed, or interrupted: stopped by a signal or killed; `umbra up
    FOLDER/ID` goes on with one of those. The reward is the mean of its last ten steps, the accuracy
    that of the trained model on held-out prompts.

    With --samples, --step, --worst or --best: rollouts that a run was trained on, the newest ones,
    oldest first, with their rewards and how old the weights were that said each part. RUN is then a
    run's folder, its id in runs/, or nothing for the newest one. Of each step log.samples rollouts
    are kept, from the worst to the best.
    """
    if samples or step or worst or best:
        return _print_rollouts(run, samples or 4, step, worst=worst, best=best, as_json=as_json)
    folder = Path(run or RunSection().dir)
    entries = sorted(list_runs(folder), key=lambda entry: entry.begun)
    if as_json:
        for entry in entries:
            click.echo(json.dumps(asdict(entry)))
        return EXIT_DONE
    if not entries:
        raise UsageError(f"no run is in {folder}: name the folder that runs are in (run.dir)")
    heading = ("id", "state", "steps", "reward", "accuracy", "begun", "size")
    for line in aligned([heading, *map(_cells, entries)], right=(2, 3, 4, 6)):
        click.echo(line)
    return EXIT_DONE


def _print_rollouts(
    run: str, count: int, step: int | None, *, worst: bool, best: bool, as_json: bool
) -> int:
    if worst and best:
        raise UsageError("--worst and --best exclude each other")
    folder = RunFolder(find_run(run))
    with run_folder.only_rows_of_runs(folder.samples):
        of_step = (
            row for row in run_folder.read_rollouts(folder) if step is None or row["step"] == step
        )
        if worst or best:
            choose = heapq.nsmallest if worst else heapq.nlargest
            rows = choose(count, of_step, key=lambda row: row["reward"])
        else:
            rows = list(deque(of_step, maxlen=count))
        for row in rows:
            click.echo(json.dumps(row) if as_json else printable(run_folder.rollout_text(row)))
    if rows:
        return EXIT_DONE
    reason = f"has no rollouts yet: {folder.samples.name} comes with its first step"
    if folder.samples.is_file():
        reason = f"has no rollouts of step {step}" if step else "has no rollouts yet"
    elif load_config(folder.config, environ={}).log.samples == 0:
        reason = "keeps no rollouts: log.samples is 0"
    raise UsageError(f"run {folder.id} {reason}")


def list_runs(parent: Path) -> Iterator[RunEntry]:
    """Yield the runs below `parent`; unreadable files of a run are skipped."""
    for file in parent.glob("*/config.json"):
        if file.is_file() and not (file.parent / "tokenizer_config.json").is_file():  # a model's
            with suppress(FileNotFoundError):  # a run that is removed meanwhile
                yield _entry(RunFolder(file.parent))


def _entry(folder: RunFolder) -> RunEntry:
    config, summary = run_folder.read_object(folder.config), run_folder.read_object(folder.summary)
    run = section if isinstance(section := config.get("run"), dict) else {}
    lines = (line for line in reversed(run_folder.tail(folder.metrics, TAIL_BYTES)) if STEP in line)
    steps = list(islice(filter(None, map(parse_row, lines)), RECENT))  # newest first
    rewards = [r for row in steps if (r := _number(row.get("reward/mean"))) is not None]
    goal, code = _number(run.get("steps")), summary.get("exit_code")
    signalled = not isinstance(code, int) or code > SIGNALLED
    state = "interrupted" if signalled else "failed" if code else "ended"
    return RunEntry(
        id=folder.id,
        name=str(run.get("name", "")),
        state="under way" if is_held(folder.path) else state,
        steps=int((_number(steps[0].get("step")) or 0) if steps else 0),
        goal=None if goal is None else int(goal),
        reward=sum(rewards) / len(rewards) if rewards else None,
        accuracy=_number(summary.get("accuracy_after")),
        begun=folder.config.stat().st_mtime,
        bytes=_size(folder.path),
        folder=str(folder.path),
        reason=str(summary.get("exit_reason", "")),
    )


def _number(value: Any) -> float | None:
    """Return a finite number of a file that others may have written, else None."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):  # an integer of any length
            return float(value) if isfinite(value) else None
    return None


def _size(folder: Path) -> int:
    """Return the bytes of all files below `folder`; a run under way may remove some meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it is gone, or its folder is closed to us
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def _cells(run: RunEntry) -> tuple[str, ...]:
    return (
        shown_name(run.id),
        run.state,
        f"{run.steps}/{run.goal}" if run.goal else str(run.steps),
        "-" if run.reward is None else f"{run.reward:.3f}",
        "-" if run.accuracy is None else f"{run.accuracy:.3f}",
        time.strftime("%Y-%m-%d %H:%M", time.localtime(min(max(run.begun, 0), LATEST_S))),
        size(run.bytes),
    )
