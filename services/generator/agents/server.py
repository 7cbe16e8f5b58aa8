"""The HTTP edge: routes and bodies. `AgentPool` and `AgentSession` make the decisions."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from umbra.proto.bounds import LEASES, Name
from umbra.proto.errors import UNREADABLE, UsageError
from umbra.services.config.trajectory_rules import reward_fault
from umbra.services.environments.protocol import StepResult
from umbra.services.generator.agents.calls import AgentProtocol, Answer, Call, CallRules
from umbra.services.generator.agents.protocols import Completions, Messages, Responses
from umbra.services.generator.agents.session import AgentSession
from umbra.services.http import KEY_VARIABLE, ApiError, is_local, listen, url_at

if TYPE_CHECKING:
    from umbra.services.generator.agents.pool import AgentPool

MAX_BODY = 32 << 20
_MAX_WAIT_S = 60.0
SILENT_S = 15.0  # of a stream, after which a comment is sent
_EVENTS = "text/event-stream"
_PORTS_TRIED = 64
_ANY_PORT = "127.0.0.1:0"
_REPEATED = "x-stainless-retry-count"  # what the openai clients send; not "0" in a repetition

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


@dataclass
class Edge:
    """The HTTP server of the sessions of `pool`."""

    pool: AgentPool
    rules: CallRules
    model: str  # its name in replies
    created: int  # the time in replies, seconds since the epoch
    url: str = ""  # that agents get; "" = the address at which they came

    def app(self) -> Starlette:
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
        lease = _read(await request.body() or b"{}", _Lease)
        wait_s = min(max(lease.wait_s, 0.0), _MAX_WAIT_S)
        lease_s = math.inf if lease.lease_s is None else lease.lease_s
        session = await self.pool.lease(wait_s, lease_s, lease.environment)
        if session is None:
            none = f"there is no sample to work on within {wait_s:g} s"
            raise ApiError(none, status=503, code="no_work")
        # Where it came in, and never what it says of that.
        url = f"{self.url or url_at(*request.scope['server'])}/sessions/{session.id}"
        facts = {"id": session.id, "url": url, "base_url": f"{url}/v1", "row": session.row}
        return JSONResponse({**facts, "timeout_s": session.silence_s}, 201)

    async def _renew(self, request: Request) -> Response:
        renewal = _read(await request.body(), _Renewal)
        lost = self.pool.sessions.renew(renewal.ids, time.monotonic(), renewal.lease_s)
        return JSONResponse({"lost": lost})

    async def _complete(self, kind: type[AgentProtocol], request: Request) -> Response:
        protocol = kind(request.path_params["session"], self.model, self.created)
        try:
            session = self._session(request)
            call = protocol.call(await request.body(), self.rules)
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
        result = StepResult(reward.reward, reward_parts=reward.parts, reason=reward.reason)
        self.pool.reward(session, result)
        return JSONResponse({"id": session.id, "reward": reward.reward})

    async def _give_up(self, request: Request) -> Response:
        reason = _read(await request.body() or b"{}", _Reason).reason
        session = self._session(request)
        self.pool.give_up(session, reason)
        return JSONResponse({"id": session.id, "deleted": True})

    async def _models(self, request: Request) -> Response:
        if "session" in request.path_params:
            self._session(request)
        entry = {"id": self.model, "object": "model", "created": 0, "owned_by": "umbra"}
        name = request.path_params.get("model")
        if name not in (None, self.model):
            called = f"the model is called {self.model!r}"
            raise ApiError(called, status=404, code="model_not_found")
        return JSONResponse(entry if name else {"object": "list", "data": [entry]})

    async def _no_session(self, request: Request) -> Response:
        where = "ask for completions in a session: POST /sessions, and use its base_url"
        raise ApiError(where, status=404, code="session_not_found")

    def _session(self, request: Request) -> AgentSession:
        return self.pool.sessions.find(request.path_params["session"])


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
