"""A relay: gets each version once for its node, serves the node's generators, hands buckets on.

Upstream it is a receiver of plane `tcp`; downstream it is a weight hub of its own, whose trainer is
the hub above. Buckets go straight into a slot of its arena, and from there to the next relay as
soon as each is verified, so that a chain of relays is hardly slower than one.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, closing

import msgspec
import zmq

from umbra.proto.errors import RejectedError, UmbraError, service_thread
from umbra.proto.messages import Prepare, Subscribed
from umbra.proto.net.address import reachable
from umbra.proto.net.channel import Channel
from umbra.proto.net.io_thread import IoThread
from umbra.proto.net.keys import OPEN, Security
from umbra.proto.net.server import Server
from umbra.proto.net.session import Session
from umbra.services.config import WeightHubConfig as WeightHubConfig
from umbra.services.process.metrics import MetricsFile
from umbra.services.weight_hub.service import ACCEPTS, CHANNEL, WeightHub
from umbra.services.weights.arena import Arena
from umbra.services.weights.manifest import held_whole
from umbra.services.weights.planes.bucket_records import Piece
from umbra.services.weights.planes.bucket_store import BucketStore, Delta
from umbra.services.weights.planes.nccl import NcclReceiver
from umbra.services.weights.planes.plane import Receipt, ReceiverEnd, Receiving
from umbra.services.weights.planes.receiving import GpuReceiving
from umbra.services.weights.planes.tcp import TcpHub, TcpReceiver
from umbra.services.weights.publisher import Publisher
from umbra.services.weights.receiver import Receiver

REGISTER_S = 60.0  # with a hub in this very process, besides what its arena takes
LOOK_S = 0.2

log = logging.getLogger(__name__)


class RelayReceiver:
    """Receives versions into slots of the relay's own arena, on whichever plane.

    Args:
        publisher: registered with the relay's own hub.
        store: of the relay's own buckets socket.
        arena: the slots, filled by `end`.
        end: of the plane that the hub above chose.
        deadline_s: seconds to wait for a free slot.
    """

    def __init__(
        self,
        publisher: Publisher,
        store: BucketStore,
        arena: Arena,
        end: TcpReceiver | NcclReceiver,
        deadline_s: float,
    ) -> None:
        self._publisher = publisher
        self._store = store
        self._arena = arena
        self._end = end
        self._deadline_s = deadline_s
        self._staged: tuple[int, Sequence[int]] = (-1, [])  # version and contents

    def receive(self, message: Prepare) -> Receiving:
        """Fetch a version; the next relay may fetch it from here at the same time."""
        began = time.perf_counter()
        try:
            data = self._publisher.slot(message.version, self._deadline_s)
        except UmbraError as error:
            return Receipt(error=str(error))
        waited = time.perf_counter() - began
        _, slot = self._publisher.place
        self._store.offer(slot, data, message.checksums, range(len(message.checksums)))
        with closing(self._end.receive(message, slot)) as steps:
            while True:
                try:
                    bucket = next(steps)
                except StopIteration as end:
                    done: Receipt = end.value
                    break
                if bucket is not None:
                    self._store.arrived(slot, bucket)
                yield bucket
        self._staged = (message.version, message.checksums)
        return dataclasses.replace(done, stage_s=done.stage_s + waited)

    def publish(self, version: int) -> None:
        """Push what was staged to the generators of this node.

        Raises:
            UmbraError: it is not what was staged last, or the relay's own hub refuses.
        """
        staged, contents = self._staged
        if staged != version:
            raise RejectedError(f"version {staged} was staged after {version}")
        self._publisher.publish(version, 0.0, list(contents))

    def close(self) -> None:
        self._end.close()
        self._arena.close()
        self._publisher.close()


class RelayPlanes:
    """The planes between the hub above and a relay, all of which end in its own arena.

    Args:
        config: the section `weight_hub`.
        hub: to the relay's own hub.
        tcp: the end of plane `tcp` of that hub, which hands buckets on.
        gpu: receives broadcasts, if the relay has one; closed with this.
    """

    def __init__(
        self, config: WeightHubConfig, hub: Channel, tcp: TcpHub, gpu: GpuReceiving | None
    ) -> None:
        self.offered = [*(gpu.planes if gpu else ()), "tcp"]
        self.facts = gpu.facts if gpu else None
        self.end: RelayReceiver | None = None  # that was opened last
        self._config = config
        self._hub = hub
        self._tcp = tcp
        self._gpu = gpu

    def open(self, reply: Subscribed, name: str, security: Security) -> ReceiverEnd:
        """See `ReceiverPlanes.open`; registers the layout with the relay's own hub."""
        manifest = reply.manifest
        whole = held_whole(manifest)  # as it is here, whoever has it above
        pace, nbytes = self._config.pace, manifest.total_bytes
        publisher = Publisher(self._hub, whole, pace=pace)
        publisher.register(pace.after(REGISTER_S).limit_s(self._config.slots * nbytes))
        store = self._tcp.store_of(whole)
        path, slots = publisher.arena
        arena = Arena.attach(path, slot_bytes=manifest.total_bytes)

        def delta_came(piece: Piece, data: bytes) -> None:
            store.encoded(piece.bucket, Delta(piece.base, piece.result, data))

        pull = TcpReceiver(
            name,
            manifest,
            [arena.slot(index) for index in range(slots)],
            self._config.receive_bucket_bytes,
            delta_came,
            security,
            self._config.connections,
        )
        end: TcpReceiver | NcclReceiver = pull
        if self._gpu is not None and reply.plane == "nccl":
            end = self._gpu.broadcasts(arena, pull)
        self.end = RelayReceiver(publisher, store, arena, end, pace.limit_s(nbytes))
        return self.end

    def close(self) -> None:
        if self._gpu is not None:
            self._gpu.close()


