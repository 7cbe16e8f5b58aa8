"""`umbra runs`: the runs in a folder and their states, or rollouts of one."""

from __future__ import annotations

import heapq
import json
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import click

from umbra.deploy import run_folder
from umbra.deploy.run_folder import SIGNALLED, RunFolder
from umbra.proto.bounds import one_line, printable
from umbra.proto.errors import EXIT_DONE, UsageError
from umbra.services.config import RunSection
from umbra.services.config.loader import load_config
from umbra.services.monitor.run_address import find_run
from umbra.services.process.files import is_held
from umbra.services.process.metrics import parse_row
from umbra.services.reporting import aligned

TAIL_BYTES = 1 << 20  # of the metrics, in which a run without a summary has its last steps
STEP = '"kind":"step"'  # in a line of metrics, most of which are spans
RECENT = 10  # steps, of which the mean reward is shown


@click.command()
@click.argument("run", default="")
@click.option("--samples", "samples", type=click.IntRange(1), metavar="N", help="Print N rollouts.")
@click.option("--worst", is_flag=True, help="Those with the lowest rewards, lowest first.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def command(run: str, samples: int | None, worst: bool, as_json: bool) -> int:
    """List the runs in the folder RUN [default: runs], or print rollouts of one.

    A run is under way, ended, failed, damaged, or interrupted: stopped by a signal or killed;
    `umbra up FOLDER/ID` resumes one of those. The reward is the mean of its last ten steps, the
    accuracy that of the trained model on held-out prompts.

    With --samples or --worst: rollouts that a run was trained on, the newest ones, oldest first,
    with their rewards and staleness. RUN is then a run's folder, its id in runs/, or nothing for
    the newest one. Of each step log.samples rollouts are kept, from the worst to the best.
    """
    if samples or worst:
        return _print_rollouts(run, samples or 4, worst=worst, as_json=as_json)
    folder = Path(run or RunSection().dir)
    entries = sorted(list_runs(folder), key=lambda entry: entry["begun"])
    if as_json:
        for entry in entries:
            click.echo(json.dumps(entry))
        return EXIT_DONE
    if not entries:
        raise UsageError(f"no run is in {folder}: name the folder that runs are in (run.dir)")
    heading = ("id", "state", "steps", "reward", "accuracy", "begun")
    for line in aligned([heading, *map(_cells, entries)], right=(2, 3, 4)):
        click.echo(line)
    return EXIT_DONE


def _print_rollouts(run: str, count: int, *, worst: bool, as_json: bool) -> int:
    folder = RunFolder(find_run(run))
    with run_folder.only_rows_of_runs(folder.samples):
        rollouts = run_folder.read_rollouts(folder)
        if worst:
            rows = heapq.nsmallest(count, rollouts, key=lambda row: row["reward"])
        else:
            rows = list(deque(rollouts, maxlen=count))
        for row in rows:
            click.echo(json.dumps(row) if as_json else printable(run_folder.rollout_text(row)))
    if rows:
        return EXIT_DONE
    reason = f"has no rollouts yet: {folder.samples.name} comes with its first step"
    if load_config(folder.config, environ={}).log.samples == 0:
        reason = "keeps no rollouts: log.samples is 0"
    raise UsageError(f"run {folder.id} {reason}")


def list_runs(parent: Path) -> Iterator[dict[str, Any]]:
    """Yield the runs below `parent`; one whose files hold something else is `damaged`."""
    for file in parent.glob("*/config.json"):
        if not file.is_file() or (file.parent / "tokenizer_config.json").is_file():  # a model's
            continue
        folder = RunFolder(file.parent)
        with suppress(FileNotFoundError):  # a run that is removed meanwhile
            entry = {"id": folder.id, "folder": str(folder.path), "begun": file.stat().st_mtime}
            try:
                yield entry | _progress(folder)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                yield entry | {"state": "damaged", "reason": f"{type(error).__name__}: {error}"}


def _progress(folder: RunFolder) -> dict[str, Any]:
    """Return state, steps, the mean reward of the last ones, accuracy, and why the run ended."""
    config, summary = run_folder.read_object(folder.config), run_folder.read_object(folder.summary)
    lines = (line for line in reversed(run_folder.tail(folder.metrics, TAIL_BYTES)) if STEP in line)
    steps = list(islice(filter(None, map(parse_row, lines)), RECENT))  # newest first
    rewards = [row["reward/mean"] for row in steps if row.get("reward/mean") is not None]
    accuracy, code = summary.get("accuracy_after"), summary.get("exit_code", SIGNALLED + 1)
    state = "interrupted" if code > SIGNALLED else "failed" if code else "ended"
    return {
        "state": "under way" if is_held(folder.path) else state,
        "steps": int(steps[0]["step"]) if steps else 0,
        "goal": int(config["run"]["steps"]),
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "accuracy": None if accuracy is None else float(accuracy),
        "reason": str(summary.get("exit_reason", "")),
    }


def _cells(run: dict[str, Any]) -> tuple[str, ...]:
    reward, accuracy = run.get("reward"), run.get("accuracy")
    return (
        one_line(run["id"]),
        run["state"],
        f"{run['steps']}/{run['goal']}" if "goal" in run else "-",
        "-" if reward is None else f"{reward:.3f}",
        "-" if accuracy is None else f"{accuracy:.3f}",
        time.strftime("%Y-%m-%d %H:%M", time.localtime(run["begun"])),
    )
