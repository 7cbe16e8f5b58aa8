"""Connections for buckets: who gets in, what of a record counts, what strangers cost."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import pytest
from fakes.hub_bench import WAIT_S
from fakes.waiting import until

from umbra.proto.deadline import LEAST_RATE, Pace
from umbra.proto.errors import StartupError, UsageError, WireError
from umbra.proto.messages import FetchBuckets
from umbra.proto.net.zap import Refusals
from umbra.services.weights.manifest import build_manifest, checksums
from umbra.services.weights.planes import bucket_server
from umbra.services.weights.planes.bucket_fetch import BrokenError, BucketConnection, Received
from umbra.services.weights.planes.bucket_records import (
    HEAD,
    TAG_BYTES,
    TICKET_BYTES,
    Piece,
    Seal,
    pack_head,
    seal_of,
    ticket,
    unpack_head,
)
from umbra.services.weights.planes.bucket_server import BucketConnections, BucketOrder
from umbra.services.weights.planes.bucket_store import BucketStore

LAYOUT = build_manifest([("a", "BF16", [300, 1024])], 1 << 18)
COUNT = len(LAYOUT.buckets)
DATA = memoryview(os.urandom(LAYOUT.total_bytes))
SUMS = checksums(LAYOUT, DATA)
PACE = Pace(WAIT_S, LEAST_RATE)
KEY = bytes(range(32))
WAYS = pytest.mark.parametrize("keyed", [True, False])


@pytest.fixture
def refusals() -> Refusals:
    return Refusals()


@pytest.fixture
def door(refusals: Refusals) -> Iterator[BucketConnections]:
    door = BucketConnections("tcp://127.0.0.1:*", PACE, refusals)
    yield door
    door.close()


def ordered(
    door: BucketConnections,
    key: bytes = KEY,
    *,
    keyed: bool = True,
    who: bytes = b"me",
    offered: bool = True,
    valid_s: float = 60.0,
) -> BucketStore:
    """An order for all buckets, of which there are none if they are not `offered`."""
    store = BucketStore(LAYOUT, door.notify)
    if offered:
        store.offer(0, DATA, SUMS)
    message = FetchBuckets(
        number=1, wanted=list(range(COUNT)), contents=SUMS, frame_bytes=1 << 17, key=key
    )
    seal = seal_of(key, keyed=keyed)
    valid_until = time.monotonic() + valid_s
    door.expect(BucketOrder(who, message, store, seal, ticket(key), valid_until))
    return store


def connected(door: BucketConnections, key: bytes = KEY, *, keyed: bool = True) -> BucketConnection:
    seal = seal_of(key, keyed=keyed)
    return BucketConnection(("127.0.0.1", door.port), key, seal)


def next_of(
    connection: BucketConnection, room: Callable[[Piece, int], memoryview | None]
) -> Received:
    steps = connection.next(room)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def nowhere(_piece: Piece, _nbytes: int) -> None:
    return None


class Memory:
    """Where a version is put together."""

    def __init__(self) -> None:
        self.data = memoryview(bytearray(LAYOUT.total_bytes))

    def room(self, piece: Piece, nbytes: int) -> memoryview:
        start = LAYOUT.buckets[piece.bucket][0] + piece.offset
        return self.data[start : start + nbytes]

    def fill(self, connection: BucketConnection) -> None:
        left = LAYOUT.total_bytes
        while left:
            left -= len(next_of(connection, self.room).data)


@WAYS
def test_all_that_was_ordered_comes_and_then_the_end(
    door: BucketConnections, refusals: Refusals, keyed: bool
) -> None:
    ordered(door, keyed=keyed)
    with closing(connected(door, keyed=keyed)) as connection:
        memory = Memory()
        memory.fill(connection)
        assert memory.data == DATA
        with pytest.raises(BrokenError, match="was closed"):
            next_of(connection, memory.room)
    assert not refusals.counts


@WAYS
def test_what_comes_later_is_sent_then(door: BucketConnections, keyed: bool) -> None:
    store = ordered(door, keyed=keyed, offered=False)
    with closing(connected(door, keyed=keyed)) as connection:
        assert next(connection.next(nowhere)) is None, "nothing came, and nobody waits for ever"
        store.offer(0, DATA, SUMS, absent=range(1, COUNT))
        for bucket in range(1, COUNT):
            store.arrived(0, bucket)
        memory = Memory()
        memory.fill(connection)
    assert memory.data == DATA


def test_sealed_bytes_are_seen_by_nobody(door: BucketConnections) -> None:
    ordered(door)
    with socket.create_connection(("127.0.0.1", door.port)) as seen:
        seen.sendall(ticket(KEY))
        head = seen.recv(HEAD.size, socket.MSG_WAITALL)
        piece, nbytes = unpack_head(head)
        sent = seen.recv(nbytes, socket.MSG_WAITALL)
    assert (piece.bucket, nbytes) == (0, 1 << 17)
    assert sent != bytes(DATA[:nbytes])


def records(count: int = 3) -> list[bytes]:
    """The first records of a connection, as they are on the wire."""
    seal = Seal(KEY)
    found: list[bytes] = []
    for bucket in range(count):
        raw = bytes([bucket]) * 100
        head = pack_head(Piece(bucket, 7, 0, 0), len(raw))
        sealed = memoryview(bytearray(len(raw) + TAG_BYTES))
        seal.seal(head, raw, sealed)
        found.append(head + sealed)
    return found


def opened(sent: Sequence[bytes], key: bytes = KEY) -> list[Received]:
    """What a receiver takes of what it is sent."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        seal = Seal(key)
        port = listening.getsockname()[1]
        with closing(BucketConnection(("127.0.0.1", port), key, seal)) as connection:
            there, _ = listening.accept()
            with there:
                assert there.recv(TICKET_BYTES, socket.MSG_WAITALL) == ticket(key)
                there.sendall(b"".join(sent))
            return [next_of(connection, nowhere) for _ in sent]


