"""Connections for buckets: who gets in, what of a record counts, what unknown peers cost."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from fakes.hub_bench import PACE, WAIT_S
from fakes.keys import keys as keys
from fakes.keys import of
from fakes.slowness import until

from umbra.proto.deadline import Pace
from umbra.proto.errors import StartupError, UsageError, WireError
from umbra.proto.net.keys import OPEN, Security
from umbra.proto.records import BucketsAt
from umbra.services.weights.manifest import build_manifest, checksums
from umbra.services.weights.planes import bucket_fetch, bucket_server, bucket_wire
from umbra.services.weights.planes.bucket_fetch import Assembly, BucketSource, Holdings
from umbra.services.weights.planes.bucket_server import BucketServer, BucketStore, StoredVersion
from umbra.services.weights.planes.bucket_wire import (
    HEAD,
    HELLO_BYTES,
    LOOK_S,
    ORDER,
    BucketOrder,
    Piece,
    Records,
    grant,
)

LAYOUT = build_manifest([("a", "BF16", [300, 1024])], 1 << 18)
COUNT = len(LAYOUT.buckets)
DATA = memoryview(os.urandom(LAYOUT.total_bytes))
SUMS = checksums(LAYOUT, DATA)
VERSION = StoredVersion(0, DATA, SUMS)
SECRET = bytes(range(32))
BIND = "tcp://127.0.0.1:*"


@contextmanager
def serving(
    security: Security = OPEN, *versions: StoredVersion
) -> Iterator[tuple[BucketServer, BucketStore]]:
    with closing(BucketServer(BIND, security, PACE)) as server:
        store = server.serve(LAYOUT)
        for version in versions:
            store.offer(version)
        yield server, store


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname())
        return ours, listening.accept()[0]


def at(server: BucketServer, secret: bytes = b"") -> BucketsAt:
    return BucketsAt(endpoint=server.endpoint, key=grant(secret or server.secret))


def raw(server: BucketServer) -> socket.socket:
    host, _, port = server.endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), WAIT_S)


@contextmanager
def let_in(server: BucketServer) -> Iterator[tuple[Records, socket.socket]]:
    """A connection that has shown its grant."""
    with raw(server) as connection:
        records = Records(connection, lambda: None)
        records.begin(at(server).key, sealed=False)
        yield records, connection


def order(records: Records, data: bytes) -> None:
    records.send(Piece(ORDER), data)
    records.flush()


def encoded(wanted: list[int], contents: list[int], frame_bytes: int) -> bytes:
    found = BucketOrder(wanted=wanted, contents=contents, frame_bytes=frame_bytes)
    return msgspec.msgpack.encode(found)


def ended(connection: socket.socket) -> bool:
    connection.settimeout(WAIT_S)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def assembly() -> tuple[Assembly, memoryview]:
    memory = memoryview(bytearray(LAYOUT.total_bytes))
    return Assembly(Holdings(LAYOUT, [memory]), 0, SUMS), memory


@contextmanager
def source_of(at: BucketsAt, *, sealed: bool = False) -> Iterator[BucketSource]:
    with closing(BucketSource(1 << 17, sealed=sealed)) as source:
        source.use(at)
        yield source


def fetch(source: BucketSource, stopping: threading.Event | None = None) -> list[int]:
    """Fetch a version; the buckets in the order in which they came."""
    came: list[int] = []
    fetching, memory = assembly()
    source.fetch(fetching, came.append, stopping or threading.Event())
    assert memory == DATA or stopping
    return came


@pytest.mark.parametrize("keyed", [True, False])
def test_what_is_ordered_comes_as_soon_as_it_is_there(keys: Path, keyed: bool) -> None:
    """One connection serves one version after the other."""
    security = of(keys, "weight_hub") if keyed else OPEN
    coming = StoredVersion(0, DATA, SUMS, set(range(1, COUNT)))
    with (
        serving(security, coming) as (server, store),
        source_of(at(server), sealed=keyed) as source,
    ):
        for bucket in range(1, COUNT):
            threading.Timer(0.1 * bucket, store.arrived, (0, bucket)).start()
        assert fetch(source) == list(range(COUNT))
        (peer,) = server._peers
        assert fetch(source) == list(range(COUNT))
        assert list(server._peers) == [peer]
        peer.end()  # as a source does that is started again
        assert fetch(source) == list(range(COUNT))
        assert not server.refusals.counts


def test_who_gives_up_stops_at_once() -> None:
    with serving() as (server, store), source_of(at(server)) as source:
        stopping = threading.Event()
        threading.Timer(0.2, stopping.set).start()
        assert fetch(source, stopping) == []
        until(lambda: not server._peers, "its thread is there still")
        store.offer(VERSION)
        assert fetch(source)


def test_a_source_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hangs; or its port is closed; or it is well, and has no bucket."""
    monkeypatch.setattr(bucket_fetch, "STILL_S", 0.2)
    monkeypatch.setattr(bucket_fetch, "LOST_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        where = BucketsAt(endpoint=f"tcp://127.0.0.1:{hanging.getsockname()[1]}", key=grant(SECRET))
        with source_of(where) as source:
            with pytest.raises(bucket_fetch.SourceLostError, match="is silent"):
                fetch(source)
            hanging.close()
            named = f"{where.endpoint} is gone, or cannot be reached .*: open that port"
            with pytest.raises(bucket_fetch.SourceLostError, match=named):
                fetch(source)
    monkeypatch.setattr(bucket_fetch, "STILL_S", WAIT_S)
    monkeypatch.setattr(bucket_fetch, "SILENT_S", 0.1)
    monkeypatch.setattr(bucket_server, "BEAT_S", 0.1)
    with serving() as (server, _), source_of(at(server)) as source:
        with pytest.raises(WireError, match="no bucket came within"):
            fetch(source)


def opened(change: Callable[[list[bytes]], Sequence[bytes]]) -> list[bytes]:
    """Return the records that a receiver takes of three that were changed on their way."""
    ours, theirs = pair()
    taken: list[bytes] = []
    with ours:
        receiver = Records(ours, lambda: None)
        begun = threading.Thread(
            target=receiver.begin, args=(grant(SECRET),), kwargs={"sealed": True}
        )
        begun.start()
        source = Records(theirs, lambda: None)
        source.admit(SECRET, sealed=True)
        begun.join(WAIT_S)
        for bucket in range(3):
            source.send(Piece(bucket, 7), bytes([bucket]) * 100)
        sent, size = bytes(source._waiting), len(source._waiting) // 3
        with theirs:
            changed = change([sent[i * size : (i + 1) * size] for i in range(3)])
            theirs.sendall(b"".join(changed))
        for _ in changed:
            piece, data = receiver.next()
            assert bytes(data) == bytes([piece.bucket]) * 100
            taken.append(bytes(data))
    return taken


def spoiled(place: int) -> Callable[[list[bytes]], Sequence[bytes]]:
    def change(sent: list[bytes]) -> list[bytes]:
        first = bytearray(sent[0])
        first[place] ^= 1
        return [bytes(first)]

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda sent: [sent[0], sent[0]],
        lambda sent: [sent[1]],
        lambda sent: [sent[0], sent[2]],
        *(spoiled(place) for place in (0, 4, 12, 20, HEAD.size, HEAD.size + 99, -1)),
    ],
)
def test_no_record_is_changed_repeated_or_left_out_unnoticed(
    change: Callable[[list[bytes]], Sequence[bytes]],
) -> None:
    assert len(opened(lambda sent: sent)) == 3, "as they were sent"
    with pytest.raises(WireError, match="not what was sealed"):
        opened(change)


