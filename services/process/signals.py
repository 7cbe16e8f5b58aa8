"""SIGINT, SIGTERM and SIGHUP: the first asks to drain, the second ends at once.

SIGHUP is SIGTERM, but comes several times when a terminal is closed, so only the first counts; one
that is ignored (nohup) stays so.
"""

from __future__ import annotations

import _thread
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from signal import SIG_IGN
from types import FrameType

from umbra.services.process.parent import is_supervised

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def _handled(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call `handle` at these signals; handlers are restored after. Only for the main thread."""
    wanted = [one for one in HANDLED if one != signal.SIGHUP or signal.getsignal(one) != SIG_IGN]
    before = {number: signal.signal(number, handle) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stop_on_signals(stopping: threading.Event) -> Iterator[None]:
    """Set `stopping` at the first signal; at the second, die of it.

    Only signals count: one that comes while `stopping` is set for another reason is the first. A
    supervised process drains whatever comes: its supervisor kills when it means to, and the kernel
    may tell of its death several times, once for each of its threads.
    """
    seen = False

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal seen
        if not seen:
            seen = True
            # In a thread: the handler may have interrupted the main thread within a method of this
            # very event, whose lock it holds; to set it here would then wait for ever.
            _thread.start_new_thread(stopping.set, ())
        elif not is_supervised() and number != signal.SIGHUP:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    with _handled(handle):
        yield


class SignalCounter:
    """A counter of signals while entered, for a supervisor, to which the second can mean more.

    Handlers only count and wake: what follows is decided where the loop polls. They wake through a
    pipe, because to set a `threading.Event` in a handler can wait for a lock that the interrupted
    code holds.
    """

    def __init__(self) -> None:
        self.count = 0
        self.number = 0  # the first signal's
        self._read_fd = self._write_fd = -1
        self._entered = ExitStack()

    @property
    def exit_code(self) -> int:
        return 128 + self.number

    def wait(self, seconds: float) -> None:
        """Sleep, but not through a signal."""
        if select.select([self._read_fd], [], [], seconds)[0]:
            os.read(self._read_fd, 64)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            if self.count:
                return
            number = signal.SIGTERM
        self.count += 1
        self.number = self.number or number
        with suppress(BlockingIOError):  # full: it is awake
            os.write(self._write_fd, b"!")

    def __enter__(self) -> SignalCounter:
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        for fd in (self._read_fd, self._write_fd):
            self._entered.callback(os.close, fd)
        self._entered.enter_context(_handled(self._handle))
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()
