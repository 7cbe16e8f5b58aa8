"""Many light generators in one process, against a real buffer and a real hub.

    python benchmarks/generator_hosts.py BROKER HUB PREFIX COUNT SLOTS REPLAY_FILE

Each has an identity, three connections (control, data, weights) and a replay engine of its own, and
speaks the whole protocol over plain sockets: joins, beats, leases, renews, submits, subscribes,
stages every version's bytes and commits it. What is left out is what costs the client alone: a
link's thread, environments, metrics. A line of JSON a second tells what happened since the last.
"""

from __future__ import annotations

import heapq
import json
import sys
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import noted
import zmq
from bench_keys import security_of
from traffic import Wire, join

from umbra.proto import sockets
from umbra.proto.codec import Encoder, decode
from umbra.proto.messages import (
    Commit,
    Committed,
    LeaseSamples,
    Message,
    Prepare,
    Ready,
    RenewAck,
    RenewLeases,
    SampleLeases,
    SubmitAck,
    SubmitTrajectories,
    Subscribe,
    Subscribed,
)
from umbra.proto.records import Manifest, SampleTask, Sampling, Trajectory, pack_float32, pack_int32
from umbra.services.generator.engines.engine import EngineOutput, EngineRequest
from umbra.services.generator.replay_engine import ReplayEngine, ReplayTokens
from umbra.services.generator.replay_model import ReplayModel, read_replay_model
from umbra.services.process.command import allow_connections
from umbra.services.process.parent import die_with_parent
from umbra.services.weights.arena import shm_host
from umbra.services.weights.gpu.worker_process import result
from umbra.services.weights.planes.shm import ShmReceiver

PROMPT = [7] * 200
NOTHING = Manifest(tensors=[], buckets=[], total_bytes=0, digest="")
VOCABULARY, FILLER, STOP = 32_000, 5, 3
MAX_TOKENS = 20_000
MAX_CONTEXT = len(PROMPT) + MAX_TOKENS
WAIT_S = 5.0
LEASE_S = 30.0


@dataclass(slots=True)
class Light:
    """One generator."""

    wire: Wire
    hub: zmq.Socket[bytes]
    hub_encoder: Encoder
    engine: ReplayEngine
    tasks: dict[str, SampleTask] = field(default_factory=dict)
    asked: int = 0  # number of the open question for work; 0 = none
    asked_at: float = 0.0
    submits: dict[int, tuple[float, list[str]]] = field(default_factory=dict)
    renewed_at: float = 0.0
    answered: int = 0  # samples acknowledged
    next_at: float | None = None

    def tell(self, body: Message) -> None:
        """To the hub."""
        self.hub.send_multipart(self.hub_encoder.encode(body)[1])


