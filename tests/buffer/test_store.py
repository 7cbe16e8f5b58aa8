"""The stores: what was put is read back, what was committed survives, a full disk loses nothing."""

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import lmdb
import pytest
from hypothesis import given, settings

from umbra.services.buffer import store as stores
from umbra.services.buffer.store import HEADER, LmdbStore, MemoryStore, StoreError, StoreFullError
from umbra.services.process import files

Store = LmdbStore | MemoryStore


def contents(store: Store) -> dict[str, bytes]:
    """Everything in the store but its header."""
    return {key: bytes(store.get(key)) for key in store.keys("") if key != HEADER.decode()}


def reopen(store: LmdbStore) -> LmdbStore:
    """The same folder, as after the end of the process."""
    store.close()
    return LmdbStore(store.directory)


def filled(folder: Path) -> LmdbStore:
    store = LmdbStore(folder)
    for number in range(3):
        store.put(f"a{number}", b"x" * 100)
        store.put(f"b{number}", b"y" * 50)
        store.commit()
    return store


@pytest.fixture(params=["memory", "lmdb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made = MemoryStore(durable=True) if request.param == "memory" else LmdbStore(tmp_path)
    yield made
    made.close()


def test_reads_see_what_is_not_committed_yet_in_order(store: Store) -> None:
    for number, name in enumerate(("b/2", "a/3", "a/1", "c/1", "a/2")):
        store.put(name, b"1")
        if number % 2:
            store.commit()
    assert (store.get("b/2"), store.keys("c")) == (b"1", ["c/1"])
    store.delete("a/3")
    for _ in range(2):
        assert store.keys("a/") == ["a/1", "a/2"]
        assert store.get_all(["b/2", "a/1"]) == [b"1", b"1"]
        with pytest.raises(KeyError):
            store.get_all(["a/1", "a/3"])
        store.commit()


def test_the_size_follows_what_is_kept(store: Store) -> None:
    empty = store.size_bytes
    for number in range(50):
        store.put(f"k{number}", bytes(10_000))
    store.commit()
    assert 500_000 <= store.size_bytes - empty <= 700_000
    for number in range(50):
        store.delete(f"k{number}")
    store.commit()
    assert store.size_bytes <= empty + 8192


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_a_dictionary_that_survives(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Random writes, commits, restarts and losses of what was not committed."""
    chance = random.Random(seed)
    store = LmdbStore(tmp_path_factory.mktemp("store"), map_bytes=1 << 16)
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
                value = chance.randbytes(chance.choice((0, 30, 600, 3000, 20_000)))
                store.put(key, value)
                model[key] = value
        assert contents(store) == model
    store.close()


def test_the_room_of_what_is_deleted_is_used_again(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path)
    for number in range(500):
        store.put(f"k{number}", b"v" * 9000)
        store.delete(f"k{number - 3}")
        store.commit()
    assert (tmp_path / stores.DATA).stat().st_size < 40 * 9000
    assert sorted(contents(store)) == ["k497", "k498", "k499"]
    store.close()


def test_the_map_grows_before_it_is_full(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, map_bytes=1 << 16)
    for value in (*(bytes([number]) * 100_000 for number in range(40)), b"z" * (8 << 20)):
        store.put(f"k{value[0]}", value)
        store.commit()
    store = reopen(store)
    assert (store.get("k39"), store.get("k122")) == (b"\x27" * 100_000, b"z" * (8 << 20))
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
    for step in (write, store.settle):
        step()
        assert sorted(contents(store)) == ["a0", "a1", "a2", "b0", "b1", "b2"]
    store = reopen(store)  # before the second commit: what the first had is there, and only that
    assert sorted(contents(store)) == ["a0", "a1", "a2", "b1", "b2", "c"]
    store.close()


def test_a_commit_that_failed_yields_to_what_came_after_it(tmp_path: Path) -> None:
    store = filled(tmp_path)
    store.put("a0", b"first")
    store.put("d", b"d")
    assert store.freeze() is not None
    store.put("a0", b"second")
    with pytest.raises(StoreFullError):
        store.settle(OSError(errno.ENOSPC, "full"))
    for _ in range(2):
        assert (store.get("a0"), store.get("d")) == (b"second", b"d")
        store.commit()
        store = reopen(store)
    store.close()


class SmallDisk:
    """Errors of LMDB and the system while no file can grow: a large write is first cut short."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = self.broken = False
        commit = LmdbStore._commit  # pyright: ignore[reportPrivateUsage]

        def write(store: LmdbStore, filled: lmdb.Transaction) -> None:
            if self.full or self.broken:
                filled.abort()
                raise OSError(errno.EIO, "Input/output error")
            commit(store, filled)

        def reserve(_fd: int, _offset: int, _size: int) -> None:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(LmdbStore, "_commit", write)
        monkeypatch.setattr(stores.os, "posix_fallocate", reserve)


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SmallDisk(monkeypatch)
    store = filled(tmp_path)
    disk.full = True
    store.put("k", b"v" * 200)
    for _ in range(3):
        with pytest.raises(StoreFullError, match="No space left"):
            store.commit()
        assert store.get("k") == b"v" * 200
    store.put("m", b"w")
    disk.full = False
    store.commit()
    store = reopen(store)
    assert (store.get("k"), store.get("m"), store.get("a0")) == (b"v" * 200, b"w", b"x" * 100)
    store.close()


def test_a_disk_that_fails_ends_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SmallDisk(monkeypatch)
    store = filled(tmp_path)
    disk.broken = True
    store.put("k", b"v")
    with pytest.raises(StoreError, match=r"failed: .*Input/output error"):
        store.commit()
    store.close()


def test_it_is_for_its_user_alone(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path / "store")
    store.put("a", b"1")
    store.commit()
    store.close()
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "store").iterdir()} == {0o600}


def test_a_store_has_one_owner_whose_name_a_full_disk_does_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for owner in (f"process {os.getpid()}", "another process"):
        store = LmdbStore(tmp_path)
        with pytest.raises(StoreError, match=f"in use by {owner}"):
            LmdbStore(tmp_path)
        store.close()
        monkeypatch.setattr(files.os, "write", full)


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs"])
def test_a_network_file_system_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    assert stores.file_system(Path("/proc")) == "proc"
    monkeypatch.setattr(stores, "file_system", lambda _: kind)
    with pytest.raises(StoreError, match=rf"network file system \({kind}\).*buffer.store"):
        LmdbStore(tmp_path)
