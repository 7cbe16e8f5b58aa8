"""What became of every sample of a run, by the notes of its clients (`noted.py`)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from noted import read_notes

STRETCHES = 10  # of a reward curve
KEPT = ("stale", "filtered", "cancelled")  # ends that a rule or the run's own end gives a sample


@dataclass(frozen=True)
class Audit:
    """Samples of one run, as its generators and trainers noted them.

    Attributes:
        acknowledged: samples whose delivery some generator was told is kept.
        trained: samples that the trainer has learned from, in the batches that count.
        untrained: acknowledged, and in none of these batches.
        ended: what the buffer says it has ended by a rule; alone this is its own word.
        lost: more than that are untrained.
        twice: samples in more than one place of the batches.
        repeated: batches that a trainer trained on again after it was killed.
        changed: of these, those that were not what they were.
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
    """Look through a run that has ended, and through the notes of its clients."""
    status = json.loads((folder / "buffer.json").read_text(encoding="utf-8"))
    ended = {reason: count for reason, count in status["ledger"]["ended"].items() if count}
    found = read_notes(notes)
    untrained = len(found.untrained)
    return Audit(
        acknowledged=len(found.acknowledged),
        trained=len(found.trained),
        untrained=untrained,
        lost=max(0, untrained - sum(ended.get(reason, 0) for reason in KEPT)),
        twice=found.twice,
        ended=ended,
        repeated=found.repeated,
        changed=found.changed,
        steps=sorted(found.batches),
    )


def curve(folder: Path) -> list[float]:
    """Mean reward in each tenth of the steps; of a step that was repeated, the last counts."""
    rewards = {row["step"]: float(row["reward/mean"]) for row in rows(folder, "step")}
    values = [rewards[step] for step in sorted(rewards)]
    edges = [len(values) * index // STRETCHES for index in range(STRETCHES + 1)]
    return [sum(values[begin:end]) / (end - begin) for begin, end in pairwise(edges) if end > begin]


def rows(folder: Path, kind: str) -> Iterable[dict[str, Any]]:
    """The rows of one kind in the metrics; a line that a crash has cut off is left out."""
    with (folder / "metrics.jsonl").open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.endswith("\n") and f'"kind":"{kind}"' in line:
                yield json.loads(line)
