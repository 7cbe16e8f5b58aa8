"""A receiver's half of a push: stage a version, verify it, have the engine load it."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from umbra.proto import messages as m
from umbra.proto.deadline import Deadline
from umbra.proto.errors import PeerLostError, StartupError, UmbraError, foreseen
from umbra.proto.net.io_thread import Channel
from umbra.proto.records import BucketsAt, Manifest
from umbra.services.weights.arena import shm_host
from umbra.services.weights.manifest import Part, check_dtype, check_manifest
from umbra.services.weights.planes.plane import GPU_PLANES, Receipt, ReceiverEnd, Receiving
from umbra.services.weights.planes.receiving import StagedPlanes
from umbra.services.weights.verify import ChangedError, SlotGuard

LOOK_S = 0.05  # how soon a stop is noticed
WAKE_S = 0.2  # how soon the thread notices that it should end
CLOSE_DEADLINE_S = 5.0
RELAY_SILENT_S = 5.0  # until a relay counts as gone

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class StagedVersion:
    """A complete, verified version, in memory of this process until `Receiver.committed`.

    With a `guard` it lies in the arena of this host's daemon.
    """

    version: int
    epoch: int
    manifest: Manifest
    data: Part  # `[manifest.total_bytes]`
    guard: SlotGuard | None = None


class Receiver:
    """A receiver of every new version; a thread of its own stages while the engine decodes.

    Args:
        planes: those that the hub can choose from; closed with this.
        host: names the /dev/shm of this process; empty = find out (`shm_host`).
        serves: endpoint at which a daemon serves others.
        buckets: where it hands out buckets.
        load: called on the receiver's thread with each version that is committed, in place of
            `poll`; what goes wrong is reported to the hub.
        dtype: required of versions, as `weight_hub.dtype` names it; empty = any.
        check_s: seconds of silence after which it asks the hub whether it is still subscribed.
        retry_s: seconds between being dropped and subscribing again.
    """

    def __init__(
        self,
        channel: Channel,
        planes: StagedPlanes,
        host: str = "",
        *,
        serves: str = "",
        buckets: BucketsAt | None = None,
        load: Callable[[StagedVersion], None] | None = None,
        dtype: str = "",
        check_s: float = 5.0,
        retry_s: float = 1.0,
    ) -> None:
        self.failure: UmbraError | None = None
        self.on_news: Callable[[], object] = lambda: None  # `poll` or `check` has something to say
        self._channel = channel
        self._planes = planes
        self._host = host or shm_host()
        self._serves = serves
        self._buckets = buckets
        self._load = load
        self._dtype = dtype
        self._avoided = ""  # a relay that was gone
        self._relays: dict[str, Channel] = {}
        self._hub = channel  # `_channel` is a relay's while there is one on this host
        self._check_s = check_s
        self._retry_s = retry_s
        self._timeout_s = 0.0
        self._end: ReceiverEnd | None = None
        self._reply: m.Subscribed | None = None  # that `_end` is for
        self._asked: Future[m.Message] = Future()  # for the subscription
        self._waiting: m.Prepare | None = None  # until the engine has loaded the version before
        self._receiving: tuple[m.Prepare, Receiving] | None = None
        self._dropped = ""  # why we were unsubscribed, until the thread has seen it
        self._staged: StagedVersion | None = None
        self._committed = False  # the staged version may be loaded
        self._loading: StagedVersion | None = None  # its memory must not be written
        self._changed = threading.Condition()  # guards these, _dropped, failure
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._main, name="umbra-receiver", daemon=True)

    def subscribe(self, timeout_s: float) -> None:
        """Subscribe; waits until the trainer has registered its layout. Versions then follow.

        Raises:
            DeadlineError: no answer within `timeout_s` seconds.
            RejectedError: the hub and this process have no plane in common.
            StartupError: the hub's shared memory cannot be seen from here.
        """
        self._timeout_s = timeout_s
        reply = self._channel.call(self._request(), m.Subscribed, timeout_s=timeout_s)
        self._subscribed(reply)
        self._hub.on_moved = lambda: self._drop("the weight hub was restarted")
        self._thread.start()

    def subscribe_unless(
        self, stopping: threading.Event, timeout_s: float, waiting: Callable[[], object]
    ) -> bool:
        """Subscribe, calling `waiting` meanwhile; return False if `stopping` was set before.

        Then closing the link ends the request.
        """
        executor = ThreadPoolExecutor(1, thread_name_prefix="subscribe")
        subscribed = executor.submit(self.subscribe, timeout_s)
        executor.shutdown(wait=False)
        while not subscribed.done():
            waiting()
            if stopping.wait(LOOK_S):
                return False
        subscribed.result()
        return True

    def check(self) -> None:
        """Raise an error if no more versions can come: the hub is gone, or our thread failed."""
        with self._changed:
            if self.failure is not None:
                raise self.failure

    def poll(self) -> StagedVersion | None:
        """Return the version to load now, to be followed by `committed`; raises as `check`."""
        self.check()
        with self._changed:
            if self._loading is not None or not self._committed:
                return None
            self._loading, self._staged, self._committed = self._staged, None, False
            return self._loading

    def load(
        self,
        staged: StagedVersion,
        apply: Callable[[StagedVersion], None],
        timeout_s: float,
        stopping: threading.Event,
    ) -> StagedVersion | None:
        """Have `apply` load `staged`, and report it; return the version that is loaded.

        None if the version was overwritten before: nothing was loaded, and a newer one comes. If it
        changed under the load, the model is of no use before another version is loaded: this waits
        for that.

        Raises:
            DeadlineError: no other version came within `timeout_s` seconds.
            PeerLostError: `stopping` was set before another version came.
            UmbraError: as `poll`, or what `apply` raises.
        """
        changed = ""
        while True:
            began, error, guard = time.perf_counter(), "", staged.guard
            try:
                if guard is not None and not guard.is_readable:
                    error = "its slot was written again before it was loaded"
                else:
                    apply(staged)
                    if guard is not None:
                        guard.verify()
            except ChangedError as problem:
                changed = error = f"version {staged.version} changed under the load: {problem}"
            except UmbraError as problem:
                self.committed(staged, time.perf_counter() - began, str(problem))
                raise
            self.committed(staged, time.perf_counter() - began, error)
            if not error:
                return staged
            if not changed:
                return None
            log.warning("%s; nothing is served before another version is loaded", error)
            following = self.wait_first(timeout_s, stopping)
            if following is None:
                raise PeerLostError(f"{changed}, and the run stops")
            staged = following

    def committed(self, staged: StagedVersion, commit_s: float, error: str = "") -> None:
        """Report the load of `staged`, for which generation waited; its memory is used again."""
        with self._changed:
            if self._loading is staged:
                self._loading = None
        self._channel.send(
            m.Committed(epoch=staged.epoch, version=staged.version, commit_s=commit_s, error=error)
        )

    def wait_first(self, timeout_s: float, stopping: threading.Event) -> StagedVersion | None:
        """Wait for the first version; None if `stopping` was set before.

        Raises:
            DeadlineError: none came within `timeout_s` seconds.
        """
        deadline = Deadline(timeout_s, f"no weights from the {self._channel.peer}")
        while not stopping.is_set():
            if (staged := self.poll()) is not None:
                return staged
            deadline.check(": has the trainer published its first version?")
            with self._changed:
                self._changed.wait(WAKE_S)
        return None

    def close(self) -> None:
        """Stop staging. Versions that were handed out stay valid."""
        self._hub.on_moved = None
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_DEADLINE_S)
        self._close_end()
        self._planes.close()

    def _close_end(self) -> None:
        if self._end is not None:
            self._end.close()
            self._end = None

    # -- the thread -------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._serve()
            self._give_up()
        except BaseException as error:  # noqa: BLE001 - its owner's thread raises it
            self._fail(foreseen(error, "the receiver of weights"))

    def _serve(self) -> None:
        check_at = time.monotonic() + self._check_s
        subscribe_at = math.inf  # while it is subscribed, or has asked to be
        while not self._closing.is_set() and self.failure is None:
            try:
                idle_s = min(WAKE_S, self._retry_s) if self._receiving is None else 0.0
                message = self._channel.pushes.get(timeout=idle_s)
            except queue.Empty:
                message = None
            now = time.monotonic()
            if message is not None:
                check_at = now + self._check_s
                self._handle(message)
            with self._changed:
                dropped, self._dropped = self._dropped, ""
            if dropped:
                log.info("not subscribed any longer: %s", dropped)
                self._give_up()
                if self._reply is not None and self._reply.plane == "shm":
                    with self._changed:
                        self._staged, self._committed = None, False
                    self._close_end()  # a restarted hub may need its room
                subscribe_at = now + self._retry_s
            elif message is None and now >= subscribe_at:
                # An answer may have to wait for a layout, which whoever is gone will never have.
                subscribe_at, check_at = math.inf, now + self._check_s
                self._ask(self._request())
            elif message is None and subscribe_at == math.inf and now >= check_at:
                # A hub that could not reach us for a moment has dropped us without a message.
                check_at = math.inf
                self._ask(m.HubStatusRequest())
            self._receive()

    def _handle(self, message: m.Message) -> None:
        match message:
            case m.Prepare():
                self._give_up()  # the hub has given up the push in flight
                if self._end is not None:  # else we have asked for another plane
                    self._waiting = message
            case m.Commit():
                with self._changed:
                    if self._staged is not None and self._staged.epoch == message.epoch:
                        self._committed = True
                        self._changed.notify_all()
                self.on_news()
                if self._load is not None and (staged := self.poll()) is not None:
                    began, error = time.perf_counter(), ""
                    try:
                        self._load(staged)
                    except UmbraError as problem:
                        error = str(problem)
                    self.committed(staged, time.perf_counter() - began, error)
            case m.Abort():
                log.info("version %d was aborted: %s", message.version, message.reason)
                under_way = self._receiving[0] if self._receiving is not None else self._waiting
                if under_way is not None and under_way.epoch == message.epoch:
                    self._give_up()
                with self._changed:
                    if self._staged is not None and self._staged.epoch == message.epoch:
                        self._staged, self._committed = None, False
                if message.dropped:
                    self._drop(message.reason)
            case m.Subscribed():
                self._give_up()
                self._subscribed(message)
            case m.HubStatus():
                if not message.subscribed:
                    self._drop("the hub has no subscription of it")
            case _:
                log.warning("the weight hub pushed an unexpected %s", type(message).__name__)

    def _drop(self, reason: str) -> None:
        """Note that we are unsubscribed; from any thread."""
        with self._changed:
            self._dropped = reason

    def _request(self) -> m.Subscribe:
        return m.Subscribe(
            host=self._host,
            planes=self._planes.offered,
            serves=self._serves,
            buckets=self._buckets,
            avoid=self._avoided,
            gpu=self._planes.facts,
        )

    def _ask(self, body: m.Message) -> None:
        """Send a request whose reply arrives among the pushes, in their order."""
        channel, timeout_s = self._channel, self._timeout_s
        if channel is not self._hub and not isinstance(body, m.Subscribe):
            timeout_s = min(RELAY_SILENT_S, timeout_s)

        def answered(future: Future[m.Message]) -> None:
            if future.cancelled() or channel not in (self._hub, self._channel):
                return  # a later request counts, or another relay
            if (error := future.exception()) is None:
                channel.pushes.put(future.result())
            elif channel is not self._hub:
                log.warning("leaves the relay for the weight hub: %s", error)
                self._avoided = channel.endpoint
                self._channel = self._hub
                self._drop("the relay is gone")
            else:
                self._fail(foreseen(error, "the receiver of weights"))

        asked = channel.request(body, timeout_s=timeout_s, on_done=answered)
        if isinstance(body, m.Subscribe):
            self._asked.cancel()  # of two that wait for a layout the hub answers the last one
            self._asked = asked

    def _fail(self, error: UmbraError) -> None:
        with self._changed:
            self.failure = error
            self._changed.notify_all()
        self.on_news()

    def _give_up(self) -> None:
        receiving, self._receiving, self._waiting = self._receiving, None, None
        if receiving is not None:
            receiving[1].close()

    def _receive(self) -> None:
        if self._waiting is not None:
            self._begin(self._waiting)
        if self._receiving is None:
            return
        message, steps = self._receiving
        try:
            next(steps)
        except StopIteration as end:
            self._receiving = None
            self._received(message, end.value)

    def _begin(self, message: m.Prepare) -> None:
        assert self._reply is not None and self._end is not None
        with self._changed:
            if self._loading is not None:
                return
            self._staged, self._committed = None, False  # its memory is written again
        self._waiting = None
        count, buckets = len(message.checksums), len(self._reply.manifest.buckets)
        if count == buckets:
            self._receiving = message, self._end.receive(message)
        else:
            self._received(message, Receipt(error=f"{count} checksums for {buckets} buckets"))

    def _received(self, message: m.Prepare, done: Receipt) -> None:
        assert self._reply is not None
        if not done.error:
            assert done.data is not None
            manifest = self._reply.manifest
            staged = StagedVersion(message.version, message.epoch, manifest, done.data, done.guard)
            with self._changed:
                self._staged, self._committed = staged, False
        self._channel.send(
            m.Ready(
                epoch=message.epoch,
                version=message.version,
                wire_s=done.wire_s,
                stage_s=done.stage_s,
                error=done.error,
                wire_bytes=done.wire_bytes,
                source_lost=done.source_lost,
                in_place=done.guard is not None,
            )
        )
        if done.unusable:
            self._go_without(self._reply.plane, done.error)

    def _go_without(self, plane: str, reason: str) -> bool:
        """Subscribe again without `plane`; False if there is no other."""
        offered = self._planes.offered
        if plane not in GPU_PLANES or plane not in offered or len(offered) == 1:
            return False
        log.warning("without plane %s from now on: %s", plane, reason)
        offered.remove(plane)
        self._ask(self._request())
        return True

    def _subscribed(self, reply: m.Subscribed) -> None:
        if reply.plane == "relay":
            if (relay := self._relays.get(reply.path)) is None:
                relay = self._relays[reply.path] = self._hub.beside(reply.path, "relay", "relay")
            self._channel = relay
            self._ask(m.HubStatusRequest())
            return
        manifest = reply.manifest
        check_manifest(manifest)
        if self._dtype:
            check_dtype(manifest, self._dtype)
        if self._end is not None and (before := self._reply) is not None:
            is_same = before.plane == reply.plane and before.manifest.digest == manifest.digest
            if is_same and (reply.plane != "shm" or before.path == reply.path):
                return  # versions received still count
            self._close_end()  # first, since it may hold what its successor needs
        try:
            end = self._planes.open(reply, self._channel.security)
        except StartupError as error:
            if not self._go_without(reply.plane, str(error)):
                raise
            return
        self._end, self._reply = end, reply
        log.info("weights come over plane %s", reply.plane)
        with self._changed:
            # A load under way keeps its memory alive by itself.
            self._staged, self._loading, self._committed = None, None, False
