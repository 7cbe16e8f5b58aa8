"""The comms thread of a connecting process: it owns every socket; no other thread waits on one."""

from __future__ import annotations

import logging
import math
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from umbra.proto import sockets
from umbra.proto.codec import Encoder, Envelope, decode
from umbra.proto.errors import (
    DeadlineError,
    RejectedError,
    UmbraError,
    UsageError,
    WireError,
    service_thread,
)
from umbra.proto.messages import Event, Header, Message, Nack, Role
from umbra.proto.net.keys import OPEN, Security
from umbra.proto.sockets import NOBLOCK, Context, Socket

INSIST_S = 0.3  # between a refusal and the next try, for a channel that insists
LOOK_S = 0.1  # how soon a waiting thread sees that it should stop
STOPPING_S = 1.0
RESEND_S = 3.0  # a lost connection costs at most this long; the server recognises the repetition
CLOSE_DEADLINE_S = 5.0
BURST = 256  # messages taken from one socket before the others get their turn

FAILURES = 5  # broken handshakes in a row, before the first that succeeds, that are no accident
MISMATCH = "one side has no keys, or keys of another run"
LOCKED: dict[int, str] = {  # libzmq does not try again after these
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refuses the key of this process, or its role",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: f"refuses the handshake: {MISMATCH}",
}
EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

M = TypeVar("M", bound=Message)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pending:
    body: Message
    future: Future[Message]
    frames: list[bytes]
    deadline: float
    resend_at: float
    timeout_s: float


