"""Notices an engine that is busy and gives no tokens, also one that never comes back from a call.

Progress is counted in tokens: a loop that turns around an engine which hangs does not move. The
buffer names a generator that does not move (`buffer.stall_s`); after `generator.stall_s` it leaves
the run, so that others get its samples at once, and ends; whoever supervises it starts another.
"""

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

LOOKS = 20  # in the time that is allowed
LONGEST_LOOK_S = 1.0
# A call that does not let go of the interpreter keeps our thread from looking, too. Then the
# interpreter's own watchdog ends the process so much later, with exit code 1.
HELD = 1.5
STDERR = 2

log = logging.getLogger(__name__)


class StallWatch:
    """How long the engine has been busy with nothing to show for it.

    Told by the loop's thread, looked at by another. Seconds in which nobody looked count little:
    the whole process was stopped then.

    Args:
        engine: what the user calls it, for the sentence.
        pace: seconds without a token that are allowed (`generator.stall_s`), and how fast weights
            are loaded at the least.
        clock: monotonic seconds.
    """

    def __init__(
        self, engine: str, pace: Pace, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit_s = pace.base_s
        self.look_s = min(LONGEST_LOOK_S, self.limit_s / LOOKS)
        self._engine = engine
        self._pace = pace
        self._clock = clock
        self._quiet_s = 0.0
        self._looked_at = clock()
        self._doing = ""
        self._live = 0

    def moved(self, nbytes: int = 0) -> None:
        """A token came, or there is nothing to do; or `nbytes` of new weights are to be loaded."""
        self._quiet_s = self.limit_s - self._pace.limit_s(nbytes)

    def waits(self, doing: str, live: int) -> None:
        """The loop is about to do something that may hang, with `live` requests in flight."""
        self._doing, self._live = doing, live

    def look(self) -> float:
        """Seconds without progress; to be asked every `look_s` seconds."""
        now = self._clock()
        self._quiet_s += min(now - self._looked_at, 2 * self.look_s)
        self._looked_at = now
        return self._quiet_s

    def describe(self) -> str:
        """What it waits for, and for how long."""
        return (
            f"the {self._engine} engine is stuck: no token for {self._quiet_s:.0f} s while it was "
            f"{self._doing or 'starting'}, with {self._live} requests in flight "
            f"(generator.stall_s = {self.limit_s:g})"
        )


@contextmanager
def watching(watch: StallWatch, session: Session) -> Iterator[None]:
    """Within the block, a generator that is stuck for `watch.limit_s` leaves the run and ends."""
    closing = threading.Event()

    def arm() -> None:
        faulthandler.dump_traceback_later(HELD * watch.limit_s, exit=True, file=STDERR)

    def main() -> None:
        told = False
        while not closing.wait(watch.look_s):
            quiet_s = watch.look()
            if quiet_s >= watch.limit_s:
                _give_up(session, watch.describe())
            if quiet_s >= watch.limit_s / 2 and not told:
                log.warning("%s; soon this generator ends", watch.describe())
            told = quiet_s >= watch.limit_s / 2
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


def _give_up(session: Session, sentence: str) -> None:
    log.error("%s: it ends; what each thread does:", sentence)
    with suppress(Exception):  # nobody may be there to read it
        faulthandler.dump_traceback(all_threads=True, file=STDERR)
    session.leave(f"failed: {sentence}")
    end_process(EngineError(sentence))
