"""Rewards as functions of the user's: one, or several with weights, in either of two forms.

Ours is called as `function(prompt=..., completion=..., row=...)` and returns a number. TRL's is
called as `function(prompts=[...], completions=[...], **columns)`, with lists of one sample here,
and returns a list of numbers; None leaves the function out of that sample's reward.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from umbra.proto.errors import UsageError
from umbra.services.environments.protocol import Row, SampleError, StepResult, finite_number
from umbra.services.environments.single_turn import SingleTurn

_UNKNOWN_HERE = ("completion_ids", "trainer_state")  # of TRL's arguments
_RESERVED = ("prompt", "completion", "completion_ids", "prompts", "completions")  # no columns


class RewardFunction:
    """One function and its weight.

    Args:
        function: in either form, plain or async.
        name: what the user calls it, for errors.
        weight: by which its values count.

    Raises:
        UsageError: it needs an argument of TRL's that is not known here.
    """

    def __init__(self, function: Callable[..., Any], name: str, weight: float = 1.0) -> None:
        self._function = function
        self.name = name
        self.part = name.rpartition(":")[2]
        self.weight = weight
        self.waits = inspect.iscoroutinefunction(function)
        parameters = inspect.signature(function).parameters
        self._batched = bool({"prompts", "completions"} & set(parameters))
        for argument in _UNKNOWN_HERE:
            if argument in parameters and parameters[argument].default is inspect.Parameter.empty:
                raise UsageError(
                    f"reward {name} needs the argument {argument}, which is not known where "
                    "rewards are computed: give it a default"
                )

    def call(self, row: Row, completion: Any, text: str, extra: dict[str, Any]) -> Any:
        """What it returns, or an awaitable of that.

        Args:
            row: the sample's prompt row.
            completion: what the model said, as TRL has it: text, or messages if the prompt is.
            text: the model's last turn.
            extra: more arguments of TRL's, by name.
        """
        prompt = row.get("prompt", "")
        if not self._batched:
            return self._function(prompt=prompt, completion=text, row=row)
        columns = {key: [value] for key, value in row.items() if key not in _RESERVED}
        return self._function(prompts=[prompt], completions=[completion], **columns, **extra)

    def value(self, returned: Any) -> float | None:
        """The number in what the function returned.

        Raises:
            SampleError: there is none.
        """
        if not self._batched:
            return finite_number(returned, f"reward {self.name}")
        try:
            (value,) = returned
        except (TypeError, ValueError):
            raise SampleError(
                f"reward {self.name} returned {returned!r} instead of a list with one number for "
                "one completion"
            ) from None
        return None if value is None else finite_number(value, f"reward {self.name}")


class Rewards:
    """All reward functions of an environment.

    Args:
        functions: they are called in this order.
        named: whether each one's value, before its weight, is a part of the reward.
    """

    def __init__(self, functions: Sequence[RewardFunction], *, named: bool = True) -> None:
        self._functions = functions
        self._named = named
        self.waits = any(function.waits for function in functions)
        self.any = bool(functions)

    def result(
        self, row: Row, completion: Any, text: str, extra: Mapping[str, Any] | None = None
    ) -> StepResult | Awaitable[StepResult]:
        """The sum of the functions' values, each times its weight; arguments as of `call`.

        Raises:
            SampleError: a value is no number, or no function has one for this sample.
        """
        parts: dict[str, float] = {}
        given = {**(extra or {}), "log_extra": _nowhere, "log_metric": parts.__setitem__}
        returned = [function.call(row, completion, text, given) for function in self._functions]
        if any(map(inspect.isawaitable, returned)):
            return self._later(returned, parts)
        return self._sum(returned, parts)

    async def _later(self, returned: Sequence[Any], parts: dict[str, float]) -> StepResult:
        values = [await value if inspect.isawaitable(value) else value for value in returned]
        return self._sum(values, parts)

    def _sum(self, returned: Sequence[Any], parts: dict[str, float]) -> StepResult:
        total, counted = 0.0, 0
        for function, given in zip(self._functions, returned, strict=True):
            value = function.value(given)
            if value is None:
                continue
            total, counted = total + function.weight * value, counted + 1
            if self._named:
                parts[function.part] = value
        if self._functions and not counted:
            raise SampleError("no reward function has a reward for this sample: all returned None")
        return StepResult(reward=total, reward_parts=parts)


class RewardedTurn(SingleTurn):
    """One turn, whose reward is what the functions say."""

    def __init__(self, rewards: Rewards) -> None:
        super().__init__()
        self._rewards = rewards
        self.concurrent = rewards.waits

    def step(self, response: str) -> StepResult | Awaitable[StepResult]:
        return self._rewards.result(self.row, completion_of(self.row, response), response)


def completion_of(row: Row, text: str) -> Any:
    """One turn of the model as TRL has it: messages if the row's prompt is messages, else text."""
    if isinstance(row.get("prompt"), list):
        return [{"role": "assistant", "content": text}]
    return text


def _nowhere(column: str, values: Sequence[Any]) -> None:
    """TRL's `log_extra`, which fills a table of completions that there is none of here."""