class Channel:
    """Requests to one server. Made by `IoThread.channel`, on whose thread its socket is used."""

    def __init__(
        self, link: IoThread, endpoint: str, peer: str, server: Role, *, insists: bool
    ) -> None:
        self.endpoint = endpoint
        self.pushes: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.on_moved: Callable[[], None] | None = None  # on the link's thread: it must be quick
        self.security = link.security
        self._peer = peer
        self._link = link
        self._insists = insists
        self._pending: dict[int, _Pending] = {}
        self._failures = 0.0  # of handshakes, in a row; none counts once one has succeeded
        self._locked = ""  # why it will not be connected, to follow the name of the server
        curve = link.security.connecting(server)
        self.socket = sockets.dealer(link.context, "", link.identity, curve)
        # Its handshakes are watched from before there is a connection.
        self.handshakes = sockets.handshakes(link.context, self.socket, EVENTS)
        try:
            sockets.connect(self.socket, endpoint)
        except UsageError:
            self.close()
            raise

    @property
    def peer(self) -> str:
        return f"{self._peer} at {self.endpoint}"

    def call(
        self,
        body: Message,
        reply: type[M],
        *,
        timeout_s: float,
        stopping: Callable[[], bool] | None = None,
    ) -> M:
        """Send `body`, wait for its reply; once `stopping` is true, for `STOPPING_S` seconds more.

        Raises:
            DeadlineError: no reply within `timeout_s` seconds, or none before we stop.
            RejectedError: the server answered with a Nack, or does not let us in.
            WireError: the server answered with another type.
        """
        future = self.request(body, timeout_s=timeout_s)
        while stopping is not None and not future.done():
            is_last = stopping()
            if not wait([future], STOPPING_S if is_last else LOOK_S).done and is_last:
                raise DeadlineError(f"stopped while waiting for {self.peer}")
        try:
            answer = future.result()
        finally:
            del future  # its error refers to this frame, and so to all that callers hold
        if not isinstance(answer, reply):
            raise WireError(
                f"{self.peer} answered {type(answer).__name__} instead of {reply.__name__}",
                code="unexpected",
            )
        return answer

    def request(
        self,
        body: Message,
        *,
        timeout_s: float,
        on_done: Callable[[Future[Message]], None] | None = None,
    ) -> Future[Message]:
        """Send `body`; the future ends with its reply, or with the errors of `call`.

        `on_done` runs on the link's thread: it must be quick.
        """
        future: Future[Message] = Future()
        if on_done is not None:
            future.add_done_callback(on_done)
        if not self._link.run(lambda: self._start(body, future, timeout_s)):
            _fail(future, _closing(self.peer))
        return future

    def send(self, body: Message) -> None:
        def transmit() -> None:
            try:
                self._transmit(self._link.encoder.encode(body)[1])
            except WireError:
                log.exception("a message to %s was not sent", self.peer)

        self._link.run(transmit)

    def beside(self, endpoint: str, peer: str, server: Role) -> Channel:
        """Open another channel; `peer` names its server, of role `server`, in errors."""
        return self._link.channel(endpoint, peer, server=server)

    def move(self, endpoint: str) -> None:
        """Connect to the restarted server at `endpoint`, and send it all open requests."""

        def connect() -> None:
            if endpoint != self.endpoint:
                self.socket.disconnect(self.endpoint)
                self.socket.connect(endpoint)
                self.endpoint = endpoint
            for pending in self._pending.values():
                self._transmit(pending.frames)
            if self.on_moved is not None:
                self.on_moved()

        self._link.run(connect)

    # -- the link's thread ------------------------------------------------------------------------

    def _start(self, body: Message, future: Future[Message], timeout_s: float) -> None:
        if self._locked:
            return _fail(future, self._locked_out(self._locked))
        try:
            number, frames = self._link.encoder.encode(body)
        except WireError as error:
            return _fail(future, error)
        now = time.monotonic()
        self._pending[number] = _Pending(
            body, future, frames, now + timeout_s, now + RESEND_S, timeout_s
        )
        self._transmit(frames)

    def _transmit(self, frames: list[bytes]) -> None:
        # If nobody reads at the other end: requests are resent, and their deadline ends that.
        with suppress(zmq.Again):
            self.socket.send_multipart(frames, NOBLOCK)

    def receive(self) -> None:
        for frames in _burst(self.socket):
            try:
                self._received(decode(frames))
            except WireError as error:
                if error.code == "protocol":  # it will never answer in a way that we understand
                    self.fail_all(RejectedError(str(error), code=error.code))
                log.warning("dropped a message from %s: %s", self.peer, error)

    def _received(self, envelope: Envelope) -> None:
        if envelope.header.reply_to is None:
            self.pushes.put(envelope.body)
            return
        pending = self._pending.pop(envelope.header.reply_to, None)
        if pending is None:
            return  # the second answer to a resent request, or one that came after its deadline
        if not isinstance(answer := envelope.body, Nack):
            with suppress(InvalidStateError):  # cancelled by its owner
                pending.future.set_result(answer)
        elif self._insists and answer.code == "not_member":
            # Ask again soon, under a new number: the old one has had its answer.
            number, pending.frames = self._link.encoder.encode(pending.body)
            pending.resend_at = time.monotonic() + INSIST_S
            self._pending[number] = pending
        else:
            _fail(pending.future, RejectedError(f"{self.peer}: {answer.reason}", code=answer.code))

    def tick(self, now: float) -> float:
        """Fail overdue requests, resend late ones; return when there is more to do."""
        next_at = now + RESEND_S
        for number, pending in list(self._pending.items()):
            if now >= pending.deadline or pending.future.cancelled():
                del self._pending[number]
                what = f"{type(pending.body).__name__} within {pending.timeout_s:g} s"
                error: UmbraError = DeadlineError(f"no answer from {self.peer} to {what}")
                if self._failures >= FAILURES:  # it seems; what stands between may do that as well
                    error = self._locked_out(f"breaks off the connection: {MISMATCH}")
                _fail(pending.future, error)
                continue
            if now >= pending.resend_at:
                pending.resend_at = now + RESEND_S
                self._transmit(pending.frames)
            next_at = min(next_at, pending.deadline, pending.resend_at)
        return next_at

    def shook_hands(self) -> None:
        while self.handshakes.poll(0):
            event = recv_monitor_message(self.handshakes)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._failures, self._locked = -math.inf, ""
            elif event in LOCKED:
                self._locked = LOCKED[event]
            else:
                self._failures += 1
        if self._locked:
            self.fail_all(self._locked_out(self._locked))

    def close(self) -> None:
        if not self.socket.closed:
            self.socket.disable_monitor()
        self.handshakes.close(linger=0)
        self.socket.close()

    def fail_all(self, error: UmbraError) -> None:
        for pending in self._pending.values():
            _fail(pending.future, error)
        self._pending.clear()

    def _locked_out(self, why: str) -> RejectedError:
        reason = f"{self.peer} {why}: check security.keys (--keys) on both sides"
        return RejectedError(reason, code="locked_out")


