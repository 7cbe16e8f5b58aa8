"""One vLLM server that others started, driven through its own HTTP endpoints.

Everything here runs in one event loop. A server joins, gets the newest weights, and then requests;
whatever goes wrong takes it out until it has joined and loaded again.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from umbra.proto.errors import PeerLostError, RejectedError, UmbraError, UsageError
from umbra.proto.records import Support, VersionSpan
from umbra.services.config import GeneratorConfig
from umbra.services.generator.engines.engine import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    KvPolicy,
    joined,
)
from umbra.services.generator.vllm.http_client import (
    HttpClient,
    NewTokens,
    ServerFacts,
    TokenEvent,
    check_private,
    facts_in,
    read,
)
from umbra.services.generator.vllm.options import check_served
from umbra.services.generator.vllm.updates import Salts

LOOK_S = 1.0  # between two looks at a server that is well
_ANSWER_S = 10.0
_ABORT_S = 2.0
_INFO_S = 120.0  # it runs commands that describe its machine
_RETRIES_S = (0.5, 1.0, 2.0, 5.0, 10.0)  # before it is tried again; the last from then on
_GENERATE = "/inference/v1/generate"
_EVENT = b"data: "
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
_START = (
    "start it with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out (docs/generation.md, Your own "
    "vLLM servers)"
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """A version, as `POST /update_weights` names it; `label` is what servers call it."""

    version: int
    label: str
    update: dict[str, Any]
    kv_policy: KvPolicy
    limit_s: float  # of each of its steps
    held: memoryview | None  # its memory, if nobody else keeps it


@dataclass(slots=True, eq=False)
class Stream:
    """A request, and what has come of it."""

    key: str  # never used twice; begins with the name of the engine and a dot
    request: EngineRequest
    body: dict[str, Any]  # of POST /inference/v1/generate, without a salt
    head: int  # as of `support_limit`
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    supports: list[Support | None] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)  # of the tokens
    restarts: bool = False  # once its task is cancelled
    task: asyncio.Task[EngineOutput] | None = None

    def output(self, reason: FinishReason = "abort") -> EngineOutput:
        return EngineOutput(
            request_id=self.request.request_id,
            token_ids=list(self.tokens),
            logprobs=list(self.logprobs),
            spans=self.spans,
            finish_reason=reason,
            support=joined(self.supports),
        )

    def begin(self) -> None:
        self.tokens, self.logprobs, self.supports, self.spans = [], [], [], []

    def add(self, choice: NewTokens, versions: Mapping[str, int]) -> None:
        """Add new tokens; raises as `NewTokens.logprobs_of`.

        Raises:
            PeerLostError: some tokens are of none of `versions`, by label; all are dropped.
        """
        logprobs, supports = choice.logprobs_of(self.request.sampling, self.head)
        spans = choice.spans_of(len(self.tokens) + len(logprobs), versions)
        if spans is None:
            self.begin()
            raise PeerLostError(
                f"it labels tokens with weights {choice.weight_versions}, which are none of this "
                "run: is the umbra-rl beside its vLLM the same as here?"
            )
        self.logprobs += logprobs
        self.supports += supports
        self.tokens += choice.token_ids or ()
        self.spans = spans


Ended = tuple[Stream, EngineOutput | BaseException]


class Fleet(Protocol):
    """The engine, as a server sees it."""

    newest: Load | None  # the version to be served
    servers: list[VllmServer]
    ended: queue.SimpleQueue[Ended]  # takes each stream with its output, or with what broke

    def changed(self) -> None:
        """Note that a server may get requests, or may no longer."""


class VllmServer:
    """A server, as the engine sees it; `hf_config` is of the model."""

    def __init__(
        self, client: HttpClient, config: GeneratorConfig, hf_config: Any, fleet: Fleet
    ) -> None:
        self.client = client
        self.facts: ServerFacts | None = None  # while it has joined
        self.is_ready = False
        self.fault = f"{client.url} has not answered yet"  # why it is not
        self.refusal: UmbraError | None = None  # the fault, where it was an answer
        self.streams: dict[str, Stream] = {}
        self.salts = Salts()
        self.decoded_tokens = 0
        self.news = asyncio.Event()  # something is to be done before the next look
        self._config, self._hf_config, self._fleet = config, hf_config, fleet
        self._loaded: Load | None = None
        self._compared = False  # its weights with another server's
        self._versions: dict[str, int] = {}  # by label
        self._lock = asyncio.Lock()  # of its weights
        self._failures = 0

    # -- joining and leaving ----------------------------------------------------------------------

    async def keep(self) -> None:
        """Keep the server at work, until cancelled."""
        while True:
            self.news.clear()
            try:
                if self.facts is None:
                    self.facts = await self._join()
                    self._fleet.changed()
                if (load := self._fleet.newest) is not None:
                    await self.serve(load)
                if self.facts is not None:
                    await self._look()
            except UmbraError as error:
                self.lose(error)
            wait_s = LOOK_S
            if self.facts is None:
                wait_s = _RETRIES_S[min(self._failures, len(_RETRIES_S)) - 1]
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self.news.wait()

    def lose(self, error: UmbraError, *, keep_tokens: bool = True) -> None:
        """Take the server out; its requests end with the tokens that came, or without."""
        if str(error) != self.fault:
            log.warning("a vLLM server gets no requests: %s", error)
        self.fault = str(error)
        self.refusal = error if isinstance(error, (RejectedError, UsageError)) else None
        self.facts, self._loaded, self._compared, self.is_ready = None, None, False, False
        self._failures += 1
        for stream in self.streams.values():
            if not keep_tokens:
                stream.begin()
            _cancel(stream)
        self._fleet.changed()

    async def _join(self) -> ServerFacts:
        """Return how a server that is new, or was away, is set up.

        Raises:
            UsageError: it would serve wrong, or anybody can reach it.
        """
        url = self.client.url
        check_private(url)
        info = await self._asked("/server_info?config_format=json")
        facts = facts_in(info, self._config.max_context)
        await self._asked(_GENERATE)
        self._refuse(facts.faults)
        check_served(self._config, self._hf_config, facts.platform)
        await self._call("/init_weight_transfer_engine", {"init_info": {}}, timeout_s=_INFO_S)
        for server in self._fleet.servers:  # last: others may join meanwhile
            if server is not self and server.facts is not None:
                self._refuse(list(facts.faults_beside(server.facts)))
        return facts

    def _refuse(self, faults: Sequence[str]) -> None:
        if faults:
            raise UsageError(f"{self.client.url}: {'; '.join(faults)}")

    async def _asked(self, target: str) -> bytes:
        """Return the answer to GET `target`; UsageError if there is no such path."""
        try:
            return await self._call(target, timeout_s=_INFO_S)
        except RejectedError as error:
            if error.code == "405":  # for POST
                return b""
            if error.code == "404":
                raise UsageError(f"{self.client.url} has no {target}: {_START}") from error
            if error.code == "401":
                raise UsageError(
                    f"{self.client.url} refuses our key: set VLLM_API_KEY to its --api-key"
                ) from error
            raise

    async def _look(self) -> None:
        """Check that it answers and serves the weights that it was given."""
        await self._call("/health")
        async with self._lock:  # its core, which may read long prompts now, answers late
            label = await self._label(self._loaded.limit_s if self._loaded else _INFO_S)
        if self._loaded is not None and label != self._loaded.label:
            # Nobody knows since when; what its tokens are of is not what they are said to be.
            error = f"{self.client.url}: its weights are {label!r}, which are not of this run"
            self.lose(PeerLostError(error), keep_tokens=False)
            return
        self._settle()

    def _settle(self) -> None:
        """Let it get requests, if it serves the newest version."""
        if self._loaded is not None and self._loaded is self._fleet.newest and not self.is_ready:
            self.is_ready, self.fault, self.refusal, self._failures = True, "", None, 0
            log.info("%s serves version %d", self.client.url, self._loaded.version)
            self._fleet.changed()

    # -- weights ----------------------------------------------------------------------------------

    async def serve(self, load: Load) -> None:
        """Load that version, unless it is served already; a failure takes the server out."""
        async with self._lock:
            if self.facts is None or self._loaded is load:
                return
            try:
                await self._update(load)
            except UmbraError as error:
                self.lose(error if await self._is_well() else PeerLostError(str(error)))
            else:
                self._settle()

    async def _update(self, load: Load) -> None:
        """Load that version while nothing is decoded.

        Raises:
            PeerLostError: it is gone, or its weights are not those that were sent.
            RejectedError: it refused.
        """
        call = partial(self._call, timeout_s=load.limit_s)
        began = time.perf_counter()
        clears = "true" if load.kv_policy == "recompute" else "false"
        await call(f"/pause?mode=keep&clear_cache={clears}", {})
        try:
            await call("/start_weight_update", {})
        except RejectedError:
            with suppress(RejectedError):  # one that broke off is open until an update fails
                await call("/update_weights", {"update_info": {}})
            await call("/start_weight_update", {})
        await call("/update_weights", {"update_info": load.update})
        await call("/finish_weight_update", {"weight_version": load.label})
        # The answer comes after all tokens of the version before, which were written earlier.
        if (label := await self._label(load.limit_s)) != load.label:
            raise PeerLostError(
                f"{self.client.url} reports weights {label!r} after loading {load.label!r}"
            )
        if not self._compared:
            await self._compare(load)
        live = list(self.streams.values())
        self._versions[load.label] = load.version
        self._loaded = load
        self.salts.loaded(load.version, keep=load.kv_policy == "keep")
        if load.kv_policy == "abort":
            await self.abort(live)
        for stream in live if load.kv_policy != "abort" else ():
            if not stream.tokens:  # under its salt it would find blocks of old weights
                _cancel(stream, restarts=True)
        await call("/resume", {})
        took = time.perf_counter() - began
        log.debug("%s: version %d after %.3f s", self.client.url, load.version, took)

    async def _compare(self, load: Load) -> None:
        """Compare its weights with another server's; no earlier version of it was compared.

        Raises:
            PeerLostError: they differ.
        """
        peer = next((s for s in self._fleet.servers if s._loaded is load and s is not self), None)
        if peer is None:
            return
        own, other = [
            read(
                await s._call("/weight_checker", {"action": "checksum"}, timeout_s=load.limit_s),
                dict[str, dict[str, str]],
            ).get("checksums", {})
            for s in (self, peer)
        ]
        if differing := sorted(n for n in own.keys() | other.keys() if own.get(n) != other.get(n)):
            raise PeerLostError(
                f"{self.client.url}: {len(differing)} of {len(own)} weights are not equal on "
                f"{peer.client.url}, which loaded the same version, such as {differing[0]}"
            )
        self._compared = True

    # -- requests ---------------------------------------------------------------------------------

    def start(self, stream: Stream) -> None:
        self.streams[stream.key] = stream
        stream.task = asyncio.get_running_loop().create_task(self._generate(stream))
        stream.task.add_done_callback(partial(self._ended, stream))

    async def abort(self, streams: Iterable[Stream]) -> None:
        """End these; each output has the tokens so far."""
        tasks = {s.task: s for s in streams if s.task is not None and not s.task.done()}
        started = [stream for stream in tasks.values() if stream.tokens]
        if started:
            names = [f"generate-tokens-{stream.key}" for stream in started]
            try:
                await self._call("/inference/v1/abort_requests", {"request_ids": names})
                await asyncio.wait([task for task in tasks if tasks[task].tokens], timeout=_ABORT_S)
            except UmbraError as error:
                log.debug("requests end with their connections: %s", error)
        for stream in tasks.values():  # it had not heard of them, or is gone
            _cancel(stream)
        if tasks:
            await asyncio.wait(tasks)

    async def _generate(self, stream: Stream) -> EngineOutput:
        salt = self.salts.of(stream.request.session)
        body = {**stream.body, "cache_salt": f"{stream.key.partition('.')[0]}.{salt}"}
        async for line in self.client.lines(_GENERATE, body):
            if not line.startswith(_EVENT + b"{"):
                continue
            event = read(line[len(_EVENT) :], TokenEvent)
            if event.error is not None:
                raise PeerLostError(f"{self.client.url}: {event.error}")
            for choice in event.choices:
                stream.add(choice, self._versions)
                self.decoded_tokens += len(choice.token_ids or ())
                if choice.finish_reason is not None:
                    self.salts.used(stream.request.session, salt)
                    return stream.output(_REASONS.get(choice.finish_reason, "abort"))
        raise PeerLostError(f"{self.client.url}: a request ended without a reason")

    def _ended(self, stream: Stream, task: asyncio.Task[EngineOutput]) -> None:
        if task.cancelled() and stream.restarts and self._loaded is not None:
            stream.restarts = False
            self.start(stream)
            return
        del self.streams[stream.key]
        error = None if task.cancelled() else task.exception()
        broke_off = isinstance(error, PeerLostError) or (
            isinstance(error, RejectedError) and error.code.startswith("5")
        )
        if broke_off and self.is_ready:  # it gets no requests before it was looked at
            self.is_ready, self.fault = False, str(error)
            self.news.set()
            self._fleet.changed()
        if task.cancelled() or broke_off:
            self._fleet.ended.put((stream, stream.output()))
        else:
            self._fleet.ended.put((stream, error or task.result()))

    # -- calls ------------------------------------------------------------------------------------

    async def _call(self, target: str, body: Any = None, *, timeout_s: float = _ANSWER_S) -> bytes:
        return await self.client.call(target, body, timeout_s=timeout_s)

    async def _is_well(self) -> bool:
        try:
            await self._call("/health")
        except UmbraError:
            return False
        return True

    async def _label(self, limit_s: float) -> str:
        answer = await self._call("/weight_info", timeout_s=limit_s)
        return read(answer, dict[str, str]).get("weight_version", "")


def _cancel(stream: Stream, *, restarts: bool = False) -> None:
    stream.restarts = restarts
    if stream.task is not None:
        stream.task.cancel()
