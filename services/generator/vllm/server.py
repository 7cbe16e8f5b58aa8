"""vLLM's `AsyncLLM` in an event loop of its own thread, for a driver that is no coroutine.

Whole outputs are asked for, not a stream, which costs the frontend least. What there is of a
request under way is read off vLLM's own records of it: the one place where we look behind its
interface, along with the pause, whose public form sleeps for 20 ms more.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import PrometheusStatLogger

from umbra.proto.deadline import Deadline
from umbra.proto.errors import (
    StartupError,
    UmbraError,
    UsageError,
)
from umbra.proto.records import VersionSpan
from umbra.services.generator.engines.engine import (
    CacheFigures,
    EngineError,
    EngineOutput,
    FinishReason,
    KvPolicy,
)
from umbra.services.generator.vllm.cache import Salts
from umbra.services.generator.vllm.names import ToldRouters
from umbra.services.generator.vllm.plugin import ADAPTER
from umbra.services.process.child import describe_exit

log = logging.getLogger(__name__)


_REPLY_S = 60.0  # of a request's abort
_CLOSE_S = 5.0
_LOOK_S = 1.0  # between looks at whether the core still lives
_KILL_S = 2.0  # until its processes, which hold nothing that is needed any more, are killed
_REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length"}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job:
    """One request; `key` is never used twice."""

    key: str
    prompt_ids: list[int]
    params: SamplingParams
    session: str = ""


@dataclass(frozen=True, slots=True)
class Pause:
    """Seconds that a change of weights took from the driver's view, and their parts."""

    total_s: float
    stop_s: float  # until no step was under way
    load_s: float


class CacheLog(PrometheusStatLogger):
    """Adds up vLLM's figures of each step; `figures` can be read from any thread.

    It is one of vLLM's loggers for Prometheus by name only: else vLLM would make that as well,
    which takes time in every step for what nobody asks.
    """

    def __init__(self) -> None:
        self.figures = CacheFigures()

    def __call__(self, vllm_config: Any, engine_index: int) -> CacheLog:
        """The log of an engine core, of which there is one."""
        del vllm_config, engine_index
        return self

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """A step was made."""
        before = self.figures
        usage, asked, cached = before.usage, before.asked_tokens, before.cached_tokens
        if scheduler_stats is not None:
            usage = scheduler_stats.kv_cache_usage
            asked += scheduler_stats.prefix_cache_stats.queries
            cached += scheduler_stats.prefix_cache_stats.hits
        preempted = iteration_stats.num_preempted_reqs if iteration_stats is not None else 0
        self.figures = CacheFigures(usage, asked, cached, before.preemptions + preempted)

    def log_engine_initialized(self) -> None:
        pass

    def log(self) -> None:
        pass

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        pass

    def record_admission_rejection(self, reason: str) -> None:
        pass


