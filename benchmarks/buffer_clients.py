"""Generators and a trainer without models, for benchmarks and soaks of the buffer.

They speak the protocol over plain sockets, many generators in one process, so that the client's own
cost is small and the same for any number of them.
"""

from __future__ import annotations

import multiprocessing
import random
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from umbra.proto import sockets
from umbra.proto.codec import Encoder, decode
from umbra.proto.messages import (
    BatchLease,
    CheckpointSaved,
    CommitAck,
    CommitBatch,
    Heartbeat,
    HeartbeatAck,
    Join,
    LeaseBatch,
    LeaseTasks,
    Message,
    Nack,
    SubmitResults,
    TaskLeases,
    Welcome,
)
from umbra.proto.records import Task, Trajectory, VersionSpan, pack_float32, pack_int32

PROMPT_TOKENS = 200
RESPONSE_TOKENS = 1000
VOCABULARY = range(32_000)
RESEND_S = 3.0
WINDOW = 8  # messages of a generator that wait for their ack
CHECKPOINT_EVERY = 4  # steps
PRODUCERS = 2  # processes


def template() -> Trajectory:
    """9 KB: 200 prompt tokens, 1,000 response tokens with logprobs and version spans."""
    dice = random.Random(0)
    return Trajectory(
        sample_id="",
        group_id="",
        prompt_id="",
        attempt=0,
        prompt_ids=pack_int32(dice.choices(VOCABULARY, k=PROMPT_TOKENS)),
        response_ids=pack_int32(dice.choices(VOCABULARY, k=RESPONSE_TOKENS)),
        loss_mask=b"\1" * RESPONSE_TOKENS,
        logprobs=pack_float32([-dice.expovariate(2.0) for _ in range(RESPONSE_TOKENS)]),
        spans=[VersionSpan(version=0, start=0, end=RESPONSE_TOKENS)],
        finish_reason="stop",
        reward=0.5,
        generator="generator",
    )


_TEMPLATE = template()


def answer(task: Task) -> Trajectory:
    """Return a 9 KB answer to `task`; `started_at` is now."""
    return msgspec.structs.replace(
        _TEMPLATE,
        sample_id=task.sample_id,
        group_id=task.group_id,
        prompt_id=task.prompt_id,
        attempt=task.attempt,
        started_at=time.time(),
    )


