"""HTTP servers of a run: uvicorn, and checks of each request before its body is read."""

from __future__ import annotations

import asyncio
import errno
import hmac
import socket
from collections.abc import Sequence
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from umbra.proto.errors import StartupError, UmbraError, UsageError
from umbra.proto.net.keys import is_loopback
from umbra.proto.net.server import Refusals
from umbra.services.process.loop_thread import ends_with_it
from umbra.services.reporting import size

BODY_S = 10.0  # for a client to send the body of its request
HELD_BYTES = 1 << 30  # bodies of all requests under way
KEY_VARIABLE = "UMBRA_AGENT_KEY"
_STOP_S = 1
_MAX_PORT = 65535


def listen(address: str, what: str, *, default_host: str = "", ports: int = 1) -> socket.socket:
    """Return a socket that listens at `HOST:PORT`, or at the first free one of `ports` ports.

    Port 0 is any that is free; `what` is the flag or key that says the address, for errors:
    UsageError if it is none, StartupError if no port is free or the host is not this machine.
    """
    host, separator, first = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or default_host
    if not separator or not host or not first.isdecimal() or int(first) > _MAX_PORT:
        form = ":PORT or HOST:PORT" if default_host else "HOST:PORT"
        raise UsageError(f"{what} {address}: write it as {form}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    port = int(first)
    last = min(port + ports - 1, _MAX_PORT) if port else 0
    while True:
        try:
            return socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == last:
                where = f"cannot listen on {host}:{port}: {error.strerror}"
                raise StartupError(f"{what} {address}: {where}") from error
            port += 1


def is_local(bound: socket.socket) -> bool:
    """Return true if only this machine can connect to the socket."""
    return is_loopback(bound.getsockname()[0])


def url_at(host: str, port: int) -> str:
    """Return the URL of a server there."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class ApiError(UmbraError):
    """A refused request, answered in OpenAI's form.

    `status` is never one that the openai client repeats a request after (408, 409, 429, 5xx),
    except 503 where repeating may help.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        code: str = "invalid_request",
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        """Return the JSON object to answer with."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class HttpServer:
    """A server of `app` at a socket, which it closes, within an event loop; its middleware too.

    It checks the head of each request, then reads its body within limits. If only this machine
    reaches it, requests must use a loopback name as Host, so that no web page can ask through a
    browser (DNS rebinding).
    """

    def __init__(
        self,
        app: ASGIApp,
        bound: socket.socket,
        *,
        key: str = "",  # bearer token, or value of X-Api-Key, that clients must send
        max_body: int = 0,  # bytes
        requests: int,  # answered at once; more get 503
        name: str = "",  # one more of this machine, in lower case
        types: Sequence[str] = ("application/json",),  # of bodies that are taken
        signed: str = "",  # begins the paths that need no key: the application checks them
    ) -> None:
        self.refusals = Refusals()
        self._app, self._bound, self._local = app, bound, is_local(bound)
        self._key, self._own_name = key.encode(), name
        self._max_body, self._requests = max_body, requests
        self._types, self._signed = types, signed
        self._active = self._held = 0  # requests under way, and bytes of their bodies
        self._task: asyncio.Task[None] | None = None
        config = uvicorn.Config(
            self,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=_STOP_S,
        )
        self._server = uvicorn.Server(config)

    async def start(self) -> None:
        """Serve; a server that fails ends the process."""
        serving = self._server.serve(sockets=[self._bound])
        self._task = asyncio.create_task(serving, name="the HTTP server")
        self._task.add_done_callback(ends_with_it)

    async def stop(self) -> None:
        """Let open requests get their answers, for a second or so, and end."""
        self._server.should_exit = True
        if self._task is None:
            return self._bound.close()
        await self._task
        state = self._server.server_state
        for connection in list(state.connections):
            assert isinstance(connection, H11Protocol)
            connection.transport.abort()
        await asyncio.sleep(0)
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=_STOP_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._active += 1
        body = bytearray()
        try:
            signed = bool(self._signed) and scope["path"].startswith(self._signed)
            self.check(Headers(scope=scope), signed=signed)
            whole = await self._read(receive, body)
        except ApiError as refused:
            self.refusals.add(f"an HTTP request from {scope['client'][0]}: {refused}")
            answer = JSONResponse(refused.body(), refused.status, {"connection": "close"})
            await answer(scope, receive, send)
        else:
            if whole:
                read = iter([{"type": "http.request", "body": body, "more_body": False}])

                async def replay() -> Any:
                    return next(read, None) or await receive()

                await self._app(scope, replay, send)
        finally:
            self._active -= 1
            self._held -= len(body)

    def check(self, headers: Headers, *, signed: bool = False) -> None:
        """Raise ApiError if a request with these headers is not answered."""
        host = headers.get("host", "").lower()
        called = host if host.endswith("]") else host.rpartition(":")[0] or host
        called = called.removeprefix("[").removesuffix("]")
        if self._local and not is_loopback(called) and called != (self._own_name or None):
            raise ApiError("the Host header is no name of this machine", 403, "wrong_host")
        for origin in headers.getlist("origin"):
            if origin.lower() not in (f"http://{host}", f"https://{host}"):
                raise ApiError("the request comes from another page", 403, "wrong_origin")
        key = headers.get("authorization") or headers.get("x-api-key", "")
        key = key.removeprefix("Bearer ").encode("latin-1")
        if self._key and not signed and not hmac.compare_digest(key, self._key):
            raise ApiError("the API key is wrong or missing", 401, "invalid_api_key")
        if self._active > self._requests:
            raise _overloaded(f"{self._requests} requests are under way")
        length = int(headers.get("content-length", 0))
        self._check_size(length, length)
        kinds = [k.partition(";")[0].strip().lower() for k in headers.getlist("content-type")]
        has_body = kinds or length or "transfer-encoding" in headers
        if has_body and (len(kinds) != 1 or kinds[0] not in self._types):
            raise ApiError(
                f"the content type must be {' or '.join(self._types)}", 415, "wrong_type"
            )

    def _check_size(self, length: int, more: int) -> None:
        if length > self._max_body:
            raise ApiError(f"the body is larger than {size(self._max_body)}", 413, "too_large")
        if self._held + more > HELD_BYTES:
            raise _overloaded(f"requests under way hold {size(HELD_BYTES)}")

    async def _read(self, receive: Receive, body: bytearray) -> bool:
        """Fill `body`; false if the client has gone."""
        try:
            async with asyncio.timeout(BODY_S):
                while (message := await receive())["type"] == "http.request":
                    body += (part := message.get("body", b""))
                    self._held += len(part)
                    self._check_size(len(body), 0)
                    if not message.get("more_body"):
                        return True
        except TimeoutError:
            late = f"its body did not come within {BODY_S:g} s"
            raise ApiError(late, code="too_slow") from None
        return False


def _overloaded(what: str) -> ApiError:
    return ApiError(f"{what}, the most: repeat this one later", 503, "overloaded")
