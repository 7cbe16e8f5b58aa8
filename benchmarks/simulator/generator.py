"""A simulated generator: an engine of known speed, fed as the generator's loop feeds it."""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from statistics import NormalDist

import xxhash
from simulator.broker import Client, SimulatedBroker, Timeline

from umbra.proto.messages import LeaseTasks, SubmitResults, TaskLeases
from umbra.proto.records import Task, Trajectory, VersionSpan


@dataclass(frozen=True)
class Engine:
    """Speed of an engine and lengths of its answers.

    A decode step over n sequences takes `step_s + token_s * n`, and `prompt_token_s` more for each
    prompt token that it reads; new weights stop it for `pause_s`. Lengths are log-normal, cut off
    at `most` tokens.
    """

    slots: int
    step_s: float
    token_s: float
    prompt_token_s: float
    pause_s: float
    prompt_tokens: int
    median: float
    sigma: float
    most: float

    def length(self, name: str) -> int:
        """Return the tokens of the answer to sample `name`, the same wherever it is generated."""
        share = min(max(chance(name), 1e-6), 1 - 1e-6)
        factor = math.exp(self.sigma * NormalDist().inv_cdf(share))
        return max(1, round(min(self.most, self.median * factor)))


def chance(name: str) -> float:
    """Return a number from 0 to 1 that depends on `name` alone."""
    return xxhash.xxh3_64_intdigest(name.encode()) / 2**64


@dataclass(slots=True)
class Row:
    """A sample under way."""

    task: Task
    total: int  # tokens that it will have
    begun: float = -1.0  # step of the engine at which it began
    marked: float = 0.0  # step up to which its versions are known
    versions: list[int] = field(default_factory=list[int])  # of its tokens, in order


class Decoder:
    """Rows that an engine decodes, at a rate that depends on their number.

    All steps between two events are alike, so it leaps from one to the next.
    """

    def __init__(self, engine: Engine) -> None:
        self.slot_seconds = 0.0
        self.live: dict[str, Row] = {}
        self.queue: deque[Row] = deque()
        self.step = 0.0
        self._engine = engine
        self._at = 0.0  # time of `step`, or the end of a pause
        self._ends: list[tuple[float, str]] = []

    def advance(self, now: float) -> list[Row]:
        """Decode until `now`; return the rows that ended, in order."""
        ended: list[Row] = []
        while True:
            self._fill()
            if not self.live:
                self._at = max(self._at, now)
                return ended
            end = self._ends[0][0]
            due = self._at + (end - self.step) * self._period()
            if due > now + 1e-9:
                if now > self._at:
                    self._leap((now - self._at) / self._period(), now)
                return ended
            self._leap(end - self.step, due)
            while self._ends and self._ends[0][0] <= end:
                ended.append(self.live.pop(heapq.heappop(self._ends)[1]))

    def next_at(self) -> float | None:
        """Return when the next row ends, None without rows."""
        self._fill()
        return self._at + (self._ends[0][0] - self.step) * self._period() if self.live else None

    def pause(self, seconds: float, now: float) -> None:
        """Decode nothing for so long from `now` on."""
        self._at = max(self._at, now) + seconds

    def _fill(self) -> None:
        while self.queue and len(self.live) < self._engine.slots:
            row = self.queue.popleft()
            row.begun = row.marked = self.step
            self.live[row.task.sample_id] = row
            heapq.heappush(self._ends, (self.step + row.total, row.task.sample_id))
            self._at += self._engine.prompt_token_s * self._engine.prompt_tokens

    def _period(self) -> float:
        return self._engine.step_s + self._engine.token_s * len(self.live)

    def _leap(self, steps: float, to: float) -> None:
        self.slot_seconds += (to - self._at) * len(self.live)
        self.step += steps
        self._at = to


class SimGenerator:
    """One engine and its process."""

    def __init__(
        self, timeline: Timeline, name: str, broker: SimulatedBroker, engine: Engine, wait_s: float
    ) -> None:
        self.version = -1
        self.decoder = Decoder(engine)
        self._client = Client(broker, timeline, name, "generator")
        self._timeline = timeline
        self._engine = engine
        self._wait_s = wait_s
        self._asked = False
        self._due = math.inf

    def start(self) -> None:
        """Join the run."""
        self._client.join(lambda: None)

    def load(self, version: int) -> None:
        """Serve `version` from now on; sequences keep their cache and go on with it."""
        if version <= self.version:
            return
        self._finish()
        for row in self.decoder.live.values():
            self._mark(row)
        self.version = version
        self.decoder.pause(self._engine.pause_s, self._timeline.now)
        self._turn()

    def _turn(self) -> None:
        """Submit what ended, ask for work, and come back when the next sequence ends."""
        self._finish()
        room = self._engine.slots - len(self.decoder.live) - len(self.decoder.queue)
        if room > 0 and not self._asked and self.version >= 0:
            self._asked = True
            body = LeaseTasks(capacity=room, version=self.version, wait_s=self._wait_s)
            self._client.ask(body, TaskLeases, self._leased)
        at = self.decoder.next_at()
        if at is not None and at != self._due:
            self._due = at
            self._timeline.at(at, lambda: self._turn() if self._due == at else None)

    def _leased(self, leases: TaskLeases) -> None:
        self._asked = False
        self._finish()
        rows = (Row(task, self._engine.length(task.sample_id)) for task in leases.tasks)
        self.decoder.queue.extend(rows)
        self._turn()

    def _finish(self) -> None:
        ended = self.decoder.advance(self._timeline.now)
        if ended:
            for row in ended:
                self._mark(row)
            made = [answer(row, self._engine.prompt_tokens) for row in ended]
            self._client.ask(SubmitResults(trajectories=made), TaskLeases, lambda _: None)

    def _mark(self, row: Row) -> None:
        """Record that the tokens since the last mark are of the version that is served."""
        begins = not row.versions or self.decoder.step > row.marked
        if begins and (not row.versions or row.versions[-1] != self.version):
            row.versions.append(self.version)
        row.marked = self.decoder.step


def answer(row: Row, prompt_tokens: int) -> Trajectory:
    """Return a sound trajectory with one token for each version; `reward_parts` has the lengths."""
    task, count = row.task, len(row.versions)
    return Trajectory(
        sample_id=task.sample_id,
        group_id=task.group_id,
        prompt_id=task.prompt_id,
        attempt=task.attempt,
        prompt_ids=bytes(4),
        response_ids=bytes(4 * count),
        loss_mask=b"\1" * count,
        logprobs=bytes(4 * count),
        spans=[
            VersionSpan(version=version, start=index, end=index + 1)
            for index, version in enumerate(row.versions)
        ],
        finish_reason="stop",
        reward=float(int(task.sample_id.rpartition("-")[2]) % 2),
        reward_parts={"tokens": float(row.total), "prompt": float(prompt_tokens)},
    )
