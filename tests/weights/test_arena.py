"""Shared memory: made whole, seen by others, never left behind."""

import errno
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from umbra.proto.errors import StartupError
from umbra.services.weights import arena as arena_module
from umbra.services.weights.arena import (
    PAGE_BYTES,
    SHM,
    Arena,
    remove_leftovers,
    run_and_suffix,
    shm_host,
)
from umbra.services.weights.memory import locate


@pytest.fixture
def arena(run_id: str) -> Iterator[Arena]:
    made = Arena.create(run_id, "weights1", slot_bytes=PAGE_BYTES + 64, slots=3)
    yield made
    made.unlink()
    made.close()


def test_bytes_written_by_one_are_read_by_the_other(arena: Arena) -> None:
    other = Arena.attach(arena.path, slot_bytes=arena.slot_bytes)
    reader = Arena.attach(str(arena.path), slot_bytes=arena.slot_bytes)
    assert other.slots == reader.slots == 3
    for index in range(3):
        other.slot(index)[:] = bytes([index + 1]) * arena.slot_bytes
    for index in range(3):
        assert arena.slot(index)[-1] == index + 1
        assert bytes(reader.slot(index)[-64:]) == bytes([index + 1]) * 64
    assert locate(other.slot(1)) == (f"/proc/{os.getpid()}/fd/{other.fileno()}", 2 * PAGE_BYTES)
    other.close()
    reader.close()
    info = arena.path.stat()
    assert stat.S_IMODE(info.st_mode) == 0o600
    assert info.st_blocks * 512 >= info.st_size == (3 * 2 + 1) * PAGE_BYTES


def test_one_without_a_name_is_handed_to_another_process() -> None:
    made = Arena.anonymous(slot_bytes=PAGE_BYTES + 64, slots=2)
    assert os.fstat(made.fileno()).st_size == (2 * 2 + 1) * PAGE_BYTES
    with closing(made), closing(Arena.inherited(os.dup(made.fileno()), slot_bytes=4097)) as other:
        assert (other.slots, locate(made.slot(0)) is None) == (2, False)
        other.slot(1)[-1] = 7
        assert made.slot(1)[other.slot_bytes - 1] == 7


def test_readers_and_views_outlive_the_file(arena: Arena) -> None:
    reader = Arena.attach(arena.path, slot_bytes=arena.slot_bytes)
    view = arena.slot(0)
    assert reader.has_name
    for _ in range(2):
        arena.unlink()
        arena.close()
    assert not reader.has_name
    view[0] = 7
    assert reader.slot(0)[0] == view[0] == 7
    reader.check()
    os.truncate(reader.fileno(), PAGE_BYTES)
    with pytest.raises(StartupError, match="has become shorter"):
        reader.check()
    reader.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        reader.check()


def test_too_little_room_names_what_is_needed_and_what_is_free(run_id: str) -> None:
    stats = os.statvfs(SHM)
    size = stats.f_bavail * stats.f_frsize * 4
    with pytest.raises(StartupError, match=r"/dev/shm has \d+ bytes free, the weights need \d+"):
        Arena.create(run_id, "big", slot_bytes=size, slots=2)
    assert not list(SHM.glob(f"umbra-{run_id}*"))


@pytest.mark.parametrize(
    ("number", "reason"),
    [(errno.ENOSPC, "bytes free"), (errno.ENOMEM, "bytes free"), (errno.EIO, "Input/output error")],
)
def test_what_cannot_be_allocated_leaves_nothing(
    run_id: str, monkeypatch: pytest.MonkeyPatch, number: int, reason: str
) -> None:
    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", fails)
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StartupError, match=reason):
        Arena.create(run_id, "full", slot_bytes=PAGE_BYTES, slots=2)
    with pytest.raises(StartupError, match="cannot allocate"):
        Arena.anonymous(slot_bytes=PAGE_BYTES, slots=2)
    assert not list(SHM.glob(f"umbra-{run_id}-*"))
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_taken_name_and_a_slot_that_there_is_not_are_refused(arena: Arena, run_id: str) -> None:
    with pytest.raises(StartupError, match="File exists"):
        Arena.create(run_id, "weights1", slot_bytes=64, slots=1)
    with pytest.raises(ValueError, match="suffix"):
        Arena.create(run_id, "a-b", slot_bytes=64, slots=1)
    for index in (-1, 3):
        for part in (arena.slot, arena.sequence):
            with pytest.raises(IndexError):
                part(index)


def test_sequence_numbers_are_odd_while_a_slot_is_written(arena: Arena) -> None:
    reader = Arena.attach(arena.path, slot_bytes=arena.slot_bytes)
    number, other = reader.sequence(1), reader.sequence(2)
    reader.close()
    seen = [number[0]]
    for step in (arena.begin, arena.begin, arena.end, arena.end, arena.begin):
        step(1)  # a writer that begins again has left something unfinished
        seen.append(number[0])
    assert seen == [0, 1, 3, 4, 4, 5]
    assert other[0] == 0


