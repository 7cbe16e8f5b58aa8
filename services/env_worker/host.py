"""Agents on this machine: from the lease of a session to its reward.

One event loop, in a thread of its own, holds the processes of the agents and the requests to the
generators; the worker's loop begins, forgets and collects.
"""

from __future__ import annotations

import asyncio
import logging
import queue
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from umbra.proto.errors import PeerLostError, RejectedError
from umbra.proto.records import SessionTask
from umbra.services.config import EnvironmentConfig
from umbra.services.env_worker.endpoint import SessionClient
from umbra.services.environments.agent_workers import (
    NO_REWARD,
    PLAYED_TWICE,
    agent_workers,
    start_agent,
)
from umbra.services.environments.environment_host import Delivered
from umbra.services.environments.protocol import StepResult
from umbra.services.environments.worker_pool import END_S
from umbra.services.process.loop_thread import LoopThread, ends_with_it

Lease = tuple[str, int]
"""`(sample_id, attempt)`."""

_SLACK_S = 10.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EndedSession:
    """A session that no agent of ours works on any more."""

    lease: Lease
    unreachable: str = ""  # why it never began, if its generator could not be reached
    failure: str = ""  # why there is no reward, if so


class AgentHost:
    """Runs the agent of a run for many sessions.

    Args:
        config: the agent, and how many processes of it there may be.
        wake: called, from any thread, whenever a session has ended.

    Raises:
        UsageError: the agent can't be loaded.
        DeadlineError: loading it took too long.
    """

    def __init__(
        self, config: EnvironmentConfig, *, wake: Callable[[], None] = lambda: None
    ) -> None:
        self._wake = wake
        self._ended: queue.SimpleQueue[EndedSession] = queue.SimpleQueue()
        self._sessions: dict[str, SessionTask] = {}  # by the key of their play
        self._playing: set[str] = set()
        self._reports: set[asyncio.Task[None]] = set()
        self._client = SessionClient()
        self._workers = agent_workers(config, self._left, self._began)
        self._thread = LoopThread("agents")
        try:
            self._thread.wait(self._workers.start(), config.setup_s + _SLACK_S)
        except BaseException:
            self.close()
            raise
        self.room = self._workers.room

    def begin(self, task: SessionTask) -> None:
        """Run an agent for the session."""
        self._thread.call(self._take, task)

    def forget(self, leases: Iterable[Lease]) -> None:
        """These are not ours any more: their agents are ended, and nothing is told of them."""
        for lease in leases:
            self._thread.call(self._drop, _key(lease))

    def ended(self) -> list[EndedSession]:
        """The sessions that have ended since the last call."""
        found: list[EndedSession] = []
        while True:
            try:
                found.append(self._ended.get_nowait())
            except queue.Empty:
                return found

    def close(self) -> None:
        """End all agents."""
        if not self._thread.closed:
            self._thread.wait(self._stop(), END_S)
            self._thread.close()
        self._client.close()

    # -- within the event loop --------------------------------------------------------------------

    def _take(self, task: SessionTask) -> None:
        key = _key((task.sample_id, task.attempt))
        self._drop(key)  # of another session of the same lease
        self._sessions[key] = task
        self._spawn(self._begin(key, task))

    async def _begin(self, key: str, task: SessionTask) -> None:
        try:
            row = await self._client.begin(task)
        except RejectedError as error:
            log.debug("%s: %s", task.url, error)
            self._end(key, task)
        except PeerLostError as error:
            self._end(key, task, unreachable=str(error))
        else:
            if self._sessions.get(key) is task:
                start_agent(self._workers, key, row, task.url, task.key)

    def _began(self, key: str) -> None:
        task = self._sessions.get(key)
        if task is None:
            return
        if key in self._playing:  # what it did is not done twice
            self._workers.forget(key)
            self._spawn(self._fail(key, task, PLAYED_TWICE))
        self._playing.add(key)

    def _left(self, key: str, value: Delivered | None, error: str) -> None:
        """An agent's function has returned."""
        task = self._sessions.get(key)
        if task is None:
            return
        self._workers.forget(key)
        if isinstance(value, StepResult) and value.done:
            self._spawn(self._reward(key, task, value))
        else:
            self._spawn(self._fail(key, task, error or NO_REWARD))

    async def _reward(self, key: str, task: SessionTask, result: StepResult) -> None:
        try:
            await self._client.reward(task, result)
        except RejectedError as error:
            await self._fail(key, task, str(error))
        except PeerLostError as error:
            self._lost(key, task, error)
        else:
            self._end(key, task)

    async def _fail(self, key: str, task: SessionTask, reason: str) -> None:
        try:
            await self._client.give_up(task, reason)
        except RejectedError:  # it has its reward, or is over for another reason
            self._end(key, task)
        except PeerLostError as error:
            self._lost(key, task, error)
        else:
            self._end(key, task, failure=reason)

    def _lost(self, key: str, task: SessionTask, error: PeerLostError) -> None:
        log.warning("a session ended, but its generator cannot be told: %s", error)
        self._end(key, task)

    def _end(
        self, key: str, task: SessionTask, *, unreachable: str = "", failure: str = ""
    ) -> None:
        if self._sessions.get(key) is not task:
            return  # forgotten meanwhile
        self._drop(key)
        self._ended.put(EndedSession((task.sample_id, task.attempt), unreachable, failure))
        self._wake()

    def _drop(self, key: str) -> None:
        if self._sessions.pop(key, None) is not None:
            self._playing.discard(key)
            self._workers.forget(key)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine, name="a session of an agent")
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)
        task.add_done_callback(ends_with_it)

    async def _stop(self) -> None:
        self._sessions.clear()
        for task in self._reports:
            task.cancel()
        await self._workers.close()


def _key(lease: Lease) -> str:
    return f"{lease[0]}/{lease[1]}"