class VllmServer:
    """Runs jobs; `done` gets an output for each, or the error that ended it.

    Args:
        arguments: of `AsyncEngineArgs`.
        version: of the weights that it starts with.
        routers: those whose choices are told; None: they are not.
        adapter: what `AdapterInit` says of the one that versions are of; None: whole weights.

    Raises:
        UsageError: vLLM refuses an argument.
        StartupError: its engine core did not come up.
    """

    def __init__(
        self,
        arguments: dict[str, Any],
        version: int,
        routers: ToldRouters | None = None,
        adapter: dict[str, Any] | None = None,
    ) -> None:
        self._routers = routers
        self._adapter = adapter
        # Its path is never read: no request is made before the first version is loaded.
        self._lora = LoRARequest("umbra", ADAPTER, "umbra") if adapter else None
        self.done: queue.SimpleQueue[EngineOutput | Exception] = queue.SimpleQueue()
        self._salts = Salts()
        self._cache_log = CacheLog()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._restarting: set[str] = set()
        try:
            args = AsyncEngineArgs(**arguments)
            args.create_engine_config()
        except (ValueError, TypeError, KeyError, AssertionError, NotImplementedError) as error:
            raise UsageError(f"vLLM refuses its engine arguments: {_sentence(error)}") from error
        try:
            self._llm = AsyncLLM.from_engine_args(args, stat_loggers=[self._cache_log])
        except (RuntimeError, ValueError, OSError) as error:
            raise StartupError(
                f"vLLM's engine core did not start: {_sentence(error)} (its own lines above say "
                "more; memory for the KV cache is generator.engine_args.kv_cache_memory_bytes)"
            ) from error
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="umbra-vllm")
        self._thread.start()
        self._states = self._llm.output_processor.request_states
        cache = self._llm.vllm_config.cache_config
        self.cache_tokens: int = cache.kv_cache_size_tokens or 0
        """Tokens that its cache of keys and values has room for."""
        try:
            self._wait(self._begin(version), _REPLY_S)
        except BaseException as error:
            self.close()
            if adapter is None or not isinstance(error, Exception) or isinstance(error, UmbraError):
                raise
            raise UsageError(f"vLLM refuses the adapter: {_sentence(error)}") from error

    @property
    def died(self) -> EngineError | None:
        """Why there will be no more outputs, once that is so."""
        if self._loop.is_closed() or not self._llm.errored:
            return None
        manager = self._llm.engine_core.resources.engine_manager
        codes = manager.finished_procs() if manager is not None else {}
        ends = [f"{name} {describe_exit(code)}" for name, code in codes.items()]
        return EngineError(
            f"vLLM's engine core died ({', '.join(ends) or 'no exit code yet'}); if it said why, "
            "it did so above"
        )

    @property
    def cache(self) -> CacheFigures:
        """Of its cache of keys and values, as of its last step."""
        return self._cache_log.figures

    def new_tokens(self) -> dict[str, list[int]]:
        """Return the tokens of each job that is not done; the lists grow."""
        # Made into a list at once, because the loop's thread adds and removes.
        states = list(self._states.values())
        return {state.external_req_id: state.detokenizer.output_token_ids for state in states}

    def submit(self, jobs: Sequence[Job]) -> None:
        self._loop.call_soon_threadsafe(self._start, jobs)

    def forget(self, sessions: Sequence[str]) -> None:
        """No more jobs of these sessions come."""
        self._loop.call_soon_threadsafe(self._salts.forget, sessions)

    def abort(self, keys: Iterable[str]) -> list[EngineOutput]:
        """End these jobs; what there is of each is in `done` then, or returned if vLLM has died."""
        wanted = list(keys)
        if self._llm.errored:
            return self.peek(wanted)
        try:
            self._wait(self._abort(wanted), _REPLY_S)
        except EngineDeadError:
            return self.peek(wanted)
        return []

    def peek(self, keys: Iterable[str]) -> list[EngineOutput]:
        """What there is so far of these jobs, as aborted."""
        return self._wait(self._look(set(keys)), _REPLY_S)

    def update(
        self,
        part: dict[str, Any],
        version: int,
        kv_policy: KvPolicy,
        limit_s: float,
        verify: Callable[[], None],
    ) -> Pause:
        """Load a version between two steps. Under "abort", all jobs are in `done` afterwards.

        Args:
            part: fields of `UpdateInfo`.
            version: of the weights.
            kv_policy: what becomes of jobs under way.
            limit_s: seconds that vLLM may take to pause, to load, and to resume.
            verify: raises an error if what was loaded is not the version.

        Raises:
            EngineError: vLLM died, or the load broke off: it must not be used any more.
        """
        began = time.perf_counter()
        try:
            stop_s = self._wait(self._pause(kv_policy), limit_s)
            stopped = time.perf_counter()
            request = WeightTransferUpdateRequest(update_info=part)
            self._wait(self._llm.update_weights(request), limit_s)
            verify()
            self._wait(self._resume(version, kv_policy), limit_s)
        except Exception as error:
            if (died := self.died) is not None:
                raise died from error
            raise EngineError(
                f"version {version} broke off while vLLM loaded it: {_sentence(error)}; its "
                "weights are neither it nor the version before, so this generator leaves"
            ) from error
        now = time.perf_counter()
        return Pause(now - began, stop_s, now - stopped)

    def close(self) -> None:
        if self._loop.is_closed():
            return
        with suppress(UmbraError):
            self._wait(self._end(), _CLOSE_S)
        with suppress(Exception):  # it may have died half-way; nothing of it is needed any more
            self._llm.shutdown(timeout=_KILL_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()
        with suppress(Exception):
            # It leaves its ZeroMQ context open, of which it has two objects, each with sockets.
            context = self._llm.engine_core.ctx
            for socket in list(context._sockets):
                socket.close(linger=0)
            context._shadow_obj.destroy(linger=0)
        # Its destructor must not run when the interpreter has begun to take itself apart.
        del self._llm

    # -- in the loop's thread ---------------------------------------------------------------------

    async def _begin(self, version: int) -> None:
        await self._llm.get_supported_tasks()  # so that no job has to ask
        init = WeightTransferInitRequest(init_info=self._adapter or {})
        await self._llm.init_weight_transfer_engine(init)
        if self._adapter:
            await self._llm.start_weight_update()  # see `adapters.py`
        await self._llm.update_weight_version(str(version))
        self._salts.loaded(version, keep=True)

    async def _end(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        handler = self._llm.output_handler
        others = [handler] if handler is not None else []
        for task in others:
            task.cancel()
        await asyncio.gather(*self._tasks.values(), *others, return_exceptions=True)

    def _start(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._tasks[job.key] = self._loop.create_task(self._run(job))

    async def _run(self, job: Job) -> None:
        try:
            while True:
                salt = self._salts.of(job.session)
                output = await self._generate(job, salt)
                if job.key not in self._restarting:
                    break
                self._restarting.discard(job.key)
            self._salts.used(job.session, salt)
            self.done.put(_finished(job.key, output, self._routers))
        except EngineDeadError:
            pass  # `died` says so, and its tokens can be looked at
        except Exception as error:  # noqa: BLE001 - whatever it is ends the generator, with its name
            self.done.put(error)
        finally:
            del self._tasks[job.key]

    async def _generate(self, job: Job, salt: str) -> RequestOutput:
        prompt = tokens_input(job.prompt_ids, cache_salt=salt)
        made = self._llm.generate(prompt, job.params, job.key, lora_request=self._lora)
        async for output in made:
            if output.finished:
                return output
        raise UmbraError(f"vLLM ended request {job.key} without an output")

    async def _abort(self, keys: Sequence[str]) -> None:
        tasks = [self._tasks[key] for key in keys if key in self._tasks]
        await self._llm.abort(keys)
        await asyncio.gather(*tasks)

    async def _look(self, keys: set[str]) -> list[EngineOutput]:
        return [
            _under_way(state, self._routers)
            for state in self._states.values()
            if state.external_req_id in keys
        ]

    async def _pause(self, kv_policy: KvPolicy) -> float:
        """Stop decoding and open the model's layers; seconds until no step was under way."""
        began = time.perf_counter()
        clear = kv_policy == "recompute"
        await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear)
        stopped = time.perf_counter()
        if not self._adapter:
            await self._llm.start_weight_update()
        return stopped - began

    async def _resume(self, version: int, kv_policy: KvPolicy) -> None:
        if kv_policy == "abort":
            await self._abort(list(self._tasks))
        if self._adapter:
            await self._llm.update_weight_version(str(version))
        else:
            await self._llm.finish_weight_update(str(version))
        self._salts.loaded(version, keep=kv_policy == "keep")
        await self._restart_unstarted()
        await self._llm.resume_generation()

    async def _restart_unstarted(self) -> None:
        """Put jobs without a token under new salts: theirs would find blocks of old weights."""
        keys = [
            state.external_req_id
            for state in self._states.values()
            if not state.detokenizer.output_token_ids
        ]
        self._restarting.update(keys)
        await self._llm.abort(keys)

    def _wait(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Its result. A core that dies while it loads weights leaves vLLM waiting for its answer.

        Raises:
            EngineDeadError: the core is dead, and the result does not come.
            DeadlineError: it does not come within `timeout_s` seconds.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        deadline = Deadline(timeout_s, "vLLM did not answer")
        while True:
            futures.wait([future], min(_LOOK_S, timeout_s))
            if future.done():
                return future.result()
            if self._llm.errored:
                future.cancel()
                raise EngineDeadError
            deadline.check()


def _finished(key: str, output: RequestOutput, routers: ToldRouters | None) -> EngineOutput:
    completion = output.outputs[0]
    spans = [
        VersionSpan(version=int(span.version), start=span.start, end=span.end)
        for span in completion.weight_versions or ()
        if span.end > span.start
    ]
    return EngineOutput(
        request_id=key,
        token_ids=list(completion.token_ids),
        logprobs=_logprobs(completion.logprobs),
        spans=spans,
        finish_reason=_REASONS.get(completion.finish_reason, "abort"),
        routing=routers and routers.routing(completion.routed_experts),
    )


def _under_way(state: Any, routers: ToldRouters | None) -> EngineOutput:
    """What vLLM's output processor has of a request."""
    tokens = list(state.detokenizer.output_token_ids)
    starts: list[tuple[str, int]] = state.weight_version_starts
    ends = [start for _, start in starts[1:]] + [len(tokens)] * bool(starts)
    spans = [
        VersionSpan(version=int(version), start=start, end=end)
        for (version, start), end in zip(starts, ends, strict=True)
        if end > start
    ]
    logprobs = _logprobs(state.logprobs_processor.logprobs)
    routing = routers and routers.routing(*state.routed_experts_chunks)
    return EngineOutput(state.external_req_id, tokens, logprobs, spans, "abort", routing)


def _logprobs(logprobs: Any) -> list[float]:
    """Those of the sampled tokens, of which `FlatLogprobs` has nothing else."""
    return list(logprobs.logprobs) if logprobs is not None else []


def _sentence(error: BaseException) -> str:
    """The first line of an error that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "validation error" not in line), repr(error))
