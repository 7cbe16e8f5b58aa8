"""The `Engine` on vLLM: checks and bookkeeping on our side, `VllmServer` does the rest."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import queue
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams

from umbra.proto.deadline import LEAST_RATE, Pace
from umbra.proto.errors import UmbraError, UsageError
from umbra.proto.records import AdapterFacts, Manifest, Sampling
from umbra.services.config import GeneratorConfig
from umbra.services.config.rules import VLLM_COOLEST
from umbra.services.generator.engines.engine import (
    CacheFigures,
    EngineOutput,
    EngineRequest,
    KvPolicy,
    check_request,
    unguarded,
)
from umbra.services.generator.vllm.cache import RecentLengths
from umbra.services.generator.vllm.names import CheckpointNames, told_routers
from umbra.services.generator.vllm.options import (
    adapter_arguments,
    check_device,
    engine_arguments,
)
from umbra.services.generator.vllm.server import Job, Pause, VllmServer
from umbra.services.modeling.lora import factors
from umbra.services.modeling.weights import WeightTable
from umbra.services.weights.manifest import Part
from umbra.services.weights.memory import copy, locate, shared_memory

log = logging.getLogger(__name__)


def platform() -> str:
    """Return what the installed vLLM was built for: "cpu", "cuda", ..."""
    return current_platform.device_type


def _moved(manifest: Manifest, by: int) -> Manifest:
    """Shift a layout by `by` bytes."""
    entries = [
        msgspec.structs.replace(entry, offset=entry.offset + by) for entry in manifest.tensors
    ]
    return msgspec.structs.replace(manifest, tensors=entries)


class VllmEngine:
    """vLLM as an `Engine`.

    Args:
        path: the model directory.
        outline: the model without weights (`outline_model`), which says what a version must have.
        config: of the generator.
        dtype: "bfloat16" or "float32".
        stop_ids: tokens that end a turn.
        seed: of the sampling.
        version: of the weights in `path`; -1 = not to be served.
        tell_routing: outputs say which experts their tokens met.
        adapter: what versions are of; None: whole weights.

    Raises:
        UsageError: vLLM refuses an argument, or has no adapters for a layer.
        StartupError: its engine core did not come up.
    """

    def __init__(
        self,
        path: Path,
        outline: Any,
        config: GeneratorConfig,
        *,
        dtype: str,
        stop_ids: Iterable[int],
        seed: int = 0,
        version: int = -1,
        tell_routing: bool = False,
        adapter: AdapterFacts | None = None,
    ) -> None:
        check_device(config.device, platform())
        self.version = version
        self.slots = config.slots
        self.max_context = config.max_context
        self.pause: Pause | None = None  # of the last change of weights
        self.pace = Pace(600.0, LEAST_RATE)  # of a load
        self._fit = WeightTable(outline, adapter)
        self._checkpoint = CheckpointNames(outline) if adapter is None else None
        self._vocabulary: int = outline.config.get_text_config().vocab_size
        self._stop_ids = frozenset(stop_ids)
        self._params: dict[tuple[Sampling, int], SamplingParams] = {}
        self._names = itertools.count()
        self._open: dict[str, str] = {}  # our key of each request under way, and its id
        self._prompts: dict[str, int] = {}  # tokens of their prompts
        self._lengths = RecentLengths(config.max_context)
        self._ready: list[EngineOutput] = []
        self.decoded_tokens = 0
        self._finished_tokens = 0
        arguments = engine_arguments(config, path, outline.config, dtype, seed % 2**31, platform())
        routers = None
        if tell_routing:
            routers = told_routers(outline, platform(), self.max_context)
            arguments["enable_return_routed_experts"] = True
        told = None
        if adapter is not None:
            names = list(factors(outline))
            arguments |= adapter_arguments(config, outline.config, adapter.rank, names)
            told = {"facts": msgspec.msgpack.encode(adapter), "names": names}
        self._server = VllmServer(arguments, version, routers, told)

    @property
    def live(self) -> int:
        return min(len(self._open), self.slots)

    @property
    def fits(self) -> int:
        capacity = self._server.cache_tokens
        if not capacity or capacity >= self.slots * self.max_context:
            return self.slots
        made = self._server.new_tokens()
        live = (prompt + len(made.get(key, ())) for key, prompt in self._prompts.items())
        return min(self.slots, self._lengths.fitting(capacity, live))

    @property
    def cache(self) -> CacheFigures:
        figures = self._server.cache
        return figures if self._open else dataclasses.replace(figures, usage=0.0)

    @property
    def busy(self) -> bool:
        return bool(self._open or self._ready) or self._server.died is not None

    def submit(self, requests: Iterable[EngineRequest]) -> None:
        """Queue `requests`; see `Engine.submit`.

        Raises:
            ValueError: as there; or sampling out of range, or tokens that the model does not have.
        """
        jobs: list[Job] = []
        try:
            for request in requests:
                limit = check_request(request, self.max_context, self._vocabulary)
                params = self._sampling(request.sampling, limit)
                key = f"{request.request_id}#{next(self._names)}"
                jobs.append(Job(key, list(request.prompt_ids), params, request.session))
                self._open[key] = request.request_id
                self._prompts[key] = len(request.prompt_ids)
        finally:
            if jobs:
                self._server.submit(jobs)

    def poll(self, timeout_s: float = 0.0) -> list[EngineOutput]:
        """What has finished, after at most `timeout_s` seconds of waiting for something.

        Raises:
            EngineError: vLLM died.
        """
        if not self._ready and self._open:
            self._collect(timeout_s)
        # Never less than before: an output is neither under way nor finished for a moment.
        now = self._finished_tokens + sum(map(len, self._server.new_tokens().values()))
        self.decoded_tokens = max(self.decoded_tokens, now)
        if not self._ready and (died := self._server.died) is not None:
            raise died
        return self._take()

    def load(
        self,
        manifest: Manifest,
        data: Part,
        version: int,
        kv_policy: KvPolicy,
        read: Callable[[int], None] = unguarded,
    ) -> list[EngineOutput]:
        """Serve `version` from the next token on; see `Engine.load`.

        The workers map a version that lies in shared memory; any other is copied there first.

        Raises:
            UsageError: as there, or the version is in GPU memory.
            EngineError: vLLM died, or the load broke off.
        """
        self._fit.check(manifest)
        # A version has tied tensors once, but vLLM packs them for each layer.
        tied = self._fit.left_out({entry.name for entry in manifest.tensors})
        if not isinstance(data, memoryview):
            raise UsageError(
                "weights for vLLM have to be in host memory: set weight_hub.plane to another plane"
            )
        if (place := locate(data)) is None:
            whole = shared_memory(len(data))
            copy(data, whole)
            data, place = whole, locate(whole)
            assert place is not None
        path, start = place
        layout = self._named_as_stored(_moved(manifest, start), tied)
        update = {"path": path, "manifest": msgspec.msgpack.encode(layout)}
        under_way = set(self._open)
        self.pause = self._server.update(
            update,
            version,
            kv_policy,
            self.pace.limit_s(manifest.total_bytes),
            lambda: read(manifest.total_bytes),
        )
        log.debug("version %d: %s", version, self.pause)
        self.version = version
        if kv_policy != "abort":
            return []
        self._collect(0.0)
        aborted = [o for o in self._ready if o.finish_reason == "abort"]
        self._ready = [o for o in self._ready if o.finish_reason != "abort"]
        for key in under_way:
            self._drop(key)
        return aborted

    def abort(self, request_ids: Iterable[str] | None = None) -> list[EngineOutput]:
        wanted = None if request_ids is None else set(request_ids)
        keys = [key for key, name in self._open.items() if wanted is None or name in wanted]
        lost = self._server.abort(keys) if keys else []
        self._collect(0.0)
        self._ready += [self._close(output) for output in lost if output.request_id in self._open]
        for key in keys:
            self._drop(key)
        return self._take(wanted)

    def new_tokens(self) -> Mapping[str, Sequence[int]]:
        made = self._server.new_tokens()
        return {name: made[key] for key, name in self._open.items() if key in made}

    def peek(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        wanted = set(request_ids)
        keys = [key for key, name in self._open.items() if name in wanted]
        outputs = self._server.peek(keys) if keys else []
        return [_named(output, self._open[output.request_id]) for output in outputs]

    def forget(self, session: str) -> None:
        self._server.forget([session])

    def close(self) -> None:
        self._open.clear()
        self._prompts.clear()
        self._server.close()

    def _sampling(self, sampling: Sampling, limit: int) -> SamplingParams:
        params = self._params.get((sampling, limit))
        if params is None:
            if 0 < sampling.temperature < VLLM_COOLEST:
                raise ValueError(
                    f"sampling.temperature = {sampling.temperature:g} is out of range: vLLM takes "
                    f"0 (greedy) or at least {VLLM_COOLEST}"
                )
            params = SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                max_tokens=limit,
                stop_token_ids=sorted(self._stop_ids),
                ignore_eos=True,  # stop_token_ids say it all
                logprobs=0,  # that of the sampled token
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            self._params[sampling, limit] = params
        return params

    def _named_as_stored(self, layout: Manifest, tied: Mapping[str, list[str]]) -> Manifest:
        """Return `layout` in the names of checkpoints; `tied`: more names of its tensors."""
        if self._checkpoint is None:
            return layout  # factors have one name
        tensors = [
            part
            for entry in layout.tensors
            for name in (entry.name, *tied.get(entry.name, ()))
            for part in self._checkpoint.of(msgspec.structs.replace(entry, name=name))
        ]
        return msgspec.structs.replace(layout, tensors=tensors)

    def _collect(self, timeout_s: float) -> None:
        """Take the server's outputs, or wait `timeout_s` seconds for one."""
        try:
            first = self._server.done.get(timeout=timeout_s) if timeout_s else None
            while True:
                done = first if first is not None else self._server.done.get_nowait()
                first = None
                if isinstance(done, Exception):
                    raise UmbraError(f"vLLM refused a request: {done}") from done
                if done.request_id in self._open:
                    self._ready.append(self._close(done))
        except queue.Empty:
            pass

    def _close(self, output: EngineOutput) -> EngineOutput:
        self._finished_tokens += len(output.token_ids)
        self._lengths.ended(self._prompts.pop(output.request_id) + len(output.token_ids))
        return _named(output, self._open.pop(output.request_id))

    def _drop(self, key: str) -> None:
        self._open.pop(key, None)
        self._prompts.pop(key, None)

    def _take(self, wanted: set[str] | None = None) -> list[EngineOutput]:
        taken = [o for o in self._ready if wanted is None or o.request_id in wanted]
        self._ready = [o for o in self._ready if wanted is not None and o.request_id not in wanted]
        return taken


def _named(output: EngineOutput, name: str) -> EngineOutput:
    return dataclasses.replace(output, request_id=name)
