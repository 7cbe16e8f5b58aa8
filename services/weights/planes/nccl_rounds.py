"""When a version is broadcast, by which communicator, and who fetches it instead: no I/O in here.

A broadcast needs all ranks at the same time, a push waits for nobody. So a round begins when all
who are in the group wait for the same version. Who waits while another cannot take part (it is slow
to load, or has that version already) fetches the version instead, at once or after a short while.

A communicator cannot lose or gain a rank: every change of membership, and every failure, makes
another one, with a fresh id and the next epoch.

When a communicator cannot be built, all its ranks hang alike, so nobody can say whose fault it was.
It is found by trial: from then on a communicator has those who were in one that worked, and one
other; if that fails, it was this one, who stays out until its process is another. Those who are out
miss nothing: they fetch each version, as over plane `tcp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from umbra.proto.messages import Prepare

Content = tuple[int, tuple[int, ...]]  # slot, and checksum of every bucket


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
        before = self._members.pop(name, None)
        out = before is not None and before.out and before.incarnation == incarnation
        self._members[name] = _GroupMember(incarnation, out=out)
        self._ranks.pop(name, None)

    def leave(self, name: str) -> None:
        self._members.pop(name, None)
        self._ranks.pop(name, None)

    def begin(self) -> CommunicatorRanks:
        names = self.eligible
        if self._whole and set(names) == set(self._ranks) and self._size == len(names) + 1:
            return CommunicatorRanks(self.epoch, dict(self._ranks), fresh=False)
        self.epoch += 1
        self._whole = False
        self._ranks = {name: rank for rank, name in enumerate(names, start=1)}
        self._size = len(names) + 1
        return CommunicatorRanks(self.epoch, dict(self._ranks), fresh=True)

    def worked(self) -> None:
        """Note a broadcast that reached all ranks."""
        self._whole = True
        for name in self._ranks:
            self._members[name].proven = True
        self._careful = self._careful and any(
            not member.proven and not member.out for member in self._members.values()
        )

    def broke(self, *, left: bool = False) -> list[str]:
        """Note that a broadcast or building its communicator failed; return the members now out.

        `left`: because a member did, so that it is nobody else's fault.
        """
        was_whole, self._whole = self._whole, False
        if was_whole or left:
            return []  # if somebody hangs, that will show when the next one is built
        self._careful = True
        suspects = [name for name in self._ranks if not self._members[name].proven]
        if len(suspects) == 1:
            self._members[suspects[0]].out = True
            return suspects
        if not suspects:
            for name in self._ranks:
                self._members[name].proven = False
        return []


@dataclass(slots=True)
class Round:
    """A broadcast under way. `open`: members that have not said how it went."""

    communicator: CommunicatorRanks
    slot: int
    prepares: dict[str, Prepare]
    open: set[str]
    sent: bool = False  # the hub's own worker is done
    failed: bool = False


@dataclass(frozen=True, slots=True)
class _PendingPush:
    prepare: Prepare
    content: Content
    since: float


@dataclass(slots=True)
class Rounds:
    """Rounds of one hub."""

    group: NcclGroup
    gather_s: float
    start_s: float
    ready_at: float | None = None  # since when the hub's own worker can take part
    current: Round | None = None
    _waiting: dict[str, _PendingPush] = field(default_factory=dict[str, _PendingPush])
    _given: dict[str, Content] = field(default_factory=dict[str, Content])

    def offer(self, name: str, prepare: Prepare, now: float) -> None:
        content = (prepare.slot, tuple(prepare.checksums))
        self._waiting[name] = _PendingPush(prepare, content, now)

    def settle(self, now: float, *, idle: bool) -> tuple[list[tuple[str, Prepare]], Round | None]:
        """Return who must fetch now, and the round that begins if the hub's worker is `idle`."""
        eligible = self.group.eligible
        fetch = [
            name
            for name, waiting in self._waiting.items()
            if name not in eligible
            or now >= self._limit(waiting)
            or any(self._given.get(other) == waiting.content for other in eligible)
        ]
        pulled = [(name, self._give(name)) for name in fetch]
        contents = {self._waiting[name].content for name in eligible if name in self._waiting}
        if (
            not idle
            or self.ready_at is None
            or self.current is not None
            or len(contents) != 1
            or not all(name in self._waiting for name in eligible)
        ):
            return pulled, None
        prepares = {name: self._give(name) for name in eligible}
        (content,) = contents
        self.current = Round(self.group.begin(), content[0], prepares, set(prepares))
        return pulled, self.current

    @property
    def waiting(self) -> bool:
        """Return whether somebody waits, so that `settle` must be called again."""
        return bool(self._waiting)

    def reported(self, name: str, epoch: int, *, well: bool) -> Sequence[str]:
        """Note that `name` has its version, or failed; return others whose round failed with it.

        `epoch`: of its push.
        """
        current = self.current
        if current is None or name not in current.open or current.prepares[name].epoch != epoch:
            return []
        current.open.discard(name)
        return self._end() if well else self.failed()

    def dropped(self, name: str) -> Sequence[str]:
        """Remove `name`; returns the other members whose round ends with it."""
        concerned = self.current is not None and name in self.current.open
        self._waiting.pop(name, None)
        self._given.pop(name, None)
        self.group.leave(name)
        return self.failed(gone=name) if concerned else []

    def sent(self) -> None:
        if self.current is not None:
            self.current.sent = True
            self._end()

    def failed(self, *, gone: str = "") -> Sequence[str]:
        """End the round as failed; return the members that it came to nothing for.

        `gone`: the one who left and took the others down with it.
        """
        current, self.current = self.current, None
        if current is None:
            return []
        current.failed = True
        self.group.broke(left=bool(gone))
        return sorted(current.open - {gone})

    def _limit(self, waiting: _PendingPush) -> float:
        if self.ready_at is None:
            return waiting.since + self.start_s
        return max(waiting.since, self.ready_at) + self.gather_s

    def _end(self) -> Sequence[str]:
        if self.current is not None and self.current.sent and not self.current.open:
            self.group.worked()
            self.current = None
        return []

    def _give(self, name: str) -> Prepare:
        waiting = self._waiting.pop(name)
        self._given[name] = waiting.content
        return waiting.prepare
