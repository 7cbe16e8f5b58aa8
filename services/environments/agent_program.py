"""A user's agent: a function that runs its own loop, and asks the model over HTTP."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from umbra.services.environments.protocol import Message, Row, StepResult, finite_number
from umbra.services.environments.sandbox import Sandbox
from umbra.services.process.parent import bypass_proxy

Program = Callable[..., Any]
"""Called as `program(row, endpoint, **options)`; returns what `AgentProgram` says."""


class AgentProgram:
    """An environment of one long step, which gets the endpoint as JSON, and ends with the reward.

    The function, plain or async, is called as `function(row, endpoint, **options)`; `endpoint` has
    `base_url` and `api_key`, as the `openai` client's constructor takes them. It returns a number,
    a `StepResult` or, if it has posted its reward to the endpoint, None. A plain function has its
    process to itself, and finds the same in OPENAI_BASE_URL and OPENAI_API_KEY, and for the
    `anthropic` client in ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY; it may take the row alone.

    Args:
        sandbox: goes to the function as `sandbox`, and is closed when the sample is over.
    """

    def __init__(
        self,
        function: Program,
        name: str,
        *,
        sandbox: Sandbox | None = None,
        **options: Any,
    ) -> None:
        if sandbox is not None:
            options["sandbox"] = sandbox
        self.concurrent = inspect.iscoroutinefunction(function)
        parameters, self._alone = inspect.signature(function), False
        try:
            parameters.bind({}, {}, **options)
        except TypeError:  # the variables are enough for a plain `play(row)`
            if self.concurrent:
                raise
            parameters.bind({}, **options)
            self._alone = True
        self._function = function
        self._name = name
        self._options = options
        self._sandbox = sandbox
        self._row: Row = {}

    def reset(self, row: Row) -> list[Message]:
        self._row = row
        return []

    def step(self, response: str) -> StepResult | Awaitable[StepResult]:
        endpoint: dict[str, str] = json.loads(response)
        bypass_proxy(os.environ, urlsplit(endpoint["base_url"]).hostname or "")
        if not self.concurrent:
            os.environ["OPENAI_BASE_URL"] = endpoint["base_url"]
            os.environ["ANTHROPIC_BASE_URL"] = endpoint["base_url"].removesuffix("/v1")
            os.environ["OPENAI_API_KEY"] = os.environ["ANTHROPIC_API_KEY"] = endpoint["api_key"]
        given = (self._row,) if self._alone else (self._row, endpoint)
        value = self._function(*given, **self._options)
        if not inspect.isawaitable(value):
            return self._result(value)

        async def later() -> StepResult:
            return self._result(await value)

        return later()

    async def close(self) -> None:
        if self._sandbox is not None:
            await self._sandbox.close()

    def _result(self, value: Any) -> StepResult:
        if value is None:
            return StepResult(done=False)  # it has posted its reward
        if isinstance(value, StepResult):
            return dataclasses.replace(value, done=True)
        return StepResult(reward=finite_number(value, self._name))
