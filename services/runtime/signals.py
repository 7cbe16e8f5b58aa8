"""SIGINT and SIGTERM: the first asks to drain, the second ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from umbra.services.runtime.parent import is_supervised

HANDLED = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_on_signals(stopping: threading.Event) -> Iterator[None]:
    """Set `stopping` at the first signal; at the second, die of it. Handlers are restored after.

    Only signals count: one that comes while `stopping` is set for another reason is the first. A
    supervised process drains whatever comes: its supervisor kills when it means to, and of its death
    the kernel may tell several times, once for each of its threads.

    Only for the main thread.
    """
    seen = False

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal seen
        if seen and not is_supervised():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        seen = True
        stopping.set()

    before = {number: signal.signal(number, handle) for number in HANDLED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
