"""What the broker draws prompts from, and what it says came of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from umbra.services.prompts.rows import Prompt


@dataclass(frozen=True, slots=True)
class GroupEnd:
    """What came of a group of one prompt."""

    prompt_id: str
    reason: Literal["complete", "filtered", "failed"]
    rewards: list[float]  # of the samples that got one


class PromptStream(Protocol):
    """Prompts without end, in an order that can be taken up again after a crash."""

    def __next__(self) -> Prompt: ...

    def position(self) -> dict[str, Any]:
        """Where it is, in plain values."""
        ...

    def seek(self, position: dict[str, Any]) -> None:
        """Go on where `position` was taken."""
        ...


class Prompts(Protocol):
    """Prompts without end, which can be told what became of them; as `sources.PromptFeed` can."""

    def __next__(self) -> Prompt: ...

    def ended(self, end: GroupEnd) -> None:
        """A group has come to its end."""
        ...

    def shares(self) -> dict[str, float]:
        """The probability of each environment at the next draw; empty if there are not several."""
        ...

    def position(self) -> dict[str, Any]:
        """Where they are, in plain values."""
        ...

    def changes(self) -> dict[str, Any]:
        """What else has to be kept and has changed since the last call, by name."""
        ...

    def seek(self, position: dict[str, Any], kept: Mapping[str, Any]) -> None:
        """Go on where `position` was taken; `kept` is all that `changes` has told."""
        ...
