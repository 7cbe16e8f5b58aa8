"""The arguments that an agent's function is called with."""

import json
import os
from typing import Any

import pytest

from umbra.services.environments.agent_program import AgentProgram

ENDPOINT = {"base_url": "http://127.0.0.1:1/v1", "api_key": "k"}


def both(row: dict[str, Any], endpoint: dict[str, str] | None = None) -> float:
    return float(endpoint == ENDPOINT)


def alone(row: dict[str, Any], *, worth: float = 1.0) -> float:
    return worth * (os.environ["OPENAI_BASE_URL"] == ENDPOINT["base_url"])


async def waits(row: dict[str, Any]) -> float:
    return 1.0


@pytest.mark.parametrize(("play", "options"), [(both, {}), (alone, {}), (alone, {"worth": 1})])
def test_a_plain_function_may_take_the_row_alone(
    monkeypatch: pytest.MonkeyPatch, play: Any, options: dict[str, Any]
) -> None:
    for client in ("OPENAI", "ANTHROPIC"):
        for name in ("BASE_URL", "API_KEY"):
            monkeypatch.setenv(f"{client}_{name}", "")
    program = AgentProgram(play, "agent", **options)
    program.reset({})
    assert program.step(json.dumps(ENDPOINT)).reward == 1.0  # type: ignore[union-attr]
    with pytest.raises(TypeError):  # several play in a process, which has one environment
        AgentProgram(waits, "agent")
