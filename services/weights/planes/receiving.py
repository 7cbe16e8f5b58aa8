"""What a receiver offers the hub, and its end of the plane that the hub chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from umbra.proto.messages import Subscribed
from umbra.proto.net.keys import Security
from umbra.proto.records import GpuFacts
from umbra.services.config.weights import CONNECTIONS as CONNECTIONS
from umbra.services.process.host_memory import ask_for
from umbra.services.weights.memory import private_memory
from umbra.services.weights.planes.gpu import GpuReceiving
from umbra.services.weights.planes.plane import ReceiverEnd
from umbra.services.weights.planes.shm import ShmReceiver
from umbra.services.weights.planes.tcp import TcpReceiver

FRAME_BYTES = 4 << 20
STAGED = "versions that are staged until they are loaded"
REMEDY = 'set weight_hub.dtype = "bfloat16", or use a host with more memory'


class ReceiverPlanes(Protocol):
    """Planes as a receiver has them."""

    offered: list[str]
    """Names, best first."""
    facts: GpuFacts | None
    """Of the GPU, where there is a plane for it."""

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
        ask_for(manifest.total_bytes, STAGED, REMEDY)
        data = self._allocate(manifest.total_bytes)
        if reply.plane == "tcp":
            return TcpReceiver(
                name,
                manifest,
                [data],
                self._frame_bytes,
                security=security,
                connections=self._connections,
            )
        return ShmReceiver(reply, data)

    def close(self) -> None:
        """End the GPU's worker."""
        if self._gpu is not None:
            self._gpu.close()
