"""Groups that have been trained on and may be again (`buffer.sampling = "replay"`).

A sample is `trained` once, by its first commit; every further use counts as `replayed`, outside the
ledger's balance. A group is held here until it was in as many batches as it may be, or is too old
for the next one, and in any case while a batch that is formed has it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from umbra.services.buffer.policy.staleness import StalenessPolicy
from umbra.services.buffer.samples.groups import Group
from umbra.services.buffer.store.journal import Journal, group_record, is_whole, make_group

PREFIX = "p/"  # of their keys in the store


class Replays:
    """The groups, in the order of their first commit; each knows the steps that it was in.

    Args:
        journal: keeps them.
        policy: the staleness rules, which hold for every use.
        times: batches that a group may be in; 1 = no replay.
    """

    def __init__(self, journal: Journal, policy: StalenessPolicy, times: int) -> None:
        self.groups: dict[str, Group] = {}
        self._journal = journal
        self._policy = policy
        self._times = times

    @property
    def enabled(self) -> bool:
        """Whether any group is ever used twice."""
        return self._times > 1

    def candidates(self, version: int) -> list[Group]:
        """What a batch that is trained at `version` may take: least used first, then oldest."""
        fit = [group for group in self.groups.values() if self._may_serve(group, version)]
        return sorted(fit, key=lambda group: (len(group.steps), group.completed))

    def used(self, groups: Sequence[Group], step: int) -> None:
        """The batch of `step`, which had these `groups`, is committed."""
        for group in groups if self.enabled else ():
            group.steps.append(step)
            self._hold(group)

    def retire(self, version: int, formed: Collection[str]) -> list[Group]:
        """Let go of what no batch from `version` on may take; `formed` ones have these groups."""
        gone = [
            group
            for name, group in self.groups.items()
            if name not in formed and not self._may_serve(group, version)
        ]
        for group in gone:
            self.give_up(group)
        return gone

    def take_up(self, group: Group, step: int) -> None:
        """The trainer goes back to before `step`: `group` was in none of the batches since then."""
        group.steps = [earlier for earlier in group.steps if earlier < step]
        if group.steps:
            self._hold(group)
        else:
            self.give_up(group)

    def load(self, trajectories: Mapping[str, int]) -> list[str]:
        """Read them back; those of which a trajectory is gone are named, and given up."""
        mended: list[str] = []
        for key in self._journal.store.keys(PREFIX):
            record = self._journal.read(key)
            group = make_group(record)
            if all(is_whole(sample, trajectories) for sample in record["samples"]):
                self.groups[group.group_id] = group
            else:
                mended.append(f"group {group.group_id} is not replayed: a trajectory is gone")
                self._journal.store.delete(key)
        return mended

    def _may_serve(self, group: Group, version: int) -> bool:
        oldest = group.oldest
        assert oldest is not None
        return len(group.steps) < self._times and not self._policy.is_stale(oldest, version)

    def _hold(self, group: Group) -> None:
        self.groups[group.group_id] = group
        self._journal.write(PREFIX + group.group_id, group_record(group))

    def give_up(self, group: Group) -> None:
        """`group` is trained on no more."""
        if self.groups.pop(group.group_id, None) is not None:
            self._journal.store.delete(PREFIX + group.group_id)
