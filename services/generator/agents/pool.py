"""Agents in the place of environments: their samples are sessions, their turns come over HTTP.

One event loop, in a thread of its own, holds sessions, HTTP server and the processes of our agents;
the generator's loop plays, collects and answers as with any other pool.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from umbra.proto.bounds import LEASES, Name
from umbra.proto.deadline import Deadline
from umbra.proto.errors import UNREADABLE, UmbraError, UsageError
from umbra.services.config import EnvironmentConfig
from umbra.services.config.trajectory_rules import reward_fault
from umbra.services.environments.loading import name_of
from umbra.services.environments.pool import Outcomes
from umbra.services.environments.protocol import (
    Begun,
    EpisodeOutcome,
    Lost,
    ParsedTurn,
    Row,
    StepResult,
    Turn,
)
from umbra.services.environments.worker_pool import END_S, NO_REWARD, WorkerPool, offered_name
from umbra.services.generator.agents.calls import AgentProtocol, Answer, Call, CallRules
from umbra.services.generator.agents.protocols import Completions, Messages, Responses
from umbra.services.generator.agents.session import AgentSession, SessionRegistry
from umbra.services.http import KEY_VARIABLE, ApiError, HttpServer, is_local, listen, url_at
from umbra.services.process.loop_thread import LoopThread, ends_with_it

MAX_BODY = 32 << 20
SILENT_S = 15.0  # of a stream, after which a comment is sent
_MAX_WAIT_S = 60.0
_SLACK_S = 10.0
_LOOK_S = 0.2
_REQUESTS = 4096  # an agent that waits for the model holds one
_EVENTS = "text/event-stream"
_PORTS_TRIED = 64
_ANY_PORT = "127.0.0.1:0"
_REPEATED = "x-stainless-retry-count"  # what the openai clients send; not "0" in a repetition

log = logging.getLogger(__name__)

LeaseSeconds = Annotated[float, Meta(ge=0, le=3600)]
Handler = Callable[[Request], Awaitable[Response]]
_PROTOCOLS: dict[str, type[AgentProtocol]] = {
    "/v1/chat/completions": Completions,
    "/v1/responses": Responses,
    "/v1/messages": Messages,
}


class _Lease(msgspec.Struct):
    wait_s: float = 30.0
    lease_s: LeaseSeconds | None = None  # None: the session is its agent's until that is silent
    environment: str = ""


class _Renewal(msgspec.Struct, forbid_unknown_fields=True):
    ids: Annotated[list[Name], Meta(max_length=LEASES)]
    lease_s: LeaseSeconds


class _Reward(msgspec.Struct, forbid_unknown_fields=True):
    reward: float
    parts: dict[str, float] = {}
    reason: Name = "stop"  # why the sample ended


class _Reason(msgspec.Struct):
    reason: str = "it gave no reason"


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
        self._config, self._settings = config, settings
        self._created = int(time.time())  # the time in replies
        self.sessions = SessionRegistry(
            config.timeout_s,
            self.deliver,
            lambda session, turn: self._thread.call(self._replied, session, turn),
            branches=config.branches == "train",
        )
        self._arrival = asyncio.Event()  # of a sample, for agents that wait for one
        self._stopping = False
        self._workers: WorkerPool | None = None
        if config.starts_agents:
            self._workers = WorkerPool(config, self._left, self._began, agents=True)
        self._server = HttpServer(
            self._app(),
            bound,
            key=settings.key,
            max_body=MAX_BODY,
            requests=_REQUESTS,
            name=(urlsplit(self.url).hostname or "") if settings.advertise else "",
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

    # -- the HTTP server --------------------------------------------------------------------------

    def _app(self) -> Starlette:
        base = "/sessions/{session}"
        routes: list[tuple[str, str, Handler]] = [
            ("POST", "/sessions", self._lease),
            ("POST", "/sessions/renew", self._renew),
            ("DELETE", base, self._give_up),
            ("POST", f"{base}/reward", self._reward),
            ("POST", f"{base}/v1/reward", self._reward),
        ]
        for path, protocol in _PROTOCOLS.items():
            routes.append(("POST", base + path, partial(self._complete, protocol)))
            routes.append(("POST", path, self._no_session))
        for path in ("/v1/models", "/v1/models/{model}"):
            routes += [("GET", path, self._models), ("GET", base + path, self._models)]
        return Starlette(
            routes=[Route(path, run, methods=[method]) for method, path, run in routes],
            exception_handlers={HTTPException: _refusal, ApiError: _refusal},
        )

    async def _lease(self, request: Request) -> Response:
        """Answer an agent from outside with a session, as soon as there is one."""
        if self._workers is not None:
            own = "environment.agent is set: this run starts its agents"
            raise ApiError(own, status=404, code="no_work")
        lease = _read(await request.body() or b"{}", _Lease)
        wanted, served = lease.environment, offered_name(self._config)
        if wanted and wanted != served:
            other = f"this endpoint serves {served}, not {wanted}"
            raise ApiError(other, status=404, code="other_environment")
        wait_s = min(max(lease.wait_s, 0.0), _MAX_WAIT_S)
        lease_s = math.inf if lease.lease_s is None else lease.lease_s
        deadline = Deadline(wait_s)
        while await request.is_disconnected() or not (
            session := self.sessions.lease(time.monotonic(), lease_s)
        ):
            if deadline.passed or self._stopping:
                none = f"there is no sample to work on within {wait_s:g} s"
                raise ApiError(none, status=503, code="no_work")
            with suppress(TimeoutError):
                async with asyncio.timeout(deadline.left_s):
                    await self._arrival.wait()
        self.deliver(EpisodeOutcome(session.key, Begun()))
        # Where it came in, and never what it says of that.
        url = self.url if self._settings.advertise else url_at(*request.scope["server"])
        url = f"{url}/sessions/{session.id}"
        facts = {"id": session.id, "url": url, "base_url": f"{url}/v1", "row": session.row}
        return JSONResponse({**facts, "timeout_s": session.silence_s}, 201)

    async def _renew(self, request: Request) -> Response:
        renewal = _read(await request.body(), _Renewal)
        lost = self.sessions.renew(renewal.ids, time.monotonic(), renewal.lease_s)
        return JSONResponse({"lost": lost})

    async def _complete(self, kind: type[AgentProtocol], request: Request) -> Response:
        protocol = kind(request.path_params["session"], self._settings.model, self._created)
        try:
            session = self._session(request)
            call = protocol.call(await request.body(), self._settings.rules)
            repeated = request.headers.get(_REPEATED, "0") != "0"
            future = asyncio.wrap_future(session.ask(call, repeated=repeated))
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
            # A refusal has its status, unless it comes so late that the stream has begun.
            await asyncio.wait({future}, timeout=SILENT_S if call.stream else None)
            if not future.done():
                return StreamingResponse(_events(protocol, call, future), media_type=_EVENTS)
            answer = future.result()
        except ApiError as error:
            return JSONResponse(protocol.error(error), error.status)
        if call.stream:
            return Response(protocol.events(call, answer), media_type=_EVENTS)
        return JSONResponse(protocol.whole(call, answer))

    async def _reward(self, request: Request) -> Response:
        reward = _read(await request.body(), _Reward)
        if fault := reward_fault(reward.reward, reward.parts, reward.reason):
            raise ApiError(f"invalid reward: {fault}", param="reward")
        session = self._session(request)
        parts = reward.parts
        session.rewarded(StepResult(reward.reward, reward_parts=parts, reason=reward.reason))
        if self._workers is None:
            self._settle(session)
        elif session.over is None and not session.left:
            session.wait(time.monotonic())  # for the end of its program
        return JSONResponse({"id": session.id, "reward": reward.reward})

    async def _give_up(self, request: Request) -> Response:
        reason = _read(await request.body() or b"{}", _Reason).reason
        session = self._session(request)
        if session.over is None and session.reward is not None:
            raise ApiError("this session has its reward", code="rewarded")
        session.abandon(f"its agent gave up: {reason}")
        self.deliver(EpisodeOutcome(session.key, error=session.verdict))
        return JSONResponse({"id": session.id, "deleted": True})

    async def _models(self, request: Request) -> Response:
        if "session" in request.path_params:
            self._session(request)
        model = self._settings.model
        entry = {"id": model, "object": "model", "created": 0, "owned_by": "umbra"}
        name = request.path_params.get("model")
        if name not in (None, model):
            called = f"the model is called {model!r}"
            raise ApiError(called, status=404, code="model_not_found")
        return JSONResponse(entry if name else {"object": "list", "data": [entry]})

    async def _no_session(self, request: Request) -> Response:
        where = "ask for completions in a session: POST /sessions, and use its base_url"
        raise ApiError(where, status=404, code="session_not_found")

    def _session(self, request: Request) -> AgentSession:
        return self.sessions.find(request.path_params["session"])

    # -- sessions, within the event loop ----------------------------------------------------------

    def _open(self, key: str, row: Row) -> None:
        session = self.sessions.open(key, row)
        if self._workers is not None:
            self._workers.forget(key)  # an earlier attempt of the same sample
            url = f"{self.url}/sessions/{session.id}"
            self._workers.play_agent(key, row, url, self._settings.key)
        self._arrival.set()
        self._arrival = asyncio.Event()

    def _close(self, key: str) -> None:
        self.sessions.close(key)
        if self._workers is not None:
            self._workers.forget(key)

    def _replied(self, session: AgentSession, turn: Turn | UmbraError) -> None:
        session.answered(turn, time.monotonic())
        if self._workers is None or session.left:
            self._settle(session)

    def _settle(self, session: AgentSession) -> None:
        """Deliver the reward, if there is one and the model is done with its turn."""
        if session.reward is not None and not session.asking and session.over is None:
            value = session.reward if session.turns else None
            refused = f"its agent was done while its only request was refused: {session.refusal}"
            self.deliver(EpisodeOutcome(session.key, value, "" if value else refused))

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

    def _lose(self, key: str, why: str, lost: Lost) -> None:
        """Have the sample begin again, for another agent."""
        self.sessions.close(key, why)
        log.info("sample %s: its agent is lost: %s", key, why)
        self.deliver(EpisodeOutcome(key, lost))


async def _events(
    protocol: AgentProtocol, call: Call, answer: asyncio.Future[Answer]
) -> AsyncIterator[bytes]:
    """Yield comments until the reply is there, so that no client takes the server for dead."""
    while not answer.done():
        yield b": the model is at it\n\n"
        await asyncio.wait({answer}, timeout=SILENT_S)
    try:
        yield protocol.events(call, answer.result())
    except ApiError as error:
        yield protocol.broken(error)


def _read(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE as error:
        raise ApiError(f"the body is not valid: {error}") from error


async def _refusal(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # of a path or method that there is not
        sentence = f"{request.method} {request.url.path}: {error.detail}"
        error = ApiError(sentence, status=error.status_code, code="not_found")
    assert isinstance(error, ApiError)
    headers = {"retry-after": "1"} if error.status == 503 else None
    return JSONResponse(error.body(), error.status, headers)


def bind(address: str, key: str) -> socket.socket:
    """Return a listening socket at HOST:PORT, or at the first port after it that is free.

    Several generators on one host can so be given the same address. "" is any port of this host.
    Raises UsageError for no address, or one that others reach while there is no key.
    """
    bound = listen(address or _ANY_PORT, "generator.serve =", ports=_PORTS_TRIED)
    if key or is_local(bound):
        return bound
    bound.close()
    raise UsageError(
        f"generator.serve = {address} is reached from other machines: set {KEY_VARIABLE}, or use "
        "127.0.0.1"
    )


def url_of(bound: socket.socket, advertise: str = "") -> str:
    """Return the URL at which agents reach the socket.

    `advertise` is HOST or HOST:PORT to tell them instead of its own; raises UsageError if neither.
    """
    host, port = bound.getsockname()[:2]
    if advertise:
        parts = urlsplit(f"//{advertise}")
        with suppress(ValueError):
            if parts.hostname and parts.netloc == advertise and "@" not in advertise:
                return url_at(parts.hostname, parts.port or port)
        raise UsageError(f"generator.serve_advertise = {advertise}: write it as HOST or HOST:PORT")
    if ipaddress.ip_address(host).is_unspecified:
        host = "127.0.0.1" if bound.family == socket.AF_INET else "::1"
    return url_at(host, port)
