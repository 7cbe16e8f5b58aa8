"""Batches in the store: formed ones, and committed ones until a checkpoint covers them.

A trainer that starts again from its checkpoint gets the batches of the steps after it once more,
identical and in order; so they, and their trajectories, are kept until then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from umbra.services.buffer.journal import (
    Journal,
    add_sample,
    group_record,
    make_group,
    sample_record,
)
from umbra.services.buffer.samples import Group, State
from umbra.services.buffer.shelf import PREFIX as TRAJECTORY
from umbra.services.buffer.staleness import StalenessStats


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch of one step; the trainer gets this very one however often it asks."""

    step: int
    groups: list[Group]
    staleness: StalenessStats
    formed_at: float  # seconds of the broker's clock

    @property
    def sample_ids(self) -> list[str]:
        """Its samples, in order."""
        return [sample.sample_id for group in self.groups for sample in group.samples]


class Archive:
    """The batches in the store, by step."""

    def __init__(self, journal: Journal) -> None:
        self.steps: list[int] = []  # committed ones that are kept, in order and without a gap
        self._journal = journal

    @property
    def is_kept(self) -> bool:
        """Whether committed batches are kept at all: not in a store that dies with the process."""
        return self._journal.store.durable

    def form(self, batch: Batch) -> None:
        """Take note of a new batch; its groups and samples are live, and kept as such."""
        names = [group.group_id for group in batch.groups]
        self._write(batch, [{"group_id": name} for name in names], is_open=True)

    def close(self, batch: Batch) -> None:
        """The batch is about to be committed; its samples are live for the last time."""
        if not self.is_kept:
            self._journal.store.delete(f"b/{batch.step}")
            return
        groups = [
            group_record(group) | {"samples": [sample_record(s) for s in group.samples]}
            for group in batch.groups
        ]
        self._write(batch, groups, is_open=False)
        self.steps.append(batch.step)

    def reopen(self, step: int, now: float) -> Batch:
        """The batch of `step`, as it was when it was committed."""
        record = self._journal.read(f"b/{step}")
        groups: list[Group] = []
        for one in record["groups"]:
            group = make_group(one, {})
            for sample in one["samples"]:
                add_sample(group, sample)
            groups.append(group)
        self.steps.remove(step)
        batch = Batch(step, groups, StalenessStats(**record["staleness"]), now)
        self.form(batch)
        return batch

    def load(self, live: dict[str, Group], now: float) -> list[Batch]:
        """The formed batches, and in `steps` the committed ones.

        Groups are looked up in `live`; the samples of formed batches are in training from here on.
        """
        batches: list[Batch] = []
        for key in sorted(self._journal.store.keys("b/"), key=lambda key: int(key[2:])):
            record = self._journal.read(key)
            if not record["is_open"]:
                self.steps.append(int(key[2:]))
                continue
            groups = [live[one["group_id"]] for one in record["groups"]]
            for sample in (sample for group in groups for sample in group.samples):
                if sample.state is State.READY:
                    sample.state = State.TRAINING
            stats = StalenessStats(**record["staleness"])
            batches.append(Batch(int(key[2:]), groups, stats, now))
        return batches

    def drop_through(self, step: int) -> None:
        """Forget the committed batches up to `step`, with their trajectories."""
        store = self._journal.store
        while self.steps and self.steps[0] <= step:
            oldest = self.steps.pop(0)
            for group in self._journal.read(f"b/{oldest}")["groups"]:
                for sample in group["samples"]:
                    store.delete(TRAJECTORY + sample["sample_id"])
            store.delete(f"b/{oldest}")

    def forget(self, step: int) -> None:
        """The open batch of `step` will not be trained on."""
        self._journal.store.delete(f"b/{step}")

    def _write(self, batch: Batch, groups: list[dict[str, Any]], *, is_open: bool) -> None:
        record = {"groups": groups, "staleness": batch.staleness.sums(), "is_open": is_open}
        self._journal.write(f"b/{batch.step}", record)
