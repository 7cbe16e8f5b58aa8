"""Plane `nccl`: a worker process receives into memory that it shares with this one.

That is host memory, whose checksums are verified. For an engine on one GPU a version lies in device
memory of the worker too: the host has what was read back from there, and the engine loads from it.

A broadcast needs all ranks at the same time, a push waits for nobody. So a round begins when all
who are in the group wait for the same version. Who waits while another cannot take part (it is slow
to load, or has that version already), or whose broadcast broke off, fetches the version bucket by
bucket into the same memory, as over plane `tcp`.

A communicator cannot lose or gain a rank: every change of membership, and every failure, makes
another one, with a fresh id and the next epoch. When one cannot be built, all its ranks hang alike,
so nobody can say whose fault it was. It is found by trial: from then on a communicator has those
who were in one that worked, and one other; if that fails, it was this one, who stays out, and
fetches, until its process is another.

`Rounds` and `NcclGroup` decide this without I/O.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field, replace

from msgspec import structs

from umbra.proto.deadline import Pace
from umbra.proto.errors import UmbraError
from umbra.proto.messages import Prepare, Ready, Subscribe
from umbra.proto.records import Manifest, NcclRound
from umbra.services.weights.arena import Arena
from umbra.services.weights.gpu.cuda import Device, DeviceMemory
from umbra.services.weights.gpu.worker import GpuWorkerProcess, result
from umbra.services.weights.manifest import wrong_checksum
from umbra.services.weights.planes.bucket_fetch import TcpReceiver
from umbra.services.weights.planes.bucket_server import TcpHub
from umbra.services.weights.planes.plane import Background, HubEnd, Receipt, Receiving, Settled

PATIENCE = 4  # a phase of a push has room for that many waits
GATHER_S = 1.0  # at most, for others to be ready for a broadcast
TRANSFER_DEADLINES = 3  # of a chunk, that a whole transfer may take

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _GroupMember:
    incarnation: str
    proven: bool = False  # was in a communicator that worked
    out: bool = False


@dataclass(frozen=True, slots=True)
class CommunicatorRanks:
    """Ranks by member; the hub itself is rank 0 and not listed. `fresh`: it must be built first."""

    epoch: int
    ranks: dict[str, int]
    fresh: bool

    @property
    def size(self) -> int:
        return len(self.ranks) + 1


@dataclass(slots=True)
class NcclGroup:
    """The members of one hub's communicator; `epoch` is of the one made last."""

    epoch: int = 0
    _members: dict[str, _GroupMember] = field(default_factory=dict[str, _GroupMember])
    _ranks: dict[str, int] = field(default_factory=dict[str, int])
    _size: int = 0  # of the communicator of `epoch`, those who have left included
    _whole: bool = False  # the communicator of `epoch` is there and has worked
    _careful: bool = False  # at most one who is not proven at a time

    @property
    def eligible(self) -> list[str]:
        """Return the members of the next communicator, in the order of joining."""
        names: list[str] = []
        unproven = 0
        for name, member in self._members.items():
            unproven += not member.proven and not member.out
            if member.proven or not (member.out or (self._careful and unproven > 1)):
                names.append(name)
        return names

    def join(self, name: str, incarnation: str) -> None:
        before = self._members.get(name)
        self.leave(name)
        out = before is not None and before.out and before.incarnation == incarnation
        self._members[name] = _GroupMember(incarnation, out=out)

    def leave(self, name: str) -> None:
        self._members.pop(name, None)
        self._ranks.pop(name, None)

    def begin(self) -> CommunicatorRanks:
        names = self.eligible
        fresh = not self._whole or set(names) != set(self._ranks) or self._size != len(names) + 1
        if fresh:
            self.epoch += 1
            self._whole = False
            self._ranks = {name: rank for rank, name in enumerate(names, start=1)}
            self._size = len(names) + 1
        return CommunicatorRanks(self.epoch, dict(self._ranks), fresh)

    def worked(self) -> None:
        """Note a broadcast that reached all ranks."""
        self._whole = True
        for name in self._ranks:
            self._members[name].proven = True
        self._careful = self._careful and any(
            not member.proven and not member.out for member in self._members.values()
        )

    def broke(self, *, left: bool = False) -> None:
        """Note that a broadcast or building its communicator failed; `left`: as a member left."""
        was_whole, self._whole = self._whole, False
        if was_whole or left:
            return  # if somebody hangs, that will show when the next one is built
        self._careful = True
        ranks = [self._members[name] for name in self._ranks]
        suspects = [member for member in ranks if not member.proven]
        if len(suspects) == 1:
            suspects[0].out = True
        for member in ranks if not suspects else ():
            member.proven = False


