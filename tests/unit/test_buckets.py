"""Handing out buckets on credit, chains of deltas and of relays, putting versions together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from umbra.proto.errors import WireError
from umbra.proto.messages import Credit, FetchBuckets, Prepare
from umbra.proto.records import Piece
from umbra.services.weights import delta
from umbra.services.weights.gpu import worker_process
from umbra.services.weights.manifest import build_manifest, checksums, item_bytes
from umbra.services.weights.planes import tcp
from umbra.services.weights.planes.assembly import FAILURES, Assembly, Holdings
from umbra.services.weights.planes.bucket_store import (
    SMALLEST_FRAME,
    BucketStore,
    Delta,
    Outbox,
    Part,
)
from umbra.services.weights.planes.tcp import RelayChain

LAYOUT = build_manifest([("a", "BF16", [256, 16]), ("b", "F32", [64, 16])], 4096)
COUNT = len(LAYOUT.buckets)
ME = b"me"


def version(fill: int) -> tuple[memoryview, list[int]]:
    data = memoryview(bytearray([fill] * LAYOUT.total_bytes))
    return data, checksums(LAYOUT, data)


def store() -> BucketStore:
    return BucketStore(LAYOUT, lambda: None)


def order(
    sums: list[int], credit: int = 1 << 30, bases: list[list[int]] | None = None
) -> FetchBuckets:
    return FetchBuckets(
        number=1, wanted=list(range(COUNT)), contents=sums, bases=bases or [],
        frame_bytes=1024, credit_bytes=credit,
    )  # fmt: skip


def drain(outbox: Outbox) -> list[tuple[Piece, bytes]]:
    taken: list[tuple[Piece, bytes]] = []
    while (message := outbox.next(ME)) is not None:
        body, raw = message
        assert sum(map(len, raw)) <= 1024
        taken += [(piece, bytes(data)) for piece, data in zip(body.pieces, raw, strict=True)]
    return taken


def test_items_of_mixed_buckets_are_the_smallest() -> None:
    mixed = build_manifest([("a", "F32", [64]), ("b", "BF16", [64]), ("c", "F32", [4096])], 1024)
    assert item_bytes(mixed) == [2, *[4] * (len(mixed.buckets) - 1)]


def test_an_order_is_filled_within_its_credit() -> None:
    held, (data, sums) = store(), version(1)
    outbox = Outbox(COUNT, held.parts)
    held.offer(0, data, sums)
    outbox.order(ME, order(sums, credit=2048))
    first = drain(outbox)
    assert sum(len(raw) for _, raw in first) == 2048
    outbox.credit(ME, Credit(number=99, credit_bytes=1 << 30))  # of another order
    assert drain(outbox) == []
    outbox.credit(ME, Credit(number=1, credit_bytes=1 << 30))
    rest = drain(outbox)
    assert b"".join(raw for _, raw in first + rest) == bytes(data)
    assert outbox.open == []


def test_what_has_not_arrived_is_sent_when_it_has() -> None:
    held, (data, sums) = store(), version(1)
    outbox = Outbox(COUNT, held.parts)
    outbox.order(ME, order(sums))
    assert drain(outbox) == []
    held.offer(0, data, sums, range(len(sums)))
    assert drain(outbox) == []
    for bucket in range(COUNT):
        held.arrived(0, bucket)
        assert {piece.bucket for piece, _ in drain(outbox)} == {bucket}


def test_a_slot_that_is_written_anew_is_not_handed_out() -> None:
    held, (data, sums) = store(), version(1)
    held.offer(0, data, sums)
    held.withdraw(0)
    assert held.parts(0, sums[0], [], 1024) is None


@pytest.mark.parametrize(
    "bad",
    [
        {"wanted": [COUNT]},
        {"wanted": [-1]},
        {"contents": []},
        {"bases": [[1, 2]]},
        {"frame_bytes": 0},
        {"frame_bytes": SMALLEST_FRAME - 1},
        {"frame_bytes": 2**63},
    ],
)
def test_orders_that_make_no_sense_are_refused(bad: dict[str, object]) -> None:
    given = {"number": 1, "wanted": [0], "contents": [1], "frame_bytes": 1024, "credit_bytes": 1}
    with pytest.raises(WireError):
        Outbox(COUNT, store().parts).order(ME, FetchBuckets(**{**given, **bad}))  # type: ignore[arg-type]


def test_deltas_lead_from_what_is_held_to_what_is_wanted() -> None:
    held = store()
    for base, result in ((1, 2), (2, 3), (3, 4)):
        held.encoded(0, Delta(base, result, b"x"))
    parts = held.parts(0, 4, [2], 1024)
    assert parts is not None
    assert [(part.piece.base, part.piece.result) for part in parts] == [(2, 3), (3, 4)]
    parts = held.parts(0, 3, [9, 1], 1024)
    assert parts is not None
    assert [part.piece.result for part in parts] == [2, 3]
    assert held.parts(0, 4, [7], 1024) is None  # not even the bytes are here
    held.encoded(0, None)
    assert held.parts(0, 4, [2], 1024) is None


def test_chains_that_grow_too_long_are_cut() -> None:
    held = store()
    size = LAYOUT.buckets[0][1]
    for base in range(1, 5):
        held.encoded(0, Delta(base, base + 1, bytes(size // 5)))
    assert held.parts(0, 5, [1], 1024) is None
    assert held.parts(0, 5, [3], 1024) is not None


def test_one_who_has_a_base_waits_for_the_delta_and_others_do_not() -> None:
    held, (data, sums) = store(), version(1)
    held.offer(0, data, sums)
    held.encode_later([0])
    assert held.parts(0, sums[0], [77], 1024) is None
    assert held.parts(0, sums[0], [0], 1024) is not None
    held.encoded(0, None)
    assert held.parts(0, sums[0], [77], 1024) is not None


def test_the_chain_is_linked_anew() -> None:
    chain = RelayChain("hub")
    for name in "abc":
        chain.join(name, f"at-{name}")
    assert [chain.source(name) for name in "abcx"] == ["hub", "at-a", "at-b", "hub"]
    chain.leave("b")
    assert chain.source("c") == "at-a"
    assert chain.broken("c") == "a"
    assert [chain.source(name) for name in "c"] == ["hub"]
    assert chain.broken("c") == ""
    chain.join("a", "at-a2")
    assert [chain.source(name) for name in "ca"] == ["hub", "at-c"]


def holdings() -> Holdings:
    return Holdings(LAYOUT, [memoryview(bytearray(LAYOUT.total_bytes)) for _ in range(2)])


def fill(assembly: Assembly, data: memoryview, sums: list[int], buckets: range) -> None:
    for bucket in buckets:
        start, end = LAYOUT.buckets[bucket]
        assert assembly.take(Piece(bucket=bucket, result=sums[bucket]), data[start:end])


def test_what_is_there_already_is_not_ordered() -> None:
    have, (data, sums) = holdings(), version(3)
    broken_off = Assembly(have, 0, sums, deltas=False)
    assert broken_off.order(1, 1024, 1024).wanted == list(range(COUNT))
    fill(broken_off, data, sums, range(2))
    again = Assembly(have, 0, sums, deltas=False)
    assert again.missing == set(range(2, COUNT))
    again.order(2, 1024, 1024)
    fill(again, data, sums, range(2, COUNT))
    other = Assembly(have, 1, sums, deltas=False)  # copied from the first buffer
    assert not other.missing
    assert have.buffers[1] == data


def test_memory_that_somebody_changed_is_noticed() -> None:
    have, (data, sums) = holdings(), version(3)
    assembly = Assembly(have, 0, sums, deltas=False)
    assembly.order(1, 1024, 1024)
    fill(assembly, data, sums, range(COUNT))
    have.buffers[0][5] ^= 1
    assert Assembly(have, 0, sums, deltas=False).missing == {0}


def test_a_wrong_bucket_is_ordered_again_without_deltas_and_then_given_up() -> None:
    have, (data, sums) = holdings(), version(3)
    first = Assembly(have, 0, sums, deltas=True)
    first.order(1, 1024, 1024)
    fill(first, data, sums, range(COUNT))
    _, wanted = version(4)
    assembly = Assembly(have, 0, wanted, deltas=True)
    assert assembly.order(1, 1024, 1024).bases == [sums]
    assert not assembly.take(Piece(bucket=0, base=sums[0], result=wanted[0]), b"no delta")
    assert 0 not in assembly.awaited
    assert assembly.order(2, 1024, 1024).bases[0][0] == 0
    start, end = LAYOUT.buckets[0]
    bad = Piece(bucket=0, result=wanted[0])
    for _ in range(FAILURES - 2):
        assert not assembly.take(bad, data[start:end])
        assembly.order(3, 1024, 1024)
    with pytest.raises(WireError, match="again and again"):
        assembly.take(bad, data[start:end])


def test_a_delta_of_a_base_that_is_not_held_touches_nothing_and_is_ordered_again() -> None:
    """A link of a chain: what it leads to is not what is wanted, so no checksum would tell."""
    have, (data, sums) = holdings(), version(3)
    first = Assembly(have, 0, sums, deltas=True)
    first.order(1, 1024, 1024)
    fill(first, data, sums, range(COUNT))
    start, end = LAYOUT.buckets[0]
    later, _ = version(4)
    link = delta.advance(
        memoryview(bytearray(data[start:end])), later[start:end], 2, 1 << 20, delta.compressor()
    )
    assert link is not None
    _, wanted = version(5)
    assembly = Assembly(have, 0, wanted, deltas=True)
    assembly.order(2, 1024, 1024)
    unheld = 77
    assert not assembly.take(Piece(bucket=0, base=unheld, result=sums[0] + 1), link)
    assert assembly.corrupted == 1
    assert 0 not in assembly.awaited
    assert have.buffers[0] == data
    assert assembly.order(3, 1024, 1024).bases[0][0] == 0, "ordered with its bytes"


def test_pieces_out_of_place_are_refused() -> None:
    have, (data, sums) = holdings(), version(3)
    assembly = Assembly(have, 0, sums, deltas=True)
    assembly.order(1, 1024, 1024)
    for piece, raw in (
        (Piece(bucket=0, result=sums[0], offset=8), data[:8]),
        (Piece(bucket=0, result=sums[0], offset=-8), data[:8]),
        (Piece(bucket=0, result=sums[0]), data),
        (Piece(bucket=0, result=sums[0]), b""),
    ):
        with pytest.raises(WireError, match="out of order"):
            assembly.take(piece, raw)
    assert not assembly.take(Piece(bucket=COUNT + 5, result=1), data[:8])


def test_small_frames_of_a_large_bucket_are_made_one_by_one() -> None:
    """An order for frames of the least size costs its answer's message, not the whole bucket."""
    made = 0

    def parts(bucket: int, content: int, _bases: Sequence[int], size: int) -> Iterator[Part]:
        nonlocal made
        for number in range(1 << 20):
            made += 1
            yield Part(Piece(bucket=bucket, result=content, offset=number * size), bytes(size))

    outbox = Outbox(1, parts)
    fetch = FetchBuckets(
        number=1, wanted=[0], contents=[1], frame_bytes=SMALLEST_FRAME, credit_bytes=2**63
    )
    outbox.order(ME, fetch)
    message = outbox.next(ME)
    assert message is not None
    assert len(message[1]) == 1
    assert made == 2  # what was sent, and a look at the next