@pytest.mark.parametrize("kept", [1, HEAD.size, HEAD.size + 50, -1])
def test_a_record_that_ends_early_is_a_broken_connection(kept: int) -> None:
    with pytest.raises(ConnectionError):
        opened(lambda sent: [sent[0][:kept]])


@contextmanager
def tapped(
    server: BucketServer, change: Callable[[bytes], bytes] = bytes
) -> Iterator[tuple[BucketsAt, list[bytearray]]]:
    """A proxy, and what was said over each of its connections: by the receiver, by the server.

    What the server says is changed first; without bytes, the connection is cut.
    """
    said: list[bytearray] = []

    def copy(source: socket.socket, sink: socket.socket, change: Callable[[bytes], bytes]) -> None:
        kept = bytearray()
        said.append(kept)
        with suppress(OSError):  # the other side is gone
            while data := change(source.recv(1 << 16)):
                kept += data
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with suppress(OSError):
            while True:
                ours = stack.enter_context(tap.accept()[0])
                theirs = stack.enter_context(raw(server))
                for direction in ((ours, theirs, bytes), (theirs, ours, change)):
                    threads.append(threading.Thread(target=copy, args=direction))
                    threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as tap, ExitStack() as stack:
        threads = [threading.Thread(target=serve)]
        threads[0].start()
        port = tap.getsockname()[1]
        try:
            yield BucketsAt(endpoint=f"tcp://127.0.0.1:{port}", key=at(server).key), said
        finally:
            tap.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(WAIT_S)


