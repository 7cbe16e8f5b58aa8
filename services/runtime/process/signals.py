"""SIGINT and SIGTERM: the first asks to drain, the second ends the process at once."""

from __future__ import annotations

import _thread
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from umbra.services.runtime.process.parent import is_supervised

HANDLED = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_on_signals(stopping: threading.Event) -> Iterator[None]:
    """Set `stopping` at the first signal; at the second, die of it. Handlers are restored after.

    Only signals count: one that comes while `stopping` is set for another reason is the first. A
    supervised process drains whatever comes: its supervisor kills when it means to, and the kernel
    may tell of its death several times, once for each of its threads.

    Only for the main thread.
    """
    seen = False

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal seen
        if not seen:
            seen = True
            # In a thread: the handler may have interrupted the main thread within a method of this
            # very event, whose lock it holds; to set it here would then wait for ever.
            _thread.start_new_thread(stopping.set, ())
        elif not is_supervised():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    before = {number: signal.signal(number, handle) for number in HANDLED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
