"""Turns that a text ends: the token that completes it is the last, whatever the engine did then."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.engine import ScriptedEngine
from fakes.rollouts import STOP, finish, says, settings
from fakes.trajectories import sample

from umbra.proto.records import Routing, Sampling, VersionSpan, unpack_int32
from umbra.services.environments.built_in import ExactMatch
from umbra.services.environments.pool import InlinePool
from umbra.services.environments.protocol import Ask, Response, Row, StepResult
from umbra.services.generator.engines.engine import EngineOutput
from umbra.services.generator.rollout import Rollout
from umbra.services.generator.runner import RolloutRunner
from umbra.services.generator.tokens import shortened
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.models import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Any:
    return load_tokenizer(tiny_model_dir)


class Search:
    """Answers what was looked for, until the model answers."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    def reset(self, row: Row) -> list[dict[str, Any]]:
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, response: str) -> StepResult:
        assert isinstance(response, Response)
        self.heard.append((response, response.stop))
        if response.stop:
            return StepResult(done=False, messages=[{"role": "user", "content": "found"}])
        return StepResult(reward=1.0)


def test_a_stop_string_of_the_run_ends_turns_of_environments(tokenizer: Any) -> None:
    engine = ScriptedEngine(says(tokenizer, "look</search> more", "42"))
    chat = Chat(tokenizer, {STOP})
    made: list[Search] = []

    def make() -> Search:
        made.append(Search())
        return made[-1]

    options = settings(
        chat, stops=("</search>",), sampling=Sampling(max_tokens=64), max_context=256
    )
    runner = RolloutRunner(engine, InlinePool(make), options)
    runner.add([sample({"prompt": "a"})])
    (trajectory,) = finish(runner)
    response = tokenizer.decode(unpack_int32(trajectory.response_ids))
    assert response == "look</search><|end|><|user|>found<|assistant|>42<|end|>"
    mask = trajectory.loss_mask
    assert sum(mask) == len("look</search>") + len("42") + 1
    assert made[-1].heard == [("look", "</search>"), ("42", "")]
    assert (trajectory.reward, trajectory.finish_reason) == (1.0, "stop")


def output(chat: Chat, text: str, reason: Any = "abort") -> EngineOutput:
    ids = chat.text_ids(text, begins=False)
    half = len(ids) // 2
    spans = [
        VersionSpan(version=0, start=0, end=half),
        VersionSpan(version=1, start=half, end=len(ids)),
    ]
    return EngineOutput("s", ids, [-0.5] * len(ids), spans, reason)


def test_what_an_engine_samples_beyond_it_is_dropped(tokenizer: Any) -> None:
    """Engines hand over several tokens at once, and a turn may be interrupted in between."""
    chat = Chat(tokenizer, {STOP})
    options = settings(chat, stops=("b.",), max_context=256, sampling=Sampling(max_tokens=64))
    task = sample({"prompt": "a"})
    rollout = Rollout(task, options)
    rollout.asked(Ask(lambda _: None, [{"role": "user", "content": "a"}]))
    rollout.generated(output(chat, "aab"))  # interrupted within the stop string
    assert rollout.phase.value == "generate"
    assert rollout.is_stopped(output(chat, ". and so on").token_ids)
    partial = rollout.trajectory(output(chat, ". and so on"))
    assert tokenizer.decode(unpack_int32(partial.response_ids)) == "aab."
    assert partial.spans[-1].end == 4
    rollout.generated(output(chat, ". and so on"))
    assert rollout.phase.value == "step"
    assert rollout.turn().said.text == "aa"


def test_an_output_is_shortened_with_all_that_is_known_of_it(tokenizer: Any) -> None:
    chat = Chat(tokenizer, {STOP})
    whole = output(chat, "abcdef")
    routing = Routing(layers=1, choices=2, experts=8, chosen=bytes(range(2 * (4 + 6 - 1))))
    for count in (2, 3, 5):
        short = shortened(replace(whole, routing=routing), count, before=4)
        assert len(short.token_ids) == len(short.logprobs) == count
        assert short.spans[-1].end == count
        assert [span.version for span in short.spans] == [0, 1][: 1 + (count > 3)]
        assert short.routing is not None
        assert len(short.routing.chosen) == 2 * (4 + count - 1)


def test_a_token_costs_the_same_however_long_the_turn_is(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 tokens once took 80,200 decodes."""
    tokens = 400
    decoded: list[int] = []
    chat = Chat(tokenizer, {STOP})
    pieces = chat.pieces

    def counted(token_ids: list[int]) -> str:
        decoded.append(len(token_ids))
        return pieces(token_ids)

    monkeypatch.setattr(chat, "pieces", counted)
    letter = tokenizer("a", add_special_tokens=False)["input_ids"]
    engine = ScriptedEngine(lambda ids: letter if len(ids) < tokens else [STOP], max_context=512)
    made = settings(chat, stops=("</search>",), sampling=Sampling(max_tokens=512), max_context=512)
    runner = RolloutRunner(engine, InlinePool(ExactMatch), made)
    runner.add([sample({"prompt": "a", "answer": "a"})])
    finish(runner)
    assert len(decoded) <= tokens + 10  # one for each step
    *steps, whole = decoded  # at its end the turn is read once
    assert whole < tokens
    assert max(steps) <= 20  # the stop string, and a few for characters of several tokens
