"""Buckets over a socket: the connection to who hands them out, orders, credit, what comes wrong."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from umbra.proto import sockets
from umbra.proto.codec import Encoder, decode
from umbra.proto.errors import PeerLostError, UsageError, WireError
from umbra.proto.messages import Buckets, Credit, FetchBuckets, Message, Nack, Role
from umbra.proto.records import Piece
from umbra.services.runtime.net.keys import OPEN, Security
from umbra.services.runtime.weights.malloc_tuning import keep_freed_memory

CONNECTIONS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
LOOK_S = 0.05  # that a step waits for something at most
LOST_S = 2.0  # without a connection: the source is gone
SILENT_S = 60.0  # connected, and yet nothing came
FRAMES_UNDER_WAY = 8
FRAMES_PER_CREDIT = 2
SPOILED = 3  # messages that cannot be decoded, until a version is given up

DeltaCame = Callable[[Piece, bytes], None]


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
        self.endpoint = endpoint

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

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Those on which something may come."""
        return [socket for socket in (self._socket, self._monitor) if socket is not None]

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


class Gathering(Protocol):
    """Puts the pieces of a version together."""

    @property
    def missing(self) -> Collection[int]:
        """Buckets that are not complete."""
        ...

    @property
    def awaited(self) -> Collection[int]:
        """Buckets that are ordered and neither complete nor failed."""
        ...

    def order(self, number: int, frame_bytes: int, credit_bytes: int) -> FetchBuckets:
        """A request for all that is missing."""
        ...

    def take(self, piece: Piece, raw: bytes | memoryview) -> bool:
        """Add a piece; True when it completes its bucket.

        Raises:
            WireError: it does not belong here, or a bucket has come wrong too often.
        """
        ...


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
        gathering: Gathering,
        frame_bytes: int,
        delta_came: DeltaCame | None = None,
    ) -> None:
        self.stage_s = 0.0
        self.wire_bytes = 0
        self.idle = False  # nothing came in the last step
        self._source = source
        self._gathering = gathering
        self._frame_bytes = frame_bytes
        self._delta_came = delta_came
        self._number = 0
        self._used = 0  # bytes for which no new credit was given
        self._spoiled = 0

    def run(self, wait_s: float = LOOK_S) -> Iterator[int | None]:
        """Fetch until nothing is missing, step by step; no step waits for longer than `wait_s`.

        Yields each bucket when it is complete and verified, and None after each step. No more than
        the credit comes while the caller works on a bucket.

        Raises:
            SourceLostError: the source is gone.
            WireError: the source sends nonsense, or nothing.
        """
        heard_at = connected_at = time.monotonic()
        if self._source.connected:
            self._order()
        while self._gathering.missing:
            frames, made = self._source.poll(wait_s)
            now = time.monotonic()
            self.idle = frames is None and not made
            if made:
                self._order()  # whatever was under way on the connection before is lost
            if frames is not None:
                yield from self._receive(frames)
                now = heard_at = time.monotonic()
            if self._source.connected:
                connected_at = now
            elif now - connected_at > LOST_S:
                raise SourceLostError(
                    f"{self._source.endpoint} is gone: no connection for {LOST_S:g} s"
                )
            if now - heard_at > SILENT_S:
                raise WireError(f"no bucket came within {SILENT_S:g} s")
            yield None

    def _order(self) -> None:
        self._number = self._source.next_number()
        self._used = 0
        frame = self._frame_bytes
        self._source.send(self._gathering.order(self._number, frame, FRAMES_UNDER_WAY * frame))

    def _receive(self, frames: list[zmq.Frame]) -> Iterator[int]:
        raw = [frame.buffer for frame in frames[2:]]
        size = sum(map(len, raw))
        self.wire_bytes += size
        try:
            body = decode([frame.bytes for frame in frames[:2]], raw=raw).body
        except WireError:
            self._spoiled += 1
            if self._spoiled >= SPOILED:
                raise
            self._order()
            return
        if isinstance(body, Nack):
            raise WireError(f"the source refuses: {body.reason}")
        if not isinstance(body, Buckets) or body.number != self._number:
            return  # of an order before
        chain: list[tuple[Piece, memoryview]] = []
        for piece, data in zip(body.pieces, raw, strict=True):
            if chain and chain[-1][0].bucket != piece.bucket:
                chain.clear()
            if piece.base:
                chain.append((piece, data))
            began = time.perf_counter()
            complete = self._gathering.take(piece, data)
            self.stage_s += time.perf_counter() - began
            if complete:
                if self._delta_came is not None:
                    for link, content in chain:
                        self._delta_came(link, bytes(content))
                yield piece.bucket
        self._used += size
        if self._used >= FRAMES_PER_CREDIT * self._frame_bytes:
            self._source.send(Credit(number=self._number, credit_bytes=self._used))
            self._used = 0
        if self._gathering.missing and not self._gathering.awaited:
            self._order()  # the buckets that came wrong


def run_together(pairs: Sequence[tuple[BucketSource, Transfer]]) -> Iterator[int | None]:
    """Run transfers from several sources at the same time; as `Transfer.run`.

    Raises:
        SourceLostError: one of the sources is gone.
        WireError: one of them sends nonsense, or nothing.
    """
    if len(pairs) == 1:
        yield from pairs[0][1].run()
        return
    running = [(source, transfer, transfer.run(wait_s=0.0)) for source, transfer in pairs]
    while running:
        for one in list(running):
            try:
                step = next(one[2])
            except StopIteration:
                running.remove(one)
            else:
                if step is not None:
                    yield step
        if running and all(transfer.idle for _, transfer, _ in running):
            zmq.select([s for source, _, _ in running for s in source.sockets], [], [], LOOK_S)
        yield None
