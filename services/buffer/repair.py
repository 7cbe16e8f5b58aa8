"""Repair of a damaged store: what is sound goes into new files, and all that is lost is named."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec

from umbra.proto.errors import UsageError
from umbra.services.buffer.persistence import REPAIRED
from umbra.services.buffer.samples.evaluation import EVAL_PREFIX
from umbra.services.buffer.samples.groups import GroupRules
from umbra.services.buffer.samples.journal import Archive, Journal
from umbra.services.buffer.samples.pool import SamplePool
from umbra.services.buffer.samples.trajectories import TrajectoryStore
from umbra.services.buffer.store.api import Store
from umbra.services.buffer.store.log import LogStore, store_lock
from umbra.services.buffer.store.records import value_of
from umbra.services.buffer.store.segments import Replay, segment_bytes, segment_numbers
from umbra.services.process.files import DISK


@dataclass(frozen=True, slots=True)
class Repair:
    """Result of a repair."""

    kept: int  # keys
    dropped: list[str]  # bytes of the files, with what was wrong with them
    lost: list[str]  # samples, groups and batches, with what becomes of them
    backup: Path | None  # the files of before

    def tell(self) -> list[str]:
        if not self.dropped:
            return [f"nothing to repair: {self.kept} keys are sound"]
        lines = [f"dropped {line}" for line in self.dropped]
        lines += self.lost or ["no sample, group or batch is lost by it"]
        lines.append(f"kept {self.kept} keys; the files of before are in {self.backup}")
        if self.lost:
            lines.append("what is lost counts as ended (lost) once the buffer starts")
        return lines


def repair(directory: Path) -> Repair:
    """Write all that is sound into new files; the old ones are moved aside, not removed.

    Raises:
        UsageError: there is no store.
        StoreError: it is in use, or of another schema.
    """
    if not directory.is_dir() or not segment_numbers(directory):
        raise UsageError(f"{directory} holds no store: name the folder with the .seg files")
    with store_lock(directory):
        image = Replay(directory, salvage=True).run()
        dropped = [str(damage) for damage in image.damages]
        if image.torn is not None:
            dropped.append(f"{image.torn} (a crash left it; it was never acknowledged)")
        if not dropped:
            return Repair(len(image.places), [], [], None)
        fresh = directory.with_name(directory.name + ".repaired")
        shutil.rmtree(fresh, ignore_errors=True)  # of a repair that was broken off
        backup = _unused(directory.with_name(directory.name + ".damaged"))
        store = LogStore(fresh, store=image.store)
        for number in segment_numbers(directory):
            data = segment_bytes(directory, number)
            for key, place in image.places.items():
                if place.segment == number:
                    value = value_of(data[place.offset : place.end], key)
                    assert not isinstance(value, str)  # else it would have no place
                    store.put(key, bytes(value))
            store.commit()
        if image.damages:
            store.put(REPAIRED, b"\xc3")
            store.commit()
        lost = missing_from(store)
        store.close()  # what was written to find that out goes with it
        DISK.rename(directory, backup)
        DISK.rename(fresh, directory)
        DISK.sync_directory(directory.parent)
    return Repair(len(image.places), dropped, lost, backup)


def missing_from(store: Store) -> list[str]:
    """Return what a buffer that starts on `store` will find missing. Changes `store`."""
    lost: list[str] = []
    stages: list[str] = []
    if not store_lacks(store, "run"):
        stages = msgspec.msgpack.decode(store.get("run"))["buffer.stages"]
    for prefix in ("", EVAL_PREFIX):
        pool = SamplePool(
            rules=GroupRules(size=1),
            lease_s=1.0,
            max_attempts=1,
            trajectory_store=TrajectoryStore(store, stages),
            counters=Counter(),
            prefix=prefix,
        )
        journal = Journal(store, pool)
        groups, mended = journal.load(mend=True)
        lost += mended
        if not prefix:
            live = {group.group_id: group for group in groups}
            lost += Archive(journal).load(live, journal.trajectories(), 0.0)[1]
    if store_lacks(store, "now"):
        lost.append("the counts of the run: it cannot go on, begin a new one")
    return lost


def store_lacks(store: Store, key: str) -> bool:
    try:
        store.get(key)
    except KeyError:
        return True
    return False


def _unused(path: Path) -> Path:
    number = 1
    while path.exists():
        number += 1
        path = path.with_name(f"{path.name.partition('-')[0]}-{number}")
    return path
