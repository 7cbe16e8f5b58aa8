"""Samples that are interrupted, at once or after an answer, and conversations that are lost."""

from itertools import count
from typing import Any, cast

import pytest
from fakes.engine import ScriptedEngine
from fakes.rollouts import finish, runner_of
from fakes.trajectories import sample

from umbra.proto.records import Trajectory, unpack_int32
from umbra.services.environments.built_in import ExactMatch, Guess
from umbra.services.environments.pool import InlinePool
from umbra.services.environments.protocol import Ask, Begun, EpisodeOutcome, Lost, StepResult
from umbra.services.generator.runner import RolloutRunner
from umbra.services.modeling.chat import Chat

ROW = {"prompt": "g", "answer": "6"}
LEASE = ("s-0", 1)


class SlowPool(InlinePool):
    """Answers to turns wait until the test lets them through; how often each play was asked for."""

    def __init__(self, make: Any = Guess) -> None:
        super().__init__(make)
        self.held: list[EpisodeOutcome] = []
        self.open = False
        self.plays: list[int] = []  # turns that were told each time

    def play(self, key: str, row: dict[str, Any], responses: Any) -> None:
        self.plays.append(len(responses))
        super().play(key, row, responses)

    def collect(self) -> list[EpisodeOutcome]:
        self.held += super().collect()
        through = [o for o in self.held if self.open or not isinstance(o.value, StepResult)]
        self.held = [o for o in self.held if o not in through]
        return through


def begin(runner: RolloutRunner, partial: Trajectory | None = None, attempt: int = 1) -> None:
    runner.add([sample(ROW, sample_id=LEASE[0], attempt=attempt, trajectory=partial)])


def until_told(runner: RolloutRunner, pool: SlowPool, turns: int) -> None:
    """Go on until the environment works on turn `turns`."""
    while pool.plays[-1] < turns:
        runner.poll(0.0)
    pool.collect()


def interrupted(chat: Chat, *turns: str) -> tuple[RolloutRunner, SlowPool]:
    """A sample that is interrupted while its environment works on the first of these turns."""
    pool = SlowPool()
    runner = runner_of(chat, pool, *turns)
    begin(runner)
    until_told(runner, pool, 1)
    runner.interrupt([LEASE], "the batch is full")
    return runner, pool


def test_a_sample_whose_environment_is_at_work_waits_for_its_answer(chat: Chat) -> None:
    runner, pool = interrupted(chat, "2", "6")
    for _ in range(5):
        runner.poll(0.0)
    assert runner.results() == ([], [])
    assert runner.active == 1
    pool.open = True
    runner.poll(0.0)
    _, (moved,) = runner.results()
    assert runner.active == 0
    assert not runner.engine.busy, "no turn was begun"
    assert moved.partial is not None
    assert moved.partial.turns == 1
    text = chat._tokenizer.decode(unpack_int32(moved.partial.response_ids))
    assert text == "2<|end|><|user|>><|assistant|>", "the answer is part of it"
    assert moved.reason == "the batch is full"
    # Elsewhere the first turn is played again, and the sample goes on behind the answer.
    other = runner_of(chat, InlinePool(Guess), "2", "6")
    begin(other, moved.partial, attempt=2)
    assert [(t.reward, t.turns) for t in finish(other)] == [(1.0, 2)]


def test_a_turn_after_an_answer_goes_on_to_its_end(chat: Chat) -> None:
    pool = SlowPool()
    pool.open = True
    runner = runner_of(chat, pool, "2", "777", "6")
    begin(runner)
    while runner.engine.decoded_tokens < 3:  # the second turn has begun
        runner.poll(0.0)
    assert pool.plays == [0, 1]
    runner.interrupt([LEASE], "now")
    while runner.active:
        runner.poll(0.0)
    finished, (moved,) = runner.results()
    assert not finished
    assert pool.plays == [0, 1, 1], "nothing was played twice"
    assert moved.partial is not None
    assert moved.partial.turns == 2


def test_a_sample_that_ends_meanwhile_is_finished(chat: Chat) -> None:
    runner, pool = interrupted(chat, "6")
    pool.open = True
    runner.poll(0.0)
    (trajectory,), moved = runner.results()
    assert not moved
    assert trajectory.reward == 1.0


def test_a_sample_that_is_played_again_makes_a_turn_before_it_moves(chat: Chat) -> None:
    """Else interruptions that come faster than replays would let it never get on."""
    first = runner_of(chat, InlinePool(Guess), "2", "77", "6")
    begin(first)
    while first.engine.decoded_tokens < 3:
        first.poll(0.0)
    (back,) = first.drain("next")
    pool = SlowPool()
    runner = runner_of(chat, pool, "2", "77", "6")
    begin(runner, back.partial, attempt=2)
    runner.poll(0.0)
    until_told(runner, pool, 1)
    runner.interrupt([(LEASE[0], 2)], "now")
    pool.open = True
    while runner.active:
        runner.poll(0.0)
    _, (moved,) = runner.results()
    assert moved.partial is not None
    assert moved.partial.turns == 2


