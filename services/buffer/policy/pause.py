"""Whether work is handed out: an operator may pause the run."""

from __future__ import annotations


class PauseSwitch:
    """Open, or shut for a reason."""

    def __init__(self) -> None:
        self.reason = ""

    @property
    def is_shut(self) -> bool:
        """Whether nothing may be handed out."""
        return bool(self.reason)

    def shut(self, reason: str) -> None:
        """Hand nothing out from now on."""
        self.reason = reason

    def open(self) -> None:
        """Hand out again."""
        self.reason = ""
