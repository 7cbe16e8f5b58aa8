"""Groups and batches in the store: written when they change, read back after a restart.

State is written, not events: every group that changed, with its samples, as it is now. So no rule
of the state machine can be forgotten here.

    run             what must not change: run id, sizes; where the sockets were bound
    now             counts, versions, the ledger, the position in the prompts
    m/<member>      who has joined
    g/<group>       fields of a live group and of its samples
    r/<group>       its prompt row, and the names of its samples
    t/<sample>      trajectory of a sample, as it came (`samples.trajectories`)
    x/<sample>/<stage>  its score in that stage, as it came
    b/<step>        a batch: formed, or committed and kept for a trainer that starts again
    c/<name>        how often a prompt failed (buffer.prompt_attempts)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from operator import attrgetter
from typing import Any

import msgspec

from umbra.services.buffer.samples.groups import Group, Sample, State
from umbra.services.buffer.samples.pool import SamplePool
from umbra.services.buffer.samples.staleness import StalenessStats
from umbra.services.buffer.store.api import Store, StoreError
from umbra.services.prompts.rows import Prompt

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode
_REQUIRED = object()


def _kept(cls: type[Any], *left_out: str) -> list[tuple[str, Any]]:
    """Return names and defaults of the stored fields."""

    def default(field: Field[Any]) -> Any:
        if field.default_factory is not MISSING:
            return field.default_factory()
        return _REQUIRED if field.default is MISSING else field.default

    return [(f.name, default(f)) for f in fields(cls) if f.name not in left_out]


def _record(name: str, kept: list[tuple[str, Any]], *more: str) -> type[msgspec.Struct]:
    """Return a struct of `kept` and then `more` fields; defaults are left out."""
    required = [(name, Any) for name, default in kept if default is _REQUIRED]
    others = [(name, Any, default) for name, default in kept if default is not _REQUIRED]
    more_fields = [(name, Any, None) for name in more]
    return msgspec.defstruct(name, required + others + more_fields, omit_defaults=True, gc=False)


_SAMPLE = _kept(Sample, "group", "leased_at", "deadline", "begun_at", "unscored_since")
_SampleRecord = _record("_SampleRecord", _SAMPLE)
_sample_values = attrgetter(*(name for name, _ in _SAMPLE))
_GROUP = _kept(Group, "prompt", "samples", "ready", "first_ready_at")
_GroupRecord = _record("_GroupRecord", _GROUP, "prompt", "samples")
_group_values = attrgetter(*(name for name, _ in _GROUP))

# Fields that are reset with a lost trajectory.
_MADE = ("oldest", "state", "stage", "segments", "reward", "reward_parts", "holder")


def group_record(group: Group) -> msgspec.Struct:
    samples = [_SampleRecord(*_sample_values(sample)) for sample in group.samples]
    return _GroupRecord(*_group_values(group), group.prompt.prompt_id, samples)


def make_group(record: dict[str, Any], row: dict[str, Any] | None = None) -> Group:
    """Build a group from its record; without a `row`, that of its prompt is gone."""
    values = {k: v for k, v in record.items() if k not in ("prompt", "samples")}
    group = Group(prompt=Prompt(record["prompt"], row or {}), **values)
    for sample in record["samples"]:
        kept: dict[str, Any] = {**sample, "state": State(sample.get("state", State.QUEUED))}
        group.samples.append(Sample(group=group, **kept))
        group.ready += kept["state"] in (State.READY, State.TRAINING)
    return group


def is_whole(sample: Mapping[str, Any], trajectories: Mapping[str, int]) -> bool:
    """True if the store has the trajectory and the scores that the record of a sample names."""
    if sample.get("oldest") is None:
        return True
    return trajectories.get(sample["sample_id"], -1) >= sample.get("stage", 0)


class Journal:
    """The groups of one `pool` in `store`, and plain values."""

    def __init__(self, store: Store, pool: SamplePool) -> None:
        self.store = store
        self._pool = pool
        self._issued: set[str] = set()  # groups whose prompt row is in the store

    def write(self, key: str, value: Any) -> None:
        self.store.put(key, _encode(value))

    def read(self, key: str) -> Any:
        """Return the plain value of `key`; None if there is none."""
        try:
            return _decode(self.store.get(key))
        except KeyError:
            return None

    def save(self) -> bool:
        """Store the groups that have changed; False if there were none."""
        changed, self._pool.changed = self._pool.changed, {}
        for key, group in changed.items():
            if self._pool.is_alive(group):
                if not group.completed and key not in self._issued:
                    self._issued.add(key)
                    names = [sample.sample_id for sample in group.samples]
                    self.write(f"r/{key}", {"row": group.prompt.row, "samples": names})
                self.write(f"g/{key}", group_record(group))
            else:
                self.forget(key)
        return bool(changed)

    def load(self, *, mend: bool) -> tuple[list[Group], list[str]]:
        """Return all live groups in order of issue, and what had to be mended.

        Args:
            mend: after a repair: give up groups of which a record is lost, and generate lost
                trajectories again.

        Raises:
            StoreError: something is missing from a store that was not repaired.
        """
        trajectories = self.trajectories()
        self._issued = set(self._ids("r/"))
        groups: list[Group] = []
        mended: list[str] = []
        for group_id in self._issued.union(self._ids("g/")):
            record, issue = self.read(f"g/{group_id}"), self.read(f"r/{group_id}")
            if record is None:
                mended.append(self._give_up(group_id, issue["samples"], "its state is gone"))
                continue
            if issue is None and not record.get("completed"):  # else nobody needs the row again
                names = [sample["sample_id"] for sample in record["samples"]]
                mended.append(self._give_up(group_id, names, "its prompt is gone"))
                continue
            again = [s for s in record["samples"] if not is_whole(s, trajectories)]
            for sample in again:
                mended.append(f"sample {sample['sample_id']} starts again: its trajectory is gone")
                for field in _MADE:
                    sample.pop(field, None)
                record["completed"] = 0
            group = make_group(record, issue and issue["row"])
            if again:
                self._pool.changed[group_id] = group
            groups.append(group)
        if mended and not mend:
            raise StoreError(f"the store does not fit together: {mended[0]}")
        groups.sort(key=lambda group: group.samples[0].serial)
        return groups, mended

    def forget(self, group_id: str) -> None:
        """Drop the record of a group that is not live."""
        self._issued.discard(group_id)
        self.store.delete(f"g/{group_id}")
        self.store.delete(f"r/{group_id}")

    def _give_up(self, group_id: str, samples: Sequence[str], why: str) -> str:
        """End a group of which a repair has lost a part; return the sentence for people."""
        self.forget(group_id)
        for name in samples:
            self.drop_trajectory(name)
        return f"group {group_id} ends as lost, with {', '.join(samples)}: {why}"

    def trajectories(self) -> dict[str, int]:
        """Return how many stages are scored, by sample with a trajectory."""
        return self._pool.trajectory_store.scored(self._pool.prefix + "s-")

    def drop_trajectory(self, sample_id: str) -> None:
        self._pool.trajectory_store.drop(sample_id)

    def _ids(self, kind: str) -> Iterable[str]:
        prefix = f"{kind}{self._pool.prefix}g-"
        return (key.removeprefix(kind) for key in self.store.keys(prefix))


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """The batch of one step; the trainer gets this very one however often it asks."""

    step: int
    groups: list[Group]
    staleness: StalenessStats
    formed_at: float  # seconds of the broker's clock

    @property
    def sample_ids(self) -> list[str]:
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
