"""Thousands of generators and a trainer in one process, which send what was recorded.

    python benchmarks/replayed_members.py ORDERS_FILE

ORDERS_FILE holds `Orders` as MessagePack; a line on the standard input begins the measurement.

They cost next to nothing beside the buffer that is measured: no engine, no ZeroMQ, one thread, one
call of the system for what a member says at a time, one for what it hears. What they say is what
`recorded.py` has recorded, with the ids of the lease that each answer is for. Members take turns,
evenly, at the rate that is asked for; or, at rate 0, each as soon as its last answer was
acknowledged.

They join, beat, renew, lease, submit; they don't resend, and what is not acknowledged is told.
"""

from __future__ import annotations

import json
import select
import sys
import time
import uuid
from collections import deque
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec
from recorded import Cut, Recording, filled
from report import percentile_ms
from zmtp import Connection, packed

from umbra.proto.base import Header
from umbra.proto.codec import Encoder, decode
from umbra.proto.messages import (
    BatchLease,
    CheckpointSaved,
    CommitBatch,
    Join,
    LeaseBatch,
    LeaseSamples,
    Message,
    RenewLeases,
    Welcome,
)
from umbra.proto.version import PROTOCOL_MAJOR, PROTOCOL_MINOR
from umbra.services.process.command import allow_connections
from umbra.services.process.parent import die_with_parent

JOINING = 64  # members at once
JOIN_S = 120.0
POLL_S = 0.002  # how late a turn may be
CHECKPOINT_EVERY = 4  # steps
LEASE_WAIT_S = 5.0

_pack = msgspec.msgpack.encode
_ARRAY_16 = b"\xdc"
_SUBMIT = b"\x83" + _pack("trajectories")
_ROOM, _VERSION = _pack("capacity"), _pack("version") + _pack(0)


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What a process of members does."""

    broker: str
    members: int  # the trainer included
    batch: int  # samples of one
    held: int  # samples that a member has leased
    rate: float  # trajectories per second of all together; 0 = as fast as they are acknowledged
    warm_s: float
    seconds: float  # measured, after these
    recording: Recording


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it, while it was measured."""

    per_s: float  # trajectories acknowledged
    refused: int
    unanswered: int  # submitted, and not acknowledged in the end
    late: int  # turns that were left out because a member had nothing to submit
    ack_p50_ms: float
    ack_p99_ms: float
    lease_p99_ms: float
    trained_per_s: float
    beats_per_s: float
    cpu_share: float  # of a core, of this process


class _Task(msgspec.Struct):
    sample_id: str
    group_id: str
    prompt_id: str
    attempt: int
    lease_s: float


class _Reply(msgspec.Struct):
    """What a member reads of the header of a reply."""

    type: str
    reply_to: int | None = None


class _Leases(msgspec.Struct):
    tasks: list[_Task]


class _Ack(msgspec.Struct):
    accepted: int
    refused: dict[str, str] = {}
    tasks: list[_Task] = []


class _Beat(msgspec.Struct):
    heartbeat_s: float = 0.0


_read_reply = msgspec.msgpack.Decoder(_Reply).decode
_read_leases = msgspec.msgpack.Decoder(_Leases).decode
_read_ack = msgspec.msgpack.Decoder(_Ack).decode
_read_beat = msgspec.msgpack.Decoder(_Beat).decode


@dataclass(slots=True)
class Member:
    """One generator: its connections, what it holds, what it waits for."""

    name: str
    control: Connection
    incarnation: str
    moves: Any  # of the recording, endless
    packed_name: bytes
    data: Connection | None = None
    numbers: int = 0  # of messages
    tasks: deque[_Task] = field(default_factory=deque[_Task])
    open: dict[int, float] = field(default_factory=dict[int, float])  # submits, by when
    asked: int = 0  # number of the open question for work
    asked_at: float = 0.0

    def message(self, kind: str, body: bytes) -> bytes:
        """A message of this member as it travels."""
        self.numbers += 1
        header = Header(
            major=PROTOCOL_MAJOR,
            minor=PROTOCOL_MINOR,
            type=kind,
            id=self.numbers,
            sender=self.name,
            incarnation=self.incarnation,
            sent_at=time.time(),
        )
        return packed((_pack(header), body))


