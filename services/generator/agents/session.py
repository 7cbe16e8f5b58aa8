"""One agent's conversation, which becomes one sample. No IO, no thread, no clock of its own.

    waiting -> thinking <-> asking -> over

Its history only grows: a request that continues it gets a turn. One that changes it is refused,
because a trajectory is one line of tokens, or begins a branch (`SessionTree`). The model answers
one request at a time; with branches others wait for their turn.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from umbra.proto.errors import UmbraError
from umbra.services.environments.protocol import RefusedError, StepResult, Turn
from umbra.services.environments.time_limits import TimeLimit, TimeLimits
from umbra.services.generator.agents.calls import Answer, Call
from umbra.services.generator.agents.session_tree import News, SessionTree
from umbra.services.http import ApiError

_REMEMBERED = 4096  # sessions that are over, so that late requests learn why
_ANSWERS = 16  # the newest, kept for calls that come again: so many may have come at once

Listener = Callable[[Answer | ApiError], None]


@dataclass(slots=True)
class _Open:
    """A call that has no answer yet."""

    call: Call
    mark: bytes  # the same for the same call
    ask: Callable[[News], None]
    listeners: list[Listener]


class AgentSession:
    """The session of a sample that an agent works on.

    Args:
        session_id: unguessable; part of the agent's URL.
        key: names the sample's play.
        row: the sample's prompt row.
        limits: how long the agent may be silent for.
        branches: it may change its history, and ask several times at once.
    """

    def __init__(
        self,
        session_id: str,
        key: str,
        row: dict[str, Any],
        limits: TimeLimits,
        *,
        branches: bool = False,
    ) -> None:
        self.id = session_id
        self.key = key
        self.row = row
        self.limits = limits
        self.limit = limits.opening  # which of them the deadline is by
        self.deadline = math.inf  # by when the agent has to say something
        self.leased_until = math.inf  # by when whoever runs the agent has to renew
        self.over: ApiError | None = None
        self.reward: StepResult | None = None
        self.refusal = ""  # why the last request got nothing
        self.left = False  # the agent's program has ended
        self.verdict = ""  # why nothing more is expected of the agent
        self.begun = False  # an agent works on it
        self._branches = branches
        self._tree = SessionTree(session_id, branches=branches)
        self._open: _Open | None = None  # what the model answers
        self._waiting: deque[_Open] = deque()  # what it answers after that
        self._answers: dict[bytes, Answer] = {}  # by the call's mark

    @property
    def asking(self) -> bool:
        return self._open is not None

    @property
    def turns(self) -> int:
        return self._tree.turns

    def begin(self, now: float, lease_s: float = math.inf) -> None:
        """An agent has taken it, for `lease_s` seconds unless it renews."""
        self.begun = True
        self.leased_until = now + lease_s
        self._wait(self.limits.opening, now)

    def ask(
        self,
        call: Call,
        listener: Listener,
        ask: Callable[[News], None],
        *,
        repeated: bool = False,
    ) -> None:
        """Pass a call on by `ask`, with what is new to the model, once those before are answered.

        A call that the client has `repeated`, because it did not get the reply, gets the reply of
        the first time. `listener` is told the answer.

        Raises:
            ApiError: the call does not continue the conversation, or comes while another is open.
        """
        self._check_open()
        wanted = _Open(call, _mark(call), ask, [listener])
        if repeated and (answer := self._answers.get(wanted.mark)) is not None:
            listener(answer)
            return
        under_way = [*self._waiting, self._open] if self._open is not None else []
        same = [one for one in under_way if one.mark == wanted.mark]
        if repeated and same:
            same[0].listeners.append(listener)
        elif not self.asking:
            self._ask(wanted)
        elif self._branches:
            self._waiting.append(wanted)
        else:
            raise ApiError(
                "the model still answers an earlier request of this session: ask one by one, work "
                "on several samples in a session each, or train on branches "
                '(environment.branches = "train")',
                code="request_under_way",
            )

    def answered(self, turn: Turn, now: float) -> None:
        """Pass the model's turn on."""
        if (asked := self._open) is None:
            return
        answer = Answer.of(turn, asked.call, self.turns)
        self._tree.add(asked.call, answer)
        self._answers.pop(asked.mark, None)
        self._answers[asked.mark] = answer
        while len(self._answers) > (_ANSWERS if self._branches else 1):
            del self._answers[next(iter(self._answers))]
        self._reply(answer, now)

    def refused(self, error: UmbraError, now: float) -> None:
        """Refuse the call; the conversation is what it was before."""
        self.refusal = str(error)
        code = error.code if isinstance(error, RefusedError) else "invalid_prompt"
        self._reply(ApiError(str(error), code=code), now)

    def rewarded(self, result: StepResult) -> None:
        """The agent says what the conversation was worth.

        Raises:
            ApiError: the model has said nothing, or there was another reward.
        """
        if self.reward == result:
            return  # said twice
        self._check_open()
        if self.reward is not None:
            raise ApiError(
                f"this session has its reward already: {self.reward.reward:g}", code="rewarded"
            )
        if not self.turns and not self.asking:
            raise ApiError(
                "the model has said nothing in this session, so there is nothing to reward: end it "
                "with DELETE if no completion is wanted",
                code="nothing_to_reward",
            )
        self.reward = result
        self.deadline = math.inf

    def scoring(self, now: float) -> None:
        """The agent asks for no more turns: what it does now is the reward.

        Raises:
            ApiError: the session is over.
        """
        self._check_open()
        if not self.asking and self.reward is None:
            self._wait(self.limits.scoring, now)

    def linger(self, now: float) -> None:
        """Wait for the end of the agent's program, whose reward is there."""
        self._wait(self.limits.step, now)

    def leave(self) -> None:
        """The agent's program has ended, or is not waited for any longer."""
        self.left = True
        self.deadline = math.inf

    def abandon(self, verdict: str) -> None:
        """Nothing more is expected of the agent.

        Raises:
            ApiError: the session is over.
        """
        self._check_open()
        self.verdict = verdict
        self.deadline = math.inf

    def end(self, why: ApiError) -> None:
        """It is over; whoever still waits is told so."""
        self.over = why
        self.deadline = math.inf
        for asked in ([self._open] if self._open else []) + [*self._waiting]:
            _tell(asked, why)
        self._open = None
        self._waiting.clear()
        # It is remembered for late requests, what was said in it is not.
        self.row = {}
        self._tree.clear()
        self._answers.clear()

    def _wait(self, limit: TimeLimit, now: float) -> None:
        self.limit, self.deadline = limit, now + limit.seconds

    def _check_open(self) -> None:
        if self.over is not None:
            raise self.over

    def _reply(self, answer: Answer | ApiError, now: float) -> None:
        """Answer the open call, and ask the model for the next one that can be answered."""
        asked, self._open = self._open, None
        self._wait(self.limits.step, now)
        if asked is not None:
            _tell(asked, answer)
        while self._waiting and not self.asking:
            waiting = self._waiting.popleft()
            try:
                self._check_open()
                self._ask(waiting)
            except ApiError as error:
                _tell(waiting, error)

    def _ask(self, wanted: _Open) -> None:
        if self.reward is not None:
            raise ApiError("this session has its reward: it is over", code="rewarded")
        wanted.call, news = self._tree.joined(wanted.call)
        self._open, self.refusal = wanted, ""
        self.deadline = math.inf
        wanted.ask(news)


