"""What became of every sample of a run, read from its store and its metrics after the end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from umbra.services.buffer.store_report import StoreReader

STRETCHES = 10  # of a reward curve
KEPT = ("stale", "filtered", "cancelled")  # ends that a rule or the run's own end gives a sample


@dataclass(frozen=True)
class Audit:
    """Samples of one run. `lost`: issued, and neither trained nor ended for a reason of the run's
    own; `twice`: trained in more than one of the batches that count.
    """

    trained: int
    lost: int
    twice: int
    ended: dict[str, int]
    repeated: int  # batches that a trainer got again after it was killed
    changed: int  # of these, those that were not what they were
    steps: list[int]


def audit(folder: Path) -> Audit:
    """Look through a run that has ended and whose store has kept all batches."""
    status = json.loads((folder / "buffer.json").read_text(encoding="utf-8"))
    ledger = status["ledger"]
    store = StoreReader(folder / "store")
    steps = sorted(int(key[2:]) for key in store.image.places if key.startswith("b/"))
    trained = Counter(
        sample["sample_id"]
        for step in steps
        for group in store.read(f"b/{step}")["groups"]
        for sample in group["samples"]
    )
    ended = sum(ledger["ended"].get(reason, 0) for reason in KEPT)
    handed: dict[int, list[str]] = {}
    for row in rows(folder, "handed_out"):
        handed.setdefault(row["step"], []).append(row["digest"])
    return Audit(
        trained=len(trained),
        lost=ledger["issued"] - len(trained) - ended,
        twice=trained.total() - len(trained),
        ended={reason: count for reason, count in ledger["ended"].items() if count},
        repeated=sum(len(digests) - 1 for digests in handed.values()),
        changed=sum(len(set(digests)) > 1 for digests in handed.values()),
        steps=steps,
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
