"""Processes that sample: each request is leased to one of them, and to another if that one ends.

Versions are files that samplers verify, not pushes of the weight hub: a client pins any version
that it has saved, and the hub serves all receivers the newest one of one layout.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from umbra.proto.errors import UmbraError
from umbra.proto.records import Sampling
from umbra.services.config import RunConfig
from umbra.services.config.loader import to_json
from umbra.services.process.child import ChildProcess, python_argv
from umbra.services.process.loop_thread import LoopThread, ends_with_it
from umbra.services.process.pipe import AsyncPipe
from umbra.services.process.supervisor import Program, Supervisor
from umbra.services.tinker.journal import FutureAnswer
from umbra.services.tinker.wire import Weights

TRIES = 3  # samplers that a request may lose; the last one has it alone, as it may be the cause
RESTARTS = 10  # within a minute: more than their pauses allow, so that one is always restarted
STOP_S = 10.0

log = logging.getLogger("umbra.tinker")


class SamplerStart(msgspec.Struct, frozen=True, tag=True):
    """The first message to a sampler."""

    config: bytes  # the resolved configuration, as JSON
    seed: int


class SampleJob(msgspec.Struct, frozen=True, tag=True):
    """A request for `count` samples of one prompt."""

    id: str
    weights: Weights
    prompt: list[int]
    count: int
    sampling: Sampling
    max_tokens: int
    stop_tokens: list[int] | None  # None: the model's
    stop_texts: list[str] = []
    scored: int = 0  # tokens at the end of the prompt that get logprobs


class SampleReport(msgspec.Struct, frozen=True):
    """The answer to request `id`; without one, the sampler is alive and works."""

    id: str = ""
    answer: FutureAnswer | None = None


@dataclass(slots=True)
class _Sampler:
    active_at: float  # when it last showed a sign of life
    jobs: dict[str, SampleJob] = field(default_factory=dict[str, SampleJob])
    weights: Weights | None = None  # of the newest request


@dataclass
class SampleLeases:
    """Requests that wait, in order, and the sampler that has each of the others."""

    slots: int  # samples that a sampler decodes at once
    silent_s: float  # for which a sampler with requests may say nothing
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._waiting: deque[SampleJob] = deque()
        self._samplers: dict[int, _Sampler] = {}
        self._losses: Counter[str] = Counter()

    def add(self, job: SampleJob) -> None:
        self._waiting.append(job)

    def join(self, name: int) -> None:
        self._samplers[name] = _Sampler(self.clock())

    def note(self, name: int, job_id: str) -> bool:
        """Note a sign of life; return true if it answers a request that the sampler has."""
        sampler = self._samplers[name]
        sampler.active_at = self.clock()
        if sampler.jobs.pop(job_id, None) is None:
            return False
        self._losses.pop(job_id, None)
        return True

    def leave(self, name: int) -> list[SampleJob]:
        """Queue its requests again, before all others; return those that were lost too often."""
        jobs = list(self._samplers.pop(name).jobs.values())
        self._losses.update(job.id for job in jobs)
        again = [job for job in jobs if self._losses[job.id] < TRIES]
        self._waiting.extendleft(reversed(again))
        return [job for job in jobs if self._losses[job.id] >= TRIES]

    def assign(self) -> list[tuple[int, SampleJob]]:
        """Lease the first requests to samplers with free slots."""
        leases: list[tuple[int, SampleJob]] = []
        while self._waiting and (name := self._place(self._waiting[0])) is not None:
            job, sampler = self._waiting.popleft(), self._samplers[name]
            if not sampler.jobs:
                sampler.active_at = self.clock()
            sampler.jobs[job.id], sampler.weights = job, job.weights
            leases.append((name, job))
        return leases

    def overdue(self) -> list[int]:
        """Return samplers that are silent with requests; on any thread."""
        limit = self.clock() - self.silent_s
        samplers = list(self._samplers.items())
        return [name for name, sampler in samplers if sampler.jobs and sampler.active_at < limit]

    def _place(self, job: SampleJob) -> int | None:
        """Return the sampler for a request: a busy one drains before it serves another version."""
        costs: list[tuple[int, bool, int]] = []
        for name, sampler in self._samplers.items():
            jobs, other = sampler.jobs.values(), sampler.weights != job.weights
            load = sum(one.count for one in jobs)
            is_apart = any(self._losses[one.id] == TRIES - 1 for one in (*jobs, job))
            if load < self.slots and not (jobs and is_apart):
                costs.append((load + (self.slots if load and other else 0), other, name))
        return min(costs)[2] if costs else None


@dataclass
class Samplers:
    """The processes, and their pipes on the loop of the HTTP server."""

    config: RunConfig
    gpus: int  # of this machine; the trainer has the first one
    loop: LoopThread
    finish: Callable[[str, FutureAnswer], None]  # gets requests with their answers, on that loop

    def __post_init__(self) -> None:
        generator, silent_s = self.config.generator, self.config.buffer.engine_stall_s
        self._leases = SampleLeases(generator.slots, silent_s)
        self._children: dict[int, ChildProcess] = {}
        self._pipes: dict[int, AsyncPipe[SampleReport]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._devices = devices(generator.device, generator.count, self.gpus)
        self.supervisor = Supervisor(self._spawn, report=log.warning, stop_s=STOP_S)

    def start(self) -> None:
        """Start all of them; on the main thread, which has to outlive them."""
        argv = python_argv("umbra.services.tinker.sampler")
        program = Program("", argv, wave=0, elastic=True, recovers=True, restarts=RESTARTS)
        for number in range(len(self._devices)):
            self.supervisor.start(replace(program, name=f"sampler-{number}"))

    def poll(self) -> bool:
        """Restart those that ended, end those that hang; return false once there are none."""
        for pid in self._leases.overdue():
            if (child := self._children.get(pid)) is not None and child.returncode is None:
                log.warning("sampler %d is silent: it is killed, others serve its requests", pid)
                child.kill()
        return self.supervisor.poll()

    def stop(self) -> None:
        self.supervisor.drain()
        self.supervisor.wait(2 * STOP_S)
        self.supervisor.close()

    def _spawn(self, program: Program) -> ChildProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            child = ChildProcess(program.argv, channel=theirs)
        self._children[child.pid] = child
        device = self._devices[int(program.name.rpartition("-")[2])]
        generator = msgspec.structs.replace(self.config.generator, device=device)
        config = to_json(msgspec.structs.replace(self.config, generator=generator))
        self.loop.call(self._join, child.pid, ours, SamplerStart(config, secrets.randbits(31)))
        return child

    # -- on the loop ------------------------------------------------------------------------------

    def _join(self, pid: int, end: socket.socket, start: SamplerStart) -> None:
        pipe = self._pipes[pid] = AsyncPipe(end, SampleReport)
        pipe.send(start)
        self._leases.join(pid)
        self._assign()
        task = self._tasks[pid] = asyncio.create_task(self._follow(pid, pipe), name="samplers")
        task.add_done_callback(ends_with_it)

    async def _follow(self, pid: int, pipe: AsyncPipe[SampleReport]) -> None:
        while (report := await pipe.receive()) is not None:
            if self._leases.note(pid, report.id) and report.answer is not None:
                self.finish(report.id, report.answer)
                self._assign()
        self._pipes.pop(pid).close()
        self._children.pop(pid, None)
        self._tasks.pop(pid)
        for job in self._leases.leave(pid):
            why = f"{TRIES} samplers ended while they had this request: see the server's log"
            self.finish(job.id, FutureAnswer.failure(UmbraError(why)))
        self._assign()

    def submit(self, job: SampleJob) -> None:
        self._leases.add(job)
        self._assign()

    def _assign(self) -> None:
        for pid, job in self._leases.assign():
            self._pipes[pid].send(job)


def devices(device: str, count: int, gpus: int) -> list[str]:
    """Return the device of each sampler: the GPUs in turn, the first one only if it is alone."""
    if device not in ("auto", "cuda") or gpus < 2:
        return [device] * count
    return [f"cuda:{1 + number % (gpus - 1)}" for number in range(count)]