def test_records_in_their_order_are_taken() -> None:
    came = opened(records())
    assert [bytes(one.data) for one in came] == [bytes([n]) * 100 for n in range(3)]
    assert [one.piece.bucket for one in came] == [0, 1, 2]


@pytest.mark.parametrize("chosen", [[0, 0], [1], [0, 2]], ids=["repeated", "late", "left out"])
def test_no_record_is_repeated_or_left_out_unnoticed(chosen: list[int]) -> None:
    sent = records()
    with pytest.raises(WireError, match="not what was sealed"):
        opened([sent[index] for index in chosen])


@pytest.mark.parametrize("place", [0, 4, 12, 20, HEAD.size, HEAD.size + 99, -1])
def test_a_spoiled_byte_spoils_its_record(place: int) -> None:
    (sent,) = records(1)
    spoiled = bytearray(sent)
    spoiled[place] ^= 1
    with pytest.raises(WireError, match="not what was sealed"):
        opened([bytes(spoiled)])


def test_a_record_under_another_key_is_not_taken() -> None:
    with pytest.raises(WireError, match="not what was sealed"):
        opened(records(1), key=bytes(32))


@pytest.mark.parametrize("kept", [1, HEAD.size, HEAD.size + 50, -1])
def test_a_record_that_ends_early_is_a_broken_connection(kept: int) -> None:
    (sent,) = records(1)
    with pytest.raises(BrokenError):
        opened([sent[:kept]])


def test_a_head_cannot_ask_for_more_memory_than_a_record_has() -> None:
    with pytest.raises(WireError, match="a record of 67108865 bytes"):
        unpack_head(pack_head(Piece(0, 1, 0, 0), (64 << 20) + 1))


def test_a_key_is_as_long_as_keys_are() -> None:
    with pytest.raises(WireError, match="a key has 32 bytes, not 31"):
        seal_of(bytes(31), keyed=True)


def ended(connection: socket.socket) -> bool:
    """Whether the door closes the connection."""
    connection.settimeout(WAIT_S)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "shown", [bytes(TICKET_BYTES), ticket(bytes(32)), b"GET / HTTP/1.1\r\n" * 2]
)
def test_a_stranger_gets_nothing(door: BucketConnections, refusals: Refusals, shown: bytes) -> None:
    ordered(door)
    with socket.create_connection(("127.0.0.1", door.port)) as stranger:
        stranger.sendall(shown)
        assert ended(stranger)
    assert refusals.counts == {
        "a connection with a ticket of no order, from 127.0.0.1 on buckets": 1
    }
    with closing(connected(door)) as connection:
        Memory().fill(connection)  # whose order it is, is not disturbed


def test_a_ticket_opens_one_connection(door: BucketConnections, refusals: Refusals) -> None:
    ordered(door)
    with closing(connected(door)) as connection:
        Memory().fill(connection)
    with closing(connected(door)) as again, pytest.raises(BrokenError):
        next_of(again, nowhere)
    assert refusals.counts.total() == 1