@dataclass(slots=True)
class Round:
    """A broadcast under way. `open`: members that have not said how it went."""

    communicator: CommunicatorRanks
    slot: int
    prepares: dict[str, Prepare]
    open: set[str]
    sent: bool = False  # the hub's own worker is done


@dataclass(slots=True)
class Rounds:
    """Rounds of one hub. What makes the current one fail returns it: it was in vain for `open`."""

    group: NcclGroup
    gather_s: float
    start_s: float
    ready_at: float | None = None  # since when the hub's own worker can take part
    current: Round | None = None
    # Who waits for a version, since when; and what was given to each last.
    waiting: dict[str, tuple[Prepare, float]] = field(
        default_factory=dict[str, tuple[Prepare, float]]
    )
    _given: dict[str, Prepare] = field(default_factory=dict[str, Prepare])

    def offer(self, name: str, prepare: Prepare, now: float) -> None:
        self.waiting[name] = prepare, now

    def settle(self, now: float, *, idle: bool) -> tuple[list[tuple[str, Prepare]], Round | None]:
        """Return who must fetch now, and the round that begins if the hub's worker is `idle`."""
        eligible = self.group.eligible
        had = [self._given[name] for name in eligible if name in self._given]
        fetch = [
            name
            for name, (prepare, since) in self.waiting.items()
            if name not in eligible
            or now >= self._limit(since)
            or any(_is_same(prepare, other) for other in had)
        ]
        fetching = [(name, self._give(name)) for name in fetch]
        gathered = [self.waiting[name][0] for name in eligible if name in self.waiting]
        if (
            not idle
            or self.ready_at is None
            or self.current is not None
            or not gathered
            or len(gathered) < len(eligible)
            or not all(_is_same(prepare, gathered[0]) for prepare in gathered)
        ):
            return fetching, None
        prepares = {name: self._give(name) for name in eligible}
        self.current = Round(self.group.begin(), gathered[0].slot, prepares, set(prepares))
        return fetching, self.current

    def reported(self, name: str, epoch: int, *, well: bool) -> Round | None:
        """Note that `name` has the version of its push `epoch`; else the round fails."""
        current = self.current
        if current is None or name not in current.open or current.prepares[name].epoch != epoch:
            return None
        current.open.discard(name)
        if not well:
            return self.failed()
        self._end()
        return None

    def dropped(self, name: str) -> Round | None:
        """Remove `name`, and with it the round that it was to take part in."""
        concerned = self.current is not None and name in self.current.open
        self.waiting.pop(name, None)
        self._given.pop(name, None)
        self.group.leave(name)
        return self.failed(leaver=name) if concerned else None

    def sent(self) -> None:
        if self.current is not None:
            self.current.sent = True
            self._end()

    def failed(self, *, leaver: str = "") -> Round | None:
        """End the round as failed; `leaver` left, and took the others down with it."""
        current, self.current = self.current, None
        if current is not None:
            current.open.discard(leaver)
            self.group.broke(left=bool(leaver))
        return current

    def _limit(self, since: float) -> float:
        if self.ready_at is None:
            return since + self.start_s
        return max(since, self.ready_at) + self.gather_s

    def _end(self) -> None:
        if self.current is not None and self.current.sent and not self.current.open:
            self.group.worked()
            self.current = None

    def _give(self, name: str) -> Prepare:
        prepare, _ = self.waiting.pop(name)
        self._given[name] = prepare
        return prepare


def _is_same(one: Prepare, other: Prepare) -> bool:
    return (one.slot, one.checksums) == (other.slot, other.checksums)


