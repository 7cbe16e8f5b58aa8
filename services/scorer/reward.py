"""Stage "reward": the environment's last step, run here instead of in the generator.

Of single samples, or of whole groups at once (`environment.reward_scope`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from umbra.proto.records import Score, Task, unpack_int32
from umbra.services.config.trajectory_rules import reward_fault
from umbra.services.environments.pool import EnvironmentPool, outcomes_of
from umbra.services.environments.protocol import EpisodeOutcome, Row, Said, StepResult
from umbra.services.modeling.chat import Chat

WAIT_S = 0.05


@dataclass(frozen=True)
class RewardWorker:
    """A worker that rewards responses of one turn, several at once, each with a deadline."""

    chat: Chat
    pool: EnvironmentPool
    wait: Callable[[float], object]  # up to so many seconds for an outcome
    stops: Callable[[Row], Sequence[str]] = lambda _: ()  # texts that end a turn
    whole: bool = False  # the environments reward groups; the tasks of one come together

    def score(self, tasks: Sequence[Task], alive: Callable[[], None]) -> Iterator[list[Score]]:
        """Return a reward for each of `tasks`, as the environments answer."""
        groups: dict[str, list[Task]] = {}  # by what the environment calls a sample
        for task in tasks:
            key = task.group_id if self.whole else task.sample_id
            groups.setdefault(key, []).append(task)
        plays: dict[str, tuple[Row, list[Said | str]]] = {}
        for key, group in groups.items():
            responses: list[Said | str] = []
            for task in group:
                prompt = unpack_int32(task.made.prompt_ids)
                response = unpack_int32(task.made.response_ids)
                responses.append(self.chat.said(response, prompt, stops=self.stops(task.row)))
            plays[key] = group[0].row, responses

        def wait() -> None:
            alive()
            self.wait(WAIT_S)

        for outcome in outcomes_of(self.pool, plays, wait):
            yield _scores(groups[outcome.key], outcome)

    def close(self) -> None:
        self.pool.close()


def _scores(tasks: Sequence[Task], outcome: EpisodeOutcome) -> list[Score]:
    """Return the scores of `tasks`, which were played at once, by `outcome`."""
    value, error = outcome.value, outcome.error
    values = value if isinstance(value, list) else [value]
    results = [result for result in values if isinstance(result, StepResult)]
    if len(results) != len(tasks):
        answers = f"{len(results)} rewards for {len(tasks)} samples"
        error = error or f"the environment returned {answers}: it must return one for each"
    for result in results:
        error = error or reward_fault(result.reward, result.reward_parts) or ""
    if error:
        return [Score(sample_id=t.sample_id, attempt=t.attempt, error=error) for t in tasks]
    return [
        Score(
            sample_id=task.sample_id,
            attempt=task.attempt,
            reward=result.reward,
            reward_parts=result.reward_parts,
        )
        for task, result in zip(tasks, results, strict=True)
    ]
