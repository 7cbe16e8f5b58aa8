"""The common half of engines over vLLM: versions as its updates, salts of its prefixes, requests.

Requests are answered on an event loop in another thread than the driver's.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from msgspec.structs import replace

from umbra.proto.records import AdapterFacts, Manifest, TensorEntry
from umbra.services.config import GeneratorConfig
from umbra.services.config.rules import VLLM_COOLEST
from umbra.services.generator.engines import engine
from umbra.services.generator.engines.engine import EngineError, EngineOutput, EngineRequest
from umbra.services.generator.vllm.checkpoint_names import CheckpointNames
from umbra.services.modeling.weights import WeightTable
from umbra.services.process.loop_thread import LoopThread
from umbra.services.weights.manifest import Part
from umbra.services.weights.memory import locate

REPLY_S = 60.0  # of the loop
_TIES = 8  # tokens that are asked for beyond top_k, all that tie with its last being kept


class Salts:
    """Requests that begin between two loads share a salt, later turns of older sessions do not.

    A session whose last turn began under the weights of now goes on under the salt that all share,
    one of whom older weights made a part gets a salt of its own from then on. So a group reads its
    prompt once, a session reads itself again at one load and never after it, and nobody reads the
    KV that older weights computed for another session.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._own = "own."  # begins a salt that one session has alone
        self.shared = ""
        self._last: dict[str, str] = {}  # by session, the salt of its last turn

    def loaded(self, version: int, *, keep: bool) -> None:
        """Note that `version` is served from now on; without `keep` no earlier KV is valid.

        A trainer that goes back gives a number to other weights, so the version alone is no name.
        """
        self.shared = f"{version}.{next(self._numbers)}"
        if not keep:
            self._own = f"own{self.shared}."
            self._last.clear()

    def of(self, session: str) -> str:
        """Return the salt of the next request of `session`; "" = of no session."""
        last = self._last.get(session, self.shared)
        if last != self.shared and not last.startswith(self._own):
            last = self._last[session] = f"{self._own}{next(self._numbers)}"
        return last

    def used(self, session: str, salt: str) -> None:
        if session:
            self._last[session] = salt

    def forget(self, session: str) -> None:
        self._last.pop(session, None)


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
        self._fit = WeightTable(outline, adapter)
        self._checkpoint = CheckpointNames(outline) if adapter is None else None
        self._head, self._stop_ids = head, sorted(set(stop_ids))
        self._vocabulary: int = outline.config.get_text_config().vocab_size
        self._numbers = itertools.count()
        self._open: dict[str, L] = {}  # by a key that is never used twice
        self._ready: list[EngineOutput] = []
        self._finished_tokens = 0

    @property
    def busy(self) -> bool:
        return bool(self._open or self._ready)

    def abort(self, request_ids: Iterable[str] | None = None) -> list[EngineOutput]:
        names = None if request_ids is None else set(request_ids)
        if live := self._named(names):
            self._stop(live)
        self._collect(0.0)
        for key in live:  # of one that has died
            self._open.pop(key, None)
        ready = self._ready
        if names is None:
            names = {output.request_id for output in ready}
        self._ready = [output for output in ready if output.request_id not in names]
        return [output for output in ready if output.request_id in names]

    def _stop(self, live: dict[str, L]) -> None:
        """End these requests; their outputs are `ended` then."""
        raise NotImplementedError

    def _named(self, names: set[str] | None) -> dict[str, L]:
        """Return the requests of these names (None: all), by key."""
        live = self._open.items()
        return {k: one for k, one in live if names is None or one.request.request_id in names}

    def _update(self, manifest: Manifest, data: Part) -> tuple[dict[str, Any], int]:
        """Return the fields of the `UpdateInfo` that loads `data`, and where its file has `data`.

        Raises UsageError unless versions of this layout fit the model.
        """
        self._fit.check(manifest)
        place = locate(data) if isinstance(data, memoryview) else ("", 0)
        assert place is not None, "vLLM's workers are other processes: the memory must be shared"
        path, start = place
        layout = msgspec.json.encode(self._layout(manifest, start)).decode()
        info = {"path": path, "manifest": layout, "buckets": []}
        return info, start

    def _layout(self, manifest: Manifest, start: int) -> Manifest:
        """Return the layout of a version from byte `start` on, in the names of checkpoints."""
        # A version has tied tensors once, but vLLM packs them for each layer.
        names = {entry.name for entry in manifest.tensors}
        tied = self._fit.left_out(names) if self._checkpoint is not None else {}
        tensors: list[TensorEntry] = []
        for entry in manifest.tensors:
            for name in (entry.name, *tied.get(entry.name, ())):
                moved = replace(entry, name=name, offset=entry.offset + start)
                tensors += self._checkpoint.of(moved) if self._checkpoint is not None else [moved]
        return replace(manifest, tensors=tensors)

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
                if self._open.pop(key, None) is not None:
                    if isinstance(outcome, BaseException):
                        raise outcome
                    self._finished_tokens += len(outcome.token_ids)
                    self._ready.append(outcome)
                key, outcome = self.ended.get_nowait()