class NcclHub(HubEnd):
    """The hub's end: its worker is rank 0, and sends from the hub's arena.

    The worker's orders run on a thread, one round after another: get an id if a communicator is to
    be built, tell the receivers, enter the communicator, send in chunks of `chunk_bytes`.
    Communicators count from the one after `first_epoch`; who fetches is served by `tcp`.
    """

    plane = "nccl"

    def __init__(
        self,
        worker: GpuWorkerProcess,
        chunk_bytes: int,
        pace: Pace,
        first_epoch: int,
        tcp: TcpHub,
        wake: Callable[[], object] = lambda: None,
    ) -> None:
        self.worker = worker
        self._pace = pace
        self._wait_s = pace.limit_s(chunk_bytes, parts=PATIENCE)
        self._transfer_s = 0.0  # of a version, known with its layout
        self._rounds = Rounds(NcclGroup(first_epoch), min(GATHER_S, self._wait_s), self._wait_s)
        self._chunk_bytes = chunk_bytes
        self._tcp = tcp
        self._thread: Background[bytes] = Background("umbra-nccl", wake)
        self._uid = b""  # of the communicator made last
        self._announced: Round | None = None  # the round whose members know of it
        self._outcomes: list[Settled] = []

    @property
    def busy(self) -> bool:
        return bool(self._rounds.waiting)

    def layout(self, arena: Arena, manifest: Manifest) -> None:
        self._give_up(self._rounds.failed(), "the trainer registered another layout")
        self._thread.finish(cancel=True)  # so that the worker is free
        self._rounds.ready_at = None
        nbytes, slots = manifest.total_bytes, arena.slots
        self._transfer_s = (PATIENCE - 1) * self._pace.limit_s(nbytes, parts=PATIENCE)
        self._rounds.start_s = self._pace.limit_s(slots * nbytes, parts=PATIENCE)
        self.worker.use(arena, self._chunk_bytes, self._pace)
        self._thread.start(self._attach)

    def subscribed(self, name: str, incarnation: str, message: Subscribe) -> None:
        self.left(name)
        self._tcp.subscribed(name, incarnation, message, by_tcp=False)
        self._rounds.group.join(name, incarnation)

    def prepare(self, name: str, prepare: Prepare, now: float) -> Iterable[Settled]:
        self._rounds.offer(name, prepare, now)
        return ()

    def staged(self, name: str, message: Ready) -> None:
        failed = self._rounds.reported(name, message.epoch, well=not message.error)
        self._give_up(failed, f"{name} could not receive: {message.error}")

    def left(self, name: str) -> None:
        self._give_up(self._rounds.dropped(name), f"{name} has left the broadcast")

    def granted(self, slot: int) -> None:
        current = self._rounds.current
        if current is not None and current.slot == slot:
            self._give_up(self._rounds.failed(), "the version was overtaken")

    def poll(self, now: float) -> list[Settled]:
        """Return the Prepares that go out now, and the Prepares of failed rounds."""
        done = self._thread.take()
        if done is not None:
            self._step_done(done, now)
        fetching, begun = self._rounds.settle(now, idle=not self._thread.busy)
        self._outcomes += [Settled(name, self._tcp.complete(name, held)) for name, held in fetching]
        if begun is not None and begun.communicator.fresh:
            self._thread.start(self._new_id)
        elif begun is not None:
            self._announce(begun)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def close(self) -> None:
        self._thread.close()
        self.worker.kill()

    # -- a round ----------------------------------------------------------------------------------

    def _step_done(self, done: bytes | UmbraError, now: float) -> None:
        current = self._rounds.current
        if self._rounds.ready_at is None and isinstance(done, UmbraError):
            self.broken = f"the hub's GPU worker does not work: {done}"
            log.error("plane nccl: %s; all receivers fetch over tcp", self.broken)
        elif self._rounds.ready_at is None:
            self._rounds.ready_at = now
        elif current is None:
            log.debug("the hub's worker has left a broadcast: %s", done)
        elif isinstance(done, UmbraError):
            self._give_up(self._rounds.failed(), f"the hub's own worker: {done}")
        elif self._announced is current:
            self._rounds.sent()
        else:
            self._uid = done
            self._announce(current)

    def _announce(self, current: Round) -> None:
        self._announced, communicator = current, current.communicator
        group = NcclRound(
            epoch=communicator.epoch,
            uid=self._uid,
            rank=0,
            size=communicator.size,
            chunk_bytes=self._chunk_bytes,
            deadline_s=self._wait_s,
        )
        for name in sorted(current.open):
            theirs = structs.replace(group, rank=communicator.ranks[name])
            prepare = structs.replace(current.prepares[name], round=theirs)
            self._outcomes.append(Settled(name, prepare))
        self._thread.start(lambda: self._send(group, current.slot))

    def _give_up(self, failed: Round | None, reason: str) -> None:
        if failed is None:
            return
        self._thread.cancelled.set()
        log.warning("broadcast of epoch %d was given up: %s", failed.communicator.epoch, reason)
        for name in sorted(failed.open):
            self._outcomes.append(Settled(name, failed.prepares[name], reason))

    # -- on the thread ----------------------------------------------------------------------------

    def _attach(self) -> bytes:
        result(self.worker.attached(), self._thread.cancelled.is_set)
        return b""

    def _new_id(self) -> bytes:
        result(self.worker.attached(), self._thread.cancelled.is_set)
        return bytes.fromhex(self.worker.call("unique_id", self._wait_s)["uid"])

    def _send(self, group: NcclRound, slot: int) -> bytes:
        sending = self.worker.broadcast(group, slot, self._transfer_s)
        try:
            result(sending, self._thread.cancelled.is_set)
        except UmbraError:
            self.worker.begin()  # if it was killed, so that it is there for the next round
            raise
        return group.uid


