"""The members: joins, incarnations, heartbeats, silence, departures; pure state, injected clock.

A process is known by its name; its incarnation changes at every start. A new incarnation supersedes
one that is silent, or that its supervisor saw die, and whatever the old one still says is refused.
Silence beyond a limit means death; a member that beats but does not move is stuck, which is only
told.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from umbra.proto.bounds import MEMBERS
from umbra.proto.messages import Heartbeat, Join, Member, Role, State, Stuck
from umbra.proto.net.server import Request
from umbra.services.buffer.effects import NackError
from umbra.services.config import BufferConfig

DEPARTED_KEPT = 1024  # names and incarnations that are remembered after their end
BEATS_PER_S = 64  # heartbeats of all members together, about: each costs as much as a trajectory
BEATS_UNTIL_DEAD = 3  # but so many of a member have to be missing until it counts as dead
SINGLE: tuple[Role, ...] = ("trainer", "weight_hub")  # roles of which a run has one
NEEDED: tuple[Role, ...] = (*SINGLE, "part")  # of which it can spare none
TOLD = (
    "name", "role", "incarnation", "pid", "host", "state", "activity", "progress", "idle_s",
    "stats", "shares",
)  # fmt: skip
STORED = ("name", "role", "incarnation", "seal", "pid", "host", "endpoints")


@dataclass(slots=True)
class Participant:
    """A member. Times are seconds of the broker's clock."""

    name: str
    role: Role
    incarnation: str
    identity: bytes  # of its sockets, for pushes; nobody else knows it; empty: not heard of yet
    pid: int
    host: str
    endpoints: dict[str, str]
    heard_at: float
    seal: bytes = b""  # digest of `identity`, which can't be recovered from it
    confirmed: bool = True  # False after a restart of the buffer, until it is heard of
    state: State = "joining"
    activity: str = ""
    progress: int = 0
    idle_s: float = 0.0  # as of its last heartbeat
    drained: str = ""  # why it was asked to leave, if so
    stats: dict[str, float] = field(default_factory=dict[str, float])
    shares: dict[str, float] = field(default_factory=dict[str, float])
    sound: bool = False  # an answer of it was accepted
    strikes: int = 0  # its faults since the last sound answer
    granted: int | None = None  # its newest request that got work, as far as is known
    stage: str = ""  # that it asks for as a scorer

    def beat(self, body: Heartbeat) -> None:
        self.state = body.state
        self.activity = body.activity
        self.progress = body.progress
        self.idle_s = body.idle_s
        self.stats = dict(body.stats)
        self.shares = dict(body.shares)

    def record(self, now: float) -> Member:
        return Member(**{name: getattr(self, name) for name in TOLD}, silent_s=now - self.heard_at)