class ReplayedTrainer:
    """Leases batch after batch and commits at once; all by one connection."""

    def __init__(self, broker: str) -> None:
        self.step = self.trained = 0
        self.encoder = Encoder("trainer", uuid.uuid4().hex[:12])
        join = Join(role="trainer", name="trainer", pid=1, host="bench", package_version="0")
        self.control = Connection(broker, b"trainer")
        self.control.begin(self._packed(join))
        self.data: Connection | None = None

    def connect(self, endpoint: str) -> Connection:
        """Begin to train."""
        self.data = Connection(endpoint, b"trainer")
        self.data.begin(self._packed(self._question()))
        return self.data

    def hear(self, frames: list[bytes], samples: int) -> None:
        """Go on after an answer; `samples` are in a batch."""
        assert self.data is not None
        kind = _read_reply(frames[0]).type
        if kind == BatchLease.__name__:
            # An empty one is small; that of a batch may have been too large to keep.
            full = not frames[1] or bool(decode(frames).body.trajectories)  # type: ignore[attr-defined]
            if full:
                self.step += 1
                self.trained += samples
            self._say(CommitBatch(step=self.step) if full else self._question())
        elif kind == "CommitAck" and self.step % CHECKPOINT_EVERY == 0:
            self._say(CheckpointSaved(step=self.step))
        elif kind in ("CommitAck", "Ok"):
            self._say(self._question())
        else:
            raise RuntimeError(f"the trainer was answered {decode(frames).body}")

    def beat(self, body: bytes) -> None:
        """Say that it lives; `body` is that of a recorded heartbeat."""
        _, (header, _) = self.encoder.encode(LeaseBatch(step=1, wait_s=0.0))
        told = msgspec.msgpack.decode(header) | {"type": "Heartbeat"}
        self.control.send(packed((_pack(told), body)))

    def _question(self) -> LeaseBatch:
        return LeaseBatch(step=self.step + 1, wait_s=1.0)

    def _say(self, body: Message) -> None:
        assert self.data is not None
        self.data.send(self._packed(body))

    def _packed(self, body: Message) -> bytes:
        return packed(self.encoder.encode(body)[1])