class SessionRegistry:
    """The sessions of a generator, by id and by sample. Not thread-safe.

    Args: as of `AgentSession`; `new_id` makes unguessable names.
    """

    def __init__(
        self,
        limits: TimeLimits,
        new_id: Callable[[], str] = lambda: secrets.token_urlsafe(18),
        *,
        branches: bool = False,
    ) -> None:
        self._limits = limits
        self._branches = branches
        self._new_id = new_id
        self._by_id: dict[str, AgentSession] = {}
        self._by_key: dict[str, AgentSession] = {}
        self._waiting: deque[AgentSession] = deque()
        self._over: OrderedDict[str, AgentSession] = OrderedDict()

    @property
    def waiting(self) -> int:
        """Samples that no agent has taken."""
        return sum(not session.begun for session in self._by_id.values())

    def open(self, key: str, row: dict[str, Any]) -> AgentSession:
        """Return a session for the sample `key` that no agent has; end an older one of it."""
        self.close(key, over("its sample began anew in another session"))
        session = AgentSession(self._new_id(), key, row, self._limits, branches=self._branches)
        self._by_id[session.id] = self._by_key[key] = session
        self._waiting.append(session)
        return session

    def lease(self, now: float, lease_s: float = math.inf) -> AgentSession | None:
        """Return the session that has waited longest for an agent."""
        while self._waiting:
            session = self._waiting.popleft()
            if session.over is None and not session.begun:
                session.begin(now, lease_s)
                return session
        return None

    def find(self, session_id: str) -> AgentSession:
        """Return the session of that id, over or not; raises ApiError if there is none."""
        found = self._by_id.get(session_id) or self._over.get(session_id)
        if found is None:
            raise ApiError(
                "there is no such session here: POST /sessions gives one",
                status=404,
                code="session_not_found",
            )
        return found

    def of(self, key: str) -> AgentSession | None:
        return self._by_key.get(key)

    def close(self, key: str, why: ApiError | None = None) -> None:
        session = self._by_key.pop(key, None)
        if session is None:
            return
        del self._by_id[session.id]
        self._over[session.id] = session
        if len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)
        if why is None:
            taken_back = session.verdict or "its sample was taken back"
            why = over("it has its reward" if session.reward else taken_back)
        session.end(why)

    def close_all(self, why: str) -> None:
        for key in list(self._by_key):
            self.close(key, over(why))

    def renew(self, session_ids: Sequence[str], now: float, lease_s: float) -> list[str]:
        """Renew the leases of these sessions; return those that are over or unknown."""
        held = [self._by_id[one] for one in session_ids if one in self._by_id]
        for session in held:
            session.leased_until = now + lease_s
        return [one for one in session_ids if one not in self._by_id]

    def expired(self, now: float) -> list[AgentSession]:
        """Return the sessions without a reward whose leases were not renewed in time."""
        held = self._by_id.values()
        return [one for one in held if one.leased_until <= now and one.reward is None]

    def overdue(self, now: float) -> list[AgentSession]:
        """Return the sessions whose agents have been silent for too long."""
        return [session for session in self._by_id.values() if session.deadline <= now]


def over(why: str) -> ApiError:
    return ApiError(f"this session is over: {why}", status=410, code="session_over")


def _tell(asked: _Open, answer: Answer | ApiError) -> None:
    for listener in asked.listeners:
        listener(answer)


def _mark(call: Call) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(call), digest_size=16).digest()