def test_only_the_arena_of_a_dead_hub_is_removed(arena: Arena, run_id: str) -> None:
    """Of this very run, and whoever else holds it."""
    trainer = Arena.attach(arena.path, slot_bytes=arena.slot_bytes)
    other = Arena.create(f"{run_id}-2", "weights1", slot_bytes=1, slots=1)
    link = SHM / f"umbra-{run_id}-link"
    link.symlink_to(other.path)
    files = len(os.listdir("/proc/self/fd"))
    assert remove_leftovers(run_id) == []
    assert len(os.listdir("/proc/self/fd")) == files
    arena.close()
    other.close()
    assert remove_leftovers(run_id) == [str(arena.path)]
    link.unlink()
    assert not arena.path.exists() and other.path.exists()
    Arena.attach(other.path, slot_bytes=1).close()
    assert remove_leftovers(f"{run_id}-2") == [str(other.path)]
    trainer.close()


def test_a_host_is_named_by_what_lies_in_its_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pods on one disk: the same machine, the same device, but not the same files."""
    names: list[str] = []
    for pod in ("one", "two"):
        (tmp_path / pod).mkdir()
        monkeypatch.setattr(arena_module, "SHM", tmp_path / pod)
        names.append(shm_host())
        assert shm_host() == names[-1]  # every process there finds the same
    assert (tmp_path / "one").stat().st_dev == (tmp_path / "two").stat().st_dev
    assert len(set(names)) == 2
    (token,) = (tmp_path / "two").iterdir()
    assert token.stat().st_mode & 0o777 == 0o600


def test_first_processes_of_a_host_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "SHM", tmp_path)
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: shm_host(), range(64)))) == 1


@pytest.mark.parametrize("why", ["another file", "another user's"])
def test_who_cannot_have_the_token_shares_with_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    monkeypatch.setattr(arena_module, "SHM", tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("0" * 32, encoding="ascii")
    user = os.geteuid() + (why == "another user's")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    token = tmp_path / f".umbra-host-{user}"
    if why == "another file":
        token.symlink_to(elsewhere)  # put there by somebody else
    else:
        elsewhere.rename(token)
    first, second = shm_host(), shm_host()
    assert len({first, second, "0" * 32}) == 3
    assert "no shared memory with other processes" in caplog.text


OWN = [(0, 100), (3 * PAGE_BYTES - 10, 3 * PAGE_BYTES + 10), (9 * PAGE_BYTES, 10 * PAGE_BYTES)]
PARTS = 4  # pages of OWN: the middle one is on two
PAGES = [(0, 1), (2, 4), (9, 11), (12, 14), (19, 21), (22, 24), (29, 31)]  # of three slots


def test_an_arena_of_parts_has_memory_for_these_alone(run_id: str) -> None:
    """And takes no more from those who attach."""
    size = 10 * PAGE_BYTES
    made = Arena.create(run_id, "parts", slot_bytes=size, slots=3, own=OWN)
    assert made.path.stat().st_size == 3 * size + PAGE_BYTES
    allocated = made.path.stat().st_blocks * 512
    assert allocated == (3 * PARTS + 1) * PAGE_BYTES
    rank = Arena.attach(made.path, slot_bytes=size)
    assert rank.slots == 3
    assert [(a // PAGE_BYTES, b // PAGE_BYTES) for a, b in rank._map.ranges] == PAGES
    for start, end in OWN:
        rank.slot(2)[start:end] = bytes([7]) * (end - start)
    again = Arena.attach(made.path, slot_bytes=size)
    made.close()
    assert all(set(again.slot(2)[start:end]) == {7} for start, end in OWN)
    assert again.path.stat().st_blocks * 512 == allocated
    rank.close()
    again.unlink()
    again.close()


def test_room_is_asked_for_the_parts_alone(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    free = os.statvfs(SHM).f_bavail * os.statvfs(SHM).f_frsize
    size = (free // PAGE_BYTES + 1) * PAGE_BYTES
    made = Arena.create(run_id, "parts", slot_bytes=size, slots=2, own=[(0, 10)])
    made.unlink()
    made.close()
    with pytest.raises(StartupError, match="make it larger"):
        Arena.create(run_id, "parts", slot_bytes=size, slots=2, own=[(0, size)])


def test_the_name_of_an_arena_says_whose_it_is(arena: Arena, run_id: str) -> None:
    """Names come over the wire, and sizes with them."""
    assert run_and_suffix(str(arena.path)) == (run_id, "weights1")
    wrong = (
        "", "/dev/shm/other", "/dev/shm/umbra-run", "/dev/shm/umbra-a/../b-c", "/tmp/umbra-run-w",
        "/dev/shm/umbra-run-w x", "/dev/shm/../umbra-run-w", "umbra-run-w",
    )  # fmt: skip
    for path in wrong:
        with pytest.raises(StartupError, match="no arena"):
            run_and_suffix(path)
    for path, slot_bytes, reason in (
        ("/dev/shm/other", 64, "no arena"),
        ("/dev/shm/umbra-none-weights1", 64, "share /dev/shm"),
        (arena.path, 4 * PAGE_BYTES, "do not fit slots of"),
        (arena.path, 0, "do not fit slots of"),
    ):
        with pytest.raises(StartupError, match=reason):
            Arena.attach(path, slot_bytes=slot_bytes)
