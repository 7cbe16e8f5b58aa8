"""The stores: what was put is read back, what was committed survives whatever happens to the disk.

LMDB writes pages that no commit refers to, waits for the disk, writes one of the two heads of the
file, and waits again; `test_a_commit_waits_for_its_pages_and_then_for_its_head` sees that it does.
So a disk that loses its power in a commit has the file of before with any sectors of the new pages,
and then with all of them and the new head or the old one. Each is made out of the file before and
after a commit.
"""

import errno
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import starmap
from pathlib import Path
from unittest.mock import Mock

import hypothesis.strategies as st
import lmdb
import pytest
from fakes.lossy_disk import QuickDisk
from hypothesis import given, settings

from umbra.proto.errors import UsageError
from umbra.services.buffer import store as stores
from umbra.services.buffer.service import store_of
from umbra.services.buffer.store import (
    ACKNOWLEDGED,
    DATA,
    HEADER,
    MARK,
    LmdbStore,
    MemoryStore,
    StoreError,
    StoreFullError,
    open_store,
)
from umbra.services.config import BufferConfig, RunConfig
from umbra.services.process import files

Store = LmdbStore | MemoryStore
Contents = dict[str, bytes]
PAGE = 4096
HEADS = 2 * PAGE
META_BYTES = 160  # of what LMDB writes at the beginning of the first two pages
SECTOR = 512


def contents(store: Store) -> Contents:
    """Everything in the store but its header."""
    return {key: bytes(store.get(key)) for key in store.keys("") if key != HEADER.decode()}


def found(folder: Path) -> Contents | str:
    """The contents of the store in `folder`, or why it is refused."""
    try:
        store = LmdbStore(folder)
    except StoreError as error:
        return str(error)
    held = contents(store)
    store.close()
    return held


def filled(folder: Path, *, first: int = 0, commits: int = 30) -> dict[str, bytes]:
    """A store with small and large values, some of them deleted again, and its contents."""
    store = LmdbStore(folder)
    for number in range(first, first + commits):
        store.put(f"a{number % 20}", bytes([number % 251]) * 150)
        store.put(f"t{number}", bytes([number % 251]) * 5000)
        store.delete(f"t{number - 4}")
        store.commit()
    held = contents(store)
    store.close()
    return held


@pytest.mark.parametrize("kind", ["memory", "lmdb"])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_a_dictionary_that_survives(
    tmp_path_factory: pytest.TempPathFactory, kind: str, seed: int
) -> None:
    """Random writes, commits that end later or fail, restarts and losses of what was not committed.

    The map grows on the way, once by more than it was.
    """
    chance, folder = random.Random(seed), tmp_path_factory.mktemp("store")
    store: Store = MemoryStore() if kind == "memory" else LmdbStore(folder, map_bytes=1 << 16)
    model: Contents = {}
    committed: Contents = {}
    frozen: Contents = {}
    write = None
    for _ in range(150):
        key = f"key-{chance.randrange(30)}"
        match chance.randrange(9):
            case 0:
                store.delete(key)
                model.pop(key, None)
            case 1 | 2 if write is None:
                store.commit()
                committed = dict(model)
            case 3 if write is None:
                write, frozen = store.freeze(), dict(model)
            case 1 | 2 if write is not None:
                write()
                store.settle()
                write, committed = None, frozen
            case 3 if write is not None:
                write = None
                with pytest.raises(StoreFullError):
                    store.settle(OSError(errno.ENOSPC, "full"))
            case 4 if isinstance(store, LmdbStore) and write is None and chance.random() < 0.3:
                store.close()
                store, model = LmdbStore(folder), dict(committed)
            case _:
                size = chance.choice((0, 30, 600, 3000, 20_000))
                size = 300_000 if chance.random() < 0.02 else size
                model[key] = chance.randbytes(size)
                store.put(key, model[key])
        assert contents(store) == model
        names = store.keys("key-1")
        assert names == sorted(name for name in model if name.startswith("key-1"))
        assert store.get_all(names) == [model[name] for name in names]
        with pytest.raises(KeyError):
            store.get_all([*names, "key"])
    store.close()


