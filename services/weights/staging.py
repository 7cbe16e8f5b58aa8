"""What a receiver may do with which of its staging buffers; no memory, thread or socket.

One buffer is enough: the hub begins the next push when the engine has loaded the version before.
Only a receiver that was dropped while it loads has to wait with a second one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BUFFERS = 1  # of versions that are held whole


@dataclass(slots=True, eq=False)
class Candidate:
    """A version on its way through a staging buffer."""

    epoch: int
    version: int
    buffer: int
    state: Literal["staging", "staged", "committed"] = "staging"


class Staging:
    """With two buffers, a version may be loaded by the engine while the next is staged.

    Only a version that was staged and verified, and that the hub committed, is ever taken; its
    buffer is left alone until it is released.

    Args:
        buffers: how many there are; with one, nothing is staged while the engine loads.
    """

    def __init__(self, buffers: int = BUFFERS) -> None:
        self._buffers = buffers
        self.ignored = 0  # messages about epochs that are no longer ours
        self._candidate: Candidate | None = None
        self._loading: Candidate | None = None

    @property
    def has_room(self) -> bool:
        """Whether a version can be staged now."""
        return self._loading is None or self._buffers > 1

    def prepare(self, epoch: int, version: int) -> Candidate:
        """Start to stage; forgets a candidate that nobody has taken. There must be room."""
        busy = self._loading.buffer if self._loading else -1
        buffer = next(index for index in range(self._buffers) if index != busy)
        self._candidate = Candidate(epoch, version, buffer)
        return self._candidate

    def staged(self, epoch: int) -> None:
        """The candidate's bytes are complete and verified."""
        if (candidate := self._current(epoch, "staging")) is not None:
            candidate.state = "staged"

    def commit(self, epoch: int) -> bool:
        """The hub commits; False if `epoch` is not the staged version."""
        if (candidate := self._current(epoch, "staged")) is None:
            return False
        candidate.state = "committed"
        return True

    def abort(self, epoch: int) -> None:
        """Forget the candidate. One that the engine is loading is not touched."""
        if self._candidate is not None and self._candidate.epoch == epoch:
            self._candidate = None

    def take(self) -> Candidate | None:
        """The version to load now; None if there is none, or one is being loaded still."""
        candidate = self._candidate
        if self._loading is not None or candidate is None or candidate.state != "committed":
            return None
        self._candidate, self._loading = None, candidate
        return candidate

    def release(self, candidate: Candidate) -> None:
        """The engine has loaded `candidate`, or given it up."""
        if self._loading is candidate:
            self._loading = None

    def _current(self, epoch: int, state: str) -> Candidate | None:
        candidate = self._candidate
        if candidate is not None and candidate.epoch == epoch and candidate.state == state:
            return candidate
        self.ignored += 1
        return None
