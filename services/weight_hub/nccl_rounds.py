"""When a version is broadcast, and who fetches it instead: events in, effects out, no I/O.

A broadcast needs all ranks at the same time, a push waits for nobody. So a round begins when all
who are in the group wait for the same version. Who waits while another cannot take part (it is slow
to load, or has that version already) fetches the version instead, at once or after a short while.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from umbra.proto.messages import Prepare
from umbra.services.weight_hub.nccl_group import CommunicatorRanks, NcclGroup

Content = tuple[int, tuple[int, ...]]  # slot, and checksum of every bucket


@dataclass(slots=True)
class Round:
    """A broadcast under way. `open`: members that have not said how it went."""

    communicator: CommunicatorRanks
    slot: int
    prepares: dict[str, Prepare]
    open: set[str]
    sent: bool = False  # the hub's own agent is done
    failed: bool = False


@dataclass(frozen=True, slots=True)
class _Waiting:
    prepare: Prepare
    content: Content
    since: float


@dataclass(slots=True)
class Rounds:
    """Rounds of one hub.

    Args:
        group: who can take part.
        gather_s: seconds to wait for others.
        start_s: seconds to wait for the hub's own agent.
    """

    group: NcclGroup
    gather_s: float
    start_s: float
    ready_at: float | None = None  # since when the hub's own agent can take part
    current: Round | None = None
    _waiting: dict[str, _Waiting] = field(default_factory=dict[str, _Waiting])
    _given: dict[str, Content] = field(default_factory=dict[str, Content])

    def offer(self, name: str, prepare: Prepare, now: float) -> None:
        """`name` is to get a version."""
        content = (prepare.slot, tuple(prepare.checksums))
        self._waiting[name] = _Waiting(prepare, content, now)

    def settle(self, now: float, *, idle: bool) -> tuple[list[tuple[str, Prepare]], Round | None]:
        """Who is to fetch now, and the round that begins now (if the hub's agent is `idle`)."""
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

    def next_due(self) -> float | None:
        """When `settle` has something to do at the latest, as far as waiting goes."""
        return min(map(self._limit, self._waiting.values()), default=None)

    def reported(self, name: str, epoch: int, *, well: bool) -> Sequence[str]:
        """`name` has got its version, or not; who else is given up because of it.

        `epoch`: of its push.
        """
        current = self.current
        if current is None or name not in current.open or current.prepares[name].epoch != epoch:
            return []
        current.open.discard(name)
        return self._end() if well else self.failed()

    def dropped(self, name: str) -> Sequence[str]:
        """`name` is not subscribed any longer; who else is given up because of it."""
        concerned = self.current is not None and name in self.current.open
        self._waiting.pop(name, None)
        self._given.pop(name, None)
        self.group.leave(name)
        return self.failed(gone=name) if concerned else []

    def sent(self) -> None:
        """The hub's own agent has sent everything."""
        if self.current is not None:
            self.current.sent = True
            self._end()

    def failed(self, *, gone: str = "") -> Sequence[str]:
        """The round is over, and came to nothing for the members that are returned.

        `gone`: the one who left and took the others down with it.
        """
        current, self.current = self.current, None
        if current is None:
            return []
        current.failed = True
        self.group.broke(left=bool(gone))
        return sorted(current.open - {gone})

    def _limit(self, waiting: _Waiting) -> float:
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
