"""A receiver's side: the planes it offers, its GPU, its end of the plane that the hub chooses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from umbra.proto.errors import StartupError, UmbraError, UsageError
from umbra.proto.messages import Subscribed
from umbra.proto.net.keys import Security
from umbra.services.config import WeightHubConfig
from umbra.services.process.host import ask_for
from umbra.services.weights.arena import Arena
from umbra.services.weights.gpu.cuda import Device, index_of
from umbra.services.weights.gpu.worker import GpuWorkerProcess
from umbra.services.weights.memory import private_memory
from umbra.services.weights.planes.bucket_fetch import TcpReceiver
from umbra.services.weights.planes.cuda_ipc import IpcReceiver
from umbra.services.weights.planes.nccl import NcclReceiver
from umbra.services.weights.planes.plane import GPU_PLANES, ReceiverEnd, ShmReceiver, unavailable

REMEDY = 'set weight_hub.dtype = "bfloat16", or use a host with more memory'
AUTO_SHARE = 0.05  # of a GPU that plane auto may take for versions: estimates leave it to nobody

log = logging.getLogger(__name__)


class GpuReceiving:
    """The GPU of a receiver; with `loads` its engine is there alone, and loads from its memory."""

    def __init__(
        self, device: int, planes: Sequence[str], config: WeightHubConfig, *, loads: bool
    ) -> None:
        self.planes = list(planes)
        self._config = config
        self._loads = loads
        self.worker = GpuWorkerProcess(device)
        self.facts = self.worker.facts()  # it ends with that; plane nccl starts it again

    def open(self, reply: Subscribed, security: Security) -> ReceiverEnd:
        """Open the end for `reply`; StartupError if host or GPU have too little memory."""
        manifest = reply.manifest
        if reply.plane == "cuda_ipc":
            versions = self._config.slots + 1  # the hub's, and the one verified here
            if lacking := self._lacking(versions * manifest.total_bytes):
                raise StartupError(f'{lacking}: set weight_hub.plane = "cuda_ipc" to take them')
            return IpcReceiver(manifest, index_of(self.facts))
        gpu = None
        if self._loads and (lacking := self._lacking(manifest.total_bytes)):
            log.info('versions go to host memory: %s; plane "nccl" puts them on the GPU', lacking)
        elif self._loads:
            gpu = Device(index_of(self.facts))
        arena = Arena.anonymous(slot_bytes=manifest.total_bytes, slots=1)
        pull = TcpReceiver(manifest, [arena.slot(0)], self._config, security=security)
        config = self._config
        return NcclReceiver(self.worker, arena, config.chunk_bytes, pull, config.pace, gpu)

    def _lacking(self, nbytes: int) -> str:
        """Return why plane auto puts no `nbytes` of versions on the GPU; empty if it does."""
        if self._config.plane != "auto":
            return ""
        device = index_of(self.facts)
        total = Device(device).total_bytes
        if nbytes <= AUTO_SHARE * total:
            return ""
        return (
            f"versions on GPU {device} would take {nbytes} of its {total} bytes, and plane auto "
            f"takes at most {AUTO_SHARE:.0%}"
        )

    def close(self) -> None:
        self.worker.kill()


def open_planes(
    config: WeightHubConfig,
    device: str,
    allocate: Callable[[int], memoryview] = private_memory,
    gpus: int = 1,
) -> StagedPlanes:
    """Return the planes of a receiver that computes on `device` (torch's name: cpu, cuda, cuda:1).

    `gpus` are those that its engine is divided over, from `device` on: plane `cuda_ipc` puts a
    version on one.

    Raises:
        UsageError: a GPU plane is set by name and cannot be used here.
    """
    kind, _, index = device.partition(":")
    if config.plane == "cuda_ipc" and (kind != "cuda" or gpus > 1):
        where = device if kind != "cuda" else f"{gpus} (generator.tensor_parallel)"
        raise UsageError(
            f'weight_hub.plane = "cuda_ipc" needs a receiver on one GPU, and this one computes on '
            f'{where}: set its device to "cuda", or weight_hub.plane to "auto"'
        )
    asked = ["nccl"] if gpus > 1 else list(GPU_PLANES)
    if config.plane == "auto" and kind != "cuda":
        asked = []
    gpu = find_gpu(config, asked, int(index or 0), loads=kind == "cuda" and gpus == 1)
    others = ["shm", "tcp"] if config.plane == "auto" else [config.plane]
    host_planes = [plane for plane in others if plane not in GPU_PLANES]
    return StagedPlanes(host_planes, gpu=gpu, config=config, allocate=allocate)


def find_gpu(
    config: WeightHubConfig, asked: Sequence[str], device: int, *, loads: bool = False
) -> GpuReceiving | None:
    """Return GPU `device` for all planes among `asked` that `weight_hub.plane` allows.

    With `loads` an engine is on that GPU alone.

    Raises:
        UsageError: one of them is set by name and cannot be used here.
    """
    reasons = {plane: unavailable(plane) for plane in asked if config.plane in ("auto", plane)}
    planes = [plane for plane in asked if reasons.get(plane, "") is None]
    reason = "; ".join(text for text in reasons.values() if text)
    if planes:
        try:
            return GpuReceiving(device, planes, config, loads=loads)
        except UmbraError as error:
            reason = str(error)
            log.warning("no GPU planes for weights: %s", error)
    if reasons and config.plane != "auto":
        raise UsageError(
            f'weight_hub.plane = "{config.plane}" cannot be used here: {reason}; set "auto", "shm" '
            'or "tcp"'
        )
    return None


class StagedPlanes:
    """The planes that a receiver offers, best first, and its end of the chosen one.

    Args:
        planes: to be offered besides the planes of `gpu`, which come first.
        gpu: for planes `nccl` and `cuda_ipc`; closed with this.
        allocate: gives so many writable bytes for a version of plane `tcp`.
    """

    def __init__(
        self,
        planes: Sequence[str] = ("shm",),
        *,
        gpu: GpuReceiving | None = None,
        config: WeightHubConfig | None = None,
        allocate: Callable[[int], memoryview] = private_memory,
    ) -> None:
        self.offered = [*(gpu.planes if gpu else ()), *planes]
        self.facts = gpu.facts if gpu else None
        self._gpu = gpu
        self._config = config or WeightHubConfig()
        self._allocate = allocate

    def open(self, reply: Subscribed, security: Security) -> ReceiverEnd:
        """Open the end for the layout and plane in `reply`.

        Raises:
            StartupError: shared memory cannot be seen, or there is too little memory.
        """
        if self._gpu is not None and reply.plane in self._gpu.planes:
            return self._gpu.open(reply, security)
        if reply.plane == "shm":
            return ShmReceiver(reply)
        size = reply.manifest.total_bytes
        ask_for(size, "a version that is fetched until it is loaded", REMEDY)
        memory = [self._allocate(size)]
        return TcpReceiver(reply.manifest, memory, self._config, security=security)

    def close(self) -> None:
        if self._gpu is not None:
            self._gpu.close()
