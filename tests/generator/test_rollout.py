"""Rollouts by a scripted engine: tokens, partials, limits, stop strings, branches."""

import re
from dataclasses import replace
from itertools import groupby
from typing import Any
from unittest.mock import Mock, patch

import msgspec
import pytest
from fakes.engine import ScriptedEngine, output
from fakes.rollouts import STOP, after, finish, rolled, runner_of, says, settings
from fakes.trajectories import sample, trajectory

from umbra.proto.records import (
    Routing,
    Sampling,
    Support,
    Trajectory,
    VersionSpan,
    pack_int32,
    unpack_float32,
    unpack_int32,
)
from umbra.services.config.trajectory_rules import RunFacts, find_fault
from umbra.services.environments.built_in import ExactMatch, Guess
from umbra.services.environments.protocol import Ask, RefusedError, Response, StepResult
from umbra.services.generator.engines.engine import EngineOutput
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.generator.line import Line, shortened
from umbra.services.generator.rollout import Phase, Rollout
from umbra.services.modeling.chat import Chat


def asks(text: str, after: int | None = None, **more: Any) -> Ask:
    return Ask(lambda _: None, [{"role": "user", "content": text}], after=after, **more)


GUESSED = {"prompt": "g", "answer": "6"}


def test_turns_of_the_environment_are_masked(chat: Chat, tokenizer: Any) -> None:
    engine = ScriptedEngine(says(tokenizer, "2", "77", "6"), version=1)
    runner = runner_of(chat, Guess, engine=engine, generator="gen")
    runner.add([sample(GUESSED, attempt=4)])
    after(runner, 3)
    engine.version = 2
    (trajectory,) = finish(runner)
    assert (trajectory.generator, trajectory.attempt) == ("gen", 4)
    assert tokenizer.decode(unpack_int32(trajectory.prompt_ids)) == "<|user|>g<|assistant|>"
    ids = unpack_int32(trajectory.response_ids)
    text = "2<|end|><|user|>><|assistant|>77<|end|><|user|>?<|assistant|>6<|end|>"
    assert tokenizer.decode(ids) == text
    assert list(trajectory.loss_mask) == [1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1]
    assert unpack_float32(trajectory.logprobs) == [0, -1, 0, 0, 0, 0, -1, -2, 0, 0, 0, 0, -1]
    assert (trajectory.reward, trajectory.turns, trajectory.finish_reason) == (1.0, 3, "stop")
    # What the environment said counts to the tokens before it.
    spans = [(s.version, s.start, s.end) for s in trajectory.spans]
    assert spans == [(1, 0, 6), (2, 6, len(ids))]


def test_what_the_engine_refuses_costs_that_sample_only(model: Any, chat: Chat) -> None:
    """Scenario: a tokenizer that knows more tokens than the model."""
    model.resize_token_embeddings(90)
    engine = TorchEngine(model, stop_ids={STOP}, slots=4, max_context=64)
    runner = runner_of(chat, ExactMatch, engine=engine)
    runner.add([sample({"prompt": "~", "answer": ""}, sample_id="a")])
    runner.add([sample({"prompt": "1", "answer": ""}, sample_id="b")])
    (failed,) = after(runner, 1)[1]
    assert "prompt p: its prompt has token 99, but the model knows 90" in failed.reason
    assert [t.sample_id for t in finish(runner)] == ["b"]


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
    made = rolled(Chat(tokenizer, {STOP}), lambda: Guess(tries=2), GUESSED, engine=engine)
    assert unpack_int32(made.response_ids) == [4, 4, STOP, 6, 9, STOP]
    assert engine.requests[1].prompt_ids == [6, 10, 4, 4, STOP, 6, 9]


def test_an_unsound_partial_is_not_used(chat: Chat) -> None:
    rollout = Rollout(sample({"prompt": "1"}), settings(chat))
    rollout.asked(asks("1"))
    rollout.generated(output("s", [20, 21], [0, 0], "abort"))
    partial = rollout.partial()
    assert partial is not None
    for fault in ({"loss_mask": b"\x00\x01"}, {"logprobs": b""}, {"spans": []}):
        bad = msgspec.structs.replace(partial, **fault)
        again = Rollout(sample({"prompt": "1"}, trajectory=bad), settings(chat))
        again.asked(asks("1"))
        assert len(again.request().prompt_ids) == 3


