"""A relay: gets each version once for its node, serves the node's generators, hands buckets on.

Upstream it is a receiver of plane `tcp`; downstream it is a weight hub of its own, whose trainer is
the hub above. Buckets go straight into a slot of its arena, and from there to the next relay as
soon as each is verified, so that a chain of relays is hardly slower than one.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import msgspec
import zmq

from umbra.proto.errors import RejectedError, UmbraError
from umbra.proto.messages import Prepare, Subscribed
from umbra.proto.records import Piece
from umbra.services.runtime.config import WeightHubConfig as WeightHubConfig
from umbra.services.runtime.gpu.receiving import GpuReceiving
from umbra.services.runtime.net.address import reachable
from umbra.services.runtime.net.io_thread import IoThread
from umbra.services.runtime.net.keys import OPEN, Security
from umbra.services.runtime.net.server import Server
from umbra.services.runtime.net.session import Session
from umbra.services.runtime.process.metrics import MetricsFile
from umbra.services.runtime.process.threads import service_thread
from umbra.services.runtime.weights.arena import Arena
from umbra.services.runtime.weights.plane_reader import PlaneReader, ReadResult
from umbra.services.runtime.weights.publisher import Publisher
from umbra.services.runtime.weights.receiver import Receiver
from umbra.services.runtime.weights.tcp_reader import TcpReader
from umbra.services.weight_hub.service import ACCEPTS, CHANNEL, WeightHub
from umbra.services.weight_hub.store import BucketStore, Delta

REGISTER_TIMEOUT_S = 60.0  # with a hub in this very process
LOOK_S = 0.2

log = logging.getLogger(__name__)


class RelayReader:
    """Fetches versions into slots of the relay's own arena.

    Args:
        name: of the relay.
        reply: what the hub above said.
        publisher: registered with the relay's own hub.
        store: of the relay's own buckets socket.
        config: the section `weight_hub`.
        gpu: receives broadcasts, if the relay has one.
        security: keys of this process.
    """

    def __init__(
        self,
        name: str,
        reply: Subscribed,
        publisher: Publisher,
        store: BucketStore,
        config: WeightHubConfig,
        gpu: GpuReceiving | None = None,
        security: Security = OPEN,
    ) -> None:
        self._publisher = publisher
        self._store = store
        self._config = config
        self._slot = -1
        path, slots = publisher.arena
        self._arena = Arena.attach(path, slot_bytes=reply.manifest.total_bytes)
        pull = TcpReader(
            name,
            reply.manifest,
            [self._arena.slot(index) for index in range(slots)],
            config.receive_bucket_bytes,
            self._arrived,
            self._delta_came,
            security,
        )
        self._buckets: PlaneReader = gpu.broadcasts(self._arena, pull) if gpu else pull
        self._staged: tuple[int, Sequence[int]] = (-1, [])  # version and contents

    def take(self, message: Prepare, target: int, interrupted: Callable[[], bool]) -> ReadResult:
        """Fetch a version; the next relay may fetch it from here at the same time."""
        began = time.perf_counter()
        try:
            data = self._publisher.slot(message.version, self._config.deadline_s)
        except UmbraError as error:
            return ReadResult(error=str(error))
        waited = time.perf_counter() - began
        _, self._slot = self._publisher.place
        self._store.offer(self._slot, data, message.checksums, arrived=False)
        done = self._buckets.take(message, self._slot, interrupted)
        self._staged = (message.version, message.checksums)
        return ReadResult(
            done.wire_s, done.stage_s + waited, done.wire_bytes, done.error, done.source_lost
        )

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
        """Close the sockets and the arena."""
        self._buckets.close()
        self._arena.close()
        self._publisher.close()

    def _arrived(self, bucket: int) -> None:
        self._store.arrived(self._slot, bucket)

    def _delta_came(self, piece: Piece, data: bytes) -> None:
        self._store.encoded(piece.bucket, Delta(piece.base, piece.result, data))


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
        self._name = name
        self._config = config
        self._intake: RelayReader | None = None
        self._closing = threading.Event()
        self._stack = ExitStack()
        with ExitStack() as stack:
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            stack.callback(context.term)
            serving, publishing = security.within()
            server = Server(context, name, uuid.uuid4().hex[:12], serving)
            stack.callback(server.close)
            self._bound = server.bind(CHANNEL, listen, ACCEPTS)
            self.endpoint = reachable(self._bound, config.advertise)
            config = msgspec.structs.replace(config, plane="auto")
            self._hub = WeightHub(server, f"relay-{name}", config, metrics, host=host)
            stack.callback(self._hub.close)
            self._tcp = self._hub.planes.open_tcp()
            self.buckets = self._tcp.endpoint
            self._serving = service_thread(self._serve, "umbra-relay")
            self._serving.start()
            stack.callback(self._stop_serving)
            self._link = IoThread(name, uuid.uuid4().hex[:12], security=security)
            stack.callback(self._link.close)
            self._inner = IoThread(name, uuid.uuid4().hex[:12], security=publishing)
            stack.callback(self._inner.close)
            self._gpu = gpu
            self._receiver = Receiver(
                self._link.channel(hub, "weight hub", server="weight_hub"),
                host,
                planes=["tcp"],
                gpu=gpu,
                open_intake=self._open,
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
        # In a thread, so that a stop is heard meanwhile; closing the link ends its question.
        executor = ThreadPoolExecutor(1, thread_name_prefix="subscribe")
        try:
            subscribed = executor.submit(self._receiver.subscribe, patience_s)
            while not subscribed.done():
                if session is not None:
                    session.progress("waiting for the weight hub", 0)
                if stopping.wait(LOOK_S):
                    return
            subscribed.result()
            while not stopping.is_set():
                staged = self._receiver.poll()
                if session is not None:
                    session.progress("relaying" if staged else "waiting", int(staged is not None))
                if staged is None:
                    self._receiver.wait(LOOK_S)
                    continue
                began, error = time.perf_counter(), ""
                try:
                    assert self._intake is not None
                    self._intake.publish(staged.version)
                except UmbraError as problem:
                    error = str(problem)
                self._receiver.committed(staged, time.perf_counter() - began, error)
                if session is not None and not error:
                    session.stats(version=staged.version)
        finally:
            executor.shutdown(wait=False)
            self.close()

    def close(self) -> None:
        """Leave everything."""
        self._receiver.close()
        self._stack.close()

    def _open(self, reply: Subscribed) -> PlaneReader:
        """An intake for the layout in `reply`; on the receiver's thread."""
        local = self._inner.channel(self._bound, "this relay's own hub", server="relay")
        publisher = Publisher(local, reply.manifest)
        publisher.register(REGISTER_TIMEOUT_S)
        store = self._tcp.layout(reply.manifest)
        self._intake = RelayReader(
            self._name, reply, publisher, store, self._config, self._gpu, self._link.security
        )
        return self._intake

    def _serve(self) -> None:
        while not self._closing.is_set():
            self._hub.step(LOOK_S)

    def _stop_serving(self) -> None:
        self._closing.set()
        self._serving.join()
