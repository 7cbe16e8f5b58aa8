"""SIGINT and SIGTERM of a supervisor: counted, so that the second can mean more than the first."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

HANDLED = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Counts signals while it is entered; only for the main thread.

    Handlers only count: what follows is decided where the loop polls.
    """

    def __init__(self) -> None:
        self.count = 0
        self.number = 0  # the first signal's
        self._woken = threading.Event()
        self._before: dict[int, signal._HANDLER] = {}

    @property
    def exit_code(self) -> int:
        """What a shell reports for a process that died of the first signal."""
        return 128 + self.number

    def wait(self, seconds: float) -> None:
        """Sleep, but not through a signal."""
        if self._woken.wait(seconds):
            self._woken.clear()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.number = self.number or number
        self._woken.set()

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.signal(number, self._handle) for number in HANDLED}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
