"""What the model said in one turn: words, reasoning, calls of tools."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Said:
    """A turn of the model as it travels to an environment.

    `text` is the whole turn without the token that ended it. `content` is it without reasoning and
    calls. `tool_calls` are as in an assistant's message of a chat template, with arguments as
    objects. `problem` says why what looks like a call is none; then it is part of `content`.
    """

    text: str
    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""
    stop: str = ""  # the stop string that ended the turn; no part of the others
    read: bool = False
    """Whether the model's own way of calling tools was looked for. If not, an environment that has
    told the model another way may look for that in `text`."""


class Response(str):
    """What `Environment.step` is given: the text of the turn, which is a `str`, and its parts."""

    __slots__ = ("content", "problem", "read", "reasoning", "stop", "tool_calls")

    content: str
    reasoning: str
    tool_calls: list[dict[str, Any]]
    problem: str
    stop: str
    read: bool

    @classmethod
    def of(cls, said: Said | str) -> Response:
        """The response that an environment gets for `said`; a `str` is nothing but words."""
        if isinstance(said, str):
            said = Said(text=said, content=said)
        response = cls(said.text)
        for part in cls.__slots__:
            setattr(response, part, getattr(said, part))
        return response


def content_of(response: str) -> str:
    """The words of a turn without reasoning and calls; all of a plain `str`."""
    return response.content if isinstance(response, Response) else response
