"""Versions from another weight hub, written straight into a slot of this daemon's own arena.

Each bucket is handed on as soon as it is verified, so that a chain of daemons takes hardly longer
than one. At the commit the version is published here, to the receivers of this host.
"""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import Future, wait
from contextlib import closing
from typing import TypeVar

from umbra.proto.deadline import Deadline
from umbra.proto.errors import DeadlineError, RejectedError
from umbra.proto.messages import (
    AcquireSlot,
    ArenaReady,
    Message,
    Nack,
    Ok,
    Prepare,
    Publish,
    RegisterManifest,
    SlotGranted,
    Subscribed,
)
from umbra.proto.net.keys import Security
from umbra.services.config import WeightHubConfig as WeightHubConfig
from umbra.services.weight_hub.service import WeightHub
from umbra.services.weights.arena import Arena
from umbra.services.weights.manifest import held_whole
from umbra.services.weights.planes.bucket_store import BucketStore, Delta
from umbra.services.weights.planes.bucket_wire import Piece
from umbra.services.weights.planes.nccl import NcclReceiver
from umbra.services.weights.planes.plane import Receipt, ReceiverEnd, Receiving
from umbra.services.weights.planes.receiving import GpuReceiving
from umbra.services.weights.planes.tcp import TcpReceiver
from umbra.services.weights.receiver import StagedVersion

ANSWER_S = 60.0  # of the hub in this very process, besides what its arena takes
LOOK_S = 0.02

M = TypeVar("M", bound=Message)


class UpstreamPlanes:
    """The planes between the hub above and this daemon; all of them fill its arena.

    Args:
        config: the section `weight_hub`.
        hub: of this daemon; its `step` runs on another thread.
        gpu: receives broadcasts, if there is one; closed with this.
    """

    def __init__(self, config: WeightHubConfig, hub: WeightHub, gpu: GpuReceiving | None) -> None:
        self.offered = [*(gpu.planes if gpu else ()), "tcp"]
        self.facts = gpu.facts if gpu else None
        self._config = config
        self._hub = hub
        self._tcp = hub.planes.open_tcp()
        self._gpu = gpu
        self._end: UpstreamEnd | None = None

    def open(self, reply: Subscribed, security: Security) -> ReceiverEnd:
        """Register the layout with this daemon's hub; RejectedError if that has no room for it."""
        manifest = reply.manifest
        whole = held_whole(manifest)  # as it is here, whoever has it above
        size, pace = manifest.total_bytes, self._config.pace
        limit_s = pace.after(ANSWER_S).limit_s(self._config.slots * size)
        made = _answer(self._hub.ask(RegisterManifest(manifest=whole)), ArenaReady, limit_s)
        store = self._tcp.store_of(whole)
        arena = Arena.attach(made.path, slot_bytes=size)

        def delta_came(piece: Piece, data: bytes) -> None:
            store.encoded(piece.bucket, Delta(piece.base, piece.result, data))

        slots = [arena.slot(index) for index in range(made.slots)]
        pull = TcpReceiver(manifest, slots, self._config, delta_came, security)
        end: TcpReceiver | NcclReceiver = pull
        if self._gpu is not None and reply.plane == "nccl":
            end = self._gpu.broadcasts(arena, pull)
        self._end = UpstreamEnd(self._hub, store, arena, end, pace.limit_s(size))
        return self._end

    def publish(self, staged: StagedVersion) -> None:
        """Publish what was staged last to receivers of this host; RejectedError if refused."""
        assert self._end is not None
        self._end.publish(staged.version)

    def close(self) -> None:
        if self._gpu is not None:
            self._gpu.close()


class UpstreamEnd:
    """Receives versions into slots of the daemon's arena, on whichever plane.

    Args:
        hub: of this daemon, which grants the slots.
        store: of its buckets socket.
        arena: the slots, filled by `end`.
        end: of the plane that the hub above chose.
        deadline_s: seconds to wait for a free slot.
    """

    def __init__(
        self,
        hub: WeightHub,
        store: BucketStore,
        arena: Arena,
        end: TcpReceiver | NcclReceiver,
        deadline_s: float,
    ) -> None:
        self._hub = hub
        self._store = store
        self._arena = arena
        self._end = end
        self._deadline_s = deadline_s
        self._staged: Publish | None = None

    def receive(self, message: Prepare) -> Receiving:
        """Fetch a version; the next daemon may fetch it from here at the same time."""
        deadline = Deadline(self._deadline_s)
        asked = self._hub.ask(AcquireSlot(version=message.version))
        while not wait([asked], LOOK_S).done:
            if deadline.passed:
                return Receipt(error=f"no slot was free within {self._deadline_s:g} s")
            yield None
        granted = asked.result()
        if not isinstance(granted, SlotGranted):
            return Receipt(error=granted.reason if isinstance(granted, Nack) else repr(granted))
        slot, waited = granted.slot, self._deadline_s - deadline.left_s
        sums = message.checksums
        self._store.offer(slot, self._arena.slot(slot), sums, range(len(sums)))
        with closing(self._end.receive(message, slot)) as steps:
            while True:
                try:
                    bucket = next(steps)
                except StopIteration as end:
                    done: Receipt = end.value
                    break
                if bucket is not None:
                    self._store.arrived(slot, bucket)
                yield bucket
        self._staged = Publish(version=message.version, slot=slot, checksums=sums, snapshot_s=0.0)
        return dataclasses.replace(done, stage_s=done.stage_s + waited)

    def publish(self, version: int) -> None:
        """See `UpstreamPlanes.publish`."""
        if self._staged is None or self._staged.version != version:
            raise RejectedError(f"version {version} is not the one that was staged last")
        _answer(self._hub.ask(self._staged), Ok, ANSWER_S)

    def close(self) -> None:
        self._end.close()
        self._arena.close()


def _answer(asked: Future[Message], kind: type[M], timeout_s: float) -> M:
    """Wait for the answer of this daemon's own hub.

    Raises:
        RejectedError: it refuses.
        DeadlineError: it does not answer within `timeout_s`.
    """
    start = time.monotonic()
    try:
        answer = asked.result(timeout_s)
    except TimeoutError:
        spent = time.monotonic() - start
        raise DeadlineError(f"no answer from this daemon's own hub within {spent:.3g} s") from None
    if isinstance(answer, Nack):
        raise RejectedError(answer.reason, code=answer.code)
    assert isinstance(answer, kind)
    return answer