def run_workers(
    workers: list[tuple[Callable[..., None], tuple[Any, ...]]],
    on_go: Callable[[], object] = lambda: None,
) -> list[Any]:
    """Start all processes, let them go together once each is ready, collect what they found."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for body, arguments in workers:
        ours, theirs = context.Pipe()
        process = context.Process(target=body, args=(theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    for pipe in pipes:
        pipe.recv()
    for pipe in pipes:
        pipe.send("go")
    on_go()
    found = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return found


@dataclass(slots=True)
class Wire:
    """One process of the run, as the buffer sees it: a control and a data socket."""

    name: str
    encoder: Encoder
    control: zmq.Socket[bytes]
    data: zmq.Socket[bytes]
    pace_s: float  # between heartbeats, as the buffer asks for
    beat_at: float = 0.0
    open: dict[int, tuple[list[bytes], float]] = field(default_factory=dict)  # frames, sent at

    def ask(self, body: Message) -> int:
        """Send a request; its number."""
        number, frames = self.encoder.encode(body)
        self.open[number] = (frames, time.monotonic())
        self.data.send_multipart(frames)
        return number

    def receive(self) -> tuple[int, Message] | None:
        """Return a reply to an open request, if there is one."""
        try:
            frames = self.data.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        envelope = decode(frames)
        number = envelope.header.reply_to or 0
        if self.open.pop(number, None) is None:
            return self.receive()
        return number, envelope.body

    def upkeep(self, now: float) -> None:
        """Send heartbeats, and resend unanswered requests."""
        if now >= self.beat_at:
            self.beat_at = now + self.pace_s
            beat = Heartbeat(state="ready", activity="bench", progress=0, idle_s=0.0)
            self.control.send_multipart(self.encoder.encode(beat)[1])
        while self.control.poll(0):
            ack = decode(self.control.recv_multipart()).body
            if isinstance(ack, HeartbeatAck) and ack.heartbeat_s != self.pace_s:
                self.pace_s = ack.heartbeat_s
                self.beat_at = now + random.random() * self.pace_s  # as if each had its own start
        for number, (frames, sent_at) in self.open.items():
            if now - sent_at > RESEND_S:
                self.open[number] = (frames, now)
                self.data.send_multipart(frames)


def join(context: zmq.Context[zmq.Socket[bytes]], broker: str, role: str, name: str) -> Wire:
    """Take part in the run at `broker`."""
    encoder = Encoder(name, uuid.uuid4().hex[:12])
    control = sockets.dealer(context, broker, name.encode())
    hello = Join(role=role, name=name, pid=1, host="bench")  # type: ignore[arg-type]
    control.send_multipart(encoder.encode(hello)[1])
    if not control.poll(60_000):
        raise TimeoutError(f"no answer from {broker}")
    welcome = decode(control.recv_multipart()).body
    if not isinstance(welcome, Welcome):
        raise TypeError(f"{name} was refused: {welcome}")
    data = sockets.dealer(context, welcome.data, name.encode())
    return Wire(name, encoder, control, data, welcome.heartbeat_s)


@dataclass(slots=True)
class _Generator:
    wire: Wire
    tasks: deque[Task] = field(default_factory=deque)
    submits: dict[int, float] = field(default_factory=dict)
    leases: int = 0


class Producer:
    """Many generators in one process: they lease, answer at once, and submit.

    Args:
        capacity: samples per lease.
        per_submit: trajectories per message.
        rate: trajectories per second of all of them together; 0 = as fast as it goes.
    """

    def __init__(
        self,
        broker: str,
        names: list[str],
        *,
        capacity: int = 64,
        per_submit: int = 16,
        rate: float = 0.0,
    ) -> None:
        self.acked = 0
        self.latencies: list[float] = []  # seconds from the submit to its ack
        self._capacity = capacity
        self._per_submit = per_submit
        self._rate = rate
        self._sent = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4096)
        self._poller = zmq.Poller()
        self._generators: dict[zmq.Socket[bytes], _Generator] = {}
        for name in names:
            wire = join(self._context, broker, "generator", name)
            self._generators[wire.data] = _Generator(wire)
            self._poller.register(wire.data, zmq.POLLIN)
        self._turns = deque(self._generators.values() if rate else ())

    def run(self, seconds: float) -> None:
        """Produce for so long."""
        began = time.monotonic()
        upkeep_at, self._sent = began, 0
        for generator in self._generators.values():
            self._lease(generator)
        while (now := time.monotonic()) - began < seconds:
            self._keep_pace(now - began)
            for socket, _ in self._poller.poll(1 if self._rate else 50):
                generator = self._generators[socket]
                self._take(generator)
                if not self._rate:
                    self._submit(generator)
            if now >= upkeep_at:
                upkeep_at = now + 0.5
                for generator in self._generators.values():
                    generator.wire.upkeep(now)

    def _take(self, generator: _Generator) -> None:
        while (reply := generator.wire.receive()) is not None:
            number, body = reply
            match body:
                case TaskLeases(tasks=tasks) if number not in generator.submits:
                    generator.leases -= 1
                    generator.tasks.extend(tasks)
                case TaskLeases():
                    self.latencies.append(time.monotonic() - generator.submits.pop(number))
                    self.acked += body.accepted
                case Nack():
                    raise RuntimeError(f"{generator.wire.name}: {body.reason}")
                case _:
                    pass
        self._lease(generator)

    def _lease(self, generator: _Generator) -> None:
        if not generator.leases and len(generator.tasks) < self._capacity:
            generator.leases += 1
            generator.wire.ask(LeaseTasks(capacity=self._capacity, version=0, wait_s=2.0))

    def _keep_pace(self, elapsed_s: float) -> None:
        """Let one generator after the other submit one message, as often as the rate allows."""
        for _ in range(len(self._turns)):
            if self._rate * elapsed_s - self._sent < self._per_submit:
                return
            generator = self._turns[0]
            self._turns.rotate(-1)
            self._submit(generator, messages=1)

    def _submit(self, generator: _Generator, messages: int = 1 << 30) -> None:
        sent = 0
        while generator.tasks and len(generator.submits) < WINDOW and messages:
            messages -= 1
            count = min(self._per_submit, len(generator.tasks))
            made = [answer(generator.tasks.popleft()) for _ in range(count)]
            number = generator.wire.ask(SubmitResults(trajectories=made))
            generator.submits[number] = time.monotonic()
            sent += count
        self._sent += sent
        if sent:
            self._lease(generator)


class Consumer:
    """The trainer: leases batch after batch, commits at once, saves a checkpoint now and then."""

    def __init__(self, broker: str) -> None:
        self.steps = 0
        self.trajectories = 0
        self.latencies: list[float] = []  # seconds from the submit until it is here, decoded
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wire = join(self._context, broker, "trainer", "trainer")

    def run(self, seconds: float) -> None:
        """Consume for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            lease = self._call(LeaseBatch(step=self.steps + 1, wait_s=0.5))
            if not isinstance(lease, BatchLease):
                raise TypeError(f"no batch: {lease}")
            if not lease.trajectories:
                continue
            now = time.time()
            self.latencies += [now - one.started_at for one in lease.trajectories]
            ack = self._call(CommitBatch(step=self.steps + 1))
            if not isinstance(ack, CommitAck):
                raise TypeError(f"not committed: {ack}")
            self.steps += 1
            self.trajectories += len(lease.trajectories)
            if self.steps % CHECKPOINT_EVERY == 0:
                self._call(CheckpointSaved(step=self.steps))

    def _call(self, body: Message) -> Message:
        number = self._wire.ask(body)
        while True:
            if self._wire.data.poll(200):
                reply = self._wire.receive()
                if reply is not None and reply[0] == number:
                    return reply[1]
            self._wire.upkeep(time.monotonic())
