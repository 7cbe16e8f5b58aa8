"""Loads from a slot that others may write: a version that passes is that version, whole."""

import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from random import Random

import pytest
from fakes.hub_bench import LAYOUT, WAIT_S, Bench, Engine, content, publish, push, take

from umbra.proto.errors import PeerLostError
from umbra.services.weights.arena import Arena
from umbra.services.weights.manifest import build_manifest, checksum, checksums
from umbra.services.weights.publisher import Publisher
from umbra.services.weights.receiver import StagedVersion
from umbra.services.weights.verify import ChangedError, Checksums, Move, SlotGuard

TINY = build_manifest([("weights", "F32", [64])], 128)
LAPS = 100_000
WRITER = f"""
import sys, time
from umbra.services.weights.arena import Arena
size, laps = {TINY.total_bytes}, {LAPS}
arena = Arena.attach(sys.argv[1], slot_bytes=size)
data = arena.slot(0)
for lap in range(1, laps + 1):
    word = lap.to_bytes(8, "little")
    arena.begin(0)
    for start in range(0, size, 64):
        data[start : start + 64] = 8 * word
    arena.end(0)
    if lap % 100 == 0:
        time.sleep(0.0002)
"""


@pytest.fixture
def arena(run_id: str) -> Iterator[Arena]:
    made = Arena.create(run_id, "tiny", slot_bytes=TINY.total_bytes, slots=1)
    yield made
    made.unlink()
    made.close()


def version_at(number: int) -> bytes:
    return (number // 2).to_bytes(8, "little") * (TINY.total_bytes // 8)


def test_a_writer_that_laps_a_slow_reader_never_gives_it_a_torn_version(arena: Arena) -> None:
    """1. A process writes 100,000 versions into one slot. 2. This one reads it, with a pause."""
    data, number = arena.slot(0), arena.sequence(0)
    half = TINY.total_bytes // 2
    whole = torn = 0

    def read() -> None:
        nonlocal whole, torn
        begun = number[0]
        expected = version_at(begun)
        sums = checksums(TINY, memoryview(bytearray(expected)))
        guard = SlotGuard(number, arena.check, TINY, data, sums)
        if guard.is_overwritten or number[0] != begun:
            return
        taken = bytes(data[:half])
        time.sleep(0)
        taken += bytes(data[half:])
        by_sequence = not guard.is_overwritten
        assert taken == expected or not by_sequence
        try:
            guard.sums.copy(0, len(taken), lambda start, end: memoryview(taken)[start:end])
            guard.verify()
        except ChangedError:
            torn += 1
        else:
            assert by_sequence and guard.is_verified
            whole += 1

    with subprocess.Popen([sys.executable, "-c", WRITER, str(arena.path)]) as writer:
        while writer.poll() is None:
            read()
    assert writer.returncode == 0
    assert number[0] == 2 * LAPS
    assert torn, "the writer was never met"
    read()
    assert whole


@pytest.mark.parametrize("threads", [1, 3])
def test_checksums_are_those_of_the_bytes_that_are_copied(threads: int) -> None:
    """Bytes are hashed as they were moved; those not seen on their way are read from memory."""
    random = Random(0)
    for _ in range(200):
        shapes = [[random.randrange(90)] for _ in range(random.randrange(1, 9))] + [[1]]
        layout = [(str(i), "BF16", shape) for i, shape in enumerate(shapes)]
        manifest = build_manifest(layout, random.choice([128, 192, 4096]))
        meant = memoryview(bytearray(random.randbytes(manifest.total_bytes)))
        data = memoryview(bytearray(meant))
        sums = Checksums(manifest, data, threads)
        for entry in manifest.tensors:
            at, end = entry.offset, entry.offset + entry.nbytes
            if random.random() < 0.2:
                sums.until(end)
                continue
            rows = random.randrange(entry.nbytes + 1)  # some of them are another rank's
            for begin, stop in ((at, at + rows), (at + rows, end)):
                sums.copy(begin, stop, moving(meant, data, begin))
        pieces = sums.pieces()
        assert [(start, end, checksum(meant[start:end])) for start, end, _ in pieces] == pieces
        assert sums.result() == checksums(manifest, meant) == sums.result()


def moving(source: memoryview, target: memoryview, origin: int) -> Move:
    """A move of bytes that are changed in the target while it goes on."""

    def move(start: int, end: int) -> memoryview:
        target[origin + start : origin + end] = source[origin + start : origin + end]
        return source[origin + start : origin + end]

    return move


@pytest.fixture
def publisher(bench: Bench) -> Publisher:
    bench.start()
    return bench.publisher()


@pytest.fixture
def engine(bench: Bench, publisher: Publisher) -> Engine:
    return Engine(bench.receiver("gen-0"))


def damage(staged: StagedVersion) -> None:
    assert isinstance(staged.data, memoryview)
    staged.data[-70] ^= 1


def test_a_version_that_waits_too_long_is_overwritten_and_not_loaded(
    bench: Bench, publisher: Publisher, engine: Engine
) -> None:
    """The trainer waits for its slot no longer than for a load, and nobody is dropped."""
    push(publisher, 0, engine.receiver)
    publish(publisher, 1)
    staged = take(engine.receiver)
    for version in (2, 3):
        publish(publisher, version)
    assert (engine.load(staged), engine.loads) == (None, 0)
    assert engine.load(take(engine.receiver)) == 3
    bench.finish()
    assert bench.hub.protocol.counters["dropped"] == 0
    assert [row["version"] for row in bench.rows()] == [0, 3]


def test_a_version_that_is_overwritten_under_its_load_gives_way_to_the_next(
    publisher: Publisher, engine: Engine
) -> None:
    push(publisher, 0, engine.receiver)

    def overwrite(staged: StagedVersion) -> None:
        if staged.version == 1:
            publish(publisher, 2)
            publish(publisher, 3)

    engine.under = overwrite
    publish(publisher, 1)
    assert (engine.load(take(engine.receiver)), engine.loads) == (3, 2)


@pytest.mark.parametrize("when", ["published", "staged", "loaded"])
def test_bytes_that_something_else_changed_are_never_served(
    publisher: Publisher, engine: Engine, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    """1. A version is damaged in shared memory, in the end under its load. 2. The next one is
    published."""
    slot = publisher.slot(0, WAIT_S)
    slot[:] = content(0)
    sums = checksums(LAYOUT, slot)
    slot[-70] ^= when == "published"
    publisher.publish(0, 0.0, sums)
    staged = take(engine.receiver)
    if when == "staged":
        damage(staged)

    def go_on(staged: StagedVersion) -> None:
        if engine.loads == 1:
            if when == "loaded":
                damage(staged)
            publish(publisher, 1)

    engine.under = go_on
    assert engine.load(staged) == 1
    assert "version 0 changed under the load: checksum of bucket" in caplog.text


def test_an_engine_with_half_a_version_ends_with_the_run(
    publisher: Publisher, engine: Engine
) -> None:
    engine.under = damage
    engine.stopping.set()
    publish(publisher, 0)
    with pytest.raises(PeerLostError, match="version 0 changed under the load: checksum of bucket"):
        engine.load(take(engine.receiver))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_has_threads_of_its_own_for_checksums() -> None:
    data = content(1, TINY.total_bytes)
    wanted = sums_of(data)  # this process has threads now
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as fork:
        assert fork.submit(sums_of, data).result(WAIT_S) == wanted


def sums_of(data: bytes) -> list[int]:
    return Checksums(TINY, memoryview(bytearray(data)), threads=2).result()
