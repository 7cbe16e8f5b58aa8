"""Who is in the NCCL communicator of which epoch: events in, effects out; no NCCL in here.

A communicator cannot lose or gain a rank: every change of membership makes another one, with a
fresh id and the next epoch. A member whose agent does not report back within the deadline has
hung in NCCL; it is lost, its agent is restarted, and the others build again without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent says of itself. `environment` is a digest of `variables`."""

    nccl: int
    cuda_major: int
    environment: str
    variables: dict[str, str] = {}
    cupy: str = ""
    device: str = ""  # its UUID, in hex


def mismatch(ours: Facts, theirs: Facts) -> str | None:
    """Why these two must not enter NCCL together (they would hang); None if they may."""
    if ours.nccl != theirs.nccl:
        return f"NCCL {theirs.nccl} there, {ours.nccl} here: install the same nvidia-nccl"
    if ours.cuda_major != theirs.cuda_major:
        return f"CUDA {theirs.cuda_major} there, {ours.cuda_major} here"
    if ours.environment != theirs.environment:
        names = sorted(ours.variables.keys() | theirs.variables.keys())
        differing = [
            name for name in names if ours.variables.get(name) != theirs.variables.get(name)
        ]
        return f"other environment variables: {', '.join(differing) or 'unknown ones'}"
    return None


@dataclass(frozen=True, slots=True)
class Build:
    """Effect: abort what there is, then have all agents join this communicator at once."""

    epoch: int
    uid: bytes
    ranks: Mapping[str, int]  # by member; the hub itself is rank 0 and not listed

    @property
    def size(self) -> int:
        return len(self.ranks) + 1


@dataclass(frozen=True, slots=True)
class Restart:
    """Effect: kill this member's agent and start another."""

    member: str
    reason: str


@dataclass(slots=True)
class _Member:
    facts: Facts
    built: int = 0  # epoch of the communicator that its agent is in


@dataclass(slots=True)
class Group:
    """The members of one hub's communicator.

    Args:
        facts: of the hub's own agent.
        new_id: makes an NCCL unique id.
        deadline_s: seconds that building may take.
    """

    facts: Facts
    new_id: Callable[[], bytes]
    deadline_s: float
    epoch: int = 0
    state: Literal["empty", "changed", "building", "ready"] = "empty"
    _members: dict[str, _Member] = field(default_factory=dict[str, _Member])
    _hub_built: int = 0
    _deadline: float = 0.0

    @property
    def ranks(self) -> dict[str, int]:
        """Rank by member, in the order of joining; rank 0 is the hub's."""
        return {name: rank for rank, name in enumerate(self._members, start=1)}

    def join(self, name: str, facts: Facts) -> str | None:
        """Take a member in from the next epoch on; or why not."""
        if (reason := mismatch(self.facts, facts)) is not None:
            return reason
        self._members.pop(name, None)  # a restarted one goes to the end
        self._members[name] = _Member(facts)
        self.state = "changed"
        return None

    def leave(self, name: str) -> None:
        """A member is gone, by itself or because it missed a deadline."""
        if self._members.pop(name, None) is not None:
            self.state = "changed" if self._members else "empty"

    def reconcile(self, now: float) -> Build | None:
        """To be asked before every push: what must be built first; None if nothing must."""
        if self.state != "changed":
            return None
        self.epoch += 1
        self.state = "building"
        self._deadline = now + self.deadline_s
        return Build(self.epoch, self.new_id(), self.ranks)

    def built(self, name: str | None, epoch: int) -> None:
        """The agent of `name` (None: the hub's own) has joined the communicator of `epoch`."""
        if epoch != self.epoch or self.state != "building":
            return  # of a communicator that nobody wants any more
        if name is None:
            self._hub_built = epoch
        elif name in self._members:
            self._members[name].built = epoch
        if self._hub_built == epoch and all(m.built == epoch for m in self._members.values()):
            self.state = "ready"

    def failed(self, name: str, epoch: int, reason: str) -> list[Restart]:
        """A member's agent could not join, or a broadcast failed there."""
        if epoch != self.epoch or name not in self._members:
            return []
        self.leave(name)
        return [Restart(name, reason)]

    def tick(self, now: float) -> list[Restart]:
        """Time has passed: whoever still builds has hung. The hub's own agent is named ""."""
        if self.state != "building" or now < self._deadline:
            return []
        reason = f"joining NCCL epoch {self.epoch} took more than {self.deadline_s:g} s"
        late = [name for name, member in self._members.items() if member.built != self.epoch]
        for name in late:
            self.leave(name)
        restarts = [Restart(name, reason) for name in late]
        if self._hub_built != self.epoch:
            restarts.append(Restart("", reason))  # it waits for the others inside of NCCL
        self.state = "changed" if self._members else "empty"
        return restarts