@pytest.mark.parametrize("partial", [None, trajectory([20, 21], [7] * 30)])
def test_short_turns_are_flushed_as_well(chat: Chat, partial: Trajectory | None) -> None:
    """Scenario: every turn begins and ends within one step of the engine.

    A partial of another prompt, which cannot be continued, does not count as saved.
    """
    runner = runner_of(chat, lambda: Guess(tries=9), *[""] * 9, flush_tokens=10)
    runner.add([sample(GUESSED, trajectory=partial)])
    saved = [0]
    while runner.active:
        runner.poll(0.0)
        saved += [t.response_tokens for t in runner.flush()]
        assert all(r.tokens - saved[-1] < 10 + 4 for r in runner._rollouts.values())
    assert len(saved) > 2
    assert saved == sorted(set(saved))


SHORT = {"sampling": Sampling(max_tokens=3)}


def test_limits_end_a_sample(chat: Chat) -> None:
    for said, limits, reason, turns, tokens in (
        ("236", {"turns": 2}, "turns", 2, 7),
        ("236", {"tokens": 5}, "length", 1, 2),
        ("236", {"tokens": 6}, "length", 2, 6),
        ("236", {"tokens": 7}, "length", 2, 7),
        ("236", {}, "stop", 3, 12),
        (["123456"], SHORT, "length", 1, 3),
        (["123456"], {"max_context": 6}, "length", 1, 3),
    ):
        made = rolled(chat, Guess, GUESSED, *said, **limits)
        assert (made.finish_reason, made.turns, made.response_tokens) == (reason, turns, tokens)
        assert turns > 1 or all(made.loss_mask)


LONG = [{"role": "user", "content": "x" * 10_000_000}]


KEYS = [{"role": "user", "content": "", "of": {"x" * 10_000_000: 1}}]
NUMBERS = [{"role": "user", "content": "", "of": [0] * 1_000_000}]


