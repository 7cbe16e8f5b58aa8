"""Audit of every sample of a run by the records of its clients, not by the buffer's ledger.

    UMBRA_BENCH_NOTES=FOLDER python benchmarks/chaos_audit.py COMMAND [its arguments]

runs an `umbra` command that writes records: a generator each sample whose delivery the buffer has
acknowledged, a trainer the samples of each batch that it has trained on; `up` starts all of its
processes in this way. A record is in the file before anything follows from it, so a process that is
killed in between has recorded less, never more.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from umbra.deploy.run_folder import read_rows

VARIABLE = "UMBRA_BENCH_NOTES"
STRETCHES = 10  # of a reward curve
RULES = ("stale", "filtered", "cancelled")  # ends that a rule or the run's own end gives a sample


def note(file: str, line: str) -> None:
    """Append a line to a file of the folder that the environment names, if it does."""
    if folder := os.environ.get(VARIABLE):
        place = os.open(Path(folder) / file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(place, f"{line}\n".encode())
        os.close(place)


def noting_client() -> type[Any]:
    """Return a `TaskClient` that records acknowledged samples."""
    from umbra.proto.messages import Message, SubmitResults, TaskLeases
    from umbra.proto.net.task_client import TaskClient

    class NotingClient(TaskClient):
        def _answered(
            self, future: Future[Message], body: Message, leases: Any, asked: int | None
        ) -> None:
            super()._answered(future, body, leases, asked)
            answer = future.result()
            if isinstance(body, SubmitResults) and isinstance(answer, TaskLeases):
                samples = [one.sample_id for one in body.trajectories]
                kept = " ".join(name for name in samples if name not in answer.refused)
                if kept:
                    note(f"acknowledged-{os.getpid()}.txt", kept)

    return NotingClient


def noting(update: Callable[..., Any]) -> Callable[..., Any]:
    """Return `update`, a `PolicyUpdate.__call__`, that records what it has trained on."""

    def noting_update(*arguments: Any) -> Any:
        batch, version, _ = arguments[-3:]
        row = update(*arguments)
        if row is not None:
            samples = [one.sample_id for one in batch.trajectories]
            note("trained.jsonl", json.dumps({"step": version + 1, "samples": samples}))
        return row

    return noting_update


@dataclass(frozen=True)
class Audit:
    """Samples of one run, as its generators and trainers recorded them.

    Attributes:
        acknowledged: samples whose delivery a generator was told is stored.
        trained: samples in the batches that count.
        untrained: acknowledged, and in none of these batches.
        lost: untrained, more than the buffer says it has ended by a rule.
        twice: samples in more than one place of the batches.
        ended: samples that the buffer says it has ended, by reason.
        repeated: batches that were trained again after a kill.
        changed: repeated batches with other samples.
        steps: steps that were trained.
    """

    acknowledged: int
    trained: int
    untrained: int
    lost: int
    twice: int
    ended: dict[str, int]
    repeated: int
    changed: int
    steps: list[int]


def audit(folder: Path, notes: Path) -> Audit:
    """Compare the records in `notes` of a run that has ended with the summary in its `folder`."""
    status = json.loads((folder / "buffer.json").read_text(encoding="utf-8"))
    ended = {reason: count for reason, count in status["ledger"]["ended"].items() if count}
    acknowledged: set[str] = set()
    for file in notes.glob("acknowledged-*.txt"):
        acknowledged.update(file.read_text(encoding="utf-8").split())
    batches: dict[int, list[str]] = {}  # of a step that was repeated, the last one
    repeated = changed = 0
    trained_file = notes / "trained.jsonl"
    lines = trained_file.read_text(encoding="utf-8").splitlines() if trained_file.exists() else ()
    for row in map(json.loads, lines):
        before = batches.get(row["step"])
        if before is not None:
            repeated += 1
            changed += before != row["samples"]
        batches[row["step"]] = row["samples"]
    trained = Counter(name for batch in batches.values() for name in batch)
    untrained = len(acknowledged - trained.keys())
    return Audit(
        acknowledged=len(acknowledged),
        trained=len(trained),
        untrained=untrained,
        lost=max(0, untrained - sum(ended.get(reason, 0) for reason in RULES)),
        twice=sum(count > 1 for count in trained.values()),
        ended=ended,
        repeated=repeated,
        changed=changed,
        steps=sorted(batches),
    )


def curve(folder: Path) -> list[float]:
    """Return the mean reward in each tenth of the steps; of a repeated step the last counts."""
    rewards = {row["step"]: float(row["reward/mean"]) for row in rows(folder, "step")}
    values = [rewards[step] for step in sorted(rewards)]
    edges = [len(values) * index // STRETCHES for index in range(STRETCHES + 1)]
    return [sum(values[begin:end]) / (end - begin) for begin, end in pairwise(edges) if end > begin]


def rows(folder: Path, kind: str) -> Iterable[dict[str, Any]]:
    """Return the rows of one kind in the metrics of a run."""
    return (row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == kind)


def main() -> int:
    """Run the `umbra` command of the command line, with records."""
    from umbra.cli import main as umbra
    from umbra.deploy.run import up

    up.umbra_argv = lambda *arguments: (sys.executable, __file__, *arguments)
    if sys.argv[1:2] == ["generator"]:
        from umbra.services.generator import service as generator

        generator.TaskClient = noting_client()
    if sys.argv[1:2] == ["trainer"]:
        from umbra.services.process.command import service_command
        from umbra.services.trainer.service import run
        from umbra.services.trainer.update import PolicyUpdate

        PolicyUpdate.__call__ = noting(PolicyUpdate.__call__)
        command = service_command("trainer", run)
        command.main(sys.argv[2:], prog_name="umbra trainer")
    return umbra() or 0


if __name__ == "__main__":
    from umbra.services.process.parent import die_with_parent

    die_with_parent()
    sys.exit(main())
