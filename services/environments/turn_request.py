"""What an agent asks of the model, and what it gets: for programs that bring their own loop.

An environment answers the model; an agent asks it. Each `Ask` is one turn of the model, and comes
from a pool as an outcome of the sample's play, between its opening and its reward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from umbra.proto.errors import UmbraError
from umbra.services.environments.protocol import Message
from umbra.services.environments.response import Said


class RefusedError(UmbraError):
    """There is no turn for what was asked; the sample stays as it is. `code` is for programs."""

    def __init__(self, reason: str, code: str) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model, T tokens, as it was sampled.

    `complete` is whether the model ended it itself; `version` is that of the newest token.
    """

    said: Said
    token_ids: list[int]
    logprobs: list[float]
    pieces: list[str]  # the tokens as text, if they were asked for
    prompt_tokens: int  # all tokens before it
    complete: bool
    version: int


@dataclass(frozen=True, slots=True)
class Begun:
    """An agent works on the sample from now on; what it asks for comes when it likes."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The agent of the sample is gone: the sample begins again, for another one."""


@dataclass(frozen=True, slots=True)
class Ask:
    """An agent's wish for one turn of the model.

    `messages` are those since the model's last turn, in the first ask all of them, and `calls` the
    tools that this turn called, as the agent was told; with `text` the model goes on from plain
    text instead. `after` is the turn that they follow, counted from 0 in the order of the asks that
    got one; None where they begin a conversation. `reply` is called once, from any thread.
    `stops` are texts that end the turn, besides those of the run.
    """

    reply: Callable[[Turn | UmbraError], None]
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    text: str | None = None
    after: int | None = None
    max_tokens: int = 0  # of the turn, at most; 0 = as configured
    pieces: bool = False
    stops: tuple[str, ...] = ()
