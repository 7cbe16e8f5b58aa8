"""A conversation with the model at the endpoint of a session, with the standard library only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from umbra.services.environments.protocol import Message, SampleError

# Why the endpoint gives no more turns, by the code of its error, as a finish reason.
_ENDS = {"turn_limit_reached": "turns", "context_length_exceeded": "length"}


class NoTurnError(Exception):
    """The model gets no more turns, but its sample can be rewarded. `reason` says what ended it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Conversation:
    """Messages, to which the model's turns are added as they come.

    Args:
        endpoint: `base_url` and `api_key` of the session.
        messages: how it begins.
        tools: JSON schemas of what the model may call.
    """

    def __init__(
        self, endpoint: dict[str, str], messages: Sequence[Message], tools: Sequence[Any] = ()
    ) -> None:
        self.messages = list(messages)
        self._turns = 0
        self._endpoint = endpoint
        self._tools = list(tools)

    async def ask(self) -> Message:
        """The model's next turn, which is among `messages` now.

        Raises:
            NoTurnError: a limit is reached; also after a turn that was cut by it.
            SampleError: the endpoint refuses the messages.
        """
        body: dict[str, Any] = {"model": "policy", "messages": self.messages}
        if self._tools:
            body["tools"] = self._tools
        status, answer = await _post(self._endpoint, "/chat/completions", body)
        if status != 200:
            error = answer.get("error", {})
            if error.get("code") in _ENDS and self._turns:
                raise NoTurnError(_ENDS[error["code"]])
            raise SampleError(f"the model gave no turn: {error.get('message', answer)}")
        self._turns += 1
        choice = answer["choices"][0]
        self.messages.append(choice["message"])
        if choice["finish_reason"] == "length":
            raise NoTurnError("length")
        return choice["message"]

    async def hold(self, answer: Callable[[Message], Awaitable[bool]]) -> str:
        """Ask for turns until `answer`, which adds messages, returns False; the finish reason."""
        try:
            while await answer(await self.ask()):
                pass
        except NoTurnError as end:
            return end.reason
        return "stop"

    async def scoring(self) -> None:
        """No more turns are asked for: what happens now is the reward (`environment.timeout_s`)."""
        await _post(self._endpoint, "/scoring", {})


def arguments_of(call: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a tool call in the model's message.

    Raises:
        ValueError: they are no JSON object.
    """
    given = call["function"]["arguments"]
    arguments = json.loads(given) if isinstance(given, str) else given
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call must be a JSON object")  # noqa: TRY004 - the model's
    return arguments


def tool_answer(call: dict[str, Any], content: str) -> Message:
    """The message that answers `call`."""
    name = call["function"]["name"]
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}


def with_observation(messages: Sequence[Message], observation: str) -> list[Message]:
    """`messages` with `observation` at the end of the last one, where the task is."""
    *before, last = messages
    return [*before, {**last, "content": f"{last['content']}{observation}"}]


async def _post(endpoint: dict[str, str], path: str, body: Any) -> tuple[int, Any]:
    url = urlsplit(endpoint["base_url"] + path)
    data = json.dumps(body).encode()
    head = (
        f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n"
        f"Authorization: Bearer {endpoint['api_key']}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    try:
        writer.write(head.encode() + data)
        answer = await reader.read()
    finally:
        writer.close()
    received, _, content = answer.partition(b"\r\n\r\n")
    try:
        return int(received.split(b" ", 2)[1]), json.loads(content)
    except (IndexError, ValueError):
        raise SampleError("the model's endpoint ended the connection without an answer") from None
