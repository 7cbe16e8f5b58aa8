"""The hub's end of every plane, and which receiver uses which."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import msgspec

from umbra.proto.errors import UmbraError
from umbra.proto.messages import Subscribe
from umbra.proto.records import GpuFacts, Manifest
from umbra.services.runtime.config import WeightHubConfig as WeightHubConfig
from umbra.services.runtime.gpu.worker_process import START_S, GpuWorkerProcess, result
from umbra.services.runtime.net.keys import OPEN, Security
from umbra.services.runtime.planes.background import Background
from umbra.services.runtime.planes.choice import AUTO, GPU_PLANES, PLANES, Side, choose_plane
from umbra.services.runtime.planes.cuda_ipc import IpcHub
from umbra.services.runtime.planes.nccl import NcclHub
from umbra.services.runtime.planes.plane import HubEnd
from umbra.services.runtime.planes.shm import ShmHub
from umbra.services.runtime.planes.tcp import TcpHub
from umbra.services.runtime.weights.arena import Arena
from umbra.services.weight_hub.effects import HubPeer

log = logging.getLogger(__name__)


class HubPlanes:
    """Planes are opened when the first receiver that can use them subscribes.

    Args:
        config: the section `weight_hub`.
        host: names the /dev/shm of this process.
        token: of this hub, in names.
        weights_endpoint: where the hub listens; known once it has bound.
        security: keys of this process.
    """

    def __init__(
        self,
        config: WeightHubConfig,
        host: str,
        token: str,
        weights_endpoint: Callable[[], str],
        security: Security = OPEN,
    ) -> None:
        self._config = config
        self._side = Side(host)
        self._token = token
        self._weights_endpoint = weights_endpoint
        self._security = security
        self._chosen: dict[str, HubEnd] = {}  # by receiver
        self._ends: dict[str, HubEnd] = {}
        self._tcp: TcpHub | None = None  # that among them
        self._broken: dict[str, str] = {}
        self._looking: Background[GpuFacts] = Background("umbra-gpu-facts")
        self._closing = threading.Event()
        self._layout: tuple[Arena, Manifest] | None = None

    @property
    def ends(self) -> list[HubEnd]:
        """Those that are open."""
        return list(self._ends.values())

    @property
    def refused(self) -> int:
        """How often somebody was refused buckets for lack of the right key."""
        return 0 if self._tcp is None else self._tcp.server.refused

    def of(self, name: str) -> HubEnd:
        """The end of a receiver's plane."""
        return self._chosen[name]

    def subscribe(self, peer: HubPeer, message: Subscribe) -> str:
        """Choose a receiver's plane; the weights endpoint of a relay that serves it, or "".

        Raises:
            RejectedError: there is no plane that both ends have.
            StartupError: the address of plane `tcp` is taken.
            UsageError: it is not ours, or other machines can reach it and there are no keys.
        """
        theirs = Side(message.host, message.gpu)
        broken = self._broken | {name: end.broken for name, end in self._ends.items() if end.broken}
        plane = choose_plane(self._config.plane, self._side, theirs, message.planes, broken)
        elsewhere = plane in ("tcp", "nccl") and not message.serves
        if elsewhere and self._tcp is not None:
            relay = self._tcp.relay_at(message.host)
            if relay not in ("", message.avoid):
                return relay
        end = self._open(plane)
        for other, before in self._ends.items():
            if other != plane and (other, plane) != ("tcp", "nccl"):
                before.left(peer.name)
        end.subscribed(peer.name, peer.incarnation, message)
        self._chosen[peer.name] = end
        return ""

    def open_tcp(self) -> TcpHub:
        """The end of plane `tcp`, from now on.

        Raises:
            StartupError: its address is taken.
            UsageError: it is not ours, or other machines can reach it and there are no keys.
        """
        if self._tcp is None:
            host, _, _ = self._weights_endpoint().rpartition(":")
            endpoint = self._config.buckets_listen or f"{host}:*"
            self._tcp = TcpHub("weight-hub", self._token, endpoint, self._config, self._security)
            self._add(self._tcp)
        return self._tcp

    def layout(self, arena: Arena, manifest: Manifest) -> None:
        """What is pushed from now on; before the arena of the layout before is given up."""
        self._layout = arena, manifest
        for end in self._ends.values():
            end.layout(arena, manifest)

    def awaits_gpu(self, message: Subscribe) -> bool:
        """Whether to choose for `message` only when our own GPU is known; begins to look at it."""
        if message.gpu is None or self._side.gpu is not None or self._broken:
            return False
        if all(PLANES[name].available() for name in self._gpu_planes):
            return False
        if not self._looking.busy:
            self._looking.start(self._facts)
        return True

    @property
    def looking(self) -> bool:
        """Whether our own GPU is being looked at."""
        return self._looking.busy

    def looked(self) -> bool:
        """Whether what `awaits_gpu` began has ended since the last call."""
        found = self._looking.take()
        if found is None:
            return False
        if isinstance(found, UmbraError):
            self._broken = {name: f"the hub's GPU worker: {found}" for name in self._gpu_planes}
            log.warning("no GPU planes: %s", found)
        else:
            self._side = Side(self._side.host, found)
        return True

    def close(self) -> None:
        """End all planes."""
        self._closing.set()
        self._looking.close()
        for end in self.ends:
            end.close()

    @property
    def _gpu_planes(self) -> list[str]:
        return [name for name in GPU_PLANES if self._config.plane in (AUTO, name)]

    def _facts(self) -> GpuFacts:
        """On the thread: a worker looks at the GPU, which takes seconds, and ends."""
        worker = GpuWorkerProcess(self._config.device)
        try:
            worker.order("facts")
            answer = worker.answer(START_S, abortable=False)
            return msgspec.convert(result(answer, self._closing.is_set)["facts"], GpuFacts)
        finally:
            worker.kill()

    def _open(self, name: str) -> HubEnd:
        """The end of a plane, from now on; each GPU plane's has a worker of its own.

        Then one that hangs in NCCL takes no device memory with it when it is killed.
        """
        if name in self._ends:
            return self._ends[name]
        config = self._config
        match name:
            case "tcp":
                return self.open_tcp()
            case "cuda_ipc":
                end: HubEnd = IpcHub(GpuWorkerProcess(config.device), config.pace)
            case "nccl":
                tcp, worker = self.open_tcp(), GpuWorkerProcess(config.device)
                epoch = int(time.time() * 1000)
                end = NcclHub(worker, config.chunk_bytes, config.pace, epoch, tcp)
            case _:
                end = ShmHub()
        self._add(end)
        return end

    def _add(self, end: HubEnd) -> None:
        self._ends[end.plane] = end
        if self._layout is not None:
            end.layout(*self._layout)