@pytest.mark.parametrize("kind", ["memory", "lmdb"])
def test_the_size_follows_what_is_kept_and_the_room_of_the_rest_is_used_again(
    tmp_path: Path, kind: str
) -> None:
    store = MemoryStore() if kind == "memory" else LmdbStore(tmp_path)
    empty = store.size_bytes
    for first in range(0, 500, 50):
        for number in range(first, first + 50):
            store.put(f"k{number}", bytes(10_000))
        store.commit()
        assert 500_000 <= store.size_bytes - empty <= 700_000
        for number in range(first, first + 50):
            store.delete(f"k{number}")
        store.commit()
        assert store.size_bytes <= empty + 8192
    assert kind == "memory" or (tmp_path / DATA).stat().st_size < 3 * 700_000
    store.close()


@pytest.mark.parametrize("is_full", [True, False])
def test_a_full_disk_loses_nothing_and_a_broken_one_ends_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    """LMDB calls a write that was cut short an error of the disk; allocating tells which it is."""
    commit = LmdbStore._commit  # pyright: ignore[reportPrivateUsage]
    fails = False

    def write(store: LmdbStore, filled: lmdb.Transaction) -> None:
        if fails:
            filled.abort()
            raise OSError(errno.EIO, "Input/output error")
        commit(store, filled)

    def reserve(*_: int) -> None:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LmdbStore, "_commit", write)
    monkeypatch.setattr(stores.os, "posix_fallocate", reserve)
    held = filled(tmp_path, commits=3)
    store, fails = LmdbStore(tmp_path), True
    store.put("k", b"v" * 200)
    if not is_full:
        with pytest.raises(StoreError, match=r"failed: .*Input/output error"):
            store.commit()
        store.close()
        return
    for _ in range(3):
        with pytest.raises(StoreFullError, match="No space left"):
            store.commit()
        assert store.get("k") == b"v" * 200
    store.put("m", b"w")
    fails = False
    store.commit()
    store.close()
    assert found(tmp_path) == {**held, "k": b"v" * 200, "m": b"w"}


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


# -- files after a change by hand or a power cut --------------------------------------------------