class Membership:
    def __init__(self, config: BufferConfig) -> None:
        self.peers: dict[str, Participant] = {}
        self.single: dict[Role, Participant] = {}  # by role, asked for at every heartbeat
        self.departed: dict[str, str] = {}  # name -> why
        self.last_generator: Participant | None = None  # of those that are gone
        self.changed: set[str] = set()  # who came or went since the journal last took note
        self._config = config
        self._superseded: dict[tuple[str, str], None] = {}  # names and incarnations

    @property
    def working(self) -> list[Participant]:
        return [peer for peer in self.peers.values() if peer.role != "monitor"]

    @property
    def pace_s(self) -> float:
        """Return the seconds between heartbeats of a member: `heartbeat_s`, or more with many."""
        slower = min(len(self.peers) / BEATS_PER_S, self._config.dead_after_s / BEATS_UNTIL_DEAD)
        return max(self._config.heartbeat_s, slower)

    def join(self, request: Request, body: Join, now: float) -> Participant:
        """Add a process and supersede its older incarnation; raises NackError."""
        header, name, role = request.header, body.name, body.role
        before = self.peers.get(name)
        if name != header.sender:
            raise NackError("wrong_name", f"{header.sender!r} cannot join as {name!r}", "name")
        if request.role not in (None, role):
            why = f"the {request.role} key does not allow to join as a {role}"
            raise NackError("not_allowed", why, "role")
        if (name, header.incarnation) in self._superseded:
            raise _stale(name)
        for other in self.peers.values() if role in SINGLE else ():
            if other.role == role and other.name != name and other.confirmed:
                why = f"the run already has the {role} {other.name!r} (pid {other.pid} on "
                why += f"{other.host}): stop it first, or restart it under its own name"
                raise NackError(f"duplicate_{role}", why, "role")
        if before is None:
            if len(self.peers) >= MEMBERS:
                raise NackError("too_many", f"the run has {MEMBERS} members already", "name")
        elif before.role != role:
            why = f"{name!r} is the name of a {before.role} of this run: choose another"
            raise NackError("name_taken", why, "name")
        elif before.incarnation != header.incarnation:
            is_dead = body.replaces == before.pid and body.host == before.host
            silent_s = now - before.heard_at
            if before.confirmed and not is_dead and silent_s <= BEATS_UNTIL_DEAD * self.pace_s:
                why = f"{name!r} is a member of this run (pid {before.pid} on {before.host}, heard "
                why += f"{silent_s:.1f} s ago): stop it, or give this one another --name"
                raise NackError("name_in_use", why, "name")
            self._superseded[name, before.incarnation] = None
            _forget_oldest(self._superseded)
        who = name, role, header.incarnation, request.identity
        peer = Participant(*who, body.pid, body.host, body.endpoints, now, _seal(request.identity))
        self._add(peer)
        self.departed.pop(name, None)
        self.changed.add(name)
        return peer

    def hear(self, request: Request, now: float) -> Participant:
        """Return the member that sent `request`, and note that it is alive; raises NackError.

        Names and incarnations are known to all, the identity of its sockets only to itself.
        """
        name, incarnation = request.header.sender, request.header.incarnation
        peer = self.peers.get(name)
        if peer is None or peer.incarnation != incarnation:
            if (name, incarnation) in self._superseded:
                raise _stale(name)
            why = self.departed.get(name, "it never joined")
            raise NackError("not_member", f"{name!r} is not a member: {why}", "sender")
        if peer.identity != request.identity:
            if peer.identity or peer.seal != _seal(request.identity):
                raise _elsewhere(name)
            peer.identity = request.identity
        if request.role not in (None, peer.role):
            raise _elsewhere(name)
        peer.heard_at = now
        peer.confirmed = True
        return peer

    def remove(self, peer: Participant, why: str) -> None:
        del self.peers[peer.name]
        if self.single.get(peer.role) is peer:
            del self.single[peer.role]
        self.departed[peer.name] = why
        if peer.role == "generator":
            self.last_generator = peer
        _forget_oldest(self.departed)
        self.changed.add(peer.name)

    def record(self, name: str) -> dict[str, Any] | None:
        peer = self.peers.get(name)
        return None if peer is None else {name: getattr(peer, name) for name in STORED}

    def restore(self, records: list[dict[str, Any]], now: float) -> None:
        """Take over the stored members, most of which have outlived the buffer."""
        for record in records:
            self._add(Participant(**record, identity=b"", heard_at=now, confirmed=False))

    def silent(self, now: float, patience_s: dict[str, float]) -> list[Participant]:
        """Return dead members; `patience_s` has other limits than the common one, by name."""
        common = self._config.dead_after_s
        latest = now - min([common, *patience_s.values()])
        return [
            peer
            for peer in self.peers.values()  # thousands, of which few have been silent
            if peer.heard_at < latest and now - peer.heard_at > patience_s.get(peer.name, common)
        ]

    @property
    def hub(self) -> tuple[str, str]:
        """Return endpoint and incarnation of the weight hub, empty without one."""
        hub = self.single.get("weight_hub")
        return ("", "") if hub is None else (hub.endpoints.get("weights", ""), hub.incarnation)

    def stuck(self, now: float) -> list[Stuck]:
        overdue: list[Stuck] = []
        for peer in self.peers.values():
            age_s = now - peer.heard_at
            if age_s > BEATS_UNTIL_DEAD * self.pace_s:
                what = "no heartbeat"
                action = f"counts as dead after {self._config.dead_after_s:g} s"
            elif peer.state == "ready" and age_s + peer.idle_s > self._config.stall_s:
                age_s += peer.idle_s
                what = f"no progress in {peer.activity!r}"
                action = "none: look at its log, restart it if need be"
                if peer.role == "generator":
                    action = "it ends itself after 10 x buffer.stall_s"
            else:
                continue
            overdue.append(Stuck(what=what, holder=peer.name, age_s=age_s, action=action))
        return overdue

    def _add(self, peer: Participant) -> None:
        self.peers[peer.name] = peer
        if peer.role in SINGLE:
            self.single[peer.role] = peer


def _stale(name: str) -> NackError:
    why = f"another process has joined as {name!r} since: names must be unique"
    return NackError("stale_incarnation", why, "incarnation")


def _elsewhere(name: str) -> NackError:
    return NackError("not_allowed", f"{name!r} has joined over another connection", "sender")


def _seal(identity: bytes) -> bytes:
    return hashlib.sha256(identity).digest()


def _forget_oldest(records: dict[Any, Any]) -> None:
    if len(records) > DEPARTED_KEPT:
        del records[next(iter(records))]
