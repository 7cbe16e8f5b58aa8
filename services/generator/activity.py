"""Reports of a generator: spans of its loop, and an engine that is stuck."""

from __future__ import annotations

import faulthandler
import logging
import threading
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
    """A watch that ends the process where `session` notes no progress for `pace.base_s` seconds.

    Loading new weights may take longer, by the rate of `pace`. `engine` is its name for the user.
    """

    def __init__(self, session: Session, engine: str, pace: Pace) -> None:
        self.loading = 0  # bytes of new weights that the engine loads now
        self._session, self._engine, self._pace = session, engine, pace
        self._look_s = min(LONGEST_LOOK_S, pace.base_s / LOOKS)
        self._closing = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Have the generator leave the run and end once it is stuck, within the block."""
        self._arm()  # the first call may be the one that holds the interpreter
        thread = service_thread(self._watch, "umbra-stall")
        thread.start()
        try:
            yield
        finally:
            self._closing.set()
            thread.join()
            faulthandler.cancel_dump_traceback_later()

    def _arm(self) -> None:
        faulthandler.dump_traceback_later(HELD * self._pace.base_s, exit=True, file=STDERR)

    def _watch(self) -> None:
        """Count looks without progress: a process that was stopped for long is not stuck."""
        quiet_s, seen = 0.0, 0.0
        while not self._closing.wait(self._look_s):
            self._arm()
            doing, moved_at = self._session.doing
            quiet_s = quiet_s + self._look_s if moved_at == seen else 0.0
            seen = moved_at
            if quiet_s >= self._pace.limit_s(self.loading):
                self._end(
                    f"the {self._engine} engine is stuck: no token for {quiet_s:.0f} s while it "
                    f"was {doing} ({self._pace.base_s:g} s = 10 x buffer.stall_s)"
                )

    def _end(self, sentence: str) -> None:
        log.error("%s: this process ends; the stacks of its threads:", sentence)
        with suppress(Exception):  # nobody may be there to read it
            faulthandler.dump_traceback(all_threads=True, file=STDERR)
        self._session.leave(f"failed: {sentence}")
        end_process(EngineError(sentence))
