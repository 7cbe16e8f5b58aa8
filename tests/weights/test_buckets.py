"""Handing out buckets on credit, chains of deltas and of relays, putting versions together."""

import threading
import time
from collections.abc import Iterator
from random import Random
from unittest.mock import Mock

import msgspec
import pytest
from fakes.hub_bench import WAIT_S

from umbra.proto.errors import WireError
from umbra.proto.messages import Prepare, Ready, Subscribe
from umbra.proto.records import BucketsAt
from umbra.services.config import WeightHubConfig
from umbra.services.weights import delta
from umbra.services.weights.arena import Arena
from umbra.services.weights.gpu.worker import result
from umbra.services.weights.manifest import build_manifest, checksums, item_bytes
from umbra.services.weights.planes import bucket_fetch
from umbra.services.weights.planes.bucket_fetch import (
    Assembly,
    BucketSource,
    Holdings,
    TcpReceiver,
)
from umbra.services.weights.planes.bucket_server import BucketStore, StoredVersion, TcpHub
from umbra.services.weights.planes.bucket_wire import Piece

LAYOUT = build_manifest([("a", "BF16", [256, 16]), ("b", "F32", [64, 16])], 4096)
COUNT = len(LAYOUT.buckets)


def version(fill: int) -> tuple[memoryview, list[int]]:
    data = memoryview(bytearray([fill] * LAYOUT.total_bytes))
    return data, checksums(LAYOUT, data)


def prepare(slot: int, sums: list[int] | None = None) -> Prepare:
    return Prepare(epoch=1, version=0, slot=slot, checksums=sums or [1] * COUNT)


def store() -> BucketStore:
    return BucketStore(LAYOUT, lambda: None)


def test_items_of_mixed_buckets_are_the_smallest() -> None:
    mixed = build_manifest([("a", "F32", [64]), ("b", "BF16", [64]), ("c", "F32", [4096])], 1024)
    assert item_bytes(mixed) == [2, *[4] * (len(mixed.buckets) - 1)]


def test_what_has_not_arrived_is_handed_out_when_it_has() -> None:
    held, (data, sums) = store(), version(1)
    assert held.parts(0, sums[0], [], 1024) is None
    held.offer(StoredVersion(0, data, sums, {0, 2}))
    assert held.parts(0, sums[0], [], 1024) is held.parts(2, sums[2], [], 1024) is None
    held.arrived(0, 0)
    for bucket, (start, end) in enumerate(LAYOUT.buckets[:2]):
        parts = held.parts(bucket, sums[bucket], [], 1000)
        assert parts is not None and max(len(raw) for _, raw in parts) == 1000
        assert b"".join(bytes(raw) for _, raw in parts) == bytes(data[start:end])


