"""SIGINT and SIGTERM of a supervisor: counted, so that the second can mean more than the first."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from types import FrameType

HANDLED = (signal.SIGINT, signal.SIGTERM)


class SignalCounter:
    """Counts signals while it is entered; only for the main thread.

    Handlers only count and wake: what follows is decided where the loop polls. They wake through a
    pipe, because to set a `threading.Event` in a handler can wait for a lock that the interrupted
    code holds.
    """

    def __init__(self) -> None:
        self.count = 0
        self.number = 0  # the first signal's
        self._read_fd = self._write_fd = -1
        self._before: dict[int, signal._HANDLER] = {}

    @property
    def exit_code(self) -> int:
        """What a shell reports for a process that died of the first signal."""
        return 128 + self.number

    def wait(self, seconds: float) -> None:
        """Sleep, but not through a signal."""
        if select.select([self._read_fd], [], [], seconds)[0]:
            os.read(self._read_fd, 64)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.number = self.number or number
        with suppress(BlockingIOError):  # full: it is awake
            os.write(self._write_fd, b"!")

    def __enter__(self) -> SignalCounter:
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._before = {number: signal.signal(number, self._handle) for number in HANDLED}
        return self

    def __exit__(self, *_raised: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read_fd)
        os.close(self._write_fd)
