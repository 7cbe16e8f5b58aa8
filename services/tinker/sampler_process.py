"""A process that samples for `umbra tinker`: requests come and answers go over its pipe.

python -P -m umbra.services.tinker.sampler_process
"""

from __future__ import annotations

import queue
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

from umbra.proto.errors import (
    EXIT_DONE,
    PeerLostError,
    UmbraError,
    UsageError,
    ends_process,
    service_thread,
)
from umbra.services.config import RunConfig
from umbra.services.config.loader import config_of, decode_json
from umbra.services.generator.engines.engine import EngineError
from umbra.services.process.command import setup_logging
from umbra.services.process.parent import die_with_parent, parents_end
from umbra.services.process.pipe import Pipe
from umbra.services.tinker.bodies import TrainedShape
from umbra.services.tinker.journal import FutureAnswer
from umbra.services.tinker.samplers import SampleJob, SampleReport, SamplerStart

if TYPE_CHECKING:
    from umbra.services.tinker.sampler import Lane

ALIVE_S = 1.0  # between signs of life
Jobs = queue.SimpleQueue[SampleJob | None]  # None: the end


class SamplerLoop:
    """The engines of this process, one for each shape, in turns."""

    def __init__(
        self, start: SamplerStart, jobs: Jobs, send: Callable[[SampleReport], None]
    ) -> None:
        self._config: RunConfig = config_of(decode_json(start.config), "the server")
        self._seed, self._jobs, self._send = start.seed, jobs, send
        self._lanes: dict[TrainedShape, Lane] = {}
        self._alive_at = 0.0

    def run(self) -> None:
        """Sample until the end comes."""
        setup_logging(self._config.log, "sampler")
        while True:
            busy = any(lane.busy for lane in self._lanes.values())
            with suppress(queue.Empty):
                while True:
                    if (job := self._jobs.get(block=not busy)) is None:
                        return
                    busy = True
                    self._add(job)
            if (now := time.monotonic()) >= self._alive_at:
                self._alive_at = now + ALIVE_S
                self._send(SampleReport())
            for shape in [shape for shape, lane in self._lanes.items() if lane.busy]:
                self._turn(shape)

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()

    def _add(self, job: SampleJob) -> None:
        from umbra.services.tinker.sampler import Lane  # brings torch, once there is work

        try:
            if job.shape not in self._lanes:
                self._lanes[job.shape] = Lane(self._config, job.shape, self._seed)
            self._lanes[job.shape].add(job)
        except (UmbraError, ValueError) as error:
            self._fail(job, error)

    def _turn(self, shape: TrainedShape) -> None:
        lane = self._lanes[shape]
        try:
            for job, answer in lane.turn():
                self._send(SampleReport(job.id, answer))
        except EngineError as error:
            # Of weights with NaN, say: who waits for others gets a new engine.
            self._lanes.pop(shape).close()
            for job in lane.live:
                self._fail(job, error)
            for job in lane.waiting:
                self._add(job)

    def _fail(self, job: SampleJob, error: Exception) -> None:
        category = "user" if isinstance(error, (UsageError, ValueError)) else "server"
        self._send(SampleReport(job.id, FutureAnswer.failure(str(error), category)))


def main() -> int:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server says when to end
    pipe: Pipe[SamplerStart | SampleJob] = Pipe(parents_end(), SamplerStart | SampleJob)
    jobs: Jobs = queue.SimpleQueue()
    asked = False

    def end(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        jobs.put(None)

    def read() -> None:
        with suppress(EOFError, OSError):
            while isinstance(job := pipe.receive(), SampleJob):
                jobs.put(job)
        jobs.put(None)

    with suppress(EOFError, OSError):
        start = pipe.receive()
        assert isinstance(start, SamplerStart)
        signal.signal(signal.SIGTERM, end)
        service_thread(read, "requests").start()
        loop = SamplerLoop(start, jobs, pipe.send)
        try:
            loop.run()
        finally:
            loop.close()
    return EXIT_DONE if asked else PeerLostError.exit_code


if __name__ == "__main__":
    sys.exit(ends_process(main, "sampling")())
