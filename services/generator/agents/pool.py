"""Agents in the place of environments: their samples are sessions, their turns come over HTTP.

One event loop, in a thread of its own, holds sessions, HTTP server and the processes of our agents;
the generator's loop plays, collects and answers as with any other pool.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from umbra.proto.deadline import Deadline
from umbra.proto.errors import UmbraError
from umbra.services.config import EnvironmentConfig
from umbra.services.environments.loading import name_of
from umbra.services.environments.pool import Outcomes
from umbra.services.environments.protocol import (
    Ask,
    Begun,
    EpisodeOutcome,
    Lost,
    ParsedTurn,
    Row,
    StepResult,
    Turn,
)
from umbra.services.environments.worker_pool import END_S, NO_REWARD, WorkerPool, offered_name
from umbra.services.generator.agents.calls import Call, CallRules
from umbra.services.generator.agents.server import MAX_BODY, Edge, url_of
from umbra.services.generator.agents.session import AgentSession, News, SessionRegistry
from umbra.services.http import ApiError, HttpServer
from umbra.services.process.loop_thread import LoopThread, ends_with_it

_SLACK_S = 10.0
_LOOK_S = 0.2
_LONELY_S = 60.0  # samples that nobody takes for so long are worth a warning
_REQUESTS = 4096  # an agent that waits for the model holds one

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgentSettings:
    rules: CallRules
    model: str  # name in replies
    key: str = ""
    advertise: str = ""  # HOST or HOST:PORT that agents are told


class AgentPool(Outcomes):
    """An `EnvironmentPool` whose conversations are led by agents, who come to `bound`.

    `wake` is called, from any thread, whenever an outcome is there.

    Raises:
        UsageError: the agent can't be loaded.
        DeadlineError: loading it took too long.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        settings: AgentSettings,
        bound: socket.socket,
        *,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(wake)
        self.url = url_of(bound, settings.advertise)
        self._config, self._key = config, settings.key
        branches = config.branches == "train"
        self.sessions = SessionRegistry(config.timeout_s, self._pass_on, branches=branches)
        self._arrival = asyncio.Event()  # of a sample, for agents that wait for one
        self._stopping = False
        self._workers: WorkerPool | None = None
        if config.starts_agents:
            self._workers = WorkerPool(config, self._left, self._began, agents=True)
        self._idle_since = time.monotonic()
        url = self.url if settings.advertise else ""
        self._server = HttpServer(
            Edge(self, settings.rules, settings.model, int(time.time()), url).app(),
            bound,
            key=settings.key,
            max_body=MAX_BODY,
            requests=_REQUESTS,
            name=urlsplit(url).hostname or "",
        )
        self._watch: asyncio.Task[None] | None = None
        self._thread = LoopThread("agents")
        try:
            self._thread.wait(self._start(), config.setup_s + _SLACK_S)
        except BaseException:
            self.close()
            raise

    # -- as an environment pool, from the generator's thread --------------------------------------

    def play(self, key: str, row: Row, responses: Sequence[ParsedTurn | str]) -> None:
        """Open a session for sample `key`; the model's turns answer its requests."""
        assert not responses, "agents are answered through their Ask"
        self._thread.call(self._open, key, row)

    def forget(self, key: str) -> None:
        self._thread.call(self._close, key)

    def close(self) -> None:
        if not self._thread.closed:
            self._thread.wait(self._stop(), END_S)
            self._thread.close()

    # -- sessions, within the event loop ----------------------------------------------------------

    async def lease(self, wait_s: float, lease_s: float, environment: str) -> AgentSession | None:
        """Return a session for an agent from outside, as soon as there is one.

        Raises ApiError if this is not the endpoint of `environment`; "" = any.
        """
        if self._workers is not None:
            own = "environment.agent is set: this run starts its agents"
            raise ApiError(own, status=404, code="no_work")
        if environment and environment != (served := offered_name(self._config)):
            other = f"this endpoint serves {served}, not {environment}"
            raise ApiError(other, status=404, code="other_environment")
        deadline = Deadline(wait_s)
        while (session := self.sessions.lease(time.monotonic(), lease_s)) is None:
            if deadline.passed or self._stopping:
                return None
            with suppress(TimeoutError):
                async with asyncio.timeout(deadline.left_s):
                    await self._arrival.wait()
        self._idle_since = time.monotonic()
        self.deliver(EpisodeOutcome(session.key, Begun()))
        return session

    def _pass_on(self, session: AgentSession, call: Call, news: News) -> None:
        ask = Ask(
            reply=lambda turn: self._thread.call(self._replied, session, turn),
            messages=news.messages,
            tools=call.tools,
            calls=news.calls,
            after=news.after,
            max_tokens=call.max_tokens,
            pieces=call.logprobs,
            stops=call.stops,
        )
        self.deliver(EpisodeOutcome(session.key, ask))

    def reward(self, session: AgentSession, result: StepResult) -> None:
        session.rewarded(result)
        if self._workers is None:
            self._settle(session)
        elif session.over is None and not session.left:
            session.wait(time.monotonic())  # for the end of its program

    def give_up(self, session: AgentSession, reason: str) -> None:
        if session.over is None and session.reward is not None:
            raise ApiError("this session has its reward", code="rewarded")
        session.abandon(f"its agent gave up: {reason}")
        self.deliver(EpisodeOutcome(session.key, error=session.verdict))

    def _open(self, key: str, row: Row) -> None:
        session = self.sessions.open(key, row)
        if self._workers is not None:
            self._workers.forget(key)  # an earlier attempt of the same sample
            url = f"{self.url}/sessions/{session.id}"
            self._workers.play_agent(key, row, url, self._key)
        self._arrival.set()
        self._arrival = asyncio.Event()

    def _close(self, key: str) -> None:
        self.sessions.close(key)
        if self._workers is not None:
            self._workers.forget(key)

    def _replied(self, session: AgentSession, turn: Turn | UmbraError) -> None:
        if session.over is not None:
            return
        session.answered(turn, time.monotonic())
        if self._workers is None or session.left:
            self._settle(session)

    def _settle(self, session: AgentSession) -> None:
        """Deliver the reward, if there is one and the model is done with its turn."""
        if session.reward is not None and not session.asking and session.over is None:
            self.deliver(EpisodeOutcome(session.key, session.reward))

    # -- our own agents ---------------------------------------------------------------------------

    def _began(self, key: str) -> None:
        if (session := self.sessions.of(key)) is not None:
            session.begin(time.monotonic())
            self.deliver(EpisodeOutcome(key, Begun()))

    def _left(self, outcome: EpisodeOutcome) -> None:
        """Take an agent's result, or that it is lost with its process."""
        key, value = outcome.key, outcome.value
        session = self.sessions.of(key)
        if session is None:
            return
        if isinstance(value, Lost):
            self._lose(key, value.reason or "the process of its agent was ended", value)
            return
        try:
            if not isinstance(value, StepResult):
                raise ApiError(outcome.error)
            if value.done:
                session.rewarded(value)
            elif session.reward is None:
                raise ApiError(NO_REWARD)
        except ApiError as problem:
            self.deliver(EpisodeOutcome(key, error=str(problem)))
        else:
            session.leave()
            self._settle(session)

    # -- the event loop ---------------------------------------------------------------------------

    async def _start(self) -> None:
        await self._server.start()
        if self._workers is not None:
            await self._workers.start()
        self._watch = asyncio.create_task(self._keep_watch(), name="the keeper of agents' sessions")
        self._watch.add_done_callback(ends_with_it)

    async def _stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._stopping = True
        self._arrival.set()
        self.sessions.close_all("the generator stops")
        if self._workers is not None:
            await self._workers.close()
        await self._server.stop()

    async def _keep_watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            for session in self.sessions.overdue(now):
                if session.reward is not None:
                    session.leave()
                    self._settle(session)
                    continue
                refusal = session.refusal and f"; its last request was refused: {session.refusal}"
                session.abandon(
                    f"{name_of(self._config)} asked for nothing for {self._config.where}.timeout_s "
                    f"= {self._config.timeout_s:g} s after turn {session.turns}{refusal}"
                )
                self.deliver(EpisodeOutcome(session.key, error=session.verdict))
            for session in self.sessions.expired(now):
                why = "its agent's lease was not renewed in time"
                self._lose(session.key, why, Lost(why))
            waiting = self.sessions.waiting
            if self._workers is not None or not waiting:
                self._idle_since = now
            elif now - self._idle_since > _LONELY_S:
                lonely = "%d samples wait for an agent: none has come to %s/sessions in %.0f s"
                log.warning(lonely, waiting, self.url, _LONELY_S)
                self._idle_since = now

    def _lose(self, key: str, why: str, lost: Lost) -> None:
        """Have the sample begin again, for another agent."""
        self.sessions.close(key, why)
        log.info("sample %s: its agent is lost: %s", key, why)
        self.deliver(EpisodeOutcome(key, lost))
