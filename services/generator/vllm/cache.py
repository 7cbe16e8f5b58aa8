"""Capacity of a KV cache in sequences, and the salts by which sequences share prefixes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

_RECENT = 256


class RecentLengths:
    """Lengths, prompt included, with which sequences left an engine; `most` until one has."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._recent: deque[int] = deque(maxlen=_RECENT)

    def ended(self, length: int) -> None:
        self._recent.append(length)

    @property
    def mean(self) -> float:
        return sum(self._recent) / len(self._recent) if self._recent else float(self._most)

    def fitting(self, capacity: int, live: Iterable[int]) -> int:
        """Return how many sequences fit in `capacity` tokens, live ones included; 1 at least.

        Each live one, of the length in `live`, is expected to get as long as the mean, unless it
        is longer already.
        """
        mean, count, taken = self.mean, 0, 0.0
        for length in live:
            count += 1
            taken += max(length, mean)
        return max(1, count + int((capacity - taken) // mean))


class Salts:
    """Requests that begin between two loads share a salt, later turns of older sessions do not.

    A session whose last turn began under the weights of now goes on under the salt that all share,
    one of whom older weights made a part gets a salt of its own from then on. So a group reads its
    prompt once, a session reads itself again at one load and never after it, and nobody reads the
    KV that older weights computed for another session.
    """

    def __init__(self) -> None:
        self._names = 0
        self.shared = ""
        self._last: dict[str, str] = {}  # by session, the salt of its last turn
        self._own: set[str] = set()

    def loaded(self, version: int, *, keep: bool) -> None:
        """Note that `version` is served from now on; without `keep` no earlier KV is valid.

        A trainer that goes back gives a number to other weights, so the version alone is no name.
        """
        self.shared = self._name(str(version))
        if not keep:
            self._last.clear()
            self._own.clear()

    def of(self, session: str) -> str:
        """Return the salt of the next request of `session`; "" = of no session."""
        last = self._last.get(session, self.shared)
        if last == self.shared or last in self._own:
            return last
        self._last[session] = own = self._name("own")
        self._own.add(own)
        return own

    def used(self, session: str, salt: str) -> None:
        if session:
            self._last[session] = salt

    def forget(self, sessions: Iterable[str]) -> None:
        for session in sessions:
            self._own.discard(self._last.pop(session, ""))

    def _name(self, what: str) -> str:
        self._names += 1
        return f"{what}.{self._names}"
