"""How far generation may be ahead now: less while the trainer can make little of what it gets."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


class RunAhead:
    """Follows the effective share of samples (ESS) that the trainer reports with its commits.

    A change shows in the ESS only when the groups that were under way are trained. So after each
    one nothing is changed for as many steps as batches may be ahead, and one more.

    Args:
        most: `buffer.run_ahead`.
        min_ess: `buffer.min_ess`; 0 = always `most`.
    """

    def __init__(self, most: int, min_ess: float) -> None:
        self.now = most
        self._most = most
        self._min_ess = min_ess
        self._waits = 0  # steps until it is looked at again

    def heard(self, ess: float | None, step: int) -> bool:
        """A step was trained, with this ESS if that is known; whether anything has changed."""
        if not self._min_ess or ess is None:
            return False
        if self._waits:
            self._waits -= 1
            return False
        change = -1 if ess < self._min_ess else 1
        before, self.now = self.now, min(max(self.now + change, 0), self._most)
        if self.now == before:
            return False
        self._waits = self._most + 1
        log.info(
            "step %d: ess %.3f (buffer.min_ess = %g), so run_ahead is %d now, of at most %d",
            step, ess, self._min_ess, self.now, self._most,
        )  # fmt: skip
        return True

    @property
    def state(self) -> tuple[int, int]:
        """What survives a restart. It may be set to that of another configuration."""
        return self.now, self._waits

    @state.setter
    def state(self, before: tuple[int, int]) -> None:
        self.now = min(before[0], self._most) if self._min_ess else self._most
        self._waits = before[1]
