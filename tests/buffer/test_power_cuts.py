"""The power goes at any moment of a commit or of a start: nothing acknowledged is lost.

LMDB writes pages that no commit refers to, waits for the disk, writes one of the two heads of the
file, and waits again; `test_a_commit_waits_for_its_pages_and_then_for_its_head` sees that it does.
So a disk that loses its power in a commit has the file of before with any sectors of the new pages,
and then with all of them and the new head or the old one. Each is made out of the file before and
after a commit.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_store import contents

from umbra.services.buffer.store import ACKNOWLEDGED, DATA, LmdbStore

PAGE, SECTOR = 4096, 512
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
