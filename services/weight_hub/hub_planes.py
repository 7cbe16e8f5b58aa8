"""The hub's end of every plane, and which receiver uses which."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from umbra.proto.errors import UmbraError
from umbra.proto.messages import Message, Prepare, Ready, Subscribe
from umbra.proto.records import GpuFacts, Manifest
from umbra.services.runtime.config import WeightHubConfig as WeightHubConfig
from umbra.services.runtime.gpu.worker_process import START_S, GpuWorkerProcess
from umbra.services.runtime.net.keys import OPEN, Security
from umbra.services.runtime.weights.arena import Arena
from umbra.services.weight_hub.background_plane import BackgroundPlane, Late
from umbra.services.weight_hub.effects import HubPeer
from umbra.services.weight_hub.ipc_plane import IpcPlane
from umbra.services.weight_hub.nccl_plane import NcclPlane
from umbra.services.weight_hub.planes import AUTO, GPU_PLANES, PLANES, Side, choose_plane
from umbra.services.weight_hub.tcp import TcpPlane

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
        self._chosen: dict[str, str] = {}
        self._tcp: TcpPlane | None = None
        self._held: dict[str, BackgroundPlane] = {}  # by plane: nccl, cuda_ipc
        self._broken: dict[str, str] = {}
        self._arena: Arena | None = None
        self._manifest: Manifest | None = None

    @property
    def busy(self) -> bool:
        """Whether `poll` will have something soon."""
        return any(plane.busy for plane in self._held.values())

    @property
    def refused(self) -> int:
        """How often somebody was refused buckets for lack of the right key."""
        return 0 if self._tcp is None else self._tcp.server.refused

    def agent_pid(self, plane: str) -> int | None:
        """Process id of the agent for a GPU plane, if it runs."""
        return self._held[plane].agent_pid if plane in self._held else None

    def of(self, name: str) -> str:
        """The plane of a receiver."""
        return self._chosen[name]

    def subscribe(self, peer: HubPeer, message: Subscribe) -> str:
        """Choose a receiver's plane; the weights endpoint of a relay that serves it, or "".

        Raises:
            RejectedError: there is no plane that both ends have.
            StartupError: the address of plane `tcp` is taken.
            UsageError: it is not ours, or other machines can reach it and there are no keys.
        """
        if message.gpu is not None:
            self._look_at_gpu()
        theirs = Side(message.host, message.gpu)
        broken = {**self._broken, **{n: p.broken for n, p in self._held.items() if p.broken}}
        plane = choose_plane(self._config.plane, self._side, theirs, message.planes, broken)
        elsewhere = plane in ("tcp", "nccl") and not message.serves
        if elsewhere and self._tcp is not None:
            relay = self._tcp.relay_at(message.host)
            if relay not in ("", message.avoid):
                return relay
        for held in self._held.values():
            held.left(peer.name)
        if plane in ("tcp", "nccl"):
            self.open_tcp().subscribed(peer.name, message, chained=plane == "tcp")
        if plane in GPU_PLANES:
            self._open(plane).subscribed(peer.name, peer.incarnation, message)
        self._chosen[peer.name] = plane
        return ""

    def open_tcp(self) -> TcpPlane:
        """The plane `tcp`, from now on.

        Raises:
            StartupError: its address is taken.
            UsageError: it is not ours, or other machines can reach it and there are no keys.
        """
        if self._tcp is None:
            host, _, _ = self._weights_endpoint().rpartition(":")
            endpoint = self._config.buckets_listen or f"{host}:*"
            self._tcp = TcpPlane("weight-hub", self._token, endpoint, self._config, self._security)
        return self._tcp

    def layout(self, arena: Arena, manifest: Manifest) -> None:
        """What is pushed from now on; before the arena of the layout before is given up."""
        self._arena, self._manifest = arena, manifest
        for plane in self._held.values():
            plane.layout(arena)

    def complete(self, name: str, message: Message, now: float) -> Message | None:
        """`message` with what its receiver's plane needs to know; None if it comes from `poll`."""
        plane = self._chosen[name]
        if not isinstance(message, Prepare):
            return message
        if plane in self._held:
            self._held[plane].hold(name, message, now)
            return None
        return self._fetch(name, message) if plane == "tcp" else message

    def poll(self, now: float) -> list[Late]:
        """What the planes that work in the background have done."""
        return [late for plane in self._held.values() for late in plane.poll(now)]

    def staged(self, name: str, message: Ready) -> None:
        """A receiver has a version, or could not get it."""
        if self._tcp is not None and self._manifest is not None:
            if message.source_lost:
                self._tcp.source_lost(name)
            if self._chosen.get(name) == "tcp":
                self._tcp.staged(name, message, self._manifest.total_bytes)
        for plane in self._held.values():
            plane.staged(name, message)

    def left(self, name: str) -> None:
        """A receiver is not subscribed any longer."""
        if self._tcp is not None:
            self._tcp.left(name)
        for plane in self._held.values():
            plane.left(name)

    def granted(self, slot: int) -> None:
        """`slot` is about to be written."""
        if self._tcp is not None:
            self._tcp.granted(slot)
        for plane in self._held.values():
            plane.granted(slot)

    def close(self) -> None:
        """Stop serving."""
        if self._tcp is not None:
            self._tcp.close()
        for plane in self._held.values():
            plane.close()

    def _fetch(self, name: str, message: Prepare) -> Prepare:
        """Complete a Prepare so that its receiver fetches the version over plane `tcp`."""
        assert self._manifest is not None and self._arena is not None
        tcp = self.open_tcp()
        tcp.layout(self._manifest)
        return tcp.prepare(name, message, self._arena.slot(message.slot))

    def _look_at_gpu(self) -> None:
        """Find out about our own GPU, once, if there is a plane for it."""
        if self._side.gpu is not None or self._broken:
            return
        asked = [name for name in GPU_PLANES if self._config.plane in (AUTO, name)]
        if all(PLANES[name].available() for name in asked):
            return
        agent = GpuWorkerProcess(self._config.device)
        try:
            facts = msgspec.convert(agent.call("facts", START_S)["facts"], GpuFacts)
            self._side = Side(self._side.host, facts)
        except UmbraError as error:
            self._broken = {name: f"the hub's GPU agent: {error}" for name in asked}
            log.warning("no GPU planes: %s", error)
        finally:
            agent.kill()

    def _open(self, name: str) -> BackgroundPlane:
        """A GPU plane, from now on; each has an agent of its own.

        Then one that hangs in NCCL takes no device memory with it when it is killed.
        """
        if name not in self._held:
            agent, config = GpuWorkerProcess(self._config.device), self._config
            if name == "cuda_ipc":
                plane: BackgroundPlane = IpcPlane(agent, config.deadline_s / 2)
            else:
                epoch = int(time.time() * 1000)
                plane = NcclPlane(agent, config.chunk_bytes, config.deadline_s, epoch, self._fetch)
            self._held[name] = plane
            if self._arena is not None:
                plane.layout(self._arena)
        return self._held[name]
