"""A part hub: it holds what the ranks of one more trainer host write of each version.

The weight hub tells it which arena to hold, a file of the whole layout with memory for its own
buckets alone, and which slots to hand out. Ranks of its host write into that file, receivers fetch
from it: the same bytes at the same places as in the hub's own arena. It decides nothing, and knows
no receiver. When it is killed its file stays, and the next one goes on with it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from umbra.proto.deadline import Deadline
from umbra.proto.errors import DeadlineError, StartupError, UmbraError
from umbra.proto.messages import HoldArena, Message, OfferSlot, Ok, PartState
from umbra.proto.net.io_thread import IoThread
from umbra.proto.net.keys import OPEN, Security
from umbra.proto.net.session import Session
from umbra.services.config import WeightHubConfig as WeightHubConfig
from umbra.services.weights.arena import (
    Arena,
    remove_leftovers,
    run_and_suffix,
    shm_host,
)
from umbra.services.weights.manifest import check_manifest, owned_ranges
from umbra.services.weights.planes.plane import Background
from umbra.services.weights.planes.tcp import TcpHub

STATE_S = 1.0  # between one word to the hub and the next
ANSWER_S = 5.0  # until the hub counts as away
LOOK_S = 0.2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Holding:
    """The arena that the hub told us to hold."""

    order: HoldArena
    arena: Arena | None = None  # None: not yet, or it cannot be had
    error: str = ""


class PartHub:
    """One part hub; `run` until it is told to stop.

    Args:
        name: in the run.
        owner: trainer host, from 1.
        hub: weights endpoint of the hub.
        listen: address at which buckets are fetched; port * picks a free one.
        config: the section `weight_hub`.
        host: names the /dev/shm of this process; empty = find out.
        security: keys of role `part`.

    Raises:
        StartupError: the address is taken.
        UsageError: it is not ours, or other machines can reach it and there are no keys.
    """

    def __init__(
        self,
        name: str,
        owner: int,
        hub: str,
        listen: str,
        config: WeightHubConfig,
        host: str = "",
        security: Security = OPEN,
    ) -> None:
        self._owner = owner
        self._host = host or shm_host()
        self._making: Background[Arena] = Background("umbra-part")
        self._holding: _Holding | None = None
        with ExitStack() as stack:
            stack.callback(self._making.close)
            self._tcp = TcpHub(name, uuid.uuid4().hex[:12], listen, config, security, owner)
            stack.callback(self._tcp.close)
            self.buckets = self._tcp.endpoint
            link = IoThread(name, uuid.uuid4().hex[:12], security=security)
            stack.callback(link.close)
            self._hub = link.channel(hub, "weight hub", server="weight_hub")
            self._stack = stack.pop_all()

    def run(
        self, stopping: threading.Event, patience_s: float, session: Session | None = None
    ) -> None:
        """Hold and hand out until `stopping` is set; `session`, if there is one, hears how it goes.

        The hub may be away for `patience_s` seconds at a time.

        Raises:
            DeadlineError: it is away for longer.
            RejectedError: it refuses us.
        """
        deadline = Deadline(patience_s, f"no answer from the {self._hub.peer}")
        try:
            while not stopping.is_set():
                if self._state(stopping):
                    deadline.restart()
                elif not stopping.is_set():
                    deadline.check()
                offered = self._listen(stopping, time.monotonic() + STATE_S)
                if session is not None:
                    session.progress("handing out" if offered else "waiting", offered)
        finally:
            self.close()

    def close(self) -> None:
        """Leave, and remove the arena; processes that have it mapped may go on."""
        self._making.wait()  # bounded by the size of the arena
        self._made()
        self._drop()
        self._stack.close()

    # -- the hub ----------------------------------------------------------------------------------

    def _state(self, stopping: threading.Event) -> bool:
        """Report our state; returns whether the hub has answered."""
        holding = self._holding
        known = holding is not None and (holding.arena is not None or bool(holding.error))
        state = PartState(
            owner=self._owner,
            host=self._host,
            buckets=self.buckets,
            path=holding.order.path if holding is not None and known else "",
            error=holding.error if holding is not None else "",
        )
        try:
            self._hub.call(state, Ok, timeout_s=ANSWER_S, stopping=stopping)
        except DeadlineError:
            return False
        return True

    def _listen(self, stopping: threading.Event, until: float) -> int:
        """Handle the hub's commands until it needs our state, or `until`; returns how many."""
        done = 0
        while not stopping.is_set() and (left_s := until - time.monotonic()) > 0:
            if self._made():
                break
            message = self._next(min(LOOK_S, left_s))
            if message is not None:
                self._handle(message)
                done += 1
        return done

    def _next(self, timeout_s: float) -> Message | None:
        try:
            return self._hub.pushes.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _handle(self, message: Message) -> None:
        match message:
            case HoldArena():
                self._hold(message)
            case OfferSlot():
                self._offer(message)
            case _:
                log.warning("the weight hub pushed an unexpected %s", type(message).__name__)

    # -- the arena --------------------------------------------------------------------------------

    def _hold(self, order: HoldArena) -> None:
        """Begin to hold another arena, unless it is the current one."""
        before = self._holding
        if before is not None and not before.error:
            if (before.order.path, before.order.manifest) == (order.path, order.manifest):
                return
        self._making.wait()  # what an order before this one has begun
        self._made()
        self._drop()
        if order.path:
            self._holding = _Holding(order)
            self._making.start(self._maker(order))

    def _maker(self, order: HoldArena) -> Callable[[], Arena]:
        def make() -> Arena:
            check_manifest(order.manifest)
            run_id, suffix = run_and_suffix(order.path)
            size = order.manifest.total_bytes
            if order.fresh:
                remove_leftovers(run_id)  # of a part hub that was killed
                own = owned_ranges(order.manifest, self._owner)
                slots = order.slots
                return Arena.create(run_id, suffix, slot_bytes=size, slots=slots, own=own)
            arena = Arena.adopt(run_id, order.path, slot_bytes=size)
            if arena.slots != order.slots:
                arena.close()
                raise StartupError(f"{order.path} has {arena.slots} slots, not {order.slots}")
            return arena

        return make

    def _made(self) -> bool:
        """Take the arena that was made; returns whether there was one, or an error."""
        result, holding = self._making.take(), self._holding
        if result is None:
            return False
        assert holding is not None
        if isinstance(result, UmbraError):
            log.warning("cannot hold %s: %s", holding.order.path, result)
            self._holding = _Holding(holding.order, error=str(result))
            return True
        self._tcp.layout(result, holding.order.manifest)
        self._holding = _Holding(holding.order, result)
        log.info("hold %s", result.path)
        return True

    def _drop(self) -> None:
        holding, self._holding = self._holding, None
        if holding is not None and holding.arena is not None:
            for slot in range(holding.arena.slots):
                self._tcp.granted(slot)
            holding.arena.unlink()
            holding.arena.close()

    def _offer(self, message: OfferSlot) -> None:
        """Hand out a slot, or stop doing so."""
        holding = self._holding
        if holding is None or holding.arena is None or holding.order.path != message.path:
            return  # of an arena before
        buckets = len(holding.order.manifest.buckets)
        if not 0 <= message.slot < holding.arena.slots:
            log.warning("the weight hub offers slot %d, which there is not", message.slot)
        elif not message.checksums:
            self._tcp.granted(message.slot)
        elif len(message.checksums) != buckets:
            log.warning("%d checksums for %d buckets", len(message.checksums), buckets)
        else:
            self._tcp.offer(message.slot, message.checksums, deltas=message.deltas)
