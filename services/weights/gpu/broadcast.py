"""One version through a communicator: chunks in a ring of device buffers, with deadlines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from umbra.proto.deadline import Deadline

POLL_S = 0.0002  # between two looks at an event


class StreamMark(Protocol):
    """A point in a stream of work."""

    @property
    def done(self) -> bool: ...


class Copier(Protocol):
    """What is needed of a device; `cuda.Device` is one."""

    def to_device(self, target: int, source: int, size: int) -> None: ...
    def to_host(self, target: int, source: int, size: int) -> None: ...
    def mark_copies(self) -> StreamMark: ...
    def mark_collectives(self) -> StreamMark: ...
    def drain(self) -> None: ...


class Communicator(Protocol):
    """What is needed of a communicator; `cuda.NcclCommunicator` is one."""

    def broadcast(self, address: int, size: int) -> None: ...
    def check(self) -> None: ...
    def abort(self) -> bool: ...


def chunks(total: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """The byte ranges in which `total` bytes are broadcast."""
    return [(start, min(start + chunk_bytes, total)) for start in range(0, total, chunk_bytes)]


def broadcast(
    ranges: Sequence[tuple[int, int]],
    device: Copier,
    communicator: Communicator,
    *,
    host: int,
    ring: Sequence[int],
    sends: bool,
    deadline_s: float,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Send a version from host memory, or receive it there; all ranks with the same `ranges`.

    Copies of one chunk run beside the broadcast of another. After any failure the communicator is
    aborted and of no more use, the bytes in `host` are incomplete, and nothing writes there any
    more.

    Args:
        ranges: byte ranges of the version, from `chunks`.
        host: address of the version in pinned memory.
        ring: addresses of device buffers, each as large as the largest chunk.
        sends: rank 0 sends, all others receive.
        deadline_s: seconds that any one chunk may take.

    Raises:
        DeadlineError: a chunk was not through in time: a peer is gone or stuck.
        PeerLostError: NCCL says so itself.
    """
    marks: list[StreamMark | None] = [None] * len(ring)

    def wait(index: int, lane: int) -> None:
        mark = marks[lane]
        what = f"chunk {index} of {len(ranges)} was not broadcast"
        deadline = Deadline(deadline_s, what, clock=clock)
        while mark is not None and not mark.done:
            communicator.check()
            deadline.check()
            pause(POLL_S)

    try:
        for index, (start, end) in enumerate(ranges):
            lane, size = index % len(ring), end - start
            wait(index - len(ring), lane)
            buffer = ring[lane]
            if sends:
                device.to_device(buffer, host + start, size)
                device.mark_copies()
                communicator.broadcast(buffer, size)
                marks[lane] = device.mark_collectives()
            else:
                communicator.broadcast(buffer, size)
                device.mark_collectives()
                device.to_host(host + start, buffer, size)
                marks[lane] = device.mark_copies()
        for index in range(max(0, len(ranges) - len(ring)), len(ranges)):
            wait(index, index % len(ring))
    except BaseException:
        communicator.abort()
        # The kernels have ended, and with them what waits for them: copies into `host`, which is
        # about to be filled in another way.
        device.drain()
        raise
