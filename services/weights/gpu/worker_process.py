"""A GPU worker as its owner sees it: orders with deadlines; killed when it misses one."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from umbra.proto.deadline import Deadline, Pace
from umbra.proto.errors import PeerLostError, UmbraError
from umbra.services.process.child import ChildProcess, child_environ, start_worker
from umbra.services.process.pipe import Pipe
from umbra.services.weights.arena import Arena

WORKER = ("-m", "umbra.services.weights.gpu.worker")
START_S = 120.0  # to import CuPy and to make a CUDA context
ABORT_S = 10.0  # for what is under way to end after an abort
END_S = 5.0
LOOK_S = 0.02  # that a step waits for an answer

T = TypeVar("T")

log = logging.getLogger(__name__)


def result(steps: Generator[object, None, T], interrupted: Callable[[], bool] = lambda: False) -> T:
    """Go through all steps of something, which wait by themselves; its result.

    Raises:
        PeerLostError: `interrupted`, asked between two steps, said that nobody wants it any longer.
    """
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
        if interrupted():
            steps.close()
            raise PeerLostError("given up while it was under way")


class GpuWorkerProcess:
    """One worker process; a hung one costs a restart and nothing else. For one thread at a time.

    Args:
        device: index of its GPU.
        environ: added to its environment.
        program: what Python is to run, for tests.
    """

    def __init__(
        self, device: int, environ: Mapping[str, str] | None = None, program: Sequence[str] = WORKER
    ) -> None:
        self.starts = 0
        self._argv = [sys.executable, "-P", *program, str(device)]
        self._environ = {**child_environ(), **(environ or {})}
        self._process: ChildProcess | None = None
        self._pipe: Pipe[dict[str, Any]] | None = None
        self._pending = 0  # answers that nobody has waited for yet
        self._arena: Arena | None = None
        self._chunk_bytes = 0
        self._attach_s = START_S
        self._state = "none"  # of the arena: "none", "attaching", "attached"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def use(self, arena: Arena, chunk_bytes: int, pace: Pace) -> None:
        """From now on work on `arena`, in chunks of `chunk_bytes`; starts to pin it.

        `pace` bounds how long that may take, in place of its seconds with those of a start.
        """
        if self._state != "none":
            self.kill()  # it would hold the memory of the arena before
        self._arena, self._chunk_bytes = arena, chunk_bytes
        self._attach_s = pace.after(START_S).limit_s(arena.slots * arena.slot_bytes)
        self.begin()

    def begin(self) -> None:
        """Start the worker if it does not run, without waiting for it."""
        if self._state == "none" and self._arena is not None:
            self._state = "attaching"
            size, fd = self._arena.slot_bytes, self._arena.fileno()
            self.order("attach", fd, slot_bytes=size, chunk_bytes=self._chunk_bytes)

    def attached(self) -> Generator[None, None, None]:
        """Wait, step by step, until the worker runs and has pinned the arena.

        Raises:
            UmbraError: as `answer`.
        """
        self.begin()
        if self._state == "attaching":
            try:
                yield from self.answer(self._attach_s, abortable=False)
            except UmbraError:
                self.kill()
                raise
            self._state = "attached"

    def order(self, op: str, fd: int = -1, **arguments: Any) -> None:
        """Give an order to the worker, started if need be; PeerLostError if it has ended."""
        if self._pipe is None:
            self.starts += 1
            self._process, end = start_worker(self._argv, self._environ)
            self._pipe = Pipe(end, dict[str, Any])
        try:
            self._pipe.send({"op": op, **arguments}, fd)
        except OSError as error:
            self.kill()
            raise PeerLostError(f"the GPU worker ended before the order {op!r}") from error
        self._pending += 1

    def answer(
        self, timeout_s: float, *, abortable: bool = True
    ) -> Generator[None, None, dict[str, Any]]:
        """The answer to the oldest order that has none yet; each step waits for `LOOK_S`.

        Closed before it is there, what is under way is aborted.

        Args:
            timeout_s: seconds to wait.
            abortable: whether it can be aborted; if not, the worker is killed instead.

        Raises:
            DeadlineError: none came in time; the worker was killed.
            PeerLostError: the worker has ended.
            UmbraError: it says what went wrong; one that says it is broken was killed.
        """
        if self._pending == 0:
            raise PeerLostError("the GPU worker does not run, or has no order")
        deadline = Deadline(timeout_s, "no answer from the GPU worker")
        try:
            while (found := self._receive(LOOK_S)) is None:
                if deadline.passed:
                    self.kill()
                    deadline.check(": killed")
                yield
        except GeneratorExit:
            if abortable:
                self._leave()
            else:
                self.kill()
            raise
        if error := found.get("error"):
            if found.get("broken"):
                self.kill()
            raise UmbraError(f"GPU worker: {error}")
        return found

    def call(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """`order`, and wait for the answer."""
        self.order(op, **arguments)
        return result(self.answer(timeout_s))

    def kill(self) -> None:
        """Kill it; the next command starts another."""
        process, self._process = self._process, None
        self._pending, self._state = 0, "none"
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if process is not None:
            process.kill()
            if process.wait(END_S) is None:
                log.warning("GPU worker %d does not end: it hangs in the driver", process.pid)

    def _leave(self) -> None:
        """Abort what is under way; kill a worker that cannot do even that."""
        with suppress(UmbraError):
            self.order("abort")
            while self._pending and self._receive(ABORT_S) is not None:
                pass
        if self._pending:
            self.kill()

    def _receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The next answer; None if none came in time."""
        assert self._pipe is not None
        try:
            answer = self._pipe.receive(timeout_s)
        except EOFError:
            self.kill()
            raise PeerLostError("the GPU worker has ended") from None
        self._pending -= answer is not None
        return answer
