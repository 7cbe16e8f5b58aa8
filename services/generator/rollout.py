"""One sample on its way: prompt, model turns, environment turns, trajectory. No IO, no thread.

    RESET -> GENERATE -> STEP -> (GENERATE | DONE)

Who talks with the model asks for each of its turns by `asked`, and ends the sample by `finish`: an
agent, or an environment, which the runner asks for it. The owner does what `phase` says next.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from umbra.proto.errors import UsageError
from umbra.proto.records import (
    Branch,
    Sampling,
    Task,
    Trajectory,
)
from umbra.services.config.generation import ENVIRONMENT
from umbra.services.config.trajectory_rules import reward_fault
from umbra.services.environments.protocol import (
    Ask,
    Opening,
    RefusedError,
    SampleError,
    StepResult,
    Turn,
)
from umbra.services.generator.engines.engine import EngineOutput, EngineRequest
from umbra.services.generator.line import Line, line_of, shortened
from umbra.services.modeling.chat import Chat, StopSearch
from umbra.services.process.metrics import steady_clock

Phase = enum.Enum("Phase", ["RESET", "GENERATE", "STEP", "DONE"])


@dataclass(frozen=True)
class RolloutSettings:
    chat: Chat
    sampling: Sampling
    max_context: int
    turns: int = 0  # of the model, at most; 0 = any
    tokens: int = 0  # of the response, with the environment's tokens, at most; 0 = any
    branches: int = 1  # lines of tokens, at most
    stops: tuple[str, ...] = ()  # texts that end a turn
    generator: str = ""
    clock: Callable[[], float] = steady_clock
    several: Mapping[str, RolloutSettings] = field(default_factory=dict)  # by environment's name

    def of(self, row: dict[str, Any]) -> RolloutSettings:
        """Return the settings of the environment of a prompt's `row`; raise SampleError without."""
        if not self.several:
            return self
        name = row.get(ENVIRONMENT)
        if not isinstance(name, str) or name not in self.several:
            raise SampleError(f'"{ENVIRONMENT}" of a row is {name!r}, none of [[environments]]')
        return self.several[name]