SHARED = build_manifest([("a", "F32", [6, 64])], 512, {"a": [(2, 0), (4, 1), (6, 2)]})


def test_each_host_hands_out_its_own_buckets_and_no_others() -> None:
    data = memoryview(bytes(range(256)) * 6)
    sums = checksums(SHARED, data)
    held = BucketStore(SHARED, lambda: None)
    held.offer(0, data, sums, absent={0, 2})
    assert held.parts(0, sums[0], [], 1024) is None
    assert held.parts(2, sums[2], [], 1024) is None
    parts = held.parts(1, sums[1], [], 1024)
    assert parts is not None
    (part,) = parts
    assert part.raw == data[512:1024]


@pytest.mark.parametrize(
    ("sources", "asked", "error"),
    [
        (
            ["tcp://hub:1", "tcp://one:1", "tcp://two:1"],
            [("tcp://hub:1", "weight_hub"), ("tcp://one:1", "part"), ("tcp://two:1", "part")],
            "",
        ),
        (["tcp://hub:1", "tcp://one:1"], [], "nobody hands out the buckets of trainer host 2"),
        (["tcp://hub:1", "", "tcp://two:1"], [], "nobody hands out the buckets of trainer host 1"),
        ([], [("tcp://hub:1", "weight_hub")], ""),
    ],
)
def test_a_receiver_asks_each_source_for_the_key_of_what_it_is(
    monkeypatch: pytest.MonkeyPatch, sources: list[str], asked: list[tuple[str, str]], error: str
) -> None:
    connected: list[tuple[str, str]] = []
    fetched: list[set[int]] = []

    class Source:
        def __init__(self, *_: Any) -> None: ...

        def connect(self, endpoint: str, server: str) -> None:
            connected.append((endpoint, server))

        def close(self) -> None: ...

    def run(pairs: list[tuple[Any, Any]]) -> Iterator[int | None]:
        fetched.extend(set(transfer._gathering.missing) for _, transfer in pairs)
        return iter(())

    monkeypatch.setattr(tcp, "BucketSource", Source)
    monkeypatch.setattr(tcp, "run_together", run)
    memory = memoryview(bytearray(SHARED.total_bytes))
    receiver = tcp.TcpReceiver("gen-0", SHARED, [memory], 1024)
    sums = [1] * len(SHARED.buckets)
    prepare = Prepare(
        epoch=1, version=0, slot=0, checksums=sums, source="tcp://hub:1", sources=sources
    )
    receipt = worker_process.result(receiver.receive(prepare, 0))
    assert receipt.error == error
    if not error:
        assert connected == asked
        assert fetched == ([{0}, {1}, {2}] if sources else [{0, 1, 2}])
