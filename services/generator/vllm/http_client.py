"""A client of vLLM servers: HTTP/1.1 for an event loop, and answers as read in vLLM 0.32.

One request per connection; h11, which uvicorn brings, speaks the protocol.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import h11
import msgspec

from umbra.proto.errors import UNREADABLE, PeerLostError, RejectedError, UsageError
from umbra.proto.records import Sampling, Support, VersionSpan, pack_float32, pack_int32
from umbra.services.generator.engines.engine import EngineError, support_limit
from umbra.services.generator.vllm.plugin import BACKEND

UNIX = "unix:"
_READ_BYTES = 1 << 16
_SHOWN = 300  # characters of a refusal
_LISTENS = "0A"  # state of a socket in /proc/net/tcp
_REFUSED = 400  # the first status that is a refusal
_NO_LOGPROB = -9999.0  # vLLM's number for none, and for one that is not finite

T = TypeVar("T")


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
        rest = b""
        async for part in self._exchange(target, body):
            *whole, rest = (rest + part).split(b"\n")
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
            path, reason = target.partition("?")[0], _sentence(refusal)
            raise RejectedError(f"{self.url}{path}: HTTP {status}: {reason}", code=str(status))

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
        answer: Any = json.loads(body)
    except ValueError:
        answer = body.decode(errors="replace")
    while isinstance(answer, Mapping):
        answer = next(
            (answer[name] for name in ("error", "message", "detail") if name in answer), str(answer)
        )
    return (str(answer).strip().splitlines() or ["no reason"])[0][:_SHOWN]


def check_private(url: str, tables: str = "/proc/net") -> None:
    """Raise UsageError if other machines reach the server at `url`, which is on this one."""
    addresses: list[str] = []
    port = None if url.startswith(UNIX) else urlsplit(url).port
    for name in ("tcp", "tcp6") if port is not None else ():
        table = Path(tables, name)
        for line in table.read_text("ascii").splitlines()[1:] if table.exists() else ():
            _, local, _, state, *_ = line.split()
            address, _, number = local.partition(":")
            if state == _LISTENS and int(number, 16) == port:
                addresses.append(_address(bytes.fromhex(address)))
    if addresses := [address for address in addresses if not ip_address(address).is_loopback]:
        raise UsageError(
            f"generator.urls: {url} listens at {', '.join(addresses)} too, where whoever reaches "
            "it can replace its weights: start it with --host 127.0.0.1"
        )


def _address(words: bytes) -> str:
    """Return an address of /proc/net/tcp: its 32-bit words are of this machine's byte order."""
    swapped = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    return socket.inet_ntop(socket.AF_INET6 if len(words) > 4 else socket.AF_INET, swapped)


class _Candidate(msgspec.Struct):
    token_id: int
    logprob: float
    rank: int | None = None  # from 1 on


class _Drawn(_Candidate):
    top_logprobs: list[_Candidate] = []  # itself, then the likeliest


class _Logprobs(msgspec.Struct):
    content: list[_Drawn] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class NewTokens(msgspec.Struct):
    """New tokens of a request, and the versions of all so far; the last has `finish_reason`."""

    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None

    def logprobs_of(
        self, sampling: Sampling, head: int
    ) -> tuple[list[float], list[Support | None]]:
        """Return the logprob and the support of each token; `head` is as of `support_limit`.

        Raises:
            EngineError: one is not finite.
            PeerLostError: some are missing.
        """
        sampled = (self.logprobs.content if self.logprobs is not None else None) or []
        if len(sampled) != len(self.token_ids or ()):
            raise PeerLostError(
                f"{len(sampled)} logprobs came for {len(self.token_ids or ())} tokens"
            )
        if any(token.logprob <= _NO_LOGPROB for token in sampled):
            raise EngineError("a vLLM server's logits are not finite")
        limit = support_limit(sampling, head)
        supports = [_support(token, sampling, head, limit) if limit else None for token in sampled]
        return [token.logprob for token in sampled], supports

    def spans_of(self, length: int, versions: Mapping[str, int]) -> list[VersionSpan] | None:
        """Return the spans of all `length` tokens so far; None if one is of none of `versions`."""
        spans = [span for span in self.weight_versions or () if span.end > span.start]
        ends = [0, *(span.end for span in spans)]
        known = all(span.version in versions for span in spans)
        if not known or [*(span.start for span in spans), length] != ends:
            return None
        return [VersionSpan(version=versions[s.version], start=s.start, end=s.end) for s in spans]


