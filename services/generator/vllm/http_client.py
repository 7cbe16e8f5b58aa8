"""A client of HTTP/1.1 for an event loop: a connection per request; h11, of uvicorn, speaks it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.parse import urlsplit

import h11
import msgspec

from umbra.proto.errors import UNREADABLE, PeerLostError, RejectedError, UsageError

UNIX = "unix:"
_READ_BYTES = 1 << 16
_SHOWN = 300  # characters of a refusal
_REFUSED = 400  # the first status that is a refusal

T = TypeVar("T")


class HttpClient:
    """A client of the server at `url`, `http://HOST:PORT` or `unix:PATH`; `key`: a bearer token."""

    def __init__(self, url: str, key: str = "") -> None:
        self.url, self._key = url, key

    async def call(self, target: str, body: Any = None, *, timeout_s: float = 10.0) -> bytes:
        """Send `body` as JSON by POST (None: GET `target`); return the body of the answer.

        Raises:
            PeerLostError: the server is gone, or did not answer within `timeout_s` seconds.
            RejectedError: it refused; `code` is the HTTP status.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return b"".join([part async for part in self._exchange(target, body)])
        except TimeoutError:
            raise PeerLostError(
                f"{self.url}: no answer to {target} within {timeout_s:g} s"
            ) from None

    async def lines(self, target: str, body: Any) -> AsyncGenerator[bytes]:
        """Yield the lines of the answer to a POST of `body` as JSON; raises as `call`."""
        rest = b""
        async for part in self._exchange(target, body):
            *whole, rest = (rest + part).split(b"\n")
            for line in whole:
                yield line

    async def _exchange(self, target: str, body: Any) -> AsyncGenerator[bytes]:
        http, status, refusal = h11.Connection(h11.CLIENT), 0, b""
        path, place = self.url.removeprefix(UNIX), urlsplit(self.url)
        try:
            if self.url.startswith(UNIX):
                reader, writer = await asyncio.open_unix_connection(path)
            else:
                reader, writer = await asyncio.open_connection(place.hostname, place.port)
        except OSError as error:
            why = error.strerror or str(error)
            raise PeerLostError(f"{self.url}: nobody answers: {why}") from error
        data = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        headers = {
            "Host": place.netloc or "vllm",
            "Connection": "close",
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
        } | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        method = "GET" if body is None else "POST"
        request = h11.Request(method=method, target=target, headers=[*headers.items()])
        try:
            parts = (request, h11.Data(data=data), h11.EndOfMessage())
            # At once: a server that needs no body may answer its head, and close.
            writer.write(b"".join(http.send(part) or b"" for part in parts))
            await writer.drain()
            while not isinstance(event := http.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    http.receive_data(await reader.read(_READ_BYTES))
                elif isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data) and status < _REFUSED:
                    yield bytes(event.data)
                elif isinstance(event, h11.Data):
                    refusal += event.data
        except (OSError, h11.RemoteProtocolError) as error:
            raise PeerLostError(f"{self.url}: {target} broke off: {error}") from error
        finally:
            writer.transport.abort()
        if status >= _REFUSED:
            path, reason = target.partition("?")[0], _sentence(refusal)
            raise RejectedError(f"{self.url}{path}: HTTP {status}: {reason}", code=str(status))


def _sentence(body: bytes) -> str:
    """Return the message in the body of a refusal, in OpenAI's form or FastAPI's."""
    try:
        answer: Any = json.loads(body)
    except ValueError:
        answer = body.decode(errors="replace")
    while isinstance(answer, Mapping):
        answer = next(
            (answer[name] for name in ("error", "message", "detail") if name in answer), str(answer)
        )
    return (str(answer).strip().splitlines() or ["no reason"])[0][:_SHOWN]


def check_private(url: str) -> None:
    """Raise UsageError if other machines reach the server at `url`, which is on this one."""
    import psutil  # with the generator's engines

    port = None if url.startswith(UNIX) else urlsplit(url).port
    sockets = psutil.net_connections("tcp") if port is not None else ()
    listening = [one.laddr for one in sockets if one.status == psutil.CONN_LISTEN and one.laddr]
    addresses = [ip for ip, at in listening if at == port and not ip_address(ip).is_loopback]
    if addresses:
        raise UsageError(
            f"generator.urls: {url} listens at {', '.join(addresses)} too, where whoever reaches "
            "it can replace its weights: start it with --host 127.0.0.1"
        )


def read(answer: bytes, kind: type[T]) -> T:
    """Raise PeerLostError if `answer` is not the JSON of such a thing."""
    try:
        return msgspec.json.decode(answer, type=kind)
    except UNREADABLE as error:
        raise PeerLostError(f"a server answers unlike vLLM 0.32: {error}") from error
