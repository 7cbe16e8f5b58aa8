"""Rollouts of agents that change their history: which tokens each branch is made of."""

from typing import Any

import pytest
from fakes.engine import output
from fakes.rollouts import STOP, settings
from fakes.trajectories import sample

from umbra.proto.records import Sampling, Trajectory, VersionSpan, unpack_float32, unpack_int32
from umbra.services.config.trajectory_rules import RunFacts, find_fault
from umbra.services.environments.protocol import Ask, RefusedError, StepResult
from umbra.services.generator.rollout import Phase, Rollout
from umbra.services.modeling.chat import Chat


class Talk:
    def __init__(self, tokenizer: Any, *, partial: Trajectory | None = None, **limits: Any) -> None:
        self.tokenizer = tokenizer
        self.now = 5.0
        chosen = settings(
            Chat(tokenizer, {STOP}),
            max_context=64,
            sampling=Sampling(max_tokens=8),
            **{"branches": 3, **limits},
            clock=lambda: self.now,
        )
        self.rollout = Rollout(sample({"prompt": "x"}, trajectory=partial), chosen)

    def ask(self, text: str, after: int | None) -> None:
        messages = [{"role": "user", "content": text}]
        self.rollout.asked(Ask(reply=lambda _: None, messages=messages, after=after))

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
            learned = False
            pairs = zip(unpack_int32(line.response_ids), line.loss_mask, strict=True)
            for token, mask in pairs:
                if bool(mask) != learned:
                    text, learned = text + "[]"[learned], bool(mask)
                text += self.tokenizer.decode([token])
            marks = {"<|user|>": "U", "<|assistant|>": "A", "<|end|>": "."}
            for mark, short in marks.items():
                text = text.replace(mark, short)
            found.append(text + "]" * learned)
        return found


def test_a_branch_has_the_tokens_before_it(tokenizer: Any) -> None:
    talk = Talk(tokenizer)
    talk.turn("1", None, "22", version=3)
    talk.turn("3", 0, "4", version=4)
    talk.turn("5", 0, "6", version=7)  # after the first turn, another time
    talk.turn("7", 1, "8", version=8)  # and the first line goes on
    made = talk.end()
    assert talk.texts(made) == ["U1A[22.]U3A[4.]U7A[8.]", "U1A[22.]U5A[6.]"]
    assert (made.turns, made.reward, made.finish_reason) == (4, 1.0, "stop")
    (branch,) = made.branches
    # Shared tokens have the versions and logprobs with which they were sampled, and once.
    assert branch.spans == [
        VersionSpan(version=3, start=0, end=6),
        VersionSpan(version=7, start=6, end=8),
    ]
    assert unpack_float32(branch.logprobs)[:3] == unpack_float32(made.logprobs)[:3]
    assert (made.oldest_version, made.newest_version) == (3, 8)


def test_a_history_may_begin_anew(tokenizer: Any) -> None:
    talk = Talk(tokenizer)
    talk.turn("1", None, "2", version=5)
    talk.turn("9", None, "8", version=4)
    assert talk.rollout.turn().prompt_tokens == 3
    talk.turn("7", 1, "6")
    made = talk.end()
    assert talk.texts(made) == ["U1A[2.]", "U9A[8.]U7A[6.]"]
    assert made.oldest_version == 0


def test_one_branch_too_many_is_refused_and_changes_nothing(tokenizer: Any) -> None:
    talk = Talk(tokenizer, branches=2)
    talk.turn("1", None, "2")
    talk.turn("3", None, "4")
    for after in (None, 0):
        if after == 0:
            talk.turn("5", 0, "6")  # the line goes on, so that the turn is not its end
        with pytest.raises(RefusedError, match=r"the 2 that a sample may have") as caught:
            talk.ask("7", after)
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
    for text, after in (("1", None), ("3", 0)):
        again.ask(text, after)
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
    for text, after in (("1", None), ("2", 0), ("3", None), ("4", 2), ("5", 0)):
        talk.ask(text, after)
        sessions.append(talk.rollout.request().session)
        talk.hear("9")
    first, other = sessions[0], sessions[2]
    assert first != other
    assert sessions == [first, first, other, other, first]
    assert talk.rollout.engine_sessions == {first, other}