def test_sealed_bytes_are_seen_by_nobody(keys: Path) -> None:
    """Nor do the bytes that let a receiver in do so again: its records are sealed afresh."""
    with serving(of(keys, "weight_hub"), VERSION) as (server, _):
        with tapped(server) as (where, said), source_of(where, sealed=True) as source:
            assert fetch(source)
        asked, sent = sorted(said, key=len)
        assert len(sent) > LAYOUT.total_bytes and bytes(DATA[:64]) not in sent
        with raw(server) as again:
            again.sendall(asked)
            again.shutdown(socket.SHUT_WR)
            assert len(again.recv(1 << 20, socket.MSG_WAITALL)) == 16, "its nonce, and no bucket"


@pytest.mark.parametrize("mode", ["flip", "cut"])
def test_what_is_spoiled_on_the_wire_is_fetched_again(mode: str) -> None:
    """A wrong byte ends a fetch, and a broken connection does not; only missing buckets come."""
    left = LAYOUT.total_bytes * 3 // 4  # in the second bucket, whatever comes at once

    def spoil(data: bytes) -> bytes:
        nonlocal left
        left -= len(data)
        if not -len(data) <= left < 0:
            return data
        return bytes([data[0] ^ 0x40]) + data[1:] if mode == "flip" else b""

    fetching, memory = assembly()
    with serving(OPEN, VERSION) as (server, _), tapped(server, spoil) as (where, said):
        with source_of(where) as source:
            if mode == "flip":
                with pytest.raises(WireError, match="checksum of bucket"):
                    source.fetch(fetching, int, threading.Event())
            source.fetch(fetching, int, threading.Event())
    assert memory == DATA and len(said) == 4, "it connected again"
    assert fetching.wire_bytes < LAYOUT.total_bytes * 7 / 4


def test_a_head_cannot_ask_for_more_memory_than_a_record_has() -> None:
    ours, theirs = pair()
    with ours, theirs:
        theirs.sendall(HEAD.pack(0, 1, 0, 0, (64 << 20) + 1))
        with pytest.raises(WireError, match="a record of 67108865 bytes"):
            Records(ours, lambda: None).next()


@pytest.mark.parametrize(
    "bad",
    [
        {"wanted": [COUNT]},
        {"wanted": [-1]},
        {"contents": []},
        {"bases": [[1, 2]]},
        {"frame_bytes": 0},
        {"frame_bytes": bucket_wire.SMALLEST_FRAME - 1},
        {"frame_bytes": 2**63},
    ],
)
def test_orders_that_make_no_sense_are_refused(bad: dict[str, object]) -> None:
    given = {"wanted": [0], "contents": [1], "frame_bytes": 1024}
    BucketOrder(**given).check(COUNT)  # type: ignore[arg-type]
    with pytest.raises(WireError):
        BucketOrder(**{**given, **bad}).check(COUNT)  # type: ignore[arg-type]


