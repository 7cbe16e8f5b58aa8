"""Which worker process plays what: sessions stay where they are, the lost are played again.

Event-driven, within one asyncio loop. A play that outlives its deadline costs its process, and
that sample only: what else the process held is played again elsewhere, response by response.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from umbra.proto.deadline import Deadline
from umbra.proto.errors import DeadlineError, UsageError
from umbra.services.config import EnvironmentConfig, NamedEnvironment
from umbra.services.environments.environment_host import Delivered, Result
from umbra.services.environments.loading import name_of
from umbra.services.environments.protocol import Opening, Row, Said, StepResult
from umbra.services.environments.python_apart import apart
from umbra.services.environments.time_limits import TimeLimit, TimeLimits
from umbra.services.process.child import ChildProcess, describe_exit, start_worker
from umbra.services.process.loop_thread import ends_with_it
from umbra.services.process.pipe import AsyncPipe

_WORKER = "umbra.services.environments.worker"
_LOOK_S = 0.005
_CLOSE_S = 5.0  # for all environments to be closed in the end
END_S = 60.0  # within which `WorkerPool.close` is done on any machine
_ENDING_S = 1.0  # for a process that has closed its pipe to end
_TREE_S = 10.0  # for a guard that was told so to end its processes
_GRACE_S = 5.0  # a worker that can still answer says itself that a play is overdue


NO_REWARD = "its agent returned no reward, and has posted none"
PLAYED_TWICE = "the process of its agent ended because of another agent in it"
"""Why a sample fails whose agent would begin anew: what it did must not be done twice."""

_NO_KEY = "none"  # the client insists on one


# What pool and worker say to each other. The worker (`worker.py`) sends and receives the same as
# plain MessagePack maps: its Python environment may have neither Umbra nor msgspec.


class Setup(msgspec.Struct, tag="setup"):
    """First to a worker: which environment."""

    config: EnvironmentConfig


class Hello(msgspec.Struct, tag="hello"):
    """First from a worker, or why it can't work.

    `room` is how many plays it takes at once. `closes` is whether environments have to be closed,
    `lasting` whether something of theirs outlives them, and is closed when the pipe ends.
    """

    room: int = 1
    closes: bool = False
    lasting: bool = False
    usage_error: str = ""


class Play(msgspec.Struct, tag="play"):
    """To a worker: the last of `responses` is new. Each call has `limit_s` seconds."""

    number: int
    key: str
    row: dict[str, Any]
    responses: list[Said | str]
    limit_s: float


class Forget(msgspec.Struct, tag="forget"):
    """To a worker: the sample is over. With a number its environment is closed and that is told."""

    key: str
    number: int = 0
    limit_s: float = 0.0  # seconds for that


class GoesOn(msgspec.Struct, tag="goes_on"):
    """From a worker: one call of a play is done, and the next one, a step, begins."""

    number: int


class Played(msgspec.Struct, tag="played"):
    """From a worker: answers, or why there are none.

    `exhausted`: memory ran out, it leaves. `overdue`: the call that was under way took too long.
    """

    number: int
    opening: Opening | None = None  # if the conversation was opened for it
    steps: list[StepResult] = msgspec.field(default_factory=list)
    error: str = ""
    exhausted: bool = False
    overdue: bool = False

    @property
    def results(self) -> list[Opening | StepResult]:
        """All answers, in order."""
        return [*([] if self.opening is None else [self.opening]), *self.steps]


ToWorker = Setup | Play | Forget
FromWorker = Hello | GoesOn | Played


@dataclass(slots=True)
class _Conversation:
    """What is known of a sample's conversation outside of the process that plays it."""

    worker: _WorkerHandle | None = None
    digests: list[bytes] = field(default_factory=list)  # of all answers so far


@dataclass(eq=False, slots=True)
class _PendingPlay:
    play: Play
    session: _Conversation
    limit: TimeLimit  # of the call of the environment that is under way
    losses: int = 0  # processes that ended while they played it
    timer: asyncio.TimerHandle | None = None


