"""Files of a store after any change by hand or a power cut: noticed and named, or nothing is lost.

LMDB writes pages that no commit refers to, waits for the disk, writes one of the two heads of the
file, and waits again; `test_a_commit_waits_for_its_pages_and_then_for_its_head` sees that it does.
So a disk that loses its power in a commit has the file of before with any sectors of the new pages,
and then with all of them and the new head or the old one. Each is made out of the file before and
after a commit.
"""

import logging
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import lmdb
import pytest
from fakes.lossy_disk import QuickDisk
from test_store import contents

from umbra.services.buffer import service
from umbra.services.buffer import store as stores
from umbra.services.buffer.store import (
    ACKNOWLEDGED,
    DATA,
    MARK,
    LmdbStore,
    MemoryStore,
    StoreError,
    open_store,
)
from umbra.services.config import BufferConfig, RunConfig
from umbra.services.process.command import ServiceContext

PAGE = 4096
META_BYTES = 160  # of what LMDB writes at the beginning of the first two pages


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


def found(folder: Path) -> dict[str, bytes] | str:
    try:
        store = LmdbStore(folder)
    except StoreError as error:
        return str(error)
    held = contents(store)
    store.close()
    return held


def test_a_flipped_bit_is_refused_or_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anywhere in the heads of the file, and at places all over it."""
    monkeypatch.setattr(stores, "DISK", QuickDisk())
    held = filled(tmp_path, commits=8)
    path = tmp_path / DATA
    whole = path.read_bytes()
    heads = [page * PAGE + at for page in (0, 1) for at in range(META_BYTES)]
    refused = 0
    for offset in [*heads, *range(2 * PAGE, len(whole), 197)]:
        for bit in (2, 64) if offset < 2 * PAGE else (16,):
            path.write_bytes(whole[:offset] + bytes([whole[offset] ^ bit]) + whole[offset + 1 :])
            now = found(tmp_path)
            assert now == held or "damaged" in now, offset
            refused += now != held
    assert refused > 100
    path.write_bytes(whole)
    assert found(tmp_path) == held


def test_a_damaged_value_is_named_by_its_key(tmp_path: Path) -> None:
    filled(tmp_path)
    path = tmp_path / DATA
    data = bytearray(path.read_bytes())
    for number in (27, 29):
        data[data.rindex(bytes([number]) * 4000) + 2000] ^= 1
    path.write_bytes(data)
    assert "the value of t27 has a wrong checksum (and 1 more)" in found(tmp_path)


def test_a_value_that_changed_on_the_disk_is_not_handed_out(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path)
    store.put("large", b"x" * 5000)
    store.commit()
    path = tmp_path / DATA
    offset = path.read_bytes().index(b"x" * 5000)
    with path.open("r+b") as file:
        file.seek(offset + 40)
        file.write(b"y")
    with pytest.raises(StoreError, match="the value of large has a wrong checksum"):
        store.get("large")
    store.close()


def test_a_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    """At any page, and in the middle of one; a memory map would end the process."""
    held = filled(tmp_path)
    path = tmp_path / DATA
    whole, refused = path.read_bytes(), 0
    for size in (*range(0, len(whole), PAGE), 100, PAGE + 50, len(whole) - 100):
        path.write_bytes(whole[:size])
        now = found(tmp_path)
        assert now == held or "damaged: " in now, size
        refused += now != held
    assert refused > 10


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


def test_a_file_that_is_gone_or_foreign_is_refused(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("data", [b"", b"x" * 24])
def test_what_was_acknowledged_must_be_readable_or_removed(tmp_path: Path, data: bytes) -> None:
    held = filled(tmp_path)
    (tmp_path / ACKNOWLEDGED).write_bytes(data)
    assert f"{ACKNOWLEDGED} has a wrong checksum" in found(tmp_path)
    (tmp_path / ACKNOWLEDGED).unlink()
    assert found(tmp_path) == held


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "SCHEMA", 99)
    filled(tmp_path / "new")
    monkeypatch.undo()
    assert "schema 99" in found(tmp_path / "new")


def begun(run: Path) -> str:
    """A run with a store; the id of that."""
    run.mkdir()
    store = open_store(run, run / "store")
    assert isinstance(store, LmdbStore)
    store.put("k", b"v")
    store.commit()
    store.close()
    return store.id


@pytest.mark.parametrize("change", ["removed", "emptied", "replaced"])
def test_a_run_does_not_begin_anew_in_silence(tmp_path: Path, change: str) -> None:
    run = tmp_path / "run"
    name = begun(run)
    shutil.rmtree(run / "store")
    if change == "emptied":
        (run / "store").mkdir()
    elif change == "replaced":
        filled(run / "store")
    with pytest.raises(StoreError, match=rf"has the store {name} in .*, but .*bring it back"):
        open_store(run, run / "store")
    assert (run / "store" / DATA).exists() == (change == "replaced")


def test_the_buffer_asks_for_the_store_of_its_run(tmp_path: Path) -> None:
    """As `umbra buffer --run-dir` opens it."""
    for run_dir in (tmp_path, None):
        assert isinstance(open_store(run_dir, None), MemoryStore)
    run = tmp_path / "run"
    begun(run)

    def context(store: str = "") -> ServiceContext:
        config = RunConfig(buffer=BufferConfig(store=store))
        fake = SimpleNamespace(config=config, run_dir=run, log=logging.getLogger("test"))
        return cast(ServiceContext, fake)

    service.store_of(context()).close()
    with pytest.raises(StoreError, match="memory"):
        service.store_of(context("memory"))
    with pytest.raises(StoreError, match="holds none"):
        service.store_of(context(str(tmp_path / "elsewhere")))


def test_a_store_may_move(tmp_path: Path) -> None:
    run = tmp_path / "run"
    begun(run)
    (run / "store").rename(tmp_path / "elsewhere")
    store = open_store(run, tmp_path / "elsewhere")
    assert store.get("k") == b"v"
    store.close()
    assert str(tmp_path / "elsewhere") in (run / MARK).read_text()


def test_the_mark_itself_is_refused_or_written_anew(tmp_path: Path) -> None:
    run = tmp_path / "run"
    begun(run)
    (run / MARK).write_bytes(b"")
    with pytest.raises(StoreError, match=r"store\.json.*cannot be read.*rewritten"):
        open_store(run, run / "store")
    (run / MARK).unlink()
    open_store(run, run / "store").close()
    assert (run / MARK).exists()


SECTOR = 512
HEADS = 2 * PAGE
Contents = dict[str, bytes]


def cuts(before: bytes, after: bytes, chance: random.Random) -> Iterator[tuple[bytes, bool]]:
    """Files that may be found after a cut in the commit, and whether its head is in them."""
    at = [
        n for n in range(0, len(after), SECTOR) if before[n : n + SECTOR] != after[n : n + SECTOR]
    ]
    pages = [n for n in at if n >= HEADS]
    for share in (0.0, 0.1, 0.5, 0.9, 1.0):
        yield patched(before, after, [n for n in pages if chance.random() < share]), False
    yield patched(before, after, at), True


def patched(before: bytes, after: bytes, sectors: list[int]) -> bytes:
    """Return the file of before with these sectors of after, as long as the last of them needs."""
    file = bytearray(before)
    for offset in sectors:
        file.extend(bytes(max(offset - len(file), 0)))
        file[offset : offset + SECTOR] = after[offset : offset + SECTOR]
    return bytes(file)


def changed(store: LmdbStore, model: Contents, chance: random.Random) -> Contents:
    """Put and delete a few keys at random; return what the store is to hold then."""
    model = dict(model)
    for _ in range(chance.randrange(1, 5)):
        key = f"k{chance.randrange(12)}"
        if chance.random() < 0.3:
            store.delete(key)
            model.pop(key, None)
        else:
            model[key] = chance.randbytes(chance.choice((5, 300, 3000, 15_000)))
            store.put(key, model[key])
    return model


def open_copy(place: Path, file: bytes, acknowledged: bytes) -> LmdbStore:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    (place / DATA).write_bytes(file)
    (place / ACKNOWLEDGED).write_bytes(acknowledged)
    return LmdbStore(place)


@pytest.mark.parametrize("seed", range(2))
def test_a_power_cut_leaves_the_state_before_or_after_a_commit(tmp_path: Path, seed: int) -> None:
    """The recovered state is worked with, and the power goes again."""
    chance = random.Random(seed)
    store = LmdbStore(tmp_path / "store")
    path, model = tmp_path / "store" / DATA, contents(store)
    for _ in range(12):
        before, acknowledged = path.read_bytes(), (path.parent / ACKNOWLEDGED).read_bytes()
        wanted = changed(store, model, chance)
        store.commit()
        after = path.read_bytes()
        for file, has_head in cuts(before, after, chance):
            other = open_copy(tmp_path / "cut", file, acknowledged)
            held = contents(other)
            assert held == (wanted if has_head else model)
            more = changed(other, held, chance)
            base, known = file, (tmp_path / "cut" / ACKNOWLEDGED).read_bytes()
            other.commit()
            again = (tmp_path / "cut" / DATA).read_bytes()
            other.close()
            for second, head in list(cuts(base.ljust(len(again), b"\0"), again, chance))[2::2]:
                last = open_copy(tmp_path / "twice", second, known)
                assert contents(last) == (more if head else held)
                last.close()
        model = wanted
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
