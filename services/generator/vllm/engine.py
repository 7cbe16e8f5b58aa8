"""vLLM's `AsyncLLM` as an `Engine`: an event loop in its own thread, for a driver without one.

Whole outputs are asked for, not a stream, which costs the frontend least. Tokens of a request
in flight are read off vLLM's own records (`private.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from umbra.proto.errors import StartupError, UmbraError, UsageError
from umbra.proto.records import AdapterFacts, Manifest
from umbra.services.config import RunConfig
from umbra.services.generator.engines.engine import (
    EngineError,
    EngineOutput,
    EngineRequest,
    KvPolicy,
)
from umbra.services.generator.vllm import options, private
from umbra.services.generator.vllm.loop_engine import REPLY_S, Live, LoopEngine, Salts
from umbra.services.generator.vllm.plugin import ADAPTER
from umbra.services.modeling.experts import Routers
from umbra.services.modeling.lora import factors
from umbra.services.process.loop_thread import LoopThread
from umbra.services.weights.gpu.cuda import DeviceMemory
from umbra.services.weights.manifest import Part
from umbra.services.weights.verify import SlotGuard

log = logging.getLogger(__name__)

_CLOSE_S = 5.0
_LOOK_S = 1.0  # between checks of the engine core
_KILL_S = 2.0  # until its processes, which hold nothing that is needed any more, are killed

T = TypeVar("T")


def platform() -> str:
    """Return the platform of the installed vLLM: "cpu", "cuda", ..."""
    return current_platform.device_type


class VllmEngine(LoopEngine[Live]):
    """vLLM as an `Engine`.

    Args:
        path: the model directory.
        outline: the model without weights (`outline_model`), which says what a version must have.
        config: of the run.
        stop_ids: tokens that end a turn.
        seed: of the sampling.
        version: of the weights in `path`; -1 = not to be served.
        adapter: what versions are of; None: whole weights.

    Raises:
        UsageError: vLLM refuses an argument, or has no adapters for a layer.
        StartupError: its engine core did not come up.
    """

    def __init__(
        self,
        path: Path,
        outline: Any,
        config: RunConfig,
        *,
        stop_ids: Iterable[int],
        seed: int = 0,
        version: int = -1,
        adapter: AdapterFacts | None = None,
    ) -> None:
        rank = adapter.rank if adapter is not None else 0
        arguments = options.engine_arguments(
            config, path, outline, platform(), seed=seed, rank=rank
        )
        super().__init__(
            outline, config.generator, stop_ids, config.trainer.score_centering, adapter
        )
        self.version = version
        # To pause, to load a version, and to resume.
        self._pace = config.weight_hub.pace.after(config.buffer.engine_stall_s)
        self.decoded_tokens = 0
        self._salts = Salts()  # of the loop's thread
        self._mapped = b""  # handle of the GPU's memory that the workers have mapped
        self._routers = Routers.of(outline) if config.trainer.router_replay else None
        init: dict[str, Any] = {}
        self._lora: LoRARequest | None = None  # whose factors versions are
        if adapter is not None:
            init = {"facts": msgspec.msgpack.encode(adapter), "names": list(factors(outline))}
            # Its path is never read: no request is made before the first version is loaded.
            self._lora = LoRARequest("umbra", ADAPTER, "umbra")
        self._llm = _started(arguments)
        self._loop = LoopThread("umbra-vllm")
        try:
            self._wait(self._begin(version, init))
        except BaseException as error:
            self.close()
            if adapter is None or not isinstance(error, Exception) or isinstance(error, UmbraError):
                raise
            raise UsageError(f"vLLM refuses the adapter: {_sentence(error)}") from error

    @property
    def busy(self) -> bool:
        return super().busy or self._died is not None

    @property
    def _died(self) -> EngineError | None:
        """Return why there will be no more outputs, once that is so."""
        if self._loop.closed or not self._llm.errored:
            return None
        ends = private.exits(self._llm) or "no exit code yet"
        return EngineError(f"vLLM's engine core died ({ends}); if it said why, it did so above")

    def submit(self, requests: Iterable[EngineRequest]) -> None:
        for request in requests:
            params = SamplingParams(
                **self._sampling(request, itself=False),
                flat_logprobs=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            key = f"{request.request_id}#{next(self._numbers)}"
            live = self._open[key] = Live(request)
            self._loop.call(self._start, key, live, params)

    def poll(self, timeout_s: float = 0.0) -> list[EngineOutput]:
        if not self._ready and self._open:
            self._collect(timeout_s)
        # Never less than before: an output is neither under way nor finished for a moment.
        now = self._finished_tokens + sum(map(len, self._tokens().values()))
        self.decoded_tokens = max(self.decoded_tokens, now)
        if not self._ready and (died := self._died) is not None:
            raise died
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
        """Serve `version` from the next token on; see `Engine.load`.

        The workers map the version, which lies in shared memory or on their GPU.

        Raises:
            UsageError: as there; or the workers cannot map memory of the GPU.
            EngineError: vLLM died, or the load broke off.
        """
        if isinstance(data, DeviceMemory):
            self._map(data)
        info, _ = self._update(manifest, data)
        limit_s = self._pace.limit_s(manifest.total_bytes)
        try:
            self._wait(self._pause(kv_policy), limit_s)
            request = WeightTransferUpdateRequest(update_info=info)
            self._wait(self._llm.update_weights(request), limit_s)
            if guard is not None:
                guard.verify()
            self._wait(self._resume(version, kv_policy), limit_s)
        except Exception as error:
            raise self._died or EngineError(
                f"loading version {version} into vLLM broke off: {_sentence(error)}; its weights "
                "are now a mix of two versions, so this generator ends"
            ) from error
        self.version = version

    def new_tokens(self) -> Mapping[str, Sequence[int]]:
        tokens = self._tokens()
        return {o.request.request_id: tokens[k] for k, o in self._open.items() if k in tokens}

    def peek(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        live = self._named(set(request_ids))
        return list(self._wait(self._look(live)).values()) if live else []

    def checksums(self) -> dict[str, dict[str, str]]:
        """Return a checksum of each parameter by worker and name, of a model that is idle."""
        return self._wait(private.checksums(self._llm), self._pace.limit_s(0))

    def forget(self, session: str) -> None:
        self._loop.call(self._salts.forget, session)

    def close(self) -> None:
        if self._loop.closed:
            return
        with suppress(UmbraError):
            self._wait(self._end(), _CLOSE_S)
        self._open.clear()
        with suppress(Exception):  # it may have died half-way; nothing of it is needed any more
            self._llm.shutdown(timeout=_KILL_S)
        self._loop.close()
        private.close_sockets(self._llm)
        # Its destructor must not run when the interpreter has begun to take itself apart.
        del self._llm

    # -- in the driver's thread -------------------------------------------------------------------

    def _stop(self, live: dict[str, Live]) -> None:
        if not self._llm.errored:
            with suppress(EngineDeadError):
                self._wait(self._abort(live))

    def _tokens(self) -> dict[str, list[int]]:
        """Return the tokens of each request that is not done, by key."""
        records = private.requests(self._llm)
        return {key: private.tokens_of(record) for key, record in records.items()}

    def _map(self, data: DeviceMemory) -> None:
        """Have the workers map `data`, once; raise UsageError if they can't."""
        if self._mapped == data.handle:
            return
        init = WeightTransferInitRequest({"handle": data.handle, "size": len(data)})
        try:
            self._wait(self._llm.init_weight_transfer_engine(init))
        except Exception as error:  # whatever it is, the model is as it was
            raise self._died or UsageError(
                f"vLLM's workers cannot map memory of the GPU: {_sentence(error)}; set "
                'weight_hub.plane to "shm" or "tcp", which go through the host'
            ) from error
        self._mapped = data.handle

    def _wait(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = REPLY_S) -> T:
        """Return its result; EngineDeadError if it cannot come.

        vLLM itself waits forever for a core that dies while it loads weights.
        """
        return super()._wait(self._unless_dead(coroutine), timeout_s)

    # -- in the loop's thread ---------------------------------------------------------------------

    async def _unless_dead(self, coroutine: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(coroutine)
        while not (await asyncio.wait({task}, timeout=_LOOK_S))[0]:
            if self._llm.errored:
                task.cancel()
                raise EngineDeadError
        return task.result()

    async def _begin(self, version: int, init: dict[str, Any]) -> None:
        await self._llm.get_supported_tasks()  # so that no request has to ask
        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init))
        if self._lora is not None:
            await self._llm.start_weight_update()  # once for all: see `AdapterTransferEngine`
        await self._llm.update_weight_version(str(version))
        self._salts.loaded(version, keep=True)

    async def _end(self) -> None:
        tasks = [live.task for live in self._open.values()] + [self._llm.output_handler]
        tasks = [task for task in tasks if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, key: str, live: Live, params: SamplingParams) -> None:
        live.task = asyncio.create_task(self._run(key, live, params))

    async def _run(self, key: str, live: Live, params: SamplingParams) -> None:
        request = live.request
        try:
            while True:
                salt = self._salts.of(request.session)
                prompt = tokens_input(list(request.prompt_ids), cache_salt=salt)
                outputs = self._llm.generate(prompt, params, key, lora_request=self._lora)
                (output,) = [output async for output in outputs]  # FINAL_ONLY
                if not live.restarts:
                    break
                live.restarts = False
            self._salts.used(request.session, salt)
            self.ended.put((key, private.finished(output, request, self._routers, self._head)))
        except EngineDeadError:
            pass  # `_died` says so, and its tokens can be looked at
        except Exception as error:  # noqa: BLE001 - whatever it is ends the generator, with its name
            refusal = UmbraError(f"vLLM refused a request: {error}")
            refusal.__cause__ = error
            self.ended.put((key, refusal))

    async def _abort(self, live: Mapping[str, Live]) -> None:
        await self._llm.abort(list(live))
        await asyncio.gather(*(one.task for one in live.values() if one.task is not None))

    async def _look(self, live: Mapping[str, Live]) -> dict[str, EngineOutput]:
        """Return the outputs so far of those that are not done."""
        records = private.requests(self._llm)
        return {
            key: private.under_way(records[key], one.request, self._routers, self._head)
            for key, one in live.items()
            if key in records
        }

    async def _pause(self, kv_policy: KvPolicy) -> None:
        """Stop decoding and open the model's layers."""
        await private.pause(self._llm, clear_cache=kv_policy == "recompute")
        if self._lora is None:
            await self._llm.start_weight_update()

    async def _resume(self, version: int, kv_policy: KvPolicy) -> None:
        if self._lora is not None:
            await self._llm.update_weight_version(str(version))
        else:
            await self._llm.finish_weight_update(str(version))
        self._salts.loaded(version, keep=kv_policy == "keep")
        # Requests without a token get new salts: theirs would find blocks of old weights.
        records = private.requests(self._llm)
        unstarted = [key for key, record in records.items() if not private.tokens_of(record)]
        for key in unstarted:
            self._open[key].restarts = True
        await self._llm.abort(unstarted)
        await self._llm.resume_generation()


def _started(arguments: dict[str, Any]) -> AsyncLLM:
    try:
        args = AsyncEngineArgs(**arguments)
        args.create_engine_config()
    except (ValueError, TypeError, KeyError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"vLLM refuses its engine arguments: {_sentence(error)}") from error
    try:
        return AsyncLLM.from_engine_args(args)
    except (RuntimeError, ValueError, OSError) as error:
        raise StartupError(
            f"vLLM's engine core did not start: {_sentence(error)} (its own lines above say "
            "more; memory for the KV cache is generator.engine_args.kv_cache_memory_bytes)"
        ) from error


def _sentence(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "validation error" not in line), repr(error))
