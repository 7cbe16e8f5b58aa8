"""Rewards as functions of the user's: one, or several with weights, in either of two forms.

Ours is called as `function(prompt=..., completion=..., row=...)` and returns a number. TRL's is
called as `function(prompts=[...], completions=[...], **columns)`, with one sample or a whole group
(`environment.reward_scope`), and returns numbers; None leaves it out of that sample's reward.
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
    """One function in either form; UsageError if it needs an argument that is not known here."""

    def __init__(self, function: Callable[..., Any], name: str, weight: float = 1.0) -> None:
        self._function = function
        self.name = name
        self.part = name.rpartition(":")[2]
        self.weight = weight
        self.waits = inspect.iscoroutinefunction(function)
        parameters = inspect.signature(function).parameters
        self.batched = bool({"prompts", "completions", "environments"} & set(parameters))
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
        arguments = {"prompts": [prompt] * count, "completions": list(completions)}
        return [self._function(**arguments, **columns, **extra)]

    def values(self, returned: Sequence[Any], count: int) -> list[float | None]:
        """Return the `count` rewards that `call` returned, or raise SampleError."""
        try:  # arrays and tensors have items too
            numbers = list(returned[0] if self.batched else returned)
        except TypeError:
            numbers = []
        if len(numbers) != count:
            raise SampleError(
                f"reward {self.name} returned {returned[0]!r} instead of a list with one number "
                f"for each of {count} completions"
            )
        return [
            None if self.batched and value is None else finite_number(value, f"reward {self.name}")
            for value in numbers
        ]


class Rewards:
    """All reward functions of an environment; if `named`, their plain values are parts of it."""

    def __init__(self, functions: Sequence[RewardFunction], *, named: bool = True) -> None:
        self._functions = functions
        self._named = named
        self.waits = any(function.waits for function in functions)
        self.any = bool(functions)
        self.batched = any(function.batched for function in functions)

    def results(
        self,
        row: Row,
        completions: Sequence[Any],
        texts: Sequence[str],
        extra: Mapping[str, Any] | None = None,
    ) -> list[StepResult] | Awaitable[list[StepResult]]:
        """Return for each sample the weighted sum of the functions' values.

        Arguments as of `RewardFunction.call`. Raises SampleError for a value that is no number, or
        if no function has one for a sample.
        """
        metrics: dict[str, float] = {}
        # TRL's `log_extra` fills a table of completions, which is not kept.
        arguments = {
            **(extra or {}),
            "log_extra": lambda *_, **__: None,
            "log_metric": metrics.__setitem__,
        }
        returned = [f.call(row, completions, texts, arguments) for f in self._functions]

        def sums() -> list[StepResult]:
            each = zip(self._functions, returned, strict=True)
            values = [function.values(own, len(texts)) for function, own in each]
            return [self._sum(of_sample, metrics) for of_sample in zip(*values, strict=True)]

        async def later() -> list[StepResult]:
            for number, values in enumerate(returned):
                if inspect.isawaitable(values[0]):
                    returned[number] = await asyncio.gather(*values)
            return sums()

        waits = any(inspect.isawaitable(one) for each in returned for one in each)
        return later() if waits else sums()

    def _sum(self, values: Sequence[float | None], metrics: dict[str, float]) -> StepResult:
        pairs = zip(self._functions, values, strict=True)
        known = [(function, value) for function, value in pairs if value is not None]
        if not known:
            raise SampleError("no reward function has a reward for this sample: all returned None")
        parts = {function.part: value for function, value in known if self._named}
        total = sum(function.weight * value for function, value in known)
        return StepResult(reward=total, reward_parts={**metrics, **parts})


class RewardedTurn(SingleTurn):
    """One turn, which the functions reward."""

    def __init__(self, rewards: Rewards) -> None:
        self._rewards = rewards
        self.concurrent = rewards.waits

    def step(self, response: str) -> StepResult | Awaitable[StepResult]:
        results = self._results([response])
        return results[0] if isinstance(results, list) else _first(results)

    def _results(self, texts: Sequence[str]) -> list[StepResult] | Awaitable[list[StepResult]]:
        completions: Sequence[Any] = texts
        if isinstance(self.row.get("prompt"), list):  # then TRL's completions are messages too
            completions = [[{"role": "assistant", "content": text}] for text in texts]
        return self._rewards.results(self.row, completions, texts)


class RewardedGroup(RewardedTurn):
    """All turns that answer one prompt, which functions that take `completions` get at once.

    Others are called for each sample.
    """

    def step_all(self, responses: Sequence[str]) -> list[StepResult] | Awaitable[list[StepResult]]:
        return self._results(responses)


async def _first(results: Awaitable[list[StepResult]]) -> StepResult:
    return (await results)[0]