class Rollout:
    def __init__(self, task: Task, settings: RolloutSettings) -> None:
        self.task = task
        self.leaving = ""  # why it is to be handed back; "" = it is not
        self.losses = 0  # agents that were lost
        self._settings = settings
        self._reason = "partial"
        self._started = settings.clock()
        # Response tokens that the buffer has.
        self.saved = task.trajectory.response_tokens if task.trajectory is not None else 0
        self.restart(task.trajectory)

    def restart(self, partial: Trajectory | None = None) -> None:
        """Begin the conversation, with the tokens of `partial` if they can be used.

        Its turns are replayed while the asks are the same.
        """
        self.phase = Phase.RESET
        self.begun = False  # an agent works on it
        self.lost = False  # its environment or agent is gone: it begins again after the turn
        self.ask: Ask | None = None  # the turn that is asked for
        self.turns = 0  # of the model that have ended, without the current one
        self._line = Line()  # which the model continues
        # Of the turns before the current one: where they ended, and whether the model ended them.
        self._turn_ends: list[tuple[Line, int, bool]] = []
        self._search: StopSearch | None = None  # in the current turn
        self._reward = 0.0
        self._parts: dict[str, float] = {}
        # Of turns that have to be asked for again: where the model's ends, and what follows it.
        self._replay: list[tuple[int, int]] = []
        if partial is not None and (line := line_of(partial, self._settings.sampling)):
            self._line = line
            self._started = partial.started_at or self._started
            ends = line.turn_ends()
            self._replay = list(zip(ends[0::2], ends[1::2], strict=False))
        self._lines = [self._line]
        self.saved = min(self.saved, self.tokens)

    @property
    def session(self) -> str:
        """Name of its plays of the environment, and mostly of its requests to the engine."""
        return f"{self.task.sample_id}/{self.task.attempt}"

    @property
    def lease(self) -> tuple[str, int]:
        return self.task.sample_id, self.task.attempt

    @property
    def engine_sessions(self) -> set[str]:
        return {self._engine_session(line) for line in self._lines}

    def _engine_session(self, line: Line) -> str:
        """Name a session: a line with a prompt of its own reuses nothing read for another."""
        return f"{self.session}/{line.number}" if line.number else self.session

    @property
    def movable(self) -> bool:
        """True if another generator could continue it now without replaying a turn.

        Not once its environment has received a turn, or is at work on it.
        """
        if self.phase is Phase.RESET:
            return not self.begun
        return self.phase is Phase.GENERATE and self.turns == self._line.turn_start == 0

    def asked(self, ask: Ask) -> None:
        """Take the wish for a turn: the first (phase RESET), or one more (phase STEP).

        Raises:
            RefusedError: there is none for it; nothing has changed.
            SampleError: the chat template cannot write it; nothing has changed.
        """
        if self.phase is Phase.RESET:
            prompt = self._asked_prompt(ask)
            if self._line.prompt and prompt != self._line.prompt:
                self.restart()  # the tokens so far belong to another prompt
            self._line.prompt = prompt
            self._line.opening = Opening(ask.messages, ask.tools)
        elif self._replay:
            turn_end, answer_end = self._replay[0]
            ids = self._line.ids
            if ask.after != self.turns or (
                self._asked_ids(ask, self._line, ids[turn_end - 1]) != ids[turn_end:answer_end]
            ):  # the conversation goes another way now: the sample starts again
                self.restart()
                return
            self._replay.pop(0)
            self._turn_ends.append((self._line, turn_end, True))
            self.turns += 1
            self._line.turn_start = answer_end
        else:
            self._asked_more(ask)
        self.ask, self._search = ask, None
        if stops := self.stops:
            self._search = StopSearch(self._settings.chat, stops)
            self._search.feed(self._line.ids[self._line.turn_start :])
        self._continue_turn()

    def credit(self, result: StepResult) -> None:
        """Add the reward of a turn; raises SampleError for one that the buffer would refuse."""
        self._reward += result.reward
        for part, value in result.reward_parts.items():
            self._parts[part] = self._parts.get(part, 0.0) + value
        if fault := reward_fault(self._reward, self._parts, result.reason):
            raise SampleError(f"the environment's answer: {fault}")

    def finish(self, result: StepResult) -> None:
        """End the sample; a turn of the model that was cut counts as cut by its length."""
        if self._replay:  # it did not end here before: it restarts
            self.restart()
            return
        self.credit(result)
        self.turns += 1
        self._reason = result.reason if self._turn_complete() else "length"
        self.phase = Phase.DONE

    def turn(self) -> Turn:
        """Return the model's last turn, for who asked for it (phase STEP)."""
        line, start, ask = self._line, self._line.turn_start, self.ask
        end = self._replay[0][0] if self._replay else len(line.ids)
        assert ask is not None
        ids, chat = line.ids[start:end], self._settings.chat
        before = [*line.prompt, *line.ids[:start]]
        return Turn(
            parsed=chat.parse(ids, before, line.opening.tools, self.stops),
            token_ids=ids,
            logprobs=line.logprobs[start:end],
            pieces=[chat.piece(token) for token in ids] if ask.pieces else [],
            prompt_tokens=len(before),
            complete=bool(self._replay) or self._turn_complete(),
            version=[span.version for span in line.spans if span.start < end][-1],
        )

    def request(self) -> EngineRequest:
        """Return the engine's next request (phase GENERATE)."""
        return EngineRequest(
            request_id=self.task.sample_id,
            prompt_ids=[*self._line.prompt, *self._line.ids],
            sampling=self._settings.sampling,
            max_tokens=self._room(),
            session=self._engine_session(self._line),
            watched=bool(self.stops),
        )

    def generated(self, output: EngineOutput) -> None:
        """Take the engine's output; text after a stop string is dropped."""
        self._line.add_model(self._cut(output))
        self._continue_turn()

    @property
    def stops(self) -> tuple[str, ...]:
        return self._settings.stops + (self.ask.stops if self.ask is not None else ())

    def is_stopped(self, tokens: Sequence[int]) -> bool:
        """Return whether the turn ends in `tokens`, which the engine has of it so far.

        Only those that are new since the last call are looked at.
        """
        if (search := self._search) is None:
            return False
        return search.feed(tokens[search.seen - self._said_tokens :]) is not None

    @property
    def branched(self) -> bool:
        return len(self._lines) > 1

    @property
    def resumable(self) -> bool:
        """True unless it has branches, or is of a pinned version, which makes it at one go."""
        return not self.branched and self.task.pinned_version < 0

    @property
    def tokens(self) -> int:
        """Return the count of response tokens without those that the engine has."""
        return len(self._line.ids)

    def trajectory(self, under_way: EngineOutput | None = None) -> Trajectory:
        """Return the sample, finished or not, with one response token at least.

        `under_way` is the engine's output so far for the current turn.
        """
        task, trained = self.task, self.task.pinned_version < 0
        line, *further = [line for line in self._lines if line.spoken] or [self._line]
        if under_way is not None:
            assert not further, "partials are of one line"
            line = line.copy()
            line.add_model(self._cut(under_way))
        return Trajectory(
            sample_id=task.sample_id,
            group_id=task.group_id,
            prompt_id=task.prompt_id,
            attempt=task.attempt,
            **line.packed(trained),
            finish_reason=self._reason,
            reward=self._reward,
            reward_parts=self._parts,
            turns=self.turns,
            routing=line.routing if trained else None,  # nobody learns from others
            sampling=self._settings.sampling,
            generator=self._settings.generator,
            started_at=self._started,
            finished_at=self._settings.clock(),
            branches=[Branch(**other.packed(trained)) for other in further],
        )

    def save(self, under_way: EngineOutput | None = None) -> Trajectory:
        """Return a partial, as `trajectory` does, which the buffer has from now on."""
        self.saved = self.tokens + (len(under_way.token_ids) if under_way is not None else 0)
        return self.trajectory(under_way)

    def partial(self) -> Trajectory | None:
        """Return the partial of an unfinished sample; None if nothing was generated.

        One that is not resumable begins again elsewhere.
        """
        return self.trajectory() if self._line.ids and self.resumable else None

    # -- turns ------------------------------------------------------------------------------------

    def _asked_more(self, ask: Ask) -> None:
        line, most = self._asked_line(ask), self._settings.turns
        if self.turns + 1 == most:
            reached = f"turn limit reached (environment.max_turns = {most}): post the reward"
            raise RefusedError(reached, "turn_limit_reached")
        ids: list[int] = []
        if line.ids:
            ids = self._asked_ids(ask, line, line.ids[-1])
            total = len(line.ids) + len(ids)
            if total >= self._most(line):
                raise _full(
                    f"{len(line.prompt)} prompt tokens and {total} more leave no room for an "
                    "answer in the context length: post the reward"
                )
        self._turn_ends.append((self._line, self.tokens, self._turn_complete()))
        self.turns += 1
        if line not in self._lines:
            self._lines.append(line)
        self._line = line
        if ids:
            line.add_environment(ids)
        line.turn_start = len(line.ids)

    def _asked_line(self, ask: Ask) -> Line:
        """Return the branch that an agent continues, or a new one."""
        if ask.after is None:
            self._check_branches()
            opening = Opening(ask.messages, ask.tools)
            return Line(opening, self._asked_prompt(ask), number=len(self._lines))
        if ask.after < self.turns:
            line, end, complete = self._turn_ends[ask.after]
        else:
            line, end, complete = self._line, self.tokens, self._turn_complete()
        if not complete:
            raise _full(
                "the last turn was cut off at a limit or the context length: post the reward"
            )
        if end == len(line.ids):
            return line
        self._check_branches()
        return line.until(end)

    def _check_branches(self) -> None:
        most = self._settings.branches
        if sum(line.spoken for line in self._lines) >= most:
            raise RefusedError(
                f"this history begins one more branch than the {most} that a sample may have: "
                "go on with an existing branch, or post the reward",
                "branch_limit_reached",
            )

    def _asked_prompt(self, ask: Ask) -> list[int]:
        limit, chat = self._settings.max_context, self._settings.chat
        prompt = self._encoded(ask, "the prompt", lambda: chat.prompt_ids(ask.messages, ask.tools))
        if not prompt:
            raise RefusedError("the prompt has no tokens", "empty_prompt")
        if len(prompt) >= limit:
            raise _full(
                f"the prompt has {len(prompt)} tokens, which leaves no room for an answer in the "
                f"context length, generator.max_context = {limit}"
            )
        return prompt

    def _asked_ids(self, ask: Ask, line: Line, last_token: int) -> list[int]:
        """Return the tokens between the end of a turn of `line` and the turn that is asked for."""
        args = ask.messages, last_token, ask.calls, line.opening
        return self._encoded(ask, "a later turn", lambda: self._settings.chat.turn_ids(*args))

    def _encoded(self, ask: Ask, what: str, templated: Callable[[], list[int]]) -> list[int]:
        """Return the tokens of an ask; `what` it is, for errors of the chat template."""
        limit = self._settings.max_context
        if self._settings.chat.cannot_fit((ask.messages, ask.tools), limit):
            raise _full(
                f"the request exceeds the context length, generator.max_context = {limit}, by its "
                "characters"
            )
        try:
            return templated()
        except UsageError as error:
            raise SampleError(str(error)) from error
        except Exception as error:
            raise SampleError(f"the chat template failed on {what}: {error}") from error

    @property
    def _said_tokens(self) -> int:
        return self.tokens - self._line.turn_start

    def _cut(self, output: EngineOutput) -> EngineOutput:
        if not self.is_stopped(output.token_ids):
            return output
        assert self._search is not None and self._search.end is not None
        count = self._search.end - self._said_tokens
        return shortened(output, count, len(self._line.prompt) + self.tokens)

    def _continue_turn(self) -> None:
        over = bool(self._replay) or self._turn_complete() or self._room() <= 0
        self.phase = Phase.STEP if over else Phase.GENERATE

    def _room(self) -> int:
        limit = self._settings.sampling.max_tokens
        if self.ask is not None and self.ask.max_tokens:
            limit = min(limit, self.ask.max_tokens)
        return min(self._most(self._line) - self.tokens, limit - self._said_tokens)

    def _most(self, line: Line) -> int:
        context = self._settings.max_context - len(line.prompt)
        return min(context, self._settings.tokens or context)

    def _turn_complete(self) -> bool:
        if not self._said_tokens:
            return False
        stopped = self._search is not None and self._search.end is not None
        return stopped or self._line.ids[-1] in self._settings.chat.stop_ids


def _full(reason: str) -> RefusedError:
    """Return the refusal of a full context: agents know it by "context length" in the reason."""
    return RefusedError(reason, "context_length_exceeded")
