"""Memory of versions: shared and never left behind, copied beside other threads, as deltas."""

import errno
import os
import random
import stat
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from mmap import PAGESIZE
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbra.proto.deadline import Pace
from umbra.proto.errors import StartupError, WireError
from umbra.services.config import WeightHubConfig
from umbra.services.config.loader import load_config
from umbra.services.generator import service as generator_service
from umbra.services.generator.engines.opening import OpenEngine
from umbra.services.modeling.model_directory import weights_bytes
from umbra.services.scorer import service as scorer_service
from umbra.services.weights import arena as arena_module
from umbra.services.weights import delta, memory
from umbra.services.weights.arena import (
    PAGE_BYTES,
    SHM,
    Arena,
    remove_leftovers,
    run_and_suffix,
    shm_host,
)
from umbra.services.weights.memory import (
    TRIM_S,
    HeapTrimmer,
    MappedBlocks,
    copy,
    locate,
    private_memory,
    shared_memory,
)


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
    assert locate(private_memory((3 * 2 + 1) * PAGE_BYTES)) is None, "which may be in its place"
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
    held = reader.slot(0)
    place = locate(held) or ("", 0)
    os.truncate(reader.fileno(), PAGE_BYTES)
    with pytest.raises(StartupError, match="has become shorter"):
        reader.check()
    reader.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        reader.check()
    assert MappedBlocks().view(place[0])[place[1]] == 7, "an engine may be about to load it"
    del held
    with pytest.raises(StartupError, match="staging memory"):
        MappedBlocks().view(place[0])