def test_deltas_lead_from_what_is_held_to_what_is_wanted() -> None:
    held = store()
    for base in (1, 2, 3):
        held.encoded(0, (Piece(0, base + 1, base), b"x"))
    parts = held.parts(0, 4, [2], 1024)
    assert parts is not None
    assert [(piece.base, piece.result) for piece, _ in parts] == [(2, 3), (3, 4)]
    parts = held.parts(0, 3, [9, 1], 1024)
    assert parts is not None
    assert [piece.result for piece, _ in parts] == [2, 3]
    assert held.parts(0, 4, [7], 1024) is None  # not even the bytes are here
    held.encoded(0, None)
    assert held.parts(0, 4, [2], 1024) is None
    start, end = LAYOUT.buckets[1]
    for base in range(1, 5):
        held.encoded(1, (Piece(1, base + 1, base), bytes((end - start) // 5)))
    assert held.parts(1, 5, [1], 1024) is None, "the chain is longer than half of its bucket"
    assert held.parts(1, 5, [3], 1024) is not None


def test_deltas_are_of_two_versions_while_both_are_in_their_slots() -> None:
    """A bucket that changed too much, or has lost its base, is sent whole; later it is tried."""
    hub = TcpHub("tcp://127.0.0.1:*", WeightHubConfig(delta="always"))
    hub.layout(Arena.anonymous(slot_bytes=LAYOUT.total_bytes, slots=2), LAYOUT)
    random, sums = Random(0), [0] * COUNT

    def is_delta(slot: int, changed: int, *granted: int) -> bool:
        """Publish a version; whether who has the one before gets its first bucket as a delta."""
        nonlocal sums
        for one in granted:
            hub.granted(one)
        assert hub._arena is not None
        data, base = hub._arena.slot(slot), sums[0]
        data[:] = hub._arena.slot(1 - slot)
        data[:changed] = random.randbytes(changed)
        sums = checksums(LAYOUT, data)
        hub.complete("gen-0", prepare(slot, sums))
        assert hub.server.store is not None
        while (parts := hub.server.store.parts(0, sums[0], [base], 4096)) is None:
            time.sleep(0.001)
        return any(piece.base for piece, _ in parts)

    assert not is_delta(0, 4)
    assert is_delta(1, 4, 1)
    assert not is_delta(0, 4096, 0), "it does not pay"
    assert not is_delta(1, 4, 1), "nor is it tried again at once"
    assert is_delta(0, 4, 0)
    assert not is_delta(1, 4, 1, 0)
    assert is_delta(0, 4, 0)
    before = hub.server.store
    assert before is not None and before._read
    hub.layout(Arena.anonymous(slot_bytes=LAYOUT.total_bytes, slots=2), LAYOUT)
    assert not before._read and before._executor._shutdown, "it would read the arena before"
    assert not is_delta(0, 4)
    hub.close()


def test_a_link_is_slow_by_a_whole_version_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then deltas are made, if they are not off."""
    publish, whole = Mock(), LAYOUT.total_bytes
    monkeypatch.setattr(BucketStore, "publish", publish)
    for delta_mode in ("auto", "off"):
        config = WeightHubConfig(delta=delta_mode)  # type: ignore[arg-type]
        hub = TcpHub("tcp://127.0.0.1:*", config)
        hub.layout(Arena.anonymous(slot_bytes=whole, slots=1), LAYOUT)
        hub.subscribed("a", "1", Subscribe(host="a", planes=["tcp"]))
        for seconds, nbytes in ((0.0, whole), (1e6, whole - 1), (1e6, whole)):
            slow = seconds > 0 and nbytes == whole
            ready = Ready(epoch=1, version=0, wire_s=seconds, stage_s=0, wire_bytes=nbytes)
            hub.staged("a", ready)
            assert hub.links_are_slow == slow
            hub.complete("a", prepare(0))
            assert publish.call_args.kwargs["deltas"] == (slow and delta_mode == "auto")
        hub.subscribed("a", "2", Subscribe(host="a", planes=["tcp"]))
        assert hub.links_are_slow, "a process that starts again has the same link"
        hub.left("a")
        assert not hub.links_are_slow
        hub.close()


def test_a_slot_is_withdrawn_once_nobody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the deltas that are being made, and for no others; those are sent whole."""
    begun: list[int] = []
    reading, go = threading.Event(), threading.Event()

    def encode(_old: memoryview, new: memoryview, *_: object) -> None:
        begun.append(len(new))
        reading.set()
        assert go.wait(WAIT_S)

    monkeypatch.setattr(delta, "encode", encode)
    held, versions = store(), [version(1), version(2)]
    (_, old), (_, new) = versions
    for slot, (data, sums) in enumerate(versions):
        held.publish(StoredVersion(slot, data, sums), deltas=True)
    assert reading.wait(WAIT_S)
    withdrawing = threading.Thread(target=held.withdraw, args=(0,))
    withdrawing.start()
    withdrawing.join(0.05)  # as much as it needs where nothing holds it up
    assert withdrawing.is_alive()
    assert held.parts(2, new[2], [old[2]], 1024) is None, "whoever has a base waits for the delta"
    assert held.parts(2, new[2], [0], 1024) is not None
    go.set()
    withdrawing.join(WAIT_S)
    assert len(begun) <= held._threads
    assert held.parts(0, old[0], [], 1024) is None
    assert all(held.parts(b, new[b], [old[b]], 1024) for b in range(COUNT))
    held.close()


def test_the_chain_is_linked_anew() -> None:
    hub = TcpHub("tcp://127.0.0.1:*", WeightHubConfig(delta="off"))
    hub.layout(Arena.anonymous(slot_bytes=LAYOUT.total_bytes, slots=1), LAYOUT)

    def joins(name: str, where: str) -> None:
        buckets = BucketsAt(endpoint=where, key=bytes(32))
        hub.subscribed(name, "1", Subscribe(host=name, planes=["tcp"], serves="x", buckets=buckets))

    def sources(names: str) -> list[str]:
        given = [hub.complete(name, prepare(0)) for name in names]
        return [one.sources[0].endpoint.replace(hub.buckets.endpoint, "hub") for one in given]

    def lost(name: str) -> None:
        hub.staged(name, Ready(epoch=1, version=0, wire_s=0, stage_s=0, source_lost=True))

    for name in "abc":
        joins(name, f"at-{name}")
    assert sources("abcx") == ["hub", "at-a", "at-b", "hub"]
    hub.left("b")
    assert sources("c") == ["at-a"]
    lost("c")
    assert (list(hub.chain), sources("c")) == (["c"], ["hub"])
    lost("c")
    assert list(hub.chain) == ["c"], "it has lost the hub"
    joins("a", "at-a2")
    assert sources("ca") == ["hub", "at-c"]
    joins("c", "at-c2")
    assert list(hub.chain) == ["a", "c"], "one that starts again has nothing to hand on"
    assert sources("cac") == ["hub", "hub", "at-a2"], "a waited for c"
    hub.close()


def holdings() -> Holdings:
    return Holdings(LAYOUT, [memoryview(bytearray(LAYOUT.total_bytes)) for _ in range(2)])


def take(assembly: Assembly, piece: Piece, raw: bytes | memoryview) -> bool:
    """Add a piece that has come, in its place if it has one."""
    if (room := assembly.room(piece, len(raw))) is not None:
        room[:] = raw
    return assembly.take(piece, raw)


def fill(assembly: Assembly, data: memoryview, sums: list[int], buckets: range) -> None:
    for bucket in buckets:
        start, end = LAYOUT.buckets[bucket]
        assert take(assembly, Piece(bucket, sums[bucket], 0, 0), data[start:end])


def test_what_is_there_already_is_not_ordered() -> None:
    have, (data, sums) = holdings(), version(3)
    broken_off = Assembly(have, 0, sums)
    assert broken_off.order(1024).wanted == list(range(COUNT))
    fill(broken_off, data, sums, range(2))
    again = Assembly(have, 0, sums)
    assert again.missing == set(range(2, COUNT))
    again.order(1024)
    fill(again, data, sums, range(2, COUNT))
    other = Assembly(have, 1, sums)  # copied from the first buffer
    assert not other.missing
    assert have.buffers[1] == data
    for buffer in have.buffers:
        buffer[5] ^= 1  # somebody else's write
    assert Assembly(have, 0, sums).missing == {0}


def test_a_bucket_in_pieces_comes_from_its_beginning_again_and_once() -> None:
    have, data = holdings(), memoryview(bytearray(Random(0).randbytes(LAYOUT.total_bytes)))
    sums = checksums(LAYOUT, data)
    assembly = Assembly(have, 0, sums)
    assembly.order(1024)
    assert not take(assembly, Piece(0, sums[0], 0, 0), data[:1000])
    assembly.order(1024)  # the connection broke
    end = LAYOUT.buckets[0][1]
    pieces = [(at, min(end, at + 1000)) for at in range(0, end, 1000)]
    assert len(pieces) > 2
    complete = [take(assembly, Piece(0, sums[0], 0, at), data[at:to]) for at, to in pieces]
    assert complete == [False] * (len(pieces) - 1) + [True]
    assert (assembly.missing, have.buffers[0][:end]) == (set(range(1, COUNT)), data[:end])
    for base in (0, 5):
        assert not take(assembly, Piece(0, sums[0], base, 0), data[:8]), "it is complete"
    assert have.buffers[0][:end] == data[:end]


def holding(fill_byte: int) -> tuple[Holdings, memoryview, list[int]]:
    """Holdings of a version, and that."""
    have, (data, sums) = holdings(), version(fill_byte)
    assembly = Assembly(have, 0, sums)
    assembly.order(1024)
    fill(assembly, data, sums, range(COUNT))
    return have, data, sums


def test_a_wrong_bucket_is_ordered_whole_the_next_time() -> None:
    have, data, sums = holding(3)
    _, wanted = version(4)
    assembly = Assembly(have, 0, wanted)
    assert assembly.order(1024).bases == [sums]
    with pytest.raises(WireError, match="not a delta"):
        take(assembly, Piece(0, wanted[0], sums[0], 0), b"no delta")
    again = Assembly(have, 0, wanted)
    assert again.order(1024).bases == [[0, *sums[1:]]]
    start, end = LAYOUT.buckets[1]
    with pytest.raises(WireError, match="checksum of bucket 1"):
        take(again, Piece(1, wanted[1], 0, 0), data[start:end])
    assert again.missing == set(range(COUNT))
    assert Assembly(have, 0, wanted).order(1024).bases == [[0, 0, *sums[2:]]]
    smaller = set[bool]()  # whatever the checksum of other contents is, they are refused
    for other, contents in map(version, range(4, 12)):
        smaller.add(contents[0] < sums[0])
        fresh = Assembly(holdings(), 0, sums)
        with pytest.raises(WireError, match="checksum of bucket 0"):
            take(fresh, Piece(0, sums[0], 0, 0), other[slice(*LAYOUT.buckets[0])])
        assert 0 in fresh.missing
    assert smaller == {True, False}


def test_a_delta_of_a_base_that_is_not_held_touches_nothing() -> None:
    """A link of a chain to another version than the wanted one: no checksum would tell."""
    have, data, sums = holding(3)
    start, end = LAYOUT.buckets[0]
    later, _ = version(4)
    link = delta.encode(data[start:end], later[start:end], 2, 1 << 20, delta.compressor())
    assert link is not None
    assembly = Assembly(have, 0, version(5)[1])
    assembly.order(1024)
    unheld = 77
    with pytest.raises(WireError, match="from a base that is not held"):
        take(assembly, Piece(0, sums[0] + 1, unheld, 0), link)
    assert have.buffers[0] == data
    assert assembly.order(1024).bases[0][0] == 0, "ordered with its bytes"


def test_pieces_out_of_place_are_refused() -> None:
    have, (data, sums) = holdings(), version(3)
    assembly = Assembly(have, 0, sums)
    assembly.order(1024)
    for piece, raw in (
        (Piece(0, sums[0], 0, 8), data[:8]),
        (Piece(0, sums[0], 0, -8), data[:8]),
        (Piece(0, sums[0], 0, 0), data),
        (Piece(0, sums[0], 0, 0), b""),
    ):
        with pytest.raises(WireError, match="out of order"):
            take(assembly, piece, raw)
    assert not take(assembly, Piece(COUNT + 5, 1, 0, 0), data[:8])


SHARED = build_manifest([("a", "F32", [6, 64])], 512, {"a": [(2, 0), (4, 1), (6, 2)]})


@pytest.mark.parametrize(
    ("sources", "fetched", "error"),
    [
        (["tcp://hub:1", "tcp://one:1", "tcp://two:1"], [{0}, {1}, {2}], ""),
        (["tcp://hub:1", "tcp://one:1"], [], "no source has the buckets of trainer host 2"),
        (["tcp://hub:1", "", "tcp://two:1"], [], "no source has the buckets of trainer host 1"),
        (["tcp://hub:1"], [{0, 2}, {1}], ""),
        ([], [], "no source has the buckets of trainer host 0"),
    ],
)
def test_a_receiver_fetches_from_each_host_what_that_has(
    monkeypatch: pytest.MonkeyPatch, sources: list[str], fetched: list[set[int]], error: str
) -> None:
    found: list[set[int]] = []

    def fetch(fetches: list[tuple[BucketSource, Assembly]]) -> Iterator[int | None]:
        found.extend(set(assembly.missing) for _, assembly in fetches)
        return iter(())

    monkeypatch.setattr(bucket_fetch, "fetch_together", fetch)
    memory = memoryview(bytearray(SHARED.total_bytes))
    receiver = TcpReceiver(SHARED, [memory], WeightHubConfig())
    message = prepare(0, [1] * len(SHARED.buckets))
    at = [BucketsAt(endpoint=endpoint, key=bytes(48)) for endpoint in sources]
    receipt = result(receiver.receive(msgspec.structs.replace(message, sources=at)))
    assert receipt.error == error
    assert error or found == fetched
