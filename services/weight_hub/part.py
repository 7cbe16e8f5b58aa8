"""A daemon that holds the rows that the ranks of one more trainer host write of each version.

The weight hub orders which arena it holds, a file of the whole layout with memory for its own
buckets alone, and which slots it hands out. Ranks of its host write into that file, receivers fetch
from it: the same bytes at the same places as in the hub's own arena. It decides nothing, and knows
no receiver. When it is killed its file stays, and the next one adopts it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from contextlib import ExitStack

from umbra.proto.deadline import Deadline
from umbra.proto.errors import DeadlineError, StartupError, UmbraError
from umbra.proto.messages import HoldArena, OfferSlot, Ok, PartState
from umbra.proto.net.io_thread import IoThread
from umbra.proto.net.keys import OPEN, Security
from umbra.proto.net.session import Session
from umbra.services.config import WeightHubConfig as WeightHubConfig
from umbra.services.weights.arena import Arena, remove_leftovers, run_and_suffix, shm_host
from umbra.services.weights.manifest import check_manifest, owned_ranges
from umbra.services.weights.planes.plane import Background
from umbra.services.weights.planes.tcp import TcpHub

STATE_S = 1.0  # between two messages to the hub
ANSWER_S = 5.0  # until the hub counts as away
LOOK_S = 0.2

log = logging.getLogger(__name__)


class PartHub:
    """The part hub of a trainer host; `run` until it has to stop, then `close`.

    Args:
        owner: trainer host, from 1.
        upstream: weights endpoint of the hub.
        config: the section `weight_hub`; buckets are fetched at its `listen`.

    Raises as `BucketServer`.
    """

    def __init__(
        self,
        name: str,
        owner: int,
        upstream: str,
        config: WeightHubConfig,
        host: str = "",
        security: Security = OPEN,
    ) -> None:
        self._owner = owner
        self._host = host or shm_host()
        self._making: Background[Arena] = Background("umbra-part")
        self._order: HoldArena | None = None  # what the hub told us to hold
        self._arena: Arena | None = None  # None: not made yet, or `_error` says why it cannot be
        self._error = ""
        with ExitStack() as stack:
            stack.callback(self._making.close)
            self._tcp = TcpHub(config.listen, config, security, owner)
            stack.callback(self._tcp.close)
            self.buckets = self._tcp.buckets
            link = IoThread(name, uuid.uuid4().hex[:12], security=security)
            stack.callback(link.close)
            self._hub = link.channel(upstream, "weight hub", server="weight_hub")
            self._stack = stack.pop_all()

    def run(
        self, stopping: threading.Event, patience_s: float, session: Session | None = None
    ) -> None:
        """Hold and hand out until `stopping` is set; `session`, if any, gets the progress.

        The hub may be away for `patience_s` seconds at a time.

        Raises:
            DeadlineError: it is away for longer.
            RejectedError: it refuses us.
        """
        deadline = Deadline(patience_s, f"no answer from the {self._hub.peer}")
        while not stopping.is_set():
            if self._state(stopping):
                deadline.restart()
            elif not stopping.is_set():
                deadline.check()
            offered = self._listen(stopping, time.monotonic() + STATE_S)
            if session is not None:
                session.progress("handing out" if offered else "waiting", offered)

    def close(self) -> None:
        """Leave, and remove the arena; processes that have it mapped may go on."""
        self._drop()
        self._stack.close()

    # -- the hub ----------------------------------------------------------------------------------

    def _state(self, stopping: threading.Event) -> bool:
        known = self._order is not None and (self._arena is not None or self._error)
        state = PartState(
            owner=self._owner,
            host=self._host,
            buckets=self.buckets,
            path=self._order.path if self._order is not None and known else "",
            error=self._error,
        )
        try:
            self._hub.call(state, Ok, timeout_s=ANSWER_S, stopping=stopping)
        except DeadlineError:
            return False
        return True

    def _listen(self, stopping: threading.Event, until: float) -> int:
        """Handle the hub's commands until it needs our state, or `until`; return how many."""
        done = 0
        while not stopping.is_set() and (left_s := until - time.monotonic()) > 0:
            if self._made():
                break
            try:
                message = self._hub.pushes.get(timeout=min(LOOK_S, left_s))
            except queue.Empty:
                continue
            done += 1
            match message:
                case HoldArena():
                    self._hold(message)
                case OfferSlot():
                    self._offer(message)
                case _:
                    log.warning("the weight hub pushed an unexpected %s", type(message).__name__)
        return done

    # -- the arena --------------------------------------------------------------------------------

    def _hold(self, order: HoldArena) -> None:
        before = self._order
        if before is not None and not self._error:
            if (before.path, before.manifest) == (order.path, order.manifest):
                return
        self._drop()
        if order.path:
            self._order = order
            self._making.start(lambda: _arena(order, self._owner))

    def _made(self) -> bool:
        """Take the arena that was made; return whether there was one, or an error."""
        made, order = self._making.take(), self._order
        if made is None:
            return False
        assert order is not None
        if isinstance(made, UmbraError):
            log.warning("cannot hold %s: %s", order.path, made)
            self._error = str(made)
            return True
        self._tcp.layout(made, order.manifest)
        self._arena = made
        log.info("hold %s", made.path)
        return True

    def _drop(self) -> None:
        made = self._making.finish()  # bounded by the size of the arena
        arena = made if isinstance(made, Arena) else self._arena
        self._arena, self._order, self._error = None, None, ""
        if arena is not None:
            for slot in range(arena.slots):
                self._tcp.granted(slot)
            arena.unlink()
            arena.close()

    def _offer(self, message: OfferSlot) -> None:
        if self._arena is None or self._order is None or self._order.path != message.path:
            return  # of an arena before
        buckets = len(self._order.manifest.buckets)
        if not 0 <= message.slot < self._arena.slots:
            log.warning("the weight hub offers slot %d, which does not exist", message.slot)
        elif not message.checksums:
            self._tcp.granted(message.slot)
        elif len(message.checksums) != buckets:
            log.warning("%d checksums for %d buckets", len(message.checksums), buckets)
        else:
            self._tcp.offer(message.slot, message.checksums, deltas=message.deltas)


def _arena(order: HoldArena, owner: int) -> Arena:
    """Make or adopt the arena of `order`, with memory for the buckets of `owner`.

    Raises:
        WireError: the layout makes no sense.
        StartupError: there is too little memory, or no such file.
    """
    check_manifest(order.manifest)
    run_id, suffix = run_and_suffix(order.path)
    size = order.manifest.total_bytes
    if order.fresh:
        remove_leftovers(run_id)  # of a part hub that was killed
        own = owned_ranges(order.manifest, owner)
        return Arena.create(run_id, suffix, slot_bytes=size, slots=order.slots, own=own)
    arena = Arena.adopt(run_id, order.path, slot_bytes=size)
    if arena.slots != order.slots:
        arena.close()
        raise StartupError(f"{order.path} has {arena.slots} slots, not {order.slots}")
    return arena
