"""The process that enters NCCL: `python -m umbra.services.weights.gpu.worker DEVICE`.

It receives orders over a `Pipe` and answers in their order; each is a map.

    {"op": "facts"}                                        -> {"facts": {...}}
    {"op": "attach", "slot_bytes": N, "chunk_bytes": N}, with the arena's file descriptor
    {"op": "unique_id"}                                    -> {"uid": hex}
    {"op": "join", "epoch": E, "uid": hex, "rank": R, "size": N}
    {"op": "transfer", "epoch": E, "slot": S, "deadline_s": T}
    {"op": "export"}                                       -> {"handle": hex}
    {"op": "upload", "slot": S, "deadline_s": T}
    {"op": "abort"}

In a transfer rank 0 sends a slot of its arena, the others receive into one of theirs. `export`
gives a handle of device memory with as many slots as the arena, which `upload` fills, and later
transfers that receive. An answer with "error" says what went wrong; with "broken", that the process
is of no more use. A thread receives while an order is carried out: `abort` works at any time, and
the process ends with its owner. If it hangs in NCCL, its owner kills it.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from umbra.proto.deadline import Deadline, Pace
from umbra.proto.errors import PeerLostError, UmbraError, UsageError, service_thread
from umbra.proto.records import GpuFacts, NcclRound
from umbra.services.process.child import ChildProcess, child_environ, start_worker
from umbra.services.process.parent import parents_end
from umbra.services.process.pipe import Pipe
from umbra.services.weights.arena import Arena
from umbra.services.weights.gpu import cuda

WORKER = ("-m", "umbra.services.weights.gpu.worker")
START_S = 120.0  # to import CuPy and to make a CUDA context
ABORT_S = 10.0  # for the current order to end after an abort
END_S = 5.0
LOOK_S = 0.02  # that a step waits for an answer

T = TypeVar("T")

log = logging.getLogger(__name__)


def result(steps: Generator[object, None, T], interrupted: Callable[[], bool] = lambda: False) -> T:
    """Run all steps of a generator, which wait by themselves; return its result.

    Raises PeerLostError once `interrupted`, which is asked between two steps.
    """
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
        if interrupted():
            steps.close()
            raise PeerLostError("the operation was interrupted")


class GpuWorkerProcess:
    """One worker process; a hung one costs a restart and nothing else. For one thread at a time."""

    def __init__(
        self, device: int, environ: Mapping[str, str] | None = None, program: Sequence[str] = WORKER
    ) -> None:
        self.starts = 0
        self._argv = [sys.executable, "-P", *program, str(device)]
        self._environ = {**child_environ(), **(environ or {})}
        self._process: ChildProcess | None = None
        self._pipe: Pipe[dict[str, Any]] | None = None
        self._pending = 0  # answers that nobody has waited for yet
        self._arena: Arena | None = None
        self._chunk_bytes = 0
        self._attach_s = START_S
        self._state = "none"  # of the arena: "none", "attaching", "attached"
        self._entered = b""  # unique id of the communicator that it is in
        self.memory: bytes | None = None  # the handle of its device memory, once it is exported

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def use(self, arena: Arena, chunk_bytes: int, pace: Pace) -> None:
        """Work on `arena` from now on, in chunks of `chunk_bytes`; starts to pin it, at `pace`."""
        if self._state != "none":
            self.kill()  # it would hold the memory of the arena before
        self._arena, self._chunk_bytes = arena, chunk_bytes
        self._attach_s = pace.after(START_S).limit_s(arena.slots * arena.slot_bytes)
        self.begin()

    def begin(self) -> None:
        """Start the worker if it does not run, without waiting for it."""
        if self._state == "none" and self._arena is not None:
            self._state = "attaching"
            size, fd = self._arena.slot_bytes, self._arena.fileno()
            self.order("attach", fd, slot_bytes=size, chunk_bytes=self._chunk_bytes)

    def attached(self) -> Generator[None, None, None]:
        """Wait, step by step, until the worker runs and has pinned the arena; as `answer`."""
        self.begin()
        if self._state == "attaching":
            try:
                yield from self.answer(self._attach_s, abortable=False)
            except UmbraError:
                self.kill()
                raise
            self._state = "attached"

    def exported(self) -> Generator[None, None, bytes]:
        """Return the handle of device memory for all slots; UmbraError if there is no room."""
        yield from self.attached()
        if self.memory is None:
            self.order("export")
            answer = yield from self.answer(START_S, abortable=False)
            self.memory = bytes.fromhex(answer["handle"])
        return self.memory

    def broadcast(self, group: NcclRound, slot: int, limit_s: float) -> Generator[None, None, None]:
        """Broadcast `slot`, or receive it there, in the communicator of `group`; as `answer`.

        The worker enters that first, unless it is in it since the last broadcast.
        """
        entered, self._entered = self._entered, b""  # if this breaks off, it is in none
        epoch, wait_s = group.epoch, group.deadline_s
        if group.uid != entered:
            uid = group.uid.hex()
            self.order("join", epoch=epoch, uid=uid, rank=group.rank, size=group.size)
            yield from self.answer(wait_s, abortable=False)
        self.order("transfer", epoch=epoch, slot=slot, deadline_s=wait_s)
        yield from self.answer(limit_s)
        self._entered = group.uid

    def order(self, op: str, fd: int = -1, **arguments: Any) -> None:
        """Give an order to the worker, started if need be; PeerLostError if it has ended."""
        if self._pipe is None:
            self.starts += 1
            self._process, end = start_worker(self._argv, self._environ)
            self._pipe = Pipe(end, dict[str, Any])
        try:
            self._pipe.send({"op": op, **arguments}, fd)
        except OSError as error:
            self.kill()
            raise PeerLostError(f"the GPU worker ended before the order {op!r}") from error
        self._pending += 1

    def answer(
        self, timeout_s: float, *, abortable: bool = True
    ) -> Generator[None, None, dict[str, Any]]:
        """Return the answer to the oldest order that has none yet; each step waits for `LOOK_S`.

        Closing it before the answer is there aborts the order, or kills the worker if the order is
        not `abortable`.

        Raises:
            DeadlineError: none came in time; the worker was killed.
            PeerLostError: the worker has ended.
            UmbraError: it says what went wrong; one that says it is broken was killed.
        """
        if self._pending == 0:
            raise PeerLostError("the GPU worker does not run, or has no order")
        deadline = Deadline(timeout_s, "no answer from the GPU worker")
        try:
            while (answer := self._receive(LOOK_S)) is None:
                if deadline.passed:
                    self.kill()
                    deadline.check(": killed")
                yield
        except GeneratorExit:
            if abortable:
                self._leave()
            else:
                self.kill()
            raise
        if error := answer.get("error"):
            if answer.get("broken"):
                self.kill()
            raise UmbraError(f"GPU worker: {error}")
        return answer

    def call(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        self.order(op, **arguments)
        return result(self.answer(timeout_s))

    def facts(self) -> GpuFacts:
        """Read the GPU's facts and end the worker, whose context takes half a GiB."""
        try:
            return msgspec.convert(self.call("facts", START_S)["facts"], GpuFacts)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill it; the next command starts another."""
        process, self._process = self._process, None
        self._pending, self._state, self._entered, self.memory = 0, "none", b"", None
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if process is not None:
            process.kill()
            if process.wait(END_S) is None:
                log.warning("GPU worker %d does not end: it hangs in the driver", process.pid)

    def _leave(self) -> None:
        """Abort the current order; kill a worker that cannot do even that."""
        with suppress(UmbraError):
            self.order("abort")
            while self._pending and self._receive(ABORT_S) is not None:
                pass
        if self._pending:
            self.kill()

    def _receive(self, timeout_s: float) -> dict[str, Any] | None:
        assert self._pipe is not None
        try:
            answer = self._pipe.receive(timeout_s)
        except EOFError:
            self.kill()
            raise PeerLostError("the GPU worker has ended") from None
        self._pending -= answer is not None
        return answer


POLL_S = 0.0002  # between two looks at an event
ORDERS = ("facts", "unique_id", "attach", "join", "transfer", "export", "upload")
RING = 2  # device buffers


def reached(mark: cuda.CudaEvent, limit_s: float, complaint: str) -> Generator[None, None, None]:
    """Wait, step by step, until the GPU has come to `mark`; DeadlineError after `limit_s`."""
    deadline = Deadline(limit_s, complaint)
    while not mark.done:
        deadline.check()
        yield
        time.sleep(POLL_S)


def chunks(total: int, chunk_bytes: int) -> list[tuple[int, int]]:
    return [(start, min(start + chunk_bytes, total)) for start in range(0, total, chunk_bytes)]


def broadcast(
    ranges: Sequence[tuple[int, int]],
    device: cuda.Device,
    communicator: cuda.NcclCommunicator,
    *,
    host: int,
    places: Sequence[int],
    sends: bool,
    deadline_s: float,
) -> None:
    """Send a version from host memory, or receive it there; all ranks with the same `ranges`.

    Copies of one chunk run beside the broadcast of another. After any failure the communicator is
    aborted, the bytes in `host` are incomplete, and nothing writes there any more.

    Args:
        ranges: byte ranges of the version, from `chunks`.
        host: address of the version in pinned memory.
        places: device address of each range; one may come again `RING` ranges later.
        deadline_s: seconds that any one chunk may take.

    Raises:
        DeadlineError: a chunk was not through in time: a peer is gone or stuck.
    """
    marks: list[cuda.CudaEvent] = []

    def wait(index: int) -> None:
        deadline = Deadline(deadline_s, f"chunk {index} of {len(ranges)} was not broadcast")
        while not marks[index].done:
            communicator.check()
            deadline.check()
            time.sleep(POLL_S)

    try:
        for index, (start, end) in enumerate(ranges):
            buffer, size = places[index], end - start
            if index >= RING:
                wait(index - RING)
            if sends:
                device.to_device(buffer, host + start, size)
                device.mark_copies()
                communicator.broadcast(buffer, size)
                marks.append(device.mark_collectives())
            else:
                communicator.broadcast(buffer, size)
                device.mark_collectives()
                device.to_host(host + start, buffer, size)
                marks.append(device.mark_copies())
        for index in range(max(0, len(ranges) - RING), len(ranges)):
            wait(index)
    except BaseException:
        communicator.abort()
        device.drain()  # `host` is about to be filled in another way
        raise


class GpuWorker:
    """One GPU's end of the communicators, one at a time, or the hub's device memory."""

    def __init__(self, device: int) -> None:
        self._index = device
        self._opened: cuda.Device | None = None
        self._communicator: cuda.NcclCommunicator | None = None
        self._epoch = 0
        self._rank = 0
        self._attached: Arena | None = None
        self._chunk_bytes = 0
        self._pinned: list[int] = []
        self._ring: list[int] = []
        self._exported = 0

    def carry_out(self, order: dict[str, Any], fd: int = -1) -> dict[str, Any]:
        """Execute one command; errors are in the answer."""
        arguments = dict(order) if fd < 0 else {**order, "fd": fd}
        try:
            if (op := arguments.pop("op", "")) not in ORDERS:
                raise UsageError(f"no such order: {order}")
            return getattr(self, op)(**arguments)
        except cuda.GpuError as error:
            return {"error": str(error), "broken": True}
        except UmbraError as error:
            return {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - whatever it is, its owner has to hear of it
            return {"error": repr(error), "broken": True}

    def facts(self) -> dict[str, Any]:
        """Return the facts that all workers must share; makes the CUDA context."""
        facts = cuda.facts(self._index)
        _ = self._device
        return {"facts": msgspec.to_builtins(facts)}

    def unique_id(self) -> dict[str, Any]:
        return {"uid": cuda.unique_id().hex()}

    def attach(self, slot_bytes: int, chunk_bytes: int, fd: int) -> dict[str, Any]:
        device = self._device
        arena = self._attached = Arena.inherited(fd, slot_bytes=slot_bytes)
        self._chunk_bytes = chunk_bytes
        self._pinned = [device.pin(arena.slot(index)) for index in range(arena.slots)]
        return {}

    def join(self, epoch: int, uid: str, rank: int, size: int) -> dict[str, Any]:
        """Enter the communicator of `epoch`; blocks until all its ranks do."""
        self.abort()
        device = self._device
        if not self._ring and not self._exported:
            largest = min(self._chunk_bytes, self._arena.slot_bytes)
            self._ring = [device.allocate(largest) for _ in range(RING)]
        self._communicator = cuda.NcclCommunicator(device, size, bytes.fromhex(uid), rank)
        self._epoch, self._rank = epoch, rank
        return {}

    def transfer(self, epoch: int, slot: int, deadline_s: float) -> dict[str, Any]:
        communicator = self._communicator
        if communicator is None or epoch != self._epoch:
            raise UsageError(f"this worker is not in the communicator of epoch {epoch}")
        size = self._arena.slot_bytes
        ranges = chunks(size, self._chunk_bytes)
        if self._exported:  # what comes to the host is read back from there
            first = self._exported + slot * cuda.device_stride(size)
            places = [first + start for start, _ in ranges]
        else:
            places = [self._ring[index % RING] for index in range(len(ranges))]
        broadcast(
            ranges,
            self._device,
            communicator,
            host=self._pinned[slot],
            places=places,
            sends=self._rank == 0,
            deadline_s=deadline_s,
        )
        return {}

    def export(self) -> dict[str, Any]:
        """Allocate device memory with a place for each slot of the arena."""
        device, arena = self._device, self._arena
        self._exported = device.allocate(arena.slots * cuda.device_stride(arena.slot_bytes))
        return {"handle": device.export(self._exported).hex()}

    def upload(self, slot: int, deadline_s: float) -> dict[str, Any]:
        device, size = self._device, self._arena.slot_bytes
        target = self._exported + slot * cuda.device_stride(size)
        device.to_device(target, self._pinned[slot], size)
        result(reached(device.mark_copies(), deadline_s, f"slot {slot} was not on the GPU"))
        return {}

    def abort(self) -> None:
        """Leave the communicator; if that hangs as well, end the process."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None and not communicator.abort():
            os._exit(UmbraError.exit_code)

    @property
    def _device(self) -> cuda.Device:
        self._opened = self._opened or cuda.Device(self._index)
        return self._opened

    @property
    def _arena(self) -> Arena:
        if self._attached is None:
            raise UsageError("no arena is attached")
        return self._attached


def serve(worker: GpuWorker, owner: Pipe[dict[str, Any]]) -> None:
    """Execute commands until the owner hangs up."""
    waiting: queue.SimpleQueue[tuple[dict[str, Any], int]] = queue.SimpleQueue()

    def watch() -> None:
        try:
            while (order := owner.receive()) is not None:
                if order["op"] == "abort":
                    worker.abort()  # now, and not when the order before it is done
                waiting.put((order, owner.fd))
        except EOFError:
            os._exit(0)  # the owner is gone; there may be a thread in NCCL that never returns

    service_thread(watch, "orders").start()
    while True:
        order, fd = waiting.get()
        owner.send({} if order["op"] == "abort" else worker.carry_out(order, fd))


if __name__ == "__main__":
    serve(GpuWorker(int(sys.argv[1])), Pipe(parents_end(), dict[str, Any]))
