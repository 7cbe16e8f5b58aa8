"""What was said in a session, as a tree: each turn of the model is a place to go on from.

A request goes on from the place whose history it repeats; of several from the longest. Where it
repeats none, its history was edited: it is refused, or begins a branch. What an edit has left of
the model's later turns is text to the branch, which begins anew then: a chat template writes such
turns as it likes, so they can't be appended to tokens that were sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from umbra.services.environments.protocol import Message
from umbra.services.generator.agents.calls import Answer, Call, continues, read_message
from umbra.services.generator.agents.responses_api import response_id
from umbra.services.http import ApiError


@dataclass(frozen=True, slots=True)
class News:
    """What a call adds: messages after the tools that were called, or text.

    `after` is the turn of the model that they follow, counted from 0; None where nothing is before.
    """

    messages: list[Message] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    text: str | None = None
    after: int | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    """The end of a turn of the model."""

    number: int
    tools: list[dict[str, Any]]
    history: list[Message]  # the turn included
    text: str | None  # the same of a plain text
    stop: str  # the text that stopped the turn

    def added(self, call: Call) -> str:
        """Return the text of `call` after that of here, which it begins with."""
        text = (call.text or "").removeprefix(self.text or "")
        # What stopped the model stands in its tokens already, and in most prompts again.
        return text.removeprefix(self.stop)

    def known(self, call: Call) -> list[Message]:
        """The history as `call` repeats it, which goes on from here."""
        last = call.messages[len(self.history) - 1]
        if continues(self.history[-1], last):
            return self.history
        return [*self.history[:-1], last]

    def _adds_stop(self, index: int, new: Message) -> bool:
        """Whether `new` is the turn that ended here and the text that stopped it, which its tokens
        have and the reply has not. Some agents write it again.
        """
        text = new.get("content")
        if not self.stop or index + 1 < len(self.history) or not isinstance(text, str):
            return False
        shorter = {**new, "content": text.rstrip().removesuffix(self.stop)}
        return continues(self.history[-1], shorter)

    def gap(self, call: Call) -> str:
        """Why `call` does not go on from here; empty if it does."""
        if (call.text is None) != (self.text is None):
            return "it began with the other of chat completions and completions"
        if call.text is not None:
            if not call.text.startswith(self.text or ""):
                return "prompt does not begin with the last prompt and its completion"
            return "" if self.added(call) else "prompt adds nothing to the last completion"
        if call.tools != self.tools:
            return "tools are not those of the first request"
        for index, (old, new) in enumerate(zip(self.history, call.messages, strict=False)):
            if not (continues(old, new) or self._adds_stop(index, new)):
                return f"messages[{index}] is not what it was"
        if len(call.messages) <= len(self.history):
            return (
                f"messages has {len(call.messages)} entries and needs more than the "
                f"{len(self.history)} that there were, the model's answer included"
            )
        return ""


class SessionTree:
    """The turns of a session.

    With `branches` a request may go on from any turn, or begin anew; else only from the last.
    """

    def __init__(self, session_id: str, *, branches: bool = False) -> None:
        self._id = session_id
        self._branches = branches
        self._places: list[_Place] = []  # the last alone without branches
        self.turns = 0

    def joined(self, call: Call) -> tuple[Call, News]:
        """`call` with all that it follows, and what of it is new.

        Raises:
            ApiError: it goes on from nothing that was said, and must.
        """
        if call.follows:
            place = self._named(call.follows)
            messages = call.messages
            if messages[0] == place.history[0] and messages[0]["role"] == "system":
                messages = messages[1:]  # instructions are sent each time
            call = replace(
                call, messages=[*place.history, *messages], tools=call.tools or place.tools
            )
            if gap := place.gap(call):
                raise _edited(gap)
            return self._from(place, call)
        if not self._places:
            return call, News(call.messages, text=call.text)
        if not self._branches:
            if gap := self._places[-1].gap(call):
                raise _edited(gap)
            return self._from(self._places[-1], call)
        for place in sorted(self._places, key=_length, reverse=True):
            later = call.messages[len(place.history) :]
            if not place.gap(call) and all(one["role"] != "assistant" for one in later):
                return self._from(place, call)
        return call, News(call.messages, text=call.text)

    def add(self, call: Call, answer: Answer) -> None:
        """The model has given `answer` to `call`, which is as `joined` gave it."""
        place = _Place(
            self.turns,
            call.tools,
            [*call.messages, read_message(answer.message)],
            None if call.text is None else call.text + answer.turn.said.text,
            answer.turn.said.stop,
        )
        self._places = [*self._places, place] if self._branches else [place]
        self.turns += 1

    def clear(self) -> None:
        """Forget what was said, but not how much."""
        self._places = []

    def _from(self, place: _Place, call: Call) -> tuple[Call, News]:
        if call.text is not None:
            return call, News(text=place.added(call), after=place.number)
        known, new = place.known(call), call.messages[len(place.history) :]
        # The messages of before are kept once, however often they come.
        joined = replace(call, messages=[*known, *new])
        return joined, News(new, known[-1].get("tool_calls", []), after=place.number)

    def _named(self, follows: str) -> _Place:
        for place in self._places:
            if follows == response_id(self._id, place.number):
                return place
        which = "a response of this session" if self._branches else "the last response"
        raise _edited(f"previous_response_id is not that of {which}")


def _edited(what: str) -> ApiError:
    return ApiError(
        f"this request does not continue the session: {what}. A trajectory is one line of tokens: "
        "append to the history, leave another history to another session, or train on branches "
        '(environment.branches = "train")',
        code="history_edited",
    )


def _length(place: _Place) -> tuple[int, int, int]:
    return len(place.history), len(place.text or ""), place.number
