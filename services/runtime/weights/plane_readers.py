"""Which intake a receiver has for which plane, and the buffers that it fills."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from umbra.proto.messages import Subscribed
from umbra.services.runtime.gpu.cuda import DeviceMemory
from umbra.services.runtime.gpu.receiving import GpuReceiving
from umbra.services.runtime.net.keys import Security
from umbra.services.runtime.weights.plane_reader import ArenaReader, PlaneReader
from umbra.services.runtime.weights.staging import BUFFERS
from umbra.services.runtime.weights.tcp_reader import TcpReader

GPU_PLANES = {"nccl", "cuda_ipc"}
KEPT = {"tcp", "nccl", "cuda_ipc"}  # planes whose intake outlives a subscription

Buffers = Sequence[memoryview | DeviceMemory]


class PlaneReaders:
    """Opens one intake after another, and keeps the buffers while they fit.

    Args:
        name: of this receiver.
        frame_bytes: of one message, at most, where weights come over a socket.
        allocate: gives the memory to fill, so many writable bytes, but for the planes of `gpu`.
        gpu: for planes `nccl` and `cuda_ipc`.
        own: takes the place of all planes', with memory of its own.
        streamed: `own` keeps nothing from one subscription to the next.
        security: keys of this process.
    """

    def __init__(
        self,
        name: str,
        frame_bytes: int,
        allocate: Callable[[int], memoryview],
        gpu: GpuReceiving | None,
        own: Callable[[Subscribed], PlaneReader] | None,
        streamed: bool,
        security: Security,
    ) -> None:
        self.current: PlaneReader | None = None
        self.buffers: Buffers = []
        self._name = name
        self._frame_bytes = frame_bytes
        self._allocate = allocate
        self._gpu = gpu
        self._own = own
        self._streamed = streamed
        self._security = security
        self._reply: Subscribed | None = None  # what `current` was opened for
        self._private: list[memoryview] = []  # for planes shm and tcp

    def install(self, reply: Subscribed) -> bool:
        """Have an intake for `reply`; False if the one there is goes on: what it holds counts.

        Raises:
            StartupError: it cannot be opened; there is none then.
        """
        before, self._reply = self._reply, None
        same = before is not None and before.manifest.digest == reply.manifest.digest
        stays = reply.plane in KEPT and before is not None and before.plane == reply.plane
        if same and self.current is not None:
            if stays if self._own is None else not self._streamed:
                self._reply = reply
                return False
        self.close()  # first, since it may hold what its successor needs
        if not same:
            self._private = []
        self.current, self.buffers = self._open(reply)
        self._reply = reply
        return True

    @property
    def plane(self) -> str:
        """Of the intake; empty while there is none."""
        return self._reply.plane if self._reply is not None else ""

    def close(self) -> None:
        """Close the intake; versions that were handed out stay valid."""
        if self.current is not None:
            self.current.close()
            self.current = None

    def _open(self, reply: Subscribed) -> tuple[PlaneReader, Buffers]:
        manifest = reply.manifest
        if self._own is not None:
            intake = self._own(reply)
            self._private = self._private or [memoryview(b"") for _ in range(BUFFERS)]
            return intake, self._private
        if self._gpu is not None and reply.plane in GPU_PLANES:
            self._private = []
            return self._gpu.open(reply, self._name, self._frame_bytes, self._security)
        if not self._private:
            self._private = [self._allocate(manifest.total_bytes) for _ in range(BUFFERS)]
        if reply.plane == "tcp":
            intake = TcpReader(
                self._name, manifest, self._private, self._frame_bytes, security=self._security
            )
            return intake, self._private
        return ArenaReader(reply.path, manifest, self._private), self._private
