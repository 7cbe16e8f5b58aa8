"""Reward functions: ours and TRL's, one or several."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from umbra.proto.errors import UsageError
from umbra.services.environments.protocol import Row, SampleError, StepResult
from umbra.services.environments.rewards import RewardedTurn, RewardFunction, Rewards

ROW = {"prompt": "say", "target": "hi"}
CHAT = {**ROW, "prompt": [{"role": "user", "content": "say"}]}


def ours(prompt: Any, completion: str, row: Row) -> float:
    assert prompt == row["prompt"]
    return float(completion == row["target"])


def trls(prompts: list[Any], completions: list[Any], target: list[str], **kwargs: Any) -> list[Any]:
    assert len(prompts) == len(completions) == len(target) == 1
    kwargs["log_metric"]("seen", 2.0)
    kwargs["log_extra"]("column", ["text"])
    (completion,) = completions
    text = completion if isinstance(completion, str) else completion[0]["content"]
    return [len(text)]


async def later(completions: list[Any], **kwargs: Any) -> list[float]:
    await asyncio.sleep(0)
    return [0.5]


def never(completions: list[Any], **kwargs: Any) -> list[None]:
    return [None]


def scored(row: Row, said: str, *functions: tuple[Any, float], named: bool = True) -> StepResult:
    made = [RewardFunction(f, f"mine:{f.__name__}", weight) for f, weight in functions]
    environment = RewardedTurn(Rewards(made, named=named))
    environment.reset(row)

    async def wait() -> StepResult:
        answer = environment.step(said)
        return await answer if isinstance(answer, Awaitable) else answer

    return asyncio.run(wait())


def test_values_count_by_their_weights_and_are_named() -> None:
    result = scored(ROW, "hi", (ours, 2.0), (trls, 0.5), (later, 1.0), (never, 9.0))
    assert result.reward == 2.0 + 1.0 + 0.5
    assert result.reward_parts == {"ours": 1.0, "trls": 2.0, "later": 0.5, "seen": 2.0}


def test_one_function_has_no_parts() -> None:
    assert scored(ROW, "hi", (ours, 1.0), named=False) == StepResult(reward=1.0)


def test_completions_are_messages_if_the_prompt_is() -> None:
    assert scored(CHAT, "hello", (trls, 1.0)).reward == 5.0


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ([1.0, 2.0], "instead of a list with one number"),
        (0.5, "instead of a list"),
        ([None], "all"),
    ],
)
def test_what_is_no_reward_fails_the_sample(returned: Any, says: str) -> None:
    def function(completions: list[Any], **kwargs: Any) -> Any:
        return returned

    with pytest.raises(SampleError, match=says):
        scored(ROW, "hi", (function, 1.0))


def test_a_function_that_needs_what_is_not_known_is_refused() -> None:
    def function(completions: list[Any], trainer_state: Any, **kwargs: Any) -> Any:
        return [1.0]

    with pytest.raises(UsageError, match="mine:f needs the argument trainer_state"):
        RewardFunction(function, "mine:f")
    assert RewardFunction(later, "mine:later").waits
