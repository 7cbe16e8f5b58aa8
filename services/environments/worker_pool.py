"""Which worker process plays what; conversations stay in the process that opened them.

A play that outlives its deadline costs its process, and that sample only. The other conversations
in that process are `Lost`: whoever leads them opens them again. A play that has not begun to hold
anything is sent to another process instead.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field

import msgspec

from umbra.proto.deadline import Deadline
from umbra.proto.errors import DeadlineError, UsageError
from umbra.services.config import EnvironmentConfig
from umbra.services.config.generation import JUDGED_AT_ONCE
from umbra.services.environments.loading import name_of
from umbra.services.environments.protocol import (
    Delivered,
    EpisodeOutcome,
    Lost,
    ParsedTurn,
    Row,
)
from umbra.services.environments.worker import Forget, Hello, Play, Played, Setup
from umbra.services.process.child import ChildProcess, describe_exit, python_argv, start_worker
from umbra.services.process.loop_thread import ends_with_it
from umbra.services.process.pipe import AsyncPipe

_LOOK_S = 0.005
_CLOSE_S = 5.0  # for all environments to be closed in the end
END_S = 60.0  # within which `WorkerPool.close` is done on any machine
_ENDING_S = 1.0  # for a process that has closed its pipe to end
_TREE_S = 10.0  # for a guard that was told so to end its processes
_GRACE_S = 5.0  # a worker that can still answer says itself that a play is overdue

NO_REWARD = "its agent returned no reward, and has posted none"
log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Conversation:
    """A sample's conversation, as the pool knows it; workers know it by its number."""

    key: str = ""  # of the sample, which may begin another one
    number: int = field(default_factory=itertools.count().__next__)
    worker: _WorkerHandle | None = None  # that holds it
    plays: int = 0  # that were answered
    finished: bool = False  # it was answered to its end
    lost: bool = False  # its process has ended, and it was not opened again
    crashed_at: int = -1  # the play during which its process ended

    @property
    def suspect(self) -> bool:
        """True if a process ended during the play that is next."""
        return self.plays == self.crashed_at


@dataclass(eq=False, slots=True)
class _Call:
    """A play that has no answer yet."""

    play: Play
    conversation: _Conversation
    timer: asyncio.TimerHandle | None = None

    def end_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


@dataclass(eq=False, slots=True)
class _WorkerHandle:
    process: ChildProcess
    pipe: AsyncPipe[Hello | Played]
    room: int
    closes: bool
    calls: dict[int, _Call] = field(default_factory=dict)
    waiting: deque[_Call] = field(default_factory=deque)  # whose conversations are here
    ending: set[int] = field(default_factory=set)  # calls whose samples are over
    alone: _Call | None = None  # a suspect's, which is played with no other beside it
    alive: bool = True
    condemned: bool = False  # it was killed by us

    @property
    def is_free(self) -> bool:
        reserved = self.ending or self.alone is not None
        return self.alive and not reserved and len(self.calls) < self.room

    def takes(self, call: _Call) -> bool:
        """Return whether `call` can be played now; nothing else begins before a suspect's."""
        if call.conversation.suspect and (self.alone is call or self.is_free):
            self.alone = call
            return not self.calls
        return self.is_free

    def end(self) -> None:
        self.condemned = True
        _kill(self.process)


