"""Sessions: an agent's conversation becomes one sample. No IO, no thread, no clock of its own.

A request goes on from the longest place whose history it repeats, each turn of the model being one.
Where it repeats none, it is refused, or begins a branch, to which earlier turns are but text.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from umbra.proto.errors import UmbraError
from umbra.services.environments.protocol import (
    Ask,
    EpisodeOutcome,
    Message,
    RefusedError,
    StepResult,
    Turn,
)
from umbra.services.generator.agents.calls import Answer, Call, continues, response_id
from umbra.services.http import ApiError

_REMEMBERED = 4096  # sessions that are over, so that late requests learn why
_ANSWERS = 16  # the newest, kept for calls that come again: so many may have come at once


@dataclass(frozen=True, slots=True)
class _Place:
    number: int
    tools: list[dict[str, Any]]
    history: list[Message]  # the turn included
    stop: str  # the text that stopped the turn

    def gap(self, call: Call) -> str:
        """Return why `call` does not continue this history; empty if it does."""
        if call.tools != self.tools:
            return "tools differ from the first request's"
        for index, (old, new) in enumerate(zip(self.history, call.messages, strict=False)):
            if not (continues(old, new) or self._adds_stop(index, new)):
                return f"messages[{index}] was changed"
        if len(call.messages) <= len(self.history):
            return (
                f"messages has {len(call.messages)} entries; with the model's last answer the "
                f"session has {len(self.history)}: repeat these, and append to them"
            )
        return ""

    def is_before(self, call: Call) -> bool:
        """Return whether `call` goes on from here, without another turn of the model."""
        later = call.messages[len(self.history) :]
        return not self.gap(call) and all(message["role"] != "assistant" for message in later)

    def _adds_stop(self, index: int, new: Message) -> bool:
        """True if `new` is the model's last turn with the stop text that ended it.

        The reply leaves the stop text out, and some agents append it again.
        """
        text = new.get("content")
        if not self.stop or index + 1 < len(self.history) or not isinstance(text, str):
            return False
        shorter = {**new, "content": text.rstrip().removesuffix(self.stop)}
        return continues(self.history[-1], shorter)


@dataclass(slots=True, eq=False)
class _Open:
    call: Call
    mark: bytes  # the same for the same call
    answer: Future[Answer]


@dataclass(eq=False)
class AgentSession:
    """The session of a sample that an agent works on."""

    id: str  # unguessable; part of the agent's URL
    key: str  # of the sample's play
    row: dict[str, Any]
    silence_s: float  # that the agent may be silent for
    deliver: Callable[[EpisodeOutcome], None]  # takes each `Ask` for a turn of the model
    reply: Callable[[AgentSession, Turn | UmbraError], None]  # is called with it, from any thread
    branches: bool = False  # calls may go on from any turn or begin again, several at once
    deadline: float = math.inf  # by when the agent has to say something
    leased_until: float = math.inf  # by when whoever runs the agent has to renew
    begun: bool = False  # an agent works on it
    turns: int = 0
    reward: StepResult | None = None
    left: bool = False  # the agent's program has ended
    over: ApiError | None = None
    refusal: str = ""  # why the last request got nothing
    verdict: str = ""  # why nothing more is expected of the agent
    _places: list[_Place] = field(default_factory=list[_Place])  # the last alone without branches
    _open: _Open | None = None  # what the model answers
    _calls: list[_Open] = field(default_factory=list[_Open])  # that, those to come, newest answered

    @property
    def asking(self) -> bool:
        return self._open is not None

    def begin(self, now: float, lease_s: float = math.inf) -> None:
        """Lease the session to an agent, for `lease_s` seconds unless it renews."""
        self.begun = True
        self.leased_until = now + lease_s
        self.wait(now)

    def wait(self, now: float) -> None:
        """Wait for the agent: a request, or the end of its program."""
        self.deadline = now + self.silence_s

    def ask(self, call: Call, *, repeated: bool = False) -> Future[Answer]:
        """Pass a call on, once those before are answered; its answer may be an ApiError.

        A call that the client has `repeated`, for want of the reply, gets that of the first time.

        Raises ApiError: the call does not continue the conversation, or comes while another is
        open.
        """
        self._check_open()
        mark = hashlib.blake2b(msgspec.json.encode(call), digest_size=16).digest()
        for known in reversed(self._calls) if repeated else ():
            if known.mark == mark:
                return known.answer
        pending = _Open(call, mark, Future())
        pending.answer.set_running_or_notify_cancel()  # whoever waits for it can't cancel it
        if not self.asking:
            self._ask(pending)
        elif not self.branches:
            raise ApiError(
                "the model still answers an earlier request of this session: ask one by one, work "
                "on several samples in a session each, or train on branches "
                '(environment.branches = "train")',
                code="request_under_way",
            )
        self._calls.append(pending)
        return pending.answer

    def answered(self, turn: Turn | UmbraError, now: float) -> None:
        """Pass the model's turn on; a refusal leaves the conversation as it was."""
        if (pending := self._open) is None:
            return
        self._open = None
        self.wait(now)
        if isinstance(turn, Turn):
            call, answer = pending.call, Answer.of(turn, pending.call, self.turns)
            history = [*call.messages, answer.message]
            place = _Place(self.turns, call.tools, history, turn.parsed.stop)
            self._places = [*self._places, place] if self.branches else [place]
            self.turns += 1
            pending.answer.set_result(answer)
            finished = [known for known in self._calls if known.answer.done()]
            for known in finished[: -_ANSWERS if self.branches else -1]:
                self._calls.remove(known)
        else:
            self.refusal = str(turn)
            code = turn.code if isinstance(turn, RefusedError) else "invalid_prompt"
            self._refuse(pending, ApiError(str(turn), code=code))
        while not self.asking and (waiting := self._unanswered()):
            try:
                self._check_open()
                self._ask(waiting[0])
            except ApiError as error:
                self._refuse(waiting[0], error)

    def rewarded(self, result: StepResult) -> None:
        """Take the reward.

        Raises ApiError if the model has said nothing, or there was another reward.
        """
        if self.reward == result:
            return  # said twice
        self._check_open()
        if self.reward is not None:
            reward = f"{self.reward.reward:g}"
            raise ApiError(f"this session has its reward already: {reward}", code="rewarded")
        if not self.turns and not self.asking:
            raise ApiError(
                "this session has no completion yet, so there is nothing to reward: end it with "
                "DELETE if none is wanted",
                code="nothing_to_reward",
            )
        self.reward = result
        self.deadline = math.inf

    def leave(self) -> None:
        """Note that the agent's program has ended, or is not waited for any longer."""
        self.left = True
        self.deadline = math.inf

    def abandon(self, verdict: str) -> None:
        """Stop waiting for the agent; raises ApiError if the session is over."""
        self._check_open()
        self.verdict = verdict
        self.deadline = math.inf

    def end(self, why: ApiError) -> None:
        """End the session: pending requests, and any later ones, get the error `why`."""
        self.over = why
        self.deadline = math.inf
        for pending in self._unanswered():
            self._refuse(pending, why)
        self._open, self.row, self._places, self._calls = None, {}, [], []

    def _check_open(self) -> None:
        if self.over is not None:
            raise self.over

    def _unanswered(self) -> list[_Open]:
        return [call for call in self._calls if not call.answer.done()]

    def _refuse(self, pending: _Open, error: ApiError) -> None:
        self._calls.remove(pending)
        pending.answer.set_exception(error)

    def _ask(self, pending: _Open) -> None:
        if self.reward is not None:
            raise ApiError("this session has its reward: it is over", code="rewarded")
        pending.call, ask = self._joined(pending.call)
        self._open, self.refusal = pending, ""
        self.deadline = math.inf
        self.deliver(EpisodeOutcome(self.key, ask))

    def _joined(self, call: Call) -> tuple[Call, Ask]:
        """Return `call` with the whole history, and what it asks of the model after that.

        Raises ApiError: it goes on from nothing that was said, and must.
        """
        places = self._places[-1:]
        if call.follows:
            places = [p for p in self._places if call.follows == response_id(self.id, p.number)]
            if not places:
                which = "a response of this session" if self.branches else "the last response"
                raise _edited(f"previous_response_id is not that of {which}")
            history, messages = places[0].history, call.messages
            if messages[0] == history[0] and messages[0]["role"] == "system":
                messages = messages[1:]  # instructions are sent each time
            tools = call.tools or places[0].tools
            call = replace(call, messages=[*history, *messages], tools=tools)
        elif self.branches:
            ordered = sorted(self._places, key=lambda p: (-len(p.history), -p.number))
            places = [place for place in ordered if place.is_before(call)][:1]
        ask = Ask(
            partial(self.reply, self),
            call.messages,
            call.tools,
            max_tokens=call.max_tokens,
            pieces=call.logprobs,
            stops=call.stops,
        )
        if not places:
            return call, ask
        if gap := places[0].gap(call):
            raise _edited(gap)
        *before, last = places[0].history
        said, *new = call.messages[len(before) :]
        if not continues(last, said):  # the stop string is written behind it
            last = said
        call = replace(call, messages=[*before, last, *new])  # the earlier ones are kept once
        made = last.get("tool_calls", [])
        return call, replace(ask, messages=new, calls=made, after=places[0].number)


