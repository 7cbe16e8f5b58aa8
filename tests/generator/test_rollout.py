"""Rollouts through a scripted engine and through the real one: tokens, masks, spans, partials."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fakes.engine import ScriptedEngine, output
from fakes.rollouts import STOP, finish, says, settings
from fakes.trajectories import sample

from umbra.proto.records import (
    Sampling,
    VersionSpan,
    unpack_float32,
    unpack_int32,
)
from umbra.services.environments.built_in import ExactMatch, Guess
from umbra.services.environments.pool import InlinePool
from umbra.services.environments.protocol import Ask, StepResult
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.generator.rollout import Rollout
from umbra.services.generator.runner import RolloutRunner
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.models import load_model, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Any:
    return load_tokenizer(tiny_model_dir)


@pytest.fixture
def chat(tokenizer: Any) -> Chat:
    return Chat(tokenizer, {STOP})


def opening(prompt: str) -> Ask:
    """What an environment asks first."""
    return Ask(reply=lambda _: None, messages=[{"role": "user", "content": prompt}])


def test_one_turn(chat: Chat, tokenizer: Any) -> None:
    engine = ScriptedEngine(says(tokenizer, "123"), version=7)
    runner = RolloutRunner(engine, InlinePool(ExactMatch), settings(chat, generator="gen"))
    runner.add([sample({"prompt": "312", "answer": "123"})])
    (trajectory,) = finish(runner)
    assert tokenizer.decode(unpack_int32(trajectory.prompt_ids)) == "<|user|>312<|assistant|>"
    assert tokenizer.decode(unpack_int32(trajectory.response_ids)) == "123<|end|>"
    assert trajectory.loss_mask == b"\x01\x01\x01\x01"
    assert trajectory.spans == [VersionSpan(version=7, start=0, end=4)]
    assert (trajectory.reward, trajectory.turns, trajectory.finish_reason) == (1.0, 1, "stop")
    assert (trajectory.generator, trajectory.attempt) == ("gen", 1)


def test_turns_of_the_environment_are_masked(chat: Chat, tokenizer: Any) -> None:
    engine = ScriptedEngine(says(tokenizer, "2", "77", "6"), version=1)
    runner = RolloutRunner(engine, InlinePool(Guess), settings(chat))
    runner.add([sample({"prompt": "g", "answer": "6"})])
    for _ in range(3):
        runner.poll(0.0)
    engine.version = 2
    (trajectory,) = finish(runner)
    ids = unpack_int32(trajectory.response_ids)
    text = "2<|end|><|user|>><|assistant|>77<|end|><|user|>?<|assistant|>6<|end|>"
    assert tokenizer.decode(ids) == text
    assert list(trajectory.loss_mask) == [1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1]
    logprobs = unpack_float32(trajectory.logprobs)
    assert logprobs == [0, -1, 0, 0, 0, 0, -1, -2, 0, 0, 0, 0, -1]
    assert (trajectory.reward, trajectory.turns, trajectory.finish_reason) == (1.0, 3, "stop")
    # What the environment said counts to the tokens before it.
    assert [(s.version, s.start) for s in trajectory.spans] == [(1, 0), (2, 6)]
    assert trajectory.spans[-1].end == len(ids)


@pytest.mark.parametrize(("most", "context"), [(3, 64), (8, 6)])
def test_a_turn_without_its_end_ends_the_sample(
    chat: Chat, tokenizer: Any, most: int, context: int
) -> None:
    engine = ScriptedEngine(says(tokenizer, "123456"), max_context=context)
    limits = settings(chat, sampling=Sampling(max_tokens=most), max_context=context)
    runner = RolloutRunner(engine, InlinePool(Guess), limits)
    runner.add([sample({"prompt": "g", "answer": "6"})])
    (trajectory,) = finish(runner)
    assert trajectory.finish_reason == "length"
    assert trajectory.response_tokens == 3
    assert all(trajectory.loss_mask)


def test_a_prompt_without_room_for_an_answer_fails(chat: Chat) -> None:
    engine = ScriptedEngine(lambda _: [STOP])
    runner = RolloutRunner(engine, InlinePool(ExactMatch), settings(chat, max_context=10))
    runner.add([sample({"prompt": "0123456789", "answer": ""})])
    runner.poll(0.0)
    finished, (failed,) = runner.results()
    assert not finished
    assert failed.failed
    assert "prompt p: the prompt has 12 tokens" in failed.reason
    assert "generator.max_context = 10" in failed.reason
    assert not runner.active


def test_what_the_engine_refuses_costs_that_sample_only(tiny_model_dir: Path, chat: Chat) -> None:
    """Scenario: a tokenizer that knows more tokens than the model."""
    model = load_model(tiny_model_dir, torch.device("cpu"), torch.float32)
    model.resize_token_embeddings(90)
    engine = TorchEngine(model, stop_ids={STOP}, slots=4, max_context=64)
    runner = RolloutRunner(engine, InlinePool(ExactMatch), settings(chat))
    runner.add([sample({"prompt": "~", "answer": ""})])
    runner.add([msgspec.structs.replace(sample({"prompt": "1", "answer": ""}), sample_id="t")])
    finished, failed = [], []
    while runner.active:
        runner.poll(0.0)
        some, more = runner.results()
        finished, failed = finished + some, failed + more
    assert [t.sample_id for t in finished] == ["t"]
    assert "prompt p: its prompt has token 99, but the model knows 90" in failed[0].reason


def test_model_tokens_are_never_tokenised_again() -> None:
    """A tokenizer in which "a" + "a" and "aa" are the same text, but not the same tokens."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {"<e>": 3, "a": 4, "aa": 5, "u": 6, ">": 7, "<": 8, "?": 9, "g": 10}
    bpe = Tokenizer(models.BPE({**vocab, "x": 0, "y": 1, "z": 2}, merges=[("a", "a")]))
    bpe.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<e>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'u' if m.role == 'user' }}{{ m.content }}"
        "{{ '<e>' if m.role == 'assistant' }}{% endfor %}"
    )
    said = [4, 4, STOP]
    text = tokenizer.decode(said[:-1])
    assert tokenizer(text)["input_ids"] == [5] != said[:-1]
    engine = ScriptedEngine(lambda ids: [said[len(ids) - 2]] if len(ids) < 5 else [STOP])
    runner = RolloutRunner(
        engine, InlinePool(lambda: Guess(tries=2)), settings(Chat(tokenizer, {STOP}))
    )
    runner.add([sample({"prompt": "g", "answer": "6"})])
    (trajectory,) = finish(runner)
    assert unpack_int32(trajectory.response_ids) == [4, 4, STOP, 6, 9, STOP]
    assert engine.requests[1].prompt_ids == [6, 10, 4, 4, STOP, 6, 9]


