"""The power goes at every write, rename and truncation: nothing acknowledged is lost."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from fakes.lossy_disk import Killed, KillingDisk, LossyDisk, QuickDisk, power_cuts

from umbra.services.buffer.store.log import LogStore

SMALL = 2048  # bytes of a segment here


def contents(store: LogStore) -> dict[str, bytes]:
    """Everything in the store."""
    return {key: bytes(store.get(key)) for key in store.keys("")}


class Worked:
    """A store at work, and what it had acknowledged by which step of its disk."""

    def __init__(self, root: Path, seed: int, disk: LossyDisk | None = None) -> None:
        self.disk = LossyDisk(root) if disk is None else disk
        begun = len(self.disk.steps)
        self._chance = random.Random(seed)
        self._store = LogStore(root / "store", segment_bytes=SMALL, disk=self.disk)
        self._model = contents(self._store)
        self.promised = [(begun and len(self.disk.steps), dict(self._model))]

    def work(self, commits: int) -> None:
        """Commit so many times."""
        for _ in range(commits):
            for _ in range(self._chance.randrange(1, 4)):
                key = f"k{self._chance.randrange(8)}"
                if self._chance.random() < 0.3:
                    self._store.delete(key)
                    self._model.pop(key, None)
                else:
                    self._model[key] = self._chance.randbytes(self._chance.randrange(700))
                    self._store.put(key, self._model[key])
            self._store.commit()
            self.promised.append((len(self.disk.steps), dict(self._model)))

    @property
    def wanted(self) -> dict[str, bytes]:
        """What it will hold once it has committed."""
        return self._model

    def close(self) -> None:
        """The process ends."""
        self._store.close()

    def start_again(self) -> None:
        """It ends, and starts again."""
        self._store.close()
        self._store = LogStore(self.disk.root / "store", segment_bytes=SMALL, disk=self.disk)

    def may_hold(self, step: int) -> list[dict[str, bytes]]:
        """What was acknowledged by this step, and what was being committed then."""
        known = [number for number, (at, _) in enumerate(self.promised) if at <= step]
        return [held for _, held in self.promised[known[-1] : known[-1] + 2]]


def check(worked: Worked, step: int, place: Path) -> None:
    """The store in `place` opens, holds what it must, and can be worked with."""
    (place / "store").mkdir(exist_ok=True)
    store = LogStore(place / "store", segment_bytes=SMALL, disk=QuickDisk())
    found = contents(store)
    assert found in worked.may_hold(step), f"after step {step}"
    store.put("more", b"x")
    store.commit()
    store.close()
    store = LogStore(place / "store", segment_bytes=SMALL, disk=QuickDisk())
    assert contents(store) == {**found, "more": b"x"}
    store.close()
    shutil.rmtree(place)


@pytest.mark.parametrize("seed", range(3))
def test_a_power_cut_loses_nothing_acknowledged(tmp_path: Path, seed: int) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    worked = Worked(root, seed)
    worked.work(15)
    worked.start_again()
    worked.work(8)
    worked.close()
    assert any(step[0] == "remove" for step in worked.disk.steps), "nothing was cleaned up"
    for step, place in power_cuts(worked.disk, tmp_path, seeds=2):
        check(worked, step, place)


def test_a_power_cut_after_the_process_was_killed(tmp_path: Path) -> None:
    """1. The buffer is killed in a commit. 2. It starts again. 3. The power goes.

    What the killed one has written, but not synced, is there for the next one and not for the disk.
    """
    for number, killed_at in enumerate(range(20, 80, 3)):
        root = tmp_path / f"{number}"
        root.mkdir()
        disk = KillingDisk(root, killed_at)
        killed = Worked(root, 3, disk)
        with pytest.raises(Killed):
            killed.work(100)
        killed.close()
        again = Worked(root, number, disk)
        assert again.promised[0][1] in (killed.promised[-1][1], killed.wanted)
        again.work(1)
        again.close()
        for step, place in power_cuts(disk, tmp_path / "after", seeds=0, first=killed_at):
            if step < again.promised[0][0]:
                shutil.rmtree(place)
            else:
                check(again, step, place)


def test_a_power_cut_while_the_store_recovers_from_one(tmp_path: Path) -> None:
    """1. A cut in the middle of a commit. 2. At each step of the start after it, another one."""
    root = tmp_path / "disk"
    root.mkdir()
    first = Worked(root, seed=9)
    first.work(12)
    first.close()
    torn = 0
    for step, place in power_cuts(first.disk, tmp_path / "first", seeds=1):
        if step % 12:
            continue
        again = Worked(place, seed=step)
        torn += bool(again.disk.steps)
        again.work(2)
        again.close()
        assert again.promised[0][1] in first.may_hold(step)
        for later, other in power_cuts(again.disk, tmp_path / "second", seeds=1):
            if again.promised[0][1]:
                check(again, later, other)
            else:
                shutil.rmtree(other)
        shutil.rmtree(place)
    assert torn
