"""The scorer's loop: lease trajectories, score them, send the scores; renew what takes long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from umbra.proto.bounds import LEASES
from umbra.proto.codec import portions
from umbra.proto.messages import (
    LeaseScoring,
    RenewAck,
    RenewLeases,
    ScoringLeases,
    SubmitAck,
    SubmitScores,
)
from umbra.proto.net.session import Session
from umbra.proto.records import Score, ScoringTask
from umbra.services.process.metrics import MetricsFile


class StageWorker(Protocol):
    """Scores trajectories of one stage."""

    def score(
        self, tasks: Sequence[ScoringTask], alive: Callable[[], None]
    ) -> Iterator[list[Score]]:
        """A score for each of `tasks`, in any order, as they get ready.

        Those in one list are of samples that are scored at once, and belong into one message.
        `alive` is called every now and then, at least between two lists.
        """
        ...

    def close(self) -> None:
        """Let go of threads and memory."""
        ...


WAIT_S = 1.0  # how long the buffer may keep a question open, so that a stop is noticed
ANSWER_S = 60.0
BATCH_S = 0.2  # scores that get ready within this time travel together


class ScorerLoop:
    """Serves one stage until the session stops.

    Args:
        session: membership in the run.
        stage: name of the stage.
        worker: does the work.
        capacity: trajectories leased at once.
        metrics: receives spans.
    """

    def __init__(
        self,
        session: Session,
        stage: str,
        worker: StageWorker,
        capacity: int,
        metrics: MetricsFile,
    ) -> None:
        self._session = session
        self._stage = stage
        self._worker = worker
        self._capacity = capacity
        self._metrics = metrics
        self._scored = 0

    def run(self) -> None:
        """Turn until asked to stop; others get what is unfinished when this process leaves."""
        while not self._session.stopping.is_set():
            self.turn()

    def turn(self) -> None:
        """Ask once for work, and do it."""
        self._session.progress(f"waiting for {self._stage}", 0)
        ask = LeaseScoring(stage=self._stage, capacity=self._capacity, wait_s=WAIT_S)
        with self._metrics.span("wait_work"):
            lease = self._session.data.call(ask, ScoringLeases, timeout_s=WAIT_S + ANSWER_S)
        if lease.tasks:
            with self._metrics.span("score"):
                self._score(lease)

    def _score(self, lease: ScoringLeases) -> None:
        left = {task.sample_id: task.attempt for task in lease.tasks}
        renew_every = min(task.lease_s for task in lease.tasks) / 3
        renew_at = time.monotonic() + renew_every

        def alive() -> None:
            nonlocal renew_at
            self._session.progress(f"scoring {self._stage}", 0)
            if left and time.monotonic() >= renew_at:
                renew_at = time.monotonic() + renew_every
                for portion in portions(list(left.items()), lambda _: 0, LEASES):
                    renew = RenewLeases(leases=portion)
                    self._session.data.call(renew, RenewAck, timeout_s=ANSWER_S)

        scores: list[Score] = []
        send_at = time.monotonic() + BATCH_S
        for ready in self._worker.score(lease.tasks, alive):
            if self._session.stopping.is_set():
                break
            for score in ready:
                del left[score.sample_id]
            if len(ready) > 1:
                self._submit(ready)  # of a group, which is taken as a whole
                continue
            scores += ready
            if time.monotonic() >= send_at:
                self._send(scores)
                scores, send_at = [], time.monotonic() + BATCH_S
        self._send(scores)

    def _send(self, scores: list[Score]) -> None:
        for portion in portions(scores, lambda score: len(score.logprobs or b"")):
            self._submit(portion)

    def _submit(self, scores: list[Score]) -> None:
        body = SubmitScores(stage=self._stage, scores=scores)
        answer = self._session.data.call(body, SubmitAck, timeout_s=ANSWER_S)
        self._scored += answer.accepted
        self._session.progress(f"scoring {self._stage}", len(scores))
        self._session.stats(scored=float(self._scored))
