"""What a scorer asks of the one who does the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from umbra.proto.records import Score, ScoringTask


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