@dataclass(eq=False, slots=True)
class _WorkerHandle:
    process: ChildProcess
    pipe: AsyncPipe[FromWorker]
    room: int
    closes: bool = False
    lasting: bool = False
    calls: dict[int, _PendingPlay] = field(default_factory=dict)
    waiting: deque[_PendingPlay] = field(default_factory=deque)  # whose sessions are here
    ending: set[int] = field(default_factory=set)  # calls whose samples are over
    suspect: _PendingPlay | None = None  # is played alone here: it was there when a process ended
    alive: bool = True
    verdict: str = ""  # why it was killed

    def free(self) -> bool:
        waits = self.suspect is not None or self.ending
        return self.alive and not waits and len(self.calls) < self.room

    def tell(self, message: ToWorker) -> None:
        if self.alive:
            self.pipe.send(message)


class WorkerPool:
    """Worker processes and the sessions that they hold. Not thread-safe.

    Args:
        config: the environment; `workers` is how many processes there may be.
        deliver: called with sample, answer and error ("" if there is an answer).
        started: called with the sample whenever a process begins to play for it.
        end_forgotten: what plays on for a sample that is over is ended, with its process if needed.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        deliver: Callable[[str, Delivered | None, str], None],
        started: Callable[[str], None] = lambda key: None,
        *,
        end_forgotten: bool = False,
    ) -> None:
        self._config = config
        self._limits = TimeLimits.of(config)
        self._deliver = deliver
        self._started = started
        self._end_forgotten = end_forgotten
        self._workers: list[_WorkerHandle] = []
        self._starting = 0
        self._number = 0
        self._closed = False
        self._sessions: dict[str, _Conversation] = {}
        self._queue: deque[_PendingPlay] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def room(self) -> int:
        """Plays at once in all processes; known once the first has started."""
        return self._config.workers * self._workers[0].room

    async def start(self) -> None:
        """Start the first process.

        Raises:
            UsageError: the environment can't be loaded.
            DeadlineError: it took too long.
        """
        self._workers.append(await self._hire())

    def play(self, key: str, row: Row, responses: Sequence[Said | str]) -> None:
        """Ask for the answer to the last of `responses`; it is delivered."""
        session = self._sessions.setdefault(key, _Conversation())
        call = self._numbered(session, key, dict(row), list(responses))
        if session.worker is not None and responses:
            session.worker.waiting.append(call)
        else:
            self._queue.append(call)
        self._pump()

    def forget(self, key: str) -> None:
        """The sample is over; an answer that is under way goes nowhere."""
        session = self._sessions.pop(key, None)
        worker = session.worker if session is not None else None
        if worker is None:
            return
        self._release(worker, key)
        if self._end_forgotten:
            for call in [c for c in worker.calls.values() if c.session is session]:
                self._end_soon(worker, call)

    async def close(self) -> None:
        """End all processes; environments that have to be closed get a few seconds for it."""
        self._closed = True
        deadline = Deadline(_CLOSE_S)
        closing = [worker for worker in self._workers if worker.closes or worker.lasting]
        for worker in closing:
            worker.verdict = "closed"
            worker.pipe.end_sending()
        while any(worker.alive for worker in closing) and not deadline.passed:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
        for worker in self._workers:
            self._end(worker, "closed")
        while self._tasks:
            await asyncio.wait(self._tasks)

    # -- dispatch ---------------------------------------------------------------------------------

    def _pump(self) -> None:
        if self._closed:
            return
        for worker in self._workers:
            while worker.waiting and worker.free():
                self._send(worker, worker.waiting.popleft())
        while self._queue:
            call = self._queue[0]
            if not self._wanted(call):
                self._queue.popleft()  # forgotten before it was sent
                continue
            worker = self._alone_for(call) if call.losses else self._least_loaded()
            if worker is None:
                break
            self._queue.popleft()
            self._send(worker, call)
        if self._queue and len(self._workers) + self._starting < self._config.workers:
            self._starting += 1
            self._spawn(self._grow())

    def _least_loaded(self) -> _WorkerHandle | None:
        free = [worker for worker in self._workers if worker.free()]
        return min(free, key=lambda worker: len(worker.calls), default=None)

    def _alone_for(self, call: _PendingPlay) -> _WorkerHandle | None:
        """A process without anything else; one is set apart and emptied if there is none."""
        mine = next((w for w in self._workers if w.suspect is call), None)
        if mine is None:
            mine = self._least_loaded()
            if mine is None:
                return None
            mine.suspect = call
        return mine if not mine.calls else None

    def _send(self, worker: _WorkerHandle, call: _PendingPlay) -> None:
        if not self._wanted(call):
            return
        opens = not call.play.responses or call.session.worker is not worker
        call.session.worker = worker
        worker.calls[call.play.number] = call
        self._time(worker, call, self._limits.opening if opens else self._limits.step)
        worker.tell(call.play)
        self._started(call.play.key)

    def _played(self, worker: _WorkerHandle, reply: Played) -> None:
        worker.ending.discard(reply.number)
        call = worker.calls.pop(reply.number, None)
        if call is None:
            return
        if call.timer is not None:
            call.timer.cancel()
        if worker.suspect is call:
            worker.suspect = None
        error = call.limit.overdue() if reply.overdue else reply.error
        if reply.exhausted:
            config = self._config
            error += f": it took more than {config.where}.memory_mb = {config.memory_mb}; raise it"
        error = error or _differs(call, reply.results)
        if error and call.session.worker is worker:
            call.session.worker = None
            self._release(worker, call.play.key)
        self._answer(call, None if error else self._news(call.play, reply), error)
        if reply.exhausted:
            self._end(worker, "it was out of memory")

    def _news(self, play: Play, reply: Played) -> Delivered:
        """What of a reply nobody knows yet: the last answer, or those to a whole group."""
        whole = self._config.reward_scope == "group" and bool(play.responses)
        return reply.steps if whole else reply.results[-1]

    def _release(self, worker: _WorkerHandle, key: str) -> None:
        """Have `worker` forget the sample; closing its environment is a play without an answer."""
        limit = self._limits.step
        if not worker.closes or not worker.alive:
            worker.tell(Forget(key, limit_s=limit.seconds))
            return
        call = self._numbered(_Conversation(), key, {}, [])  # nobody wants it
        worker.calls[call.play.number] = call
        self._time(worker, call, limit)
        worker.tell(Forget(key, call.play.number, limit.seconds))

    def _numbered(
        self, session: _Conversation, key: str, row: Row, responses: list[Said | str]
    ) -> _PendingPlay:
        self._number += 1
        opening = self._limits.opening
        play = Play(self._number, key, row, responses, opening.seconds)
        return _PendingPlay(play, session, opening)

    def _time(self, worker: _WorkerHandle, call: _PendingPlay, limit: TimeLimit) -> None:
        """A call of the environment begins."""
        if call.timer is not None:
            call.timer.cancel()
        call.limit = limit
        seconds = limit.seconds + (_GRACE_S if worker.room > 1 else 0.0)
        call.timer = asyncio.get_running_loop().call_later(seconds, self._overdue, worker, call)

    def _goes_on(self, worker: _WorkerHandle, number: int) -> None:
        """A play of several calls: one is done, the next one, a step, begins."""
        call = worker.calls.get(number)
        if call is not None and number not in worker.ending:
            self._time(worker, call, self._limits.step)

    def _wanted(self, call: _PendingPlay) -> bool:
        """Whether the sample still waits for it."""
        return self._sessions.get(call.play.key) is call.session

    def _answer(self, call: _PendingPlay, value: Delivered | None, error: str) -> None:
        if self._wanted(call):
            self._deliver(call.play.key, value, error)

    # -- processes --------------------------------------------------------------------------------

    def _overdue(self, worker: _WorkerHandle, call: _PendingPlay) -> None:
        worker.calls.pop(call.play.number, None)
        self._answer(call, None, call.limit.overdue())
        self._end(worker, "another sample's call hung in it")

    def _end_soon(self, worker: _WorkerHandle, call: _PendingPlay) -> None:
        """End a play whose sample is over; one among others may end itself."""
        if worker.room == 1:
            self._end(worker, "its sample is over")
        elif call.timer is not None:
            call.timer.cancel()
            loop = asyncio.get_running_loop()
            call.timer = loop.call_later(_GRACE_S, self._overdue, worker, call)
            worker.ending.add(call.play.number)

    def _end(self, worker: _WorkerHandle, verdict: str) -> None:
        worker.verdict = worker.verdict or verdict
        _kill(worker.process)

    async def _read(self, worker: _WorkerHandle) -> None:
        while isinstance(message := await worker.pipe.receive(), GoesOn | Played):
            if isinstance(message, GoesOn):
                self._goes_on(worker, message.number)
                continue
            self._played(worker, message)
            self._pump()
        how = await _end(worker.process, worker.pipe)
        self._lost(worker, how)
        self._pump()

    def _lost(self, worker: _WorkerHandle, how: str) -> None:
        worker.alive = False
        self._workers.remove(worker)
        for session in self._sessions.values():
            if session.worker is worker:
                session.worker = None
        innocent = bool(worker.verdict)
        for call in worker.calls.values():
            if call.timer is not None:
                call.timer.cancel()
            call.losses += not innocent
            # Alone in its process, or there at two ends: it is the one.
            if not innocent and (worker.room == 1 or call.losses > 1):
                self._answer(call, None, f"the process of its environment ended ({how})")
            else:
                self._queue.appendleft(call)
        self._queue.extend(worker.waiting)

    async def _grow(self) -> None:
        try:
            worker = await self._hire()
            self._workers.append(worker)
            if self._closed:
                _kill(worker.process)
        except (UsageError, DeadlineError, OSError) as error:
            if not self._workers:
                waiting, self._queue = self._queue, deque()
                for call in waiting:
                    self._answer(call, None, f"no process for environments: {error}")
        finally:
            self._starting -= 1
        self._pump()

    async def _hire(self) -> _WorkerHandle:
        config = self._config
        process, end = start_worker(*apart(config.python, _WORKER))
        pipe: AsyncPipe[FromWorker] = AsyncPipe(end, FromWorker)
        pipe.send(Setup(config))
        try:
            async with asyncio.timeout(config.setup_s):
                hello = await pipe.receive()
        except TimeoutError:
            _kill(process)
            await _end(process, pipe)
            raise DeadlineError(
                f"a process for environments was not ready after {config.where}.setup_s = "
                f"{config.setup_s:g} s: does importing {name_of(config)} hang?"
            ) from None
        if isinstance(hello, Hello) and not hello.usage_error:
            worker = _WorkerHandle(process, pipe, hello.room, hello.closes, hello.lasting)
            self._spawn(self._read(worker))
            return worker
        how = await _end(process, pipe)
        raise UsageError(
            hello.usage_error
            if isinstance(hello, Hello)
            else f"a process for {name_of(config)} ended ({how}) when it was started"
        )

    def _spawn(self, coroutine: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(coroutine, name="the keeper of environment processes")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(ends_with_it)


def offered_name(environment: EnvironmentConfig) -> str:
    """Return what generators and runners call the environment."""
    several = isinstance(environment, NamedEnvironment)
    return environment.name if several else name_of(environment)


def agent_workers(
    config: EnvironmentConfig,
    left: Callable[[str, Delivered | None, str], None],
    began: Callable[[str], None],
) -> WorkerPool:
    """Return a pool of processes for agents; `left` and `began` are its `deliver` and `started`.

    The work of an agent has no limit here: the holder of its session limits its silence.
    """
    lasting = msgspec.structs.replace(config, timeout_s=math.inf)
    return WorkerPool(lasting, left, began, end_forgotten=True)


def start_agent(workers: WorkerPool, sample: str, row: Row, session_url: str, key: str) -> None:
    """Have an agent play `row`, which asks the session at `session_url` for turns."""
    endpoint = {"base_url": f"{session_url}/v1", "api_key": key or _NO_KEY}
    workers.play(sample, row, [json.dumps(endpoint)])


def _kill(process: ChildProcess) -> None:
    """Have the guard of a worker (`guard.py`) end it with all that it has started."""
    process.terminate()
    asyncio.get_running_loop().call_later(_TREE_S, process.kill)


async def _end(process: ChildProcess, pipe: AsyncPipe[FromWorker]) -> str:
    """How it ended, in words; killed if it runs on: it closed the pipe, or wrote nonsense."""
    deadline = Deadline(_ENDING_S)
    while (code := process.poll()) is None:
        if deadline.passed:
            _kill(process)
            deadline = Deadline(math.inf)
        await asyncio.sleep(_LOOK_S)
    pipe.close()
    return describe_exit(code)


def _differs(call: _PendingPlay, results: list[Result]) -> str:
    """Why answers must not go on that repeat earlier ones; "" if they are the same as then."""
    new = [hashlib.blake2b(msgspec.msgpack.encode(r), digest_size=8).digest() for r in results]
    if not call.play.responses:
        call.session.digests = new
        return ""
    first = len(call.play.responses) + 1 - len(new)  # the answer that `results` begins with
    known = call.session.digests[first : first + len(new) - 1]
    if known and known != new[: len(known)]:
        return (
            "the process of its environment ended, and another one answered differently: there is "
            "chance in the environment, so the sample can't go on"
        )
    call.session.digests[first:] = new
    return ""
