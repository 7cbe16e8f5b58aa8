"""The production broker at work in simulated time: one thread, behind a line of requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from umbra.deploy.simulator.answers import BYTES_PER_PROMPT_TOKEN, BYTES_PER_TOKEN, size_of
from umbra.deploy.simulator.tables import BrokerSpeed
from umbra.deploy.simulator.timeline import Timeline
from umbra.proto.messages import (
    BatchLease,
    Header,
    Heartbeat,
    HeartbeatAck,
    Join,
    Message,
    Nack,
    ReturnSamples,
    Role,
    SampleLeases,
    ScoringLeases,
    SubmitScores,
    SubmitTrajectories,
)
from umbra.proto.net.server import Request
from umbra.services.buffer.broker import Broker
from umbra.services.buffer.effects import Effect, Notify, Reply

TICK_S = 0.5  # how late a deadline may be noticed
M = TypeVar("M", bound=Message)
Answered = Callable[[Message], None]


class SimulatedBroker:
    """Takes requests in, hands them to the broker one after another, and delivers what it says.

    Args:
        timeline: of the simulation.
        make_broker: builds a broker at a time, from the store of the one before.
        speed: of its thread, its link and its disk.
        latency_s: of a message, either way.
        flush_tokens: generators save partials every so many tokens; 0 = never. Only their cost is
            simulated, when the sample is submitted.
    """

    def __init__(
        self,
        timeline: Timeline,
        make_broker: Callable[[float], Broker],
        speed: BrokerSpeed,
        latency_s: float,
        flush_tokens: int,
    ) -> None:
        self.broker = make_broker(timeline.now)
        self.requests = 0
        self.waited_s = 0.0  # of all requests in the line
        self.busy_s = 0.0
        self.is_down = False
        self._timeline = timeline
        self._make_broker = make_broker
        self._speed = speed
        self._latency_s = latency_s
        self._flush_tokens = flush_tokens
        self._free_at = 0.0
        self._life = 0  # counts starts of the broker
        self._clients: dict[bytes, Client] = {}
        # Requests without an answer: they are sent again when the broker has started again.
        self._open: dict[tuple[str, str, int], tuple[Request, Client, Answered]] = {}
        timeline.every(TICK_S, self._tick)

    def restart_counts(self) -> None:
        """Count from now on."""
        self.requests, self.waited_s, self.busy_s = 0, 0.0, 0.0

    def ask(self, client: Client, request: Request, answered: Answered) -> None:
        """Send `request`; `answered` gets the reply unless the client dies before."""
        header = request.header
        self._open[header.sender, header.incarnation, header.id] = (request, client, answered)
        self._queue(request)

    def connect(self, client: Client) -> None:
        """What is pushed to the client's identity gets to it."""
        self._clients[client.identity] = client

    def disconnect(self, client: Client) -> None:
        """The client is dead: nothing is sent again for it."""
        self._clients.pop(client.identity, None)
        for key in [key for key, (_, whose, _) in self._open.items() if whose is client]:
            del self._open[key]

    def crash(self, recovery_s: float) -> None:
        """The broker dies and starts again, from what it has stored."""
        if self.is_down:
            return
        self.broker.save()
        self.is_down = True
        self._life += 1
        self._timeline.after(recovery_s, self._recover)

    def _recover(self) -> None:
        self.is_down = False
        self.broker = self._make_broker(self._timeline.now)
        self._free_at = self._timeline.now
        for request, _, _ in list(self._open.values()):
            self._queue(request)

    def _queue(self, request: Request) -> None:
        if self.is_down:
            return
        came = self._timeline.now + self._latency_s
        begin = max(came, self._free_at)
        cost = self._cost(request.body)
        self._free_at = begin + cost
        life = self._life

        def handle() -> None:
            if life != self._life:
                return
            self.requests += 1
            self.waited_s += begin - came
            self.busy_s += cost
            self._carry_out(self.broker.handle(request, self._timeline.now))

        self._timeline.at(self._free_at, handle)

    def _tick(self) -> None:
        if not self.is_down:
            self._carry_out(self.broker.tick(self._timeline.now))
            self.broker.save()

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Reply(request, body):
                    self._reply(request, body)
                case Notify(identity, body):
                    client = self._clients.get(identity)
                    if client is not None:
                        self._deliver(client, client.incarnation, client.pushed, body)
                case _:
                    pass  # rows of metrics

    def _reply(self, request: Request, body: Message) -> None:
        header = request.header
        found = self._open.pop((header.sender, header.incarnation, header.id), None)
        if found is None:
            return
        _, client, answered = found
        cost = self._reply_cost(body)
        if cost:
            self._free_at = max(self._free_at, self._timeline.now) + cost
            self.busy_s += cost
        wait_s = 0.0 if isinstance(body, HeartbeatAck) else self._speed.commit_s
        self._deliver(client, header.incarnation, answered, body, cost + wait_s)

    def _deliver(
        self,
        client: Client,
        incarnation: str,
        taken: Answered,
        body: Message,
        seconds: float = 0.0,
    ) -> None:
        def arrive() -> None:
            if client.is_alive and client.incarnation == incarnation:
                taken(body)

        self._timeline.after(seconds + self._latency_s, arrive)

    def _cost(self, body: Message) -> float:
        speed = self._speed
        cost = speed.message_s
        match body:
            case SubmitTrajectories(trajectories=trajectories):
                for trajectory in trajectories:
                    tokens, prompt = size_of(trajectory)
                    cost += speed.trajectory_s + self._wire_s(tokens, prompt)
                    if self._flush_tokens:
                        flushes = tokens // self._flush_tokens
                        mean = speed.message_s / 8 + self._wire_s(tokens / 2, prompt)
                        cost += flushes * (speed.trajectory_s / 2 + mean)
            case ReturnSamples(samples=samples):
                cost += len(samples) * speed.trajectory_s / 2
            case SubmitScores(scores=scores):
                cost += len(scores) * speed.trajectory_s / 2
            case _:
                pass
        return cost

    def _reply_cost(self, body: Message) -> float:
        """For the bytes that leave: those of batches and of trajectories to score."""
        match body:
            case BatchLease(trajectories=trajectories):
                sizes = [size_of(trajectory) for trajectory in trajectories]
            case ScoringLeases(tasks=tasks):
                sizes = [size_of(task.trajectory) for task in tasks]
            case SampleLeases(tasks=tasks):
                sizes = [size_of(task.partial) for task in tasks if task.partial is not None]
            case _:
                return 0.0
        return sum(self._wire_s(tokens, prompt) for tokens, prompt in sizes)

    def _wire_s(self, tokens: float, prompt: float) -> float:
        size = tokens * BYTES_PER_TOKEN + prompt * BYTES_PER_PROMPT_TOKEN
        return size / self._speed.bytes_per_s