def test_bytes_that_are_no_order_end_the_connection() -> None:
    with serving() as (server, _), let_in(server) as (records, connection):
        order(records, b"\xc1")
        _, said = records.next()
        assert b"malformed request" in bytes(said)
        assert ended(connection)


@pytest.mark.parametrize("shown", [bytes(HELLO_BYTES), b"GET / HTTP/1.1\r\n" * 4])
def test_an_outsider_gets_nothing(shown: bytes) -> None:
    with serving(OPEN, VERSION) as (server, _):
        with raw(server) as outsider:
            outsider.sendall(shown)
            assert ended(outsider)
        named = "a connection without a grant, from 127.0.0.1 on buckets"
        assert server.refusals.counts == {named: 1}
        with source_of(at(server, SECRET)) as source:  # a grant of another source
            with pytest.raises(WireError, match=r"was closed|reset"):
                fetch(source)
            source.use(at(server))
            assert fetch(source)


def test_a_silent_outsider_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_server, "SHOW_S", 0.05)
    with serving() as (server, _), raw(server) as outsider:
        outsider.sendall(bytes(HELLO_BYTES - 1))
        assert ended(outsider)
        until(lambda: server.refusals.counts.total() == 1, "it is not counted")


def test_a_slow_hello_is_waited_for_and_a_known_peer_is_never_late() -> None:
    with serving(OPEN, VERSION) as (server, _), raw(server) as connection:
        time.sleep(4 * LOOK_S)
        records = Records(connection, lambda: None)
        records.begin(grant(server.secret), sealed=False)
        (peer,) = server._peers
        peer.until = 0.0
        time.sleep(4 * LOOK_S)
        order(records, encoded([0], [SUMS[0]], 1 << 18))
        piece, data = records.next()
        assert (piece.bucket, data) == (0, DATA[slice(*LAYOUT.buckets[0])])


def test_outsiders_crowd_out_only_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the address with the most connections the oldest goes; who shows its grant is no more."""
    monkeypatch.setattr(bucket_server, "UNKNOWN_PEERS", 3)
    with serving() as (server, _), closing(socket.socket()) as other:
        other.bind(("127.0.0.2", 0))
        host, _, port = server.endpoint.removeprefix("tcp://").rpartition(":")
        other.connect((host, int(port)))
        crowd = [raw(server) for _ in range(6)]
        assert all(ended(outsider) for outsider in crowd[:4])
        Records(other, lambda: None).begin(at(server).key, sealed=False)
        for outsider in crowd:
            outsider.close()


def test_no_more_connections_than_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_server, "CONNECTIONS", 1)
    with serving(OPEN, VERSION) as (server, _):
        with source_of(at(server)) as one, source_of(at(server)) as other:
            assert fetch(one)
            with pytest.raises(WireError):
                fetch(other)


def test_who_does_not_read_or_is_gone_leaves_no_thread() -> None:
    """The thread ends when the time for the bytes is over."""
    with closing(BucketServer(BIND, pace=Pace(0.05, 1e9))) as server:
        big = build_manifest([("a", "BF16", [16 << 20])], 16 << 20)
        server.serve(big).offer(StoredVersion(0, memoryview(bytes(big.total_bytes)), [1, 2]))
        with let_in(server) as (records, idle):
            idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            order(records, encoded([0, 1], [1, 2], 16 << 20))
            until(lambda: not server._peers, "it still waits")
        with raw(server):
            until(lambda: server._peers, "nobody was let in")
        until(lambda: not server._peers, "its thread is there still")


def test_an_address_that_is_taken_or_none() -> None:
    with serving() as (server, _), pytest.raises(StartupError, match="is in use"):
        BucketServer(server.endpoint)
    for endpoint in ("tcp://127.0.0.1:many", "tcp://192.0.2.1:*"):
        with pytest.raises(UsageError):
            BucketServer(endpoint)
