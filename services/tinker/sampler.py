"""Samples of pinned versions: an engine serves one at a time, and drains before the next.

A version is a file with the factors of an adapter, or all weights. Requests for the one that is
served join its batch; once another is asked for, the engine finishes what it has, loads that one
and serves all who wait for it, so no sample ever mixes two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from umbra.proto.errors import UmbraError, UsageError
from umbra.proto.records import AdapterFacts
from umbra.services.config import RunConfig
from umbra.services.generator.engines.engine import (
    Engine,
    EngineError,
    EngineOutput,
    EngineRequest,
    check_request,
)
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.modeling.attention import Attention
from umbra.services.modeling.lora import factors
from umbra.services.modeling.micro_batch import Tokens
from umbra.services.modeling.model_directory import check_model_dir
from umbra.services.modeling.models import load_model, outline_model, pick_device
from umbra.services.modeling.packing import pack
from umbra.services.modeling.pretrained import load_tokenizer, stop_ids
from umbra.services.modeling.scorer import Scorer
from umbra.services.modeling.weights import WeightTable
from umbra.services.tinker.bodies import TrainedShape
from umbra.services.tinker.journal import FutureAnswer
from umbra.services.tinker.models import put_adapter
from umbra.services.tinker.samplers import SampleJob
from umbra.services.tinker.wire import PROTOBUF, Array, write_samples
from umbra.services.trainer.snapshot import tensor_layout, write_shards
from umbra.services.weights.manifest import build_manifest

POLL_S = 0.02  # that vLLM may take until the next look at its tokens


@dataclass(slots=True, eq=False)
class _LiveJob:
    """A job, and the samples found so far."""

    job: SampleJob
    prompt_logprobs: Array | None = None
    found: dict[int, tuple[list[int], list[float], bool]] = field(default_factory=dict)

    def answer(self) -> FutureAnswer:
        made = [self.found[index] for index in range(self.job.count)]
        if not all(math.isfinite(sum(logprobs)) for _, logprobs, _ in made):
            return FutureAnswer.failure("logprobs of these weights are not finite", "user")
        return FutureAnswer(write_samples(made, self.prompt_logprobs), PROTOBUF)


class Lane:
    """An engine for the versions of one shape."""

    def __init__(self, config: RunConfig, shape: TrainedShape, seed: int) -> None:
        engine = config.generator.engine
        self._device = pick_device(config.generator.device, "--device")
        served = config.weight_hub.dtype_on(self._device.type)
        model = outline = outline_model(config.model.name, checked=config.model.checked)
        if engine == "torch" or not shape.rank:
            device = self._device if engine == "torch" else torch.device("cpu")
            dtype = getattr(torch, served)
            model = load_model(config.model.name, device, dtype, checked=config.model.checked)
        adapter = put_adapter(model, shape, config)
        layout = tensor_layout(model, served, adapter=adapter is not None)
        self._manifest = build_manifest(layout, config.weight_hub.bucket_bytes, adapter=adapter)
        self._base = bytearray(self._manifest.total_bytes)  # of an adapter: B = 0
        if adapter is None:
            write_shards(model, self._manifest, memoryview(self._base))
        self._tokenizer = load_tokenizer(config.model.name)
        self._stop_ids = stop_ids(model, self._tokenizer)
        self._vocabulary: int = outline.get_input_embeddings().num_embeddings
        self._scorer: Scorer | None = None
        if engine == "vllm":
            outline = model if shape.rank else outline
            self._engine: Engine = _vllm(config, outline, served, seed, adapter)
        else:
            for factor in factors(model).values() if adapter is not None else ():
                factor.data = factor.data.to(self._device, model.dtype)
            self._engine = TorchEngine(
                model,
                stop_ids=(),  # each request has its own
                slots=config.generator.slots,
                max_context=config.generator.max_context,
                seed=seed,
                weights=WeightTable(model, adapter),
            )
            chunk = int(config.trainer.logits_mib * 2**20)
            attention = Attention.prepare(model, torch.device("cpu"))
            self._scorer = Scorer(model, chunk, attention).eval()
        self.waiting: list[SampleJob] = []
        self._live: dict[str, tuple[_LiveJob, int]] = {}
        self._seen: dict[str, int] = {}  # tokens of each that were looked at
        self._served: str | None = None
        self._loads = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self._live)

    @property
    def live(self) -> list[SampleJob]:
        return list({one.job.id: one.job for one, _ in self._live.values()}.values())

    def add(self, job: SampleJob) -> None:
        """Queue a job.

        Raises:
            ValueError: it does not fit the engine, with a sentence that says why.
        """
        if job.scored and self._scorer is None:
            raise ValueError("vLLM has no logprobs of prompts here: start the server with torch")
        check_request(self._request(job, 0), self._engine.max_context, self._vocabulary)
        self.waiting.append(job)

    def turn(self) -> Iterable[tuple[SampleJob, FutureAnswer]]:
        """Run a pass of the engine; yield finished jobs with their answers.

        Raises:
            EngineError: the engine is broken; the live jobs are lost with it.
        """
        if not self._live and self.waiting:
            first = self.waiting[0]
            try:
                self._serve(first)
            except UmbraError as error:
                gone = [job for job in self.waiting if job.version == first.version]
                self.waiting = [job for job in self.waiting if job.version != first.version]
                category = "user" if isinstance(error, UsageError) else "server"
                yield from ((job, FutureAnswer.failure(str(error), category)) for job in gone)
                if isinstance(error, EngineError):
                    raise
                return
        here = [job for job in self.waiting if job.version == self._served]
        if len(here) == len(self.waiting) or not self._live:
            self.waiting = [job for job in self.waiting if job.version != self._served]
            for job in here:
                self._begin(job)
        outputs = self._engine.poll(POLL_S)
        stopped = [n for n, made in self._engine.new_tokens().items() if self._has_stopped(n, made)]
        outputs += self._engine.abort(stopped) if stopped else []
        for output in outputs:
            if (one := self._ended(output)) is not None:
                yield one.job, one.answer()

    def close(self) -> None:
        """End the engine's processes, if it has any."""
        self._engine.close()

    def _serve(self, job: SampleJob) -> None:
        """Load the version of a job, unless it is the one that is served."""
        if job.version == self._served:
            return
        self._served = None
        data = self._base
        if job.version:
            try:
                data = bytearray(Path(job.version).read_bytes())
            except OSError as error:
                raise UsageError(
                    "these weights are no longer here: unnamed ones go once there are newer ones; "
                    "save_weights_for_sampler(name) keeps them"
                ) from error
            if xxhash.xxh3_128_hexdigest(data) != job.checksum:
                raise UmbraError(f"{job.version} is damaged: its checksum differs; save it again")
        self._loads += 1
        self._engine.load(self._manifest, memoryview(data), self._loads, "recompute")
        self._served = job.version

    def _begin(self, job: SampleJob) -> None:
        one = _LiveJob(job)
        if job.scored and self._scorer is not None:
            one.prompt_logprobs = self._score(self._scorer, job.prompt, job.scored)
        for index in range(job.count):
            request = self._request(job, index)
            self._live[request.request_id] = one, index
            self._engine.submit([request])

    def _request(self, job: SampleJob, index: int) -> EngineRequest:
        name = f"{job.id}/{index}"
        return EngineRequest(name, job.prompt, job.sampling, job.max_tokens, watched=True)

    def _has_stopped(self, name: str, tokens: Sequence[int]) -> bool:
        """Return true if one of the tokens since the last look ends a sample."""
        one, count = self._live[name][0], len(tokens)
        seen, self._seen[name] = self._seen.get(name, 0), count
        return self._end(one.job, tokens, seen, count) > 0

    def _end(self, job: SampleJob, tokens: Sequence[int], since: int, count: int) -> int:
        """Return the length of a sample that a token after `since` ends; 0 if none does."""
        stop_ids = self._stop_ids if job.stop_tokens is None else job.stop_tokens
        # A token has a byte at least, so no stop text reaches further back.
        reach = max((len(text.encode()) for text in job.stop_texts), default=0)
        for end in range(since + 1, count + 1):
            if tokens[end - 1] in stop_ids:
                return end
            text = self._tokenizer.decode(tokens[max(0, end - reach) : end]) if reach else ""
            if any(stop in text for stop in job.stop_texts):
                return end
        return 0

    def _ended(self, output: EngineOutput) -> _LiveJob | None:
        """Take the output of a sample; return its job if that was the last one."""
        one, index = self._live.pop(output.request_id)
        self._seen.pop(output.request_id, None)
        tokens = output.token_ids
        end = self._end(one.job, tokens, 0, len(tokens))  # vLLM goes on until it is told
        one.found[index] = tokens[: end or None], output.logprobs[: end or None], end > 0
        return one if len(one.found) == one.job.count else None

    @torch.inference_mode()
    def _score(self, scorer: Scorer, prompt: list[int], last: int) -> Array:
        """Return logprobs of the last tokens of a prompt, float32 [N]; NaN for the others."""
        found = np.full(len(prompt), np.nan, np.float32)
        learned = torch.arange(max(1, len(prompt) - last), len(prompt))
        tokens = Tokens(
            torch.tensor(prompt), torch.tensor([len(prompt)]), learned, torch.zeros_like(learned)
        )
        for micro in pack(tokens, pack_tokens=len(prompt), micro_tokens=len(prompt)):
            ones = torch.ones(len(micro.targets), device=self._device)
            logprobs, _ = scorer(micro.to(self._device), ones, with_entropy=False)
            found[learned[micro.source].numpy()] = logprobs.float().cpu().numpy()
        return found


def _vllm(
    config: RunConfig, outline: Any, dtype: str, seed: int, adapter: AdapterFacts | None
) -> Engine:
    from umbra.services.generator.vllm.options import set_environment

    set_environment(config.generator)
    from umbra.services.generator.vllm.engine import VllmEngine  # brings vLLM

    return VllmEngine(
        check_model_dir(config.model.name),
        outline,
        config.generator,
        dtype=dtype,
        stop_ids=(),  # each request has its own
        pace=config.weight_hub.pace.after(config.buffer.engine_stall_s),
        seed=seed,
        adapter=adapter,
    )
