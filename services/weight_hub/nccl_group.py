"""Who is in the NCCL communicator of which epoch: events in, effects out; no NCCL in here.

A communicator cannot lose or gain a rank: every change of membership, and every failure, makes
another one, with a fresh id and the next epoch.

When a communicator cannot be built, all its ranks hang alike, so nobody can say whose fault it was.
It is found by trial: from then on a communicator has those who were in one that worked, and one
other; if that fails, it was this one, who stays out until its process is another. Those who are out
miss nothing: they fetch each version, as over plane `tcp`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Member:
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
        """Number of ranks, the hub included."""
        return len(self.ranks) + 1


@dataclass(slots=True)
class NcclGroup:
    """The members of one hub's communicator.

    Args:
        epoch: of the communicator made last; they count up.
    """

    epoch: int = 0
    _members: dict[str, _Member] = field(default_factory=dict[str, _Member])
    _ranks: dict[str, int] = field(default_factory=dict[str, int])
    _size: int = 0  # of the communicator of `epoch`, those who have left included
    _whole: bool = False  # the communicator of `epoch` is there and has worked
    _careful: bool = False  # at most one who is not proven at a time

    @property
    def eligible(self) -> list[str]:
        """Who is to be in the next communicator, in the order of joining."""
        names: list[str] = []
        unproven = 0
        for name, member in self._members.items():
            unproven += not member.proven and not member.out
            if member.proven or not (member.out or (self._careful and unproven > 1)):
                names.append(name)
        return names

    def join(self, name: str, incarnation: str) -> None:
        """Take a member in, from the next communicator on."""
        before = self._members.pop(name, None)
        out = before is not None and before.out and before.incarnation == incarnation
        self._members[name] = _Member(incarnation, out=out)
        self._ranks.pop(name, None)

    def leave(self, name: str) -> None:
        """A member is gone, by itself or because it missed a deadline."""
        self._members.pop(name, None)
        self._ranks.pop(name, None)

    def begin(self) -> CommunicatorRanks:
        """The communicator for a broadcast to all who are eligible."""
        names = self.eligible
        if self._whole and set(names) == set(self._ranks) and self._size == len(names) + 1:
            return CommunicatorRanks(self.epoch, dict(self._ranks), fresh=False)
        self.epoch += 1
        self._whole = False
        self._ranks = {name: rank for rank, name in enumerate(names, start=1)}
        self._size = len(names) + 1
        return CommunicatorRanks(self.epoch, dict(self._ranks), fresh=True)

    def worked(self) -> None:
        """A broadcast reached all ranks."""
        self._whole = True
        for name in self._ranks:
            self._members[name].proven = True
        self._careful = self._careful and any(
            not member.proven and not member.out for member in self._members.values()
        )

    def broke(self, *, left: bool = False) -> list[str]:
        """A broadcast failed, or its communicator could not be built; who is out from now on.

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
