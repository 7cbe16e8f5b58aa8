"""A version: its layout in buckets, and loads from a slot that others may write."""

import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from math import prod
from random import Random

import msgspec
import pytest
import xxhash
from fakes.hub_bench import LAYOUT, WAIT_S, Bench, Engine, content, publish, push, take
from fakes.slowness import until
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from umbra.proto.bounds import BUCKETS, DIMENSIONS, OWNERS
from umbra.proto.errors import DeadlineError, PeerLostError, UsageError, WireError
from umbra.proto.messages import RegisterManifest
from umbra.proto.records import AdapterFacts, Manifest
from umbra.services.weight_hub.push import ATTEMPTS
from umbra.services.weights.arena import Arena
from umbra.services.weights.manifest import (
    ALIGN_BYTES,
    ITEM_BYTES,
    build_manifest,
    check_dtype,
    check_manifest,
    checksum,
    checksums,
    held_whole,
    owned_buckets,
)
from umbra.services.weights.publisher import Publisher
from umbra.services.weights.receiver import StagedVersion
from umbra.services.weights.verify import ChangedError, Checksums, Move, SlotGuard

Tensors = list[tuple[str, str, list[int]]]


@st.composite
def layouts(draw: st.DrawFn) -> Tensors:
    shapes = st.lists(st.integers(0, 40), min_size=0, max_size=3)
    drawn = draw(
        st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), shapes), min_size=1, max_size=12)
    )
    named = [(f"layer.{index}", dtype, shape) for index, (dtype, shape) in enumerate(drawn)]
    return [*named, ("last", "F32", [3])]


@given(layouts(), st.sampled_from([128, 200, 1024, 4096, 1 << 20]))
def test_tensors_and_buckets_cover_the_slot_in_order(tensors: Tensors, bound: int) -> None:
    manifest = build_manifest(tensors, bound)
    assert [(t.name, t.dtype, t.shape) for t in manifest.tensors] == tensors
    end = 0
    for entry in manifest.tensors:
        assert entry.offset % ALIGN_BYTES == 0
        assert end <= entry.offset < end + ALIGN_BYTES
        assert entry.nbytes == prod(entry.shape) * ITEM_BYTES[entry.dtype]
        end = entry.offset + entry.nbytes
    starts = [start for start, _ in manifest.buckets]
    ends = [stop for _, stop in manifest.buckets]
    assert starts == [0, *ends[:-1]]
    assert ends[-1] == manifest.total_bytes >= end
    assert all(0 < stop - start <= bound for start, stop in manifest.buckets)
    check_manifest(manifest)
    for cut in ends[:-1]:
        for entry in manifest.tensors:
            if entry.offset < cut < entry.offset + entry.nbytes:  # between rows, if they fit
                row = entry.nbytes // entry.shape[0]
                unit = row if row <= bound - ALIGN_BYTES else ITEM_BYTES[entry.dtype]
                assert (cut - entry.offset) % unit == 0


@st.composite
def owned_layouts(draw: st.DrawFn) -> tuple[Tensors, dict[str, list[tuple[int, int]]]]:
    tensors = draw(layouts())
    owners: dict[str, list[tuple[int, int]]] = {}
    for name, _, shape in tensors:
        if draw(st.booleans()):
            rows = shape[0] if shape else 1
            ends = [*sorted(draw(st.lists(st.integers(0, rows), max_size=3))), rows]
            owners[name] = [(end, draw(st.integers(0, 3))) for end in ends]
    return tensors, owners


@given(owned_layouts(), st.sampled_from([128, 200, 1024, 1 << 20]))
def test_every_row_is_in_buckets_of_its_owner(
    layout: tuple[Tensors, dict[str, list[tuple[int, int]]]], bound: int
) -> None:
    tensors, owners = layout
    manifest = build_manifest(tensors, bound, owners)
    check_manifest(manifest)
    assert all(0 < end - start <= bound for start, end in manifest.buckets)
    plain = build_manifest(tensors, bound)
    assert (manifest.tensors, manifest.total_bytes) == (plain.tensors, plain.total_bytes)
    if not any(manifest.owners):
        assert manifest.owners == []
    holders = manifest.owners or [0] * len(manifest.buckets)
    for entry in manifest.tensors:
        rows = entry.shape[0] if entry.shape else 1
        row_bytes = entry.nbytes // max(1, rows)
        begin = 0
        for end, owner in owners.get(entry.name, [(rows, 0)]):
            first, last = entry.offset + begin * row_bytes, entry.offset + end * row_bytes
            for (start, stop), holder in zip(manifest.buckets, holders, strict=True):
                if max(start, first) < min(stop, last):
                    assert holder == owner
            begin = end
    by_owner = owned_buckets(manifest)
    assert sorted(b for owned in by_owner.values() for b in owned) == list(range(len(holders)))
    assert all(holders[b] == owner for owner, owned in by_owner.items() for b in owned)


