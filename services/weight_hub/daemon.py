"""The weight daemon of a host: it holds versions in shared memory and hands them on.

Without an upstream it is the hub of a run: the trainer writes into its arena. With one it fetches
each version once for its host. With an owner as well, it holds the share of every version that the
ranks of one more trainer host write (`part.py`).
"""

from __future__ import annotations

import dataclasses
import threading
import time
import uuid
from concurrent.futures import Future, wait
from contextlib import ExitStack, closing
from typing import TypeVar

import msgspec
import zmq

from umbra.proto import messages as m
from umbra.proto.deadline import Deadline
from umbra.proto.errors import DeadlineError, RejectedError
from umbra.proto.net.io_thread import IoThread
from umbra.proto.net.keys import OPEN, Security
from umbra.proto.net.server import Server
from umbra.proto.net.session import Session
from umbra.proto.sockets import reachable
from umbra.services.config import WeightHubConfig as WeightHubConfig
from umbra.services.process.metrics import MetricsFile
from umbra.services.weight_hub.service import ACCEPTS, CHANNEL, WeightHub
from umbra.services.weights.arena import Arena
from umbra.services.weights.manifest import held_whole
from umbra.services.weights.planes.bucket_server import BucketStore, Delta
from umbra.services.weights.planes.bucket_wire import Piece
from umbra.services.weights.planes.nccl import NcclReceiver
from umbra.services.weights.planes.plane import Receipt, ReceiverEnd, Receiving
from umbra.services.weights.planes.receiving import GpuReceiving, StagedPlanes
from umbra.services.weights.planes.tcp import TcpReceiver
from umbra.services.weights.receiver import Receiver, StagedVersion

ANSWER_S = 60.0  # of the hub in this very process, besides what its arena takes
LOOK_S = 0.02

M = TypeVar("M", bound=m.Message)


class UpstreamPlanes(StagedPlanes):
    """The planes between the hub above and this daemon; all of them fill its arena.

    Args:
        hub: of this daemon; its `step` runs on another thread.
        gpu: receives broadcasts, if there is one; closed with this.
    """

    def __init__(self, config: WeightHubConfig, hub: WeightHub, gpu: GpuReceiving | None) -> None:
        super().__init__(["tcp"], gpu=gpu, config=config)
        self._hub = hub
        self._tcp = hub.planes.open_tcp()
        self._end: UpstreamEnd | None = None

    def open(self, reply: m.Subscribed, security: Security) -> ReceiverEnd:
        """Register the layout with this daemon's hub; RejectedError if that has no room for it."""
        manifest = reply.manifest
        whole = held_whole(manifest)  # as it is here, whoever has it above
        size, pace = manifest.total_bytes, self._config.pace
        limit_s = pace.after(ANSWER_S).limit_s(self._config.slots * size)
        made = _answer(self._hub.ask(m.RegisterManifest(manifest=whole)), m.ArenaReady, limit_s)
        store = self._tcp.store_of(whole)
        arena = Arena.attach(made.path, slot_bytes=size)

        def delta_came(piece: Piece, data: bytes) -> None:
            store.encoded(piece.bucket, Delta(piece.base, piece.result, data))

        slots = [arena.slot(index) for index in range(made.slots)]
        pull = TcpReceiver(manifest, slots, self._config, delta_came, security)
        end: TcpReceiver | NcclReceiver = pull
        if self._gpu is not None and reply.plane == "nccl":
            end = self._gpu.broadcasts(arena, pull)
        self._end = UpstreamEnd(self._hub, store, arena, end, pace.limit_s(size))
        return self._end

    def publish(self, staged: StagedVersion) -> None:
        """Publish the version staged last to receivers of this host; RejectedError if refused."""
        assert self._end is not None
        self._end.publish(staged.version)


