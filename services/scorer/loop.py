"""The scorer's loop: lease trajectories, score them, send the scores; renew what takes long."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from umbra.proto.net.session import Session
from umbra.proto.net.task_client import TaskClient
from umbra.proto.records import Score, Task
from umbra.services.process.metrics import MetricsFile


class StageWorker(Protocol):
    """A scorer of one stage's trajectories."""

    def score(self, tasks: Sequence[Task], alive: Callable[[], None]) -> Iterator[list[Score]]:
        """Yield a score for each of `tasks`, in any order; those in one list are of one message.

        `alive` is called every now and then, at least between two lists.
        """
        ...


WAIT_S = 1.0  # for work, so that a stop is noticed
GATHER_S = 0.2  # scores that get ready within this time travel together
DRAIN_S = 10.0  # to deliver the last scores


@dataclass(frozen=True)
class ScorerLoop:
    """The loop of one stage until the session stops; it leases `capacity` trajectories at once."""

    session: Session
    client: TaskClient
    worker: StageWorker
    capacity: int
    metrics: MetricsFile

    def run(self, refresh: Callable[[], object] = lambda: None) -> None:
        """Turn until asked to stop; others get the unfinished tasks when this process leaves.

        `refresh` is called before each turn, also while there is nothing to score.
        """
        while not self.session.stopping.is_set():
            refresh()
            self.turn()
        self.client.flush(DRAIN_S)

    def turn(self) -> None:
        """Ask for work, and do the tasks there are."""
        self.session.progress(f"waiting for {self.client.kind}", 0)
        self.client.ask(self.capacity)
        tasks, _ = self.client.poll()
        if tasks:
            with self.metrics.span("score"):
                self._score(tasks)
        else:
            with self.metrics.span("wait_work"):
                self.client.wait(WAIT_S)

    def _score(self, tasks: Sequence[Task]) -> None:
        left = {task.sample_id: task.attempt for task in tasks}

        def alive(done: int = 0) -> None:
            self.client.submit(())  # what has been gathered for long enough
            self.client.renew(lambda: list(left.items()))
            self.client.poll()
            self.session.progress(f"scoring {self.client.kind}", done)
            self.session.stats(scored=float(self.client.accepted))

        for ready in self.worker.score(tasks, alive):
            if self.session.stopping.is_set():
                break
            for score in ready:
                del left[score.sample_id]
            if len(ready) > 1:
                self.client.deliver_together(ready)  # of a group, which is taken as a whole
            else:
                self.client.submit(ready)
            alive(len(ready))
        self.client.deliver()
