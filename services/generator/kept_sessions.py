"""Keys and values that the torch engine keeps between the turns of a session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KeptSession:
    """What the first L tokens of a session left. H key-value heads, D head dimension."""

    tokens: list[int]  # [L]
    states: list[tuple[torch.Tensor, torch.Tensor]]  # of each layer, keys and values [L, H, D]
    chosen: bytes  # their experts, if that is told

    def shared(self, sequence: Sequence[int]) -> int:
        """How many tokens both begin with."""
        if list(sequence[: len(self.tokens)]) == self.tokens:
            return len(self.tokens)
        pairs = enumerate(zip(self.tokens, sequence, strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(self.tokens), len(sequence)))


class KeptSessions:
    """What sessions left, of each its last turn; those that were not asked for longest go first.

    Nothing is kept of a session's first turn: most are the only one.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._kept: dict[
            str, KeptSession | None
        ] = {}  # by session, the latest last; None: it is known

    def ended(self, session: str) -> bool:
        """A turn of `session` is over; whether what it left should be kept."""
        known = session in self._kept
        self._kept.setdefault(session, None)
        return known

    def keep(self, session: str, kept: KeptSession, room: int) -> None:
        """Keep this of `session`, if all that is kept fits `room` tokens then."""
        self.take(session)
        if len(kept.tokens) > room:
            return
        self.shrink(room - len(kept.tokens))
        del self._kept[session]  # to the end
        self._kept[session] = kept
        self.tokens += len(kept.tokens)

    def take(self, session: str) -> KeptSession | None:
        """What was kept of `session`, which is not kept any longer."""
        kept = self._kept.get(session)
        if kept is not None:
            self._kept[session] = None
            self.tokens -= len(kept.tokens)
        return kept

    def shrink(self, room: int) -> None:
        """Keep `room` tokens at most."""
        for session in list(self._kept):
            if self.tokens <= room:
                return
            self.take(session)

    def forget(self, session: str) -> None:
        """There will be no more turns of `session`."""
        self.take(session)
        self._kept.pop(session, None)

    def clear(self) -> None:
        """Nothing that was kept is good any longer."""
        self.shrink(0)
