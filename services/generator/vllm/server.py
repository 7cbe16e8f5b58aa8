"""One vLLM server that others started, driven through its own HTTP endpoints.

Everything here runs in one event loop. A server joins, gets the newest weights, and then requests;
whatever goes wrong takes it out until it has joined and loaded again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from umbra.proto.errors import PeerLostError, RejectedError, UmbraError, UsageError
from umbra.proto.records import Sampling, Support, VersionSpan, pack_float32, pack_int32
from umbra.services.config import GeneratorConfig
from umbra.services.generator.engines.engine import (
    EngineError,
    EngineOutput,
    FinishReason,
    KvPolicy,
    joined,
    support_limit,
)
from umbra.services.generator.vllm.http_client import HttpClient, check_private, read
from umbra.services.generator.vllm.loop_engine import Live, Salts
from umbra.services.generator.vllm.options import check_served
from umbra.services.generator.vllm.plugin import BACKEND

if TYPE_CHECKING:
    from umbra.services.generator.vllm.http_engine import HttpEngine

LOOK_S = 1.0  # between two looks at a server that is well
_ABORT_S = 2.0
_INFO_S = 120.0  # it runs commands that describe its machine
_RETRIES_S = (0.5, 1.0, 2.0, 5.0, 10.0)  # before it is tried again; the last from then on
_GENERATE = "/inference/v1/generate"
_EVENT = b"data: "
_NO_LOGPROB = -9999.0  # vLLM's number for none, and for one that is not finite
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
_KEY = "refuses our key: set VLLM_API_KEY to its --api-key"
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


class TokenEvent(msgspec.Struct):
    """One of the stream that POST /inference/v1/generate answers."""

    choices: list[NewTokens] = []
    error: Any = None


@dataclass(slots=True, eq=False, kw_only=True)
class Stream(Live):
    """A request, and the tokens that have come of it."""

    key: str  # never used twice; begins with the name of the engine and a dot
    body: dict[str, Any]  # of POST /inference/v1/generate, without a salt
    head: int  # as of `support_limit`
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    supports: list[Support | None] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)

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
        """Add new tokens, of one of `versions` by their labels.

        Raises:
            EngineError: a logprob is not finite.
            PeerLostError: some are missing, or tokens are of other weights; these are all dropped.
        """
        new, drawn = choice.token_ids or (), (choice.logprobs and choice.logprobs.content) or ()
        if len(drawn) != len(new):
            raise PeerLostError(f"{len(drawn)} logprobs came for {len(new)} tokens")
        if any(token.logprob <= _NO_LOGPROB for token in drawn):
            raise EngineError("a vLLM server's logits are not finite")
        spans = [span for span in choice.weight_versions or () if span.end > span.start]
        starts = [*(span.start for span in spans), len(self.tokens) + len(new)]
        if starts != [0, *(s.end for s in spans)] or {s.version for s in spans} - versions.keys():
            self.begin()
            raise PeerLostError(
                f"it labels tokens with weights {choice.weight_versions}, which are none of this "
                "run: is the umbra-rl beside its vLLM the same as here?"
            )
        self.tokens += new
        self.logprobs += [token.logprob for token in drawn]
        self.supports += [_support(token, self.request.sampling, self.head) for token in drawn]
        self.spans = [
            VersionSpan(version=versions[s.version], start=s.start, end=s.end) for s in spans
        ]

    def cancel(self, *, restarts: bool = False) -> None:
        self.restarts = restarts
        if self.task is not None:
            self.task.cancel()


def _support(drawn: _Drawn, sampling: Sampling, head: int) -> Support | None:
    """Return the tokens that could have been drawn; without a cut-off, the `head` likeliest."""
    if not (limit := support_limit(sampling, head)):
        return None
    logprobs = {
        one.token_id: one.logprob
        for one in drawn.top_logprobs
        if one.logprob > _NO_LOGPROB and (sampling.cuts_off or one.rank in range(1, limit + 1))
    }
    if sampling.cuts_off:
        logprobs.setdefault(drawn.token_id, drawn.logprob)
    values = pack_float32([*logprobs.values()]) if head else None
    sizes = len(logprobs).to_bytes(2, "little")
    return Support(sizes=sizes, ids=pack_int32([*logprobs]), logprobs=values)


class VllmServer(HttpClient):
    """A server, as the engine `fleet` sees it; `hf_config` is of the model."""

    def __init__(
        self, url: str, key: str, config: GeneratorConfig, hf_config: Any, fleet: HttpEngine
    ) -> None:
        super().__init__(url, key)
        self.facts: ServerFacts | None = None  # while it has joined
        self.fault: UmbraError | None = PeerLostError(f"{url} has not answered yet")
        self.streams: set[Stream] = set()
        self.salts = Salts()
        self.decoded_tokens = 0
        self.news = asyncio.Event()  # something is to be done before the next look
        self._config, self._hf_config, self._fleet = config, hf_config, fleet
        self._loaded: Load | None = None
        self._compared = False  # its weights with another server's
        self._versions: dict[str, int] = {}  # by label
        self._lock = asyncio.Lock()  # of its weights
        self._failures = 0

    @property
    def is_ready(self) -> bool:
        """True if it serves the newest version."""
        return self.fault is None

    @property
    def refusal(self) -> UmbraError | None:
        """Return the fault, if it was an answer."""
        return self.fault if isinstance(self.fault, RejectedError | UsageError) else None

    # -- joining and leaving ----------------------------------------------------------------------

    async def keep(self) -> None:
        """Keep the server at work, until cancelled."""
        while True:
            self.news.clear()
            try:
                if self.facts is None:
                    self.facts = await self._join()
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
        if str(error) != str(self.fault):
            log.warning("a vLLM server gets no requests: %s", error)
        self.fault = error
        self.facts, self._loaded, self._compared = None, None, False
        self._failures += 1
        for stream in self.streams:
            if not keep_tokens:
                stream.begin()
            stream.cancel()

    async def _join(self) -> ServerFacts:
        """Return how it is set up; UsageError if it would serve wrong, or anybody can reach it."""
        await asyncio.to_thread(check_private, self.url)  # it looks at all processes
        info = await self._asked("/server_info?config_format=json")
        await self._asked(_GENERATE)
        facts = facts_in(self.url, info, self._config.max_context)
        check_served(self._config, self._hf_config, facts.platform)
        await self.call("/init_weight_transfer_engine", {"init_info": {}}, timeout_s=_INFO_S)
        for server in self._fleet.servers:  # last: others may join meanwhile
            other = server.facts
            if server is self or other is None:
                continue
            if other.dtype != facts.dtype:
                raise UsageError(
                    f"{self.url}: it computes in {facts.dtype}, another one in {other.dtype}"
                )
            if other.seed == facts.seed:
                raise UsageError(
                    f"{self.url}: another one has --seed {facts.seed} too and would draw the "
                    "same: change one"
                )
        return facts

    async def _asked(self, target: str) -> bytes:
        """Return the answer to GET `target`; UsageError if there is no such path."""
        try:
            return await self.call(target, timeout_s=_INFO_S)
        except RejectedError as error:
            if error.code == "405":  # for POST
                return b""
            remedies = {"404": f"has no {target}: {_START}", "401": _KEY}
            if error.code not in remedies:
                raise
            raise UsageError(f"{self.url} {remedies[error.code]}") from error

    async def _look(self) -> None:
        """Check that it answers and serves the weights that it was given."""
        await self.call("/health")
        async with self._lock:  # its core, which may read long prompts now, answers late
            label = await self._label(self._loaded.limit_s if self._loaded else _INFO_S)
        if self._loaded is not None and label != self._loaded.label:
            # Nobody knows since when; what its tokens are of is not what they are said to be.
            error = f"{self.url}: its weights are {label!r}, which are not of this run"
            self.lose(PeerLostError(error), keep_tokens=False)
            return
        self._settle()

    def _settle(self) -> None:
        """Let it get requests, if it serves the newest version."""
        if self._loaded is not None and self._loaded is self._fleet.newest and not self.is_ready:
            self.fault, self._failures = None, 0
            log.info("%s serves version %d", self.url, self._loaded.version)
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
                try:
                    await self.call("/health")
                except UmbraError:  # that is why, and no refusal
                    error = PeerLostError(str(error))
                self.lose(error)
            else:
                self._settle()

    async def _update(self, load: Load) -> None:
        """Load that version, paused; raise if it refuses, is gone, or has other weights then."""
        call = partial(self.call, timeout_s=load.limit_s)
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
                f"{self.url} reports weights {label!r} after loading {load.label!r}"
            )
        if not self._compared:
            await self._compare(load)
        self._versions[load.label] = load.version
        self._loaded = load
        self.salts.loaded(load.version, keep=load.kv_policy == "keep")
        for stream in self.streams:
            if not stream.tokens:  # under its salt it would find blocks of old weights
                stream.cancel(restarts=True)
        await call("/resume", {})

    async def _compare(self, load: Load) -> None:
        """Raise PeerLostError if another server has other weights under that version."""
        peer = next((s for s in self._fleet.servers if s._loaded is load and s is not self), None)
        if peer is None:
            return
        sums: list[dict[str, str]] = []
        for server in (self, peer):
            body = {"action": "checksum"}
            answer = await server.call("/weight_checker", body, timeout_s=load.limit_s)
            sums.append(read(answer, dict[str, dict[str, str]]).get("checksums", {}))
        own, other = sums
        if differing := sorted(n for n in own.keys() | other.keys() if own.get(n) != other.get(n)):
            raise PeerLostError(
                f"{self.url}: {len(differing)} of {len(own)} weights are not equal on "
                f"{peer.url}, which loaded the same version, such as {differing[0]}"
            )
        self._compared = True

    async def _label(self, limit_s: float) -> str:
        answer = await self.call("/weight_info", timeout_s=limit_s)
        return read(answer, dict[str, str]).get("weight_version", "")

    # -- requests ---------------------------------------------------------------------------------

    def start(self, stream: Stream) -> None:
        self.streams.add(stream)
        stream.task = asyncio.create_task(self._generate(stream))
        stream.task.add_done_callback(partial(self._ended, stream))

    async def abort(self, streams: Collection[Stream]) -> None:
        """End these; each output has the tokens so far."""
        tasks = {s.task: s for s in streams if s.task is not None and not s.task.done()}
        if started := [task for task, stream in tasks.items() if stream.tokens]:
            names = [f"generate-tokens-{tasks[task].key}" for task in started]
            try:
                await self.call("/inference/v1/abort_requests", {"request_ids": names})
                await asyncio.wait(started, timeout=_ABORT_S)
            except UmbraError as error:
                log.debug("requests end with their connections: %s", error)
        for stream in tasks.values():  # it had not heard of them, or is gone
            stream.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _generate(self, stream: Stream) -> EngineOutput:
        salt = self.salts.of(stream.request.session)
        body = {**stream.body, "cache_salt": f"{stream.key.partition('.')[0]}.{salt}"}
        async for line in self.lines(_GENERATE, body):
            if not line.startswith(_EVENT + b"{"):
                continue
            event = read(line[len(_EVENT) :], TokenEvent)
            if event.error is not None:
                raise PeerLostError(f"{self.url}: {event.error}")
            for choice in event.choices:
                stream.add(choice, self._versions)
                self.decoded_tokens += len(choice.token_ids or ())
                if choice.finish_reason is not None:
                    self.salts.used(stream.request.session, salt)
                    return stream.output(_REASONS.get(choice.finish_reason, "abort"))
        raise PeerLostError(f"{self.url}: a request ended without a reason")

    def _ended(self, stream: Stream, task: asyncio.Task[EngineOutput]) -> None:
        if task.cancelled() and stream.restarts and self._loaded is not None:
            stream.restarts = False
            self.start(stream)
            return
        self.streams.remove(stream)
        outcome = None if task.cancelled() else task.exception() or task.result()
        if isinstance(outcome, RejectedError) and outcome.code.startswith("5"):
            outcome = PeerLostError(str(outcome))
        if isinstance(outcome, PeerLostError) and self.is_ready:
            self.fault = outcome  # no requests before it was looked at
            self.news.set()
        if outcome is None or isinstance(outcome, PeerLostError):
            outcome = stream.output()
        self._fleet.ended.put((stream.key, outcome))


class ServerFacts(NamedTuple):
    """Settings that a server was started with."""

    dtype: str
    seed: int
    platform: str


def facts_in(url: str, answer: bytes, max_context: int) -> ServerFacts:
    """Read `url`'s answer to GET /server_info; UsageError if it would serve a generator wrong."""
    config: Any = read(answer, dict[str, Any]).get("vllm_config")
    try:
        model, transfer = config["model_config"], config["weight_transfer_config"] or {}
        faults = {
            f'it does not load weights by "{BACKEND}": install umbra-rl beside its vLLM, and '
            f'start it with --weight-transfer-config \'{{"backend": "{BACKEND}"}}\'': (
                transfer.get("backend") != BACKEND
            ),
            "its logprobs are not those it samples by: --logprobs-mode processed_logprobs": (
                model["logprobs_mode"] != "processed_logprobs"
            ),
            f"its --max-model-len {model['max_model_len']} is less than "
            f"generator.max_context = {max_context}": model["max_model_len"] < max_context,
            f"its quantization {model['quantization']} was not tried with new weights": (
                model["quantization"] is not None
            ),
            "start a server for each data-parallel rank, and name all in generator.urls": (
                config["parallel_config"]["data_parallel_size"] > 1
            ),
            "its logprobs would be wrong with a speculative_config: leave it out": (
                config["speculative_config"] is not None
            ),
        }
        dtype, device = model["dtype"].removeprefix("torch."), config["device_config"]["device"]
        facts = ServerFacts(dtype, model["seed"], device)
    except (KeyError, TypeError) as error:
        raise UsageError(f"a server's /server_info is unlike vLLM 0.32's: {error!r}") from error
    if wrong := [sentence for sentence, is_so in faults.items() if is_so]:
        raise UsageError(f"{url}: {'; '.join(wrong)}")
    return facts
