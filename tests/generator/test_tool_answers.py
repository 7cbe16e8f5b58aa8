"""Answers of tools on their way into the tokens, and templates refused before a run starts."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from fakes.chat_templates import chat_tokenizer
from fakes.engine import ScriptedEngine
from fakes.rollouts import finish, settings
from fakes.trajectories import sample

from umbra.proto.errors import UsageError
from umbra.proto.records import Sampling, unpack_int32
from umbra.services.config import EnvironmentConfig, RunConfig
from umbra.services.config.loader import load_config
from umbra.services.environments.pool import InlinePool
from umbra.services.environments.protocol import Opening, ParsedTurn, Row, SampleError, StepResult
from umbra.services.environments.tools import ToolUse
from umbra.services.environments.worker import EnvironmentHost
from umbra.services.generator.checks import check_environment, check_template
from umbra.services.generator.runner import RolloutRunner
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.pretrained import load_tokenizer

CALL = {
    "id": "a",
    "type": "function",
    "function": {"name": "thermometer", "arguments": {"city": "Lund"}},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "thermometer",
        "description": "Degrees.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


class Thermometer:
    """Reads the first turn as a call, whatever it is; the second one ends the sample."""

    def __init__(self, *, tells: bool = True) -> None:
        self._tells = tells
        self._turns = 0

    def reset(self, row: Row) -> Opening:
        return Opening([{"role": "user", "content": row["prompt"]}], [TOOL])

    def step(self, response: str) -> StepResult:
        self._turns += 1
        if self._turns == 2:
            return StepResult(reward=1.0)
        answer = {"role": "tool", "content": "21 degrees"}
        calls = [CALL] if self._tells else []
        return StepResult(done=False, messages=[answer], tool_calls=calls)


def run(chat: Chat, ends: dict[int, int], *, tells: bool) -> RolloutRunner:
    """A sample with Thermometer; turn n of the model is a word and the end token `ends[n]`."""
    word = chat.text_ids("x", begins=False)[0]
    prompts: list[int] = []

    def script(ids: Any) -> list[int]:
        if len(ids) not in prompts and (not prompts or ids[-1] != word):
            prompts.append(len(ids))
            return [word]
        return [ends[len(prompts)]]

    engine = ScriptedEngine(script, stop_ids=chat.stop_ids, max_context=4096)
    options = settings(chat, max_context=4096, sampling=Sampling(max_tokens=8))
    runner = RolloutRunner(engine, InlinePool(lambda: Thermometer(tells=tells)), options)
    runner.add([sample({"prompt": "How warm is it?"})])
    return runner


@pytest.mark.parametrize(
    ("name", "ends", "said"),
    [
        (
            "gemma4_v5",
            ("<|tool_response>", "<turn|>"),
            'x<|tool_response>response:thermometer{value:<|"|>21 degrees<|"|>}<tool_response|>'
            "x<turn|>",
        ),
        (
            "gptoss",
            ("<|call|>", "<|return|>"),
            "x<|call|><|start|>functions.thermometer to=assistant<|channel|>commentary<|message|>"
            '"21 degrees"<|end|><|start|>assistantx<|return|>',
        ),
        (
            "qwen3",
            ("<|im_end|>", "<|im_end|>"),
            "x<|im_end|>\n<|im_start|>user\n<tool_response>\n21 degrees\n</tool_response><|im_end|>"
            "\n<|im_start|>assistant\nx<|im_end|>",
        ),
    ],
)
def test_an_answer_stands_in_the_trajectory(name: str, ends: tuple[str, str], said: str) -> None:
    tokenizer, stops = chat_tokenizer(name)
    chat = Chat(tokenizer, stops)
    first, second = tokenizer.convert_tokens_to_ids(list(ends))
    (trajectory,) = finish(run(chat, {1: first, 2: second}, tells=True))
    assert chat.text(unpack_int32(trajectory.response_ids)) == said
    mask = trajectory.loss_mask
    assert (list(mask[:2]), list(mask[-2:]), sum(mask)) == ([1, 1], [1, 1], 4)
    assert trajectory.reward == 1.0


@pytest.mark.parametrize(
    ("name", "end", "why"),
    [
        ("gemma4_v5", "<|tool_response>", "drops a message of role 'tool' after an assistant's"),
        ("gptoss", "<|call|>", "no previous assistant message with a tool call"),
    ],
)
def test_an_answer_without_its_call_fails_the_sample(name: str, end: str, why: str) -> None:
    tokenizer, stops = chat_tokenizer(name)
    runner = run(Chat(tokenizer, stops), {1: tokenizer.convert_tokens_to_ids(end)}, tells=False)
    for _ in range(5):
        runner.poll(0.0)
    finished, (failed,) = runner.results()
    assert not finished
    assert failed.reason.startswith(f"the chat template of {name} ")
    assert why in failed.reason


def test_tools_tell_which_calls_they_answer() -> None:
    function = {"name": "calculator", "arguments": {"expression": "1+1"}}
    answers = EnvironmentHost(ToolUse, "tools")
    row = {"prompt": "1+1?", "answer": "2"}
    called = ParsedTurn(text="x", tool_calls=[{"type": "function", "function": function}])
    result = asyncio.run(answers.play("s", row, [called]))
    assert isinstance(result, StepResult)
    assert result.tool_calls == [{"id": "call_0", "type": "function", "function": function}]
    # A turn with a call that can't be read is text as a whole.
    result = asyncio.run(answers.play("t", row, [ParsedTurn(text="x", problem="broken")]))
    assert isinstance(result, StepResult)
    assert (result.tool_calls, len(result.messages)) == ([], 1)


@pytest.mark.parametrize("calls", [[{"function": "f"}], [{"name": "f"}], "f", 3])
def test_calls_that_are_none_fail_the_sample(calls: Any) -> None:
    class Wrong(Thermometer):
        def step(self, response: str) -> StepResult:
            said = {"role": "tool", "content": ""}
            return StepResult(done=False, messages=[said], tool_calls=calls)

    with pytest.raises(SampleError, match="environment: step gave tool_calls"):
        asyncio.run(EnvironmentHost(Wrong, "environment").play("s", {"prompt": "a"}, ["x"]))


@pytest.mark.parametrize(
    ("name", "kind", "why"),
    [
        ("gptoss", "guess", "the chat template of gptoss ends an assistant's turn by '<|end|>"),
        ("gemma", "tools", "the chat template of gemma fails on messages of roles system, user"),
        ("muse_glimmer", "tools", "no parser reads the tool calls that the model's chat"),
    ],
)
def test_a_template_that_can_not_go_on_is_refused(name: str, kind: str, why: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_template(EnvironmentConfig(kind=kind), Chat(*chat_tokenizer(name)))
    assert why in str(refused.value)
    one_turn = EnvironmentConfig(kind=kind, max_turns=1)
    assert check_template(one_turn, Chat(*chat_tokenizer(name))) is None


TWO_TURNS = """
class Talk:
    def reset(self, row):
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, response):
        from umbra.services.environments.protocol import StepResult
        return StepResult(done=False, messages=[{"role": "user", "content": "go on"}])
"""


def test_a_class_that_goes_on_is_tried_with_the_model(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "talking_turns.py").write_text(TWO_TURNS)
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model)

    def config() -> RunConfig:
        overrides = [f"model.path={model}", "environment.kind=talking_turns:Talk"]
        return load_config(overrides=overrides, environ={})

    assert check_environment(config(), {"prompt": "a"}) is None
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = (
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    )
    tokenizer.save_pretrained(model)
    with pytest.raises(UsageError, match="does not write earlier assistant messages"):
        check_environment(config(), {"prompt": "a"})