class SessionRegistry:
    """The sessions of a generator, by id and by sample; arguments are as of `AgentSession`."""

    def __init__(
        self,
        silence_s: float,
        deliver: Callable[[EpisodeOutcome], None],
        reply: Callable[[AgentSession, Turn | UmbraError], None],
        *,
        branches: bool = False,
    ) -> None:
        self._settings = silence_s, deliver, reply, branches
        self._by_key: dict[str, AgentSession] = {}
        self._by_id: dict[str, AgentSession] = {}  # the newest of `_over` too
        self._waiting: dict[str, AgentSession] = {}  # by id, the longest first
        self._over: deque[str] = deque()

    def open(self, key: str, row: dict[str, Any]) -> AgentSession:
        """Return a session for the sample `key` that no agent has; end an older one of it."""
        self.close(key, "its sample restarted in another session")
        session = AgentSession(secrets.token_urlsafe(18), key, row, *self._settings)
        self._by_id[session.id] = self._by_key[key] = self._waiting[session.id] = session
        return session

    def lease(self, now: float, lease_s: float = math.inf) -> AgentSession | None:
        """Return the session that has waited longest for an agent."""
        if (session := next(iter(self._waiting.values()), None)) is not None:
            del self._waiting[session.id]
            session.begin(now, lease_s)
        return session

    def find(self, session_id: str) -> AgentSession:
        """Return the session of that id, over or not; raises ApiError if there is none."""
        if session_id not in self._by_id:
            unknown = "there is no such session here: POST /sessions gives one"
            raise ApiError(unknown, status=404, code="session_not_found")
        return self._by_id[session_id]

    def of(self, key: str) -> AgentSession | None:
        return self._by_key.get(key)

    def close(self, key: str, why: str = "") -> None:
        if (session := self._by_key.pop(key, None)) is None:
            return
        self._waiting.pop(session.id, None)
        self._over.append(session.id)
        if len(self._over) > _REMEMBERED:
            del self._by_id[self._over.popleft()]
        taken_back = session.verdict or "its sample was taken back"
        why = why or ("it has its reward" if session.reward else taken_back)
        session.end(ApiError(f"this session is over: {why}", status=410, code="session_over"))

    def close_all(self, why: str) -> None:
        for key in list(self._by_key):
            self.close(key, why)

    def renew(self, session_ids: Sequence[str], now: float, lease_s: float) -> list[str]:
        """Renew the leases of these sessions; return those that are over or unknown."""
        known = map(self._by_id.get, session_ids)
        live = {session.id: session for session in known if session and session.over is None}
        for session in live.values():
            session.leased_until = now + lease_s
        return [session_id for session_id in session_ids if session_id not in live]

    def expired(self, now: float) -> list[AgentSession]:
        """Return the sessions without a reward whose leases were not renewed in time."""
        return [s for s in self._by_key.values() if s.leased_until <= now and s.reward is None]

    def overdue(self, now: float) -> list[AgentSession]:
        """Return the sessions whose agents have been silent for too long."""
        return [session for session in self._by_key.values() if session.deadline <= now]


def _edited(what: str) -> ApiError:
    return ApiError(
        f"this request does not continue the session: {what}. A trajectory is one line of tokens: "
        "append to the history, leave another history to another session, or train on branches "
        '(environment.branches = "train")',
        code="history_edited",
    )
