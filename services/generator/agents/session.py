"""One agent's conversation, which becomes one trajectory. No IO, no thread, no clock of its own.

    waiting -> thinking <-> asking -> over

Its history only grows: a request that continues it gets a turn, one that changes it is refused,
because a trajectory is one line of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from umbra.proto.errors import UmbraError
from umbra.services.environments.protocol import Message, StepResult
from umbra.services.environments.turn_request import RefusedError, Turn
from umbra.services.generator.agents.calls import Call, continues, read_reply
from umbra.services.generator.agents.errors import ApiError
from umbra.services.generator.agents.replies import Answer, answer_of
from umbra.services.generator.agents.responses_api import response_id

Listener = Callable[[Answer | ApiError], None]


@dataclass(frozen=True, slots=True)
class News:
    """What a call adds to the history: messages after the tools that were called, or text."""

    messages: list[Message] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    text: str | None = None


class AgentSession:
    """What is known of a sample that an agent works on.

    Args:
        session_id: unguessable; part of the agent's URL.
        key: names the sample's play.
        row: the sample's prompt row.
        timeout_s: seconds that the agent may be silent for.
    """

    def __init__(self, session_id: str, key: str, row: dict[str, Any], timeout_s: float) -> None:
        self.id = session_id
        self.key = key
        self.row = row
        self.timeout_s = timeout_s
        self.deadline = math.inf  # by when the agent has to say something
        self.over: ApiError | None = None
        self.reward: StepResult | None = None
        self.refusal = ""  # why the last request got nothing
        self.left = False  # the agent's program has ended
        self.verdict = ""  # why nothing more is expected of the agent
        self._begun = False
        self._asked: Call | None = None  # the last one, as it came
        self._call: Call | None = None  # with all that it follows
        self._answer: Answer | None = None  # to it; None while the model speaks
        self._history: list[Message] = []  # up to that answer
        self._text = ""
        self._before: tuple[Call | None, Answer | None] = None, None
        self._turns = 0
        self._listeners: list[Listener] = []

    @property
    def begun(self) -> bool:
        """Whether an agent works on it."""
        return self._begun

    @property
    def asking(self) -> bool:
        """Whether the model has to answer."""
        return self._call is not None and self._answer is None

    @property
    def turns(self) -> int:
        """Turns that the model has given."""
        return self._turns

    def begin(self, now: float) -> None:
        """An agent has taken it."""
        self._begun = True
        self.deadline = now + self.timeout_s

    def ask(self, call: Call, listener: Listener, *, repeated: bool = False) -> News | None:
        """The agent wants a completion; what is new to the model, None if there is nothing.

        A call that the client has `repeated`, because it did not get the reply, gets the reply of
        the first time. `listener` is told the answer, at once if it is there already.

        Raises:
            ApiError: the call does not continue the conversation, or comes while another is open.
        """
        self._check_open()
        asked = call
        if repeated and call == self._asked:
            if self._answer is not None:
                listener(self._answer)
            else:
                self._listeners.append(listener)
            return None
        if self.asking:
            raise ApiError(
                "the model still answers an earlier request of this session: ask one by one, and "
                "work on several samples in a session each",
                code="request_under_way",
            )
        call = self._joined(call)
        news = self._news(call)
        self._before = self._call, self._answer
        self._asked = asked
        self._call, self._answer, self.refusal = call, None, ""
        self._listeners.append(listener)
        self.deadline = math.inf
        return news

    def answered(self, turn: Turn, now: float) -> None:
        """The model has spoken."""
        if self._call is None:
            return
        call = self._call
        self._answer = answer_of(turn, call, self._turns)
        self._turns += 1
        self._history = [*call.messages, read_reply(self._answer.message)]
        self._text = (call.text or "") + turn.said.text
        self.deadline = now + self.timeout_s
        self._tell(self._answer)

    def refused(self, error: UmbraError, now: float) -> None:
        """There is no turn for the call; the conversation is what it was before."""
        self._call, self._answer = self._before
        self.refusal = str(error)
        self.deadline = now + self.timeout_s
        code = error.code if isinstance(error, RefusedError) else "invalid_prompt"
        self._tell(ApiError(str(error), code=code))

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
        if not self._turns and not self.asking:
            raise ApiError(
                "the model has said nothing in this session, so there is nothing to reward: end it "
                "with DELETE if no completion is wanted",
                code="nothing_to_reward",
            )
        self.reward = result
        self.deadline = math.inf

    def linger(self, now: float) -> None:
        """The reward is there, but the agent's program goes on for a while."""
        self.deadline = now + self.timeout_s

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
        self._tell(why)
        # It is remembered for late requests, what was said in it is not.
        self.row, self._history, self._text = {}, [], ""
        self._call = self._answer = None
        self._before = None, None

    def _check_open(self) -> None:
        if self.over is not None:
            raise self.over

    def _tell(self, answer: Answer | ApiError) -> None:
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener(answer)

    def _joined(self, call: Call) -> Call:
        """A call that names the response that it follows, with what was before."""
        if not call.follows:
            return call
        if call.follows != response_id(self.id, self._turns - 1) or self._answer is None:
            raise _edited("previous_response_id is not that of the last response")
        messages, known = call.messages, self._history
        if messages[0] == known[0] and messages[0]["role"] == "system":
            messages = messages[1:]  # instructions are sent each time
        tools = call.tools or (self._call.tools if self._call is not None else [])
        return replace(call, messages=[*known, *messages], tools=tools)

    def _news(self, call: Call) -> News:
        if self.reward is not None:
            raise ApiError("this session has its reward: it is over", code="rewarded")
        if self._answer is None or self._call is None:
            return News(call.messages, text=call.text)
        if (call.text is None) != (self._call.text is None):
            raise _edited("it began with the other of chat completions and completions")
        if call.text is not None:
            if not call.text.startswith(self._text):
                raise _edited("prompt does not begin with the last prompt and its completion")
            text = call.text.removeprefix(self._text)
            # What stopped the model stands in its tokens already, and in most prompts again.
            text = text.removeprefix(self._answer.turn.said.stop)
            if not text:
                raise _edited("prompt adds nothing to the last completion")
            return News(text=text)
        if call.tools != self._call.tools:
            raise _edited("tools are not those of the first request")
        known = self._history
        for index, (old, new) in enumerate(zip(known, call.messages, strict=False)):
            if not continues(old, new):
                raise _edited(f"messages[{index}] is not what it was")
        if len(call.messages) <= len(known):
            raise _edited(
                f"messages has {len(call.messages)} entries and needs more than the {len(known)} "
                "that there were, the model's answer included"
            )
        return News(call.messages[len(known) :], known[-1].get("tool_calls", []))


def _edited(what: str) -> ApiError:
    return ApiError(
        f"this request does not continue the session: {what}. A trajectory is one line of tokens: "
        "append to the history, or leave another history to another session",
        code="history_edited",
    )
