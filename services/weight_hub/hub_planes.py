"""The hub's end of every plane, and which receiver uses which."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from umbra.proto.errors import RejectedError, UmbraError
from umbra.proto.messages import Subscribe
from umbra.proto.net.keys import OPEN, Security
from umbra.proto.records import Manifest
from umbra.proto.sockets import next_port
from umbra.services.config import WeightHubConfig as WeightHubConfig
from umbra.services.weight_hub.push import HubPeer
from umbra.services.weights.arena import Arena
from umbra.services.weights.gpu.cuda import facts
from umbra.services.weights.gpu.worker import GpuWorkerProcess
from umbra.services.weights.planes.bucket_server import TcpHub
from umbra.services.weights.planes.cuda_ipc import IpcHub
from umbra.services.weights.planes.nccl import NcclHub
from umbra.services.weights.planes.plane import (
    AUTO,
    GPU_PLANES,
    HubEnd,
    ShmHub,
    Side,
    choose_plane,
    unavailable,
)

log = logging.getLogger(__name__)


class HubPlanes:
    """The planes of a hub, opened when the first receiver that can use them subscribes.

    `wake` is called, from any thread, when one has to be polled. With `fetched`, versions were
    verified as they came into the arena.
    """

    def __init__(
        self,
        config: WeightHubConfig,
        host: str,
        security: Security = OPEN,
        wake: Callable[[], object] = lambda: None,
        fetched: bool = False,
    ) -> None:
        self.ends: dict[str, HubEnd] = {}  # by plane
        self.chosen: dict[str, HubEnd] = {}  # by receiver, until it leaves
        self.tcp: TcpHub | None = None  # that among `ends`
        self._config = config
        self._wake, self._fetched = wake, fetched
        self._security = security
        self._broken: dict[str, str] = {}
        self._side = Side(host)
        self._layout: tuple[Arena, Manifest] | None = None

    def plane_of(self, name: str) -> str:
        return self.chosen[name].plane if name in self.chosen else ""

    def left(self, name: str) -> None:
        """Note that a receiver is not subscribed any longer."""
        self.chosen.pop(name, None)
        for end in self.ends.values():
            end.left(name)

    def subscribe(self, peer: HubPeer, message: Subscribe) -> str:
        """Choose a receiver's plane; the weights endpoint of a relay that serves it, or "".

        Raises:
            RejectedError: there is no plane that both ends have.
            StartupError, UsageError: as `open_tcp`.
        """
        offered, relay = message.planes, ""
        if not message.serves and self.tcp is not None:
            relay = self.tcp.relay_at(message.host, message.avoid)
        if self._layout is not None and self._layout[1].owners:
            if relay:
                return relay
            if "tcp" not in offered:
                raise RejectedError(
                    "no way to push weights to this receiver: they lie on several trainer hosts, "
                    "and it offers no plane tcp; start a relay on its host (`umbra weight-hub "
                    "--upstream HUB`)",
                    code="no_plane",
                )
            offered = ["tcp"]
        elif message.gpu is not None:
            self._look_at_gpu()
        theirs = Side(message.host, message.gpu)
        broken = self._broken | {name: end.broken for name, end in self.ends.items() if end.broken}
        plane = choose_plane(self._config.plane, self._side, theirs, offered, broken)
        if plane in ("tcp", "nccl") and relay:
            return relay
        end = self._open(plane)
        for other, before in self.ends.items():
            if other != plane and (other, plane) != ("tcp", "nccl"):
                before.left(peer.name)
        end.subscribed(peer.name, peer.incarnation, message)
        self.chosen[peer.name] = end
        return ""

    def open_tcp(self) -> TcpHub:
        """Return the end of plane `tcp`, opened if need be; raises as `BucketServer`."""
        if self.tcp is None:
            endpoint = next_port(self._config.listen)
            self.tcp = TcpHub(endpoint, self._config, self._security)
            self._add(self.tcp)
        return self.tcp

    def layout(self, arena: Arena, manifest: Manifest) -> None:
        self._layout = arena, manifest
        for end in self.ends.values():
            end.layout(arena, manifest)

    def check_layout(self, manifest: Manifest) -> None:
        """Check that versions of `manifest` can be pushed by the plane that is set.

        Raises:
            RejectedError: they lie on several hosts, and it is not one that fetches from all.
            StartupError, UsageError: as `open_tcp`, which they need then.
        """
        if not manifest.owners:
            return
        self.open_tcp()
        if self._config.plane not in (AUTO, "tcp"):
            raise RejectedError(
                f'weight_hub.plane = "{self._config.plane}" cannot be used with trainer.nodes > 1: '
                "it takes weights from one host only. Set "
                f'"{AUTO}" or "tcp"; behind a relay, receivers use shared memory all the same',
                code="no_plane",
            )

    def close(self) -> None:
        for end in self.ends.values():
            end.close()

    def _look_at_gpu(self) -> None:
        """Find out about our own GPU, for the first receiver that has one."""
        if self._side.gpu is not None or self._broken:
            return
        if all(unavailable(n) for n in GPU_PLANES if self._config.plane in (AUTO, n)):
            return
        try:
            self._side = Side(self._side.host, facts(self._config.device))
        except UmbraError as error:
            self._broken = dict.fromkeys(GPU_PLANES, f"the hub's GPU: {error}")
            log.warning("no GPU planes: %s", error)

    def _open(self, name: str) -> HubEnd:
        """Return the end of a plane, opened if need be; each GPU plane's has its own worker.

        Then one that hangs in NCCL takes no device memory with it when it is killed.
        """
        config, wake = self._config, self._wake
        if name == "tcp":
            self.open_tcp()
        elif name not in self.ends:
            if name == "cuda_ipc":
                end: HubEnd = IpcHub(GpuWorkerProcess(config.device), config.pace, wake)
            elif name == "nccl":
                tcp, worker = self.open_tcp(), GpuWorkerProcess(config.device)
                epoch = int(time.time() * 1000)
                end = NcclHub(worker, config.chunk_bytes, config.pace, epoch, tcp, wake)
            else:
                end = ShmHub(wake, verifies=not self._fetched)
            self._add(end)
        return self.ends[name]

    def _add(self, end: HubEnd) -> None:
        self.ends[end.plane] = end
        if self._layout is not None:
            end.layout(*self._layout)