def test_a_flipped_bit_or_a_file_that_was_cut_off_is_refused_or_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anywhere in the heads of the file and at places all over it; at any page and within one."""
    monkeypatch.setattr(stores, "DISK", QuickDisk())
    held = filled(tmp_path, commits=8)
    path = tmp_path / DATA
    whole = path.read_bytes()
    size = len(whole)

    def flipped(offset: int, bit: int) -> bytes:
        return whole[:offset] + bytes([whole[offset] ^ bit]) + whole[offset + 1 :]

    heads = [page * PAGE + at for page in (0, 1) for at in range(META_BYTES)]
    flips = [(at, bit) for at in heads for bit in (2, 64)]
    flips += [(at, 16) for at in range(HEADS, size, 197)]
    cuts = [*range(0, size, PAGE), 100, PAGE + 50, size - 100]  # a memory map would end the process
    for made, least in ((starmap(flipped, flips), 100), ((whole[:at] for at in cuts), 5)):
        refused = 0
        for file in made:
            path.write_bytes(file)
            now = found(tmp_path)
            assert now == held or "damaged" in now
            refused += now != held
        assert refused > least
    path.write_bytes(whole)
    assert found(tmp_path) == held


def test_a_damaged_value_is_named_by_its_key_and_not_handed_out(tmp_path: Path) -> None:
    filled(tmp_path)
    store, data = LmdbStore(tmp_path), bytearray((tmp_path / DATA).read_bytes())
    for number in (27, 29):
        data[data.rindex(bytes([number]) * 4000) + 2000] ^= 1
    with (tmp_path / DATA).open("r+b") as file:
        file.write(data)
    with pytest.raises(StoreError, match="the value of t27 has a wrong checksum"):
        store.get("t27")
    store.close()
    assert "the value of t27 has a wrong checksum (and 1 more)" in found(tmp_path)


def test_an_earlier_copy_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    earlier = filled(folder, commits=20)
    shutil.copy(folder / DATA, tmp_path / DATA)
    filled(folder, first=20, commits=1)
    shutil.copy(tmp_path / DATA, folder / DATA)
    refusal = found(folder)
    assert "ends with commit 21, but commit 22 was acknowledged (remove" in refusal
    (folder / ACKNOWLEDGED).unlink()
    assert found(folder) == earlier


def test_a_file_that_is_gone_or_foreign_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path)
    filled(tmp_path / "other")
    shutil.copy(tmp_path / "other" / DATA, tmp_path / DATA)
    assert "is that of store" in found(tmp_path)
    (tmp_path / DATA).unlink()
    assert "data.mdb is missing" in found(tmp_path)
    (tmp_path / DATA).write_bytes(b"something else entirely, and long enough" * 400)
    assert "not an LMDB data file" in found(tmp_path)
    (tmp_path / DATA).unlink()
    with lmdb.open(str(tmp_path)) as env, env.begin(write=True) as transaction:
        transaction.put(b"key", b"value of something else")
    assert "has no header of a store" in found(tmp_path)
    monkeypatch.setattr(stores, "SCHEMA", 99)
    filled(tmp_path / "new")
    monkeypatch.undo()
    assert "schema 99" in found(tmp_path / "new")


@pytest.mark.parametrize("data", [b"", b"x" * 24])
def test_what_was_acknowledged_must_be_readable_or_removed(tmp_path: Path, data: bytes) -> None:
    held = filled(tmp_path)
    (tmp_path / ACKNOWLEDGED).write_bytes(data)
    assert f"{ACKNOWLEDGED} has a wrong checksum" in found(tmp_path)
    (tmp_path / ACKNOWLEDGED).unlink()
    assert found(tmp_path) == held


def begun(run: Path) -> str:
    """A run with a store; the id of that."""
    run.mkdir()
    store = open_store(run, run / "store")
    assert isinstance(store, LmdbStore)
    store.put("k", b"v")
    store.commit()
    store.close()
    return store.id


@pytest.mark.parametrize("has_run", [True, False])
@pytest.mark.parametrize("store", ["", "memory", "own"])
def test_the_store_of_a_buffer_is_in_its_run_unless_it_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str, has_run: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (run_dir := tmp_path / "run").mkdir()
    place = {"": "run/store" if has_run else "", "own": "own"}.get(store, "")
    context = Mock(config=RunConfig(buffer=BufferConfig(store=store)))
    context.run_dir = run_dir if has_run else None
    store_of(context).close()
    found = [str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob(DATA)]
    assert (found, (run_dir / MARK).exists()) == ([place] * bool(place), has_run and bool(place))
    assert ("store is in memory" in str(context.log.warning.mock_calls)) == (not place)
    (tmp_path / "file").touch()
    context.config = RunConfig(buffer=BufferConfig(store="file/store"))
    context.run_dir = None
    with pytest.raises(UsageError, match=r"^buffer\.store = file/store cannot be opened"):
        store_of(context)


@pytest.mark.parametrize("change", ["removed", "emptied", "replaced", "elsewhere", "memory"])
def test_a_run_does_not_begin_anew_in_silence(tmp_path: Path, change: str) -> None:
    run = tmp_path / "run"
    name = begun(run)
    place: Path | None = run / "store"
    if change in ("elsewhere", "memory"):
        place = None if change == "memory" else tmp_path / "elsewhere"
    else:
        shutil.rmtree(run / "store")
    if change == "emptied":
        (run / "store").mkdir()
    elif change == "replaced":
        filled(run / "store")
    with pytest.raises(UsageError, match=rf"has the store {name} in .*, but .*bring it back"):
        open_store(run, place)
    assert (run / "store" / DATA).exists() == (change not in ("removed", "emptied"))


def test_the_store_of_a_run_is_its_users_alone_and_may_move(tmp_path: Path) -> None:
    for run_dir in (tmp_path, None):
        assert isinstance(open_store(run_dir, None), MemoryStore)
    run = tmp_path / "run"
    begun(run)
    assert (run / "store").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (run / "store").iterdir()} == {0o600}
    (run / "store").rename(tmp_path / "elsewhere")
    store = open_store(run, tmp_path / "elsewhere")
    assert store.get("k") == b"v"
    store.close()
    assert str(tmp_path / "elsewhere") in (run / MARK).read_text()
    (run / MARK).write_bytes(b"")
    with pytest.raises(StoreError, match=r"store\.json.*cannot be read.*rewritten"):
        open_store(run, tmp_path / "elsewhere")
    (run / MARK).unlink()
    open_store(run, tmp_path / "elsewhere").close()
    assert (run / MARK).exists()


def cuts(before: bytes, after: bytes, chance: random.Random) -> Iterator[tuple[bytes, bool]]:
    """Files that may be found after a cut in the commit, and whether its head is in them."""
    at = [
        n for n in range(0, len(after), SECTOR) if before[n : n + SECTOR] != after[n : n + SECTOR]
    ]
    pages = [n for n in at if n >= HEADS]
    kept = [[n for n in pages if chance.random() < share] for share in (0.0, 0.1, 0.5, 0.9, 1.0)]
    for sectors in chance.sample([at, *kept], 6):
        file = bytearray(before)
        for offset in sectors:
            file.extend(bytes(max(offset - len(file), 0)))
            file[offset : offset + SECTOR] = after[offset : offset + SECTOR]
        yield bytes(file), sectors is at


@pytest.mark.parametrize("seed", range(2))
def test_a_power_cut_leaves_the_state_before_or_after_a_commit(tmp_path: Path, seed: int) -> None:
    """A recovered state is worked with, and the power goes again."""
    chance, model = random.Random(seed), Contents()
    store = LmdbStore(tmp_path)
    for _ in range(30):
        before, acknowledged = ((tmp_path / name).read_bytes() for name in (DATA, ACKNOWLEDGED))
        wanted = dict(model)
        for _ in range(chance.randrange(1, 5)):
            key = f"k{chance.randrange(12)}"
            if chance.random() < 0.3:
                store.delete(key)
                wanted.pop(key, None)
            else:
                wanted[key] = chance.randbytes(chance.choice((5, 300, 3000, 15_000)))
                store.put(key, wanted[key])
        store.commit()
        after, held = (tmp_path / DATA).read_bytes(), wanted
        for file, has_head in cuts(before, after, chance):
            store.close()
            (tmp_path / DATA).write_bytes(file)
            (tmp_path / ACKNOWLEDGED).write_bytes(acknowledged)
            store = LmdbStore(tmp_path)
            held = contents(store)
            assert held == (wanted if has_head else model)
        model = held
    store.close()


def test_the_power_goes_while_a_store_is_made(tmp_path: Path) -> None:
    LmdbStore(tmp_path / "made").close()
    whole = (tmp_path / "made" / DATA).read_bytes()
    for size in range(0, len(whole) + 1, PAGE // 2):
        place = tmp_path / f"{size}"
        place.mkdir()
        (place / f"{DATA}.part").write_bytes(whole[:size])
        store = LmdbStore(place)
        assert contents(store) == {}
        store.close()


WORK = """
import sys
from pathlib import Path
from umbra.services.buffer.store import LmdbStore
store = LmdbStore(Path(sys.argv[1]))
for number in range(3):
    store.put(f"k{number}", bytes(20_000))
    store.commit()