class Host:
    """All generators of this process; one thread, one poller."""

    def __init__(
        self, broker: str, hub: str, names: list[str], slots: int, model: ReplayModel
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.acks: list[float] = []
        self.grants: list[float] = []
        self._slots = slots
        self._plane: ShmReceiver | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 8192)
        self._poller = zmq.Poller()
        self._by_data: dict[zmq.Socket[bytes], Light] = {}
        self._by_hub: dict[zmq.Socket[bytes], Light] = {}
        self._due: list[tuple[float, int, Light]] = []
        self._pushed = 0
        curve = security_of("generator").connecting("weight_hub")
        for name in names:
            wire = join(self._context, broker, "generator", name)
            encoder = Encoder(name, uuid.uuid4().hex[:12])
            socket = sockets.dealer(self._context, hub, name.encode(), curve)
            engine = ReplayEngine(
                model,
                ReplayTokens(VOCABULARY, FILLER, STOP),
                slots=slots,
                max_context=MAX_CONTEXT,
            )
            light = Light(wire, socket, encoder, engine)
            light.tell(Subscribe(host=shm_host(), planes=["shm"]))
            self._by_data[wire.data] = self._by_hub[socket] = light
            self._poller.register(wire.data, zmq.POLLIN)
            self._poller.register(socket, zmq.POLLIN)

    def run(self) -> None:
        """Generate until killed."""
        upkeep_at = report_at = time.monotonic()
        while True:
            now = time.monotonic()
            wait_s = min(0.2, max(0.0, self._due[0][0] - now) if self._due else 0.2)
            for socket, _ in self._poller.poll(int(1e3 * wait_s)):
                if (light := self._by_data.get(socket)) is not None:
                    self._hear(light)
                else:
                    self._hear_hub(self._by_hub[socket])
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                _, _, light = heapq.heappop(self._due)
                light.next_at = None
                self._work(light, now)
            if now >= upkeep_at:
                upkeep_at = now + 0.5
                for light in self._by_data.values():
                    light.wire.upkeep(now)
                    self._renew(light, now)
            if now >= report_at + 1.0:
                report_at = now
                self._report()

    def _hear(self, light: Light) -> None:
        now = time.monotonic()
        while (reply := light.wire.receive()) is not None:
            number, body = reply
            match body:
                case SampleLeases(tasks=tasks):
                    if number == light.asked:
                        light.asked = 0
                        if tasks:
                            self.grants.append(now - light.asked_at)
                    for task in tasks:
                        light.tasks[task.sample_id] = task
                    light.engine.submit(_request(task) for task in tasks)
                case SubmitAck():
                    sent_at, names = light.submits.pop(number)
                    self.acks.append(now - sent_at)
                    light.answered += body.accepted
                    self.counts["accepted"] += body.accepted
                    self.counts["refused"] += len(body.refused)
                    noted.note_acknowledged(name for name in names if name not in body.refused)
                case RenewAck(lost=lost):
                    self.counts["lost"] += len(lost)
                case _:
                    self.counts[type(body).__name__] += 1
        self._work(light, now)

    def _work(self, light: Light, now: float) -> None:
        """What is finished goes out, free slots are asked for."""
        for output in light.engine.poll(0.0):
            task = light.tasks.pop(output.request_id)
            made = _trajectory(task, output, light.wire.name)
            number = light.wire.ask(SubmitTrajectories(trajectories=[made]))
            light.submits[number] = now, [made.sample_id]
        room = self._slots - len(light.tasks)
        if room > 0 and not light.asked and light.engine.version >= 0:
            body = LeaseSamples(capacity=room, version=light.engine.version, wait_s=WAIT_S)
            light.asked, light.asked_at = light.wire.ask(body), now
        at = light.engine.next_at()
        if at is not None and (light.next_at is None or at < light.next_at):
            light.next_at = at
            self._pushed += 1
            heapq.heappush(self._due, (at, self._pushed, light))

    def _renew(self, light: Light, now: float) -> None:
        if light.tasks and now - light.renewed_at > LEASE_S / 3:
            light.renewed_at = now
            held = [(task.sample_id, task.attempt) for task in light.tasks.values()]
            light.wire.ask(RenewLeases(leases=held))

    def _hear_hub(self, light: Light) -> None:
        while light.hub.poll(0):
            body = decode(light.hub.recv_multipart()).body
            match body:
                case Subscribed():
                    if self._plane is None:  # all versions go through one piece of memory
                        memory = memoryview(bytearray(body.manifest.total_bytes))
                        self._plane = ShmReceiver(body, [memory])
                case Prepare():
                    assert self._plane is not None
                    done = result(self._plane.receive(body, 0))
                    light.tell(
                        Ready(
                            epoch=body.epoch,
                            version=body.version,
                            wire_s=done.wire_s,
                            stage_s=done.stage_s,
                            error=done.error,
                            wire_bytes=done.wire_bytes,
                        )
                    )
                case Commit():
                    light.engine.load(NOTHING, (), body.version, "keep")
                    light.tell(Committed(epoch=body.epoch, version=body.version, commit_s=0.0))
                    self.counts["commits"] += 1
                    self._work(light, time.monotonic())
                case _:
                    self.counts[type(body).__name__] += 1

    def _report(self) -> None:
        lights = list(self._by_data.values())
        row: dict[str, Any] = {
            "time": time.time(),
            **self.counts,
            "live": sum(light.engine.live for light in lights),
            "acks": self.acks,
            "grants": self.grants,
            "answered": sum(light.answered for light in lights),
            "decoded": [light.engine.decoded_tokens for light in lights],
            "versions": [light.engine.version for light in lights],
        }
        print(json.dumps(row), flush=True)
        self.counts.clear()
        self.acks, self.grants = [], []


def _request(task: SampleTask) -> EngineRequest:
    return EngineRequest(task.sample_id, PROMPT, Sampling(), MAX_TOKENS)


def _trajectory(task: SampleTask, output: EngineOutput, name: str) -> Trajectory:
    return Trajectory(
        sample_id=task.sample_id,
        group_id=task.group_id,
        prompt_id=task.prompt_id,
        attempt=task.attempt,
        prompt_ids=pack_int32(PROMPT),
        response_ids=pack_int32(output.token_ids),
        loss_mask=b"\1" * len(output.token_ids),
        logprobs=pack_float32(output.logprobs),
        spans=output.spans,
        finish_reason=output.finish_reason,
        reward=0.0,
        generator=name,
    )


def main() -> None:
    """Serve until killed."""
    broker, hub, prefix, count, slots, file = sys.argv[1:]
    names = [f"{prefix}-{index}" for index in range(int(count))]
    allow_connections()
    host = Host(broker, hub, names, int(slots), read_replay_model(file))
    print(json.dumps({"ready": len(names)}), flush=True)
    host.run()


if __name__ == "__main__":
    die_with_parent()
    main()
