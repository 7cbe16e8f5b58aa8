"""vLLM servers that others started, as one `Engine`.

The driver's thread hands requests to an event loop, where each server is kept at work (`server.py`)
and each request goes to the one with the fewest. New weights come from the memory of this process.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import secrets
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from umbra.proto.deadline import Deadline, Pace
from umbra.proto.errors import StartupError, UmbraError
from umbra.proto.records import Manifest
from umbra.services.config import GeneratorConfig
from umbra.services.generator.engines.engine import (
    CacheFigures,
    EngineError,
    EngineOutput,
    EngineRequest,
    KvPolicy,
    check_request,
    support_limit,
    take,
)
from umbra.services.generator.vllm.http_client import HttpClient
from umbra.services.generator.vllm.options import sampling_arguments
from umbra.services.generator.vllm.server import Ended, Load, Stream, VllmServer
from umbra.services.generator.vllm.updates import Updates
from umbra.services.process.loop_thread import LoopThread, ends_with_it
from umbra.services.weights.manifest import Part
from umbra.services.weights.verify import OVERWRITTEN, THREADS, ChangedError, Checksums, SlotGuard

START_S = 600.0  # for a first server to answer
_LOOK_S = 0.05
_REPLY_S = 60.0  # of the loop
_TOLD = 32  # tokens of a message at most: each costs a server about 0.2 ms
_WATCHED = 8  # where they are looked at
_CALLS = 8  # of a load, at most, each with its limit

T = TypeVar("T")


class HttpEngine:
    """The servers of `generator.urls` as an `Engine`.

    Args:
        outline: the model without weights (`outline_model`), which says what a version must have.
        config: of the generator.
        stop_ids: tokens that end a turn.
        pace: how long a server may take for each step of a load.
        away_s: how long all may be away.
        tell_head: as `head` of `support_limit`.
        key: that the servers were started with, if any.
        start_s: for a first server to answer.

    Raises:
        UsageError: a server would serve wrong, or anybody can reach it.
        StartupError: none answered.
    """

    def __init__(
        self,
        outline: Any,
        config: GeneratorConfig,
        *,
        stop_ids: Iterable[int],
        pace: Pace,
        away_s: float,
        tell_head: int = 0,
        key: str = "",
        start_s: float = START_S,
    ) -> None:
        self.version = -1
        self.slots = config.slots
        self.max_context = config.max_context
        self._pace, self._away_s = pace, away_s
        self._head = tell_head
        # As a partial is due an eighth early.
        self._interval = max(1, min(_TOLD, (config.partial_flush_tokens or 8 * _TOLD) // 8))
        self._updates = Updates(outline)
        self._vocabulary: int = outline.config.get_text_config().vocab_size
        self._stop_ids = sorted(set(stop_ids))
        self._name = secrets.token_hex(4)  # begins what this engine names on a server
        self._numbers = itertools.count()
        self._open: dict[str, Stream] = {}
        self.ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self._ready: list[EngineOutput] = []
        self._served_at = time.monotonic()  # when a server was ready last
        # Of the loop's thread.
        self.newest: Load | None = None
        self._waiting: deque[Stream] = deque()  # for a server
        self._places: dict[str, VllmServer] = {}  # by session, the server of its last turn
        self.servers: list[VllmServer] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._loop = LoopThread("umbra-servers")
        try:
            self._wait(self._begin(config, outline.config, key), _REPLY_S)
            self._join(start_s)
        except BaseException:
            self.close()
            raise

    def _join(self, limit_s: float) -> None:
        """Wait for the first server."""
        deadline = Deadline(limit_s, "no server of generator.urls answered", error=StartupError)
        while not (joined := [server for server in self.servers if server.facts is not None]):
            if (refusal := self._refusal) is not None:
                raise refusal
            deadline.check(f": {self.servers[0].fault}")
            time.sleep(_LOOK_S)
        assert joined[0].facts is not None
        self.dtype = joined[0].facts.dtype

    @property
    def _refusal(self) -> UmbraError | None:
        return next((server.refusal for server in self.servers if server.refusal is not None), None)

    @property
    def decoded_tokens(self) -> int:
        return sum(server.decoded_tokens for server in self.servers)

    @property
    def live(self) -> int:
        return min(len(self._open), self.slots)

    @property
    def fits(self) -> int:
        ready = sum(server.is_ready for server in self.servers)
        return max(1, self.slots * ready // len(self.servers))

    @property
    def cache(self) -> CacheFigures:
        return CacheFigures()  # servers tell theirs at /metrics

    @property
    def busy(self) -> bool:
        return bool(self._open or self._ready)

    def submit(self, requests: Iterable[EngineRequest]) -> None:
        """Queue `requests`; see `Engine.submit`."""
        if not self._open:
            self._served_at = time.monotonic()
        for request in requests:
            limit = check_request(request, self.max_context, self._vocabulary)
            key = f"{self._name}.{request.request_id}#{next(self._numbers)}"
            body = self._body(key, request, limit)
            stream = Stream(key, request, body, self._head)
            self._open[key] = stream
            self._loop.call(self._place, stream)

    def poll(self, timeout_s: float) -> list[EngineOutput]:
        """Return finished outputs, after at most `timeout_s` seconds of waiting.

        Raises:
            EngineError: no server has been ready for long.
            UmbraError: a server refused a request.
        """
        if not self._ready and self._open:
            self._collect(timeout_s)
        now = time.monotonic()
        if not self._open or any(server.is_ready for server in self.servers):
            self._served_at = now
        elif not self._ready and now - self._served_at > self._away_s:
            faults = "; ".join(server.fault for server in self.servers)
            raise EngineError(
                f"no server of generator.urls was ready for {now - self._served_at:.0f} s: {faults}"
            )
        return self._take()

    def load(
        self,
        manifest: Manifest,
        data: Part,
        version: int,
        kv_policy: KvPolicy,
        guard: SlotGuard | None = None,
    ) -> list[EngineOutput]:
        """Have all servers serve `version`; see `Engine.load`.

        A server that can't get it is taken out, and gets the newest version when it is back.

        Raises:
            UsageError: as there.
            ChangedError: it is overwritten.
            EngineError: the servers refuse it.
        """
        self._updates.check(manifest)
        update = self._updates.of(manifest, data)
        assert isinstance(update.memory, memoryview)
        if guard is not None:
            guard.verify()
        sums = guard.sums if guard is not None else Checksums(manifest, update.memory, THREADS)
        buckets = [
            [update.start + start, update.start + end, checksum]
            for (start, end), checksum in zip(manifest.buckets, sums.result(), strict=True)
        ]
        load = Load(
            version,
            f"{self._name}.{version}.{next(self._numbers)}",
            update.info(buckets),
            kv_policy,
            self._pace.limit_s(manifest.total_bytes),
            update.memory if update.is_copy else None,
        )
        refusal = self._wait(self._serve(load), _CALLS * load.limit_s)
        if refusal is not None and not any(server.is_ready for server in self.servers):
            if guard is not None and guard.is_overwritten:
                raise ChangedError(OVERWRITTEN)
            raise EngineError(f"the load of version {version} broke off: {refusal}") from refusal
        self.version = version
        if kv_policy != "abort":
            return []
        self._collect(0.0)
        return take(self._ready, lambda o: o.finish_reason == "abort")

    def abort(self, request_ids: Iterable[str] | None = None) -> list[EngineOutput]:
        names = None if request_ids is None else set(request_ids)
        if streams := self._streams_of(names):
            self._wait(self._abort(streams), _REPLY_S)
        self._collect(0.0)
        return self._take(names)

    def new_tokens(self) -> Mapping[str, Sequence[int]]:
        return {stream.request.request_id: stream.tokens for stream in self._open.values()}

    def peek(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        streams = self._streams_of(set(request_ids))
        return self._wait(self._look(streams), _REPLY_S) if streams else []

    def forget(self, session: str) -> None:
        self._loop.call(self._forget, session)

    def close(self) -> None:
        self._open.clear()
        if not self._loop.closed:
            with suppress(UmbraError):
                self._wait(self._end(), _REPLY_S)
            self._loop.close()

    # -- in the driver's thread -------------------------------------------------------------------

    def _streams_of(self, names: set[str] | None) -> list[Stream]:
        return [s for s in self._open.values() if names is None or s.request.request_id in names]

    def _body(self, key: str, request: EngineRequest, limit: int) -> dict[str, Any]:
        sampling = request.sampling
        support = support_limit(sampling, self._head)
        support += bool(support)  # the sampled token is one of them
        return {
            "request_id": key,
            "token_ids": list(request.prompt_ids),
            "stream": True,
            "sampling_params": {
                **sampling_arguments(sampling, limit, self._stop_ids, support, self._vocabulary),
                "stream_interval": min(self._interval, _WATCHED if request.watched else _TOLD),
            },
        }

    def _collect(self, timeout_s: float) -> None:
        """Take the outputs that are done, or wait `timeout_s` seconds for one."""
        with suppress(queue.Empty):
            stream, output = self.ended.get(block=timeout_s > 0, timeout=timeout_s or None)
            while True:
                if self._open.pop(stream.key, None) is not None:
                    if isinstance(output, BaseException):
                        raise output
                    self._ready.append(output)
                stream, output = self.ended.get_nowait()

    def _take(self, names: set[str] | None = None) -> list[EngineOutput]:
        return take(self._ready, lambda o: names is None or o.request_id in names)

    def _wait(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        try:
            return self._loop.wait(coroutine, timeout_s)
        except TimeoutError:
            raise EngineError(
                f"the thread of the vLLM servers was silent for {timeout_s:g} s"
            ) from None

    # -- in the loop's thread ---------------------------------------------------------------------

    async def _begin(self, config: GeneratorConfig, hf_config: Any, key: str) -> None:
        for url in config.urls:
            client = HttpClient(url.rstrip("/"), key)
            server = VllmServer(client, config, hf_config, self)
            self.servers.append(server)
        for server in self.servers:
            task = asyncio.create_task(server.keep(), name=f"keeping {server.client.url}")
            task.add_done_callback(ends_with_it)
            self._tasks.append(task)

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._abort([stream for server in self.servers for stream in server.streams.values()])
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _look(self, streams: Sequence[Stream]) -> list[EngineOutput]:
        return [stream.output() for stream in streams]

    def _place(self, stream: Stream) -> None:
        """Have a server answer it, the one of its session's last turn if that is there."""
        ready = [server for server in self.servers if server.is_ready]
        if not ready:
            self._waiting.append(stream)
            return
        session = stream.request.session
        server = self._places.get(session)
        if server is None or not server.is_ready:
            server = min(ready, key=lambda each: len(each.streams))
        if session:
            self._places[session] = server
        server.start(stream)

    def changed(self) -> None:
        """Place waiting requests: a server has come or gone."""
        waiting, self._waiting = self._waiting, deque()
        for stream in waiting:
            self._place(stream)

    def _forget(self, session: str) -> None:
        server = self._places.pop(session, None)
        if server is not None:
            server.salts.forget([session])

    async def _serve(self, load: Load) -> UmbraError | None:
        """Have the servers that are ready load it, and the others when they can.

        Returns why one refused it, if any did.
        """
        self.newest = load
        ready = [server for server in self.servers if server.is_ready or self.version < 0]
        await asyncio.gather(*(server.serve(load) for server in ready))
        for server in self.servers:
            server.news.set()
        return next((server.refusal for server in ready if server.refusal is not None), None)

    async def _abort(self, streams: Sequence[Stream]) -> None:
        for stream in streams:
            if stream in self._waiting:
                self._waiting.remove(stream)
                self.ended.put((stream, stream.output()))
        keys = {stream.key for stream in streams}
        of_servers = [
            server.abort([s for key, s in server.streams.items() if key in keys])
            for server in self.servers
        ]
        await asyncio.gather(*of_servers)
