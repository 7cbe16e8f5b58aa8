"""Batches in the store: formed ones, and committed ones until a checkpoint covers them.

A trainer that starts again from its checkpoint gets the batches of the steps after it once more,
identical and in order; so they, and their trajectories, are kept until then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from umbra.services.buffer.policy.staleness import StalenessStats
from umbra.services.buffer.samples.groups import Group, State
from umbra.services.buffer.store.journal import Journal, group_record, is_whole, make_group


@dataclass(frozen=True, slots=True)
class StoredBatch:
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
    """The batches in the store of `journal`, by step."""

    def __init__(self, journal: Journal) -> None:
        self.steps: list[int] = []  # committed ones that are kept, in order and without a gap
        self._journal = journal

    @property
    def is_kept(self) -> bool:
        """True if committed batches are kept: not in a store that ends with the process."""
        return self._journal.store.durable

    def form(self, batch: StoredBatch) -> None:
        """Write a new batch as the names of its groups, which are live and kept as such."""
        names = [{"group_id": group.group_id} for group in batch.groups]
        self._write(batch, names, is_open=True)

    def close(self, batch: StoredBatch) -> None:
        """Write the groups of a batch that is about to be committed, after which none is live."""
        if not self.is_kept:
            self.forget(batch.step)
            return
        self._write(batch, [group_record(group) for group in batch.groups], is_open=False)
        self.steps.append(batch.step)

    def reopen(self, step: int, now: float) -> StoredBatch:
        """Return the batch of `step` as it was when it was committed, open again."""
        record = self._journal.read(f"b/{step}")
        self.steps.remove(step)
        groups = [make_group(one) for one in record["groups"]]
        batch = StoredBatch(step, groups, StalenessStats(**record["staleness"]), now)
        self.form(batch)
        return batch

    def load(
        self, live: dict[str, Group], trajectories: Mapping[str, int], now: float
    ) -> tuple[list[StoredBatch], list[str]]:
        """Return the formed batches, and what a repair has taken from them; sets `steps`.

        Groups are looked up in `live`, which loses those that were trained already; the samples of
        formed batches are in training from here on.
        """
        batches: list[StoredBatch] = []
        mended: list[str] = []
        broken = 0  # newest step that cannot be repeated
        for step in sorted(int(key[2:]) for key in self._journal.store.keys("b/")):
            record = self._journal.read(f"b/{step}")
            names: list[str] = [group["group_id"] for group in record["groups"]]
            if not record["is_open"]:
                for name in (name for name in names if name in live):
                    mended.append(f"group {name} was trained in step {step}: it is not live")
                    self._journal.forget(live.pop(name).group_id)
                if self.steps and step != self.steps[-1] + 1:
                    broken = step - 1
                samples = [sample for group in record["groups"] for sample in group["samples"]]
                if not all(is_whole(sample, trajectories) for sample in samples):
                    broken = step
                self.steps.append(step)
                continue
            groups = [live[name] for name in names if name in live]
            whole = [group for group in groups if group.completed]
            _set_state(groups, State.READY)  # for those that a repair has taken a trajectory of
            _set_state(whole, State.TRAINING)
            batch = StoredBatch(step, whole, StalenessStats(**record["staleness"]), now)
            if missing := len(names) - len(whole):
                mended.append(f"the batch of step {step} goes on without {missing} groups")
                self.form(batch) if whole else self.forget(step)
            if whole:
                batches.append(batch)
        if broken:
            mended.append(f"the batches up to step {broken} cannot be handed out again")
            self.drop_through(broken)
        return batches, mended

    def count_samples(self, step: int) -> int:
        """Return how many samples the committed batch of `step` has; 0 if it is not kept."""
        if step not in self.steps:
            return 0
        return sum(len(group["samples"]) for group in self._journal.read(f"b/{step}")["groups"])

    def drop_through(self, step: int) -> None:
        """Forget the committed batches up to `step`, and their trajectories."""
        while self.steps and self.steps[0] <= step:
            oldest = self.steps.pop(0)
            for group in self._journal.read(f"b/{oldest}")["groups"]:
                for sample in group["samples"]:
                    self._journal.drop_trajectory(sample["sample_id"])
            self.forget(oldest)

    def forget(self, step: int) -> None:
        """Drop the record of the batch of `step`."""
        self._journal.store.delete(f"b/{step}")

    def _write(self, batch: StoredBatch, groups: list[Any], *, is_open: bool) -> None:
        record = {"groups": groups, "staleness": batch.staleness, "is_open": is_open}
        self._journal.write(f"b/{batch.step}", record)


def _set_state(groups: list[Group], state: State) -> None:
    """Set the state of their complete samples; a formed batch does not write them again."""
    for sample in (sample for group in groups for sample in group.samples):
        if sample.state in (State.READY, State.TRAINING):
            sample.state = state
