"""A client of HTTP/1.1 for an event loop, and who else reaches a server of this machine.

One request per connection; h11, which uvicorn brings, speaks the protocol.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import h11

from umbra.proto.errors import PeerLostError, RejectedError, UsageError

UNIX = "unix:"
_READ_BYTES = 1 << 16
_SHOWN = 300  # characters of a refusal
_LISTENS = "0A"  # state of a socket in /proc/net/tcp
_REFUSED = 400  # the first status that is a refusal


@dataclass(frozen=True, slots=True)
class HttpClient:
    """A client of the server at `url`, `http://HOST:PORT` or `unix:PATH`; `key`: a bearer token."""

    url: str
    key: str = ""

    async def call(self, target: str, body: Any = None, *, timeout_s: float) -> bytes:
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
        begun = b""
        async for part in self._exchange(target, body):
            *whole, begun = (begun + part).split(b"\n")
            for line in whole:
                yield line

    async def _exchange(self, target: str, body: Any) -> AsyncGenerator[bytes]:
        http, status, refusal = h11.Connection(h11.CLIENT), 0, b""
        try:
            reader, writer = await self._connect()
        except OSError as error:
            why = error.strerror or str(error)
            raise PeerLostError(f"{self.url}: nobody answers: {why}") from error
        try:
            writer.write(self._request(http, target, body))
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
            path, said = target.partition("?")[0], _sentence(refusal)
            raise RejectedError(f"{self.url}{path}: HTTP {status}: {said}", code=str(status))

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.url.startswith(UNIX):
            return await asyncio.open_unix_connection(self.url.removeprefix(UNIX))
        parts = urlsplit(self.url)
        return await asyncio.open_connection(parts.hostname, parts.port)

    def _request(self, http: h11.Connection, target: str, body: Any) -> bytes:
        data = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        headers = [
            ("Host", "vllm" if self.url.startswith(UNIX) else urlsplit(self.url).netloc),
            ("Connection", "close"),
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(data))),
            *([("Authorization", f"Bearer {self.key}")] if self.key else []),
        ]
        method = "GET" if body is None else "POST"
        parts = (
            h11.Request(method=method, target=target, headers=headers),
            h11.Data(data=data),
            h11.EndOfMessage(),
        )
        return b"".join(sent for part in parts if (sent := http.send(part)))


def _sentence(body: bytes) -> str:
    """Return the message in the body of a refusal, in OpenAI's form or FastAPI's."""
    try:
        found: Any = json.loads(body)
    except ValueError:
        found = body.decode(errors="replace")
    while isinstance(found, Mapping):
        found = next(
            (found[name] for name in ("error", "message", "detail") if name in found), str(found)
        )
    return (str(found).strip().splitlines() or ["no reason"])[0][:_SHOWN]


def check_private(url: str, tables: str = "/proc/net") -> None:
    """Raise UsageError if other machines reach the server at `url`, which is on this one."""
    found: list[str] = []
    port = None if url.startswith(UNIX) else urlsplit(url).port
    for name in ("tcp", "tcp6") if port is not None else ():
        table = Path(tables, name)
        for line in table.read_text("ascii").splitlines()[1:] if table.exists() else ():
            _, local, _, state, *_ = line.split()
            address, _, number = local.partition(":")
            if state == _LISTENS and int(number, 16) == port:
                found.append(_address(bytes.fromhex(address)))
    if addresses := [one for one in found if not ip_address(one).is_loopback]:
        raise UsageError(
            f"generator.urls: {url} listens at {', '.join(addresses)} too, where whoever reaches "
            "it can replace its weights: start it with --host 127.0.0.1"
        )


def _address(words: bytes) -> str:
    """Return an address of /proc/net/tcp: its 32-bit words are of this machine's byte order."""
    swapped = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    return socket.inet_ntop(socket.AF_INET6 if len(words) > 4 else socket.AF_INET, swapped)