@pytest.mark.parametrize(
    ("owners", "reason"),
    [
        ([(3, 0)], "has 4"),
        ([(5, 0)], "has 4"),
        ([], "has 4"),
        ([(3, 0), (2, 1), (4, 0)], "has 4"),
        ([(-1, 0), (4, 1)], "has 4"),
        ([(4, OWNERS)], "owner of a is not one of"),
        ([(4, -1)], "owner of a is not one of"),
    ],
)
def test_owners_of_rows_that_there_are_not_are_refused(
    owners: list[tuple[int, int]], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        build_manifest([("a", "F32", [4, 4])], 1024, {"a": owners})


def test_layouts_of_nothing_are_refused() -> None:
    for tensors in ([], [("a", "F32", [0])]):
        with pytest.raises(ValueError, match="at least one tensor that is not empty"):
            build_manifest(tensors, 1024)


def test_a_manifest_from_the_wire_is_checked() -> None:
    good = build_manifest([("a", "F32", [300]), ("b", "F32", [2])], 1024)
    check_manifest(msgspec.json.decode(msgspec.json.encode(good), type=Manifest))
    divided = build_manifest([("a", "F32", [4, 64])], 1024, {"a": [(2, 0), (4, 1)]})
    assert divided.owners == [0, 1]
    whole = held_whole(divided)
    check_manifest(whole)
    assert held_whole(good) is good and whole == replace(divided, owners=[], digest=whole.digest)
    first, second = good.tensors
    bad = [
        (replace(good, digest="0" * 32), "digest"),
        (replace(good, buckets=good.buckets[1:]), "buckets"),
        (replace(good, buckets=[good.buckets[0], good.buckets[0]]), "buckets"),
        (replace(good, buckets=[(0, 0), *good.buckets]), "buckets"),
        (replace(good, buckets=good.buckets[:-1]), "total_bytes"),
        (replace(good, buckets=[]), "total_bytes"),
        (replace(good, total_bytes=good.total_bytes + 1), "total_bytes"),
        (replace(good, tensors=[first, replace(second, offset=1 << 40)]), "total_bytes"),
        (replace(good, tensors=[replace(first, nbytes=4), second]), "tensors"),
        (replace(good, tensors=[replace(first, shape=[-1, -300]), second]), "tensors"),
        (replace(good, tensors=[first, replace(second, offset=64)]), "tensors"),
        (replace(good, tensors=[first, replace(second, dtype="X")]), "tensors"),
        (replace(good, tensors=[first, replace(second, name="a")]), "tensors"),
        (replace(good, adapter=AdapterFacts(base="b", rank=4, alpha=8.0)), "digest"),
        (replace(divided, owners=[0]), "owners"),
        (replace(divided, owners=[0, 1, 1]), "owners"),
        (replace(divided, owners=[0, OWNERS]), "owners"),
        (replace(divided, owners=[0, 0]), "owners"),
        (replace(divided, owners=[1, 0]), "digest"),
        (replace(divided, owners=[]), "digest"),
    ]
    for manifest, path in bad:
        with pytest.raises(WireError, match="manifest") as caught:
            check_manifest(manifest)
        assert caught.value.path == path


@pytest.mark.parametrize("shape", [None, [0]])
def test_a_manifest_of_nothing_is_refused(shape: list[int] | None) -> None:
    """With the digest that it has: the hub looks in it for the type of a bucket's elements."""
    good = build_manifest([("a", "F32", [64])], 1024)
    tensors = [replace(good.tensors[0], shape=shape, nbytes=0)] if shape else []
    digest = xxhash.xxh3_128_hexdigest(msgspec.json.encode([tensors, good.buckets]))
    with pytest.raises(WireError, match="do not cover the tensors"):
        check_manifest(replace(good, tensors=tensors, digest=digest))


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": [2**62] * 4},
        {"shape": [1] * (DIMENSIONS + 1)},
        {"shape": [-1]},
        {"dtype": "X9", "nbytes": -16},
        {"nbytes": 2**64 - 1},
        {"offset": -1},
        {"name": "x" * 300},
    ],
)
def test_the_decoder_refuses_a_tensor_that_no_model_has(wrong: dict[str, object]) -> None:
    tensor = {"name": "a", "dtype": "F32", "shape": [16], "offset": 0, "nbytes": 64, **wrong}
    manifest = {"tensors": [tensor], "buckets": [[0, 64]], "total_bytes": 64, "digest": ""}
    packed = msgspec.msgpack.encode({"manifest": manifest})
    with pytest.raises(msgspec.ValidationError, match=r"manifest.tensors\[0\]"):
        msgspec.msgpack.decode(packed, type=RegisterManifest)


