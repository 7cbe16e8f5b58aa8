"""What a receiver offers the hub, and its end of the plane that the hub chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from umbra.proto.deadline import Pace
from umbra.proto.messages import Subscribed
from umbra.proto.net.keys import Security
from umbra.proto.records import GpuFacts
from umbra.services.config.weights import CONNECTIONS as CONNECTIONS
from umbra.services.process.host_memory import ask_for
from umbra.services.weights.memory import private_memory
from umbra.services.weights.planes.gpu import GpuReceiving
from umbra.services.weights.planes.plane import ReceiverEnd
from umbra.services.weights.planes.shm import ShmReceiver, ShmStream
from umbra.services.weights.planes.tcp import TcpReceiver, TcpStream
from umbra.services.weights.staging import BUFFERS

FRAME_BYTES = 4 << 20
STAGED = "versions that are staged until they are loaded"
REMEDY = (
    'set generator.receive = "streamed" for generators, which holds none, or weight_hub.dtype = '
    '"bfloat16", or use a host with more memory'
)


class ReceiverPlanes(Protocol):
    """Planes as a receiver has them."""

    offered: list[str]
    """Names, best first."""
    facts: GpuFacts | None
    """Of the GPU, where there is a plane for it."""
    streamed: bool
    """Versions are not held: the hub keeps the slot of one until it is loaded."""

    def open(self, reply: Subscribed, name: str, security: Security) -> ReceiverEnd:
        """The end for the layout and plane in `reply`.

        Args:
            reply: of the hub.
            name: of the receiver.
            security: keys of this process.

        Raises:
            StartupError: shared memory cannot be seen, or there is too little memory.
        """
        ...

    def close(self) -> None:
        """End what belongs to no end."""
        ...


class StagedPlanes:
    """Versions are held whole, verified, until the engine loads them.

    Args:
        planes: to be offered besides those of `gpu`, which come first.
        gpu: for planes `nccl` and `cuda_ipc`; closed with this.
        frame_bytes: of one message, at most, where weights come over a socket.
        connections: at a time to each source, there.
        allocate: gives the memory to hold them, so many writable bytes.
    """

    streamed = False

    def __init__(
        self,
        planes: Sequence[str] = ("shm",),
        *,
        gpu: GpuReceiving | None = None,
        frame_bytes: int = FRAME_BYTES,
        connections: int = CONNECTIONS,
        allocate: Callable[[int], memoryview] = private_memory,
    ) -> None:
        self.offered = [*(gpu.planes if gpu else ()), *planes]
        self.facts = gpu.facts if gpu else None
        self._gpu = gpu
        self._frame_bytes = frame_bytes
        self._connections = connections
        self._allocate = allocate

    def open(self, reply: Subscribed, name: str, security: Security) -> ReceiverEnd:
        """See `ReceiverPlanes.open`."""
        if self._gpu is not None and reply.plane in self._gpu.planes:
            return self._gpu.open(reply, name, self._frame_bytes, security)
        manifest = reply.manifest
        ask_for(BUFFERS * manifest.total_bytes, STAGED, REMEDY)
        buffers = [self._allocate(manifest.total_bytes) for _ in range(BUFFERS)]
        if reply.plane == "tcp":
            return TcpReceiver(
                name,
                manifest,
                buffers,
                self._frame_bytes,
                security=security,
                connections=self._connections,
            )
        return ShmReceiver(reply, buffers)

    def close(self) -> None:
        """End the GPU's worker."""
        if self._gpu is not None:
            self._gpu.close()


class StreamedPlanes:
    """Versions are read from where they lie when the engine loads them: for lack of memory.

    Loading goes bucket by bucket through a few buckets of memory, each verified before the engine
    sees it, the next ones being read meanwhile. So the pause contains the transfer, and a load that
    breaks off leaves weights that are neither the old version nor the new one: then the version
    before is loaded again from where it lay (the hub keeps that slot too until the push is over).

    Args:
        planes: to be offered.
        frame_bytes: of one message, at most, over plane `tcp`.
        pace: how long a load over plane `tcp` may take.
    """

    streamed = True
    facts: GpuFacts | None = None

    def __init__(self, planes: Sequence[str], frame_bytes: int, pace: Pace) -> None:
        self.offered = list(planes)
        self._frame_bytes = frame_bytes
        self._pace = pace

    def open(self, reply: Subscribed, name: str, security: Security) -> ReceiverEnd:
        """See `ReceiverPlanes.open`."""
        if reply.plane == "tcp":
            return TcpStream(name, reply.manifest, self._frame_bytes, self._pace, security)
        return ShmStream(reply)

    def close(self) -> None:
        """Nothing is open."""
