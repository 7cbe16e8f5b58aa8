"""Rewards as functions of the user's: one, or several with weights, in either of two forms.

Ours is called as `function(prompt=..., completion=..., row=...)` and returns a number. TRL's is
called as `function(prompts=[...], completions=[...], **columns)` and returns a list of numbers;
None leaves the function out of that sample's reward. Its lists are of one sample, or of all samples
of a group (`environment.reward_scope`).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from umbra.proto.errors import UsageError
from umbra.services.environments.built_in import SingleTurn
from umbra.services.environments.protocol import Row, SampleError, StepResult, finite_number

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
        self.batched = bool({"prompts", "completions"} & set(parameters))
        for argument in _UNKNOWN_HERE:
            if argument in parameters and parameters[argument].default is inspect.Parameter.empty:
                raise UsageError(
                    f"reward {name} needs the argument {argument}, which is not known where "
                    "rewards are computed: give it a default"
                )

    def call(
        self, row: Row, completions: Sequence[Any], texts: Sequence[str], extra: dict[str, Any]
    ) -> list[Any]:
        """Return its values or awaitables of them: one for all samples, or one for each.

        `completions` are TRL's (texts, or messages if the prompt is), `texts` the model's last
        turns, `extra` more arguments of TRL's.
        """
        prompt, count = row.get("prompt", ""), len(texts)
        if not self.batched:
            return [self._function(prompt=prompt, completion=text, row=row) for text in texts]
        columns = {key: [value] * count for key, value in row.items() if key not in _RESERVED}
        given = {"prompts": [prompt] * count, "completions": list(completions)}
        return [self._function(**given, **columns, **extra)]

    def values(self, returned: Sequence[Any], count: int) -> list[float | None]:
        """Return the numbers in what `call` returned for `count` samples.

        Raises:
            SampleError: one is missing, or is none.
        """
        try:  # arrays and tensors have items too
            numbers = list(returned[0] if self.batched else returned)
        except TypeError:
            numbers = []
        if len(numbers) != count:
            wanted = "one number for one completion"
            if count > 1:
                wanted = f"{count} numbers for {count} completions"
            raise SampleError(
                f"reward {self.name} returned {returned[0]!r} instead of a list with {wanted}"
            )
        what = f"reward {self.name}"
        return [
            None if self.batched and value is None else finite_number(value, what)
            for value in numbers
        ]


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
        self.batched = any(function.batched for function in functions)

    def result(
        self, row: Row, completion: Any, text: str, extra: Mapping[str, Any] | None = None
    ) -> StepResult | Awaitable[StepResult]:
        """`results` for one sample."""

        async def first(found: Awaitable[list[StepResult]]) -> StepResult:
            return (await found)[0]

        found = self.results(row, [completion], [text], extra)
        return found[0] if isinstance(found, list) else first(found)

    def results(
        self,
        row: Row,
        completions: Sequence[Any],
        texts: Sequence[str],
        extra: Mapping[str, Any] | None = None,
    ) -> list[StepResult] | Awaitable[list[StepResult]]:
        """Return for each sample the weighted sum of the functions' values.

        Arguments as of `RewardFunction.call`.

        Raises:
            SampleError: a value is no number, or no function has one for a sample.
        """
        metrics: dict[str, float] = {}
        given = {**(extra or {}), "log_extra": _nowhere, "log_metric": metrics.__setitem__}
        returned = [function.call(row, completions, texts, given) for function in self._functions]

        async def later() -> list[StepResult]:
            found = [await _all(each) for each in returned]
            return self._sums(found, metrics, len(texts))

        if any(inspect.isawaitable(one) for each in returned for one in each):
            return later()
        return self._sums(returned, metrics, len(texts))

    def _sums(
        self, returned: Sequence[list[Any]], metrics: dict[str, float], count: int
    ) -> list[StepResult]:
        values = [
            function.values(given, count)
            for function, given in zip(self._functions, returned, strict=True)
        ]
        return [self._sum([own[n] for own in values], metrics) for n in range(count)]

    def _sum(self, values: Sequence[float | None], metrics: dict[str, float]) -> StepResult:
        total, parts, counted = 0.0, dict(metrics), 0
        for function, value in zip(self._functions, values, strict=True):
            if value is None:
                continue
            total, counted = total + function.weight * value, counted + 1
            if self._named:
                parts[function.part] = value
        if self._functions and not counted:
            raise SampleError("no reward function has a reward for this sample: all returned None")
        return StepResult(reward=total, reward_parts=parts)


async def _all(returned: list[Any]) -> list[Any]:
    return await asyncio.gather(*returned) if inspect.isawaitable(returned[0]) else returned


class RewardedTurn(SingleTurn):
    """One turn, which the functions reward."""

    def __init__(self, rewards: Rewards) -> None:
        super().__init__()
        self._rewards = rewards
        self.concurrent = rewards.waits

    def step(self, response: str) -> StepResult | Awaitable[StepResult]:
        return self._rewards.result(self.row, completion_of(self.row, response), response)


class RewardedGroup(SingleTurn):
    """All turns that answer one prompt, which functions that take `completions` get at once.

    Raises UsageError if none of the functions does; others are called for each sample.
    """

    def __init__(self, rewards: Rewards, name: str) -> None:
        super().__init__()
        if not rewards.batched:
            raise UsageError(
                f'environment.reward_scope = "group": {name} has no function with the parameter '
                "completions, that would be called with a group"
            )
        self._rewards = rewards
        self.concurrent = rewards.waits

    def step(self, response: str) -> StepResult:
        raise SampleError("the samples of a group are rewarded at once, not one by one")

    def step_all(self, responses: Sequence[str]) -> list[StepResult] | Awaitable[list[StepResult]]:
        completions = [completion_of(self.row, response) for response in responses]
        return self._rewards.results(self.row, completions, responses)


def completion_of(row: Row, text: str) -> Any:
    """Return a turn of the model as TRL has it: messages if the row's prompt is, else text."""
    if isinstance(row.get("prompt"), list):
        return [{"role": "assistant", "content": text}]
    return text


def _nowhere(column: str, values: Sequence[Any]) -> None:
    """Stand in for TRL's `log_extra`, which fills a table of completions."""