def test_a_silent_stranger_is_sent_away(
    monkeypatch: pytest.MonkeyPatch, refusals: Refusals
) -> None:
    monkeypatch.setattr(bucket_server, "SHOW_S", 0.05)
    monkeypatch.setattr(bucket_server, "LOOK_S", 0.01)
    with closing(BucketConnections("tcp://127.0.0.1:*", PACE, refusals)) as door:
        with socket.create_connection(("127.0.0.1", door.port)) as stranger:
            stranger.sendall(ticket(KEY)[:-1])
            assert ended(stranger)
    assert refusals.counts == {
        "a connection that showed no ticket in time, from 127.0.0.1 on buckets": 1
    }


def test_a_ticket_that_nobody_shows_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_server, "LOOK_S", 0.01)
    with closing(BucketConnections("tcp://127.0.0.1:*", PACE, Refusals())) as door:
        ordered(door, valid_s=0.0)
        until(lambda: not door._orders and not door._expected, "it is still valid")


def test_strangers_crowd_out_only_one_another(
    monkeypatch: pytest.MonkeyPatch, door: BucketConnections, refusals: Refusals
) -> None:
    """Of the address with the most connections the oldest goes; who shows its ticket is no more."""
    monkeypatch.setattr(bucket_server, "UNKNOWN_PEERS", 3)
    ordered(door)
    with closing(socket.socket()) as other:
        other.bind(("127.0.0.2", 0))
        other.connect(("127.0.0.1", door.port))
        crowd = [socket.create_connection(("127.0.0.1", door.port)) for _ in range(6)]
        assert all(ended(stranger) for stranger in crowd[:4])
        other.sendall(ticket(KEY))
        other.settimeout(WAIT_S)
        assert len(other.recv(HEAD.size, socket.MSG_WAITALL)) == HEAD.size
        for stranger in crowd:
            stranger.close()
    (what,) = (text for text in refusals.counts if text.startswith("one too many"))
    assert refusals.counts[what] == 4


def test_no_more_connections_than_there_may_be(
    monkeypatch: pytest.MonkeyPatch, door: BucketConnections
) -> None:
    monkeypatch.setattr(bucket_server, "ORDERS", 1)
    ordered(door)
    ordered(door, bytes(32))  # of the same receiver: it replaces its order
    with pytest.raises(WireError, match="1 connections fetch already"):
        ordered(door, who=b"another")


def test_a_new_order_ends_the_connection_of_the_one_before(door: BucketConnections) -> None:
    ordered(door, offered=False)
    with closing(connected(door)) as before:
        assert next(before.next(nowhere)) is None
        until(lambda: door._threads, "nobody was let in")
        ordered(door, bytes(32))
        with pytest.raises(BrokenError):
            next_of(before, nowhere)
    with closing(connected(door, bytes(32))) as after:
        Memory().fill(after)


def test_who_does_not_read_is_given_up(refusals: Refusals) -> None:
    """Its thread ends when its time for the bytes is over."""
    with closing(BucketConnections("tcp://127.0.0.1:*", Pace(0.05, 1e9), refusals)) as door:
        big = build_manifest([("a", "BF16", [16 << 20])], 16 << 20)
        data = memoryview(bytes(big.total_bytes))
        store = BucketStore(big, door.notify)
        store.offer(0, data, [1, 2])
        order = FetchBuckets(
            number=1, wanted=[0, 1], contents=[1, 2], frame_bytes=16 << 20, key=KEY
        )
        seal = seal_of(KEY, keyed=False)
        valid_until = time.monotonic() + WAIT_S
        door.expect(BucketOrder(b"me", order, store, seal, ticket(KEY), valid_until))
        with socket.socket() as idle:
            idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            idle.connect(("127.0.0.1", door.port))
            idle.sendall(ticket(KEY))
            until(lambda: not door._orders and not door._threads, "it still waits")


def test_who_has_gone_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch, door: BucketConnections
) -> None:
    monkeypatch.setattr(bucket_server, "LOOK_S", 0.01)
    ordered(door, offered=False)
    with closing(connected(door)):
        until(lambda: door._threads, "nobody was let in")
    until(lambda: not door._threads, "its thread is there still")
    assert not door._orders


def test_an_address_that_is_taken_or_none(door: BucketConnections, refusals: Refusals) -> None:
    with pytest.raises(StartupError, match="is in use"):
        BucketConnections(f"tcp://127.0.0.1:{door.port}", PACE, refusals)
    for endpoint in ("tcp://192.0.2.1:*", "tcp://127.0.0.1:many"):
        with pytest.raises(UsageError, match="cannot bind"):
            BucketConnections(endpoint, PACE, refusals)
