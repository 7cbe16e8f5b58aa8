"""A conversation with the model at the endpoint of a session, with the standard library only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from umbra.services.environments.protocol import ENDS, Message, SampleError


class NoTurnError(Exception):
    """The model gets no more turns, but its sample can be rewarded; `reason` ended it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Conversation:
    """Messages, to which the model's turns are added as they come.

    `endpoint` has `base_url` and `api_key` of the session; `tools` are JSON schemas.
    """

    def __init__(
        self, endpoint: dict[str, str], messages: Sequence[Message], tools: Sequence[Any] = ()
    ) -> None:
        self.messages = list(messages)
        self._turns = 0
        self._endpoint = endpoint
        self._tools = list(tools)

    async def ask(self) -> Message:
        """Return the model's next turn, which is among `messages` now.

        Raises NoTurnError at a limit, also after a turn that was cut by it.
        """
        body: dict[str, Any] = {"model": "policy", "messages": self.messages}
        if self._tools:
            body["tools"] = self._tools
        url = f"{self._endpoint['base_url']}/chat/completions"
        try:
            status, answer = await request(url, self._endpoint["api_key"], body)
        except OSError as error:
            raise SampleError(f"the model's endpoint failed: {error}") from error
        if status != 200:
            error = answer.get("error", {})
            if error.get("code") in ENDS and self._turns:
                raise NoTurnError(ENDS[error["code"]])
            raise SampleError(f"the model gave no turn: {error.get('message', answer)}")
        self._turns += 1
        choice = answer["choices"][0]
        self.messages.append(choice["message"])
        if choice["finish_reason"] == "length":
            raise NoTurnError("length")
        return choice["message"]

    async def hold(self, answer: Callable[[Message], Awaitable[bool]]) -> str:
        """Ask for turns until `answer`, which adds messages, returns False; return the reason."""
        try:
            while await answer(await self.ask()):
                pass
        except NoTurnError as end:
            return end.reason
        return "stop"


def arguments_of(call: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a tool call; raise ValueError if they are no JSON object."""
    given = call["function"]["arguments"]
    arguments = json.loads(given) if isinstance(given, str) else given
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call must be a JSON object")  # noqa: TRY004 - the model's
    return arguments


def tool_answer(call: dict[str, Any], content: str) -> Message:
    name = call["function"]["name"]
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}


def with_observation(messages: Sequence[Message], observation: str) -> list[Message]:
    """Add `observation` to the last of `messages`, where the task is."""
    *before, last = messages
    return [*before, {**last, "content": f"{last['content']}{observation}"}]


async def request(
    url: str, key: str, body: Any, *, method: str = "POST", limit_s: float | None = None
) -> tuple[int, Any]:
    """Send `body` as JSON to `url`, past any proxy; return status and JSON of the answer.

    Raises OSError if there is none within `limit_s` seconds.
    """
    where = urlsplit(url)
    data = json.dumps(body).encode()
    # Of HTTP 1.0, whose answers come in one piece and end with the connection.
    head = (
        f"{method} {where.path} HTTP/1.0\r\nHost: {where.netloc}\r\n"
        f"Authorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )

    async def exchange() -> bytes:
        secure = where.scheme == "https"
        port = where.port or (443 if secure else 80)
        reader, writer = await asyncio.open_connection(where.hostname, port, ssl=secure or None)
        try:
            writer.write(head.encode() + data)
            return await reader.read()
        finally:
            writer.close()

    exchanging = asyncio.ensure_future(exchange())
    try:  # `wait_for` before Python 3.12 loses a cancellation that comes with the answer
        if not (await asyncio.wait({exchanging}, timeout=limit_s))[0]:
            raise OSError(f"no answer within {limit_s} s")
        answer = exchanging.result()
    finally:
        exchanging.cancel()
    received, _, content = answer.partition(b"\r\n\r\n")
    try:
        return int(received.split(b" ", 2)[1]), json.loads(content)
    except (IndexError, ValueError):
        raise OSError("the connection ended without an answer") from None
