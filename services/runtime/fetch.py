"""Plane `tcp`: a receiver pulls buckets over a socket of its own, within the credit it grants."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from umbra.proto import sockets
from umbra.proto.codec import Encoder, decode
from umbra.proto.errors import StartupError, WireError
from umbra.proto.messages import Buckets, Credit, Message, Nack, Prepare
from umbra.proto.records import Manifest, Piece
from umbra.services.runtime import delta
from umbra.services.runtime.assembly import Assembly, Holdings
from umbra.services.runtime.heap import keep_freed_memory
from umbra.services.runtime.intake import Intaken
from umbra.services.runtime.manifest import checksum

LOOK_S = 0.05  # how soon an interruption is seen
LOST_S = 2.0  # without a connection: the source is gone
SILENT_S = 60.0  # connected, and yet nothing came
FRAMES_UNDER_WAY = 8
FRAMES_PER_CREDIT = 2
SPOILED = 3  # messages that cannot be decoded, until a version is given up

log = logging.getLogger(__name__)

Arrived = Callable[[int], None]
DeltaCame = Callable[[Piece, bytes], None]


class BucketIntake:
    """Fetches versions bucket by bucket, and goes on where it was when a connection breaks.

    Args:
        name: of this receiver, its identity on the socket.
        manifest: the layout.
        buffers: to be filled, `[manifest.total_bytes]` each.
        frame_bytes: in one message, at most.
        arrived: called with each bucket that is complete and verified (a relay hands it on).
        delta_came: called before that with each delta that led to the bucket.
    """

    def __init__(
        self,
        name: str,
        manifest: Manifest,
        buffers: Sequence[memoryview],
        frame_bytes: int,
        arrived: Arrived | None = None,
        delta_came: DeltaCame | None = None,
    ) -> None:
        keep_freed_memory()
        self._name = name
        self._holdings = Holdings(manifest, buffers)
        self._frame_bytes = frame_bytes
        self._arrived = arrived
        self._delta_came = delta_came
        self._deltas = delta.available()
        self._encoder = Encoder(name, uuid.uuid4().hex[:12])
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._source = ""
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._connected = False
        self._number = 0

    def take(self, message: Prepare, target: int, interrupted: Callable[[], bool]) -> Intaken:
        """Fetch what is missing of a version into buffer `target`."""
        began = time.perf_counter()
        assembly = Assembly(self._holdings, target, message.checksums, deltas=self._deltas)
        if self._arrived is not None:
            for bucket in range(len(message.checksums)):
                if bucket not in assembly.missing:
                    self._arrived(bucket)
        stage_s = time.perf_counter() - began
        transfer = _Transfer(self, assembly, stage_s)
        error, lost = "", False
        try:
            if assembly.missing:
                self._connect(message.source)
                lost = transfer.run(interrupted)
                if lost:
                    error = f"{message.source} is gone"
        except (WireError, StartupError, InterruptedError) as problem:
            error = str(problem)
        if assembly.corrupted:
            log.warning("%d buckets of version %d came wrong", assembly.corrupted, message.version)
        wire_s = max(0.0, time.perf_counter() - began - transfer.stage_s)
        return Intaken(wire_s, transfer.stage_s, transfer.wire_bytes, error, lost)

    def overwritten(self, target: int) -> None:
        """Buffer `target` is about to be filled in another way."""
        self._holdings.contents[target] = [0] * len(self._holdings.manifest.buckets)

    def verify(self, target: int, checksums: Sequence[int]) -> int | None:
        """What was filled in another way counts where it is right; the first bucket that is not."""
        wrong: int | None = None
        data = self._holdings.buffers[target]
        for bucket, (start, end) in enumerate(self._holdings.manifest.buckets):
            if checksum(data[start:end]) == checksums[bucket]:
                self._holdings.contents[target][bucket] = checksums[bucket]
                self.done(bucket)
            elif wrong is None:
                wrong = bucket
        return wrong

    def close(self) -> None:
        """Close the sockets."""
        self._disconnect()
        self._context.destroy(linger=0)

    # -- for a transfer ---------------------------------------------------------------------------

    def send(self, body: Message) -> None:
        """Send one message to the source."""
        assert self._socket is not None
        self._socket.send_multipart(self._encoder.encode(body)[1], zmq.NOBLOCK)

    def next_number(self) -> int:
        """A number for an order."""
        self._number += 1
        return self._number

    @property
    def frame_bytes(self) -> int:
        """Bound of a message."""
        return self._frame_bytes

    @property
    def connected(self) -> bool:
        """Whether the source can be reached now."""
        return self._connected

    def poll(self, timeout_s: float) -> tuple[list[zmq.Frame] | None, bool]:
        """What arrives within `timeout_s`: a message, and whether a connection came about."""
        assert self._socket is not None and self._monitor is not None
        made = False
        if self._socket.poll(0) == 0:
            zmq.select([self._socket, self._monitor], [], [], timeout_s)
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = made = True
            elif event == zmq.EVENT_DISCONNECTED:
                self._connected = made = False
        if self._socket.poll(0):
            return self._socket.recv_multipart(zmq.NOBLOCK, copy=False), made
        return None, made

    def done(self, bucket: int) -> None:
        """A bucket is complete."""
        if self._arrived is not None:
            self._arrived(bucket)

    def delta(self, piece: Piece, data: memoryview) -> None:
        """A delta came, and was right."""
        if self._delta_came is not None:
            self._delta_came(piece, bytes(data))

    def _connect(self, source: str) -> None:
        if source == self._source:
            return
        self._disconnect()
        socket = sockets.dealer(self._context, "", self._name.encode())  # the monitor comes first
        self._monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._socket = socket
        self._source = source
        socket.connect(source)

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger=0)
        if self._monitor is not None:
            self._monitor.close(linger=0)
        self._socket = self._monitor = None
        self._source, self._connected = "", False


class _Transfer:
    """One version over the wire."""

    def __init__(self, intake: BucketIntake, assembly: Assembly, stage_s: float) -> None:
        self.stage_s = stage_s
        self.wire_bytes = 0
        self._intake = intake
        self._assembly = assembly
        self._number = 0
        self._used = 0  # bytes for which no new credit was given
        self._spoiled = 0

    def run(self, interrupted: Callable[[], bool]) -> bool:
        """Fetch until nothing is missing; True when the source is lost.

        Raises:
            WireError: the source sends nonsense.
            InterruptedError: nobody wants this version any longer.
        """
        now = time.monotonic()
        look_at = heard_at = connected_at = now
        if self._intake.connected:
            self._order()
        while self._assembly.missing:
            frames, made = self._intake.poll(LOOK_S)
            now = time.monotonic()
            if made:
                self._order()  # whatever was under way on the connection before is lost
            if frames is not None:
                heard_at = now
                self._receive(frames)
            if self._intake.connected:
                connected_at = now
            elif now - connected_at > LOST_S:
                return True
            if now - heard_at > SILENT_S:
                raise WireError(f"no bucket came within {SILENT_S:g} s")
            if now >= look_at:
                look_at = now + LOOK_S
                if interrupted():
                    raise InterruptedError("given up while it was fetched")
        return False

    def _order(self) -> None:
        self._number = self._intake.next_number()
        self._used = 0
        frame = self._intake.frame_bytes
        self._intake.send(self._assembly.order(self._number, frame, FRAMES_UNDER_WAY * frame))

    def _receive(self, frames: list[zmq.Frame]) -> None:
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
        began = time.perf_counter()
        chain: list[tuple[Piece, memoryview]] = []
        for piece, data in zip(body.pieces, raw, strict=True):
            if chain and chain[-1][0].bucket != piece.bucket:
                chain.clear()
            if piece.base:
                chain.append((piece, data))
            if self._assembly.take(piece, data):
                for link, content in chain:
                    self._intake.delta(link, content)
                self._intake.done(piece.bucket)
        self.stage_s += time.perf_counter() - began
        self._used += size
        if self._used >= FRAMES_PER_CREDIT * self._intake.frame_bytes:
            self._intake.send(Credit(number=self._number, credit_bytes=self._used))
            self._used = 0
        if self._assembly.missing and not self._assembly.awaited:
            self._order()  # the buckets that came wrong
