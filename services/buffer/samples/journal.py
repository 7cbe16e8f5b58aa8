"""Groups and batches in the store: written when they change, read back after a restart.

State is written, not events: every group that changed, with its samples, as it is now. So no rule
of the state machine can be forgotten here.

    run             what must not change: run id, sizes; where the sockets were bound
    now             counts, versions, the ledger, the position in the prompts
    m/<hash>        a member
    g/<group>       fields of a live group and of its samples
    r/<group>       its prompt row
    t/<sample>      trajectory of a sample, as it came (`samples.trajectories`)
    x/<sample>/<stage>  its score in that stage, as it came
    b/<step>        a batch: formed, or committed and kept for a trainer that starts again
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from operator import attrgetter
from typing import Any

import msgspec

from umbra.services.buffer.samples.groups import Group, Sample, State
from umbra.services.buffer.samples.pool import SamplePool
from umbra.services.buffer.samples.staleness import StalenessStats
from umbra.services.buffer.store import Store, StoreError
from umbra.services.prompts import Prompt

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


def _record(cls: type[Any], left_out: tuple[str, ...], *more: str) -> tuple[Any, Any]:
    """Return a struct of the stored fields of `cls`, then `more`, and a getter of the former."""
    stored = [field for field in fields(cls) if field.name not in left_out]
    specs: list[Any] = [
        (field.name, Any) if field.default is MISSING else (field.name, Any, field.default)
        for field in stored
    ]
    specs += [(name, Any, None) for name in more]
    record = msgspec.defstruct(f"{cls.__name__}Record", specs, omit_defaults=True, gc=False)
    return record, attrgetter(*(field.name for field in stored))


_SampleRecord, _sample_values = _record(Sample, ("group", "leased_at", "unscored_since"))
_GroupRecord, _group_values = _record(
    Group, ("prompt", "samples", "ready", "first_ready_at", "row", "moved", "_age"),
    "prompt", "samples",
)  # fmt: skip


def group_record(group: Group) -> msgspec.Struct:
    samples = [_SampleRecord(*_sample_values(sample)) for sample in group.samples]
    return _GroupRecord(*_group_values(group), group.prompt.prompt_id, samples)


def make_group(record: dict[str, Any], row: dict[str, Any] | None = None) -> Group:
    values = {k: v for k, v in record.items() if k not in ("prompt", "samples")}
    group = Group(prompt=Prompt(record["prompt"], row or {}), **values)
    for sample in record["samples"]:
        attributes: dict[str, Any] = {**sample, "state": State(sample.get("state", State.QUEUED))}
        group.samples.append(Sample(group=group, **attributes))
        group.ready += attributes["state"] in (State.READY, State.TRAINING)
    return group


def check_whole(record: Mapping[str, Any], trajectories: Mapping[str, int]) -> None:
    """Raise StoreError unless the store has all that a group's record names.

    Args:
        trajectories: how many stages are scored, by sample with a trajectory.
    """
    for sample in record["samples"]:
        name = sample["sample_id"]
        if sample.get("oldest") is not None and trajectories.get(name, -1) < sample.get("stage", 0):
            raise unfit(f"the trajectory of sample {name}, or a score of it, is gone")


def unfit(what: str) -> StoreError:
    return StoreError(f"the store is inconsistent: {what}; begin a new run")


class Journal:
    """The groups of one `pool` in `store`, and plain values."""

    def __init__(self, store: Store, pool: SamplePool) -> None:
        self.store = store
        self.pool = pool
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
        changed, self.pool.changed = self.pool.changed, {}
        for key, group in changed.items():
            if self.pool.is_alive(group):
                if not group.completed and key not in self._issued:
                    self._issued.add(key)
                    self.write(f"r/{key}", group.prompt.row)
                self.write(f"g/{key}", group_record(group))
            else:
                self.forget(key)
        return bool(changed)

    def load(self, trajectories: Mapping[str, int]) -> list[Group]:
        """Return all live groups in order of issue; StoreError if something is missing."""
        prefix = f"{self.pool.prefix}g-"
        rows = {key[2:]: self.read(key) for key in self.store.keys(f"r/{prefix}")}
        groups: list[Group] = []
        for key in self.store.keys(f"g/{prefix}"):
            record, name = self.read(key), key[2:]
            check_whole(record, trajectories)
            if name not in rows and not record.get("completed"):  # else nobody needs the row again
                raise unfit(f"the prompt of group {name} is gone")
            groups.append(make_group(record, rows.get(name)))
        if lost := rows.keys() - {group.group_id for group in groups}:
            raise unfit(f"the state of group {min(lost)} is gone")
        self._issued = set(rows)
        groups.sort(key=lambda group: group.samples[0].serial)
        return groups

    def forget(self, group_id: str) -> None:
        self._issued.discard(group_id)
        self.store.delete(f"g/{group_id}")
        self.store.delete(f"r/{group_id}")

    def trajectories(self) -> dict[str, int]:
        """Return how many stages are scored, by sample with a trajectory."""
        return self.pool.trajectory_store.scored(self.pool.prefix + "s-")


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
        self._trajectories = journal.pool.trajectory_store

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
        groups = [make_group(group) for group in record["groups"]]
        batch = StoredBatch(step, groups, StalenessStats(**record["staleness"]), now)
        self.form(batch)
        return batch

    def load(
        self, live: Mapping[str, Group], trajectories: Mapping[str, int], now: float
    ) -> list[StoredBatch]:
        """Return the formed batches of `live` groups; StoreError if something is missing."""
        batches: list[StoredBatch] = []
        for step in sorted(int(key[2:]) for key in self._journal.store.keys("b/")):
            record = self._journal.read(f"b/{step}")
            if not record["is_open"]:
                for group in record["groups"]:
                    check_whole(group, trajectories)
                self.steps.append(step)
                continue
            names: list[str] = [group["group_id"] for group in record["groups"]]
            if lost := set(names) - live.keys():
                raise unfit(f"group {min(lost)} of the batch of step {step} is gone")
            groups = [live[name] for name in names]
            for sample in (sample for group in groups for sample in group.samples):
                sample.state = State.TRAINING  # a formed batch does not write its groups again
            batches.append(StoredBatch(step, groups, StalenessStats(**record["staleness"]), now))
        return batches

    def drop_through(self, step: int) -> None:
        """Forget the committed batches up to `step`, and their trajectories."""
        while self.steps and self.steps[0] <= step:
            oldest = self.steps.pop(0)
            for group in self._journal.read(f"b/{oldest}")["groups"]:
                for sample in group["samples"]:
                    self._trajectories.drop(sample["sample_id"])
            self.forget(oldest)

    def forget(self, step: int) -> None:
        self._journal.store.delete(f"b/{step}")

    def _write(self, batch: StoredBatch, groups: list[Any], *, is_open: bool) -> None:
        record = {"groups": groups, "staleness": batch.staleness, "is_open": is_open}
        self._journal.write(f"b/{batch.step}", record)
