"""Batches in the store: formed ones, and committed ones until a checkpoint covers them.

A trainer that starts again from its checkpoint gets the batches of the steps after it once more,
identical and in order; so they, and their trajectories, are kept until then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from umbra.services.buffer.policy.replays import Replays
from umbra.services.buffer.policy.staleness import StalenessStats
from umbra.services.buffer.samples.groups import Group, State
from umbra.services.buffer.store.journal import Journal, group_record, is_whole, make_group


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """The batch of one step; the trainer gets this very one however often it asks."""

    step: int
    groups: list[Group]  # that are trained on for the first time
    staleness: StalenessStats
    formed_at: float  # seconds of the broker's clock
    replays: list[Group] = field(default_factory=list[Group])  # the others

    @property
    def all_groups(self) -> list[Group]:
        """All its groups, in order."""
        return [*self.groups, *self.replays]

    @property
    def sample_ids(self) -> list[str]:
        """Its samples, in order."""
        return [sample.sample_id for group in self.all_groups for sample in group.samples]


class Archive:
    """The batches in the store, by step.

    Args:
        journal: writes to it.
        replays: knows which groups are needed for batches to come.
    """

    def __init__(self, journal: Journal, replays: Replays) -> None:
        self.steps: list[int] = []  # committed ones that are kept, in order and without a gap
        self._journal = journal
        self._replays = replays
        self._again: Counter[str] = Counter()  # by group: kept batches that it is replayed in

    @property
    def is_kept(self) -> bool:
        """Whether committed batches are kept at all: not in a store that dies with the process."""
        return self._journal.store.durable

    def form(self, batch: StoredBatch) -> None:
        """Take note of a new batch; its groups are live, or held for replay, and kept as such."""
        names = [{"group_id": group.group_id} for group in batch.groups]
        again = [{"group_id": group.group_id} for group in batch.replays]
        self._write(batch, names, again, is_open=True)

    def close(self, batch: StoredBatch) -> None:
        """The batch is about to be committed; its new samples are live for the last time."""
        if not self.is_kept:
            self._journal.store.delete(f"b/{batch.step}")
            return
        groups = [group_record(group) for group in batch.groups]
        replays = [group_record(group) for group in batch.replays]
        self._write(batch, groups, replays, is_open=False)
        self._again.update(group.group_id for group in batch.replays)
        self.steps.append(batch.step)

    def reopen(self, step: int, now: float, alive: Mapping[str, Group]) -> StoredBatch:
        """The batch of `step`, as it was when it was committed; `alive` groups are those objects.

        Groups that were held for replay stay the same objects too.
        """
        record = self._journal.read(f"b/{step}")
        known = {**self._replays.groups, **alive}
        groups, replays = (
            [known.get(one["group_id"]) or make_group(one) for one in record[part]]
            for part in ("groups", "replays")
        )
        self._again.subtract(group.group_id for group in replays)
        self.steps.remove(step)
        batch = StoredBatch(step, groups, StalenessStats(**record["staleness"]), now, replays)
        self.form(batch)
        return batch

    def load(
        self, live: dict[str, Group], trajectories: Mapping[str, int], now: float
    ) -> tuple[list[StoredBatch], list[str]]:
        """The formed batches, and what a repair has taken from them; `steps` is the committed ones.

        Groups are looked up in `live`, which those lose that were trained already, and among
        those that are held for replay; the samples of formed batches are in training from here
        on.
        """
        known = {**self._replays.groups, **live}
        batches: list[StoredBatch] = []
        mended: list[str] = []
        broken = 0  # newest step that cannot be repeated
        for step in sorted(int(key[2:]) for key in self._journal.store.keys("b/")):
            record = self._journal.read(f"b/{step}")
            named = (*record["groups"], *record["replays"])
            if not record["is_open"]:
                for name in [g["group_id"] for g in record["groups"] if g["group_id"] in live]:
                    mended.append(f"group {name} was trained in step {step}: it is not live")
                    self._journal.forget(live.pop(name).group_id)
                if self.steps and step != self.steps[-1] + 1:
                    broken = step - 1
                samples = [sample for group in named for sample in group["samples"]]
                if not all(is_whole(sample, trajectories) for sample in samples):
                    broken = step
                self._again.update(group["group_id"] for group in record["replays"])
                self.steps.append(step)
                continue
            groups, replays = (
                [known[one["group_id"]] for one in record[part] if one["group_id"] in known]
                for part in ("groups", "replays")
            )
            whole = [group for group in groups if group.completed]
            _set_state(groups, State.READY)  # for those that a repair has taken a trajectory of
            _set_state(whole, State.TRAINING)
            stats = StalenessStats(**record["staleness"])
            batch = StoredBatch(step, whole, stats, now, replays)
            if missing := len(named) - len(batch.all_groups):
                mended.append(f"the batch of step {step} goes on without {missing} groups")
                self.form(batch) if batch.all_groups else self.forget(step)
            if batch.all_groups:
                batches.append(batch)
        if broken:
            mended.append(f"the batches up to step {broken} cannot be handed out again")
            self.drop_through(broken)
        return batches, mended

    def count_new(self, step: int) -> int:
        """Samples that were trained on for the first time in the committed batch of `step`."""
        if step not in self.steps:
            return 0
        record = self._journal.read(f"b/{step}")
        return sum(len(group["samples"]) for group in record["groups"])

    def needs(self, group: Group) -> bool:
        """Whether a kept batch has `group`."""
        return bool(self.steps and group.steps) and group.steps[-1] >= self.steps[0]

    def drop_through(self, step: int) -> None:
        """Forget the committed batches up to `step`, and the trajectories that only they need."""
        while self.steps and self.steps[0] <= step:
            oldest = self.steps.pop(0)
            record = self._journal.read(f"b/{oldest}")
            self._again.subtract(group["group_id"] for group in record["replays"])
            for group in (*record["groups"], *record["replays"]):
                name = group["group_id"]
                if self._again[name] <= 0:
                    del self._again[name]
                    if name not in self._replays.groups:
                        for sample in group["samples"]:
                            self._journal.drop_trajectory(sample["sample_id"])
            self._journal.store.delete(f"b/{oldest}")

    def forget(self, step: int) -> None:
        """The open batch of `step` will not be trained on."""
        self._journal.store.delete(f"b/{step}")

    def _write(
        self,
        batch: StoredBatch,
        groups: list[Any],
        replays: list[Any],
        *,
        is_open: bool,
    ) -> None:
        record = {
            "groups": groups,
            "replays": replays,
            "staleness": batch.staleness,
            "is_open": is_open,
        }
        self._journal.write(f"b/{batch.step}", record)


def _set_state(groups: list[Group], state: State) -> None:
    """Of their samples that are complete; a formed batch does not write them anew."""
    for sample in (sample for group in groups for sample in group.samples):
        if sample.state in (State.READY, State.TRAINING):
            sample.state = state
