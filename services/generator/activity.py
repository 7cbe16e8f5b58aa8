"""Reports of a generator: spans of its loop, and an engine that is stuck."""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from umbra.proto.deadline import Pace
from umbra.proto.errors import end_process, service_thread
from umbra.proto.net.session import Session
from umbra.services.generator.engines.engine import EngineError
from umbra.services.process.metrics import MetricsFile, steady_clock

log = logging.getLogger(__name__)

_LONGEST_SPAN_S = 1.0  # spans are cut here, so that a long one is seen while it lasts


class Activity:
    """A merger of the loop's reports at each turn into contiguous spans.

    A row is `{"kind": "span", "name", "start", "end", ...}`, in seconds since the epoch. "idle" has
    `reason`: "weights", "work" or "environment". "decode" has `tokens` sampled. "load_weights" has
    `version`.
    """

    def __init__(self, metrics: MetricsFile, clock: Callable[[], float] = steady_clock) -> None:
        self.clock = clock
        self._metrics = metrics
        self._reason: str | None = None  # of the current span: "" = decoding, None = there is none
        self._start = self._end = 0.0
        self._tokens = 0  # decoded in the current span

    def decoding(self, started: float, tokens: int) -> None:
        """Note that the engine sampled `tokens` since `started`."""
        self._extend("", started)
        self._tokens += tokens

    def idle(self, started: float, reason: str) -> None:
        """Note idleness since `started`, for want of `reason`."""
        self._extend(reason, started)

    def loaded(self, start: float, end: float, version: int) -> None:
        """Write the span in which `version` was loaded, within another one."""
        self._metrics.write("span", name="load_weights", start=start, end=end, version=version)

    def close(self) -> None:
        span = {"start": self._start, "end": self._end}
        if self._reason:
            self._metrics.write("span", name="idle", reason=self._reason, **span)
        elif self._reason is not None:
            self._metrics.write("span", name="decode", tokens=self._tokens, **span)
        self._reason, self._tokens = None, 0

    def _extend(self, reason: str, started: float) -> None:
        if self._reason != reason or started - self._start >= _LONGEST_SPAN_S:
            self.close()
            self._reason, self._start = reason, started
        self._end = self.clock()


LOOKS = 20  # in the time that is allowed
LONGEST_LOOK_S = 1.0
# A call that does not let go of the interpreter keeps our thread from looking, too. Then the
# interpreter's own watchdog ends the process so much later, with exit code 1.
HELD = 1.5
STDERR = 2


class StallWatch:
    """A stall timer: the seconds that the engine has been busy without progress.

    The loop's thread updates it, another looks at it. Seconds in which nobody looked count little:
    the whole process was stopped then. `engine` is its name for the user, `pace` the seconds
    without a token that are allowed, and the least rate at which weights are loaded.
    """

    def __init__(
        self, engine: str, pace: Pace, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit_s = pace.base_s
        self.look_s = min(LONGEST_LOOK_S, self.limit_s / LOOKS)
        self._engine, self._pace, self._clock = engine, pace, clock
        self._quiet_s = 0.0
        self._looked_at = clock()
        self._step = ("starting", 0)

    def moved(self, nbytes: int = 0) -> None:
        """Note a token, an idle engine, or `nbytes` of new weights that are to be loaded."""
        self._quiet_s = self.limit_s - self._pace.limit_s(nbytes)

    def waits(self, doing: str, live: int) -> None:
        """Note the next step, which may hang, with `live` requests in flight."""
        self._step = doing, live

    def look(self) -> float:
        """Return the seconds without progress; call it every `look_s` seconds."""
        now = self._clock()
        self._quiet_s += min(now - self._looked_at, 2 * self.look_s)
        self._looked_at = now
        return self._quiet_s

    def describe(self) -> str:
        doing, live = self._step
        return (
            f"the {self._engine} engine is stuck: no token for {self._quiet_s:.0f} s while it was "
            f"{doing}, with {live} requests in flight ({self.limit_s:g} s = 10 x buffer.stall_s)"
        )


@contextmanager
def watching(watch: StallWatch, session: Session) -> Iterator[None]:
    """Have a generator that is stuck for `watch.limit_s` leave and end, within the block."""
    closing = threading.Event()

    def arm() -> None:
        faulthandler.dump_traceback_later(HELD * watch.limit_s, exit=True, file=STDERR)

    def main() -> None:
        while not closing.wait(watch.look_s):
            if watch.look() >= watch.limit_s:
                sentence = watch.describe()
                log.error("%s: this process ends; the stacks of its threads:", sentence)
                with suppress(Exception):  # nobody may be there to read it
                    faulthandler.dump_traceback(all_threads=True, file=STDERR)
                session.leave(f"failed: {sentence}")
                end_process(EngineError(sentence))
            arm()

    arm()  # the first call may be the one that holds the interpreter
    thread = service_thread(main, "umbra-stall")
    thread.start()
    try:
        yield
    finally:
        closing.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()