store.close()
"""
CALL = re.compile(r"(\w+)\(\d+<([^>]*)>.*?(?:, (\d+))?\) += \d")


def test_a_commit_waits_for_its_pages_and_then_for_its_head(tmp_path: Path) -> None:
    """As the kernel sees it; and a start waits for what a killed process has written."""
    LmdbStore(tmp_path / "store").close()
    calls = "trace=write,writev,pwrite64,pwritev,fdatasync,fsync,openat"
    command = ["strace", "-f", "-y", "-s", "0", "-e", calls, "-o", str(tmp_path / "calls")]
    try:
        words = [*command, sys.executable, "-c", WORK, str(tmp_path / "store")]
        subprocess.run(words, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"system calls cannot be seen here: {error}")
    text = (tmp_path / "calls").read_text()
    assert re.search(rf'openat\(.*/{DATA}", .*O_(D)?SYNC', text), "the head is not written through"
    seen = ""
    for name, path, offset in CALL.findall(text):
        if path.endswith(f"/{DATA}"):
            is_head = name == "pwrite64" and int(offset) < HEADS
            seen += "s" if "sync" in name else "h" if is_head else "p"
        elif path.endswith(f"/{ACKNOWLEDGED}"):
            seen += "a"
    assert re.fullmatch(r"s+(p+sha){3}", seen), seen
