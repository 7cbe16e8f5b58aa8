"""The comms thread of a connecting process: it owns every socket; no other thread waits on one."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress

import zmq

from umbra.proto import sockets
from umbra.proto.codec import Encoder, decode
from umbra.proto.errors import DeadlineError, RejectedError, UsageError, WireError, service_thread
from umbra.proto.messages import Event, Header, Role
from umbra.proto.net.channel import Channel
from umbra.proto.net.keys import OPEN, Security

CLOSE_DEADLINE_S = 5.0
HEARD_AT_ONCE = 256  # events taken from one subscription before the others get their turn

log = logging.getLogger(__name__)


class IoThread:
    """Sockets of one process, polled by one thread; other threads talk to it through `run`."""

    def __init__(self, name: str, incarnation: str, *, security: Security = OPEN) -> None:
        self.name = name
        self.incarnation = incarnation
        self.security = security
        self.identity = sockets.unguessable(name)  # the same on every socket
        self.encoder = Encoder(name, incarnation)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._channels: list[Channel] = []
        self._by_socket: dict[zmq.Socket[bytes], Channel] = {}
        self._subscriptions: dict[zmq.Socket[bytes], Callable[[Header, Event], None]] = {}
        self._publisher: zmq.Socket[bytes] | None = None
        self._timers: list[tuple[float, float, Callable[[], None]]] = []
        self._jobs: deque[Callable[[], None]] = deque()
        self._closing = threading.Event()
        self._wake_lock = threading.Lock()
        self._wake_in, self._wake_out = sockets.pair(self.context, "wake")
        self._poller = zmq.Poller()
        self._poller.register(self._wake_in, zmq.POLLIN)
        self._thread = service_thread(self._main, "umbra-link")
        self._thread.start()

    def run(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)
        with self._wake_lock:
            with suppress(zmq.Again):  # full: it is awake already, with plenty to do
                if not self._wake_out.closed:
                    self._wake_out.send(b"", zmq.NOBLOCK)

    def channel(
        self, endpoint: str, peer: str, *, server: Role = "buffer", insists: bool = False
    ) -> Channel:
        """A channel to the server at `endpoint`, which must have the key of role `server`.

        `peer` names it in errors. A channel that `insists` repeats what was refused because we are
        no member: we join again.

        Raises:
            UsageError: `endpoint` is no address.
        """
        made: Future[Channel] = Future()

        def connect() -> None:
            try:
                channel = Channel(self, endpoint, peer, server, insists=insists)
            except UsageError as error:
                made.set_exception(error)
                return
            self._channels.append(channel)
            for one in (channel.socket, channel.handshakes):
                self._by_socket[one] = channel
                self._poller.register(one, zmq.POLLIN)
            made.set_result(channel)

        self.run(connect)
        return made.result()

    def publish_to(self, endpoint: str) -> None:
        """Open the telemetry socket, instead of an earlier one."""

        def connect() -> None:
            if self._publisher is not None:
                self._publisher.close()
            curve = self.security.connecting("buffer")
            self._publisher = sockets.publisher(self.context, endpoint, curve)

        self.run(connect)

    def publish(self, event: Event) -> None:
        def send() -> None:
            if self._publisher is not None:
                sockets.publish(self._publisher, self.encoder, event)

        self.run(send)

    def subscribe(
        self, endpoint: str, topics: Sequence[bytes], on_event: Callable[[Header, Event], None]
    ) -> None:
        """Watch telemetry at `endpoint`; `on_event` runs on the link's thread: it must be quick."""

        def connect() -> None:
            curve = self.security.connecting("buffer")
            socket = sockets.subscriber(self.context, endpoint, topics, curve)
            self._subscriptions[socket] = on_event
            self._poller.register(socket, zmq.POLLIN)

        self.run(connect)

    def every(self, period_s: float, job: Callable[[], None]) -> None:
        self.run(lambda: self._timers.append((time.monotonic(), period_s, job)))

    def close(self) -> None:
        """Fail open requests, flush for at most LINGER, stop the thread."""
        if self._closing.is_set():
            return
        self._closing.set()
        self.run(lambda: None)
        self._thread.join(CLOSE_DEADLINE_S)

    # -- the thread -------------------------------------------------------------------------------

    def _main(self) -> None:
        next_tick = time.monotonic()
        while not self._closing.is_set():
            timeout_s = max(0.0, next_tick - time.monotonic())
            for socket, _ in self._poller.poll(timeout=round(timeout_s * 1000) + 1):
                channel = self._by_socket.get(socket)
                if socket in self._subscriptions:
                    self._hear(socket)
                elif channel is None:
                    sockets.drain(self._wake_in)
                elif socket is channel.socket:
                    self._receive(channel)
                else:
                    channel.shook_hands()
            while self._jobs:
                self._jobs.popleft()()
            next_tick = self._tick()
        self._shut()

    def _receive(self, channel: Channel) -> None:
        while True:
            try:
                frames = channel.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                channel.received(decode(frames))
            except WireError as error:
                if error.code == "protocol":  # it will never answer in a way that we understand
                    channel.fail_all(RejectedError(str(error), code=error.code))
                log.warning("dropped a message from %s: %s", channel.peer, error)
                channel.undecoded(frames, error)

    def _hear(self, socket: zmq.Socket[bytes]) -> None:
        for _ in range(HEARD_AT_ONCE):
            try:
                _topic, *frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                envelope = decode(frames)
            except WireError as error:
                log.warning("dropped an event: %s", error)
                continue
            if isinstance(envelope.body, Event):
                self._subscriptions[socket](envelope.header, envelope.body)

    def _tick(self) -> float:
        now = time.monotonic()
        next_at = now + 1.0
        for index, (due, period_s, job) in enumerate(self._timers):
            if now >= due:
                job()
                due = now + period_s
                self._timers[index] = (due, period_s, job)
            next_at = min(next_at, due)
        for channel in self._channels:
            next_at = min(next_at, channel.tick(now))
        return next_at

    def _shut(self) -> None:
        while self._jobs:  # what was posted before the close is still sent
            self._jobs.popleft()()
        for channel in self._channels:
            channel.fail_all(
                DeadlineError(f"the process is closing while waiting for {channel.peer}")
            )
            channel.close()
        for socket in self._subscriptions:
            socket.close(linger=0)
        if self._publisher is not None:
            self._publisher.close()
        with self._wake_lock:
            self._wake_out.close(linger=0)
        self._wake_in.close(linger=0)
        self.context.term()
