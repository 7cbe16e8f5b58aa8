"""Groups and trajectories in the store: written when they change, read back after a restart.

State is written, not events: every group that changed, with its samples, as it is now. So no rule
of the state machine can be forgotten here.

    run             what must not change: run id, sizes
    now             counts, versions, the ledger, the position in the prompts
    m/<hash>        a member
    g/<group>       fields of a live group and of its samples
    r/<group>       its prompt row
    t/<sample>      newest trajectory of a sample, complete or partial, as it came
    x/<sample>/<stage>  its score in that stage, as it came
    b/<step>        a batch: formed, or committed and kept for a trainer that starts again
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

import msgspec
import xxhash

from umbra.proto.records import Trajectory
from umbra.services.buffer.samples.groups import Group, Sample, State
from umbra.services.buffer.samples.trajectories import Packed, pack
from umbra.services.buffer.store import Store, StoreError
from umbra.services.prompts import Prompt

_decode = msgspec.msgpack.Decoder().decode
_decode_trajectory = msgspec.msgpack.Decoder(Trajectory).decode


def _stored(cls: type[Any], *left_out: str) -> list[str]:
    return [one.name for one in fields(cls) if one.name not in left_out]


_SAMPLE = _stored(Sample, "group", "leased_at", "unscored_since")
_GROUP = _stored(Group, "prompt", "samples", "ready", "first_ready_at", "row", "moved", "_age")
_ID = _SAMPLE.index("sample_id")
_sample_values, _group_values = attrgetter(*_SAMPLE), attrgetter(*_GROUP)


def group_record(group: Group) -> tuple[Any, ...]:
    samples = [_sample_values(sample) for sample in group.samples]
    return _group_values(group), group.prompt.prompt_id, samples


def make_group(record: Sequence[Any], row: dict[str, Any] | None = None) -> Group:
    values, prompt_id, samples = record
    group = Group(prompt=Prompt(prompt_id, row or {}), **dict(zip(_GROUP, values, strict=True)))
    for values in samples:
        sample = Sample(group=group, **dict(zip(_SAMPLE, values, strict=True)))
        sample.state = State(sample.state)
        group.samples.append(sample)
        group.ready += sample.state in (State.READY, State.TRAINING)
    return group


def sample_ids(record: Sequence[Any]) -> Iterator[str]:
    """Yield the names of a group's samples: a tenth of the time that making the group takes."""
    _, _, samples = record
    return (values[_ID] for values in samples)


def check_whole(group: Group, trajectories: Mapping[str, int]) -> None:
    """Raise StoreError unless the store has all that a group names; `trajectories`: `scored`."""
    for sample in group.samples:
        name = sample.sample_id
        if sample.oldest is not None and trajectories.get(name, -1) < sample.stage:
            raise unfit(f"the trajectory of sample {name}, or a score of it, is gone")


def unfit(what: str) -> StoreError:
    return StoreError(f"the store is inconsistent: {what}; begin a new run")


def score_key(sample_id: str, stage: str) -> str:
    return f"x/{sample_id}/{stage}"


@dataclass(eq=False)
class Journal:
    """Plain values in `store`, and the groups of one pool with their trajectories and scores."""

    store: Store
    stages: tuple[str, ...]  # that a trajectory passes before it is ready
    prefix: str = ""  # of the ids of its groups and samples
    changed: dict[str, Group] = field(default_factory=dict[str, Group])  # since the last `save`
    _issued: set[str] = field(default_factory=set[str])  # groups whose prompt row is in the store

    def write(self, key: str, value: Any) -> None:
        self.store.put(key, pack(value))

    def read(self, key: str) -> Any:
        """Return the plain value of `key`; None if there is none."""
        try:
            return _decode(self.store.get(key))
        except KeyError:
            return None

    def put(self, sample_id: str, packed: Packed, stage: str = "") -> None:
        """Store a trajectory, or its score in `stage`."""
        self.store.put(score_key(sample_id, stage) if stage else f"t/{sample_id}", packed)

    def packed(self, sample_id: str) -> bytes | memoryview:
        return self.store.get(f"t/{sample_id}")

    def trajectory(self, sample_id: str) -> Trajectory:
        return _decode_trajectory(self.packed(sample_id))

    def batch(self, samples: Sequence[Sample]) -> tuple[list[Any], dict[str, list[Any]], str]:
        """Return trajectories, scores by stage, and a digest over all of their bytes."""
        checksum = xxhash.xxh3_64()

        def raw(keys: list[str]) -> list[Any]:
            values = self.store.get_all(keys)
            for value in values:
                checksum.update(value)
            return list(map(msgspec.Raw, values))

        names = [sample.sample_id for sample in samples]
        trajectories = raw([f"t/{name}" for name in names])
        scores = {stage: raw([score_key(name, stage) for name in names]) for stage in self.stages}
        return trajectories, scores, checksum.hexdigest()

    def drop(self, sample_id: str) -> None:
        self.store.delete(f"t/{sample_id}")
        for stage in self.stages:
            self.store.delete(score_key(sample_id, stage))

    def scored(self) -> dict[str, int]:
        """Return how many stages are scored, from the first on, by sample with a trajectory."""
        scores = set(self.store.keys(f"x/{self.prefix}s-"))
        counts: dict[str, int] = {}
        for key in self.store.keys(f"t/{self.prefix}s-"):
            name, stages = key[2:], 0
            while stages < len(self.stages) and score_key(name, self.stages[stages]) in scores:
                stages += 1
            counts[name] = stages
        return counts

    def touch(self, group: Group) -> None:
        """Note that `group` or a sample of it has changed."""
        self.changed[group.group_id] = group
        group.moved = True

    def save(self) -> bool:
        """Store the groups that have changed; False if there were none."""
        changed, self.changed = self.changed, {}
        for name, group in changed.items():
            if not group.is_alive:
                self._issued.discard(name)
                self.store.delete(f"g/{name}")
                self.store.delete(f"r/{name}")
                continue
            if not group.completed and name not in self._issued:
                self._issued.add(name)
                self.write(f"r/{name}", group.prompt.row)
            self.write(f"g/{name}", group_record(group))
        return bool(changed)

    def load(self, trajectories: Mapping[str, int]) -> list[Group]:
        """Return all live groups in order of issue; StoreError if something is missing."""
        prefix = f"{self.prefix}g-"
        rows = {key[2:]: self.read(key) for key in self.store.keys(f"r/{prefix}")}
        groups: list[Group] = []
        for key in self.store.keys(f"g/{prefix}"):
            name = key[2:]
            group = make_group(self.read(key), rows.get(name))
            check_whole(group, trajectories)
            if name not in rows and not group.completed:  # else nobody needs the row again
                raise unfit(f"the prompt of group {name} is gone")
            groups.append(group)
        if lost := rows.keys() - {group.group_id for group in groups}:
            raise unfit(f"the state of group {min(lost)} is gone")
        self._issued = set(rows)
        return sorted(groups, key=lambda group: group.samples[0].serial)
