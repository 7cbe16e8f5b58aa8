"""Rollouts, by a scripted engine and the real one: tokens, partials, limits, stop strings."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fakes.engine import ScriptedEngine, output
from fakes.rollouts import STOP, after, finish, rolled, runner_of, says, settings
from fakes.trajectories import sample

from umbra.proto.records import (
    Routing,
    Sampling,
    Support,
    VersionSpan,
    pack_int32,
    unpack_float32,
    unpack_int32,
)
from umbra.services.environments.built_in import ExactMatch, Guess
from umbra.services.environments.protocol import (
    Ask,
    Message,
    ParsedTurn,
    RefusedError,
    Response,
    Row,
    StepResult,
    prompt_messages,
)
from umbra.services.generator.engines.engine import EngineOutput
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.generator.line import Line, shortened
from umbra.services.generator.rollout import Rollout
from umbra.services.modeling.chat import Chat


def opening(prompt: str) -> Ask:
    return Ask(reply=lambda _: None, messages=[{"role": "user", "content": prompt}])


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


def test_a_prompt_without_room_for_an_answer_fails(chat: Chat) -> None:
    runner = runner_of(chat, ExactMatch, "", max_context=10)
    runner.add([sample({"prompt": "0123456789", "answer": ""})])
    finished, (failed,) = after(runner, 1)
    assert not finished and not runner.active
    assert failed.failed
    assert "prompt p: the prompt has 12 tokens" in failed.reason
    assert "generator.max_context = 10" in failed.reason


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
    rollout.asked(opening("1"))
    rollout.generated(output("s", [20, 21], [0, 0], "abort"))
    partial = rollout.partial()
    assert partial is not None
    for fault in ({"loss_mask": b"\x00\x01"}, {"logprobs": b""}, {"spans": []}):
        bad = msgspec.structs.replace(partial, **fault)
        again = Rollout(sample({"prompt": "1"}, trajectory=bad), settings(chat))
        again.asked(opening("1"))
        assert len(again.request().prompt_ids) == 3


def test_a_lost_lease_is_dropped_and_its_late_answers_ignored(chat: Chat) -> None:
    runner = runner_of(chat, ExactMatch, "1")
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
    runner = runner_of(chat, lambda: Guess(tries=9), *[""] * 9, flush_tokens=10)
    runner.add([sample(GUESSED)])
    saved = [0]
    while runner.active:
        runner.poll(0.0)
        saved += [t.response_tokens for t in runner.flush()]
        assert all(r.tokens - saved[-1] < 10 + 4 for r in runner._rollouts.values())
    assert len(saved) > 2
    assert saved == sorted(set(saved))


SHORT = {"sampling": Sampling(max_tokens=3)}


@pytest.mark.parametrize(
    ("said", "limits", "reason", "turns", "tokens"),
    [
        ("236", {"turns": 2}, "turns", 2, 7),
        ("236", {"tokens": 5}, "length", 1, 2),
        ("236", {"tokens": 6}, "length", 2, 6),
        ("236", {"tokens": 7}, "length", 2, 7),
        ("236", {}, "stop", 3, 12),
        (["123456"], SHORT, "length", 1, 3),
        (["123456"], {"max_context": 6}, "length", 1, 3),
    ],
)
def test_limits_end_a_sample(
    chat: Chat, said: Any, limits: dict[str, Any], reason: str, turns: int, tokens: int
) -> None:
    made = rolled(chat, Guess, GUESSED, *said, **limits)
    assert (made.finish_reason, made.turns, made.response_tokens) == (reason, turns, tokens)
    assert turns > 1 or all(made.loss_mask)


LONG = [{"role": "user", "content": "x" * 10_000_000}]


@pytest.fixture
def untokenized(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> Chat:
    """A chat that must not be asked for tokens of anything long."""

    def short_only(*given: Any) -> list[int]:
        assert len(str(given)) < 1000, "a text that cannot fit was tokenized"
        return [5]

    for name in ("prompt_ids", "turn_ids"):
        monkeypatch.setattr(chat, name, short_only)
    return chat


KEYS = [{"role": "user", "content": "", "of": {"x" * 10_000_000: 1}}]
NUMBERS = [{"role": "user", "content": "", "of": [0] * 1_000_000}]


@pytest.mark.parametrize(
    "ask",
    [{"messages": LONG}, {"tools": LONG}, {"tools": KEYS}, {"messages": NUMBERS}],
    ids=["words", "tools", "keys", "numbers"],
)
def test_what_an_agent_asks_is_measured_before_it_is_tokenized(
    untokenized: Chat, ask: dict[str, Any]
) -> None:
    """Ten million characters for a context of 64 took 16 s and 2 GB."""
    rollout = Rollout(sample({"prompt": "g"}), settings(untokenized))
    answers: list[Any] = []
    with pytest.raises(RefusedError, match=r"max_context = 64, by its characters") as refused:
        rollout.asked(Ask(answers.append, **ask))
    assert refused.value.code == "context_length_exceeded"


def test_what_environments_say_is_measured_before_it_is_tokenized(untokenized: Chat) -> None:
    class Long:
        def reset(self, row: Row) -> list[Message]:
            return LONG if row["prompt"] == "long" else prompt_messages(row)

        def step(self, response: str) -> StepResult:
            return StepResult(done=False, messages=LONG)

    runner = runner_of(untokenized, Long, engine=ScriptedEngine(lambda _: [STOP]))
    runner.add([sample({"prompt": "long"}, sample_id="a"), sample({"prompt": "short"})])
    (finished,), (failed,) = after(runner, 3)
    assert "by its characters" in failed.reason
    assert finished.finish_reason == "length"


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (StepResult(reward=1e10), "reward is 10000000000.0, which is not within"),
        (StepResult(reward_parts={f"part {n}": 1.0 for n in range(65)}), "65 names, 64 at most"),
        (StepResult(reward_parts={"a" * 300: 1.0}), "has no short, printable name"),
        (StepResult(reason="it\nended"), "must be a short name"),
    ],
)
def test_a_reward_that_the_buffer_would_refuse_costs_its_sample_only(
    chat: Chat, result: StepResult, says: str
) -> None:
    """A message with it was refused as a whole, which ended the generator."""

    class Odd(ExactMatch):
        def step(self, response: str) -> StepResult:
            return result if self.row["prompt"] == "odd" else StepResult()

    runner = runner_of(chat, Odd, "")
    runner.add([sample({"prompt": "odd"}, sample_id="a"), sample({"prompt": "p"})])
    (finished,), (failed,) = after(runner, 3)
    assert failed.sample_id == "a" and failed.failed
    assert says in failed.reason
    assert finished.finish_reason == "stop"


def test_a_turn_its_parser_fails_on_is_words(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> ParsedTurn:
        raise KeyError("name")

    monkeypatch.setattr(chat, "parser", SimpleNamespace(name="odd", marked=0, plain=0, read=fail))
    said = chat.parse([*chat.text_ids("ab", begins=False), STOP])
    assert (said.text, said.content) == ("ab", "ab")
    assert said.problem == "the turn cannot be read: KeyError('name')"


class Search:
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


def spoken(chat: Chat, text: str, reason: Any = "abort") -> EngineOutput:
    ids = chat.text_ids(text, begins=False)
    half = len(ids) // 2
    spans = [
        VersionSpan(version=0, start=0, end=half),
        VersionSpan(version=1, start=half, end=len(ids)),
    ]
    return EngineOutput("s", ids, [-0.5] * len(ids), spans, reason)


def test_what_an_engine_samples_beyond_it_is_dropped(chat: Chat, tokenizer: Any) -> None:
    """Engines hand over several tokens at once, and a turn may be interrupted in between."""
    options = settings(chat, stops=("b.",), max_context=256, sampling=Sampling(max_tokens=64))
    rollout = Rollout(sample({"prompt": "a"}), options)
    rollout.asked(opening("a"))
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

    def said(ids: list[int]) -> EngineOutput:
        spans = [VersionSpan(version=0, start=0, end=len(ids))] if ids else []
        told = Support(sizes=b"\2\0" * len(ids), ids=pack_int32([*ids, *ids])) if ids else None
        return EngineOutput("r", ids, [-1.0] * len(ids), spans, "stop", support=told)

    line = Line(prompt=[1])
    for ids in ([5, 6], [], [7]):
        line.add_model(said(ids))
    line.add_environment([1, 2])
    branch = line.until(5)
    line.add_model(said([8]))
    sizes = b"\2\0\2\0\2\0\0\0\0\0"
    ids = pack_int32([5, 6, 5, 6, 7, 7])
    assert branch.support == Support(sizes=sizes, ids=ids)
    assert line.support == Support(sizes=sizes + b"\2\0", ids=ids + pack_int32([8, 8]))
    assert line.copy().support == line.support
    assert line.packed(trained=False)["support"] is None


def test_a_token_costs_the_same_in_a_long_turn(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """400 tokens once took 80,200 decodes."""
    tokens = 400
    decoded: list[int] = []
    pieces = chat.pieces

    def counted(token_ids: list[int]) -> str:
        decoded.append(len(token_ids))
        return pieces(token_ids)

    monkeypatch.setattr(chat, "pieces", counted)
    letter = chat.text_ids("a", begins=False)
    engine = ScriptedEngine(lambda ids: letter if len(ids) < tokens else [STOP], max_context=512)
    options: Any = {"stops": ("</search>",), "sampling": Sampling(max_tokens=512)}
    row = {"prompt": "a", "answer": "a"}
    rolled(chat, ExactMatch, row, engine=engine, max_context=512, **options)
    assert len(decoded) <= tokens + 10  # one for each step
    *steps, whole = decoded  # at its end the turn is read once
    assert whole < tokens
    assert max(steps) <= 20  # the stop string, and a few for characters of several tokens