def test_room_is_asked_for_before_it_is_taken_and_for_parts_alone(run_id: str) -> None:
    free = os.statvfs(SHM).f_bavail * os.statvfs(SHM).f_frsize
    size = (free // PAGE_BYTES + 1) * PAGE_BYTES
    for own in (None, [(0, size)]):
        told = r"/dev/shm has \d+ bytes free, the weights need \d+.*make it larger"
        with pytest.raises(StartupError, match=told):
            Arena.create(run_id, "parts", slot_bytes=size, slots=2, own=own)
        assert not list(SHM.glob(f"umbra-{run_id}*"))
    made = Arena.create(run_id, "parts", slot_bytes=size, slots=2, own=[(0, 10)])
    made.unlink()
    made.close()


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
        with ThreadPoolExecutor(8) as pool:  # all of them first processes of the host
            (name,) = set(pool.map(lambda _: shm_host(), range(64)))
        names.append(name)
    assert (tmp_path / "one").stat().st_dev == (tmp_path / "two").stat().st_dev
    assert len(set(names)) == 2
    (token,) = (tmp_path / "two").iterdir()
    assert token.stat().st_mode & 0o777 == 0o600


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


@pytest.mark.parametrize("size", [0, 1, PAGESIZE + 7])
def test_a_copy_has_the_bytes_of_its_source_which_have_to_fit(size: int) -> None:
    source, target = random.Random(size).randbytes(size), bytearray(size + 2)
    for kind in (source, memoryview(bytearray(source))):
        target[:] = bytes(size + 2)
        copy(kind, memoryview(target)[1 : size + 1])
        assert bytes(target) == b"\0" + source + b"\0"
    for room in {abs(size - 1), size + 1}:
        with pytest.raises(ValueError, match=f"{size} bytes do not fill {room}"):
            copy(source, memoryview(bytearray(room)))
    with pytest.raises(TypeError):
        copy(bytes(4), memoryview(bytes(4)))


def test_shared_memory_is_found_by_its_place_and_mapped_once() -> None:
    block, blocks = shared_memory(3 * PAGESIZE), MappedBlocks()
    assert locate(private_memory(PAGESIZE)) is None and locate(block[:0]) is None
    place = locate(block[PAGESIZE:])
    assert place is not None and place[1] == PAGESIZE and locate(block) == (place[0], 0)
    block[-1] = 7
    view = blocks.view(place[0])
    assert view[-1] == 7 and len(view) == len(block) and blocks.view(place[0]) is view
    fd = int(place[0].rpartition("/")[2])
    other = os.memfd_create("other")
    os.ftruncate(other, 8)
    own = os.dup(fd)
    os.dup2(other, fd)  # the number of a closed file is given to the next one
    assert len(blocks.view(place[0])) == 8
    os.dup2(own, fd)
    os.close(own)
    os.close(other)
    del block, view
    with pytest.raises(StartupError, match="staging memory"):
        MappedBlocks().view(place[0])


def test_heaps_are_trimmed_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmer, trims, clock = HeapTrimmer(), list[int](), iter([0.0, 0.5, 0.5, 0.5])
    trimmer._trim = trims.append
    monkeypatch.setattr(memory, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    due = 5.0 + 500.0  # it took half a second
    for now in (5.0, due - 1, due, due + TRIM_S - 1, due + TRIM_S):
        if now == due + TRIM_S:
            trimmer._trim = None  # no glibc
        trimmer.give_back(now)
    assert trims == [0, 0]


def test_other_threads_run_during_a_copy() -> None:
    source = memoryview(bytearray(b"x" * (64 << 20)))

    def seen_half_done() -> bool:
        into = memoryview(bytearray(len(source)))
        copying = threading.Thread(target=copy, args=(source, into))
        copying.start()
        ends = {0}
        while ends == {0}:  # until a part is there
            os.sched_yield()
            ends = {into[PAGESIZE], into[-PAGESIZE]}
        copying.join()
        return 0 in ends

    interval = sys.getswitchinterval()
    sys.setswitchinterval(100.0)  # nobody is made to let go of the interpreter
    try:
        # More than once, since on a busy machine a copy may end before we get a core.
        assert any(seen_half_done() for _ in range(50))
    finally:
        sys.setswitchinterval(interval)


def test_whatever_moves_a_version_may_take_the_longer_the_more_bytes_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first one the model is read, two slots are made, it is written and brought."""
    pace = Pace(30.0, least_rate=5.0)
    limits = pace.limit_s(0), pace.limit_s(500), pace.limit_s(500, parts=4)
    assert (*limits, pace.after(1.0).limit_s(1000)) == (30.0, 130.0, 32.5, 201.0)
    (tmp_path / "a.safetensors").write_bytes(bytes(30))
    (tmp_path / "b.safetensors").write_bytes(bytes(20))
    (tmp_path / "tokenizer.json").write_bytes(bytes(1000))
    monkeypatch.setattr(WeightHubConfig, "least_rate", 10.0)
    config = WeightHubConfig(slots=2, deadline_s=2.0)
    assert config.pace.limit_s(50) == 7.0
    assert config.first_version_s(weights_bytes(tmp_path)) == 600.0 + 5 * 5.0
    assert config.first_version_s(weights_bytes(tmp_path / "none")) == 600.0


@pytest.mark.parametrize(
    ("role", "waits"),
    [("generator", {"subscribe_unless"}), ("scorer", {"subscribe_unless", "wait_first"})],
)
def test_who_waits_for_the_first_version_counts_its_model(
    role: str, waits: set[str], tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, session = Mock(), Mock(stopping=threading.Event())
    receiver.wait_first.side_effect = StopAsyncIteration
    for service in (generator_service, scorer_service):
        monkeypatch.setattr(service, "Receiver", Mock(return_value=receiver))
    monkeypatch.setattr(WeightHubConfig, "least_rate", 10.0)
    overrides = [f"model.path={tiny_model_dir}", "scorer.device=cpu"]
    config = load_config(overrides=overrides, environ={})
    with suppress(StopAsyncIteration):  # as far as the test goes
        if role == "generator":
            generator_service._subscribe(session, config, OpenEngine(Mock(), Mock(), "cpu"))
        else:
            context = Mock(config=config, options={"stage": "logp"})
            scorer_service._score_logprobs(context, session)
    limit_s = 600.0 + 5 * weights_bytes(tiny_model_dir) / 10
    session.weights.assert_called_once_with(deadline_s=limit_s)
    limits = {name: args for name, args, _ in receiver.method_calls if name != "close"}
    assert limits.keys() == waits and all(limit_s in args for args in limits.values())


COMPRESSOR = delta.compressor()
EDGES = (1, 127, 128, 32_767, 32_768, 65_535, 65_536, 1 << 31)  # of widths
DIFFERENCES = st.sampled_from(EDGES) | st.integers(0, 2**32 - 1)


def encode(old: bytes, new: bytes, item: int, limit: int = 1 << 30) -> bytes | None:
    return delta.encode(memoryview(old), memoryview(new), item, limit, COMPRESSOR)


@settings(max_examples=60, deadline=None)
@given(
    item=st.sampled_from([2, 4]),
    count=st.integers(1, 3000),
    changes=st.lists(st.tuples(st.integers(0, 2999), DIFFERENCES), max_size=40),
    seed=st.integers(0, 99),
)
def test_every_bit_comes_back(
    item: int, count: int, changes: list[tuple[int, int]], seed: int
) -> None:
    """Apply deltas of random changes to words, NaNs and changed signs among them."""
    old = np.random.default_rng(seed).integers(0, 256, count * item, dtype=np.uint8).tobytes()
    words = np.frombuffer(old, f"<u{item}").copy()
    for place, difference in changes:
        at = place % count
        words[at] = (int(words[at]) + difference) % (1 << 8 * item)
    there_and_back(old, words.tobytes(), item)


def there_and_back(old: bytes, new: bytes, item: int) -> bytes:
    """Return the delta, which leads from `old` to `new`."""
    made = encode(old, new, item)
    assert made is not None
    target = bytearray(old)
    delta.apply(made, memoryview(target))
    assert target == new
    return made


@pytest.mark.parametrize(
    "places", [[0], [65_534], [65_535], [65_536], [99_999], [0, 99_999], [70_000, 70_001], []]
)
def test_gaps_beyond_16_bits(places: list[int]) -> None:
    old = np.zeros(100_000, np.uint16)
    new = old.copy()
    new[places] = 65535
    assert len(there_and_back(old.tobytes(), new.tobytes(), 2)) < 64


def test_what_does_not_pay_is_not_encoded() -> None:
    random = np.random.default_rng(0)
    old, new = (random.integers(0, 256, 1 << 16, dtype=np.uint8).tobytes() for _ in range(2))
    assert encode(old, new, 2, 1 << 15) is None
    new = old[:-2] + b"\x01\x02"
    made = there_and_back(old, new, 2)
    assert encode(old, new, 2, len(made)) is None, "it is no smaller"
    assert encode(old, new, 2, len(made) + 1) == made


def test_a_spoiled_delta_is_refused_or_stays_within_its_bucket() -> None:
    """Only the checksum shows the fault in the bucket; bytes around it are not touched."""
    old = bytes(range(256)) * 4
    new = bytearray(old)
    new[100], new[700] = 1, 2
    made = encode(old, bytes(new), 2)
    assert made is not None
    spoiled = [made[:at] for at in range(len(made))]
    for at, byte in enumerate(made):
        spoiled += [made[:at] + bytes([byte ^ b]) + made[at + 1 :] for b in (1, 16, 128, 255)]
    refused = wrong = 0
    guard = b"\xa5" * 64
    for candidate in spoiled:
        around = bytearray(guard + old + guard)
        try:
            delta.apply(candidate, memoryview(around)[64:-64])
        except WireError as error:
            refused += 1
            assert str(error)
            assert around[64:-64] == old, "a delta that is refused has changed nothing"
        else:
            wrong += around[64:-64] != new
        assert (around[:64], around[-64:]) == (guard, guard)
    assert refused > len(spoiled) / 2
    assert wrong, "or the checksum would not be needed"


def test_a_delta_that_leaves_its_bucket_is_refused() -> None:
    old = bytes(2048)
    made = encode(old, old[:-2] + b"\x01\x02", 2)
    assert made is not None
    shorter = bytearray(1024)
    with pytest.raises(WireError, match="leaves its bucket"):
        delta.apply(made, memoryview(shorter))
    assert shorter == bytes(1024)
