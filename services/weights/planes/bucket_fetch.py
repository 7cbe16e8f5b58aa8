"""Fetches buckets: orders go over a ZeroMQ socket, bytes come over a TCP connection per order."""

from __future__ import annotations

import logging
import queue
import secrets
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from umbra.proto import sockets
from umbra.proto.bounds import KEY_BYTES
from umbra.proto.codec import Encoder, decode
from umbra.proto.errors import PeerLostError, UsageError, WireError
from umbra.proto.messages import BucketPort, FetchBuckets, Message, Nack, Role
from umbra.proto.net.keys import OPEN, Security
from umbra.services.weights.memory import keep_freed_memory
from umbra.services.weights.planes.assembly import Assembly
from umbra.services.weights.planes.bucket_records import (
    HEAD,
    TAG_BYTES,
    Piece,
    Seal,
    seal_of,
    ticket,
    unpack_head,
)

EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
CONNECT_S = 2.0
LOOK_S = 0.05  # that a step waits at most
LOST_S = 2.0  # without a connection: the source is gone
SILENT_S = 60.0  # connected, but nothing came
# Malformed messages and records, or connections in a row that break before a bucket has come,
# until a version is given up.
SPOILED = 3

Room = Callable[[Piece, int], memoryview | None]
DeltaCame = Callable[[Piece, bytes], None]

log = logging.getLogger(__name__)


class SourceLostError(PeerLostError):
    """Nobody answers where the buckets should come from."""


class BrokenError(WireError):
    """The connection cannot be made, or broke."""


@dataclass(frozen=True, slots=True)
class Received:
    """A piece and its bytes. `placed`: they are where they belong already."""

    piece: Piece
    data: memoryview
    placed: bool


