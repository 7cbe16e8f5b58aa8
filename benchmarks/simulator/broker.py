"""The production broker in simulated time: one thread behind a queue of requests."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from umbra.proto.messages import (
    Header,
    Heartbeat,
    HeartbeatAck,
    Join,
    Message,
    Role,
    SubmitResults,
    Welcome,
)
from umbra.proto.net.server import Request
from umbra.services.buffer.broker import Broker
from umbra.services.buffer.effects import Reply
from umbra.services.buffer.prompts import PromptFeed
from umbra.services.buffer.state import RunState
from umbra.services.buffer.store import MemoryStore
from umbra.services.config import RunConfig
from umbra.services.prompts import Prompt

TICK_S = 0.5
M = TypeVar("M", bound=Message)
Action = Callable[[], object]


class Timeline:
    """A queue of actions; the clock jumps from one to the next. Equal times keep their order."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self._queue: list[tuple[float, int, Action]] = []
        self._count = 0

    def at(self, time: float, action: Action) -> None:
        """Do `action` at `time`, or now if that is over."""
        self._count += 1
        heapq.heappush(self._queue, (max(time, self.now), self._count, action))

    def after(self, delay: float, action: Action) -> None:
        """Do `action` in `delay` seconds."""
        self.at(self.now + delay, action)

    def run(self, until: Callable[[], bool]) -> None:
        """Run due actions until `until` is true after one."""
        while not until():
            self.now, _, action = heapq.heappop(self._queue)
            action()


@dataclass(frozen=True)
class BrokerSpeed:
    """Seconds of the broker's thread (measured: docs/benchmarks.md), and of the way to it."""

    message_s: float = 60e-6
    trajectory_s: float = 60e-6
    commit_s: float = 5e-3  # a reply waits so long for the disk
    latency_s: float = 100e-6  # of a message, either way


class SimulatedBroker:
    """Hands requests to the production broker one after another and delivers its replies."""

    def __init__(self, timeline: Timeline, config: RunConfig, speed: BrokerSpeed) -> None:
        prompts = PromptFeed({"": [Prompt("1", {})]})
        state = RunState(config, MemoryStore(durable=False), prompts)
        welcome = Welcome(run_id="simulated", heartbeat_s=1.0, data="")
        self.broker = Broker(state, welcome, now=timeline.now)
        state.facts.samplings = {}  # simulated tokens have no sampling that could be checked
        self.requests = 0
        self.waited_s = 0.0  # of all requests in the queue
        self.busy_s = 0.0
        self._timeline = timeline
        self._speed = speed
        self._free_at = 0.0
        self._open: dict[tuple[str, int], Callable[[Message], None]] = {}
        timeline.after(TICK_S, self._tick)

    def restart_counts(self) -> None:
        """Count from now on."""
        self.requests, self.waited_s, self.busy_s = 0, 0.0, 0.0

    def ask(self, request: Request, answered: Callable[[Message], None]) -> None:
        """Send `request`; `answered` gets the reply."""
        speed, body = self._speed, request.body
        self._open[request.header.sender, request.header.id] = answered
        cost = speed.message_s
        if isinstance(body, SubmitResults):
            cost += speed.trajectory_s * len(body.trajectories)
        came = self._timeline.now + speed.latency_s
        begin = max(came, self._free_at)
        self._free_at = begin + cost

        def handle() -> None:
            self.requests += 1
            self.waited_s += begin - came
            self.busy_s += cost
            self._deliver(self.broker.handle_all([request], self._timeline.now))

        self._timeline.at(self._free_at, handle)

    def _tick(self) -> None:
        self._deliver(self.broker.tick(self._timeline.now))
        self._timeline.after(TICK_S, self._tick)

    def _deliver(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Reply):
                header = effect.request.header
                answered = self._open.pop((header.sender, header.id))
                wait_s = 0.0 if isinstance(effect.body, HeartbeatAck) else self._speed.commit_s
                later = self._speed.latency_s + wait_s
                self._timeline.after(later, lambda a=answered, b=effect.body: a(b))


class Client:
    """A process of the run as the broker knows it: it joins, sends heartbeats, asks."""

    def __init__(self, broker: SimulatedBroker, timeline: Timeline, name: str, role: Role) -> None:
        self.name = name
        self._broker = broker
        self._timeline = timeline
        self._role: Role = role
        self._asked = 0

    def join(self, joined: Action) -> None:
        """Join the run, then do `joined`."""
        body = Join(role=self._role, name=self.name, pid=1, host="simulated")

        def welcome(reply: Welcome) -> None:
            self._timeline.after(reply.heartbeat_s, self._beat)
            joined()

        self.ask(body, Welcome, welcome)

    def ask(self, body: Message, reply: type[M], answered: Callable[[M], None]) -> None:
        """Send `body`; `answered` gets the reply of type `reply`.

        Raises:
            TypeError: the broker replied something else.
        """
        self._asked += 1
        kind, number = type(body).__name__, self._asked
        header = Header(major=1, minor=0, type=kind, id=number, sender=self.name, incarnation="1")

        def check(message: Message) -> None:
            if not isinstance(message, reply):
                raise TypeError(f"{self.name} asked {body} and got {message}")
            answered(cast(M, message))

        self._broker.ask(Request("data", self.name.encode(), header, body), check)

    def _beat(self) -> None:
        body = Heartbeat(state="ready", activity="", progress=0, idle_s=0.0)
        self.ask(body, HeartbeatAck, lambda ack: self._timeline.after(ack.heartbeat_s, self._beat))