class IoThread:
    """Sockets of one process, polled by one thread; other threads talk to it through `run`."""

    def __init__(self, name: str, incarnation: str, *, security: Security = OPEN) -> None:
        self.name = name
        self.incarnation = incarnation
        self.security = security
        # The same on every socket. A ROUTER sends to whoever has an identity, and lets others take
        # it over: so it is a secret.
        self.identity = f"{name}.{secrets.token_hex(8)}".encode()
        self.encoder = Encoder(name, incarnation)
        self.context: Context = zmq.Context()
        self._channels: list[Channel] = []
        self._handlers: dict[Socket, Callable[[], None]] = {}
        self._timers: list[tuple[float, float, Callable[[], None]]] = []  # when, period, job
        self._jobs: deque[Callable[[], None]] = deque()
        self._closing = threading.Event()
        self._ended = False  # no job is taken any more
        self._lock = threading.Lock()
        self._poller = zmq.Poller()
        self._waker = sockets.Waker(self.context, "wake")
        self._watch(self._waker.socket, self._waker.drain)
        self._thread = service_thread(self._main, "umbra-link")
        self._thread.start()

    def run(self, job: Callable[[], None]) -> bool:
        """Queue `job` for the thread; False if the thread has ended and will not do it."""
        with self._lock:
            if self._ended:
                return False
            self._jobs.append(job)
            self._waker.wake()
            return True

    def channel(
        self, endpoint: str, peer: str, *, server: Role = "buffer", insists: bool = False
    ) -> Channel:
        """Return a channel to the server at `endpoint`, which must have the key of role `server`.

        `peer` names it in errors. A channel that `insists` repeats requests that were refused
        because we are no member: we join again. UsageError if `endpoint` is no address.
        """
        opened: Future[Channel] = Future()

        def connect() -> None:
            try:
                channel = Channel(self, endpoint, peer, server, insists=insists)
            except UsageError as error:
                return opened.set_exception(error)
            self._channels.append(channel)
            self._watch(channel.socket, channel.receive)
            self._watch(channel.handshakes, channel.shook_hands)
            return opened.set_result(channel)

        if not self.run(connect):
            raise _closing(f"{peer} at {endpoint}")
        return opened.result()

    def subscribe(self, endpoint: str, on_event: Callable[[Header, Event], None]) -> None:
        """Watch telemetry at `endpoint`; `on_event` runs on the link's thread: it must be quick."""

        def connect() -> None:
            curve = self.security.connecting("buffer")
            socket = sockets.subscriber(self.context, endpoint, curve)
            self._watch(socket, partial(_hear, socket, on_event))

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

    def _watch(self, socket: Socket, handler: Callable[[], None]) -> None:
        self._handlers[socket] = handler
        self._poller.register(socket, zmq.POLLIN)

    def _main(self) -> None:
        next_tick = time.monotonic()
        while not self._closing.is_set():
            timeout_s = max(0.0, next_tick - time.monotonic())
            for socket, _ in self._poller.poll(timeout=round(timeout_s * 1000) + 1):
                self._handlers[socket]()
            while self._jobs:
                self._jobs.popleft()()
            next_tick = self._tick()
        self._shut()

    def _shut(self) -> None:
        with self._lock:
            self._ended = True
        while self._jobs:  # jobs posted before the close still run
            self._jobs.popleft()()
        for channel in self._channels:
            channel.fail_all(_closing(channel.peer))
            channel.close()
        self._waker.close()
        for socket in self._handlers:  # subscriptions; the others are closed
            socket.close(linger=0)
        self.context.term()

    def _tick(self) -> float:
        now = time.monotonic()
        next_at = now + 1.0
        for index, (due, period_s, job) in enumerate(self._timers):
            if now >= due:
                job()
                due = now + period_s
                self._timers[index] = (due, period_s, job)
            next_at = min(next_at, due)
        return min([next_at, *(channel.tick(now) for channel in self._channels)])


def _burst(socket: Socket) -> Iterator[list[bytes]]:
    for _ in range(BURST):
        try:
            frames = socket.recv_multipart(NOBLOCK)
        except zmq.Again:
            return
        yield frames


def _hear(socket: Socket, on_event: Callable[[Header, Event], None]) -> None:
    for frames in _burst(socket):
        try:
            envelope = decode(frames)
        except WireError as error:
            log.warning("dropped an event: %s", error)
            continue
        if isinstance(envelope.body, Event):
            on_event(envelope.header, envelope.body)


def _closing(peer: str) -> DeadlineError:
    return DeadlineError(f"the process is closing while waiting for {peer}")


def _fail(future: Future[Message], error: Exception) -> None:
    with suppress(InvalidStateError):  # cancelled by its owner
        future.set_exception(error)
