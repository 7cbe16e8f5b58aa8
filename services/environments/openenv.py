"""Environments behind an OpenEnv server.

The model acts by calling tools: an MCP server's, or `act`, whose arguments are the server's action.
With the option `text` the model's words are the action. Written against `openenv` 0.10.0.
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from umbra.proto.errors import UsageError
from umbra.services.environments.agent_program import Conversation, Program, arguments_of, library
from umbra.services.environments.protocol import (
    Row,
    SampleError,
    StepResult,
    finite_number,
    tool_schema,
)

RESET = "reset"
"""The column with the arguments of the server's `reset`, an object."""
_SCHEMA_S = 30.0
_HIDDEN = ("done", "reward", "metadata")  # of an observation, from the model
_ACT = "act"
_INVALID = "(code: VALIDATION_ERROR)"  # what the client's error ends with


def openenv_program(
    address: str, name: str, *, text: str = "", observation: str = "", message_s: float = 60.0
) -> Program:
    """Return the program of the server at URL `address`.

    `text` is the action's field for the model's words, "" if it calls tools; `observation` the
    field that it is shown, "" for all as JSON; `message_s` how long the server may take to answer.
    """
    client_class = library("openenv", "openenv", "openenv").GenericEnvClient
    action = _action_schema(address, name)
    properties = action.get("properties", {})
    if text and text not in properties:
        raise UsageError(
            f"environment.options.text = {text!r}: the action of {name} has the fields "
            f"{', '.join(properties)}"
        )
    mcp = {"tool_name", "arguments"} <= set(properties)

    async def play(row: Row, endpoint: dict[str, str]) -> StepResult:
        async with client_class(base_url=address, message_timeout_s=message_s) as server:
            arguments = row.get(RESET, {})
            if not isinstance(arguments, dict):
                raise SampleError(f'{name}: "{RESET}" in a row of data.prompts must be an object')
            result = await server.reset(**arguments)
            tools: list[dict[str, Any]] = []
            if mcp and not text:
                listed = (await server.step({"type": "list_tools"})).observation["tools"]
                tools = [_tool(t["name"], t["input_schema"], t["description"]) for t in listed]
            elif not text:
                tools = [_tool(_ACT, action)]
            shown = _observation_text(result.observation, observation)
            conversation = Conversation(endpoint, row, f"\n{shown}" if shown else "", tools)
            total, done = _reward(result, name), bool(result.done)

            async def act(payload: dict[str, Any]) -> str:
                """Take an action; return what the model is told of it."""
                nonlocal total, done
                try:
                    reached = await server.step(payload)
                except RuntimeError as error:
                    if not str(error).endswith(_INVALID):
                        raise SampleError(f"the server failed: {error}") from error
                    return f"error: {error}"
                total, done = total + _reward(reached, name), bool(reached.done)
                return _observation_text(reached.observation, observation)

            while not done and (turn := await conversation.ask()):
                if text:
                    told = await act({text: turn.get("content") or ""})
                    conversation.messages.append({"role": "user", "content": told})
                    continue
                calls = turn.get("tool_calls") or []
                for call in calls:
                    payload = _action(call, mcp=mcp)
                    told = payload if isinstance(payload, str) else await act(payload)
                    conversation.answer(call, told)
                    if done:
                        break
                done = done or not calls  # an answer without a call is the last one
            return StepResult(reward=total, reason=conversation.reason)

    return play


def _action(call: dict[str, Any], *, mcp: bool) -> dict[str, Any] | str:
    """Return the action that the model calls for, or the error that it is told."""
    function = call["function"]["name"]
    try:
        arguments = arguments_of(call)
    except ValueError as error:
        return f"error: {error}"
    if mcp:
        return {"type": "call_tool", "tool_name": function, "arguments": arguments}
    return arguments if function == _ACT else f"error: there is no tool {function!r}, only {_ACT}"


def _tool(name: str, schema: dict[str, Any], description: str = "") -> dict[str, Any]:
    properties = {k: v for k, v in schema.get("properties", {}).items() if k not in _HIDDEN}
    parameters = {**schema, "type": "object", "properties": properties}
    return tool_schema(name, description or schema.get("description", ""), parameters)


def _observation_text(observation: Any, field: str) -> str:
    if not isinstance(observation, dict):
        return "" if observation is None else str(observation)
    if field:
        return str(observation.get(field, ""))
    fields = {key: value for key, value in observation.items() if key not in _HIDDEN}
    return json.dumps(fields) if fields else ""


def _reward(result: Any, name: str) -> float:
    return 0.0 if result.reward is None else finite_number(result.reward, name)


def _action_schema(url: str, name: str) -> dict[str, Any]:
    """Return the schema of a server's actions; UsageError if none answers at `url`."""
    if "://" not in url:
        raise UsageError(
            f"environment.id = {url!r} is no URL of an OpenEnv server: start its app with "
            '"uvicorn MODULE:APP --port 8000", and name http://127.0.0.1:8000'
        )
    address = (f"http{url[2:]}" if url.startswith("ws") else url).rstrip("/")
    try:
        with urllib.request.urlopen(f"{address}/schema", timeout=_SCHEMA_S) as answer:
            return json.load(answer)["action"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{name}: {address}/schema gives no schema of actions: {error}") from error
