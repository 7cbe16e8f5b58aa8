"""The weight hub: owns the arena, runs the push protocol over its ROUTER socket."""

from __future__ import annotations

import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

from umbra.proto import messages as m
from umbra.proto.access import KeyRole
from umbra.proto.errors import RejectedError, StartupError, UmbraError, UsageError, WireError
from umbra.proto.net.server import Request, Server
from umbra.proto.records import Manifest
from umbra.services.config import WeightHubConfig as WeightHubConfig
from umbra.services.process.metrics import MetricsFile
from umbra.services.weight_hub.hub_planes import HubPlanes
from umbra.services.weight_hub.parts import NOTHING, Parts
from umbra.services.weight_hub.push import Failed, HubPeer, HubReply, Pushed, PushProtocol, Send
from umbra.services.weights.arena import Arena, remove_leftovers, shm_host
from umbra.services.weights.manifest import check_manifest, owned_ranges
from umbra.services.weights.planes.plane import Background, Settled

MOST_NAMES = 8192  # of processes, the last ones
BINDING = (m.RegisterManifest, m.PartState, m.Subscribe)  # what a process begins with


CHANNEL = "weights"
# Requests made in the name of their sender; the rest is asked by anyone, or by an operator.
IN_A_NAME = (
    m.RegisterManifest, m.AcquireSlot, m.Publish, m.PartState, m.Subscribe, m.Ready, m.Committed,
)  # fmt: skip
ACCEPTS: tuple[type[m.Message], ...] = (*IN_A_NAME, m.HubStatusRequest, m.Ping)
LEAVING = m.Nack(code="leaving", reason="this daemon is about to end")
POLL_S = 0.2
BUSY_POLL_S = 0.01  # while a plane works
UPSTREAM = HubPeer("upstream", "")  # who writes the versions of a daemon with an upstream

Reply = Callable[[m.Message], object]
OfWriter = m.RegisterManifest | m.AcquireSlot | m.Publish  # who writes the versions

log = logging.getLogger(__name__)


class _Owner(NamedTuple):
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
        name, owner = header.sender, self.owners.get(header.sender)
        begins = isinstance(request.body, BINDING)
        known = owner is not None and owner.incarnation == header.incarnation
        if owner is not None:
            if owner.role != request.role or (known and owner.identity != request.identity):
                return _not_allowed(f"{name!r} came over another connection", "sender")
            if not known and not begins:
                return _not_allowed(f"{name!r} is of an unknown incarnation", "sender")
        if begins and not known:
            self.owners[name] = _Owner(header.incarnation, request.identity, request.role)
        if name in self.owners:
            self.owners.move_to_end(name)
        if len(self.owners) > MOST_NAMES:
            self.owners.popitem(last=False)
        return None


