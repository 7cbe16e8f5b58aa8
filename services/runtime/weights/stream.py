"""Receiving without holding: for generators that have no memory for a second copy of the weights.

Only where a version lies is noted when it is prepared; the hub keeps its slot until the engine has
loaded it. Loading goes bucket by bucket through a few buckets of memory, each verified before the
engine sees it, the next ones being read meanwhile. So the pause contains the transfer, and a load
that breaks off leaves weights that are neither the old version nor the new one: then the version
before is loaded again from where it lay (the hub keeps that slot too until the push is over).
`staged` receiving has neither drawback.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

from umbra.proto.errors import PeerLostError, StartupError, UsageError, WireError
from umbra.proto.messages import Prepare, Subscribed
from umbra.proto.records import Manifest
from umbra.services.runtime.net.keys import OPEN, Security
from umbra.services.runtime.weights.arena import Arena
from umbra.services.runtime.weights.bucket_source import BucketSource
from umbra.services.runtime.weights.manifest import checksum
from umbra.services.runtime.weights.memory import private_memory
from umbra.services.runtime.weights.plane_reader import PlaneReader, ReadResult
from umbra.services.runtime.weights.receiver import StagedVersion
from umbra.services.runtime.weights.sequential_assembly import SequentialAssembly
from umbra.services.runtime.weights.transfer import LOOK_S, LOST_S, Transfer

LANES = 2  # one bucket is loaded while the next one is read
REMEMBERED = 4  # versions that were prepared last

Buckets = Iterator[tuple[int, memoryview]]  # start and bytes of each, in order
Noted = Callable[[int, "VersionSource"], None]


@dataclass(frozen=True, slots=True)
class VersionSource:
    """A version, and how to read it from where it lies.

    `buckets` gives start and bytes of every bucket; the bytes are good until the next one is asked
    for. It raises PeerLostError when the version is not there any more.
    """

    manifest: Manifest
    buckets: Callable[[], Buckets]


class ArenaStream:
    """The intake of a receiver that streams over plane `shm`.

    Args:
        path: of the hub's arena.
        manifest: the layout.
        noted: told of each version that was verified, by its epoch.

    Raises:
        StartupError: the arena cannot be seen from here.
    """

    def __init__(self, path: str, manifest: Manifest, noted: Noted) -> None:
        self._path = path
        self._manifest = manifest
        self._noted = noted
        self._arena = Arena.attach(path, slot_bytes=manifest.total_bytes, populate=False)
        self._lane = private_memory(_largest(manifest))

    def take(self, message: Prepare, target: int, interrupted: Callable[[], bool]) -> ReadResult:
        """Verify every bucket where it lies; nothing is kept."""
        began = time.perf_counter()
        for index in range(len(self._manifest.buckets)):
            try:
                _read(self._arena, self._manifest, message, index, self._lane)
            except (IndexError, OSError, StartupError, PeerLostError) as error:
                return ReadResult(stage_s=time.perf_counter() - began, error=str(error))
            if interrupted():
                return ReadResult(error="overtaken by a newer version")
        self._noted(message.epoch, VersionSource(self._manifest, lambda: self._buckets(message)))
        return ReadResult(stage_s=time.perf_counter() - began)

    def close(self) -> None:
        """Unmap the arena; a load under way has mapped it for itself."""
        self._arena.close()

    def _buckets(self, message: Prepare) -> Buckets:
        manifest = self._manifest
        ring = [private_memory(_largest(manifest)) for _ in range(LANES)]
        try:
            arena = Arena.attach(self._path, slot_bytes=manifest.total_bytes, populate=False)
            with closing(arena), ThreadPoolExecutor(1, "umbra-stream") as ahead:
                coming = ahead.submit(_read, arena, manifest, message, 0, ring[0])
                for index, (start, _) in enumerate(manifest.buckets):
                    bucket = coming.result()
                    if index + 1 < len(manifest.buckets):
                        lane = ring[(index + 1) % LANES]
                        coming = ahead.submit(_read, arena, manifest, message, index + 1, lane)
                    yield start, bucket
        except (IndexError, OSError, StartupError) as error:
            raise PeerLostError(str(error)) from error


class SocketStream:
    """The intake of a receiver that streams over plane `tcp`.

    Args:
        name: of the receiver.
        manifest: the layout.
        noted: told of each version whose source answers, by its epoch.
        frame_bytes: of one message, at most; about ten of them are in memory.
        deadline_s: seconds that a load may take.
        security: keys of this process.
    """

    def __init__(
        self,
        name: str,
        manifest: Manifest,
        noted: Noted,
        frame_bytes: int,
        deadline_s: float,
        security: Security,
    ) -> None:
        self._name = name
        self._manifest = manifest
        self._noted = noted
        self._frame_bytes = frame_bytes
        self._deadline_s = deadline_s
        self._security = security

    def take(self, message: Prepare, target: int, interrupted: Callable[[], bool]) -> ReadResult:
        """See whether the source is there: a version must not travel twice."""
        began = time.monotonic()
        with closing(BucketSource(f"{self._name}/probe", self._security)) as source:
            try:
                source.connect(message.source)
            except UsageError as error:
                return ReadResult(error=str(error))
            while not source.connected:
                source.poll(LOOK_S)
                if time.monotonic() - began > LOST_S:
                    return ReadResult(error=f"{message.source} is gone", source_lost=True)
                if interrupted():
                    return ReadResult(error="overtaken by a newer version")
        self._noted(message.epoch, VersionSource(self._manifest, lambda: self._buckets(message)))
        return ReadResult(wire_bytes=self._manifest.total_bytes)

    def close(self) -> None:
        """Nothing is open."""

    def _buckets(self, message: Prepare) -> Buckets:
        lane = SequentialAssembly(self._manifest, message.checksums)
        until = time.monotonic() + self._deadline_s
        with closing(BucketSource(f"{self._name}/load", self._security)) as source:
            transfer = Transfer(source, lane, self._frame_bytes)
            try:
                source.connect(message.source)
                for index in transfer.run(lambda: time.monotonic() > until):
                    yield self._manifest.buckets[index][0], lane.bucket(index)
            except InterruptedError as error:
                what = f"{len(lane.missing)} of {len(message.checksums)} buckets are missing"
                raise PeerLostError(f"{what} after {self._deadline_s:g} s") from error
            except (WireError, UsageError) as error:
                raise PeerLostError(str(error)) from error


class WeightStream:
    """What a generator knows of the versions that its receiver has prepared.

    Args:
        name: of the receiver.
        frame_bytes: of one message over plane `tcp`, at most.
        deadline_s: seconds that a load over plane `tcp` may take.
        security: keys of this process.
    """

    def __init__(
        self, name: str, frame_bytes: int, deadline_s: float, security: Security = OPEN
    ) -> None:
        self.served: VersionSource | None = None
        self._name = name
        self._frame_bytes = frame_bytes
        self._deadline_s = deadline_s
        self._security = security
        self._noted: dict[int, VersionSource] = {}  # by epoch

    def open(self, reply: Subscribed) -> PlaneReader:
        """For `Receiver(open_intake=...)`."""
        if reply.plane == "shm":
            return ArenaStream(reply.path, reply.manifest, self._note)
        return SocketStream(
            self._name,
            reply.manifest,
            self._note,
            self._frame_bytes,
            self._deadline_s,
            self._security,
        )

    def version(self, staged: StagedVersion) -> VersionSource:
        """Where `staged` lies.

        Raises:
            PeerLostError: it was prepared too long ago.
        """
        lying = self._noted.get(staged.candidate.epoch)
        if lying is None:
            raise PeerLostError(f"version {staged.version} was prepared too long ago")
        return lying

    def loaded(self, lying: VersionSource) -> None:
        """`lying` is served from now on."""
        self.served = lying

    def _note(self, epoch: int, lying: VersionSource) -> None:
        self._noted[epoch] = lying
        while len(self._noted) > REMEMBERED:
            del self._noted[min(self._noted)]


def _largest(manifest: Manifest) -> int:
    return max(end - start for start, end in manifest.buckets)


def _read(
    arena: Arena, manifest: Manifest, message: Prepare, index: int, lane: memoryview
) -> memoryview:
    start, end = manifest.buckets[index]
    bucket = lane[: end - start]
    arena.read(message.slot, start, bucket)
    if checksum(bucket) != message.checksums[index]:
        raise PeerLostError(f"checksum of bucket {index} [{start}, {end}) is wrong")
    return bucket