class Client:
    """A process of the run, as far as the broker knows it: it joins, beats, asks.

    Args:
        pushed: gets what the broker sends unasked.
        expelled: called when the broker took it for dead though it was alive.
    """

    def __init__(
        self,
        desk: SimulatedBroker,
        timeline: Timeline,
        name: str,
        role: Role,
        pushed: Answered,
        expelled: Callable[[], object],
    ) -> None:
        self.name = name
        self.is_alive = False
        self.incarnation = ""
        self.pushed = pushed
        self._expelled = expelled
        self._desk = desk
        self._timeline = timeline
        self._role: Role = role
        self._starts = 0
        self._asked = 0

    @property
    def identity(self) -> bytes:
        return f"{self.name}.{self._starts}".encode()

    def join(self, joined: Callable[[], None]) -> None:
        """The process has started, and joins the run."""
        self._starts += 1
        self.incarnation = str(self._starts)
        self.is_alive = True
        self._desk.connect(self)
        body = Join(role=self._role, name=self.name, pid=1, host="simulated", package_version="")

        def welcome(_reply: Message) -> None:
            self._beat(self._starts)
            joined()

        self.ask(body, Message, welcome)

    def die(self) -> None:
        """The process is gone, without a word."""
        self._desk.disconnect(self)
        self.is_alive = False

    def ask(self, body: Message, reply: type[M], answered: Callable[[M], None]) -> None:
        """Send `body`; `answered` gets the reply of type `reply`, and a refusal is an error.

        Raises:
            RuntimeError: the broker refused what no member of a run should be refused.
        """
        self._asked += 1
        header = Header(
            major=1,
            minor=0,
            type=type(body).__name__,
            id=self._asked,
            sender=self.name,
            incarnation=self.incarnation,
        )

        def check(message: Message) -> None:
            if isinstance(message, reply):
                answered(message)
            elif isinstance(message, Nack) and message.code in ("stale_incarnation", "not_member"):
                self._expelled()
            else:
                raise RuntimeError(f"{self.name} asked {body} and was told {message}")

        self._desk.ask(self, Request("data", self.identity, header, body), cast(Answered, check))

    def _beat(self, start: int) -> None:
        if start != self._starts or not self.is_alive:
            return
        body = Heartbeat(state="ready", activity="", progress=0, idle_s=0.0)

        def beaten(ack: HeartbeatAck) -> None:
            self._timeline.after(ack.heartbeat_s, lambda: self._beat(start))

        self.ask(body, HeartbeatAck, beaten)
