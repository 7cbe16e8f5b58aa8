"""Plane `tcp`: a receiver pulls buckets over a socket of its own, within the credit it grants."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from umbra.proto.errors import UsageError, WireError
from umbra.proto.messages import Prepare
from umbra.proto.records import Manifest
from umbra.services.runtime.net.keys import OPEN, Security
from umbra.services.runtime.weights import delta
from umbra.services.runtime.weights.assembly import Assembly, Holdings
from umbra.services.runtime.weights.bucket_source import BucketSource
from umbra.services.runtime.weights.manifest import checksum
from umbra.services.runtime.weights.plane_reader import ReadResult
from umbra.services.runtime.weights.transfer import DeltaCame, SourceLostError, Transfer

log = logging.getLogger(__name__)

Arrived = Callable[[int], None]


class TcpReader:
    """Fetches versions bucket by bucket, and goes on where it was when a connection breaks.

    Args:
        name: of this receiver.
        manifest: the layout.
        buffers: to be filled, `[manifest.total_bytes]` each.
        frame_bytes: in one message, at most.
        arrived: called with each bucket that is complete and verified (a relay hands it on).
        delta_came: called before that with each delta that led to the bucket.
        security: keys of this process.
    """

    def __init__(
        self,
        name: str,
        manifest: Manifest,
        buffers: Sequence[memoryview],
        frame_bytes: int,
        arrived: Arrived | None = None,
        delta_came: DeltaCame | None = None,
        security: Security = OPEN,
    ) -> None:
        self._holdings = Holdings(manifest, buffers)
        self._frame_bytes = frame_bytes
        self._arrived = arrived
        self._delta_came = delta_came
        self._deltas = delta.available()
        self._source = BucketSource(name, security)

    def take(self, message: Prepare, target: int, interrupted: Callable[[], bool]) -> ReadResult:
        """Fetch what is missing of a version into buffer `target`."""
        began = time.perf_counter()
        assembly = Assembly(self._holdings, target, message.checksums, deltas=self._deltas)
        for bucket in range(len(message.checksums)):
            if bucket not in assembly.missing:
                self._done(bucket)
        held_s = time.perf_counter() - began
        transfer = Transfer(self._source, assembly, self._frame_bytes, self._delta_came)
        error, lost = "", False
        try:
            if assembly.missing:
                self._source.connect(message.source, "relay" if message.relayed else "weight_hub")
                for bucket in transfer.run(interrupted):
                    self._done(bucket)
        except SourceLostError as problem:
            error, lost = f"{message.source} is gone: {problem}", True
        except (WireError, UsageError, InterruptedError) as problem:
            error = str(problem)
        if assembly.corrupted:
            log.warning("%d buckets of version %d came wrong", assembly.corrupted, message.version)
        stage_s = held_s + transfer.stage_s
        wire_s = max(0.0, time.perf_counter() - began - stage_s)
        return ReadResult(wire_s, stage_s, transfer.wire_bytes, error, lost)

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
                self._done(bucket)
            elif wrong is None:
                wrong = bucket
        return wrong

    def close(self) -> None:
        """Close the sockets."""
        self._source.close()

    def _done(self, bucket: int) -> None:
        if self._arrived is not None:
            self._arrived(bucket)
