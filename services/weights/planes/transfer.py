"""Fetching buckets: the socket of who hands them out, orders, what comes of them, what goes wrong.

Orders go over the socket, and what was ordered comes on a connection of its own. Where that cannot
be made, or the source speaks a protocol without it, buckets come over the socket, within a credit.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from umbra.proto import sockets
from umbra.proto.bounds import KEY_BYTES
from umbra.proto.codec import Encoder, decode
from umbra.proto.errors import PeerLostError, UsageError, WireError
from umbra.proto.messages import BucketPort, Buckets, Credit, Message, Nack, Role
from umbra.proto.net.keys import OPEN, Security
from umbra.proto.records import Piece
from umbra.services.weights.memory import keep_freed_memory
from umbra.services.weights.planes.assembly import Assembly
from umbra.services.weights.planes.bucket_connection import BrokenError, BucketConnection, Came
from umbra.services.weights.planes.bucket_records import seal_of

CONNECTIONS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
LOOK_S = 0.05  # that a step waits for something at most
LOST_S = 2.0  # without a connection: the source is gone
SILENT_S = 60.0  # connected, and yet nothing came
FRAMES_UNDER_WAY = 8
FRAMES_PER_CREDIT = 2
# Messages and records that make no sense, or connections in a row that break before a bucket has
# come, until a version is given up.
SPOILED = 3

DeltaCame = Callable[[Piece, bytes], None]

log = logging.getLogger(__name__)


class SourceLostError(PeerLostError):
    """Nobody answers where the buckets should come from."""


class BucketSource:
    """Connects to one source after another, and knows whether it is there. One thread at a time.

    Args:
        name: of the receiver.
        security: keys of this process.
    """

    def __init__(self, name: str, security: Security = OPEN) -> None:
        keep_freed_memory()
        self.connected = False
        self.apart = True  # whether connections for buckets can be made to it, as far as we know
        self._identity = sockets.unguessable(name)
        self._security = security
        self._encoder = Encoder(name, uuid.uuid4().hex[:12])
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.endpoint = ""
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._number = 0

    def connect(self, endpoint: str, server: Role = "weight_hub") -> None:
        """Begin to connect to `endpoint`, which must have the key of role `server`.

        Nothing happens if that was begun before.

        Raises:
            UsageError: it is no address.
        """
        if endpoint == self.endpoint:
            return
        self._disconnect()
        socket = self._socket = sockets.dealer(
            self._context, "", self._identity, self._security.connecting(server)
        )
        # The monitor comes before the connection.
        self._monitor = sockets.handshakes(self._context, socket, CONNECTIONS)
        try:
            sockets.connect(socket, endpoint)
        except UsageError:
            self._socket = None  # closed already
            self._disconnect()
            raise
        self.endpoint, self.apart = endpoint, True

    def open(self, place: BucketPort, key: bytes, credit_bytes: int) -> BucketConnection:
        """A connection for what was ordered with `key`.

        Raises:
            OSError: nobody answers there.
            WireError: the weights would not be encrypted, and we insist.
        """
        if self._security.encrypt_weights and not place.encrypted:
            raise WireError(
                f"{self.endpoint} does not encrypt weights, and security.encrypt_weights is set"
            )
        keyed = self._security.keys is not None
        seal = seal_of(key, keyed=keyed, encrypted=place.encrypted)
        return BucketConnection(self._host, place.port, key, seal, LOOK_S, credit_bytes)

    def unreachable(self, place: BucketPort, error: OSError) -> None:
        """Connections for buckets cannot be made: they come over the socket from now on."""
        self.apart = False
        log.warning(
            "tcp://%s:%d cannot be reached (%s): buckets come over %s, which is slower; open that "
            "port, or set weight_hub.connections_listen to one that is open",
            self._host, place.port, error, self.endpoint,
        )  # fmt: skip

    @property
    def encrypt(self) -> bool:
        """Whether weights are to be encrypted."""
        return self._security.encrypt_weights

    @property
    def _host(self) -> str:
        if not self.endpoint.startswith("tcp://"):
            return "127.0.0.1"
        return self.endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")

    def send(self, body: Message) -> None:
        """Send one message."""
        assert self._socket is not None
        self._socket.send_multipart(self._encoder.encode(body)[1], zmq.NOBLOCK)

    def next_number(self) -> int:
        """A number for an order."""
        self._number += 1
        return self._number

    def poll(self, timeout_s: float) -> tuple[list[zmq.Frame] | None, bool]:
        """What arrives within `timeout_s`: a message, and whether a connection came about."""
        assert self._socket is not None and self._monitor is not None
        made = False
        if self._socket.poll(0) == 0:
            zmq.select([self._socket, self._monitor], [], [], timeout_s)
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected = made = True
            elif event == zmq.EVENT_DISCONNECTED:
                self.connected = made = False
        if self._socket.poll(0):
            return self._socket.recv_multipart(zmq.NOBLOCK, copy=False), made
        return None, made

    def close(self) -> None:
        """Close the sockets."""
        self._disconnect()
        self._context.destroy(linger=0)

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger=0)
        if self._monitor is not None:
            self._monitor.close(linger=0)
        self._socket = self._monitor = None
        self.endpoint, self.connected = "", False


class Transfer:
    """Fetches what a gathering lacks.

    Args:
        source: connected, or about to be.
        gathering: takes the pieces.
        frame_bytes: in one message, at most.
        delta_came: called with each delta of a bucket, once the bucket is right.
    """

    def __init__(
        self,
        source: BucketSource,
        gathering: Assembly,
        frame_bytes: int,
        delta_came: DeltaCame | None = None,
    ) -> None:
        self.stage_s = 0.0
        self.wire_bytes = 0
        self._source = source
        self._gathering = gathering
        self._frame_bytes = frame_bytes
        self._delta_came = delta_came
        self._number = 0
        self._key: bytes | None = None
        self._connection: BucketConnection | None = None
        self._steps: Generator[None, None, Came] | None = None  # towards its next piece
        self._chain: list[tuple[Piece, memoryview]] = []  # deltas of the bucket that comes now
        self._used = 0  # bytes for which no new credit was given
        self._spoiled = self._broken = 0

    def run(self) -> Generator[int | None, None, None]:
        """Fetch until nothing is missing, step by step; no step waits for much longer than LOOK_S.

        Yields each bucket when it is complete and verified, and None after each step. No more than
        the credit, or what the kernel holds, comes while the caller works on a bucket.

        Raises:
            SourceLostError: the source is gone.
            WireError: the source sends nonsense, or nothing.
        """
        heard_at = connected_at = time.monotonic()
        if self._source.connected:
            self._order()
        try:
            while self._gathering.missing:
                came = False
                if self._connection is not None:
                    came = yield from self._next(self._connection)
                frames = None
                if not came:
                    frames, made = self._source.poll(LOOK_S if self._connection is None else 0.0)
                    if made:
                        self._order()  # whatever was under way on the connection before is lost
                if frames is not None:
                    yield from self._receive(frames)
                now = time.monotonic()
                if came or frames is not None:
                    heard_at = now
                if came or self._source.connected:
                    connected_at = now
                elif now - connected_at > LOST_S:
                    raise SourceLostError(
                        f"{self._source.endpoint} is gone: no connection for {LOST_S:g} s"
                    )
                if now - heard_at > SILENT_S:
                    raise WireError(f"no bucket came within {SILENT_S:g} s")
                yield None
        finally:
            self._disconnect()

    def _order(self) -> None:
        self._disconnect()
        self._number = self._source.next_number()
        self._used = 0
        frame = self._frame_bytes
        order = self._gathering.order(self._number, frame, FRAMES_UNDER_WAY * frame)
        self._key = secrets.token_bytes(KEY_BYTES) if self._source.apart else None
        encrypt = self._source.encrypt
        self._source.send(msgspec.structs.replace(order, key=self._key, encrypt=encrypt))

    def _connect(self, place: BucketPort, key: bytes) -> None:
        self._disconnect()
        try:
            credit = FRAMES_UNDER_WAY * self._frame_bytes
            self._connection = self._source.open(place, key, credit)
        except OSError as error:
            self._source.unreachable(place, error)
            self._order()

    def _disconnect(self) -> None:
        self._chain = []
        if self._connection is not None:
            self._connection.close()
        self._connection = self._steps = None

    def _next(self, connection: BucketConnection) -> Generator[int | None, None, bool]:
        """Wait for the next piece of the connection; returns whether it came."""
        if self._steps is None:
            self._steps = connection.next(self._gathering.room)
        try:
            next(self._steps)
            return False
        except StopIteration as end:
            came: Came = end.value
            self._steps = None
        except WireError as error:
            self._failed(error)
            return False
        self.wire_bytes += len(came.data)
        yield from self._took(came.piece, came.data, placed=came.placed)
        self._order_again()
        return True

    def _receive(self, frames: list[zmq.Frame]) -> Iterator[int]:
        raw = [frame.buffer for frame in frames[2:]]
        size = sum(map(len, raw))
        self.wire_bytes += size
        try:
            body = decode([frame.bytes for frame in frames[:2]], raw=raw).body
        except WireError as error:
            self._failed(error)
            return
        if isinstance(body, Nack):
            raise WireError(f"the source refuses: {body.reason}")
        if isinstance(body, BucketPort) and body.number == self._number and self._key is not None:
            self._connect(body, self._key)
        if not isinstance(body, Buckets) or body.number != self._number:
            return  # of an order before
        self._chain = []
        for piece, data in zip(body.pieces, raw, strict=True):
            yield from self._took(piece, data, placed=False)
        self._used += size
        if self._used >= FRAMES_PER_CREDIT * self._frame_bytes:
            self._source.send(Credit(number=self._number, credit_bytes=self._used))
            self._used = 0
        self._order_again()

    def _took(self, piece: Piece, data: memoryview, *, placed: bool) -> Iterator[int]:
        """A piece has come; yields its bucket if that is complete."""
        if self._chain and self._chain[-1][0].bucket != piece.bucket:
            self._chain.clear()
        if piece.base:
            self._chain.append((piece, data))
        began = time.perf_counter()
        if placed:
            complete = self._gathering.placed(piece, len(data))
        else:
            complete = self._gathering.take(piece, data)
        self.stage_s += time.perf_counter() - began
        if complete:
            self._broken = 0
            if self._delta_came is not None:
                for link, content in self._chain:
                    self._delta_came(link, bytes(content))
            yield piece.bucket

    def _order_again(self) -> None:
        """Order what came wrong, when all else has come."""
        if self._gathering.missing and not self._gathering.awaited:
            self._order()

    def _failed(self, error: WireError) -> None:
        """What came was of no use: order again, but not for ever."""
        if isinstance(error, BrokenError):
            self._broken += 1
        else:
            self._spoiled += 1
        if SPOILED in (self._broken, self._spoiled):
            raise error
        log.info("%s: %s", self._source.endpoint, error)
        self._disconnect()
        if self._source.connected:
            self._order()


def run_together(pairs: Sequence[tuple[BucketSource, Transfer]]) -> Iterator[int | None]:
    """Run transfers at the same time, each on a thread of its own; as `Transfer.run`.

    When it is closed, nothing is written any more.

    Raises:
        SourceLostError: one of the sources is gone.
        WireError: one of them sends nonsense, or nothing.
    """
    if len(pairs) == 1:
        yield from pairs[0][1].run()
        return
    came: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()  # None: one is done
    stopping = threading.Event()

    def work(transfer: Transfer) -> None:
        try:
            with closing(transfer.run()) as steps:
                for step in steps:
                    if stopping.is_set():
                        return
                    if step is not None:
                        came.put(step)
            came.put(None)
        except BaseException as error:  # noqa: BLE001 - raised below
            came.put(error)

    threads = [
        threading.Thread(target=work, args=(transfer,), name="umbra-fetch", daemon=True)
        for _, transfer in pairs
    ]
    for thread in threads:
        thread.start()
    try:
        left = len(threads)
        while left:
            try:
                step = came.get(timeout=LOOK_S)
            except queue.Empty:
                yield None
                continue
            if isinstance(step, BaseException):
                raise step
            if step is None:
                left -= 1
            else:
                yield step
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