@pytest.mark.parametrize(
    "ask",
    [{"messages": LONG}, {"tools": LONG}, {"tools": KEYS}, {"messages": NUMBERS}],
    ids=["words", "tools", "keys", "numbers"],
)
@pytest.mark.parametrize("begun", [False, True])
def test_what_is_asked_is_measured_before_it_is_tokenized(
    chat: Chat, ask: dict[str, Any], begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten million characters for a context of 64 took 16 s and 2 GB."""
    rollout = Rollout(sample({"prompt": "g"}), settings(chat))
    if begun:
        rollout.asked(asks("g"))
        rollout.generated(output("s", [20, STOP], [0, 0], "stop"))
    for name in ("prompt_ids", "turn_ids"):
        monkeypatch.setattr(chat, name, lambda *_: pytest.fail("it was tokenized"))
    with pytest.raises(RefusedError, match=r"max_context = 64, by its characters") as refused:
        rollout.asked(replace(asks("g", 0 if begun else None), **ask))
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("prompt", "result", "says"),
    [
        ("x" * 62, {}, "prompt p: the prompt has 64 tokens, .* generator.max_context = 64"),
        (LONG[0]["content"], {}, "by its characters"),
        ("odd", {"reward": 1e10}, "reward is 10000000000.0, which is not within"),
        ("odd", {"reward_parts": {f"part {n}": 1.0 for n in range(65)}}, "65 names, 64 at most"),
        ("odd", {"reward_parts": {"a" * 300: 1.0}}, "has no short, printable name"),
        ("odd", {"reason": "it\nended"}, "must be a short name"),
    ],
    ids=["room", "long", "reward", "parts", "part", "reason"],
)
def test_what_cannot_be_trained_on_costs_its_sample_only(
    chat: Chat, prompt: str, result: dict[str, Any], says: str
) -> None:
    """A message that the buffer refuses as a whole would end the generator."""

    class Odd(ExactMatch):
        def step(self, response: str) -> StepResult:
            return StepResult(**result if self.row["prompt"] == prompt else {})

    runner = runner_of(chat, Odd, "")
    runner.add([sample({"prompt": prompt}, sample_id="a"), sample({"prompt": "p"})])
    (finished,), (failed,) = after(runner, 3)
    assert failed.sample_id == "a" and failed.failed
    assert re.search(says, failed.reason)
    assert finished.finish_reason == "stop"


def test_a_turn_its_parser_fails_on_is_words(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = Mock(marked=0, plain=0, read=Mock(side_effect=KeyError("name")))
    monkeypatch.setattr(chat, "parser", parser)
    said = chat.parse([*chat.text_ids("ab", begins=False), STOP])
    assert (said.text, said.content) == ("ab", "ab")
    assert said.problem == "the turn cannot be read: KeyError('name')"


class Search(ExactMatch):
    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    def step(self, response: str) -> StepResult:
        assert isinstance(response, Response)
        self.heard.append((response, response.stop))
        if response.stop:
            return StepResult(done=False, messages=[{"role": "user", "content": "found"}])
        return StepResult(reward=1.0)


def test_a_stop_string_of_the_run_ends_turns_of_environments(chat: Chat, tokenizer: Any) -> None:
    search = Search()
    options: Any = {"stops": ("</search>",), "sampling": Sampling(max_tokens=64)}
    said = "look</search> more", "42"
    trajectory = rolled(chat, lambda: search, {"prompt": "a"}, *said, max_context=256, **options)
    response = tokenizer.decode(unpack_int32(trajectory.response_ids))
    assert response == "look</search><|end|><|user|>found<|assistant|>42<|end|>"
    assert sum(trajectory.loss_mask) == len("look</search>") + len("42") + 1
    assert search.heard == [("look", "</search>"), ("42", "")]
    assert (trajectory.reward, trajectory.finish_reason) == (1.0, "stop")


def spoken(chat: Chat, text: str) -> EngineOutput:
    """An output whose second half is of a newer version."""
    ids = chat.text_ids(text, begins=False)
    versions = [int(at >= len(ids) // 2) for at in range(len(ids))]
    return output("s", ids, versions, "abort")


def test_what_an_engine_samples_beyond_it_is_dropped(chat: Chat, tokenizer: Any) -> None:
    """Engines hand over several tokens at once, and a turn may be interrupted in between."""
    options = settings(chat, stops=("b.",), max_context=256, sampling=Sampling(max_tokens=64))
    rollout = Rollout(sample({"prompt": "a"}), options)
    rollout.asked(asks("a"))
    rollout.generated(spoken(chat, "aab"))  # interrupted within the stop string
    assert rollout.phase.name == "GENERATE"
    assert rollout.is_stopped(spoken(chat, ". and so on").token_ids)
    partial = rollout.trajectory(spoken(chat, ". and so on"))
    assert tokenizer.decode(unpack_int32(partial.response_ids)) == "aab."
    assert partial.spans[-1].end == 4
    rollout.generated(spoken(chat, ". and so on"))
    assert rollout.phase.name == "STEP"
    assert rollout.turn().parsed.text == "aa"


def test_an_output_is_shortened_with_all_that_is_known_of_it(chat: Chat) -> None:
    whole = spoken(chat, "abcdef")
    routing = Routing(layers=1, choices=2, experts=8, chosen=bytes(range(2 * (4 + 6 - 1))))
    support = Support(sizes=b"\1\0" * 6, ids=bytes(range(24)))
    for count in (2, 3, 5):
        short = shortened(replace(whole, routing=routing, support=support), count, before=4)
        assert len(short.token_ids) == len(short.logprobs) == count
        assert short.spans[-1].end == count
        assert [span.version for span in short.spans] == [0, 1][: 1 + (count > 3)]
        assert short.routing is not None
        assert len(short.routing.chosen) == 2 * (4 + count - 1)
        assert short.support == Support(sizes=b"\1\0" * count, ids=bytes(range(4 * count)))


def test_the_support_goes_along_with_its_tokens() -> None:
    """Through a turn of the environment, an abort before any token, and a branch."""

    def said(*ids: int) -> EngineOutput:
        told = Support(sizes=b"\2\0" * len(ids), ids=pack_int32([*ids, *ids])) if ids else None
        return replace(output("r", list(ids), [0] * len(ids), "stop"), support=told)

    line = Line(prompt=[1])
    for ids in ((5, 6), (), (7,)):
        line.add_model(said(*ids))
    line.add_environment([1, 2])
    branch = line.until(5)
    line.add_model(said(8))
    sizes, ids = b"\2\0\2\0\2\0\0\0\0\0", pack_int32([5, 6, 5, 6, 7, 7])
    assert branch.support == Support(sizes=sizes, ids=ids)
    assert line.support == Support(sizes=sizes + b"\2\0", ids=ids + pack_int32([8, 8]))
    assert line.copy().support == line.support
    assert line.packed(trained=False)["support"] is None


def test_a_token_costs_the_same_in_a_long_turn(chat: Chat) -> None:
    """400 tokens once took 80,200 decodes."""
    tokens, letter = 400, chat.text_ids("a", begins=False)
    engine = ScriptedEngine(lambda ids: letter if len(ids) < tokens else [STOP], max_context=512)
    options: Any = {"stops": ("</search>",), "sampling": Sampling(max_tokens=512)}
    with patch.object(chat, "pieces", wraps=chat.pieces) as pieces:
        row = {"prompt": "a", "answer": "a"}
        rolled(chat, ExactMatch, row, engine=engine, max_context=512, **options)
    *steps, whole = [len(call.args[0]) for call in pieces.call_args_list]
    assert len(steps) < tokens + 10  # one for each step; at its end the turn is read once
    assert whole < tokens
    assert max(steps) <= 20  # the stop string, and a few for characters of several tokens


# -- agents that change their history: which tokens each branch is made of -------------------------


class Talk:
    def __init__(self, tokenizer: Any, *, partial: Trajectory | None = None, **limits: Any) -> None:
        self.tokenizer = tokenizer
        chosen = settings(Chat(tokenizer, {STOP}), **{"branches": 3, **limits})
        self.rollout = Rollout(sample({"prompt": "x"}, trajectory=partial), chosen)

    def ask(self, text: str, after: int | None) -> None:
        self.rollout.asked(asks(text, after))

    def hear(self, text: str, version: int = 0, *, stop: bool = True) -> None:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] + [STOP] * stop
        reason = "stop" if stop else "length"
        self.rollout.generated(output("s", ids, [version] * len(ids), reason))

    def turn(self, text: str, after: int | None, said: str, version: int = 0) -> None:
        self.ask(text, after)
        self.hear(said, version)
        assert self.rollout.phase is Phase.STEP
        assert self.rollout.turn().parsed.text == said

    def end(self, **result: Any) -> Trajectory:
        self.rollout.finish(StepResult(reward=1.0, done=True, **result))
        assert self.rollout.phase is Phase.DONE
        made = self.rollout.trajectory()
        assert find_fault(made, RunFacts()) is None
        return made

    def texts(self, made: Trajectory) -> list[str]:
        """Prompt and response of every line; what the model has said is in brackets."""
        found: list[str] = []
        for line in made.lines:
            text = self.tokenizer.decode(unpack_int32(line.prompt_ids))
            pairs = zip(unpack_int32(line.response_ids), line.loss_mask, strict=True)
            for learned, run in groupby(pairs, lambda pair: pair[1]):
                said = self.tokenizer.decode([token for token, _ in run])
                text += f"[{said}]" if learned else said
            for mark, short in {"<|user|>": "U", "<|assistant|>": "A", "<|end|>": "."}.items():
                text = text.replace(mark, short)
            found.append(text)
        return found


def test_a_branch_has_the_tokens_before_it(tokenizer: Any) -> None:
    talk = Talk(tokenizer)
    talk.turn("1", None, "22", version=3)
    talk.turn("3", 0, "4", version=4)
    talk.turn("5", 0, "6", version=7)  # after the first turn, another time
    talk.turn("7", 1, "8", version=8)  # and the first line goes on
    talk.turn("9", None, "8", version=2)  # a history may begin again
    assert talk.rollout.turn().prompt_tokens == 3
    made = talk.end()
    assert talk.texts(made) == ["U1A[22.]U3A[4.]U7A[8.]", "U1A[22.]U5A[6.]", "U9A[8.]"]
    assert (made.turns, made.reward, made.finish_reason) == (5, 1.0, "stop")
    # Shared tokens have the versions and logprobs with which they were sampled, and once.
    branch = made.branches[0]
    assert branch.spans == [
        VersionSpan(version=3, start=0, end=6),
        VersionSpan(version=7, start=6, end=8),
    ]
    assert unpack_float32(branch.logprobs)[:3] == unpack_float32(made.logprobs)[:3]
    assert (made.oldest_version, made.newest_version) == (2, 8)


def test_one_branch_too_many_is_refused_and_changes_nothing(tokenizer: Any) -> None:
    talk = Talk(tokenizer, branches=2)
    talk.turn("1", None, "2")
    talk.turn("3", None, "4")
    for last in (None, 0):
        if last == 0:
            talk.turn("5", 0, "6")  # the line goes on, so that the turn is not its end
        with pytest.raises(RefusedError, match=r"the 2 that a sample may have") as caught:
            talk.ask("7", last)
        assert caught.value.code == "branch_limit_reached"
    talk.turn("7", 1, "8")
    assert talk.texts(talk.end()) == ["U1A[2.]U5A[6.]", "U3A[4.]U7A[8.]"]


def test_a_cut_turn_ends_its_line_alone(tokenizer: Any) -> None:
    """An agent whose context is full goes on with a shorter one."""
    talk = Talk(tokenizer)
    talk.ask("1", None)
    talk.hear("22222222", stop=False)
    with pytest.raises(RefusedError, match="post the reward"):
        talk.ask("3", 0)
    talk.turn("4", None, "5")
    with pytest.raises(RefusedError, match="post the reward"):
        talk.ask("3", 0)
    made = talk.end()
    assert talk.texts(made) == ["U1A[22222222]", "U4A[5.]"]


def test_limits_count_what_they_say(tokenizer: Any) -> None:
    """Turns count per sample, tokens per branch."""
    talk = Talk(tokenizer, turns=3, tokens=9, branches=4)
    talk.turn("1", None, "22222")
    with pytest.raises(RefusedError, match="context length"):
        talk.ask("3", 0)
    talk.turn("3", None, "44444")
    talk.turn("5", None, "6")
    with pytest.raises(RefusedError, match="max_turns = 3"):
        talk.ask("7", 2)
    with pytest.raises(RefusedError, match="context length"):
        talk.ask("9" * 64, None)
    assert len(talk.texts(talk.end())) == 3


def test_a_resumed_sample_may_branch_once_it_is_where_it_was(tokenizer: Any) -> None:
    first = Talk(tokenizer)
    first.turn("1", None, "2")
    first.turn("3", 0, "4")
    partial = first.rollout.partial()
    again = Talk(tokenizer, partial=partial)
    for text, last in (("1", None), ("3", 0)):
        again.ask(text, last)
        assert again.rollout.phase is Phase.STEP, "it is known what the model says"
    again.turn("5", 0, "6")
    assert again.texts(again.end()) == ["U1A[2.]U3A[4.]", "U1A[2.]U5A[6.]"]
    for text in "13":
        early = Talk(tokenizer, partial=partial)
        early.ask("1", None)
        early.ask(text, None)  # another beginning, where there was a second turn
        assert early.rollout.phase is Phase.RESET, "it restarts"
        early.turn("1", None, "7")
        assert early.texts(early.end()) == ["U1A[7.]"]
    other = Talk(tokenizer, partial=partial)
    other.turn("2", None, "7")
    assert other.texts(other.end()) == ["U2A[7.]"]


def test_a_branch_with_its_own_prompt_goes_on_with_nothing_read_for_another(tokenizer: Any) -> None:
    talk = Talk(tokenizer)
    sessions: list[str] = []
    for text, last in (("1", None), ("2", 0), ("3", None), ("4", 2), ("5", 0)):
        talk.ask(text, last)
        sessions.append(talk.rollout.request().session)
        talk.hear("9")
    first, other = sessions[0], sessions[2]
    assert first != other
    assert sessions == [first, first, other, other, first]
    assert talk.rollout.engine_sessions == {first, other}
