"""The weight daemon of a host: it holds versions in shared memory and hands them on.

Without an upstream it is the hub of a run: the trainer writes into its arena. With one it fetches
each version once for its host. With an owner as well, it holds the rows of every version that the
ranks of one more trainer host write (`PartHub`).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from concurrent.futures import Future, wait
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec
import zmq

from umbra.proto import messages as m
from umbra.proto.deadline import Deadline
from umbra.proto.errors import DeadlineError, RejectedError, UmbraError
from umbra.proto.net.io_thread import IoThread
from umbra.proto.net.keys import OPEN, Security
from umbra.proto.net.server import Server
from umbra.proto.net.session import Session
from umbra.proto.sockets import reachable
from umbra.services.config import WeightHubConfig as WeightHubConfig
from umbra.services.process.metrics import MetricsFile
from umbra.services.weight_hub.service import ACCEPTS, CHANNEL, WeightHub
from umbra.services.weights.arena import Arena, remove_leftovers, run_and_suffix, shm_host
from umbra.services.weights.manifest import check_manifest, held_whole, owned_ranges
from umbra.services.weights.planes.bucket_fetch import TcpReceiver
from umbra.services.weights.planes.bucket_server import BucketStore, StoredVersion, TcpHub
from umbra.services.weights.planes.nccl import NcclReceiver
from umbra.services.weights.planes.plane import Background, Receipt, ReceiverEnd, Receiving
from umbra.services.weights.planes.receiving import GpuReceiving, StagedPlanes
from umbra.services.weights.receiver import Receiver, StagedVersion

ANSWER_S = 60.0  # of the hub in this very process, besides what its arena takes
LOOK_S = 0.02
STATE_S = 1.0  # between two messages of a part hub to the hub
AWAY_S = 5.0  # without an answer, until the hub counts as away
LISTEN_S = 0.2

log = logging.getLogger(__name__)

M = TypeVar("M", bound=m.Message)


class UpstreamPlanes(StagedPlanes):
    """The planes between the hub above and the `hub` of this daemon, whose arena they fill."""

    def __init__(self, config: WeightHubConfig, hub: WeightHub, gpu: GpuReceiving | None) -> None:
        super().__init__(["tcp"], gpu=gpu, config=config)
        self._hub = hub
        self._tcp = hub.planes.open_tcp()
        self._end: UpstreamEnd | None = None

    def open(self, reply: m.Subscribed, security: Security) -> ReceiverEnd:
        """Register the layout with this daemon's hub; RejectedError if that has no room for it."""
        manifest = reply.manifest
        size, pace = manifest.total_bytes, self._config.pace
        limit_s = pace.after(ANSWER_S).limit_s(self._config.slots * size)
        # As it is here, whoever has it above.
        asked = self._hub.ask(m.RegisterManifest(manifest=held_whole(manifest)))
        made = _answer(asked, m.ArenaReady, limit_s)
        store = self._tcp.server.store
        assert store is not None
        arena = Arena.attach(made.path, slot_bytes=size)

        slots = [arena.slot(index) for index in range(made.slots)]
        pull = TcpReceiver(manifest, slots, self._config, store.encoded, security)
        end: TcpReceiver | NcclReceiver = pull
        if self._gpu is not None and reply.plane == "nccl":
            end = NcclReceiver(self._gpu.worker, arena, self._config.chunk_bytes, pull, pace)
        self._end = UpstreamEnd(self._hub, store, arena, end, pace.limit_s(size))
        return self._end

    def publish(self, staged: StagedVersion) -> None:
        """Publish the version staged last to receivers of this host; RejectedError if refused."""
        assert self._end is not None
        self._end.publish(staged.version)


