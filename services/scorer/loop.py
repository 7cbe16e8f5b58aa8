"""The scorer's loop: lease trajectories, score them, send the scores; renew what takes long."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from umbra.proto.net.session import Session
from umbra.proto.net.task_client import TaskClient
from umbra.proto.records import Score, Task
from umbra.services.process.metrics import MetricsFile


class StageWorker(Protocol):
    """Scores trajectories of one stage."""

    def score(self, tasks: Sequence[Task], alive: Callable[[], None]) -> Iterator[list[Score]]:
        """Yield a score for each of `tasks`, in any order; those in one list are of one message.

        `alive` is called every now and then, at least between two lists.
        """
        ...

    def close(self) -> None:
        """Let go of threads and memory."""
        ...


WAIT_S = 1.0  # for work, so that a stop is noticed
GATHER_S = 0.2  # scores that get ready within this time travel together
DRAIN_S = 10.0  # to deliver the last scores


class ScorerLoop:
    """Serves one stage until the session stops; leases `capacity` trajectories at once."""

    def __init__(
        self,
        session: Session,
        client: TaskClient,
        worker: StageWorker,
        capacity: int,
        metrics: MetricsFile,
    ) -> None:
        self._session = session
        self._client = client
        self._worker = worker
        self._capacity = capacity
        self._metrics = metrics

    def run(self, refresh: Callable[[], object] = lambda: None) -> None:
        """Turn until asked to stop; others get what is unfinished when this process leaves.

        `refresh` is called before each turn, also while there is nothing to score.
        """
        while not self._session.stopping.is_set():
            refresh()
            self.turn()
        self._client.flush(DRAIN_S)

    def turn(self) -> None:
        """Ask for work, and do what there is."""
        self._session.progress(f"waiting for {self._client.kind}", 0)
        self._client.ask(self._capacity)
        tasks, _ = self._client.poll()
        if tasks:
            with self._metrics.span("score"):
                self._score(tasks)
        else:
            with self._metrics.span("wait_work"):
                self._client.wait(WAIT_S)

    def _score(self, tasks: Sequence[Task]) -> None:
        left = {task.sample_id: task.attempt for task in tasks}

        def alive(done: int = 0) -> None:
            self._client.submit(())  # what has been gathered for long enough
            self._client.renew(lambda: list(left.items()))
            self._client.poll()
            self._session.progress(f"scoring {self._client.kind}", done)
            self._session.stats(scored=float(self._client.accepted))

        for ready in self._worker.score(tasks, alive):
            if self._session.stopping.is_set():
                break
            for score in ready:
                del left[score.sample_id]
            if len(ready) > 1:
                self._client.deliver_together(ready)  # of a group, which is taken as a whole
            else:
                self._client.submit(ready)
            alive(len(ready))
        self._client.deliver()
