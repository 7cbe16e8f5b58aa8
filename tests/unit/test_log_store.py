"""The durable store: what was committed is there again, and damage is told from a torn tail."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from umbra.services.buffer.store import records as frames
from umbra.services.buffer.store.api import StoreError, StoreFullError
from umbra.services.buffer.store.log import LogStore
from umbra.services.buffer.store.records import HEAD_BYTES, SEGMENT_HEADER_BYTES
from umbra.services.buffer.store.segments import HEAD, segment_numbers, segment_path
from umbra.services.process import files
from umbra.services.process.files import Disk

SMALL = 4096  # bytes of a segment here


def contents(store: LogStore) -> dict[str, bytes]:
    """Everything in the store."""
    return {key: bytes(store.get(key)) for key in store.keys("")}


def reopen(store: LogStore) -> LogStore:
    """The same folder, as after the end of the process."""
    store.close()
    return LogStore(store.directory, segment_bytes=SMALL)


def filled(folder: Path, groups: int = 3) -> LogStore:
    """A store with some commits of two keys each."""
    store = LogStore(folder, segment_bytes=SMALL)
    for number in range(groups):
        store.put(f"a{number}", b"x" * 100)
        store.put(f"b{number}", b"y" * 50)
        store.commit()
    return store


def test_a_new_store_is_empty_and_stays_where_it_is(tmp_path: Path) -> None:
    store = reopen(LogStore(tmp_path / "new" / "store"))
    assert contents(store) == {}
    store.close()


def test_reads_see_what_is_not_committed_yet(tmp_path: Path) -> None:
    store = LogStore(tmp_path)
    store.put("k", b"1")
    assert (store.get("k"), store.keys("k")) == (b"1", ["k"])
    store.commit()
    store.delete("k")
    assert store.keys("") == []
    with pytest.raises(KeyError):
        store.get("k")
    store.close()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_it_is_a_dictionary_that_survives_and_stays_small(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """Random writes, commits, restarts and losses of what was not committed; cleaning goes on."""
    chance = random.Random(seed)
    store = LogStore(tmp_path_factory.mktemp("store"), segment_bytes=SMALL)
    model: dict[str, bytes] = {}
    committed: dict[str, bytes] = {}
    for _ in range(150):
        key = f"key-{chance.randrange(30)}"
        match chance.randrange(8):
            case 0:
                store.delete(key)
                model.pop(key, None)
            case 1 | 2 | 3:
                store.commit()
                committed = dict(model)
            case 4 if chance.random() < 0.3:
                store = reopen(store)
                model = dict(committed)
            case _:
                value = chance.randbytes(chance.randrange(600))
                store.put(key, value)
                model[key] = value
        assert contents(store) == model
    store.commit()
    assert store.disk_bytes <= store.size_bytes + 2 * SMALL
    files = sum(path.stat().st_size for path in store.directory.glob("*.seg"))
    assert files == store.disk_bytes
    store.close()


def test_what_is_outdated_goes_from_the_disk(tmp_path: Path) -> None:
    store = LogStore(tmp_path, segment_bytes=SMALL)
    store.put("old", b"stays")
    for number in range(500):
        store.put(f"k{number}", b"v" * 400)
        store.delete(f"k{number - 3}")
        store.commit()
    assert len(segment_numbers(tmp_path)) < 12
    store = reopen(store)
    assert contents(store) == {"old": b"stays", **{f"k{n}": b"v" * 400 for n in (497, 498, 499)}}
    store.close()


def test_any_torn_tail_is_cut_off(tmp_path: Path) -> None:
    store = filled(tmp_path / "s", groups=2)
    before, head = store.disk_bytes, (store.directory / HEAD).read_bytes()
    store.put("a", b"p" * 30)
    store.put("c", b"q" * 30)
    store.commit()
    after = store.disk_bytes
    store.close()
    whole = segment_path(store.directory, 0).read_bytes()
    for size in range(before, after):
        (store.directory / HEAD).write_bytes(head)  # it is written once the group is on the disk
        segment_path(store.directory, 0).write_bytes(whole[:size])
        store = LogStore(store.directory)
        assert sorted(store.keys("")) == ["a0", "a1", "b0", "b1"]
        store.put("after", b"")
        store.commit()
        store.close()
    segment_path(store.directory, 0).write_bytes(whole)
    (store.directory / HEAD).write_bytes(head)
    store = LogStore(store.directory)
    assert store.get("c") == b"q" * 30
    store.close()


def test_nothing_of_a_torn_tail_stays_behind_in_a_segment_that_is_full(tmp_path: Path) -> None:
    store = filled(tmp_path)
    store.close()
    with segment_path(tmp_path, 0).open("ab") as file:
        file.write(b"torn" * SMALL)
    store = LogStore(tmp_path, segment_bytes=SMALL)
    for number in range(2):  # the first fills the segment, but not as far as the tail went
        store.put(f"large{number}", b"z" * SMALL)
        store.commit()
    assert segment_numbers(tmp_path) == [0, 1]
    held = contents(store)
    store = reopen(store)
    assert contents(store) == held
    store.close()


def test_a_flipped_bit_anywhere_before_the_last_group_is_refused(tmp_path: Path) -> None:
    store = filled(tmp_path)
    store.put("last", b"z")
    end = store.disk_bytes
    store.commit()
    store.close()
    path = segment_path(tmp_path, 0)
    whole = path.read_bytes()
    for offset in range(0, end, 11):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 16]) + whole[offset + 1 :])
        with pytest.raises(StoreError, match=r"damaged: 0.*umbra buffer --repair|schema"):
            LogStore(tmp_path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    store = filled(tmp_path, groups=60)
    numbers = segment_numbers(tmp_path)
    assert len(numbers) > 2
    store.close()
    segment_path(tmp_path, numbers[1]).unlink()
    with pytest.raises(StoreError, match="missing"):
        LogStore(tmp_path)


def test_another_schema_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "SCHEMA", 99)
    filled(tmp_path).close()
    monkeypatch.undo()
    with pytest.raises(StoreError, match="schema 99"):
        LogStore(tmp_path)


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "00000000.seg").write_bytes(b"something else entirely, and long enough")
    with pytest.raises(StoreError, match="not a segment"):
        LogStore(tmp_path)


def test_a_store_has_one_owner(tmp_path: Path) -> None:
    store = LogStore(tmp_path)
    with pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
        LogStore(tmp_path)
    store.close()


def test_a_file_that_was_just_begun_is_begun_again(tmp_path: Path) -> None:
    store = filled(tmp_path)
    store.close()
    segment_path(tmp_path, 1).touch()
    store = LogStore(tmp_path)
    assert len(store.keys("")) == 6
    store.put("k", b"v")
    store.commit()
    store = reopen(store)
    assert store.get("k") == b"v"
    store.close()


class SmallDisk(Disk):
    """A disk with a limited number of bytes for segments; the head is there already."""

    def __init__(self, free: int) -> None:
        self.free = free

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        """Write what fits; nothing more fits is an error, as with the real one."""
        if "/head" in os.readlink(f"/proc/self/fd/{fd}"):
            return super().write(fd, data, offset)
        if data and not self.free:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = super().write(fd, data[: self.free], offset)
        self.free -= count
        return count


@pytest.mark.parametrize("free", [SEGMENT_HEADER_BYTES, SEGMENT_HEADER_BYTES + HEAD_BYTES + 40])
def test_a_full_disk_loses_nothing_and_recovers(tmp_path: Path, free: int) -> None:
    disk = SmallDisk(free)
    store = LogStore(tmp_path, segment_bytes=SMALL, disk=disk)
    store.put("k", b"v" * 200)
    for _ in range(3):
        with pytest.raises(StoreFullError, match="No space left"):
            store.commit()
        disk.free = free - SEGMENT_HEADER_BYTES
        assert store.get("k") == b"v" * 200
    store.put("m", b"w")
    disk.free = 1 << 20
    store.commit()
    store = reopen(store)
    assert contents(store) == {"k": b"v" * 200, "m": b"w"}
    store.close()


def test_a_full_disk_at_a_new_segment(tmp_path: Path) -> None:
    disk = SmallDisk(1 << 20)
    store = LogStore(tmp_path, segment_bytes=SMALL, disk=disk)
    store.put("big", b"v" * SMALL)
    store.commit()
    disk.free = 3
    store.put("k", b"v")
    with pytest.raises(StoreFullError):
        store.commit()
    disk.free = 1 << 20
    store.commit()
    store = reopen(store)
    assert store.get("k") == b"v"
    store.close()


def test_a_value_that_changed_on_the_disk_is_not_handed_out(tmp_path: Path) -> None:
    store = LogStore(tmp_path)
    store.put("large", b"x" * 5000)  # small values are kept in memory as well
    store.commit()
    path = segment_path(tmp_path, 0)
    data = bytearray(path.read_bytes())
    data[data.index(b"x" * 100) + 5] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    with pytest.raises(StoreError, match="wrong checksum"):
        store.get("large")
    store.close()


def test_the_store_goes_on_while_a_commit_is_written(tmp_path: Path) -> None:
    store = filled(tmp_path)
    store.put("a0", b"new")
    store.put("c", b"c")
    store.delete("b0")
    write = store.freeze()
    assert write is not None
    assert (store.get("a0"), store.get("c")) == (b"new", b"c")
    with pytest.raises(KeyError):
        store.get("b0")
    store.delete("c")
    store.put("b0", b"again")
    write()
    assert sorted(store.keys("")) == ["a0", "a1", "a2", "b0", "b1", "b2"]
    store.settle()
    assert sorted(store.keys("")) == ["a0", "a1", "a2", "b0", "b1", "b2"]
    store.close()  # before the second commit: what the first had is there, and only that
    store = LogStore(tmp_path, segment_bytes=SMALL)
    assert sorted(store.keys("")) == ["a0", "a1", "a2", "b1", "b2", "c"]
    store.close()


def test_a_commit_that_failed_yields_to_what_came_after_it(tmp_path: Path) -> None:
    store = filled(tmp_path)
    store.put("a0", b"first")
    store.put("d", b"d")
    assert store.freeze() is not None
    store.put("a0", b"second")
    with pytest.raises(StoreFullError):
        store.settle(OSError(errno.ENOSPC, "full"))
    assert (store.get("a0"), store.get("d")) == (b"second", b"d")
    store.commit()
    store = reopen(store)
    assert (store.get("a0"), store.get("d")) == (b"second", b"d")
    store.close()


def test_it_is_for_its_user_alone(tmp_path: Path) -> None:
    store = LogStore(tmp_path / "store")
    store.put("a", b"1")
    store.commit()
    store.close()
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "store").iterdir()} == {0o600}


class Long(bytes):
    """Says that it is as long as it is told."""

    length = 0

    def __len__(self) -> int:
        return self.length


def test_the_longest_value_is_one_whose_length_can_be_written(tmp_path: Path) -> None:
    store, value = LogStore(tmp_path), Long()
    value.length = (1 << 32) - 1  # a record has four bytes for it
    store.put("k", value)
    value.length += 1
    with pytest.raises(ValueError, match="k has 4294967296 bytes"):
        store.put("k", value)
    store.delete("k")
    store.close()


def test_a_full_disk_does_not_keep_it_shut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    LogStore(tmp_path).close()
    monkeypatch.setattr(files.os, "write", full)
    store = LogStore(tmp_path)
    with pytest.raises(StoreError, match="is in use by another process"):
        LogStore(tmp_path)
    store.close()
