"""The weight hub: owns the arena, runs the push protocol over its ROUTER socket."""

from __future__ import annotations

import logging
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import cast

from umbra.proto import messages as m
from umbra.proto.access import KeyRole
from umbra.proto.errors import RejectedError, StartupError, UmbraError, UsageError, WireError
from umbra.proto.net.server import Request, Server
from umbra.proto.records import Manifest
from umbra.services.config import WeightHubConfig as WeightHubConfig
from umbra.services.process.metrics import MetricsFile
from umbra.services.weight_hub.hub_planes import HubPlanes
from umbra.services.weight_hub.parts import NOTHING, Parts
from umbra.services.weight_hub.push import (
    Effect,
    Failed,
    HubPeer,
    HubReply,
    Pushed,
    PushProtocol,
    Send,
    Ticket,
)
from umbra.services.weights.arena import Arena, remove_leftovers, shm_host
from umbra.services.weights.manifest import check_manifest, owned_ranges
from umbra.services.weights.planes.plane import Background, Settled

MOST_NAMES = 8192  # of processes, the last ones
BINDING = (m.RegisterManifest, m.PartState, m.Subscribe)  # what a process begins with


@dataclass(frozen=True, slots=True)
class _Owner:
    incarnation: str
    identity: bytes
    role: KeyRole | None


class Bindings:
    """Whose name is whose: it belongs to the connection and the key that it came with first.

    As at the buffer: names and incarnations are known to all, the identity of its sockets only to
    a process itself. A new incarnation may take its name over, with a key of the same role.
    """

    def __init__(self) -> None:
        self.owners: OrderedDict[str, _Owner] = OrderedDict()

    def check(self, request: Request) -> m.Nack | None:
        """Return why `request` may not be made in the name that it states; None if it may.

        The first of a process, and of a new incarnation of it, claims the name.
        """
        header = request.header
        owner = self.owners.get(header.sender)
        begins = isinstance(request.body, BINDING)
        known = owner is not None and owner.incarnation == header.incarnation
        if owner is not None:
            if owner.role != request.role or (known and owner.identity != request.identity):
                return _not_allowed(f"{header.sender!r} came over another connection")
            if not known and not begins:
                return _not_allowed(f"{header.sender!r} is of an unknown incarnation")
        if begins and not known:
            self.owners[header.sender] = _Owner(header.incarnation, request.identity, request.role)
        if header.sender in self.owners:
            self.owners.move_to_end(header.sender)
        if len(self.owners) > MOST_NAMES:
            self.owners.popitem(last=False)
        return None


def _not_allowed(reason: str) -> m.Nack:
    return m.Nack(code="not_allowed", reason=reason, path="sender")


CHANNEL = "weights"
ACCEPTS: tuple[type[m.Message], ...] = (
    m.RegisterManifest, m.AcquireSlot, m.Publish, m.PartState, m.Subscribe, m.Ready, m.Committed,
    m.HubStatusRequest, m.Ping,
)  # fmt: skip
# Requests made in the name of their sender; the rest is asked by anyone, or by an operator.
IN_A_NAME = (
    m.RegisterManifest,
    m.AcquireSlot,
    m.Publish,
    m.PartState,
    m.Subscribe,
    m.Ready,
    m.Committed,
)
LEAVING = m.Nack(code="leaving", reason="this daemon is about to end")
POLL_S = 0.2
BUSY_POLL_S = 0.01  # while a plane works
UPSTREAM = HubPeer("upstream", "")  # who writes the versions of a daemon with an upstream

log = logging.getLogger(__name__)


