"""Rollouts and their environments: interruptions, answers of tools, a sampling of their own."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest
from fakes.chat_templates import chat_tokenizer
from fakes.engine import ScriptedEngine
from fakes.rollouts import after, finish, runner_of
from fakes.trajectories import sample, trajectory

from umbra.proto.errors import UsageError
from umbra.proto.records import Sampling, Support, Trajectory, pack_int32, unpack_int32
from umbra.services.config import EnvironmentConfig, RunConfig
from umbra.services.config.loader import load_config
from umbra.services.config.rules import cautions, check_feasible
from umbra.services.config.trajectory_rules import RunFacts, find_fault, samplings_of
from umbra.services.environments.built_in import ExactMatch, Guess
from umbra.services.environments.pool import InlinePool
from umbra.services.environments.protocol import (
    Ask,
    Begun,
    EpisodeOutcome,
    Lost,
    Opening,
    ParsedTurn,
    Row,
    SampleError,
    StepResult,
)
from umbra.services.environments.tools import ToolUse
from umbra.services.environments.worker import EnvironmentHost
from umbra.services.generator.checks import check_environment, check_template
from umbra.services.generator.rollout import Rollout
from umbra.services.generator.runner import RolloutRunner
from umbra.services.generator.service import settings_for
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.pretrained import load_tokenizer

ROW = {"prompt": "g", "answer": "6"}
LEASE = ("s-0", 1)


class SlowPool(InlinePool):
    """Plays one sample; answers to turns wait until the test opens it."""

    def __init__(self, chat: Chat, *turns: str, make: Any = Guess, is_open: bool = False) -> None:
        super().__init__(make)
        self.held: list[EpisodeOutcome] = []
        self.open = is_open
        self.plays: list[int] = []  # turns that were told each time
        self.runner = runner_of(chat, self, *turns)
        self.engine = cast(ScriptedEngine, self.runner.engine)

    def play(self, key: str, row: dict[str, Any], responses: Any) -> None:
        self.plays.append(len(responses))
        super().play(key, row, responses)

    def collect(self) -> list[EpisodeOutcome]:
        self.held += super().collect()
        through = [o for o in self.held if self.open or not isinstance(o.value, StepResult)]
        self.held = [o for o in self.held if o not in through]
        return through

    def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            self.runner.poll(0.0)

    def interrupted(self, attempt: int = 1) -> SlowPool:
        """Interrupt the sample while its environment works on the first turn."""
        self.until(lambda: self.plays and self.plays[-1])
        self.collect()
        self.runner.interrupt([(LEASE[0], attempt)], "the batch is full")
        return self

    def moved(self) -> Trajectory:
        """Go on until the sample is handed back; return its partial."""
        self.until(lambda: not self.runner.active)
        finished, (back,) = self.runner.results()
        assert not finished and back.reason == "the batch is full"
        assert back.partial is not None
        return back.partial


def begin(runner: RolloutRunner, partial: Trajectory | None = None, attempt: int = 1) -> None:
    runner.add([sample(ROW, sample_id=LEASE[0], attempt=attempt, trajectory=partial)])


def begun(chat: Chat, *turns: str, **how: Any) -> SlowPool:
    pool = SlowPool(chat, *turns, **how)
    begin(pool.runner)
    return pool


def test_a_sample_whose_environment_is_at_work_waits_for_its_answer(chat: Chat) -> None:
    pool = begun(chat, "2", "6").interrupted()
    for _ in range(5):
        pool.runner.poll(0.0)
    assert pool.runner.results() == ([], [])
    assert pool.runner.active == 1
    pool.open = True
    partial = pool.moved()
    assert not pool.engine.busy, "no turn was begun"
    assert partial.turns == 1
    text = chat._tokenizer.decode(unpack_int32(partial.response_ids))
    assert text == "2<|end|><|user|>><|assistant|>", "the answer is part of it"
    # Elsewhere the first turn is played again, and the sample goes on behind the answer.
    other = runner_of(chat, InlinePool(Guess), "2", "6")
    begin(other, partial, attempt=2)
    assert [(t.reward, t.turns) for t in finish(other)] == [(1.0, 2)]


def test_a_turn_after_an_answer_goes_on_to_its_end(chat: Chat) -> None:
    pool = begun(chat, "2", "777", "6", is_open=True)
    pool.until(lambda: pool.engine.decoded_tokens == 3)  # the second turn has begun
    assert pool.plays == [0, 1]
    pool.runner.interrupt([LEASE], "the batch is full")
    assert pool.moved().turns == 2
    assert pool.plays == [0, 1, 1], "nothing was played twice"


def test_a_sample_that_ends_meanwhile_is_finished(chat: Chat) -> None:
    pool = begun(chat, "6").interrupted()
    pool.open = True
    pool.runner.poll(0.0)
    (trajectory,), moved = pool.runner.results()
    assert not moved
    assert trajectory.reward == 1.0


def test_a_sample_that_is_played_again_makes_a_turn_before_it_moves(chat: Chat) -> None:
    """Else interruptions that come faster than replays would let it never get on."""
    first = begun(chat, "2", "77", "6", is_open=True)
    first.until(lambda: first.engine.decoded_tokens == 3)
    (back,) = first.runner.drain("next")
    pool = SlowPool(chat, "2", "77", "6")
    begin(pool.runner, back.partial, attempt=2)
    pool.interrupted(attempt=2).open = True
    assert pool.moved().turns == 2


def test_what_is_dropped_while_it_waits_to_move_is_gone(chat: Chat) -> None:
    pool = begun(chat, "2", "6").interrupted()
    pool.runner.drop([LEASE])
    begin(pool.runner, attempt=2)
    pool.open = True  # what it said to the first attempt comes late
    assert [t.attempt for t in finish(pool.runner)] == [2]
    assert pool.engine.forgotten == ["s-0/1", "s-0/2"]


class Agent(InlinePool):
    """An agent of a sample that it leads from turn to turn as the test says."""

    def __init__(self, chat: Chat) -> None:
        super().__init__(ExactMatch)
        self.said: list[EpisodeOutcome] = []
        self.runner = runner_of(chat, self, "1", "2", "3", branches=3)
        self.engine = cast(ScriptedEngine, self.runner.engine)
        begin(self.runner)

    def play(self, key: str, row: dict[str, Any], responses: Any) -> None:
        """It begins when the test says so."""

    def collect(self) -> list[EpisodeOutcome]:
        said, self.said = self.said, []
        return said

    def say(self, value: Any = None, **how: Any) -> None:
        self.said.append(EpisodeOutcome("s-0/1", value, **how))
        self.runner.poll(0.0)

    def turn(self, text: str, after: int | None) -> None:
        self.say(Ask(lambda _: None, [{"role": "user", "content": text}], after=after))
        while self.engine.live:
            self.runner.poll(0.0)


@pytest.mark.parametrize("branched", [False, True])
def test_a_sample_with_branches_ends_where_it_is(chat: Chat, branched: bool) -> None:
    agent = Agent(chat)
    agent.turn("1", None)
    agent.turn("2", None if branched else 0)
    agent.runner.interrupt([LEASE], "the batch is full")
    agent.turn("3", 1)
    assert len(agent.runner.results()[1]) == (not branched)
    if branched:
        agent.say(StepResult(reward=1.0, done=True))
        (made,) = agent.runner.results()[0]
        assert len(made.lines) == 2


def test_an_agent_that_has_begun_is_at_work_until_it_fails(chat: Chat) -> None:
    agent = Agent(chat)
    agent.say(Begun())
    agent.runner.interrupt([LEASE], "the batch is full")
    assert (agent.runner.results()[1], agent.runner.active) == ([], 1)
    agent.say(Ask(lambda _: None, [{"role": "user", "content": "1"}]))
    assert agent.engine.live == 1
    agent.say(error="its agent gave up")
    assert (agent.engine.live, agent.runner.active) == (0, 0)
    assert [one.reason for one in agent.runner.results()[1]] == ["its agent gave up"]


class Sums(ExactMatch):
    """Three turns, each worth the number that it says."""

    turns = 0

    def step(self, response: str) -> StepResult:
        self.turns += 1
        said = [{"role": "user", "content": self.said(response)}]
        return StepResult(reward=float(response), done=self.turns == 3, messages=said)

    def said(self, response: str) -> str:
        return f"{response}?"


class Moody(Sums):
    """An environment with chance in it."""

    draws = count()

    def said(self, response: str) -> str:
        return str(next(self.draws))


@pytest.mark.parametrize(
    ("kind", "turn", "answering", "asked"),
    [*((Sums, turn, False, 3) for turn in (1, 2, 3)), (Sums, 1, True, 3), (Moody, 3, False, 6)],
)
def test_a_lost_conversation_goes_on_with_its_turns_or_begins_anew(
    chat: Chat, kind: Any, turn: int, answering: bool, asked: int
) -> None:
    """Nothing is generated twice, unless the environment says something else the second time."""
    pool = begun(chat, "1", "2", "4", make=kind, is_open=True)
    pool.until(lambda: len(pool.engine.requests) == turn)
    if answering:
        pool.open = False
        pool.until(lambda: pool.plays[-1] == 1)
        pool.collect()
        pool.open = True
    pool.forget("s-0/1")
    pool.held[:] = [EpisodeOutcome("s-0/1", Lost())]
    (made,) = finish(pool.runner)
    assert (made.reward, made.turns, made.finish_reason) == (7.0, 3, "stop")
    assert len(pool.engine.requests) == asked


NAME = {"name": "thermometer"}
CALL = {"id": "a", "type": "function", "function": NAME | {"arguments": {"city": "Lund"}}}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": NAME | {"description": "Degrees.", "parameters": CITY}}


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


def run(name: str, *ends: str, tells: bool = True) -> tuple[Chat, RolloutRunner]:
    """A sample with Thermometer; each turn of the model is a word and its end token."""
    chat = Chat(*chat_tokenizer(name))
    word, *stops = [
        chat.text_ids("x", begins=False)[0],
        *chat._tokenizer.convert_tokens_to_ids(list(ends)),
    ]
    said = iter([token for stop in stops for token in (word, stop)])
    engine = ScriptedEngine(lambda _: [next(said)], stop_ids=chat.stop_ids, max_context=4096)
    pool = InlinePool(lambda: Thermometer(tells=tells))
    runner = runner_of(chat, pool, engine=engine, max_context=4096)
    runner.add([sample({"prompt": "How warm is it?"})])
    return chat, runner


def test_an_answer_stands_in_the_trajectory() -> None:
    for name, ends, said in (
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
    ):
        chat, runner = run(name, *ends)
        (trajectory,) = finish(runner)
        assert chat.text(unpack_int32(trajectory.response_ids)) == said
        mask = trajectory.loss_mask
        assert (list(mask[:2]), list(mask[-2:]), sum(mask)) == ([1, 1], [1, 1], 4)
        assert trajectory.reward == 1.0


def test_an_answer_without_its_call_fails_the_sample() -> None:
    for name, end, why in (
        ("gemma4_v5", "<|tool_response>", "drops a message of role 'tool' after an assistant's"),
        ("gptoss", "<|call|>", "no previous assistant message with a tool call"),
    ):
        _, runner = run(name, end, tells=False)
        finished, (failed,) = after(runner, 3)
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


def test_a_template_that_can_not_go_on_is_refused() -> None:
    for name, kind, why in (
        ("gptoss", "guess", "the chat template of gptoss ends an assistant's turn by '<|end|>"),
        ("gemma", "tools", "the chat template of gemma fails on messages of roles system, user"),
        ("muse_glimmer", "tools", "no parser reads the tool calls that the model's chat"),
    ):
        with pytest.raises(UsageError) as refused:
            check_template(EnvironmentConfig(kind=kind), Chat(*chat_tokenizer(name)))
        assert why in str(refused.value)
        one_turn = EnvironmentConfig(kind=kind, max_turns=1)
        assert check_template(one_turn, Chat(*chat_tokenizer(name))) is None


def test_a_class_that_goes_on_is_tried_with_the_model(tiny_model_dir: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    config = load_config(
        overrides=[
            f"model.path={model}",
            "environment.kind=umbra.services.environments.built_in:Guess",
        ],
        environ={},
    )
    row = {"prompt": "a", "answer": "1"}
    assert check_environment(config, row) is None
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = (
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    )
    tokenizer.save_pretrained(model)
    with pytest.raises(UsageError, match="does not write earlier assistant messages"):
        check_environment(config, row)


RUN = """
[model]
path = "model"
[sampling]
temperature = 0.9
top_k = 50
max_tokens = 12
stop_tokens = ["<|end|>"]
stop = ["so"]
[generator]
max_context = 64
[[environments]]
name = "cool"
prompts = "cool.jsonl"
sampling = { temperature = 0.4, max_tokens = 5, stop = [] }
[[environments]]
name = "plain"
prompts = "plain.jsonl"
sampling = { top_k = 0 }
[[environments]]
name = "hot"
prompts = "hot.jsonl"
[environments.sampling]
temperature = 1.6
"""
ROWS = [{"prompt": "3142", "answer": "1234", "environment": n} for n in ("cool", "plain", "hot")]


def loaded(tmp_path: Path, text: str = RUN) -> RunConfig:
    (tmp_path / "run.toml").write_text(text)
    return load_config(tmp_path / "run.toml", environ={})


def test_keys_of_an_environment_are_others_than_the_runs_and_have_to_fit(tmp_path: Path) -> None:
    config = loaded(tmp_path)
    cool, plain, hot = map(config.sampling_for, config.environments)
    assert (cool.temperature, cool.top_k, cool.max_tokens, cool.stop) == (0.4, 50, 5, [])
    assert (plain.temperature, plain.top_k, plain.max_tokens, plain.stop) == (0.9, 0, 12, ["so"])
    assert (hot.temperature, hot.stop_tokens) == (1.6, ["<|end|>"])
    assert config.longest_turn == 12
    check_feasible(config)
    assert "max_tokens" not in dict(cautions(config))
    long = loaded(tmp_path, RUN.replace("max_tokens = 5", "max_tokens = 80"))
    assert (
        "environments.cool.sampling.max_tokens = 80 does not" in dict(cautions(long))["max_tokens"]
    )
    cold = loaded(tmp_path, RUN.replace("temperature = 0.4", "temperature = 0.004"))
    with pytest.raises(UsageError, match=r"environments\.cool\.sampling\.temperature = 0\.004 is"):
        check_feasible(load_config(tmp_path / "run.toml", overrides=["generator.engine=vllm"]))
    assert samplings_of(cold)["cool"].temperature == 0.004
    (tmp_path / "run.toml").write_text(RUN)
    punished = ["trainer.objective=dapo", "trainer.overlong_buffer=5"]
    check_feasible(load_config(tmp_path / "run.toml", overrides=punished))
    punished[1] = "trainer.overlong_buffer=6"
    with pytest.raises(UsageError, match=r"environments\.cool\.sampling\.max_tokens = 5: lower"):
        check_feasible(load_config(tmp_path / "run.toml", overrides=punished))


def test_the_buffer_knows_how_each_environment_samples(tmp_path: Path) -> None:
    facts = RunFacts(samplings=samplings_of(loaded(tmp_path)))
    support = Support(sizes=b"\1\0" * 3, ids=pack_int32([3, 4, 5]))
    one = RunFacts(samplings=samplings_of(RunConfig()))
    for prompt_id, temperature, sound in (
        ("cool/1", 0.4, 1),
        ("cool/1", 1.6, 0),
        ("hot/a", 1.6, 1),
    ):
        sampling = Sampling(temperature=temperature, top_k=50)
        made = trajectory(prompt_id=prompt_id, sampling=sampling, support=support)
        assert ("the run samples with" in str(find_fault(made, facts))) != sound
        assert find_fault(made, facts, trained=False) is None
        assert find_fault(trajectory(prompt_id=prompt_id), one) is None
        assert find_fault(made, one) is not None


def test_samples_are_drawn_as_their_environment_says_and_partials_were(
    chat: Chat, tmp_path: Path
) -> None:
    """A run that goes on with another temperature: no sample is of two distributions."""
    config = loaded(tmp_path)
    settings = settings_for(config, chat)
    for row, environment in zip(ROWS, config.environments, strict=True):
        request = Rollout(sample(row), settings.of(row)).request()
        own = config.sampling_for(environment)
        drawn = request.sampling
        assert (drawn.temperature, drawn.top_k) == (own.temperature, own.top_k)
        assert request.max_tokens == own.max_tokens
    for temperature, kept in ((0.4, True), (0.5, False)):
        sampling = Sampling(temperature=temperature, top_k=50)
        made = trajectory([5, 6], [7, 8], finish_reason="partial", sampling=sampling)
        rollout = Rollout(sample(ROWS[0], trajectory=made), settings.of(ROWS[0]))
        assert bool(rollout.tokens) == kept
