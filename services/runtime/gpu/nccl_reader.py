"""Plane `nccl`: an agent process receives into memory that it shares with this one.

A version that everyone waits for comes as a broadcast. What a broadcast did not bring (it broke
off, or the receiver joined later) is fetched bucket by bucket, as over plane `tcp`, into the same
memory; so nothing that one receiver lacks ever makes another one wait.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress

from umbra.proto.errors import UmbraError
from umbra.proto.messages import Prepare
from umbra.proto.records import NcclRound
from umbra.services.runtime.gpu.cuda import Device, GpuError
from umbra.services.runtime.gpu.worker_process import GpuWorkerProcess
from umbra.services.runtime.weights.arena import Arena
from umbra.services.runtime.weights.plane_reader import ReadResult
from umbra.services.runtime.weights.tcp_reader import TcpReader

TRANSFER_DEADLINES = 3  # of a chunk, that a whole transfer may take

log = logging.getLogger(__name__)


class NcclReader:
    """Fills the slots of `arena`; the buffers of `pull` are these same slots.

    Args:
        agent: the process that enters NCCL.
        arena: what it receives into.
        chunk_bytes: of device memory, and of a broadcast.
        pull: fetches what no broadcast brings.
        device: on which this very process loads what it gets; without it, it does not.
    """

    def __init__(
        self,
        agent: GpuWorkerProcess,
        arena: Arena,
        chunk_bytes: int,
        pull: TcpReader,
        device: Device | None = None,
    ) -> None:
        self._agent = agent
        self._arena = arena
        self._pull = pull
        self._entered = b""  # unique id of the communicator that the agent is in
        # What the agent has pinned is pinned for the agent alone.
        self._device = device
        self._pinned: list[int] = []
        if device is not None:
            self._pinned = [device.pin(arena.slot(slot)) for slot in range(arena.slots)]
        agent.use(arena, chunk_bytes)

    def take(self, message: Prepare, target: int, interrupted: Callable[[], bool]) -> ReadResult:
        """Receive a version into slot `target` and verify it there."""
        if message.round is None:
            return self._pull.take(message, target, interrupted)
        began = time.perf_counter()
        self._pull.overwritten(target)
        error = ""
        try:
            self._receive(message.round, target, interrupted)
        except UmbraError as problem:
            log.warning("broadcast of version %d: %s", message.version, problem)
            error, self._entered = str(problem), b""
            self._agent.begin()  # if it was killed, so that it is there for the next broadcast
        wire_s = time.perf_counter() - began
        wrong = self._pull.verify(target, message.checksums)
        if wrong is not None and not error:
            error = f"checksum of bucket {wrong} is wrong after a broadcast"
        stage_s = time.perf_counter() - began - wire_s
        return ReadResult(wire_s, stage_s, self._arena.slot_bytes, error)

    def close(self) -> None:
        """End the agent, close the sockets and the arena."""
        self._agent.kill()  # first: it writes into the arena
        pinned, self._pinned = self._pinned, []
        if self._device is not None:
            with suppress(GpuError):  # whoever uses the GPU next hears of it
                self._device.use()
                for address in pinned:
                    self._device.unpin(address)
        self._pull.close()
        self._arena.close()

    def _receive(self, group: NcclRound, slot: int, interrupted: Callable[[], bool]) -> None:
        self._agent.finish_begin(interrupted)
        if group.uid != self._entered:
            self._agent.order(
                "join", epoch=group.epoch, uid=group.uid.hex(), rank=group.rank, size=group.size
            )
            self._agent.answer(group.deadline_s, interrupted, abortable=False)
            self._entered = group.uid
        self._agent.order("transfer", epoch=group.epoch, slot=slot, deadline_s=group.deadline_s)
        self._agent.answer(TRANSFER_DEADLINES * group.deadline_s, interrupted)