class NcclReceiver:
    """A receiver into the slots of `arena`, where `pull` fetches what no broadcast brings.

    With the worker's `gpu` an engine loads from its memory, if there is room; else from `arena`.
    """

    def __init__(
        self,
        worker: GpuWorkerProcess,
        arena: Arena,
        chunk_bytes: int,
        pull: TcpReceiver,
        pace: Pace,
        gpu: Device | None = None,
    ) -> None:
        self._pace = pace
        self._worker = worker
        self._arena = arena
        self._pull = pull
        self._gpu = gpu
        self._memory: DeviceMemory | None = None
        worker.use(arena, chunk_bytes, pace)

    def receive(self, message: Prepare, target: int = 0) -> Receiving:
        """Receive a version into slot `target` and verify it there."""
        if message.round is None:
            receipt = yield from self._pull.receive(message, target)
            if not receipt.error and self._gpu is not None:
                receipt = yield from self._upload(receipt, target)
            return receipt
        began = time.perf_counter()
        self._pull.overwritten(target)
        error = ""
        try:
            yield from self._export()
            limit = self._pace.after(TRANSFER_DEADLINES * message.round.deadline_s)
            limit_s = limit.limit_s(self._arena.slot_bytes)
            yield from self._worker.broadcast(message.round, target, limit_s)
        except UmbraError as problem:
            log.warning("broadcast of version %d: %s", message.version, problem)
            error = str(problem)
            self._worker.begin()  # if it was killed, so that it is there for the next broadcast
        wire_s = time.perf_counter() - began
        for bucket, right in self._pull.verify(target, message.checksums):
            if right:
                yield bucket
            elif not error:
                error = f"{wrong_checksum(self._pull.manifest, bucket)} after a broadcast"
        stage_s = time.perf_counter() - began - wire_s
        data, size = self._memory or self._arena.slot(target), self._arena.slot_bytes
        return Receipt(wire_s, stage_s, size, error, data=data)

    def close(self) -> None:
        self._memory = None
        self._worker.kill()  # first: it writes into the arena
        self._pull.close()
        self._arena.close()

    def _export(self) -> Generator[None, None, None]:
        """Wait for the worker, and map its device memory; without room there, do without."""
        yield from self._worker.attached()
        if self._gpu is None or None not in (self._memory, self._worker.memory):
            return
        self._memory = None  # of a worker that has ended
        try:
            handle = yield from self._worker.exported()
            self._gpu.use()
            self._memory = DeviceMemory(self._gpu, self._arena.slot_bytes, handle)
        except UmbraError as problem:
            log.warning("the engine loads from host memory from now on: %s", problem)
            self._gpu = None
            yield from self._worker.attached()  # if it ended of that

    def _upload(self, receipt: Receipt, slot: int) -> Generator[None, None, Receipt]:
        """Return the receipt of a version in `slot` with the same bytes on the GPU, if they fit."""
        limit_s = self._pace.limit_s(self._arena.slot_bytes)
        try:
            yield from self._export()
            if self._memory is None:
                return receipt
            self._worker.order("upload", slot=slot, deadline_s=limit_s)
            yield from self._worker.answer(2 * limit_s)
        except UmbraError as problem:
            log.warning("a fetched version is loaded from host memory: %s", problem)
            self._worker.begin()  # if it was killed
            return receipt
        return replace(receipt, data=self._memory)