def test_what_is_dropped_while_it_waits_to_move_is_gone(chat: Chat) -> None:
    runner, pool = interrupted(chat, "2", "6")
    runner.drop([LEASE])
    begin(runner, attempt=2)
    pool.held.clear()
    pool.open = True
    assert [t.attempt for t in finish(runner)] == [2]
    assert cast(ScriptedEngine, runner.engine).forgotten == ["s-0/1", "s-0/2"]


class HeldAgent(InlinePool):
    def __init__(self) -> None:
        super().__init__(ExactMatch)
        self.said: list[EpisodeOutcome] = []

    def play(self, key: str, row: dict[str, Any], responses: Any) -> None:
        """It begins when the test says so."""

    def collect(self) -> list[EpisodeOutcome]:
        said, self.said = self.said, []
        return said

    def ask(self, text: str, after: int | None) -> None:
        ask = Ask(lambda _: None, [{"role": "user", "content": text}], after=after)
        self.said.append(EpisodeOutcome("s-0/1", ask))


def led(chat: Chat) -> tuple[RolloutRunner, HeldAgent, ScriptedEngine]:
    pool = HeldAgent()
    runner = runner_of(chat, pool, "1", "2", "3", branches=3)
    begin(runner)
    return runner, pool, cast(ScriptedEngine, runner.engine)


def turns(runner: RolloutRunner, engine: ScriptedEngine) -> None:
    runner.poll(0.0)
    while engine.live:
        runner.poll(0.0)


@pytest.mark.parametrize("branched", [False, True])
def test_a_sample_with_branches_ends_where_it_is(chat: Chat, branched: bool) -> None:
    runner, pool, engine = led(chat)
    pool.ask("1", None)
    turns(runner, engine)
    pool.ask("2", None if branched else 0)
    turns(runner, engine)
    runner.interrupt([LEASE], "the batch is full")
    pool.ask("3", 1)
    turns(runner, engine)
    assert len(runner.results()[1]) == (not branched)
    if branched:
        pool.said.append(EpisodeOutcome("s-0/1", StepResult(reward=1.0, done=True)))
        runner.poll(0.0)
        (made,) = runner.results()[0]
        assert len(made.lines) == 2


def test_an_agent_that_has_begun_is_at_work(chat: Chat) -> None:
    runner, pool, _ = led(chat)
    pool.said.append(EpisodeOutcome("s-0/1", Begun()))
    runner.poll(0.0)
    runner.interrupt([LEASE], "the batch is full")
    assert (runner.results()[1], runner.active) == ([], 1)


def test_a_sample_that_fails_amid_a_turn_leaves_the_engine(chat: Chat) -> None:
    runner, pool, engine = led(chat)
    pool.ask("1", None)
    runner.poll(0.0)
    assert engine.live == 1
    pool.said.append(EpisodeOutcome("s-0/1", error="its agent gave up"))
    runner.poll(0.0)
    assert (engine.live, runner.active) == (0, 0)
    assert [one.reason for one in runner.results()[1]] == ["its agent gave up"]


class Sums:
    """Three turns, each worth the number that it says."""

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        self.sum = self.turns = 0
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, response: str) -> StepResult:
        self.sum += int(response)
        self.turns += 1
        said = [{"role": "user", "content": self.said()}]
        return StepResult(reward=float(response), done=self.turns == 3, messages=said)

    def said(self) -> str:
        return str(self.sum)


class Moody(Sums):
    """An environment with chance in it."""

    draws = count()

    def said(self) -> str:
        return str(next(self.draws))


@pytest.mark.parametrize(
    ("kind", "turn", "answering", "asked"),
    [*((Sums, turn, False, 3) for turn in (1, 2, 3)), (Sums, 1, True, 3), (Moody, 3, False, 6)],
)
def test_a_lost_conversation_goes_on_with_its_turns_or_begins_anew(
    chat: Chat, kind: Any, turn: int, answering: bool, asked: int
) -> None:
    """Nothing is generated twice, unless the environment says something else the second time."""
    pool = SlowPool(kind)
    runner = runner_of(chat, pool, "1", "2", "4")
    engine = cast(ScriptedEngine, runner.engine)
    begin(runner)
    pool.open = True
    while len(engine.requests) < turn:
        runner.poll(0.0)
    if answering:
        pool.open = False
        until_told(runner, pool, 1)
        pool.open = True
    pool.forget("s-0/1")
    pool.held[:] = [EpisodeOutcome("s-0/1", Lost())]
    (made,) = finish(runner)
    assert (made.reward, made.turns, made.finish_reason) == (7.0, 3, "stop")
    assert len(engine.requests) == asked
