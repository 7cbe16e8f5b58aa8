"""The driver's half of engines that answer requests on an event loop in another thread."""

from __future__ import annotations

import asyncio
import itertools
import queue
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from umbra.proto.records import AdapterFacts
from umbra.services.config import GeneratorConfig
from umbra.services.config.rules import VLLM_COOLEST
from umbra.services.generator.engines import engine
from umbra.services.generator.engines.engine import EngineError, EngineOutput, EngineRequest
from umbra.services.generator.vllm.updates import Updates
from umbra.services.process.loop_thread import LoopThread

REPLY_S = 60.0  # of the loop
_TIES = 8  # tokens that are asked for beyond top_k, all that tie with its last being kept


@dataclass(slots=True, eq=False)
class Live:
    """A request under way, and the task of the loop that answers it."""

    request: EngineRequest
    task: asyncio.Task[Any] | None = None
    restarts: bool = False  # once its task has ended, under another salt


L = TypeVar("L", bound=Live)
T = TypeVar("T")


class LoopEngine(Generic[L]):
    """The driver's half of an `Engine`.

    Attributes:
        ended: takes each request that is done, by its key, with its output or with what broke.
    """

    _loop: LoopThread

    def __init__(
        self,
        outline: Any,
        config: GeneratorConfig,
        stop_ids: Iterable[int],
        head: int,
        adapter: AdapterFacts | None = None,
    ) -> None:
        self.version = -1
        self.slots, self.max_context = config.slots, config.max_context
        self.ended = queue.SimpleQueue[tuple[str, EngineOutput | BaseException]]()
        self._updates = Updates(outline, adapter)
        self._head, self._stop_ids = head, sorted(set(stop_ids))
        self._vocabulary: int = outline.config.get_text_config().vocab_size
        self._numbers = itertools.count()
        self._open: dict[str, L] = {}  # by a key that is never used twice
        self._ready: list[EngineOutput] = []

    @property
    def live(self) -> int:
        return min(len(self._open), self.slots)

    def abort(self, request_ids: Iterable[str] | None = None) -> list[EngineOutput]:
        names = None if request_ids is None else set(request_ids)
        if live := self._named(names):
            self._stop(live)
        self._collect(0.0)
        return engine.take(self._ready, lambda output: names is None or output.request_id in names)

    def _stop(self, live: dict[str, L]) -> None:
        """End these requests; their outputs are `ended` then."""
        raise NotImplementedError

    def _named(self, names: set[str] | None) -> dict[str, L]:
        """Return the requests of these names (None: all), by key."""
        live = self._open.items()
        return {k: one for k, one in live if names is None or one.request.request_id in names}

    def _wait(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = REPLY_S) -> T:
        """Return its result, from the loop's thread; EngineError if it does not come."""
        try:
            return self._loop.wait(coroutine, timeout_s)
        except TimeoutError:
            raise EngineError(f"vLLM did not answer within {timeout_s:g} s") from None

    def _sampling(self, request: EngineRequest, *, itself: bool) -> dict[str, Any]:
        """Return arguments of vLLM's `SamplingParams`; ValueError if it would refuse them.

        `itself`: the sampled token is one of those whose logprobs are asked for.
        """
        limit = engine.check_request(request, self.max_context, self._vocabulary)
        sampling = request.sampling
        if 0 < sampling.temperature < VLLM_COOLEST:
            raise ValueError(
                f"sampling.temperature = {sampling.temperature:g} is out of range: vLLM takes "
                f"0 (greedy) or at least {VLLM_COOLEST}"
            )
        logprobs = engine.support_limit(sampling, self._head)
        if logprobs:  # beside the sampled token's; vLLM keeps all that tie with the last of top_k
            logprobs += itself + _TIES * sampling.cuts_off
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "max_tokens": limit,
            "stop_token_ids": self._stop_ids,
            "ignore_eos": True,  # stop_token_ids say it all
            "logprobs": min(logprobs, self._vocabulary),
            "detokenize": False,
        }

    def _collect(self, timeout_s: float) -> None:
        """Take the outputs that are done, or wait `timeout_s` seconds for one."""
        with suppress(queue.Empty):
            key, outcome = self.ended.get(block=timeout_s > 0, timeout=timeout_s or None)
            while True:
                if (live := self._open.pop(key, None)) is not None:
                    if isinstance(outcome, BaseException):
                        raise outcome
                    self._finished(live.request, outcome)
                key, outcome = self.ended.get_nowait()

    def _finished(self, request: EngineRequest, output: EngineOutput) -> None:
        del request
        self._ready.append(output)

    def _aborted(self, kv_policy: engine.KvPolicy) -> list[EngineOutput]:
        """Return the outputs that a load under `kv_policy` has ended."""
        if kv_policy != "abort":
            return []
        self._collect(0.0)
        return engine.take(self._ready, lambda output: output.finish_reason == "abort")
