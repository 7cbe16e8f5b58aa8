"""Who may ask an HTTP server: decided from a request's head, before any of its body is read."""

from __future__ import annotations

import hmac
from typing import Any, NamedTuple

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from umbra.proto.net.keys import is_loopback
from umbra.proto.net.zap import Refusals
from umbra.services.reporting.tables import size


class Objection(NamedTuple):
    """Why a request is not answered."""

    status: int
    code: str
    reason: str


class Door:
    """ASGI middleware; what it refuses is counted, told why, and its connection is closed.

    Args:
        app: answers what is let in.
        local: whether only this machine reaches the server. Then requests must call it by a
            loopback name, so that no page whose name was made to lead here can ask through a
            browser (DNS rebinding).
        key: what clients have to give as bearer token, or in the header X-Api-Key; "" = nothing.
        max_body: bytes that the body of a request may have.
        refusals: counts them.
        name: one more that this machine may be called by, in lower case.
    """

    def __init__(
        self,
        app: ASGIApp,
        local: bool,
        key: str,
        max_body: int,
        refusals: Refusals,
        name: str = "",
    ) -> None:
        self._app = app
        self._local = local
        self._key = key.encode()
        self._max_body = max_body
        self._refusals = refusals
        self._own_name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        objection = self.objection(Headers(scope=scope))
        if objection is None:
            await self._app(scope, receive, send)
            return
        status, code, reason = objection
        self._refusals.add(f"an HTTP request from {scope['client'][0]}: {reason}")
        answer = JSONResponse(error_body(reason, status, code), status, {"connection": "close"})
        await answer(scope, receive, send)

    def objection(self, headers: Headers) -> Objection | None:
        """What speaks against a request with these headers."""
        host = headers.get("host", "").lower()
        called = _name(host)
        if self._local and not is_loopback(called) and called != (self._own_name or None):
            return Objection(403, "wrong_host", "the Host header is no name of this machine")
        for origin in headers.getlist("origin"):
            if origin.lower() not in (f"http://{host}", f"https://{host}"):
                return Objection(403, "wrong_origin", "the request comes from another page")
        given = headers.get("authorization") or headers.get("x-api-key", "")
        given = given.removeprefix("Bearer ").encode("latin-1")
        if self._key and not hmac.compare_digest(given, self._key):
            return Objection(401, "invalid_api_key", "the API key is wrong or missing")
        length = int(headers.get("content-length", 0))
        if length > self._max_body:
            return too_large(self._max_body)
        kinds = headers.getlist("content-type")
        if (kinds or length or "transfer-encoding" in headers) and not _is_json(kinds):
            return Objection(415, "wrong_type", "the content type must be application/json")
        return None


def too_large(max_body: int) -> Objection:
    """Against a body of more than `max_body` bytes."""
    return Objection(413, "too_large", f"the body is larger than {size(max_body)}")


def error_body(
    message: str, status: int, code: str, param: str | None = None
) -> dict[str, dict[str, Any]]:
    """The JSON object to answer with, in OpenAI's form."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _name(host: str) -> str:
    """The name in a Host header, which may have a port."""
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    return name.removeprefix("[").removesuffix("]")


def _is_json(kinds: list[str]) -> bool:
    return [kind.partition(";")[0].strip().lower() for kind in kinds] == ["application/json"]
