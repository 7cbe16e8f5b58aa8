"""How long sequences have been of late: what a cache of keys and values will have room for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

_RECENT = 256


class RecentLengths:
    """Lengths, prompt included, with which sequences left an engine.

    Args:
        most: what a sequence is taken for until one has ended.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._sum = 0

    def ended(self, length: int) -> None:
        """A sequence left with so many tokens."""
        if len(self._recent) == _RECENT:
            self._sum -= self._recent[0]
        self._recent.append(length)
        self._sum += length

    @property
    def mean(self) -> float:
        """Of the last ones."""
        return self._sum / len(self._recent) if self._recent else float(self._most)

    def fitting(self, capacity: int, live: Iterable[int]) -> int:
        """Sequences that `capacity` tokens of cache hold, the live ones included; 1 at least.

        Each live one, of the length in `live`, is expected to get as long as the mean, unless it
        is longer already.
        """
        mean, count, taken = self.mean, 0, 0.0
        for length in live:
            count += 1
            taken += max(length, mean)
        return max(1, count + int((capacity - taken) // mean))
