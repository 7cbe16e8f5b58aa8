"""Writes what changed into the store, and builds the broker's state from it after a restart.

It is state that is written, not events: for every sample and group that an event has touched its
fields as they are now. So nothing that a rule of the state machine does can be forgotten here.

    run             what must not change: run id, sizes; where the sockets were bound
    now             counts, versions, the ledger, the position in the prompts
    m/<member>      who has joined
    g/<group>       fields of a live group          r/<group>  its prompt row
    s/<sample>      fields of a live sample         t/<sample> its trajectory (see `shelf`)
    b/<step>        a batch: formed, or committed and kept for a trainer that starts again
    p/<group>       a group that was trained on and may be again
    c/<name>        what came of a prompt; the order of an epoch that a curriculum made
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from operator import attrgetter
from typing import Any

import msgspec

from umbra.services.buffer.prompts import Prompt
from umbra.services.buffer.samples import Group, Pool, Sample, State
from umbra.services.buffer.shelf import PREFIX as TRAJECTORY
from umbra.services.buffer.store import Store, StoreError

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode
_REQUIRED = object()


def _kept(cls: type[Any], *left_out: str) -> list[tuple[str, Any]]:
    """Names and defaults of the fields that are kept."""

    def default(field: Field[Any]) -> Any:
        if field.default_factory is not MISSING:
            return field.default_factory()
        return _REQUIRED if field.default is MISSING else field.default

    return [(f.name, default(f)) for f in fields(cls) if f.name not in left_out]


_SAMPLE = _kept(Sample, "group", "leased_at", "deadline", "begun_at", "unscored_since")
_sample_values = attrgetter(*(name for name, _ in _SAMPLE), "group.group_id")
_SampleRecord = msgspec.defstruct(
    "_SampleRecord",
    [(name, Any) if default is _REQUIRED else (name, Any, default) for name, default in _SAMPLE]
    + [("group", Any, "")],
    omit_defaults=True,
)
_GROUP = _kept(Group, "prompt", "samples", "ready", "first_ready_at")

_MADE = ("oldest", "state", "stage", "segments", "reward")  # fields that go with a trajectory


def sample_record(sample: Sample) -> msgspec.Struct:
    """The plain fields of `sample` that differ from their defaults, and its group."""
    return _SampleRecord(*_sample_values(sample))


def group_record(group: Group) -> dict[str, Any]:
    """The same of `group`; it names its samples, so that a lost one is missed."""
    record = {name: value for name, default in _GROUP if (value := getattr(group, name)) != default}
    record["prompt"] = group.prompt.prompt_id
    record["samples"] = [sample.sample_id for sample in group.samples]
    return record


def make_group(record: dict[str, Any], row: dict[str, Any]) -> Group:
    """The group that `group_record` has described, without samples yet."""
    values = {k: v for k, v in record.items() if k not in ("prompt", "samples")}
    return Group(prompt=Prompt(record["prompt"], row), **values)


def add_sample(group: Group, record: dict[str, Any]) -> None:
    """Add the sample that `sample_record` has described to its group."""
    values = {k: v for k, v in record.items() if k != "group"}
    values["state"] = State(values.get("state", State.QUEUED))
    sample = Sample(group=group, **values)
    group.samples.append(sample)
    group.ready += sample.state in (State.READY, State.TRAINING)


def whole_record(group: Group) -> dict[str, Any]:
    """The plain fields of `group` and of all its samples, for when it is not live any more."""
    return group_record(group) | {"samples": [sample_record(s) for s in group.samples]}


def make_whole(record: dict[str, Any]) -> Group:
    """The group that `whole_record` has described; its prompt's row is gone."""
    group = make_group(record, {})
    for sample in record["samples"]:
        add_sample(group, sample)
    return group


class Journal:
    """The state of one `pool` in `store`, but for the batches, which are `archive`'s."""

    def __init__(self, store: Store, pool: Pool) -> None:
        self.store = store
        self._pool = pool

    def write(self, key: str, value: Any) -> None:
        """Set `key` to the plain `value`."""
        self.store.put(key, _encode(value))

    def read(self, key: str) -> Any:
        """The plain value of `key`; None if there is none."""
        try:
            return _decode(self.store.get(key))
        except KeyError:
            return None

    def save(self) -> bool:
        """Write down the samples and groups that have changed; whether there were any."""
        changed, self._pool.changed = self._pool.changed, {}
        for key, thing in changed.items():
            if isinstance(thing, Sample):
                if thing.state is State.OVER:
                    self.store.delete(f"s/{key}")
                else:
                    self.write(f"s/{key}", sample_record(thing))
            elif self._pool.is_alive(thing):
                if not thing.completed:  # so it is new
                    self.write(f"r/{key}", thing.prompt.row)
                self.write(f"g/{key}", group_record(thing))
            else:
                self.store.delete(f"g/{key}")
                self.store.delete(f"r/{key}")
        return bool(changed)

    def load(self, *, mend: bool) -> tuple[list[Group], list[str]]:
        """All live groups in the order of their issue, and what had to be mended.

        Args:
            mend: the store was repaired: samples whose records are lost are given up with their
                group, and trajectories that are lost are made again.

        Raises:
            StoreError: something is missing from a store that was not repaired.
        """
        samples = {key: self.read(f"s/{key}") for key in self._ids("s/", "s-")}
        trajectories = self.trajectories()
        groups: list[Group] = []
        mended: list[str] = []
        for group_id in self._ids("g/", "g-"):
            record = self.read(f"g/{group_id}")
            row: dict[str, Any] | None = self.read(f"r/{group_id}")
            if row is None and record.get("completed"):
                row = {}  # nobody needs it again
            if row is None or any(name not in samples for name in record["samples"]):
                mended.append(f"group {group_id} ends as lost: a record of it is gone")
                for name in record["samples"]:
                    self._forget(name)
                self.store.delete(f"g/{group_id}")
                self.store.delete(f"r/{group_id}")
                continue
            group = make_group(record, row)
            for name in record["samples"]:
                sample = samples.pop(name)
                if sample.get("oldest") is not None and name not in trajectories:
                    mended.append(f"sample {name} starts again: its trajectory is gone")
                    sample = {k: v for k, v in sample.items() if k not in _MADE}
                    group.completed = 0
                    add_sample(group, sample)
                    self._pool.changed |= {group_id: group, name: group.samples[-1]}
                else:
                    add_sample(group, sample)
            groups.append(group)
        for name in samples:
            mended.append(f"sample {name} ends as lost: its group is gone")
            self._forget(name)
        if mended and not mend:
            raise StoreError(f"the store does not fit together: {mended[0]}")
        groups.sort(key=lambda group: group.samples[0].serial)
        return groups, mended

    def forget(self, group: Group) -> None:
        """`group` is not live; its trajectories are left."""
        for sample in group.samples:
            self.store.delete(f"s/{sample.sample_id}")
        self.store.delete(f"g/{group.group_id}")
        self.store.delete(f"r/{group.group_id}")

    def _forget(self, sample_id: str) -> None:
        self.store.delete(f"s/{sample_id}")
        self.store.delete(TRAJECTORY + sample_id)

    def trajectories(self) -> set[str]:
        """The samples of the pool that the store has a trajectory of."""
        return set(self._ids(TRAJECTORY, "s-"))

    def _ids(self, kind: str, name: str) -> Iterable[str]:
        """Of the things of one kind, those of the journal's own pool."""
        prefix = kind + self._pool.prefix + name
        return (key.removeprefix(kind) for key in self.store.keys(prefix))
