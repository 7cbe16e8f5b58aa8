"""`umbra scorer` of a logprob stage whose work takes a known time; the rest is real.

    python benchmarks/timed_scorer.py SAMPLE_S TOKEN_S [flags of `umbra scorer`]

It leases trajectories and gives scores back as always. Only the forward pass is left out: it sleeps
for SAMPLE_S + TOKEN_S * tokens of each trajectory, its prompt included, as if on an accelerator of
its own, and says what the engine said.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence

from umbra.proto.records import Score, ScoringTask
from umbra.services.process.command import ServiceContext, service_command
from umbra.services.process.parent import die_with_parent
from umbra.services.scorer.loop import ScorerLoop

INT32 = 4  # bytes of a token


class TimedWorker:
    """Takes the place of `LogprobWorker`."""

    def __init__(self, sample_s: float, token_s: float) -> None:
        self._sample_s = sample_s
        self._token_s = token_s
        self._free_at = 0.0  # what was slept too long is made good

    def score(
        self, tasks: Sequence[ScoringTask], alive: Callable[[], None]
    ) -> Iterator[list[Score]]:
        """A score for each of `tasks`, one after the other."""
        for task in tasks:
            alive()
            one = task.trajectory
            tokens = (len(one.prompt_ids) + len(one.response_ids)) // INT32
            now = time.monotonic()
            self._free_at = max(self._free_at, now - 0.05) + self._sample_s
            self._free_at += self._token_s * tokens
            time.sleep(max(0.0, self._free_at - now))
            yield [Score(sample_id=task.sample_id, attempt=task.attempt, logprobs=one.logprobs)]

    def close(self) -> None:
        """There is nothing to let go of."""


def main() -> None:
    """Serve as a scorer of a run."""
    sample_s, token_s = map(float, sys.argv[1:3])

    def serve(context: ServiceContext) -> int:
        scorer = context.config.scorer
        with context.join("scorer") as session:
            context.ready({"stage": scorer.stage})
            worker = TimedWorker(sample_s, token_s)
            ScorerLoop(session, scorer.stage, worker, scorer.capacity, context.metrics).run()
            if session.failure is not None:
                raise session.failure
        return 0

    service_command("scorer", serve).main(sys.argv[3:], prog_name="timed_scorer")


if __name__ == "__main__":
    die_with_parent()
    main()