class Relay:
    """One relay; `run` until it is told to stop.

    Args:
        name: in the run; unique among all receivers of the hub.
        hub: weights endpoint of the hub.
        listen: address for the generators of this node; port * picks a free one.
        config: the section `weight_hub`.
        metrics: receives the rows of the pushes to the generators of this node.
        host: names the /dev/shm of this process; empty = find out.
        gpu: for plane `nccl` from the hub; closed with the relay.
        security: keys of role `relay`.

    Raises:
        StartupError: an address is taken.
        UsageError: one is not ours, or other machines can reach it and there are no keys.
    """

    def __init__(
        self,
        name: str,
        hub: str,
        listen: str,
        config: WeightHubConfig,
        metrics: MetricsFile,
        host: str = "",
        gpu: GpuReceiving | None = None,
        security: Security = OPEN,
    ) -> None:
        self._closing = threading.Event()
        self._stack = ExitStack()
        with ExitStack() as stack:
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            stack.callback(context.term)
            serving, publishing = security.within()
            server = Server(context, name, uuid.uuid4().hex[:12], serving)
            stack.callback(server.close)
            bound = server.bind(CHANNEL, listen, ACCEPTS)
            self.endpoint = reachable(bound, config.advertise)
            own = msgspec.structs.replace(config, plane="auto")
            self._hub = WeightHub(server, f"relay-{name}", own, metrics, host=host)
            stack.callback(self._hub.close)
            tcp = self._hub.planes.open_tcp()
            self.buckets = tcp.endpoint
            self._serving = service_thread(self._serve, "umbra-relay")
            self._serving.start()
            stack.callback(self._stop_serving)
            self._link = IoThread(name, uuid.uuid4().hex[:12], security=security)
            stack.callback(self._link.close)
            inner = IoThread(name, uuid.uuid4().hex[:12], security=publishing)
            stack.callback(inner.close)
            within = inner.channel(bound, "this relay's own hub", server="relay")
            self._planes = RelayPlanes(config, within, tcp, gpu)
            self._receiver = Receiver(
                self._link.channel(hub, "weight hub", server="weight_hub"),
                self._planes,
                host,
                serves=self.endpoint,
                buckets=self.buckets,
            )
            self._stack = stack.pop_all()

    def run(
        self, stopping: threading.Event, patience_s: float, session: Session | None = None
    ) -> None:
        """Relay versions until `stopping` is set; `session`, if there is one, hears how it goes.

        Raises:
            UmbraError: the hub does not answer within `patience_s` seconds, or refuses.
        """

        def waiting() -> None:
            if session is not None:
                session.progress("waiting for the weight hub", 0)

        try:
            if not self._receiver.subscribe_unless(stopping, patience_s, waiting):
                return
            while not stopping.is_set():
                staged = self._receiver.poll()
                if session is not None:
                    session.progress("relaying" if staged else "waiting", int(staged is not None))
                if staged is None:
                    self._receiver.wait(LOOK_S)
                    continue
                began, error = time.perf_counter(), ""
                try:
                    assert self._planes.end is not None
                    self._planes.end.publish(staged.version)
                except UmbraError as problem:
                    error = str(problem)
                self._receiver.committed(staged, time.perf_counter() - began, error)
                if session is not None and not error:
                    session.stats(version=staged.version)
        finally:
            self.close()

    def close(self) -> None:
        self._receiver.close()
        self._stack.close()

    def _serve(self) -> None:
        while not self._closing.is_set():
            self._hub.step(LOOK_S)

    def _stop_serving(self) -> None:
        self._closing.set()
        self._serving.join()