# -- partials -------------------------------------------------------------------------------------


@pytest.mark.parametrize("polls", [1, 4, 6, 9])
def test_a_partial_goes_on_where_it_was_cut_off(chat: Chat, tokenizer: Any, polls: int) -> None:
    """Scenario: drain after any number of steps, resume in another runner. Result: as if whole."""
    script = says(tokenizer, "11", "", "9", "6")
    task = sample({"prompt": "g", "answer": "6"})
    whole = RolloutRunner(ScriptedEngine(script), InlinePool(Guess), settings(chat))
    whole.add([task])
    (expected,) = finish(whole)
    first = RolloutRunner(ScriptedEngine(script), InlinePool(Guess), settings(chat))
    first.add([task])
    for _ in range(polls):
        first.poll(0.0)
    returned = first.drain("drained")
    finished, _ = first.results()
    assert len(returned) + len(finished) == 1
    if finished:
        return
    assert (returned[0].reason, returned[0].failed) == ("drained", False)
    partial = returned[0].partial
    assert partial is None or partial.finish_reason == "partial"
    second = RolloutRunner(ScriptedEngine(script, version=1), InlinePool(Guess), settings(chat))
    second.add([sample(task.row, attempt=2, trajectory=partial)])
    (resumed,) = finish(second)
    for name in ("prompt_ids", "response_ids", "loss_mask", "reward", "turns", "finish_reason"):
        assert getattr(resumed, name) == getattr(expected, name), name
    assert resumed.attempt == 2
    covered = [index for span in resumed.spans for index in range(span.start, span.end)]
    assert covered == list(range(resumed.response_tokens))
    assert [span.version for span in resumed.spans] in ([0, 1], [1], [0])