class Members:
    """All of them, and the trainer."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._flat_out = not orders.rate  # an acknowledgement makes it the member's turn again
        self._cuts = cycle(orders.recording.trajectories)
        self._bodies: dict[int, bytes] = {}  # of questions for work, by capacity
        self._epoll = select.epoll()
        self._by_socket: dict[int, tuple[Connection, Member | None]] = {}
        self._members: list[Member] = []
        self._pace_s, self._lease_s = 5.0, 30.0  # until the buffer says otherwise
        self._acks: list[float] = []
        self._grants: list[float] = []
        self._accepted = self._refused = self._late = self._beats = 0
        self._beats_at: deque[tuple[float, Member]] = deque()  # the next one of each, in order
        self._trainer = self._join()
        self._turns = deque(self._members)
        self._renewals = deque(self._members)

    def play(self) -> Played:
        """Warm up, then measure."""
        orders = self._orders
        for member in self._members:
            self._send(member, self._question(member))
        began = time.monotonic()
        self._run(began + orders.warm_s)
        self._acks, self._grants = [], []
        self._accepted = self._refused = self._late = self._beats = 0
        print(json.dumps({"measuring": orders.seconds}), flush=True)
        trained, cpu = self._trainer.trained, time.process_time()
        start = time.monotonic()
        self._run(start + orders.seconds)
        took = time.monotonic() - start
        return Played(
            per_s=self._accepted / took,
            refused=self._refused,
            unanswered=self._unanswered(),
            late=self._late,
            ack_p50_ms=percentile_ms(self._acks, 0.5),
            ack_p99_ms=percentile_ms(self._acks, 0.99),
            lease_p99_ms=percentile_ms(self._grants, 0.99),
            trained_per_s=(self._trainer.trained - trained) / took,
            beats_per_s=self._beats / took,
            cpu_share=(time.process_time() - cpu) / took,
        )

    # -- joining ----------------------------------------------------------------------------------

    def _join(self) -> ReplayedTrainer:
        """Let all join, some at a time; the trainer is the last."""
        names = [f"generator-{number}" for number in range(self._orders.members - 1)]
        for first in range(0, len(names), JOINING):
            joining = [self._knock(name) for name in names[first : first + JOINING]]
            for member, hello in joining:
                member.control.begin(hello)
            for member, _ in joining:
                welcome = _welcome(member.control)
                member.data = Connection(welcome.data, member.name.encode())
                self._pace_s = welcome.heartbeat_s
            for member, _ in joining:
                assert member.data is not None
                member.data.begin()
                self._watch(member.control, member)
                self._watch(member.data, member)
                self._members.append(member)
                self._beats_at.append((time.monotonic() + self._pace_s, member))
            self._keep_alive(time.monotonic())
            for number, events in self._epoll.poll(0):
                self._hear(number, events)
        trainer = ReplayedTrainer(self._orders.broker)
        data = trainer.connect(_welcome(trainer.control).data)
        self._watch(trainer.control, None)
        self._watch(data, None)
        return trainer

    def _knock(self, name: str) -> tuple[Member, bytes]:
        """A member, connected, and what it says first."""
        encoder = Encoder(name, uuid.uuid4().hex[:12])
        join = Join(role="generator", name=name, pid=1, host="bench", package_version="0")
        number, frames = encoder.encode(join)
        control = Connection(self._orders.broker, name.encode())
        moves = self._orders.recording.moves
        at = len(self._members) % len(moves)  # each begins at another turn
        turns = cycle([*moves[at:], *moves[:at]])
        member = Member(name, control, encoder.incarnation, turns, _pack(name), numbers=number)
        return member, packed(frames)

    def _watch(self, connection: Connection, member: Member | None) -> None:
        self._by_socket[connection.fileno] = connection, member
        self._epoll.register(connection.fileno, select.EPOLLIN)

    # -- the loop ---------------------------------------------------------------------------------

    def _run(self, until: float) -> None:
        done = 0.0  # turns since the beginning of this stretch, in trajectories
        begun = now = time.monotonic()
        renew_at = trainer_at = now
        while now < until:
            for number, events in self._epoll.poll(POLL_S):
                self._hear(number, events)
            now = time.monotonic()
            due = self._orders.rate * (now - begun)
            for _ in range(len(self._turns)):  # if all have nothing, it is the buffer's turn
                if done >= due:
                    break
                done += self._turn(self._turns[0])
                self._turns.rotate(-1)
            self._keep_alive(now)
            # As many renewals as are due of all, one member after the other.
            while renew_at < now:
                renew_at += self._lease_s / 3 / len(self._members)
                self._renew(self._renewals[0])
                self._renewals.rotate(-1)
            if trainer_at < now:
                trainer_at = now + self._pace_s / 2
                self._trainer.beat(self._orders.recording.beat)

    def _keep_alive(self, now: float) -> None:
        """Let all beat whose time has come."""
        while self._beats_at and self._beats_at[0][0] <= now:
            due, member = self._beats_at.popleft()
            self._beats_at.append((max(due, now - self._pace_s) + self._pace_s, member))
            self._beat(member)

    def _hear(self, number: int, events: int) -> None:
        connection, member = self._by_socket[number]
        if events & select.EPOLLOUT and connection.flush():
            self._epoll.modify(number, select.EPOLLIN)
        for frames in connection.receive() if events & ~select.EPOLLOUT else ():
            if member is None:
                if connection is self._trainer.data:
                    self._trainer.hear(frames, self._orders.batch)
            elif connection is member.data:
                self._answered(member, frames)
            else:
                self._pace_s = _read_beat(frames[1]).heartbeat_s or self._pace_s

    def _answered(self, member: Member, frames: list[bytes]) -> None:
        reply = _read_reply(frames[0])
        number, now = reply.reply_to or 0, time.monotonic()
        if reply.type == "SubmitAck":
            ack = _read_ack(frames[1])
            self._acks.append(now - member.open.pop(number))
            self._accepted += ack.accepted
            self._refused += len(ack.refused)
            self._granted(member, number, ack.tasks, now)
            if self._flat_out:
                self._turn(member)
        elif reply.type == "SampleLeases":
            self._granted(member, number, _read_leases(frames[1]).tasks, now)
            if self._flat_out and not member.open:
                self._turn(member)
        elif reply.type != "RenewAck":
            raise RuntimeError(f"{member.name} was answered {decode(frames).body}")

    def _granted(self, member: Member, number: int, tasks: list[_Task], now: float) -> None:
        """Take work on; who was given none by its question asks again."""
        member.tasks.extend(tasks)
        if tasks:
            self._lease_s = tasks[0].lease_s
        if number == member.asked:
            member.asked = 0
            if tasks:
                self._grants.append(now - member.asked_at)
            else:
                self._send(member, self._question(member))

    # -- what members say -------------------------------------------------------------------------

    def _turn(self, member: Member) -> int:
        """The next turn of a member; how many trajectories it has submitted."""
        count, asks, asks_apart = next(member.moves)
        found = min(count, len(member.tasks))
        self._late += count - found
        data = b""
        if found:
            values = [member.tasks.popleft() for _ in range(found)]
            room = self._room(member) if asks else 0
            body = self._submission(member, values, room)
            data = member.message("SubmitTrajectories", body)
            member.open[member.numbers] = time.monotonic()
            if room:
                member.asked, member.asked_at = member.numbers, time.monotonic()
        if asks_apart or not member.tasks:
            data += self._question(member)
        self._send(member, data)
        return found

    def _submission(self, member: Member, tasks: list[_Task], room: int) -> bytes:
        parts = [_SUBMIT, _ARRAY_16, len(tasks).to_bytes(2, "big")]
        for task in tasks:
            cut: Cut = next(self._cuts)
            values = (task.sample_id, task.group_id, task.prompt_id, task.attempt)
            parts += filled(cut, (*map(_pack, values), member.packed_name))
        parts += (_ROOM, _pack(room), _VERSION)
        return b"".join(parts)

    def _room(self, member: Member) -> int:
        """For how much work it asks; for none while another question is open."""
        return 0 if member.asked else max(self._orders.held - len(member.tasks), 0)

    def _question(self, member: Member) -> bytes:
        """For as much work as it has room for; nothing while another is open."""
        room = self._room(member)
        if not room:
            return b""
        body = self._bodies.get(room)
        if body is None:
            asked = LeaseSamples(capacity=room, version=0, wait_s=LEASE_WAIT_S)
            body = self._bodies[room] = _pack(asked)
        data = member.message("LeaseSamples", body)
        member.asked, member.asked_at = member.numbers, time.monotonic()
        return data

    def _beat(self, member: Member) -> None:
        self._beats += 1
        data = member.message("Heartbeat", self._orders.recording.beat)
        if not member.control.send(data):
            self._epoll.modify(member.control.fileno, select.EPOLLIN | select.EPOLLOUT)

    def _renew(self, member: Member) -> None:
        leases = [(task.sample_id, task.attempt) for task in member.tasks]
        if leases:
            self._send(member, member.message("RenewLeases", _pack(RenewLeases(leases=leases))))

    def _send(self, member: Member, data: bytes) -> None:
        assert member.data is not None
        if data and not member.data.send(data):
            self._epoll.modify(member.data.fileno, select.EPOLLIN | select.EPOLLOUT)

    def _unanswered(self) -> int:
        """Open submits, after the buffer has had time to answer them."""
        self._flat_out = False
        until = time.monotonic() + JOIN_S
        while (left := sum(len(one.open) for one in self._members)) and time.monotonic() < until:
            for number, events in self._epoll.poll(0.1):
                self._hear(number, events)
        return left


def _welcome(control: Connection) -> Welcome:
    poller = select.poll()
    poller.register(control.fileno, select.POLLIN)
    until = time.monotonic() + JOIN_S
    while time.monotonic() < until:
        poller.poll(1000)
        for frames in control.receive():
            body = decode(frames).body
            if not isinstance(body, Welcome):
                raise TypeError(f"a member was refused: {body}")
            return body
    raise TimeoutError(f"the buffer has not answered a member within {JOIN_S:g} s")


def main() -> None:
    """Play, and tell in one line of JSON."""
    allow_connections()
    orders = msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes(), type=Orders)
    members = Members(orders)
    print(json.dumps({"ready": orders.members}), flush=True)
    sys.stdin.readline()
    print(json.dumps(msgspec.to_builtins(members.play())), flush=True)


if __name__ == "__main__":
    die_with_parent()
    main()