class WeightHub:
    """Requests in, pushes out; one thread calls `step` again and again, and `close` at the end.

    Args:
        server: with the channel "weights" bound.
        run_id: names the shared memory.
        metrics: receives a row "push" per version and receiver.
        upstream: address of the hub that versions come from; empty: a trainer publishes them.
    """

    def __init__(
        self,
        server: Server,
        run_id: str,
        config: WeightHubConfig,
        metrics: MetricsFile,
        host: str = "",
        upstream: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.protocol = PushProtocol(config.slots, config.pace, first_epoch=int(time.time() * 1000))
        self._server = server
        self._run_id = run_id
        self._config = config
        self._metrics = metrics
        self._upstream = upstream
        self._clock = clock
        self._asked: SimpleQueue[tuple[m.Message, Future[m.Message]]] = SimpleQueue()
        self._is_leaving = False
        self._wake = server.waker()
        self._arena: Arena | None = None
        self._token = uuid.uuid4().hex[:8]  # another hub on this machine may have the same run id
        self._arenas_made = 0
        self._making: Background[Arena] = Background("umbra-arena", self._wake)
        # For the first of these the arena is made; the others wait until it is there.
        self._registering: list[tuple[Ticket, HubPeer, m.RegisterManifest]] = []
        self._manifest: Manifest | None = None
        self._bindings = Bindings()
        self._waiting: dict[str, Request] = {}  # subscriptions without a layout, by receiver
        host = host or shm_host()
        self._parts = Parts(host)
        self._taken_over: m.Publish | None = None  # what lies in the arena of the hub before us
        self._is_lost = False  # a trainer host came back without the memory of the layout
        self.planes = HubPlanes(config, host, server.security, self._wake)

    def step(self, timeout_s: float = POLL_S) -> int:
        """Serve what arrives within `timeout_s` seconds; returns the number of requests."""
        for due in (self.protocol.next_deadline(), self._parts.next_deadline()):
            if due is not None:
                timeout_s = min(timeout_s, max(0.0, due - self._clock()))
        if any(end.busy for end in self.planes.ends):
            timeout_s = min(timeout_s, BUSY_POLL_S)
        if self._arena is not None and not self._arena.has_name:
            raise UmbraError(
                f"{self._arena.path} was removed, by a cleaner or at a logout (RemoveIPC): it must "
                "be made again"
            )
        requests = self._server.poll(timeout_s)
        if (made := self._making.take()) is not None:
            self._apply(self._arena_made(made, self._clock()))
        for request in requests:
            self._apply(self._handle(request))
        while not self._asked.empty():
            body, ticket = self._asked.get_nowait()
            self._apply(self._versions(ticket, UPSTREAM, body, self._clock()))
        for name in self._parts.tick(self._clock()):
            log.warning("part hub %s is silent", name)
        self._apply(self.protocol.tick(self._clock()))
        for end in self.planes.ends:
            self._apply(end.poll(self._clock()))
        return len(requests)

    def ask(self, body: m.Message) -> Future[m.Message]:
        """Have `step` handle a request of the daemon's own receiver; on any thread."""
        answer: Future[m.Message] = Future()
        if self._is_leaving:
            answer.set_result(LEAVING)
            return answer
        self._asked.put((body, answer))
        self._wake()
        return answer

    def leave(self) -> None:
        """Refuse requests from now on: `step` will not be called again."""
        self._is_leaving = True
        while not self._asked.empty():
            self._asked.get_nowait()[1].set_result(LEAVING)

    def stats(self) -> dict[str, float]:
        counters = self.protocol.counters
        newest = self.protocol.newest
        return {
            "version": newest.version if newest else -1,
            "receivers": len(self.protocol.serving),
            "held_back": float(bool(self.protocol.held_back)),
            "refused": self._server.refusals.counts.total() + self.planes.refused,
            **{key: counters[key] for key in ("pushes", "skipped", "dropped", "failed", "late")},
        }

    def close(self) -> None:
        """Remove the arena; processes that have it mapped may go on reading."""
        self.planes.close()
        if isinstance(made := self._making.finish(), Arena):
            made.unlink()
            made.close()
        self._making.close()
        self._drop_arena()
        self._remove_leftovers()

    # -- events -----------------------------------------------------------------------------------

    def _handle(self, request: Request) -> list[Effect]:
        peer, now = _peer(request), self._clock()
        if isinstance(request.body, IN_A_NAME) and (nack := self._bindings.check(request)):
            self._refuse(request, nack)
            return []
        match request.body:
            case m.RegisterManifest() | m.AcquireSlot() | m.Publish() | m.PartState() if (
                self._upstream
            ):
                reason = f"versions come from {self._upstream} here"
                self._refuse(request, m.Nack(code="not_allowed", reason=reason))
            case m.RegisterManifest() | m.AcquireSlot() | m.Publish() as message:
                return self._versions(request, peer, message, now)
            case m.PartState() as message:
                refused = self._parts.record(peer, message, now)
                self._server.reply(request, refused or m.Ok())
                return self._part_hubs(now)
            case m.Subscribe():
                return self._subscribe(request, now)
            case m.Ready() as message:
                for end in self.planes.ends:
                    end.staged(peer.name, message)
                return self.protocol.ready(peer, message, now)
            case m.Committed() as message:
                return self.protocol.committed(peer, message, now)
            case m.HubStatusRequest():
                waiting = self._waiting.get(peer.name)
                known = self.protocol.knows(peer) or (waiting and _peer(waiting) == peer)
                self._server.reply(request, m.HubStatus(subscribed=bool(known)))
            case m.Ping():
                self._server.reply(request, m.Pong(role="weight_hub", state="ready"))
            case _:
                pass  # an Ok or Nack that nobody asked for
        return []

    def _versions(self, ticket: Ticket, peer: HubPeer, body: m.Message, now: float) -> list[Effect]:
        """Handle a message of whoever writes the versions."""
        match body:
            case m.RegisterManifest():
                return self._register(ticket, peer, body, now)
            case m.AcquireSlot():
                return self.protocol.acquire(ticket, peer, body.version, now)
            case m.Publish():
                return self._publish(ticket, peer, body, now)
            case _:
                raise TypeError(f"unexpected message {type(body).__name__}")

    def _reply(self, ticket: Ticket, message: m.Message) -> None:
        if isinstance(ticket, Request):
            self._server.reply(ticket, message)
        else:
            cast("Future[m.Message]", ticket).set_result(message)

    def _refuse(self, request: Request, nack: m.Nack) -> None:
        kind = type(request.body).__name__
        self._server.refusals.add(f"{kind} of {request.header.sender!r}: {nack.reason}")
        self._server.counters[nack.code] += 1
        self._server.reply(request, nack)

    def _register(
        self, ticket: Ticket, peer: HubPeer, message: m.RegisterManifest, now: float
    ) -> list[Effect]:
        if self._registering:
            self._registering.append((ticket, peer, message))
            return []
        manifest, effects = message.manifest, list[Effect]()
        try:
            check_manifest(manifest)
            before = self._manifest
            if before is None or self._is_lost or manifest.digest != before.digest:
                self.planes.check_layout(manifest)
                self._taken_over = self._take_over(message)
                if self._taken_over is None:
                    self._make_arena(manifest)
                    self._registering.append((ticket, peer, message))
                    return []
                effects += self._begin(manifest, now)
        except (WireError, RejectedError) as error:
            path = error.path if isinstance(error, WireError) else "manifest"
            self._reply(ticket, m.Nack(code=error.code, reason=str(error), path=path))
            return effects
        except (StartupError, UsageError) as error:
            self._reply(ticket, m.Nack(code="no_room", reason=str(error)))
            return effects
        return effects + self._registered(ticket, peer, manifest, now)

    def _arena_made(self, made: Arena | UmbraError, now: float) -> list[Effect]:
        (ticket, peer, message), *others = self._registering
        self._registering = []
        effects: list[Effect] = []
        if isinstance(made, UmbraError):
            self._reply(ticket, m.Nack(code="no_room", reason=str(made)))
        else:
            self._begin_layout(made, message.manifest)
            effects += self._begin(message.manifest, now)
            effects += self._registered(ticket, peer, message.manifest, now)
        for other in others:
            effects += self._register(*other, now)
        return effects

    def _registered(
        self, ticket: Ticket, peer: HubPeer, manifest: Manifest, now: float
    ) -> list[Effect]:
        effects = self._part_hubs(now)
        if self._is_lost or self._parts.missing:
            self._reply(ticket, self._not_whole())
            return effects
        assert self._arena is not None
        is_new = manifest.digest != self.protocol.digest
        published, self._taken_over = self._taken_over, None
        nbytes = manifest.total_bytes
        effects += self.protocol.register(peer, manifest.digest, now, published, nbytes)
        if is_new:
            self._remove_leftovers()  # now that an arena still needed is ours
        effects += self._subscribe_waiting(now)
        ready = m.ArenaReady(path=str(self._arena.path), slots=self._config.slots)
        self._reply(ticket, ready)
        log.info(
            "%s registered %d tensors, %d bytes in %d buckets",
            peer.name, len(manifest.tensors), manifest.total_bytes, len(manifest.buckets),
        )  # fmt: skip
        return effects

    def _begin(self, manifest: Manifest, now: float) -> list[Effect]:
        """Have the part hubs make the arena for a layout, which exists here now.

        Until all of these have it, nobody is admitted: see `_not_whole`.
        """
        assert self._arena is not None
        self._is_lost = False
        effects: list[Effect] = []
        if self.protocol.digest:
            effects = self.protocol.withdraw("the trainer registered another layout", now)
        made, path = self._taken_over is not None, str(self._arena.path)
        self._parts.begin(manifest, path, self._config.slots, made=made)
        return effects

    def _not_whole(self) -> m.Nack:
        if broken := self._parts.broken:
            self._parts.ask_again()
            return m.Nack(code="no_room", reason=broken)
        reason = self._parts.missing or "the memory of a trainer host is lost"
        return m.Nack(code="part_missing", reason=reason)

    def _part_hubs(self, now: float) -> list[Effect]:
        """Update the part hubs; hold pushes back while one is missing."""
        effects: list[Effect] = []
        if loss := self._parts.loss:
            log.warning("all versions are withdrawn, the trainer has to register again: %s", loss)
            self._parts.forget()
            self._is_lost, self._taken_over = True, None
            effects = self.protocol.withdraw(f"a part of every version is lost: {loss}", now)
        held = self.protocol.held
        for name, message in self._parts.tell(held, deltas=self.planes.deltas):
            if not self._reaches(name, message):
                self._parts.lost(name)
        missing = self._parts.missing
        if missing != self.protocol.held_back:
            log.info("pushes %s", f"wait: {missing}" if missing else "go on")
        self.planes.set_parts(self._parts.buckets)
        return effects + self.protocol.hold_back(missing, now)

    def _take_over(self, message: m.RegisterManifest) -> m.Publish | None:
        """Take over the arena that the hub before this one has left, if the trainer still has it.

        Return the last published version, if it is in there; else None.
        """
        published = message.published
        if self._arena is not None or not message.path or published is None:
            return None
        if len(published.checksums) != len(message.manifest.buckets):
            return None
        size = message.manifest.total_bytes
        try:
            arena = Arena.adopt(self._run_id, message.path, slot_bytes=size)
        except StartupError as error:
            log.info("the arena of an earlier hub cannot be used: %s", error)
            return None
        if arena.slots != self._config.slots or not 0 <= published.slot < arena.slots:
            arena.close()
            return None
        log.info("took over %s with version %d", arena.path, published.version)
        self._begin_layout(arena, message.manifest)
        return published

    def _make_arena(self, manifest: Manifest) -> None:
        """Start to allocate an arena, which takes a second for each 1 or 2 GB."""
        self._arenas_made += 1
        suffix = f"weights_{self._token}_{self._arenas_made}"
        nbytes, slots = manifest.total_bytes, self._config.slots
        own = owned_ranges(manifest, 0) if manifest.owners else None
        self._making.start(
            lambda: Arena.create(self._run_id, suffix, slot_bytes=nbytes, slots=slots, own=own)
        )

    def _begin_layout(self, arena: Arena, manifest: Manifest) -> None:
        self.planes.layout(arena, manifest)
        self._drop_arena()  # the old layout's; only now, so that a failure left it as it was
        self._arena, self._manifest = arena, manifest

    def _drop_arena(self) -> None:
        if self._arena is not None:
            self._arena.unlink()
            self._arena.close()
            self._arena = None

    def _remove_leftovers(self) -> None:
        # Not at the start: the trainer may still have the arena of the hub before this one.
        for path in remove_leftovers(self._run_id):
            log.warning("removed %s, which an earlier hub of this run had left", path)

    def _publish(
        self, ticket: Ticket, peer: HubPeer, message: m.Publish, now: float
    ) -> list[Effect]:
        buckets = len(self._manifest.buckets) if self._manifest else 0
        if self._manifest is not None and len(message.checksums) != buckets:
            reason = f"{len(message.checksums)} checksums for {buckets} buckets"
            self._reply(ticket, m.Nack(code="malformed", reason=reason, path="checksums"))
            return []
        return self.protocol.publish(ticket, peer, message, now)

    def _subscribe(self, request: Request, now: float) -> list[Effect]:
        peer, message = _peer(request), request.body
        assert isinstance(message, m.Subscribe)
        if (message.serves or message.buckets) and request.role not in (None, "relay"):
            reason = f"only relays serve others, not the {request.role} key"
            self._refuse(request, m.Nack(code="not_allowed", reason=reason, path="serves"))
            return []
        self._waiting.pop(peer.name, None)
        try:
            relay = self.planes.subscribe(peer, message)
        except (RejectedError, StartupError, UsageError) as error:
            code = error.code if isinstance(error, RejectedError) else "no_plane"
            self._server.reply(request, m.Nack(code=code, reason=str(error)))
            return []
        if relay:
            reply = m.Subscribed(manifest=NOTHING, plane="relay", path=relay)
            self._server.reply(request, reply)
            return []
        if not self.protocol.digest:
            self._waiting[peer.name] = request
            return []
        assert self._manifest is not None and self._arena is not None
        plane, path = self.planes.plane_of(peer.name), str(self._arena.path)
        self._server.reply(request, m.Subscribed(manifest=self._manifest, plane=plane, path=path))
        log.info("%s subscribed over plane %s", peer.name, plane)
        return self.protocol.subscribe(peer, now)

    def _subscribe_waiting(self, now: float) -> list[Effect]:
        waiting, self._waiting = self._waiting, {}
        return [effect for request in waiting.values() for effect in self._subscribe(request, now)]

    # -- effects ----------------------------------------------------------------------------------

    def _apply(self, effects: Iterable[Effect | Settled]) -> None:
        """Carry out effects of the protocol and the planes; new ones come last."""
        # First the part hubs: receivers are sent to fetch the slots that they hand out.
        todo: deque[Effect | Settled] = deque([*self._part_hubs(self._clock()), *effects])
        while todo:
            match todo.popleft():
                case HubReply(ticket=ticket, message=message):
                    if isinstance(message, m.SlotGranted):
                        for end in self.planes.ends:
                            end.granted(message.slot)
                        assert self._arena is not None
                        self._arena.begin(message.slot)
                    self._reply(ticket, message)
                case Send(receiver=name, message=m.Prepare() as message):
                    assert self._arena is not None
                    self._arena.end(message.slot)
                    if (end := self.planes.of(name)) is not None:
                        todo.extend(end.prepare(name, message, self._clock()))
                case Send(receiver=name, message=message):
                    todo.extend(self._push(name, message))
                case Settled() as settled if settled.error:
                    todo.extend(self._refused(settled))
                case Settled(receiver=name, prepare=message):
                    todo.extend(self._push(name, message))
                case Pushed() as pushed:
                    self._record(pushed)
                case Failed(receiver=name, phase=phase, reason=reason) as failed:
                    if failed.dropped:
                        self.planes.left(name)
                    ended = f"{phase}, dropped" if failed.dropped else phase
                    log.warning(
                        "push of version %s to %s failed while %s: %s",
                        *(failed.version, name, ended, reason),
                    )

    def _push(self, name: str, message: m.Message) -> list[Effect]:
        if self._reaches(name, message):
            return []
        self.planes.left(name)  # before its successor gets its source
        return self.protocol.lost(name, "it is unreachable", self._clock())

    def _reaches(self, name: str, message: m.Message) -> bool:
        owner = self._bindings.owners.get(name)  # none: one of a flood of senders
        return owner is not None and self._server.push(CHANNEL, owner.identity, message)

    def _refused(self, settled: Settled) -> list[Effect]:
        epoch, version = settled.prepare.epoch, settled.prepare.version
        failed = m.Ready(epoch=epoch, version=version, wire_s=0.0, stage_s=0.0, error=settled.error)
        owner = self._bindings.owners.get(settled.receiver)
        peer = HubPeer(settled.receiver, owner.incarnation if owner is not None else "")
        return self.protocol.ready(peer, failed, self._clock())

    def _record(self, pushed: Pushed) -> None:
        assert self._manifest is not None
        name, publication, ready = pushed.receiver, pushed.publication, pushed.ready
        self._metrics.write(
            "push",
            plane=self.planes.plane_of(name),
            bytes=self._manifest.total_bytes,
            receiver=name,
            version=publication.version,
            epoch=pushed.epoch,
            snapshot_s=publication.snapshot_s,
            wire_s=ready.wire_s,
            stage_s=ready.stage_s,
            commit_s=pushed.commit_s,
            total_s=pushed.total_s,
            wire_bytes=ready.wire_bytes,
        )
        log.debug("%s serves version %d after %.3f s", name, publication.version, pushed.total_s)


def _peer(request: Request) -> HubPeer:
    return HubPeer(request.header.sender, request.header.incarnation)
