"""One sample on its way: prompt, model turns, environment turns, trajectory. No IO, no thread.

    RESET -> GENERATE -> STEP -> (GENERATE | DONE)

Who talks with the model asks for each of its turns by `asked`, and ends the sample by `finish`: an
agent, or an environment, which the runner asks for it. The owner does what `phase` says next.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from umbra.proto.errors import UsageError
from umbra.proto.records import (
    Branch,
    Routing,
    Sampling,
    Support,
    Task,
    Trajectory,
    VersionSpan,
    pack_float32,
    pack_int32,
    unpack_float32,
    unpack_int32,
)
from umbra.services.config.generation import ENVIRONMENT
from umbra.services.config.trajectory_rules import RunFacts, find_fault, reward_fault
from umbra.services.environments.protocol import (
    Ask,
    Opening,
    RefusedError,
    SampleError,
    StepResult,
    Turn,
)
from umbra.services.generator.engines.engine import EngineOutput, EngineRequest, joined
from umbra.services.modeling.chat import Chat, StopSearch
from umbra.services.process.metrics import steady_clock


@dataclass(eq=False)
class Line:
    """A prompt, and the model's turns with what came between them; it only ever grows.

    Its response has one entry per token in each list.
    """

    opening: Opening = Opening([])  # noqa: RUF009 - it is frozen
    prompt: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    mask: bytearray = field(default_factory=bytearray)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    routing: Routing | None = None  # of the prompt's tokens, and of the response's but the last
    supports: list[Support | None] = field(default_factory=list)  # in parts, from first to last
    turn_start: int = 0  # where the current model turn begins
    shared: int = 0  # response tokens that it has from another line
    number: int = 0  # of its prompt: lines with the same one have the same

    @property
    def spoken(self) -> bool:
        """True if it has a token of the model that no earlier branch has."""
        return 1 in self.mask[self.shared :]

    @property
    def support(self) -> Support | None:
        return joined(self.supports)

    def add_model(self, output: EngineOutput) -> None:
        offset = len(self.ids)
        if output.token_ids:
            self.supports.append(output.support)
        self.ids += output.token_ids
        self.mask += b"\x01" * len(output.token_ids)
        self.logprobs += output.logprobs
        for span in output.spans:
            self._add_span(span.version, offset + span.end)
        self._add_routing(output.routing)

    def add_environment(self, ids: list[int]) -> None:
        self.supports.append(Support(sizes=bytes(2 * len(ids)), ids=b""))
        # They were sampled by nobody: counted to the span before them, they change no staleness.
        self.ids += ids
        self.mask += bytes(len(ids))
        self.logprobs += [0.0] * len(ids)
        self._add_span(self.spans[-1].version, len(self.ids))

    def _add_span(self, version: int, end: int) -> None:
        start = self.spans[-1].end if self.spans else 0
        if end == start:
            return
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(version=version, start=start, end=end))

    def _add_routing(self, routing: Routing | None) -> None:
        """Take over the routing of tokens whose routing is unknown so far.

        The engine has read all tokens before its own again, perhaps with other weights: those were
        followed by what an earlier pass predicted, so the routing of that pass stays theirs.
        """
        known = self.routing
        if known is not None and routing is not None and _kind(known) == _kind(routing):
            routing = replace(known, chosen=known.chosen + routing.chosen[len(known.chosen) :])
        self.routing = routing

    def copy(self) -> Line:
        lists = self.ids[:], self.mask[:], self.logprobs[:], self.spans[:]
        return Line(self.opening, self.prompt, *lists, self.routing, self.supports[:])

    def until(self, end: int) -> Line:
        """Return a line that branches off after `end` response tokens, at the end of a turn."""
        lists = self.ids[:end], self.mask[:end], self.logprobs[:end], _spans(self.spans, end)
        supports = [self.support and self.support.part(0, end)]
        known = self.opening, self.prompt, *lists, None, supports
        return Line(*known, turn_start=end, shared=end, number=self.number)

    def turn_ends(self) -> list[int]:
        """Return where model turn, environment turn, model turn, ... end, in order."""
        runs = (len(list(run)) for _, run in itertools.groupby(self.mask))
        return list(itertools.accumulate(runs))

    def packed(self, trained: bool) -> dict[str, Any]:
        """Return the fields that a `Trajectory` or `Branch` has of it."""
        return {
            "prompt_ids": pack_int32(self.prompt),
            "response_ids": pack_int32(self.ids),
            "loss_mask": bytes(self.mask),
            "logprobs": pack_float32(self.logprobs),
            "spans": list(self.spans),
            "support": self.support if trained else None,
        }


def shortened(output: EngineOutput, count: int, before: int) -> EngineOutput:
    """Return `output` with its first `count` tokens only; `before` tokens precede it."""
    routing = output.routing
    if routing is not None:
        size = (before + count - 1) * routing.token_bytes
        routing = replace(routing, chosen=routing.chosen[:size])
    return dataclasses.replace(
        output,
        token_ids=output.token_ids[:count],
        logprobs=output.logprobs[:count],
        spans=_spans(output.spans, count),
        routing=routing,
        support=output.support and output.support.part(0, count),
    )


def _spans(spans: list[VersionSpan], count: int) -> list[VersionSpan]:
    return [replace(span, end=min(span.end, count)) for span in spans if span.start < count]


def _kind(routing: Routing) -> tuple[int, int, int]:
    return routing.layers, routing.choices, routing.experts


def line_of(partial: Trajectory, sampling: Sampling) -> Line | None:
    """Return the line of a partial; None if it can't be continued.

    One that can is sound, one line, begins with a model's token, and was drawn as `sampling` says.
    """
    if (
        partial.branches
        or partial.sampling.distribution != sampling.distribution
        or find_fault(partial, RunFacts(), trained=False)
        or partial.loss_mask[0] != 1
    ):
        return None
    return Line(
        prompt=unpack_int32(partial.prompt_ids),
        ids=unpack_int32(partial.response_ids),
        mask=bytearray(partial.loss_mask),
        logprobs=unpack_float32(partial.logprobs),
        spans=list(partial.spans),
        routing=partial.routing,
        supports=[partial.support],
    )


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
        self.restart(task.trajectory)
        self.saved = self.tokens  # response tokens that the buffer has

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
