"""vLLM servers that others started, as one `Engine`.

The driver's thread hands requests to an event loop, where each server is kept at work (`server.py`)
and each request goes to the one with the fewest. New weights come from the memory of this process.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from umbra.proto.deadline import Deadline
from umbra.proto.errors import StartupError, UmbraError
from umbra.proto.records import Manifest
from umbra.services.config import RunConfig
from umbra.services.generator.engines.engine import (
    EngineError,
    EngineOutput,
    EngineRequest,
    KvPolicy,
)
from umbra.services.generator.vllm.loop_engine import LoopEngine
from umbra.services.generator.vllm.server import Load, Stream, VllmServer
from umbra.services.process.loop_thread import LoopThread, ends_with_it
from umbra.services.weights.manifest import Part
from umbra.services.weights.verify import OVERWRITTEN, THREADS, ChangedError, Checksums, SlotGuard

_LOOK_S = 0.05
_TOLD = 32  # tokens of a message at most: each costs a server about 0.2 ms
_WATCHED = 8  # where they are looked at
_CALLS = 8  # of a load, at most, each with its limit


class HttpEngine(LoopEngine[Stream]):
    """The servers of `generator.urls` as an `Engine`.

    Args:
        outline: the model without weights (`outline_model`), which says what a version must have.
        config: of the run.
        stop_ids: tokens that end a turn.
        key: that the servers were started with, if any.
        start_s: for a first server to answer.

    Raises:
        UsageError: a server would serve wrong, or anybody can reach it.
        StartupError: none answered.
    """

    def __init__(
        self,
        outline: Any,
        config: RunConfig,
        *,
        stop_ids: Iterable[int],
        key: str = "",
        start_s: float = 600.0,
    ) -> None:
        own = config.generator
        super().__init__(outline, own, stop_ids, config.trainer.score_centering)
        self._pace = config.weight_hub.pace  # of each step of a load
        self._away_s = 0.9 * config.buffer.engine_stall_s  # of all, before we count as stuck
        # As a partial is due an eighth early.
        self._interval = max(1, min(_TOLD, (own.partial_flush_tokens or 8 * _TOLD) // 8))
        self._name = secrets.token_hex(4)  # begins what this engine names on a server
        self._served_at = time.monotonic()  # when a server was ready last
        # Of the loop's thread.
        self.newest: Load | None = None  # the version to be served
        self._waiting: list[Stream] = []  # for a server
        self._places: dict[str, VllmServer] = {}  # by session, the server of its last turn
        self.servers = [
            VllmServer(url.rstrip("/"), key, own, outline.config, self) for url in own.urls
        ]
        self._tasks: list[asyncio.Task[None]] = []
        self._loop = LoopThread("umbra-servers")
        try:
            self._wait(self._begin())
            self.dtype = self._joined(start_s)
        except BaseException:
            self.close()
            raise

    def _joined(self, limit_s: float) -> str:
        """Wait for the first server; return its dtype."""
        deadline = Deadline(limit_s, "no server of generator.urls answered", error=StartupError)
        while True:
            for server in self.servers:
                if (facts := server.facts) is not None:
                    return facts.dtype
            if (refusal := self.refusal) is not None:
                raise refusal
            deadline.check(f": {self.servers[0].fault}")
            time.sleep(_LOOK_S)

    @property
    def refusal(self) -> UmbraError | None:
        """Return why a server refuses, if one does."""
        return next((server.refusal for server in self.servers if server.refusal is not None), None)

    @property
    def decoded_tokens(self) -> int:
        return sum(server.decoded_tokens for server in self.servers)

    def submit(self, requests: Iterable[EngineRequest]) -> None:
        if not self._open:
            self._served_at = time.monotonic()
        for request in requests:
            sampling = self._sampling(request, itself=True)
            interval = min(self._interval, _WATCHED if request.watched else _TOLD)
            key = f"{self._name}.{request.request_id}#{next(self._numbers)}"
            body = {
                "request_id": key,
                "token_ids": list(request.prompt_ids),
                "stream": True,
                "sampling_params": sampling | {"stream_interval": interval},
            }
            stream = self._open[key] = Stream(request, key=key, body=body, head=self._head)
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
            faults = "; ".join(str(server.fault) for server in self.servers)
            raise EngineError(
                f"no server of generator.urls was ready for {now - self._served_at:.0f} s: {faults}"
            )
        outputs, self._ready = self._ready, []
        return outputs

    def load(
        self,
        manifest: Manifest,
        data: Part,
        version: int,
        kv_policy: KvPolicy,
        guard: SlotGuard | None = None,
    ) -> None:
        """Have all servers serve `version`; see `Engine.load`.

        A server that can't get it is taken out, and gets the newest version when it is back.

        Raises:
            UsageError: as there.
            ChangedError: it is overwritten.
            EngineError: the servers refuse it.
        """
        assert isinstance(data, memoryview), "receivers of servers have no GPU"
        info, first = self._update(manifest, data)
        sums = Checksums(manifest, data, THREADS).result()
        if guard is not None:
            guard.verify()
        info["buckets"] = [
            [first + start, first + end, checksum]
            for (start, end), checksum in zip(manifest.buckets, sums, strict=True)
        ]
        load = Load(
            version,
            f"{self._name}.{version}.{next(self._numbers)}",
            info,
            kv_policy,
            self._pace.limit_s(manifest.total_bytes),
        )
        refusal = self._wait(self._serve(load), _CALLS * load.limit_s)
        if refusal is not None and not any(server.is_ready for server in self.servers):
            if guard is not None and guard.is_overwritten:
                raise ChangedError(OVERWRITTEN)
            raise EngineError(f"the load of version {version} broke off: {refusal}") from refusal
        self.version = version

    def new_tokens(self) -> Mapping[str, Sequence[int]]:
        return {stream.request.request_id: stream.tokens for stream in self._open.values()}

    def peek(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        streams = self._named(set(request_ids)).values()
        return self._wait(self._look(streams)) if streams else []

    def forget(self, session: str) -> None:
        self._loop.call(self._forget, session)

    def close(self) -> None:
        self._open.clear()
        if not self._loop.closed:
            with suppress(UmbraError):
                self._wait(self._end())
            self._loop.close()

    # -- in the driver's thread -------------------------------------------------------------------

    def _stop(self, live: dict[str, Stream]) -> None:
        self._wait(self._abort(live.values()))

    # -- in the loop's thread ---------------------------------------------------------------------

    async def _begin(self) -> None:
        for server in self.servers:
            task = asyncio.create_task(server.keep(), name=f"keeping {server.url}")
            task.add_done_callback(ends_with_it)
            self._tasks.append(task)

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._abort([stream for server in self.servers for stream in server.streams])
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _look(self, streams: Iterable[Stream]) -> list[EngineOutput]:
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
        """Place waiting requests: a server has come."""
        waiting, self._waiting = self._waiting, []
        for stream in waiting:
            self._place(stream)

    def _forget(self, session: str) -> None:
        if (server := self._places.pop(session, None)) is not None:
            server.salts.forget(session)

    async def _serve(self, load: Load) -> UmbraError | None:
        """Have ready servers load it, and the others when they can; return why one refused it."""
        self.newest = load
        ready = [server for server in self.servers if server.is_ready or self.version < 0]
        await asyncio.gather(*(server.serve(load) for server in ready))
        for server in self.servers:
            server.news.set()
        return next((server.refusal for server in ready if server.refusal is not None), None)

    async def _abort(self, streams: Iterable[Stream]) -> None:
        wanted = set(streams)
        for stream in wanted.intersection(self._waiting):
            self._waiting.remove(stream)
            self.ended.put((stream.key, stream.output()))
        await asyncio.gather(*(server.abort(wanted & server.streams) for server in self.servers))
