"""The scorer's loop: lease trajectories, score them, send the scores; renew what takes long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from umbra.proto.net.session import Session
from umbra.proto.net.task_client import TaskClient
from umbra.proto.records import Score, Task
from umbra.services.process.command import ServiceContext


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


def score_stage(
    context: ServiceContext,
    session: Session,
    worker: StageWorker,
    refresh: Callable[[], object] = lambda: None,
) -> None:
    """Score until asked to stop; others get the unfinished tasks when this process leaves.

    `refresh` is called before each turn, also while there is nothing to score.
    """
    stage, grace_s = context.options["stage"], context.config.run.broker_grace_s
    wake = threading.Event()
    client = TaskClient(session.data, wake, grace_s=grace_s, kind=stage, gather_s=GATHER_S)
    while not session.stopping.is_set():
        refresh()
        session.progress(f"waiting for {stage}", 0)
        client.ask(context.config.scorer.capacity)
        tasks, _ = client.poll()
        if tasks:
            with context.metrics.span("score"):
                _score(tasks, session, client, worker)
        else:
            with context.metrics.span("wait_work"):
                client.wait(WAIT_S)
    client.flush(DRAIN_S)


def _score(
    tasks: Sequence[Task], session: Session, client: TaskClient, worker: StageWorker
) -> None:
    left = {task.sample_id: task.attempt for task in tasks}

    def alive(done: int = 0) -> None:
        client.submit(())  # what has been gathered for long enough
        client.renew(lambda: list(left.items()))
        client.poll()
        session.progress(f"scoring {client.kind}", done)
        session.stats(scored=float(client.accepted))

    for ready in worker.score(tasks, alive):
        if session.stopping.is_set():
            break
        for score in ready:
            del left[score.sample_id]
        if len(ready) > 1:
            client.deliver_together(ready)  # of a group, which is taken as a whole
        else:
            client.submit(ready)
        alive(len(ready))
    client.deliver()