def test_more_buckets_than_a_manifest_has_are_refused() -> None:
    with pytest.raises(UsageError, match=r"raise weight_hub\.bucket_bytes"):
        build_manifest([("a", "F16", [BUCKETS, 128])], 128)


def test_a_trainer_that_serves_another_dtype_is_refused() -> None:
    """With buffers that are float32 whatever is served."""
    manifest = build_manifest([("a", "BF16", [64]), ("buffer", "F32", [64])], 4096)
    check_dtype(manifest, "bfloat16")
    with pytest.raises(UsageError, match=r"does not serve float16.*set weight_hub\.dtype"):
        check_dtype(manifest, "float16")


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
        guard = SlotGuard(number, arena.check)
        if guard.is_overwritten or number[0] != begun:
            return
        taken = bytes(data[:half])
        time.sleep(0)
        taken += bytes(data[half:])
        try:
            guard.verify()
        except ChangedError:
            torn += taken != version_at(begun)
        else:
            assert taken == version_at(begun)
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


def test_a_version_that_is_damaged_in_its_slot_reaches_no_engine(
    bench: Bench, publisher: Publisher, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    slot = publisher.slot(0, WAIT_S)
    slot[:] = content(0)
    sums = checksums(LAYOUT, slot)
    slot[-70] ^= 1
    publisher.publish(0, 0.0, sums)
    counters = bench.hub.protocol.counters
    until(lambda: counters["failed"] == ATTEMPTS and counters["dropped"] == 1, lambda: counters)
    assert engine.receiver.poll() is None
    publish(publisher, 1)
    assert engine.load(take(engine.receiver)) == 1
    assert "plane shm: checksum of bucket" in caplog.text


def test_an_engine_with_half_a_version_ends_with_the_run(
    publisher: Publisher, engine: Engine
) -> None:
    def overwrite(staged: StagedVersion) -> None:
        assert staged.guard is not None
        staged.guard._sequence[0] += 1

    engine.under = overwrite
    engine.stopping.set()
    publish(publisher, 0)
    told = "version 0 changed under the load: its slot was written again, and the run stops"
    with pytest.raises(PeerLostError, match=told):
        engine.load(take(engine.receiver))


STILL_WRITES = """
import sys
from umbra.services.weights.arena import Arena
arena = Arena.attach(sys.argv[1], slot_bytes=int(sys.argv[2]))
arena.lock(int(sys.argv[3]))
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_slot_that_a_trainer_of_before_still_writes_is_given_to_no_other(
    bench: Bench, publisher: Publisher
) -> None:
    """1. A process writes a slot. 2. The trainer gets the other one, and no second. 3. It dies."""
    publisher.slot(0, WAIT_S)
    path, slot = publisher.place
    argv = [sys.executable, "-c", STILL_WRITES, path, str(LAYOUT.total_bytes), str(slot)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"locked\n"
        successor = bench.publisher(name="trainer-2")
        publish(successor, 1)
        assert bench.hub.protocol.newest is not None
        assert bench.hub.protocol.newest.slot != slot
        with pytest.raises(DeadlineError, match="another trainer still writes one"):
            successor.slot(2, 0.3)
        writer.kill()
    successor.slot(2, WAIT_S)
    assert successor.place[1] == slot


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_has_threads_of_its_own_for_checksums() -> None:
    data = content(1, TINY.total_bytes)
    wanted = sums_of(data)  # this process has threads now
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as fork:
        assert fork.submit(sums_of, data).result(WAIT_S) == wanted


def sums_of(data: bytes) -> list[int]:
    return Checksums(TINY, memoryview(bytearray(data)), threads=2).result()