@dataclass(slots=True, eq=False)
class UpstreamEnd:
    """The receiver of versions into free slots of the daemon's `arena`, which `end` fills."""

    hub: WeightHub
    store: BucketStore
    arena: Arena
    end: TcpReceiver | NcclReceiver
    deadline_s: float
    staged: m.Publish | None = None

    def receive(self, message: m.Prepare) -> Receiving:
        """Fetch a version; the next daemon may fetch it from here at the same time."""
        version, sums, deadline = message.version, message.checksums, Deadline(self.deadline_s)
        asked = self.hub.ask(m.AcquireSlot(version=version))
        while not wait([asked], LOOK_S).done:
            if deadline.passed:
                return Receipt(error=f"no slot was free within {self.deadline_s:g} s")
            yield None
        granted = asked.result()
        if not isinstance(granted, m.SlotGranted):
            return Receipt(error=granted.reason if isinstance(granted, m.Nack) else repr(granted))
        slot, waited = granted.slot, self.deadline_s - deadline.left_s
        absent = set(range(len(sums)))
        self.store.offer(StoredVersion(slot, self.arena.slot(slot), sums, absent))
        with closing(self.end.receive(message, slot)) as steps:
            while True:
                try:
                    bucket = next(steps)
                except StopIteration as end:
                    done: Receipt = end.value
                    break
                if bucket is not None:
                    self.store.arrived(slot, bucket)
                yield bucket
        self.staged = m.Publish(version=version, slot=slot, checksums=sums, snapshot_s=0.0)
        return replace(done, stage_s=done.stage_s + waited)

    def publish(self, version: int) -> None:
        if self.staged is None or self.staged.version != version:
            raise RejectedError(f"version {version} is not the one that was staged last")
        _answer(self.hub.ask(self.staged), m.Ok, ANSWER_S)

    def close(self) -> None:
        self.end.close()
        self.arena.close()