class UpstreamEnd:
    """The receiver of versions into slots of the daemon's arena, on whichever plane.

    Args:
        arena: the slots, filled by `end`.
        end: of the plane that the hub above chose.
        deadline_s: seconds to wait for a free slot.
    """

    def __init__(
        self,
        hub: WeightHub,
        store: BucketStore,
        arena: Arena,
        end: TcpReceiver | NcclReceiver,
        deadline_s: float,
    ) -> None:
        self._hub = hub
        self._store = store
        self._arena = arena
        self._end = end
        self._deadline_s = deadline_s
        self._staged: m.Publish | None = None

    def receive(self, message: m.Prepare) -> Receiving:
        """Fetch a version; the next daemon may fetch it from here at the same time."""
        deadline = Deadline(self._deadline_s)
        asked = self._hub.ask(m.AcquireSlot(version=message.version))
        while not wait([asked], LOOK_S).done:
            if deadline.passed:
                return Receipt(error=f"no slot was free within {self._deadline_s:g} s")
            yield None
        granted = asked.result()
        if not isinstance(granted, m.SlotGranted):
            return Receipt(error=granted.reason if isinstance(granted, m.Nack) else repr(granted))
        slot, waited = granted.slot, self._deadline_s - deadline.left_s
        sums = message.checksums
        self._store.offer(slot, self._arena.slot(slot), sums, range(len(sums)))
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
        self._staged = m.Publish(version=message.version, slot=slot, checksums=sums, snapshot_s=0.0)
        return dataclasses.replace(done, stage_s=done.stage_s + waited)

    def publish(self, version: int) -> None:
        if self._staged is None or self._staged.version != version:
            raise RejectedError(f"version {version} is not the one that was staged last")
        _answer(self._hub.ask(self._staged), m.Ok, ANSWER_S)

    def close(self) -> None:
        self._end.close()
        self._arena.close()


def _answer(asked: Future[m.Message], kind: type[M], timeout_s: float) -> M:
    start = time.monotonic()
    try:
        answer = asked.result(timeout_s)
    except TimeoutError:
        spent = time.monotonic() - start
        raise DeadlineError(f"no answer from this daemon's own hub within {spent:.3g} s") from None
    if isinstance(answer, m.Nack):
        raise RejectedError(answer.reason, code=answer.code)
    assert isinstance(answer, kind)
    return answer


class Daemon:
    """A daemon that serves receivers; `run` until it has to stop.

    Args:
        name: in the run; with an upstream unique among all receivers of the hub.
        upstream: weights endpoint of the hub to fetch from; empty: the trainer publishes here.
        gpu: for plane `nccl` from upstream; closed with this.

    Raises:
        StartupError: the address is taken.
        UsageError: it is not ours, or other machines can reach it and there are no keys.
    """

    def __init__(
        self,
        name: str,
        config: WeightHubConfig,
        metrics: MetricsFile,
        *,
        upstream: str = "",
        host: str = "",
        gpu: GpuReceiving | None = None,
        security: Security = OPEN,
    ) -> None:
        security.check_bind(config.listen)
        self._name = name
        self._config = config
        self._metrics = metrics
        self._upstream = upstream
        self._host = host
        self._gpu = gpu
        self._security = security
        self.hub: WeightHub | None = None  # while it runs
        self._stack = ExitStack()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stack.callback(context.term)
        self._server = Server(context, name, uuid.uuid4().hex[:12], security)
        self._stack.callback(self._server.close)
        with ExitStack() as failed:
            failed.push(self._stack)
            bound = self._server.bind(CHANNEL, config.listen, ACCEPTS)
            self.endpoint = reachable(bound)
            failed.pop_all()

    def run(
        self,
        run_id: str,
        stopping: threading.Event,
        patience_s: float,
        session: Session | None = None,
    ) -> None:
        """Serve until `stopping` is set; `session`, if there is one, gets the progress.

        Raises:
            UmbraError: the hub above does not answer within `patience_s` seconds, or refuses.
        """
        with self._stack as stack:
            metrics, security = self._metrics, self._security
            config = self._config
            if self._upstream:  # which chooses the plane of what comes
                config = msgspec.structs.replace(config, plane="auto")
            hub = WeightHub(self._server, run_id, config, metrics, self._host, self._upstream)
            self.hub = hub
            stack.callback(hub.close)
            receiver = None
            if self._upstream:
                link = IoThread(self._name, uuid.uuid4().hex[:12], security=security)
                stack.callback(link.close)
                planes = UpstreamPlanes(self._config, hub, self._gpu)
                receiver = Receiver(
                    link.channel(self._upstream, "weight hub", server="weight_hub"),
                    planes,
                    self._host,
                    serves=self.endpoint,
                    buckets=hub.planes.open_tcp().buckets,
                    load=planes.publish,
                )
                stack.callback(receiver.close)
                stack.callback(hub.leave)  # first: `receiver` may wait for its answer

                def waiting() -> None:
                    hub.step(0.0)
                    if session is not None:
                        session.progress("waiting for the weight hub", 0)

                if not receiver.subscribe_unless(stopping, patience_s, waiting):
                    return
            while not stopping.is_set():
                served = hub.step()
                if receiver is not None:
                    receiver.check()
                if session is not None:
                    held_back = bool(hub.protocol.held_back)
                    idle = "waiting for a part hub" if held_back else "waiting"
                    session.progress("serving" if served and not held_back else idle, 1)
                    session.stats(**hub.stats())

    def close(self) -> None:
        """Free the address, if it never ran."""
        self._stack.close()
