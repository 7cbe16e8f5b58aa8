"""Reward functions: ours and TRL's, one or several, for one sample or a whole group."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from umbra.proto.errors import UsageError
from umbra.services.config import EnvironmentConfig
from umbra.services.environments.loading import load_environment
from umbra.services.environments.protocol import Row, SampleError, StepResult
from umbra.services.environments.rewards import (
    RewardedGroup,
    RewardedTurn,
    RewardFunction,
    Rewards,
)

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


def rank(prompts: list[Any], completions: list[str], target: list[str], **kwargs: Any) -> Any:
    assert (prompts, target) == (["say"] * len(completions), ["hi"] * len(completions))
    kwargs["log_metric"]("different", float(len(set(completions))))
    return [sum(len(other) < len(own) for other in completions) for own in completions]


def only_some(completions: list[str], **kwargs: Any) -> list[float | None]:
    return [1.0 if own == "hi" else None for own in completions]


async def alone(prompt: Any, completion: str, row: Row) -> float:
    await asyncio.sleep(0)
    return ours(prompt, completion, row)


def scored(
    row: Row, said: str | list[str], *functions: tuple[Any, float], named: bool = True
) -> Any:
    """Return the result of one sample, or all of a group if `said` is a list."""
    made = [RewardFunction(f, f"mine:{f.__name__}", weight) for f, weight in functions]
    turn, group = RewardedTurn(Rewards(made, named=named)), RewardedGroup(Rewards(made))

    async def wait() -> StepResult | list[StepResult]:
        turn.reset(row)
        group.reset(row)
        answer = turn.step(said) if isinstance(said, str) else group.step_all(said)
        return await answer if isinstance(answer, Awaitable) else answer

    return asyncio.run(wait())


def test_values_count_by_their_weights_and_are_named() -> None:
    result = scored(ROW, "hi", (ours, 2.0), (trls, 0.5), (later, 1.0), (never, 9.0))
    assert result.reward == 2.0 + 1.0 + 0.5
    assert result.reward_parts == {"ours": 1.0, "trls": 2.0, "later": 0.5, "seen": 2.0}


def test_one_function_has_no_parts_and_completions_are_messages_if_the_prompt_is() -> None:
    assert scored(ROW, "hi", (ours, 1.0), named=False) == StepResult(reward=1.0)
    assert scored(CHAT, "hello", (trls, 1.0)).reward == 5.0


def test_a_function_gets_all_samples_of_a_group() -> None:
    found = scored(ROW, ["hi", "hello", ""], (rank, 0.5))
    assert [one.reward for one in found] == [0.5, 1.0, 0.0]
    assert found[1].reward_parts == {"rank": 2.0, "different": 3.0}


def test_functions_of_one_sample_are_called_for_each_of_a_group() -> None:
    found = scored(ROW, ["hi", "hello", ""], (rank, 1.0), (alone, 10.0), (only_some, 100.0))
    assert [one.reward for one in found] == [111.0, 2.0, 0.0]
    assert found[0].reward_parts["only_some"] == 1.0
    assert "only_some" not in found[1].reward_parts


EACH = "instead of a list with one number for each of 3 completions"
GROUP = ["a", "b", "c"]


@pytest.mark.parametrize(
    ("said", "returned", "says"),
    [
        ("hi", [1.0, 2.0], "instead of a list with one number"),
        ("hi", [None], "all"),
        ("hi", [float("nan")], "returned nan, which is not a finite number"),
        (GROUP, 0.5, EACH),
        (GROUP, [1.0, None, 1.0], "no reward function has a reward for this sample"),
        (GROUP, [1.0, "2", 1.0], "'2', which is not a finite number"),
    ],
)
def test_what_is_no_reward_fails_the_sample_or_its_group(
    said: str | list[str], returned: Any, says: str
) -> None:
    def function(completions: list[Any], **kwargs: Any) -> Any:
        return returned

    with pytest.raises(SampleError, match=says):
        scored(ROW, said, (function, 1.0))


def test_a_function_that_cannot_be_called_so_is_refused() -> None:
    def function(completions: list[Any], trainer_state: Any, **kwargs: Any) -> Any:
        return [1.0]

    own = EnvironmentConfig(kind="reward", reward=f"{__name__}:alone", reward_scope="group")
    with pytest.raises(UsageError, match=":alone has no function with the parameter completions"):
        load_environment(own)
    with pytest.raises(UsageError, match="mine:f needs the argument trainer_state"):
        RewardFunction(function, "mine:f")
    assert RewardFunction(later, "mine:later").waits
