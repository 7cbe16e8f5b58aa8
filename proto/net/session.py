"""A process's membership in the run: joining, heartbeats, and the command to stop."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from umbra.proto import messages as m
from umbra.proto.deadline import Deadline
from umbra.proto.errors import (
    DeadlineError,
    PeerLostError,
    RejectedError,
    StartupError,
    UmbraError,
)
from umbra.proto.net.io_thread import Channel, IoThread
from umbra.proto.net.keys import OPEN, Security
from umbra.proto.sockets import check_address

GRACE_S = 60.0  # without a sign of the broker: it is gone, or cut off from us
LEAVE_TIMEOUT_S = 3.0
NAME_WAIT_S = 20.0  # for whoever has our name to fall silent, as after a container's restart
NAME_RETRY_S = 1.0
FAILED = "failed: "  # how the reason begins for which a member leaves after an error
REPLACES_VARIABLE = "UMBRA_REPLACES"  # pid of our predecessor, which our supervisor saw end

log = logging.getLogger(__name__)


class Metrics(Protocol):
    """The rows and spans that this process writes: `services.process.metrics.MetricsFile`."""

    on_push: Callable[..., None] | None

    @property
    def spans(self) -> Any: ...


class Session:
    """Membership of this process in the run whose broker is at `broker`, until its block ends.

    `stopping` is set by whoever wants the process to end: a signal, the broker's drain command, or
    a lost broker. The broker may be away for `grace_s` seconds, to start again say: requests are
    resent meanwhile. If it no longer knows us afterwards, we join again, under the same
    incarnation. `metrics` are published to watchers. `vocabulary` and `routers` are of `m.Join`.

    Raises:
        UsageError: `broker` is no address.
        StartupError: nobody answers within `grace_s` seconds.
        RejectedError: the broker refuses us or our key, or speaks another protocol.
    """

    def __init__(
        self,
        *,
        role: m.Role,
        name: str,
        broker: str,
        endpoints: dict[str, str] | None = None,
        stopping: threading.Event | None = None,
        grace_s: float = GRACE_S,
        security: Security = OPEN,
        metrics: Metrics | None = None,
        vocabulary: int = 0,
        routers: tuple[int, int, int] | None = None,
    ) -> None:
        check_address(broker, "--broker")
        self._hello = m.Join(
            role=role,
            name=name,
            pid=os.getpid(),
            host=socket.gethostname(),
            endpoints=endpoints or {},
            replaces=int(os.environ.get(REPLACES_VARIABLE, "0")),
            vocabulary=vocabulary,
            routers=routers,
        )
        self._grace_s = grace_s
        self._link = IoThread(name, uuid.uuid4().hex[:12], security=security)
        try:
            self._control = self._link.channel(broker, "broker")
            self._welcome = self._join()
        except UmbraError as error:
            self._link.close()
            if not isinstance(error, DeadlineError):
                raise
            raise StartupError(
                f"no broker answers at {broker} within {grace_s:g} s: check --broker, and that "
                "`umbra buffer` is running"
            ) from error
        self.name, self.run_id = name, self._welcome.run_id
        log.info("joined run %s as %s", self.run_id, name)
        self.stopping = stopping or threading.Event()
        self.stop_reason = ""
        self.failure: UmbraError | None = None  # if the end is an error
        self.version = 0
        self._rejoining = False
        self._lock = threading.Lock()
        self._activity = "starting"
        self._progress = 0
        self._moved_at = self._heard_at = self._beat_at = time.monotonic()
        self._pace_s = self._welcome.heartbeat_s
        self._stats: dict[str, float] = {}
        self._metrics = metrics
        if metrics is not None:
            metrics.on_push = partial(self.emit, "push")
        self._hub = ("", "")  # endpoint and incarnation, from the first heartbeat on
        self._weights: Channel | None = None
        self._data: Channel | None = None
        self._weights_known = threading.Event()
        self._link.every(self._welcome.heartbeat_s, self._beat)

    def _join(self) -> m.Welcome:
        """Join; while another process has the name, wait `NAME_WAIT_S` for it to be silent."""
        deadline = Deadline(min(self._grace_s, NAME_WAIT_S))
        while True:
            try:
                return self._control.call(self._hello, m.Welcome, timeout_s=self._grace_s)
            except RejectedError as error:
                if error.code != "name_in_use" or deadline.passed:
                    raise
                log.warning("%s; trying again for %.0f s", error, deadline.left_s)
                time.sleep(NAME_RETRY_S)

    @property
    def data(self) -> Channel:
        """Return the channel to the buffer for samples and batches, which not every key opens."""
        if self._data is None:
            self._data = self._link.channel(self._welcome.data, "buffer", insists=True)
        return self._data

    def weights(self, *, deadline_s: float) -> Channel:
        """Return the channel to the hub; it follows restarts. DeadlineError without one."""
        deadline = Deadline(deadline_s, "no weight hub joined the run")
        while not self._weights_known.wait(0.1):
            if self.stopping.is_set():
                raise PeerLostError(f"stopped while waiting for a weight hub: {self.stop_reason}")
            deadline.check()
        if self._weights is None:
            endpoint, _ = self._hub
            self._weights = self._link.channel(endpoint, "weight hub", server="weight_hub")
            if self._hub[0] != endpoint:  # restarted meanwhile
                self._weights.move(self._hub[0])
        return self._weights

    def progress(self, activity: str, count: int = 1) -> None:
        """Record `count` more units of work of the main loop, which is busy with `activity`."""
        with self._lock:
            self._activity, self._moved_at = activity, time.monotonic()
            self._progress += count

    def waits(self, activity: str) -> None:
        with self._lock:
            self._activity = activity

    @property
    def doing(self) -> tuple[str, float]:
        """Return the activity, and when there was progress last (`time.monotonic`)."""
        with self._lock:
            return self._activity, self._moved_at

    def stats(self, **values: float) -> None:
        with self._lock:
            self._stats.update(values)

    def emit(self, kind: str, **fields: Any) -> None:
        self._control.send(m.Event(kind=kind, fields=fields))

    def drain(self, reason: str) -> None:
        with self._lock:
            self.stop_reason = self.stop_reason or reason
        self.stopping.set()

    def fail(self, error: UmbraError) -> None:
        if self.failure is None:
            self.failure = error
            log.error("%s", error)
        self.drain(str(error))

    def leave(self, reason: str) -> None:
        """Leave the run and close; messages not sent within a few seconds are dropped."""
        try:
            self._control.call(m.Leave(reason=reason), m.Ok, timeout_s=LEAVE_TIMEOUT_S)
        except UmbraError as error:
            log.debug("leaving without an answer: %s", error)
        self._link.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        failed = error or self.failure
        self.leave(f"{FAILED}{failed}" if failed else self.stop_reason or "done")

    # -- the link's thread ------------------------------------------------------------------------

    def _beat(self) -> None:
        self._take_commands()
        now = time.monotonic()
        if now < self._beat_at:
            return  # the broker has asked for fewer
        self._beat_at = now + self._pace_s - self._welcome.heartbeat_s / 2
        if now - self._heard_at > self._grace_s:
            self.fail(PeerLostError(f"{self._control.peer} is silent for {self._grace_s:g} s"))
            return
        with self._lock:
            beat = m.Heartbeat(
                state="draining" if self.stopping.is_set() else "ready",
                activity=self._activity,
                progress=self._progress,
                idle_s=now - self._moved_at,
                stats=dict(self._stats),
                shares=self._metrics.spans.shares() if self._metrics else {},
            )
        if self._metrics and (spans := self._metrics.spans.take()):
            self.emit("spans", spans=spans)
        self._control.request(beat, timeout_s=self._grace_s, on_done=self._heard)

    def _heard(self, future: Future[m.Message]) -> None:
        error = future.exception()
        if isinstance(error, RejectedError) and error.code == "not_member":
            self._rejoin()
        elif isinstance(error, RejectedError) and error.code == "stale_incarnation":
            self.fail(PeerLostError(str(error)))  # not final: whoever took the name may be gone
        elif isinstance(error, RejectedError):
            self.fail(error)
        elif error is None and isinstance(ack := future.result(), m.HeartbeatAck):
            self._heard_at = time.monotonic()
            self.version = ack.version
            self._pace_s = ack.heartbeat_s or self._pace_s
            if ack.weights:
                before, self._hub = self._hub, (ack.weights, ack.weights_incarnation)
                self._weights_known.set()
                if self._weights is not None and before != self._hub:
                    log.info("the weight hub was restarted at %s", ack.weights)
                    self._weights.move(ack.weights)
        self._take_commands()

    def _rejoin(self) -> None:
        """Join again: the broker restarted, or had dropped this member."""
        if not self._rejoining and not self.stopping.is_set():
            self._rejoining = True
            log.warning("%s has lost this member: joining again", self._control.peer)
            self._control.request(self._hello, timeout_s=self._grace_s, on_done=self._rejoined)

    def _rejoined(self, future: Future[m.Message]) -> None:
        self._rejoining = False
        error = future.exception()
        if isinstance(error, RejectedError):
            self.fail(error)
        elif error is None and isinstance(welcome := future.result(), m.Welcome):
            self._heard_at = time.monotonic()
            if self._data is not None and welcome.data != self._welcome.data:
                self._data.move(welcome.data)
            self._welcome = welcome

    def _take_commands(self) -> None:
        while not self._control.pushes.empty():
            message = self._control.pushes.get_nowait()
            if isinstance(message, m.Command):
                log.info("asked to drain: %s", message.reason)
                self.drain(message.reason)
