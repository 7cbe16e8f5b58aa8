"""Stage "reward": the environment's last step, run here instead of in the generator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from umbra.proto.records import Score, ScoringTask, unpack_int32
from umbra.services.environments.pool import EnvironmentPool, EpisodeOutcome
from umbra.services.environments.protocol import StepResult
from umbra.services.modeling.chat import Chat

WAIT_S = 0.05


class RewardWorker:
    """Rewards responses of one turn, several at once, each with a deadline.

    Args:
        chat: turns tokens into text.
        pool: where environments run.
        wait: waits up to so many seconds for an outcome.
        stops: texts that end a turn.
    """

    def __init__(
        self,
        chat: Chat,
        pool: EnvironmentPool,
        wait: Callable[[float], object],
        stops: Sequence[str] = (),
    ) -> None:
        self._chat = chat
        self._pool = pool
        self._wait = wait
        self._stops = stops

    def score(self, tasks: Sequence[ScoringTask], alive: Callable[[], None]) -> Iterator[Score]:
        """A reward for each of `tasks`, as the environments answer."""
        open_ = {task.sample_id: task for task in tasks}
        for task in tasks:
            self._submit(task)
        while open_:
            for outcome in self._pool.collect():
                task = open_.pop(outcome.key, None)
                if task is not None:
                    self._pool.forget(outcome.key)
                    yield _score(task, outcome)
            alive()
            if open_:
                self._wait(WAIT_S)

    def close(self) -> None:
        self._pool.close()

    def _submit(self, task: ScoringTask) -> None:
        made = task.trajectory
        response, prompt = unpack_int32(made.response_ids), unpack_int32(made.prompt_ids)
        said = self._chat.said(response, prompt, stops=self._stops)
        self._pool.play(task.sample_id, task.row, [said])


def _score(task: ScoringTask, outcome: EpisodeOutcome) -> Score:
    result = outcome.value
    if not isinstance(result, StepResult):
        return Score(sample_id=task.sample_id, attempt=task.attempt, error=outcome.error)
    return Score(
        sample_id=task.sample_id,
        attempt=task.attempt,
        reward=result.reward,
        reward_parts=result.reward_parts,
    )
