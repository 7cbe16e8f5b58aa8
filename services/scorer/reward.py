"""Stage "reward": the environment's last step, run here instead of in the generator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from umbra.proto.records import Score, ScoringTask, unpack_int32
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.environment_pool import EnvironmentPool, Outcome
from umbra.services.modeling.environments import EnvironmentFactory, StepResult

WAIT_S = 0.05


class RewardWorker:
    """Rewards responses of one turn, several at once, each with a deadline.

    Args:
        chat: turns tokens into text.
        make_environment: a fresh environment for each trajectory.
        pool: where environments run.
        wait: waits up to so many seconds for an outcome.
    """

    def __init__(
        self,
        chat: Chat,
        make_environment: EnvironmentFactory,
        pool: EnvironmentPool,
        wait: Callable[[float], object],
    ) -> None:
        self._chat = chat
        self._make_environment = make_environment
        self._pool = pool
        self._wait = wait

    def score(self, tasks: Sequence[ScoringTask], alive: Callable[[], None]) -> Iterator[Score]:
        """A reward for each of `tasks`, as the environments answer."""
        open_ = {task.sample_id: task for task in tasks}
        for task in tasks:
            self._submit(task)
        while open_:
            for outcome in self._pool.collect():
                task = open_.pop(outcome.key, None)
                if task is not None:
                    yield _score(task, outcome)
            alive()
            if open_:
                self._wait(WAIT_S)

    def close(self) -> None:
        """End the environments' threads."""
        self._pool.close()

    def _submit(self, task: ScoringTask) -> None:
        environment = self._make_environment()
        text = self._chat.response_text(unpack_int32(task.trajectory.response_ids))

        async def judge() -> StepResult:
            opened = environment.reset(task.row)
            if not isinstance(opened, list):
                await opened
            result = environment.step(text)
            return result if isinstance(result, StepResult) else await result

        name = type(environment).__name__
        self._pool.submit(task.sample_id, f"{name}.step", judge)


def _score(task: ScoringTask, outcome: Outcome) -> Score:
    if outcome.error:
        return Score(sample_id=task.sample_id, attempt=task.attempt, error=outcome.error)
    result: StepResult = outcome.value
    return Score(
        sample_id=task.sample_id,
        attempt=task.attempt,
        reward=result.reward,
        reward_parts=result.reward_parts,
    )