class WorkerPool:
    """Worker processes and the conversations that they hold. Not thread-safe.

    Args:
        config: the environment; `workers` is how many processes there may be.
        deliver: called with each outcome.
        started: called with the sample whenever a process begins to play for it.
        agents: a play is all that an agent does, without a time limit. It is not sent again, since
            it would act twice, and is ended if its sample is over, with its process if needed.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        deliver: Callable[[EpisodeOutcome], None],
        started: Callable[[str], None] = lambda key: None,
        *,
        agents: bool = False,
    ) -> None:
        self._config = config
        self._deliver = deliver
        self._started = started
        self._agents = agents
        self._workers: list[_WorkerHandle] = []
        self._most, self._starting = config.workers, 0
        self._new: set[ChildProcess] = set()  # not ready yet
        self._numbers = itertools.count(1)
        self._closed = False
        self._conversations: dict[str, _Conversation] = {}
        self._queue: deque[_Call] = deque()  # that any process may play
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def room(self) -> int:
        """Return how many plays run at once in all processes; known once the first has started."""
        return self._config.workers * self._workers[0].room

    def play(self, key: str, row: Row, responses: Sequence[ParsedTurn | str]) -> None:
        """Ask for the answer to the last of `responses`, or for the opening; it is delivered."""
        conversation = self._conversations.setdefault(key, _Conversation(key))
        if not responses:
            conversation.plays, conversation.finished, conversation.lost = 0, False, False
        elif conversation.lost:
            return  # which was delivered
        number, name = next(self._numbers), str(conversation.number)
        call = _Call(Play(number, name, dict(row), list(responses)), conversation)
        (self._queue if conversation.worker is None else conversation.worker.waiting).append(call)
        self._pump()

    def play_agent(self, key: str, row: Row, session_url: str, api_key: str) -> None:
        """Have an agent play `row`, which asks the session at `session_url` for turns."""
        endpoint = {"base_url": f"{session_url}/v1", "api_key": api_key or "none"}  # clients insist
        self.play(key, row, [json.dumps(endpoint)])

    def forget(self, key: str) -> None:
        """End the sample; an answer in flight goes nowhere."""
        conversation = self._conversations.pop(key, None)
        if conversation is None or (worker := conversation.worker) is None:
            return
        self._release(worker, conversation)
        for call in [c for c in worker.calls.values() if c.conversation is conversation]:
            if self._agents and worker.room == 1:
                worker.end()
            elif self._agents:  # it may end itself, and the others with it go on
                worker.ending.add(call.play.number)
                self._time(worker, call, _GRACE_S)

    async def close(self) -> None:
        """End all processes; environments that have to be closed get a few seconds for it."""
        self._closed = True
        for process in self._new:
            _kill(process)
        deadline = Deadline(_CLOSE_S)
        closing = [worker for worker in self._workers if worker.closes]
        for worker in closing:
            worker.condemned = True
            worker.pipe.end_sending()
        while any(worker.alive for worker in closing) and not deadline.passed:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
        for worker in self._workers:
            worker.end()
        while self._tasks:
            await asyncio.wait(self._tasks)

    # -- dispatch ---------------------------------------------------------------------------------

    def _pump(self) -> None:
        if self._closed:
            return
        for worker in self._workers:
            while worker.waiting and worker.takes(worker.waiting[0]):
                self._send(worker, worker.waiting.popleft())
        while self._queue:
            call = self._queue[0]
            # The process that is set apart for it, or the idlest.
            free = [worker for worker in self._workers if worker.alone is call]
            free = free or [worker for worker in self._workers if worker.is_free]
            worker = min(free, key=lambda each: len(each.calls), default=None)
            if worker is None or not worker.takes(call):
                break
            self._send(worker, self._queue.popleft())
        if self._queue and len(self._workers) + self._starting < self._most:
            self._starting += 1
            self._spawn(self._grow())

    def _send(self, worker: _WorkerHandle, call: _Call) -> None:
        conversation = call.conversation
        if self._conversations.get(conversation.key) is not conversation:  # its sample is over
            worker.alone = None if worker.alone is call else worker.alone
            return
        conversation.worker = worker
        worker.calls[call.play.number] = call
        if not self._agents:  # who take as long as they like
            self._time(worker, call)
        worker.pipe.send(call.play)
        self._started(conversation.key)

    def _time(self, worker: _WorkerHandle, call: _Call, limit_s: float = 0.0) -> None:
        """End `worker` unless it answers `call` within so many seconds; 0 = as configured."""
        call.end_timer()
        limit_s = limit_s or self._config.timeout_s + (_GRACE_S if worker.room > 1 else 0.0)
        call.timer = asyncio.get_running_loop().call_later(limit_s, self._overdue, worker, call)

    def _overdue(self, worker: _WorkerHandle, call: _Call) -> None:
        worker.calls.pop(call.play.number, None)
        call.conversation.worker = None
        self._answer(call.conversation, None, self._overdue_error(call))
        worker.end()

    def _overdue_error(self, call: _Call) -> str:
        config = self._config
        activity = "its reward" if config.kind in JUDGED_AT_ONCE else "a step"
        activity = activity if call.play.responses else "the opening (reset)"
        limit = f"{config.where}.timeout_s = {config.timeout_s:g} s"
        return f"{name_of(config)}: {activity} took longer than {limit}"

    def _take_answer(self, worker: _WorkerHandle, reply: Played) -> None:
        worker.ending.discard(reply.number)
        call = worker.calls.pop(reply.number, None)
        if call is None:
            return
        call.end_timer()
        worker.alone = None if worker.alone is call else worker.alone
        conversation, config = call.conversation, self._config
        if conversation.suspect:
            conversation.crashed_at = -1
        conversation.plays += 1
        error = self._overdue_error(call) if reply.overdue else reply.error
        if reply.exhausted:
            error += f": it took more than {config.where}.memory_mb = {config.memory_mb}; raise it"
        if error and conversation.worker is worker:
            conversation.worker = None
            self._release(worker, conversation)
        whole = config.reward_scope == "group"
        value = reply.opening or (reply.steps if whole else next(iter(reply.steps), None))
        conversation.finished = isinstance(value, list) or getattr(value, "done", False)
        self._answer(conversation, None if error else value, error)
        if reply.exhausted:
            worker.end()

    def _answer(self, answered: _Conversation, value: Delivered | None, error: str) -> None:
        if self._conversations.get(answered.key) is answered:
            self._deliver(EpisodeOutcome(answered.key, value, error))

    def _release(self, worker: _WorkerHandle, over: _Conversation) -> None:
        """Have `worker` forget it; closing its environment is a play without an answer."""
        number, name = next(self._numbers) if worker.closes else 0, str(over.number)
        if number:
            call = worker.calls[number] = _Call(Play(number, name), _Conversation())
            self._time(worker, call)
        worker.pipe.send(Forget(name, number))

    # -- processes --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start a process; UsageError or DeadlineError if the environment does not load."""
        config = self._config
        process, end = start_worker(python_argv("umbra.services.environments.worker"))
        pipe: AsyncPipe[Hello | Played] = AsyncPipe(end, Hello | Played)
        pipe.send(Setup(msgspec.convert(config, EnvironmentConfig, from_attributes=True)))
        self._new.add(process)
        if self._closed:
            _kill(process)
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
        finally:
            self._new.remove(process)
        if not isinstance(hello, Hello) or hello.usage_error:
            how = await _end(process, pipe)
            ended = f"a process for {name_of(config)} ended ({how}) when it was started"
            raise UsageError(hello.usage_error if isinstance(hello, Hello) else ended)
        worker = _WorkerHandle(process, pipe, hello.room, hello.closes)
        self._workers.append(worker)
        self._spawn(self._read(worker))

    async def _grow(self) -> None:
        try:
            await self.start()
        except (UsageError, DeadlineError, OSError) as error:
            if not self._closed:
                log.warning("one more process for environments does not start: %s", error)
            self._most, loop = len(self._workers) or self._most, asyncio.get_running_loop()
            loop.call_later(self._config.setup_s, setattr, self, "_most", self._config.workers)
            if not self._workers:
                waiting, self._queue = self._queue, deque()
                for call in waiting:
                    self._answer(call.conversation, None, f"no process for environments: {error}")
        finally:
            self._starting -= 1
        self._pump()

    async def _read(self, worker: _WorkerHandle) -> None:
        while isinstance(message := await worker.pipe.receive(), Played):
            self._take_answer(worker, message)
            self._pump()
        self._drop(worker, await _end(worker.process, worker.pipe))
        self._pump()

    def _drop(self, worker: _WorkerHandle, end: str) -> None:
        worker.alive = False
        self._workers.remove(worker)
        for call in worker.calls.values():
            call.end_timer()
            conversation = call.conversation
            # Alone in its process, or there at two ends: it is the one.
            if not worker.condemned and (worker.room == 1 or conversation.suspect):
                conversation.worker = None
                self._answer(conversation, None, f"the process of its environment ended ({end})")
                continue
            if not worker.condemned:
                conversation.crashed_at = conversation.plays
            if not conversation.plays and not self._agents:
                conversation.worker = None
                self._queue.appendleft(call)
        counts = self._agents and not worker.condemned
        reason = f"the process of its agent ended ({end})" if counts else ""
        for key, conversation in list(self._conversations.items()):
            if conversation.worker is worker:
                conversation.worker = None
                if not conversation.finished:
                    conversation.lost = True
                    self._deliver(EpisodeOutcome(key, Lost(reason)))

    def _spawn(self, coroutine: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(coroutine, name="the keeper of environment processes")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(ends_with_it)


def offered_name(environment: EnvironmentConfig) -> str:
    return getattr(environment, "name", "") or name_of(environment)


def _kill(process: ChildProcess) -> None:
    """Have a worker's guard (`guard.py`) end it and all processes that it started."""
    process.terminate()
    asyncio.get_running_loop().call_later(_TREE_S, process.kill)


async def _end(process: ChildProcess, pipe: AsyncPipe[Hello | Played]) -> str:
    """Wait for a process that closed its pipe or wrote garbage, or kill it; say how it ended."""
    deadline = Deadline(_ENDING_S)
    while (code := process.poll()) is None:
        if deadline.passed:
            _kill(process)
            deadline = Deadline(math.inf)
        await asyncio.sleep(_LOOK_S)
    pipe.close()
    return describe_exit(code)
