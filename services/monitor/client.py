"""Talks to a run's buffer without joining the run: looking changes nothing, and asking may.

Any member can make up the events that a `Watch` gets, and they are drawn in a terminal: so numbers
are finite, and nothing that is kept has control characters.
"""

from __future__ import annotations

import threading
import uuid
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Annotated, Any, Self, TypeVar

import msgspec
import zmq
from msgspec import Meta

from umbra.proto import messages as m
from umbra.proto.bounds import PARTS, Name, Number, one_line, printable
from umbra.proto.errors import DeadlineError, RejectedError, UsageError
from umbra.proto.messages import Event, Header, Status
from umbra.proto.net.io_thread import IoThread
from umbra.proto.net.keys import OPEN, Security
from umbra.proto.sockets import check_address
from umbra.services.process.metrics import Span

M = TypeVar("M", bound=m.Message)


class StatusClient:
    """A connection to the buffer at `broker`.

    Each call raises DeadlineError if nobody answers within `timeout_s` seconds.
    """

    def __init__(self, broker: str, security: Security = OPEN) -> None:
        check_address(broker, "--broker")
        self.broker = broker
        incarnation = uuid.uuid4().hex[:12]
        self._link = IoThread(f"monitor-{incarnation}", incarnation, security=security)
        self._channel = self._link.channel(broker, "buffer", server="buffer")
        # Nothing that we send is worth waiting for at the end.
        self._link.run(lambda: self._channel.socket.set(zmq.LINGER, 0))

    def status(self, timeout_s: float) -> m.Status:
        return self._ask(m.StatusRequest(), m.Status, timeout_s)

    def ping(self, timeout_s: float) -> m.Pong:
        return self._ask(m.Ping(), m.Pong, timeout_s)

    def drain(self, timeout_s: float, *, member: str = "", reason: str = "") -> m.Ok:
        """Have a member leave, or all of them.

        UsageError if there is no such `member` or the run needs it, RejectedError if it is ending.
        """
        try:
            return self._ask(m.Drain(member=member, reason=reason), m.Ok, timeout_s)
        except RejectedError as error:
            if error.code == "not_drainable":
                raise UsageError(str(error)) from error
            raise

    def close(self) -> None:
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def _ask(self, body: m.Message, reply: type[M], timeout_s: float) -> M:
        try:
            return self._channel.call(body, reply, timeout_s=timeout_s)
        except DeadlineError as error:
            raise DeadlineError(
                f"no buffer answers at {self.broker} within {timeout_s:g} s: check --broker, and "
                "that the run is still up"
            ) from error


PUSHES_KEPT = 24
ROLLOUTS_KEPT = 16
SPANS_KEPT = 1_500  # of each member
SENDERS_KEPT = 256


class PushEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A version that reached a receiver, with the seconds of each phase."""

    version: int
    receiver: Name
    plane: Name
    bytes: int
    snapshot_s: Number
    wire_s: Number
    stage_s: Number
    commit_s: Number
    total_s: Number


class RolloutEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout that was trained on."""

    step: int
    sample: Name
    prompt_id: Name
    reward: Number
    reward_parts: Annotated[dict[Name, Number], Meta(max_length=PARTS)]
    tokens: int
    turns: int
    finish_reason: Name
    staleness: int
    prompt: str
    response: str

    def __post_init__(self) -> None:
        for name in ("prompt", "response"):  # a model's words
            msgspec.structs.force_setattr(self, name, printable(getattr(self, name)))


class Feed:
    """A store of recent events, written by one thread and read by others."""

    def __init__(self) -> None:
        self.invalid = 0  # events that are not what they should be
        self._lock = threading.Lock()
        self._pushes: deque[PushEvent] = deque(maxlen=PUSHES_KEPT)
        self._rollouts: deque[RolloutEvent] = deque(maxlen=ROLLOUTS_KEPT)
        self._spans: OrderedDict[str, deque[Span]] = OrderedDict()

    def receive(self, header: Header, event: Event) -> None:
        with self._lock:
            try:
                self._take(header, event.kind, event.fields)
            except msgspec.ValidationError:
                self.invalid += 1

    def look(self, status: Status) -> Look:
        """Return `status` with the recent events; newest last."""
        with self._lock:
            spans = {name: list(spans) for name, spans in self._spans.items()}
            return Look(status, list(self._pushes), list(self._rollouts), spans)

    def _take(self, header: Header, kind: str, fields: dict[str, Any]) -> None:
        spans: list[Span] = []
        if kind == "push":
            push = msgspec.convert(fields, PushEvent, strict=False)
            self._pushes.append(push)
            spans.append(Span("push", header.sent_at - push.total_s, header.sent_at))
        elif kind == "rollout":
            self._rollouts.append(msgspec.convert(fields, RolloutEvent))
        elif kind == "spans":
            spans = msgspec.convert(fields.get("spans"), list[Span])
        if spans:
            kept = self._spans.setdefault(header.sender, deque(maxlen=SPANS_KEPT))
            kept.extend(span._replace(name=one_line(span.name)) for span in spans)
            self._spans.move_to_end(header.sender)
        if len(self._spans) > SENDERS_KEPT:
            self._spans.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Look:
    """The state of a run at one moment."""

    status: Status
    pushes: list[PushEvent] = field(default_factory=list[PushEvent])
    rollouts: list[RolloutEvent] = field(default_factory=list[RolloutEvent])
    spans: dict[str, list[Span]] = field(default_factory=dict[str, list[Span]])


class Watch(StatusClient):
    """A client that listens to recent events too: pushes, rollouts, spans."""

    def __init__(self, broker: str, security: Security = OPEN) -> None:
        super().__init__(broker, security)
        self._feed = Feed()
        self._endpoint = ""

    def look(self, timeout_s: float) -> Look:
        """Return the status; DeadlineError if nobody answers within `timeout_s` seconds."""
        status = self.status(timeout_s)
        if status.events and status.events != self._endpoint:
            self._endpoint = status.events
            self._link.subscribe(status.events, self._feed.receive)
        return self._feed.look(status)