def _support(drawn: _Drawn, sampling: Sampling, head: int, limit: int) -> Support:
    """Return the tokens that could have been drawn; without a cut-off, the `limit` likeliest."""
    finite = [c for c in drawn.top_logprobs if c.logprob > _NO_LOGPROB]
    if not sampling.cuts_off:
        finite = [c for c in finite if c.rank is not None and c.rank <= limit]
    logprobs = {c.token_id: c.logprob for c in finite}
    if sampling.cuts_off:
        logprobs.setdefault(drawn.token_id, drawn.logprob)
    values = pack_float32([*logprobs.values()]) if head else None
    sizes = len(logprobs).to_bytes(2, "little")
    return Support(sizes=sizes, ids=pack_int32([*logprobs]), logprobs=values)


class TokenEvent(msgspec.Struct):
    """One of the stream that POST /inference/v1/generate answers."""

    choices: list[NewTokens] = []
    error: Any = None


def read(answer: bytes, kind: type[T]) -> T:
    """Raise PeerLostError if `answer` is not the JSON of such a thing."""
    try:
        return msgspec.json.decode(answer, type=kind)
    except UNREADABLE as error:
        raise PeerLostError(f"a server answers unlike vLLM 0.32: {error}") from error


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Settings that a server was started with, of GET /server_info?config_format=json."""

    dtype: str
    seed: int
    platform: str
    faults: Sequence[str]  # why it would serve wrong

    def faults_beside(self, other: ServerFacts) -> Iterator[str]:
        """Yield why it would serve wrong beside another server."""
        if other.dtype != self.dtype:
            yield f"it computes in {self.dtype}, another one in {other.dtype}"
        if other.seed == self.seed:
            yield f"another one has --seed {self.seed} too and would draw the same: change one"


def facts_in(answer: bytes, max_context: int) -> ServerFacts:
    """Read the facts; `max_context` is the generator's."""
    config: Any = read(answer, dict[str, Any]).get("vllm_config")
    try:
        model, transfer = config["model_config"], config["weight_transfer_config"] or {}
        wrong = (
            (
                transfer.get("backend") != BACKEND,
                f'it does not load weights by "{BACKEND}": install umbra-rl beside its vLLM, and '
                f'start it with --weight-transfer-config \'{{"backend": "{BACKEND}"}}\'',
            ),
            (
                model["logprobs_mode"] != "processed_logprobs",
                "its logprobs are not those it samples by: --logprobs-mode processed_logprobs",
            ),
            (
                model["max_model_len"] < max_context,
                f"its --max-model-len {model['max_model_len']} is less than "
                f"generator.max_context = {max_context}",
            ),
            (
                model["quantization"] is not None,
                f"its quantization {model['quantization']} was not tried with new weights",
            ),
            (
                config["parallel_config"]["data_parallel_size"] > 1,
                "start a server for each data-parallel rank, and name all in generator.urls",
            ),
            (
                config["speculative_config"] is not None,
                "its logprobs would be wrong with a speculative_config: leave it out",
            ),
        )
        return ServerFacts(
            model["dtype"].removeprefix("torch."),
            model["seed"],
            config["device_config"]["device"],
            [sentence for is_so, sentence in wrong if is_so],
        )
    except (KeyError, TypeError) as error:
        raise UsageError(f"a server's /server_info is unlike vLLM 0.32's: {error!r}") from error
