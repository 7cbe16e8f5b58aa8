"""The process that samples: if it ends, the next one gets the requests without an answer again.

Versions are files that it verifies, not pushes of the weight hub: a client pins any version that it
has saved, and the hub serves all receivers the newest one of one layout.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

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

TRIES = 3  # samplers that may end before they have answered a request: it may be the cause
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


@dataclass
class SamplerProcess:
    """The process, and its pipe on the loop of the HTTP server."""

    config: RunConfig
    gpus: int  # of this machine; the trainer has the first one
    loop: LoopThread
    finish: Callable[[str, FutureAnswer], None]  # gets requests with their answers, on that loop

    def __post_init__(self) -> None:
        self._jobs: dict[str, SampleJob] = {}  # without an answer, in order
        self._sent: Counter[str] = Counter()  # how often each of them
        self._child: ChildProcess | None = None
        self._pipe: AsyncPipe[SampleReport] | None = None
        self._active_at = 0.0  # when it last showed a sign of life
        self.supervisor = Supervisor(self._spawn, report=log.warning, stop_s=STOP_S)

    def start(self) -> None:
        """Start it; on the main thread, which has to outlive it."""
        argv = python_argv("umbra.services.tinker.sampler")
        sampler = Program("sampler", argv, wave=0, elastic=True, recovers=True, restarts=RESTARTS)
        self.supervisor.start(sampler)

    def poll(self) -> bool:
        """Start it again if it has ended, end it if it hangs; false once it cannot be started."""
        silent_s = time.monotonic() - self._active_at
        child, is_silent = self._child, silent_s > self.config.buffer.engine_stall_s
        if self._jobs and is_silent and child is not None and child.returncode is None:
            log.warning("the sampler is silent: it is killed, the next one serves its requests")
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
        self._child, self._active_at = child, time.monotonic()
        device = device_beside(self.config.generator.device, self.gpus)
        generator = msgspec.structs.replace(self.config.generator, device=device)
        config = to_json(msgspec.structs.replace(self.config, generator=generator))
        self.loop.call(self._join, ours, SamplerStart(config, secrets.randbits(31)))
        return child

    # -- on the loop ------------------------------------------------------------------------------

    def _join(self, end: socket.socket, start: SamplerStart) -> None:
        pipe = self._pipe = AsyncPipe(end, SampleReport)
        pipe.send(start)
        for job in list(self._jobs.values()):
            self._send(pipe, job)
        self._task = asyncio.create_task(self._follow(pipe), name="the sampler's answers")
        self._task.add_done_callback(ends_with_it)

    async def _follow(self, pipe: AsyncPipe[SampleReport]) -> None:
        while (report := await pipe.receive()) is not None:
            self._active_at = time.monotonic()
            if report.answer is not None:
                self._finish(report.id, report.answer)
        pipe.close()
        if self._pipe is pipe:
            self._pipe = None

    def submit(self, job: SampleJob) -> None:
        """Have a request answered; until a sampler is there it waits."""
        if not self._jobs:
            self._active_at = time.monotonic()
        self._jobs[job.id] = job
        if self._pipe is not None:
            self._send(self._pipe, job)

    def _send(self, pipe: AsyncPipe[SampleReport], job: SampleJob) -> None:
        if self._sent[job.id] == TRIES:
            why = f"{TRIES} samplers ended while they had this request: see the server's log"
            self._finish(job.id, FutureAnswer.failure(UmbraError(why)))
            return
        self._sent[job.id] += 1
        pipe.send(job)

    def _finish(self, name: str, answer: FutureAnswer) -> None:
        if self._jobs.pop(name, None) is not None:
            del self._sent[name]
            self.finish(name, answer)


def device_beside(device: str, gpus: int) -> str:
    """Return the device of the sampler: of several GPUs the second; the first trains."""
    return "cuda:1" if device in ("auto", "cuda") and gpus > 1 else device
