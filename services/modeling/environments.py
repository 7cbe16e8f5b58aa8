"""What a rollout talks to, and what rewards it.

An environment is an object per sample: `reset(row)` opens the conversation (anew, if called again),
`step(response)` answers the model's turn. Both may be plain or async methods; unless the class says
`instant = True` they run in a worker thread, where they may block for `environment.timeout_s`.
"""

from __future__ import annotations

import difflib
import importlib
import math
import numbers
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from umbra.proto.errors import UmbraError, UsageError
from umbra.services.modeling.chat import Message
from umbra.services.runtime.config import Environment as EnvironmentConfig


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answer to one turn of the model: the end (`done`), or `messages` to go on from.

    Rewards of the turns add up. `reason` is the finish reason of a finished sample: "turns" if the
    environment's turns ran out, "stop" otherwise.
    """

    reward: float = 0.0
    done: bool = True
    messages: list[Message] = field(default_factory=list)
    reward_parts: dict[str, float] = field(default_factory=dict)
    reason: str = "stop"


class Environment(Protocol):
    """One conversation; `row` is a line of the prompts file."""

    def reset(self, row: dict[str, Any]) -> list[Message] | Awaitable[list[Message]]:
        """The messages that the model answers first."""
        ...

    def step(self, response: str) -> StepResult | Awaitable[StepResult]:
        """The answer to the text that the model said."""
        ...


EnvironmentFactory = Callable[[], Environment]


class SampleError(UmbraError):
    """One sample failed because of its data or its environment; the others go on."""


class _SingleTurn:
    """Base: the row's prompt is put to the model, and its answer ends the sample."""

    def __init__(self) -> None:
        self._row: dict[str, Any] = {}

    def reset(self, row: dict[str, Any]) -> list[Message]:
        self._row = row
        return prompt_messages(row)


class Unrewarded(_SingleTurn):
    """Ends with the model's answer, without a reward: a scoring stage gives it later."""

    instant = True

    def step(self, response: str) -> StepResult:
        del response
        return StepResult()


class ExactMatch(_SingleTurn):
    """Reward 1 if the response, stripped, is the row's "answer"."""

    instant = True

    def step(self, response: str) -> StepResult:
        if "answer" not in self._row:
            raise SampleError('environment "exact" needs "answer" in every row of data.prompts')
        return StepResult(reward=float(response.strip() == str(self._row["answer"]).strip()))


class RewardFunction(_SingleTurn):
    """The reward is what `function(prompt=..., completion=..., row=...)` returns."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        super().__init__()
        self._function = function
        self._name = name

    def step(self, response: str) -> StepResult:
        value = self._function(prompt=self._row["prompt"], completion=response, row=self._row)
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise SampleError(f"{self._name} returned {value!r}, which is not a finite number")
        return StepResult(reward=float(value))


class Guess:
    """Guess the digit in the row's "answer": a miss is answered with > (go higher) or <.

    A hit is worth 1. Anything that is no digit is answered with ? and costs a try as well.
    """

    instant = True

    def __init__(self, tries: int = 4) -> None:
        self._tries = tries
        self._left = tries
        self._secret = 0

    def reset(self, row: dict[str, Any]) -> list[Message]:
        self._left, self._secret = self._tries, int(row["answer"])
        return prompt_messages(row)

    def step(self, response: str) -> StepResult:
        self._left -= 1
        text = response.strip()
        if text == str(self._secret):
            return StepResult(reward=1.0)
        if self._left <= 0:
            return StepResult(reason="turns")
        if not (len(text) == 1 and text.isascii() and text.isdigit()):
            hint = "?"
        else:
            hint = ">" if int(text) < self._secret else "<"
        return StepResult(done=False, messages=[{"role": "user", "content": hint}])


def prompt_messages(row: dict[str, Any]) -> list[Message]:
    """The messages in a row's "prompt": a list of them, or the text of one."""
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
        return list(prompt)
    raise SampleError('a row of data.prompts has no "prompt" that is a text or a list of messages')


def load_environment(config: EnvironmentConfig) -> EnvironmentFactory:
    """The factory of the configured environment.

    Raises:
        UsageError: unknown kind, module or name, or options the constructor does not take.
    """
    options = dict(config.options)
    if config.kind == "reward":
        if not config.reward:
            raise UsageError(
                'environment.kind = "reward" needs environment.reward = "module:function"'
            )
        function = _load(config.reward, "environment.reward")
        return _checked(
            lambda: RewardFunction(function, f"reward {config.reward}", **options), config
        )
    built_in: dict[str, Callable[..., Environment]] = {"exact": ExactMatch, "guess": Guess}
    if config.kind in built_in:
        cls: Callable[..., Any] = built_in[config.kind]
    elif ":" in config.kind:
        cls = _load(config.kind, "environment.kind")
        missing = [name for name in ("reset", "step") if not callable(getattr(cls, name, None))]
        if missing:
            raise UsageError(
                f"environment.kind {config.kind!r} has no method {' and no '.join(missing)}"
            )
    else:
        known = [*built_in, "reward"]
        raise UsageError(
            f"environment.kind {config.kind!r} is unknown{_nearest(config.kind, known)}; use "
            f'{", ".join(known)}, or a class as "module:Class"'
        )
    return _checked(lambda: cls(**options), config)


def _checked(factory: EnvironmentFactory, config: EnvironmentConfig) -> EnvironmentFactory:
    try:
        factory()
    except TypeError as error:
        raise UsageError(f"environment.options do not fit {config.kind!r}: {error}") from error
    return factory


def _load(target: str, key: str) -> Callable[..., Any]:
    """The callable "module:name"; modules in the working directory are found as well."""
    module_name, separator, name = target.partition(":")
    if not separator or not module_name or not name:
        raise UsageError(f'{key} {target!r}: write it as "module:name"')
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.split(".")[0] and error.name != module_name:
            raise UsageError(f"{key} {target!r}: importing it failed: {error}") from error
        files = [path.stem for path in Path(here).glob("*.py")]
        raise UsageError(
            f"{key} {target!r}: no module {module_name!r} is installed or lies in {here}"
            f"{_nearest(module_name, files)}"
        ) from error
    except Exception as error:
        raise UsageError(
            f"{key} {target!r}: importing it failed: {type(error).__name__}: {error}"
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        raise UsageError(
            f"{key} {target!r}: {module_name} has no callable {name!r}"
            f"{_nearest(name, vars(module))}"
        )
    return found


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, [str(k) for k in known], n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