def _not_allowed(reason: str, path: str = "") -> m.Nack:
    return m.Nack(code="not_allowed", reason=reason, path=path)


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
        first_epoch = int(time.time() * 1000)
        self.protocol = PushProtocol(config.slots, config.pace, first_epoch, self._is_locked)
        self._server = server
        self._run_id = run_id
        self._config = config
        self._metrics = metrics
        self._upstream = upstream
        self._clock = clock
        self._asked: SimpleQueue[tuple[OfWriter, Future[m.Message]]] = SimpleQueue()
        self._is_leaving = False
        self._arena: Arena | None = None
        self._token = uuid.uuid4().hex[:8]  # another hub on this machine may have the same run id
        self._arenas_made = 0
        self._making: Background[Arena] = Background("umbra-arena", server.wake)
        # For the first of these the arena is made; the others wait until it is there.
        self._registering: list[tuple[Reply, HubPeer, m.RegisterManifest]] = []
        self._manifest: Manifest | None = None
        self._bindings = Bindings()
        self._waiting: dict[str, Request] = {}  # subscriptions without a layout, by receiver
        host = host or shm_host()
        self._parts = Parts(host)
        self._is_lost = False  # a trainer host came back without the memory of the layout
        self.planes = HubPlanes(config, host, server.security, server.wake, bool(upstream))
        for path in remove_leftovers(run_id):
            log.warning("removed %s, which an earlier hub of this run had left", path)

    def step(self, timeout_s: float = POLL_S) -> int:
        """Serve what arrives within `timeout_s` seconds; returns the number of requests."""
        now, limits = self._clock(), [timeout_s]
        deadlines = self.protocol.next_deadline(), self._parts.next_deadline()
        limits += [max(0.0, due - now) for due in deadlines if due is not None]
        if any(end.busy for end in self.planes.ends.values()):
            limits.append(BUSY_POLL_S)
        if self._arena is not None and not self._arena.has_name:
            raise UmbraError(
                f"{self._arena.path} was removed, by a cleaner or at a logout (RemoveIPC): it must "
                "be made again"
            )
        requests = self._server.poll(min(limits))
        if (made := self._making.take()) is not None:
            self._arena_made(made)
            self._apply()
        for request in requests:
            self._handle(request)
            self._apply()
        while not self._asked.empty():
            body, answer = self._asked.get_nowait()
            self._versions(answer.set_result, UPSTREAM, body)
            self._apply()
        for name in self._parts.tick(self._clock()):
            log.warning("part hub %s is silent", name)
        self.protocol.tick(self._clock())
        self._apply()
        for end in self.planes.ends.values():
            for settled in end.poll(self._clock()):
                self._settled(settled)
            self._apply()
        return len(requests)

    def ask(self, body: OfWriter) -> Future[m.Message]:
        """Have `step` handle a request of the daemon's own receiver; on any thread."""
        answer: Future[m.Message] = Future()
        if self._is_leaving:
            answer.set_result(LEAVING)
            return answer
        self._asked.put((body, answer))
        self._server.wake()
        return answer

    def leave(self) -> None:
        """Refuse requests from now on: `step` will not be called again."""
        self._is_leaving = True
        for reply, *_ in self._registering:
            reply(LEAVING)
        while not self._asked.empty():
            self._asked.get_nowait()[1].set_result(LEAVING)

    def stats(self) -> dict[str, float]:
        counters, newest, tcp = self.protocol.counters, self.protocol.newest, self.planes.tcp
        refused = self._server.refusals.counts.total()
        return {
            "version": newest.version if newest else -1,
            "receivers": len(self.protocol.serving),
            "held_back": float(bool(self.protocol.held_back)),
            "refused": refused + (tcp.server.refusals.counts.total() if tcp is not None else 0),
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

    def _is_locked(self, slot: int) -> bool:
        return self._arena is not None and self._arena.is_locked(slot)

    # -- events -----------------------------------------------------------------------------------

    def _handle(self, request: Request) -> None:
        peer, now = _peer(request), self._clock()
        if isinstance(request.body, IN_A_NAME) and (nack := self._bindings.check(request)):
            self._refuse(request, nack)
            return
        match request.body:
            case m.RegisterManifest() | m.AcquireSlot() | m.Publish() | m.PartState() if (
                self._upstream
            ):
                reason = f"versions come from {self._upstream} here"
                self._refuse(request, _not_allowed(reason))
            case m.RegisterManifest() | m.AcquireSlot() | m.Publish() as message:
                self._versions(partial(self._server.reply, request), peer, message)
            case m.PartState() as message:
                self._server.reply(request, self._parts.record(peer, message, now) or m.Ok())
            case m.Subscribe() as message:
                self._subscribe(request, message)
            case m.Ready() as message:
                for end in self.planes.ends.values():
                    end.staged(peer.name, message)
                self.protocol.ready(peer, message, now)
            case m.Committed() as message:
                self.protocol.committed(peer, message, now)
            case m.HubStatusRequest():
                waiting = self._waiting.get(peer.name)
                known = self.protocol.knows(peer) or (waiting and _peer(waiting) == peer)
                self._server.reply(request, m.HubStatus(subscribed=bool(known)))
            case m.Ping():
                self._server.reply(request, m.Pong(role="weight_hub", state="ready"))
            case _:
                pass  # an Ok or Nack that nobody asked for

    def _versions(self, reply: Reply, peer: HubPeer, body: OfWriter) -> None:
        """Handle a message of whoever writes the versions."""
        match body:
            case m.RegisterManifest():
                self._register(reply, peer, body)
            case m.AcquireSlot():
                self.protocol.acquire(reply, peer, body.version, self._clock())
            case m.Publish():
                buckets = len(self._manifest.buckets) if self._manifest else 0
                if self._manifest is not None and len(body.checksums) != buckets:
                    reason = f"{len(body.checksums)} checksums for {buckets} buckets"
                    reply(m.Nack(code="malformed", reason=reason, path="checksums"))
                else:
                    self.protocol.publish(reply, peer, body, self._clock())

    def _refuse(self, request: Request, nack: m.Nack) -> None:
        kind = type(request.body).__name__
        self._server.refusals.add(f"{kind} of {request.header.sender!r}: {nack.reason}")
        self._server.counters[nack.code] += 1
        self._server.reply(request, nack)

    def _register(self, reply: Reply, peer: HubPeer, message: m.RegisterManifest) -> None:
        if self._registering:
            self._registering.append((reply, peer, message))
            return
        manifest, before = message.manifest, self._manifest
        try:
            check_manifest(manifest)
            if before is None or self._is_lost or manifest.digest != before.digest:
                self.planes.check_layout(manifest)
                self._make_arena(manifest)
                self._registering.append((reply, peer, message))
                return
        except (WireError, RejectedError) as error:
            path = error.path if isinstance(error, WireError) else "manifest"
            reply(m.Nack(code=error.code, reason=str(error), path=path))
        except (StartupError, UsageError) as error:
            reply(m.Nack(code="no_room", reason=str(error)))
        else:
            self._registered(reply, peer, manifest)

    def _arena_made(self, made: Arena | UmbraError) -> None:
        (reply, peer, message), *others = self._registering
        self._registering = []
        if isinstance(made, UmbraError):
            reply(m.Nack(code="no_room", reason=str(made)))
        else:
            self._begin_layout(made, message.manifest)
            self._registered(reply, peer, message.manifest)
        for other in others:
            self._register(*other)

    def _registered(self, reply: Reply, peer: HubPeer, manifest: Manifest) -> None:
        self._part_hubs()
        if self._is_lost or self._parts.missing:
            reply(self._not_whole())
            return
        assert self._arena is not None
        nbytes = manifest.total_bytes
        self.protocol.register(peer, manifest.digest, self._clock(), nbytes)
        waiting, self._waiting = self._waiting, {}
        for request in waiting.values():
            assert isinstance(request.body, m.Subscribe)
            self._subscribe(request, request.body)
        reply(m.ArenaReady(path=str(self._arena.path), slots=self._config.slots))
        log.info(
            "%s registered %d tensors, %d bytes in %d buckets",
            peer.name, len(manifest.tensors), nbytes, len(manifest.buckets),
        )  # fmt: skip

    def _not_whole(self) -> m.Nack:
        if broken := self._parts.broken:
            self._parts.ask_again()
            return m.Nack(code="no_room", reason=broken)
        reason = self._parts.missing or "the memory of a trainer host is lost"
        return m.Nack(code="part_missing", reason=reason)

    def _part_hubs(self) -> None:
        """Update the part hubs; hold pushes back while one is missing."""
        if loss := self._parts.loss:
            log.warning("all versions are withdrawn, the trainer has to register again: %s", loss)
            self._parts.forget()
            self._is_lost = True
            self.protocol.withdraw(f"a part of every version is lost: {loss}")
        tcp = self.planes.tcp
        deltas = tcp is not None and tcp.links_are_slow
        for name, message in self._parts.tell(self.protocol.held, deltas=deltas):
            if not self._reaches(name, message):
                self._parts.lost(name)
        missing = self._parts.missing
        if missing != self.protocol.held_back:
            log.info("pushes %s", f"wait: {missing}" if missing else "go on")
            self.protocol.hold_back(missing, self._clock())
        if tcp is not None:
            tcp.parts = self._parts.buckets

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
        """Use `arena`; until the part hubs have made theirs, nobody is admitted."""
        self.planes.layout(arena, manifest)
        self._drop_arena()  # the old layout's; only now, so that a failure left it as it was
        self._arena, self._manifest, self._is_lost = arena, manifest, False
        if self.protocol.digest:
            self.protocol.withdraw("the trainer registered another layout")
        self._parts.begin(manifest, str(arena.path), self._config.slots)

    def _drop_arena(self) -> None:
        if self._arena is not None:
            self._arena.unlink()
            self._arena.close()
            self._arena = None

    def _subscribe(self, request: Request, message: m.Subscribe) -> None:
        peer = _peer(request)
        if (message.serves or message.buckets) and request.role not in (None, "relay"):
            reason = f"only relays serve others, not the {request.role} key"
            self._refuse(request, _not_allowed(reason, "serves"))
            return
        self._waiting.pop(peer.name, None)
        try:
            relay = self.planes.subscribe(peer, message)
        except (RejectedError, StartupError, UsageError) as error:
            code = error.code if isinstance(error, RejectedError) else "no_plane"
            self._server.reply(request, m.Nack(code=code, reason=str(error)))
            return
        if relay:
            reply = m.Subscribed(manifest=NOTHING, plane="relay", path=relay)
            self._server.reply(request, reply)
        elif not self.protocol.digest:
            self._waiting[peer.name] = request
        else:
            assert self._manifest is not None and self._arena is not None
            plane, path = self.planes.plane_of(peer.name), str(self._arena.path)
            reply = m.Subscribed(manifest=self._manifest, plane=plane, path=path)
            self._server.reply(request, reply)
            log.info("%s subscribed over plane %s", peer.name, plane)
            self.protocol.subscribe(peer, self._clock())

    # -- effects ----------------------------------------------------------------------------------

    def _apply(self) -> None:
        """Carry out effects of the protocol; new ones come last."""
        # First the part hubs: receivers are sent to fetch the slots that they hand out.
        self._part_hubs()
        while self.protocol.effects:
            match self.protocol.effects.popleft():
                case HubReply(ticket=ticket, message=message):
                    if isinstance(message, m.SlotGranted):
                        for end in self.planes.ends.values():
                            end.granted(message.slot)
                        assert self._arena is not None
                        self._arena.begin(message.slot)
                    ticket(message)
                case Send(receiver=name, message=m.Prepare() as message):
                    assert self._arena is not None
                    self._arena.end(message.slot)
                    if (end := self.planes.chosen.get(name)) is not None:
                        for settled in end.prepare(name, message, self._clock()):
                            self._settled(settled)
                case Send(receiver=name, message=message):
                    self._push(name, message)
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

    def _settled(self, settled: Settled) -> None:
        """Send a Prepare that its plane has completed, or note that this came to nothing."""
        name, prepare, error = settled.receiver, settled.prepare, settled.error
        if not error:
            self._push(name, prepare)
            return
        epoch, version = prepare.epoch, prepare.version
        failed = m.Ready(epoch=epoch, version=version, wire_s=0.0, stage_s=0.0, error=error)
        owner = self._bindings.owners.get(name)
        peer = HubPeer(name, owner.incarnation if owner is not None else "")
        self.protocol.ready(peer, failed, self._clock())

    def _push(self, name: str, message: m.Message) -> None:
        if not self._reaches(name, message):
            self.planes.left(name)  # before its successor gets its source
            self.protocol.lost(name, "it is unreachable", self._clock())

    def _reaches(self, name: str, message: m.Message) -> bool:
        owner = self._bindings.owners.get(name)  # none: one of a flood of senders
        return owner is not None and self._server.push(CHANNEL, owner.identity, message)

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
