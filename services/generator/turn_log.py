"""When the samples of traced groups were in the engine, and when with their environment."""

from __future__ import annotations

import time
from collections.abc import Callable

from umbra.proto.records import SampleTask
from umbra.services.generator.rollout import Phase
from umbra.services.process.lives import is_traced
from umbra.services.process.metrics import MetricsFile

STAGES = {Phase.RESET: "environment", Phase.GENERATE: "turn", Phase.STEP: "environment"}


class TurnLog:
    """Writes a row of kind "life" for each stretch that is over.

    Args:
        share: of the groups, that are traced.
        clock: seconds since the epoch.
    """

    def __init__(
        self, metrics: MetricsFile, share: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._metrics = metrics
        self._share = share
        self._clock = clock
        self._since: dict[str, tuple[str, float]] = {}  # by sample: stage, and since when

    def advanced(self, task: SampleTask, phase: Phase) -> None:
        """The sample of `task` is in `phase` now."""
        self._end(task)
        if phase in STAGES and task.pinned_version < 0 and is_traced(task.group_id, self._share):
            self._since[task.sample_id] = (STAGES[phase], self._clock())

    def gone(self, task: SampleTask) -> None:
        """The sample of `task` is not ours any more."""
        self._end(task)

    def _end(self, task: SampleTask) -> None:
        if (found := self._since.pop(task.sample_id, None)) is not None:
            stage, start = found
            self._metrics.write(
                "life", group=task.group_id, sample=task.sample_id, stage=stage,
                attempt=task.attempt, start=start, end=self._clock(),
            )  # fmt: skip
