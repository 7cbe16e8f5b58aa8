"""Samples, the groups they form, and their leases.

All plain fields of `Sample` and `Group` survive a restart of the buffer, but for times (seconds
of the broker's clock). A sample has at most one lease, to a generator or to a scorer, as its state
says, named by `(sample_id, attempt)`: each sort counts its attempts, so that results under an older
one are told apart.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from umbra.proto.access import LEASE_BYTES
from umbra.proto.records import Task
from umbra.services.prompts import Prompt


class State(StrEnum):
    """State of a sample; all but the last are in flight."""

    QUEUED = "queued"
    GENERATING = "generating"
    SCORING = "scoring"
    READY = "ready"
    TRAINING = "training"
    OVER = "over"  # trained, or ended


ANSWERED = frozenset({State.SCORING, State.READY, State.TRAINING})


@dataclass(slots=True, eq=False)
class Sample:
    """One response to be made."""

    serial: int
    sample_id: str
    group: Group  # while it is in flight; one that is over has no such attribute, see `_finish`
    state: State = State.QUEUED
    attempt: int = 0  # number of its newest lease to a generator
    lost: int = 0  # leases in this stage that expired, or ended in an error or malformed answer
    holder: str = ""
    leased_at: float = 0.0
    leased_version: int = 0  # that its holder served when it got it
    oldest: int | None = None  # version of the oldest token of its stored trajectory
    newest: int = 0  # the same of the newest token
    asked: int = 0  # id of the request that its holder got it by, to answer that again
    tokens: int = 0  # response tokens of its stored trajectory
    stage: int = 0  # scoring stages that are done
    score_attempts: int = 0  # number of its newest lease to a scorer; never goes back
    reward: float = 0.0  # that its trajectory has, with the scores that there are
    reward_parts: int = 0  # names that the reward of its trajectory is made of, without scores
    unscored_since: float = 0.0  # when it came to the scoring stage that it is in

    @property
    def lease_attempt(self) -> int:
        return self.score_attempts if self.state is State.SCORING else self.attempt

    @property
    def oldest_possible(self) -> int | None:
        """Return the version of its oldest token, or of its holder without one; None = unknown."""
        if self.state is State.GENERATING and self.oldest is None:
            return self.leased_version
        return self.oldest


@dataclass(slots=True, eq=False)
class Group:
    """The samples of one prompt; `due` is b of the staleness rules."""

    group_id: str
    prompt: Prompt
    due: int
    samples: list[Sample] = field(default_factory=list[Sample])
    ready: int = 0
    first_ready_at: float = 0.0
    completed: int = 0  # counts complete groups, so that their order is known; 0 = not complete
    row: bytes = b""  # packed row of the prompt, once a sample was leased
    moved: bool = True  # since `_age` was looked up
    _age: int | None = None

    def packed_row(self) -> bytes:
        if not self.row:
            self.row = msgspec.msgpack.encode(self.prompt.row)
        return self.row

    @property
    def oldest(self) -> int | None:
        if self.moved:
            versions = (sample.oldest_possible for sample in self.samples)
            self._age = min((v for v in versions if v is not None), default=None)
            self.moved = False
        return self._age

    @property
    def is_ready(self) -> bool:
        return self.ready == len(self.samples)

    @property
    def is_alive(self) -> bool:
        """False once it was trained or has ended, which all of its samples do together."""
        return self.samples[0].state is not State.OVER


FILL_BYTES = LEASE_BYTES // 4  # of a reply: the last row and trajectory in it come on top


@dataclass(slots=True)
class Grant:
    """Tasks of one reply, leased to `holder`: at most `capacity`, of about `FILL_BYTES`."""

    holder: str
    request: int  # its id, by which it is answered again if the reply is lost
    capacity: int
    now: float
    version: int = 0  # that a generator serves
    tasks: list[Task] = field(default_factory=list[Task])
    filled: int = 0  # bytes of rows and trajectories

    @property
    def room(self) -> int:
        return self.capacity - len(self.tasks) if self.filled < FILL_BYTES else 0


class LeaseTable:
    """All leases, by holder and deadline; one not renewed expires after `lease_s` seconds."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.held: dict[str, dict[str, Sample]] = {}  # by holder
        # All take equally long: the order in which they were made or renewed is that of the ends.
        self.deadlines: OrderedDict[Sample, float] = OrderedDict()

    def add(self, sample: Sample, grant: Grant) -> None:
        """Lease `sample`, whose state and attempt are set, to the holder of `grant`."""
        sample.holder, sample.asked = grant.holder, grant.request
        sample.leased_at = grant.now
        self.held.setdefault(grant.holder, {})[sample.sample_id] = sample
        self.deadlines[sample] = grant.now + self.lease_s

    def find(self, sample_id: str, attempt: int, holder: str) -> Sample | None:
        sample = self.held.get(holder, {}).get(sample_id)
        return sample if sample is not None and sample.lease_attempt == attempt else None

    def of(self, holder: str) -> list[Sample]:
        return list(self.held.get(holder, {}).values())

    def renew(self, sample: Sample, now: float) -> None:
        self.deadlines[sample] = now + self.lease_s
        self.deadlines.move_to_end(sample)

    def release(self, sample: Sample) -> None:
        if sample.holder:
            held = self.held[sample.holder]
            del held[sample.sample_id], self.deadlines[sample]
            if not held:
                del self.held[sample.holder]
            sample.holder = ""

    def expired(self, now: float) -> Iterator[Sample]:
        """Yield samples of expired leases; the caller releases each before asking for the next."""
        while self.deadlines:
            sample, deadline = next(iter(self.deadlines.items()))
            if deadline > now:
                return
            yield sample