def _answer(asked: Future[m.Message], kind: type[M], timeout_s: float) -> M:
    try:
        answer = asked.result(timeout_s)
    except TimeoutError:
        reason = f"no answer from this daemon's own hub within {timeout_s:.3g} s"
        raise DeadlineError(reason) from None
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
        with ExitStack() as stack:
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            stack.callback(context.term)
            self._server = Server(context, name, uuid.uuid4().hex[:12], security)
            stack.callback(self._server.close)
            self.endpoint = reachable(self._server.bind(CHANNEL, config.listen, ACCEPTS))
            self._stack = stack.pop_all()

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
            config, upstream, receiver = self._config, self._upstream, None
            if upstream:  # which chooses the plane of what comes
                config = msgspec.structs.replace(config, plane="auto")
            hub = WeightHub(self._server, run_id, config, self._metrics, self._host, upstream)
            self.hub = hub
            stack.callback(hub.close)
            if upstream:
                link = IoThread(self._name, uuid.uuid4().hex[:12], security=self._security)
                stack.callback(link.close)
                planes = UpstreamPlanes(self._config, hub, self._gpu)
                receiver = Receiver(
                    link.channel(upstream, "weight hub", server="weight_hub"),
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


class PartHub:
    """A holder of the rows that the ranks of one more trainer host write of each version.

    The weight hub orders which arena it holds, a file of the whole layout with memory for its own
    buckets alone, and which slots it hands out. Ranks of its host write into that file, receivers
    fetch from it. When it is killed its file stays, and the next one removes it.

    Use: `run` until it has to stop, then `close`.

    Args:
        owner: trainer host, from 1.
        upstream: weights endpoint of the hub.
        config: the section `weight_hub`; buckets are fetched at its `listen`.

    Raises as `BucketServer`.
    """

    def __init__(
        self,
        name: str,
        owner: int,
        upstream: str,
        config: WeightHubConfig,
        host: str = "",
        security: Security = OPEN,
    ) -> None:
        self._owner = owner
        self._host = host or shm_host()
        self._making: Background[Arena] = Background("umbra-part")
        self._order: m.HoldArena | None = None  # what the hub told us to hold
        self._arena: Arena | None = None  # None: not made yet, or `_error` says why it cannot be
        self._error = ""
        with ExitStack() as stack:
            stack.callback(self._making.close)
            self._tcp = TcpHub(config.listen, config, security, owner)
            stack.callback(self._tcp.close)
            self.buckets = self._tcp.buckets
            link = IoThread(name, uuid.uuid4().hex[:12], security=security)
            stack.callback(link.close)
            self._hub = link.channel(upstream, "weight hub", server="weight_hub")
            self._stack = stack.pop_all()

    def run(
        self, stopping: threading.Event, patience_s: float, session: Session | None = None
    ) -> None:
        """Hold and hand out until `stopping` is set; `session`, if any, gets the progress.

        Raises:
            DeadlineError: the hub is away for longer than `patience_s` seconds.
            RejectedError: it refuses us.
        """
        deadline = Deadline(patience_s, f"no answer from the {self._hub.peer}")
        while not stopping.is_set():
            if self._state(stopping):
                deadline.restart()
            elif not stopping.is_set():
                deadline.check()
            offered = self._listen(stopping, time.monotonic() + STATE_S)
            if session is not None:
                session.progress("handing out" if offered else "waiting", offered)

    def close(self) -> None:
        """Leave, and remove the arena; processes that have it mapped may go on."""
        self._drop()
        self._stack.close()

    # -- the hub ----------------------------------------------------------------------------------

    def _state(self, stopping: threading.Event) -> bool:
        known = self._order if self._arena is not None or self._error else None
        state = m.PartState(
            owner=self._owner,
            host=self._host,
            buckets=self.buckets,
            path=known.path if known is not None else "",
            error=self._error,
        )
        try:
            self._hub.call(state, m.Ok, timeout_s=AWAY_S, stopping=stopping.is_set)
        except DeadlineError:
            return False
        return True

    def _listen(self, stopping: threading.Event, until: float) -> int:
        """Handle the hub's commands until it needs our state, or `until`; return how many."""
        done = 0
        while not stopping.is_set() and (left_s := until - time.monotonic()) > 0:
            if self._made():
                break
            try:
                message = self._hub.pushes.get(timeout=min(LISTEN_S, left_s))
            except queue.Empty:
                continue
            done += 1
            match message:
                case m.HoldArena():
                    self._hold(message)
                case m.OfferSlot():
                    self._offer(message)
                case _:
                    log.warning("the weight hub pushed an unexpected %s", type(message).__name__)
        return done

    # -- the arena --------------------------------------------------------------------------------

    def _hold(self, order: m.HoldArena) -> None:
        if self._order == order and not self._error:
            return
        self._drop()
        if order.path:
            self._order = order
            self._making.start(lambda: _arena(order, self._owner))

    def _made(self) -> bool:
        """Take the arena that was made; return whether there was one, or an error."""
        made, order = self._making.take(), self._order
        if made is None:
            return False
        assert order is not None
        if isinstance(made, UmbraError):
            log.warning("cannot make the arena %s: %s", order.path, made)
            self._error = str(made)
            return True
        self._tcp.layout(made, order.manifest)
        self._arena = made
        log.info("holding the arena %s", made.path)
        return True

    def _drop(self) -> None:
        made = self._making.finish()  # bounded by the size of the arena
        arena = made if isinstance(made, Arena) else self._arena
        self._arena, self._order, self._error = None, None, ""
        if arena is not None:
            for slot in range(arena.slots):
                self._tcp.granted(slot)
            arena.unlink()
            arena.close()

    def _offer(self, message: m.OfferSlot) -> None:
        if self._arena is None or self._order is None or self._order.path != message.path:
            return  # of an arena before
        slot, count, buckets = message.slot, len(message.checksums), self._order.manifest.buckets
        if not 0 <= slot < self._arena.slots or count not in (0, len(buckets)):
            log.warning(
                "the weight hub offers slot %d of %d with %d checksums for %d buckets",
                *(slot, self._arena.slots, count, len(buckets)),
            )
        elif count == 0:
            self._tcp.granted(slot)
        else:
            self._tcp.offer(slot, message.checksums, deltas=message.deltas)


def _arena(order: m.HoldArena, owner: int) -> Arena:
    """Make the arena of `order`, with memory for the buckets of `owner`."""
    check_manifest(order.manifest)
    run_id, suffix = run_and_suffix(order.path)
    remove_leftovers(run_id)  # of a part hub that was killed
    size, own = order.manifest.total_bytes, owned_ranges(order.manifest, owner)
    return Arena.create(run_id, suffix, slot_bytes=size, slots=order.slots, own=own)