class Moody(Guess):
    """An environment with chance in it: it never gives the hint of last time."""

    hints = 0

    def step(self, response: str) -> StepResult:
        result = super().step(response)
        Moody.hints += 1
        messages = [{"role": "user", "content": str(Moody.hints)} for _ in result.messages]
        return StepResult(reward=result.reward, done=result.done, messages=messages)


def test_a_partial_that_cannot_be_replayed_starts_anew(chat: Chat, tokenizer: Any) -> None:
    script = says(tokenizer, "1", "2", "6")
    first = RolloutRunner(ScriptedEngine(script), InlinePool(Moody), settings(chat))
    first.add([sample({"prompt": "g", "answer": "6"})])
    for _ in range(4):
        first.poll(0.0)
    (returned,) = first.drain("drained")
    assert returned.partial is not None
    engine = ScriptedEngine(script, version=5)
    second = RolloutRunner(engine, InlinePool(Moody), settings(chat))
    second.add([sample({"prompt": "g", "answer": "6"}, attempt=2, trajectory=returned.partial)])
    (trajectory,) = finish(second)
    assert trajectory.spans == [VersionSpan(version=5, start=0, end=trajectory.response_tokens)]
    assert (trajectory.reward, trajectory.turns) == (1.0, 3)


def test_an_unsound_partial_is_not_used(chat: Chat) -> None:
    rollout = Rollout(sample({"prompt": "1"}), settings(chat))
    rollout.asked(opening("1"))
    rollout.generated(output("s", [20, 21], [0, 0], "abort"))
    partial = rollout.partial()
    assert partial is not None
    for fault in ({"loss_mask": b"\x00\x01"}, {"logprobs": b""}, {"spans": []}):
        bad = msgspec.structs.replace(partial, **fault)
        again = Rollout(sample({"prompt": "1"}, trajectory=bad), settings(chat))
        again.asked(opening("1"))
        assert len(again.request().prompt_ids) == 3


def test_a_lost_lease_is_dropped_and_its_late_answers_ignored(chat: Chat, tokenizer: Any) -> None:
    engine = ScriptedEngine(says(tokenizer, "1"))
    runner = RolloutRunner(engine, InlinePool(ExactMatch), settings(chat))
    runner.add([sample({"prompt": "1", "answer": "1"})])
    runner.drop([("s", 0)])  # an older attempt: not this one
    assert runner.leases == [("s", 1)]
    runner.drop([("s", 1), ("s", 1)])  # two answers of the buffer name it
    assert not runner.active
    runner.add([sample({"prompt": "1", "answer": "1"}, attempt=2)])
    (trajectory,) = finish(runner)
    assert trajectory.attempt == 2


def test_short_turns_are_flushed_as_well(chat: Chat) -> None:
    """Scenario: every turn begins and ends within one step of the engine."""
    engine = ScriptedEngine(lambda _: [STOP])
    pool = InlinePool(lambda: Guess(tries=9))
    runner = RolloutRunner(engine, pool, settings(chat), flush_tokens=10)
    runner.add([sample({"prompt": "g", "answer": "6"})])
    saved = [0]
    while runner.active:
        runner.poll(0.0)
        saved += [t.response_tokens for t in runner.flush()]
        assert all(r.tokens - saved[-1] < 10 + 4 for r in runner._rollouts.values())
    assert len(saved) > 2
    assert saved == sorted(set(saved))
