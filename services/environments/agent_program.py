"""Agents: programs that lead a sample's conversation, and ask the model for turns over HTTP.

A user's function is run by `AgentProgram`. Environments of other libraries are programs too
(`openenv.py`, `trl.py`, `verifiers.py`); those whose loop is ours hold a `Conversation`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import inspect
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from umbra.proto.errors import UsageError
from umbra.services.environments.protocol import (
    ENDS,
    Message,
    Row,
    SampleError,
    StepResult,
    finite_number,
    prompt_messages,
)
from umbra.services.environments.sandbox import Sandbox
from umbra.services.process.parent import bypass_proxy

Program = Callable[..., Any]
"""Called as `program(row, endpoint, **options)`; returns what `AgentProgram` says."""


def library(module: str, kind: str, needs: str) -> Any:
    """Import a module of the library of an environment `kind`; UsageError if it is not there."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f'environment.kind = "{kind}" needs {needs}: install it here, or beside `umbra '
            f"run-agents` with environment.workers = 0 ({error})"
        ) from error


class AgentProgram:
    """An environment of one long step, which gets the endpoint as JSON, and ends with the reward.

    The function, plain or async, is called as `function(row, endpoint, **options)`; `endpoint` has
    `base_url` and `api_key`, as the `openai` client's constructor takes them. It returns a number,
    a `StepResult` or, if it has posted its reward to the endpoint, None. A plain function has its
    process to itself, finds the same in the environment variables of the clients of OpenAI and
    Anthropic, and may take the row alone. A `sandbox` is closed when the sample is over.
    """

    def __init__(
        self, function: Program, name: str, *, sandbox: Sandbox | None = None, **options: Any
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
        self._function, self._options = function, options
        self._name = name
        self._sandbox = sandbox

    def reset(self, row: Row) -> list[Message]:
        self._row = row
        return []

    def step(self, response: str) -> StepResult | Awaitable[StepResult]:
        endpoint: dict[str, str] = json.loads(response)
        url = endpoint["base_url"]
        bypass_proxy(os.environ, urlsplit(url).hostname or "")
        if not self.concurrent:
            os.environ |= {"OPENAI_BASE_URL": url, "ANTHROPIC_BASE_URL": url.removesuffix("/v1")}
            os.environ["OPENAI_API_KEY"] = os.environ["ANTHROPIC_API_KEY"] = endpoint["api_key"]
        arguments = (self._row,) if self._alone else (self._row, endpoint)
        value = self._function(*arguments, **self._options)
        return self._later(value) if inspect.isawaitable(value) else self._result(value)

    async def close(self) -> None:
        if self._sandbox is not None:
            await self._sandbox.close()

    async def _later(self, value: Awaitable[Any]) -> StepResult:
        return self._result(await value)

    def _result(self, value: Any) -> StepResult:
        if value is None:
            return StepResult(done=False)  # it has posted its reward
        if isinstance(value, StepResult):
            return dataclasses.replace(value, done=True)
        return StepResult(reward=finite_number(value, self._name))


class Conversation:
    """The messages of a sample, to which the model's turns are added as they come.

    They begin as the row's prompt, with `observation` at the end of its last message. `endpoint`
    has `base_url` and `api_key` of the session; `tools` are JSON schemas. `reason` is the finish
    reason so far.
    """

    def __init__(
        self, endpoint: dict[str, str], row: Row, observation: str, tools: Sequence[Any]
    ) -> None:
        self.messages = prompt_messages(row)
        if observation:
            last = self.messages[-1]
            self.messages[-1] = {**last, "content": f"{last['content']}{observation}"}
        self.reason = "stop"
        self._turns = 0
        self._endpoint = endpoint
        self._options = {"model": "policy", **({"tools": list(tools)} if tools else {})}

    async def ask(self) -> Message | None:
        """Return the model's next turn, or None at a limit, also after a turn that was cut by it.

        The sample can be rewarded then. Raises SampleError if the endpoint fails.
        """
        body = {**self._options, "messages": self.messages}
        url = f"{self._endpoint['base_url']}/chat/completions"
        try:
            status, answer = await request(url, self._endpoint["api_key"], body)
        except OSError as error:
            raise SampleError(f"the model's endpoint failed: {error}") from error
        if status != 200:
            error = answer.get("error", {})
            if error.get("code") in ENDS and self._turns:
                self.reason = ENDS[error["code"]]
                return None
            raise SampleError(f"the model gave no turn: {error.get('message', answer)}")
        self._turns += 1
        choice = answer["choices"][0]
        self.messages.append(choice["message"])
        if choice["finish_reason"] == "length":
            self.reason = "length"
            return None
        return choice["message"]

    def answer(self, call: dict[str, Any], content: str) -> None:
        """Add the answer to a tool call of the last turn."""
        facts = {"tool_call_id": call["id"], "name": call["function"]["name"]}
        self.messages.append({"role": "tool", **facts, "content": content})


def arguments_of(call: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a tool call; raise ValueError if they are no JSON object."""
    text = call["function"]["arguments"]
    arguments = json.loads(text) if isinstance(text, str) else text
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call must be a JSON object")  # noqa: TRY004 - the model's
    return arguments


async def request(
    url: str, key: str, body: Any, *, method: str = "POST", limit_s: float | None = None
) -> tuple[int, Any]:
    """Send `body` as JSON to `url`, past any proxy; return status and JSON of the answer.

    Raises OSError if there is none within `limit_s` seconds.
    """
    parts = urlsplit(url)
    data = json.dumps(body).encode()
    # Of HTTP 1.0, whose answers come in one piece and end with the connection.
    head = (
        f"{method} {parts.path} HTTP/1.0\r\nHost: {parts.netloc}\r\n"
        f"Authorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure or None)
            try:
                writer.write(head.encode() + data)
                answer = await reader.read()
            finally:
                writer.close()
    except TimeoutError as error:
        raise OSError(str(error) or f"no answer within {limit_s} s") from None
    received, _, content = answer.partition(b"\r\n\r\n")
    try:
        return int(received.split(b" ", 2)[1]), json.loads(content)
    except (IndexError, ValueError):
        raise OSError("the connection ended without an answer") from None
