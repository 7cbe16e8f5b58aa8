"""`umbra runs`: the runs in a folder, and what became of them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import click

from umbra.deploy.run_folder import RunFolder
from umbra.proto.errors import EXIT_DONE, UNREADABLE, UsageError
from umbra.services.config import RunSection
from umbra.services.process.files import is_held
from umbra.services.process.metrics import parse_row
from umbra.services.reporting.tables import aligned, size

TAIL_BYTES = 1 << 20  # of the metrics, in which a run without a summary has its last steps
RECENT = 10  # steps, of which the mean reward is shown
SIGNALLED = 128  # exit codes above it are of signals

State = Literal["under way", "ended", "failed", "interrupted"]


@dataclass(frozen=True, slots=True)
class RunEntry:
    """A run in a few words; None is what is not known."""

    id: str
    name: str
    state: State
    steps: int
    goal: int | None
    reward: float | None  # mean of the last steps
    accuracy: float | None  # on held-out prompts, after training
    begun: float  # seconds since the epoch
    bytes: int
    folder: str
    reason: str  # why it ended


@click.command()
@click.argument(
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(RunSection().dir),
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def command(folder: Path, as_json: bool) -> int:
    """List the runs in FOLDER [default: runs], the newest last.

    A run is under way, ended, failed, or interrupted: stopped by a signal or killed; `umbra up
    FOLDER/ID` goes on with one of those. The reward is the mean of its last ten steps, the accuracy
    that of the trained model on held-out prompts.
    """
    found = sorted(list_runs(folder), key=lambda run: run.begun)
    if as_json:
        for run in found:
            click.echo(json.dumps(asdict(run)))
        return EXIT_DONE
    if not found:
        raise UsageError(f"no run is in {folder}: name the folder that runs are in (run.dir)")
    heading = ("id", "state", "steps", "reward", "accuracy", "begun", "size")
    for line in aligned([heading, *map(_row, found)], right=(2, 3, 4, 6)):
        click.echo(line)
    return EXIT_DONE


def list_runs(parent: Path) -> Iterator[RunEntry]:
    """The runs below `parent`; what cannot be read of one is left out."""
    for file in parent.glob("*/config.json"):
        if (file.parent / "tokenizer_config.json").is_file():
            continue  # a model
        yield _entry(RunFolder(file.parent))


def _entry(folder: RunFolder) -> RunEntry:
    run = _section(_read(folder.config), "run")
    summary = _read(folder.summary)
    steps = _last_steps(folder.metrics)
    rewards = [row["reward/mean"] for row in steps if row.get("reward/mean") is not None]
    return RunEntry(
        id=folder.id,
        name=str(run.get("name", "")),
        state=_state(folder, summary),
        steps=int(steps[-1]["step"]) if steps else 0,
        goal=run.get("steps"),
        reward=sum(rewards) / len(rewards) if rewards else None,
        accuracy=summary.get("accuracy_after"),
        begun=folder.config.stat().st_mtime,
        bytes=_size(folder.path),
        folder=str(folder.path),
        reason=str(summary.get("exit_reason", "")),
    )


def _state(folder: RunFolder, summary: dict[str, Any]) -> State:
    if is_held(folder.path):
        return "under way"
    code = summary.get("exit_code")
    if not isinstance(code, int) or code > SIGNALLED:
        return "interrupted"
    return "failed" if code else "ended"


def _last_steps(metrics: Path) -> list[dict[str, Any]]:
    """The newest rows of steps, oldest first."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    steps: list[dict[str, Any]] = []
    for line in reversed(lines):
        if '"kind":"step"' in line and (row := parse_row(line)) is not None:
            steps.append(row)
            if len(steps) == RECENT:
                break
    return steps[::-1]


def _size(folder: Path) -> int:
    """Bytes of all files below `folder`; a run that goes on may take some away meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def _read(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, *UNREADABLE):
        return {}
    return found if isinstance(found, dict) else {}


def _section(tree: dict[str, Any], name: str) -> dict[str, Any]:
    found = tree.get(name)
    return found if isinstance(found, dict) else {}


def _row(run: RunEntry) -> tuple[str, ...]:
    return (
        run.id,
        run.state,
        f"{run.steps}/{run.goal}" if run.goal else str(run.steps),
        "-" if run.reward is None else f"{run.reward:.3f}",
        "-" if run.accuracy is None else f"{run.accuracy:.3f}",
        time.strftime("%Y-%m-%d %H:%M", time.localtime(run.begun)),
        size(run.bytes),
    )
