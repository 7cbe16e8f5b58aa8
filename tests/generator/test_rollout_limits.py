"""Limits of turns, tokens and time, and tools within a rollout."""

from pathlib import Path
from typing import Any

import pytest
from fakes.engine import ScriptedEngine
from fakes.rollouts import STOP, finish, says, settings
from fakes.trajectories import sample

from umbra.proto.records import Sampling, unpack_int32
from umbra.services.environments.built_in import Guess
from umbra.services.environments.pool import InlinePool
from umbra.services.environments.protocol import (
    Ask,
    Message,
    RefusedError,
    Row,
    StepResult,
    prompt_messages,
)
from umbra.services.environments.tools import ToolUse
from umbra.services.generator.rollout import Limits, Rollout
from umbra.services.generator.runner import RolloutRunner
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.models import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Any:
    return load_tokenizer(tiny_model_dir)


@pytest.fixture
def chat(tokenizer: Any) -> Chat:
    return Chat(tokenizer, {STOP})


@pytest.mark.parametrize(
    ("limits", "reason", "turns", "tokens"),
    [
        (Limits(turns=2), "turns", 2, 7),
        (Limits(tokens=5), "length", 1, 2),
        (Limits(tokens=6), "length", 2, 6),
        (Limits(tokens=7), "length", 2, 7),
        (Limits(), "stop", 3, 12),
    ],
)
def test_limits_end_a_sample(
    chat: Chat, tokenizer: Any, limits: Limits, reason: str, turns: int, tokens: int
) -> None:
    engine = ScriptedEngine(says(tokenizer, "2", "3", "6"))
    runner = RolloutRunner(engine, InlinePool(Guess), settings(chat, limits=limits))
    runner.add([sample({"prompt": "g", "answer": "6"})])
    (trajectory,) = finish(runner)
    assert (trajectory.finish_reason, trajectory.turns) == (reason, turns)
    assert trajectory.response_tokens == tokens


def test_a_tool_is_used_within_a_rollout(chat: Chat, tokenizer: Any) -> None:
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "2*3"}}</tool_call>'
    engine = ScriptedEngine(says(tokenizer, "<tool_call>{", call, "6"), max_context=1024)
    wide = settings(chat, sampling=Sampling(max_tokens=128), max_context=1024)
    runner = RolloutRunner(engine, InlinePool(ToolUse), wide)
    runner.add([sample({"prompt": "2*3?", "answer": "6"})])
    (trajectory,) = finish(runner)
    prompt = tokenizer.decode(unpack_int32(trajectory.prompt_ids))
    assert '"name": "calculator"' in prompt  # the template knows no tools: a message tells of them
    assert prompt.endswith("<|user|>2*3?<|assistant|>")
    response = tokenizer.decode(unpack_int32(trajectory.response_ids))
    assert (
        "<|user|><tool_response>error: the tool call cannot be read: it is not closed" in response
    )
    assert response.endswith("<|user|><tool_response>6</tool_response><|assistant|>6<|end|>")
    assert (trajectory.reward, trajectory.turns) == (1.0, 3)
    assert trajectory.reward_parts == {"tool_calls": 2.0, "malformed_calls": 1.0}


LONG = [{"role": "user", "content": [{"type": "text", "text": "x" * 10_000_000}]}]


@pytest.fixture
def untokenized(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> Chat:
    """A chat that must not be asked for tokens of anything long."""

    def short_only(*given: Any) -> list[int]:
        assert len(str(given)) < 1000, "a text that cannot fit was tokenized"
        return [5]

    for name in ("prompt_ids", "turn_ids", "text_ids"):
        monkeypatch.setattr(chat, name, short_only)
    return chat


@pytest.mark.parametrize("ask", [{"messages": LONG}, {"text": "x" * 10_000_000}, {"tools": LONG}])
def test_what_an_agent_asks_is_measured_before_it_is_tokenized(
    untokenized: Chat, ask: dict[str, Any]
) -> None:
    """Ten million characters for a context of 64 took 16 s and 2 GB."""
    rollout = Rollout(sample({"prompt": "g"}), settings(untokenized))
    answers: list[Any] = []
    with pytest.raises(RefusedError, match=r"max_context = 64, by its characters") as refused:
        rollout.asked(Ask(answers.append, **ask))
    assert refused.value.code == "context_length_exceeded"


def test_what_environments_say_is_measured_before_it_is_tokenized(
    untokenized: Chat,
) -> None:
    class Long:
        def reset(self, row: Row) -> list[Message]:
            return LONG if row["prompt"] == "long" else prompt_messages(row)

        def step(self, response: str) -> StepResult:
            return StepResult(done=False, messages=LONG)

    runner = RolloutRunner(
        ScriptedEngine(lambda ids: [STOP]), InlinePool(Long), settings(untokenized)
    )
    runner.add([sample({"prompt": "long"}, sample_id="a"), sample({"prompt": "short"})])
    for _ in range(3):
        runner.poll(0.0)
    (finished,), (failed,) = runner.results()
    assert "by its characters" in failed.reason
    assert finished.finish_reason == "length"