class BucketConnection:
    """The receiver's end of a connection; connects at once. For one thread.

    Args:
        address: host and port.
        key: of the order.
        seal: this end of it; None = open.

    Raises:
        OSError: nobody answers there.
    """

    def __init__(self, address: tuple[str, int], key: bytes, seal: Seal | None) -> None:
        self._seal = seal
        self._socket = socket.create_connection(address, CONNECT_S)
        try:
            self._socket.settimeout(None)  # reads of the kernel are bounded instead
            bound = struct.pack("ll", int(LOOK_S), round(LOOK_S % 1 * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)
            self._socket.sendall(ticket(key))
        except OSError:
            self._socket.close()
            raise
        self._head = bytearray(HEAD.size)
        self._block = memoryview(bytearray(0))

    def next(self, room: Room) -> Generator[None, None, Received]:
        """Receive the next piece; yields None each time that nothing came for `LOOK_S`.

        Args:
            room: gives the memory for a piece of so many bytes, or None if it has none; its
                errors pass.

        Raises:
            BrokenError: the connection broke.
            WireError: the record is not what the source sealed, or has no place here.
        """
        yield from self._fill(memoryview(self._head))
        head = bytes(self._head)
        piece, nbytes = unpack_head(head)
        given = room(piece, nbytes)
        place = memoryview(bytearray(nbytes)) if given is None else given
        if self._seal is None:
            yield from self._fill(place)
        else:
            size = nbytes + TAG_BYTES
            if len(self._block) < size:
                self._block = memoryview(bytearray(size))
            yield from self._fill(self._block[:size])
            self._seal.open(head, self._block[:size], place)
        return Received(piece, place, given is not None)

    def close(self) -> None:
        self._socket.close()

    def _fill(self, memory: memoryview) -> Generator[None, None, None]:
        """Read until `memory` is full, as much as comes with each call of the kernel."""
        done = 0
        while done < len(memory):
            try:
                count = self._socket.recv_into(memory[done:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                yield None
                continue
            except OSError as error:
                raise BrokenError(f"the connection broke: {error}") from error
            if count == 0:
                raise BrokenError("the connection was closed")
            done += count


class BucketSource:
    """The order socket to one source after another, and whether that is there. For one thread.

    Args:
        name: of the receiver.
        security: keys of this process.
    """

    def __init__(self, name: str, security: Security = OPEN) -> None:
        keep_freed_memory()
        self.connected = False
        self.endpoint = ""
        self._identity = sockets.unguessable(name)
        self._security = security
        self._encoder = Encoder(name, uuid.uuid4().hex[:12])
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
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
        self._monitor = sockets.handshakes(self._context, socket, EVENTS)
        try:
            sockets.connect(socket, endpoint)
        except UsageError:
            self._socket = None  # closed already
            self._disconnect()
            raise
        self.endpoint = endpoint

    def order(self, order: FetchBuckets) -> int:
        """Send `order` under a number of its own; returns the number."""
        assert self._socket is not None
        self._number += 1
        numbered = msgspec.structs.replace(order, number=self._number)
        self._socket.send_multipart(self._encoder.encode(numbered)[1], zmq.NOBLOCK)
        return self._number

    def open(self, place: BucketPort, key: bytes) -> BucketConnection:
        """Connect for the order with `key`.

        Raises:
            BrokenError: nobody answers there.
        """
        seal = seal_of(key, keyed=self._security.keys is not None)
        host = "127.0.0.1"
        if self.endpoint.startswith("tcp://"):
            host = self.endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        try:
            return BucketConnection((host, place.port), key, seal)
        except OSError as error:
            raise BrokenError(
                f"tcp://{host}:{place.port} cannot be reached ({error}): open that port, which is "
                "the second after weight_hub.listen if that names one"
            ) from error

    def poll(self, timeout_s: float) -> tuple[Message | None, bool]:
        """Return what arrives within `timeout_s`, and whether a connection came about.

        Raises:
            WireError: it is malformed.
        """
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
            return decode(self._socket.recv_multipart(zmq.NOBLOCK)).body, made
        return None, made

    def close(self) -> None:
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
    """Fetches what an assembly lacks.

    Args:
        source: connected, or about to be.
        assembly: takes the pieces.
        frame_bytes: in one record, at most.
        delta_came: called with each delta of a bucket, once the bucket is right.
    """

    def __init__(
        self,
        source: BucketSource,
        assembly: Assembly,
        frame_bytes: int,
        delta_came: DeltaCame | None = None,
    ) -> None:
        self.assembly = assembly
        self.stage_s = 0.0
        self.wire_bytes = 0
        self._source = source
        self._frame_bytes = frame_bytes
        self._delta_came = delta_came
        self._number = 0
        self._key = b""
        self._connection: BucketConnection | None = None
        self._steps: Generator[None, None, Received] | None = None  # towards its next piece
        self._chain: list[tuple[Piece, memoryview]] = []  # deltas of the bucket that comes now
        self._spoiled = self._broken = 0

    def run(self) -> Generator[int | None, None, None]:
        """Fetch until nothing is missing, step by step; a step waits for about LOOK_S at most.

        Yields each bucket when it is complete and verified, and None after each step.

        Raises:
            SourceLostError: the source is gone.
            WireError: the source sends malformed data, or nothing.
        """
        heard_at = connected_at = time.monotonic()
        if self._source.connected:
            self._order()
        try:
            while self.assembly.missing:
                came = False
                if self._connection is not None:
                    came = yield from self._next(self._connection)
                if not came:
                    came = self._poll()
                now = time.monotonic()
                if came:
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
        self._key = secrets.token_bytes(KEY_BYTES)
        self._number = self._source.order(self.assembly.order(self._key, self._frame_bytes))

    def _disconnect(self) -> None:
        self._chain = []
        if self._connection is not None:
            self._connection.close()
        self._connection = self._steps = None

    def _next(self, connection: BucketConnection) -> Generator[int | None, None, bool]:
        """Wait for the next piece of the connection; returns whether it came."""
        if self._steps is None:
            self._steps = connection.next(self.assembly.room)
        try:
            next(self._steps)
            return False
        except StopIteration as end:
            came: Received = end.value
            self._steps = None
        except WireError as error:
            self._failed(error)
            return False
        self.wire_bytes += len(came.data)
        yield from self._took(came)
        if self.assembly.missing and not self.assembly.awaited:
            self._order()  # what came wrong, now that all else has come
        return True

    def _poll(self) -> bool:
        """Wait for an answer to the order; returns whether one came."""
        try:
            body, made = self._source.poll(LOOK_S if self._connection is None else 0.0)
        except WireError as error:
            self._failed(error)
            return True
        if made:
            self._order()  # what was under way on the connection before is lost
        if isinstance(body, Nack):
            raise WireError(f"the source refuses: {body.reason}")
        if isinstance(body, BucketPort) and body.number == self._number:
            self._disconnect()
            try:
                self._connection = self._source.open(body, self._key)
            except WireError as error:
                self._failed(error)
        return body is not None

    def _took(self, came: Received) -> Iterator[int]:
        """Add a piece; yields its bucket if that is complete."""
        piece, data = came.piece, came.data
        if self._chain and self._chain[-1][0].bucket != piece.bucket:
            self._chain.clear()
        if piece.base:
            self._chain.append((piece, data))
        began = time.perf_counter()
        if came.placed:
            complete = self.assembly.placed(piece, len(data))
        else:
            complete = self.assembly.take(piece, data)
        self.stage_s += time.perf_counter() - began
        if complete:
            self._broken = 0
            if self._delta_came is not None:
                for link, content in self._chain:
                    self._delta_came(link, bytes(content))
            yield piece.bucket

    def _failed(self, error: WireError) -> None:
        """Order again, up to `SPOILED` times."""
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


def run_together(transfers: Sequence[Transfer]) -> Iterator[int | None]:
    """Run transfers at the same time, each on a thread of its own; as `Transfer.run`.

    When it is closed, nothing is written any more.

    Raises:
        SourceLostError: one of the sources is gone.
        WireError: one of them sends malformed data, or nothing.
    """
    if len(transfers) == 1:
        yield from transfers[0].run()
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
        for transfer in transfers
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
