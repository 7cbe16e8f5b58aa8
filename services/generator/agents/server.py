"""The HTTP edge: routes and bodies. What is decided lies in `AgentPool` and `AgentSession`."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
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
from umbra.services.environments.protocol import StepResult
from umbra.services.generator.agents.calls import Call, CallRules, read_chat, read_text
from umbra.services.generator.agents.messages_api import Messages, read_messages
from umbra.services.generator.agents.replies import (
    Answer,
    Completions,
    Form,
    ReplyHead,
    model_entry,
    model_list,
)
from umbra.services.generator.agents.responses_api import Responses, read_responses
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
Read = Callable[[bytes, CallRules], Call]
_COMPLETIONS: dict[str, tuple[Read, Callable[[ReplyHead], Form]]] = {
    "/v1/chat/completions": (read_chat, Completions),
    "/v1/completions": (read_text, Completions),
    "/v1/responses": (read_responses, Responses),
    "/v1/messages": (read_messages, Messages),
}
"""How the model is asked: by path, what reads a request and how its reply looks."""


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


class Edge:
    """Serves `sessions` to HTTP clients, which are told `url` if it is not empty, else the address
    at which they came. `model` and `created`, seconds since the epoch, stand in replies.
    """

    def __init__(
        self, sessions: AgentPool, rules: CallRules, model: str, created: int, url: str = ""
    ) -> None:
        self._url = url
        self._sessions = sessions
        self._rules = rules
        self._model = model
        self._created = created

    def app(self) -> Starlette:
        base = "/sessions/{session}"
        routes: list[tuple[str, str, Handler]] = [
            ("POST", "/sessions", self._lease),
            ("POST", "/sessions/renew", self._renew),
            ("DELETE", base, self._give_up),
            ("POST", base + "/reward", self._reward),
            ("POST", base + "/v1/reward", self._reward),
            ("POST", base + "/scoring", self._scoring),
            ("POST", base + "/v1/scoring", self._scoring),
        ]
        for path, (read, form) in _COMPLETIONS.items():
            routes.append(("POST", base + path, partial(self._complete, read, form)))
            routes.append(("POST", path, self._no_session))
        for prefix in ("", base):
            routes.append(("GET", prefix + "/v1/models", self._models))
            routes.append(("GET", prefix + "/v1/models/{model}", self._one_model))
        return Starlette(
            routes=[Route(path, self._guarded(run), methods=[m]) for m, path, run in routes],
            exception_handlers={HTTPException: _http_error},
        )

    def _guarded(self, run: Handler) -> Handler:
        async def handle(request: Request) -> Response:
            try:
                return await run(request)
            except ApiError as error:
                return _refusal(error)

        return handle

    async def _lease(self, request: Request) -> Response:
        asked = _read(await request.body() or b"{}", _Lease)
        wait_s = min(max(asked.wait_s, 0.0), _MAX_WAIT_S)
        lease_s = math.inf if asked.lease_s is None else asked.lease_s
        session = await self._sessions.lease(wait_s, lease_s, asked.environment)
        if session is None:
            error = ApiError(
                f"there is no sample to work on within {wait_s:g} s", status=503, code="no_work"
            )
            return _refusal(error, {"retry-after": "1"})
        # Where it came in, and never what it says of that.
        here = self._url or url_at(*request.scope["server"])
        url = f"{here}/sessions/{session.id}"
        return JSONResponse(
            {
                "id": session.id,
                "url": url,
                "base_url": f"{url}/v1",
                "row": session.row,
                "timeout_s": session.limits.step.seconds,
            },
            201,
        )

    async def _renew(self, request: Request) -> Response:
        asked = _read(await request.body(), _Renewal)
        return JSONResponse({"lost": self._sessions.renew(asked.ids, asked.lease_s)})

    async def _complete(
        self, read: Read, form_of: Callable[[ReplyHead], Form], request: Request
    ) -> Response:
        form = form_of(ReplyHead(request.path_params["session"], self._model, self._created))
        try:
            session = self._session(request)
            call = read(await request.body(), self._rules)
            repeated = request.headers.get(_REPEATED, "0") != "0"
            asked = asyncio.ensure_future(self._sessions.ask(session, call, repeated=repeated))
            asked.add_done_callback(lambda done: done.cancelled() or done.exception())
            # A refusal has its status, unless it comes so late that the stream has begun.
            await asyncio.wait({asked}, timeout=SILENT_S if call.stream else None)
            if not asked.done():
                return StreamingResponse(_events(form, call, asked), media_type=_EVENTS)
            answer = asked.result()
        except ApiError as error:
            return JSONResponse(form.error(error), error.status)
        if call.stream:
            return Response(form.events(call, answer), media_type=_EVENTS)
        return JSONResponse(form.whole(call, answer))

    async def _reward(self, request: Request) -> Response:
        given = _read(await request.body(), _Reward)
        if not all(map(math.isfinite, (given.reward, *given.parts.values()))):
            raise ApiError("reward must be a finite number", param="reward")
        session = self._session(request)
        result = StepResult(given.reward, reward_parts=given.parts, reason=given.reason)
        self._sessions.reward(session, result)
        return JSONResponse({"id": session.id, "reward": given.reward})

    async def _scoring(self, request: Request) -> Response:
        session = self._session(request)
        self._sessions.scoring(session)
        return JSONResponse({"id": session.id, "score_s": session.limits.scoring.seconds})

    async def _give_up(self, request: Request) -> Response:
        reason = _read(await request.body() or b"{}", _Reason).reason
        session = self._session(request)
        self._sessions.give_up(session, reason)
        return JSONResponse({"id": session.id, "deleted": True})

    async def _models(self, request: Request) -> Response:
        self._in_session(request)
        return JSONResponse(model_list(self._model))

    async def _one_model(self, request: Request) -> Response:
        self._in_session(request)
        if request.path_params["model"] != self._model:
            raise ApiError(
                f"the model is called {self._model!r}", status=404, code="model_not_found"
            )
        return JSONResponse(model_entry(self._model))

    async def _no_session(self, request: Request) -> Response:
        raise ApiError(
            "completions are asked for in a session: POST /sessions, and use the base_url that it "
            "answers with",
            status=404,
            code="session_not_found",
        )

    def _session(self, request: Request) -> AgentSession:
        return self._sessions.find(request.path_params["session"])

    def _in_session(self, request: Request) -> None:
        if "session" in request.path_params:
            self._session(request)


async def _events(form: Form, call: Call, asked: asyncio.Future[Answer]) -> AsyncIterator[bytes]:
    """The reply once it is there; comments meanwhile, so that nobody takes the server for dead."""
    while not asked.done():
        yield b": the model is at it\n\n"
        await asyncio.wait({asked}, timeout=SILENT_S)
    try:
        yield form.events(call, asked.result())
    except ApiError as error:
        yield form.broken(error)


def _read(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE as error:
        raise ApiError(f"the body is not valid: {error}") from error


def _refusal(error: ApiError, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse(error.body(), error.status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = ApiError(
        f"{request.method} {request.url.path}: {error.detail}",
        status=error.status_code,
        code="not_found",
    )
    return _refusal(said)


def bind(address: str, key: str) -> socket.socket:
    """A listening socket at HOST:PORT, or at the first port after it that is free.

    Several generators on one host can so be given the same address. "" is any port of this host.

    Raises:
        UsageError: not an address, or one that others reach while there is no key.
        StartupError: no port is free.
    """
    bound = listen(address or _ANY_PORT, "generator.serve =", ports=_PORTS_TRIED)
    if not key and not is_local(bound):
        bound.close()
        raise UsageError(
            f"generator.serve = {address} is reached from other machines: set {KEY_VARIABLE}, or "
            "use 127.0.0.1"
        )
    return bound


def url_of(bound: socket.socket, advertise: str = "") -> str:
    """Return the URL at which agents reach the socket.

    `advertise` is HOST or HOST:PORT to tell them instead of its own; raises UsageError if neither.
    """
    host, port = bound.getsockname()[:2]
    if advertise:
        name, told = _split(advertise)
        return url_at(name, told or port)
    if ipaddress.ip_address(host).is_unspecified:
        host = "127.0.0.1" if bound.family == socket.AF_INET else "::1"
    return url_at(host, port)


def host_of(advertise: str) -> str:
    """The HOST of `generator.serve_advertise`; "" if that is empty."""
    return _split(advertise)[0] if advertise else ""


def _split(advertise: str) -> tuple[str, int]:
    parts = urlsplit(f"//{advertise}")
    with suppress(ValueError):
        if parts.hostname and parts.netloc == advertise and "@" not in advertise:
            return parts.hostname, parts.port or 0
    raise UsageError(f"generator.serve_advertise = {advertise}: write it as HOST or HOST:PORT")
