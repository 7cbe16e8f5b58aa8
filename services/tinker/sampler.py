"""Samples of pinned versions: the torch engine serves one at a time, and drains before the next.

A version is a file with the factors of an adapter, or all weights. Requests for the one that is
served join its batch; once another is asked for, the engine finishes what it has, loads that one
and serves all who wait for it, so no sample ever mixes two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from umbra.proto.errors import UmbraError, UsageError
from umbra.services.config import RunConfig
from umbra.services.generator.engines.engine import EngineOutput, EngineRequest, check_request
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.modeling.attention import Attention
from umbra.services.modeling.lora import factors
from umbra.services.modeling.micro_batch import Tokens
from umbra.services.modeling.models import load_model, pick_device
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


@dataclass(slots=True, eq=False)
class _LiveJob:
    """A job, and the samples found so far."""

    job: SampleJob
    prompt_logprobs: Array | None = None
    found: dict[int, tuple[list[int], list[float], bool]] = field(default_factory=dict)


class Lane:
    """An engine for the versions of one shape."""

    def __init__(self, config: RunConfig, shape: TrainedShape, seed: int) -> None:
        device = pick_device(config.generator.device, "--device")
        served = config.weight_hub.dtype_on(device.type)
        model = load_model(
            config.model.name, device, getattr(torch, served), checked=config.model.checked
        )
        adapter = put_adapter(model, shape, config)
        for factor in factors(model).values() if adapter is not None else ():
            factor.data = factor.data.to(device, model.dtype)
        layout = tensor_layout(model, served, adapter=adapter is not None)
        self._manifest = build_manifest(layout, config.weight_hub.bucket_bytes, adapter=adapter)
        self._base = bytearray(self._manifest.total_bytes)  # of an adapter: B = 0
        if adapter is None:
            write_shards(model, self._manifest, memoryview(self._base))
        self._tokenizer = load_tokenizer(config.model.name)
        self._stop_ids = stop_ids(model, self._tokenizer)
        self._device = device
        self._vocabulary: int = model.get_input_embeddings().num_embeddings
        self._engine = TorchEngine(
            model,
            stop_ids=(),  # each request has its own
            slots=config.generator.slots,
            max_context=config.generator.max_context,
            seed=seed,
            weights=WeightTable(model, adapter),
        )
        chunk = int(config.trainer.logits_mib * 2**20)
        self._scorer = Scorer(model, chunk, Attention.prepare(model, torch.device("cpu"))).eval()
        self.waiting: list[SampleJob] = []
        self._live: dict[str, tuple[_LiveJob, int]] = {}
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
                return
        here = [job for job in self.waiting if job.version == self._served]
        if len(here) == len(self.waiting) or not self._live:
            self.waiting = [job for job in self.waiting if job.version != self._served]
            for job in here:
                self._begin(job)
        outputs = self._engine.poll(0.0)
        live = self._engine.new_tokens()
        stopped = [
            name for name, made in live.items() if self._stops(self._live[name][0].job, made)
        ]
        outputs += self._engine.abort(stopped) if stopped else []
        for output in outputs:
            if (one := self._ended(output)) is not None:
                made = (one.found[index] for index in range(one.job.count))
                yield one.job, FutureAnswer(write_samples(made, one.prompt_logprobs), PROTOBUF)

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
        if job.scored:
            one.prompt_logprobs = self._score(job.prompt, job.scored)
        for index in range(job.count):
            request = self._request(job, index)
            self._live[request.request_id] = one, index
            self._engine.submit([request])

    def _request(self, job: SampleJob, index: int) -> EngineRequest:
        return EngineRequest(f"{job.id}/{index}", job.prompt, job.sampling, job.max_tokens)

    def _stops(self, job: SampleJob, tokens: Any) -> bool:
        """Return true if the newest token ends a sample."""
        if not tokens:
            return False
        if tokens[-1] in (self._stop_ids if job.stop_tokens is None else job.stop_tokens):
            return True
        if not job.stop_texts:
            return False
        # A token has a byte at least, so no stop text reaches further back.
        reach = max(len(text.encode()) for text in job.stop_texts)
        text: str = self._tokenizer.decode(tokens[-reach:])
        return any(stop in text for stop in job.stop_texts)

    def _ended(self, output: EngineOutput) -> _LiveJob | None:
        """Take the output of a sample; return its job if that was the last one."""
        one, index = self._live.pop(output.request_id)
        stopped = self._stops(one.job, output.token_ids)
        one.found[index] = output.token_ids, output.logprobs, stopped
        return one if len(one.found) == one.job.count else None

    @torch.inference_mode()
    def _score(self, prompt: list[int], last: int) -> Array:
        """Return logprobs of the last tokens of a prompt, float32 [N]; NaN for the others."""
        found = np.full(len(prompt), np.nan, np.float32)
        learned = torch.arange(max(1, len(prompt) - last), len(prompt))
        tokens = Tokens(
            torch.tensor(prompt), torch.tensor([len(prompt)]), learned, torch.zeros_like(learned)
        )
        for micro in pack(tokens, pack_tokens=len(prompt), micro_tokens=len(prompt)):
            ones = torch.ones(len(micro.targets), device=self._device)
            logprobs, _ = self._scorer(micro.to(self._device), ones, with_entropy=False)
            found[learned[micro.source].numpy()] = logprobs.float().cpu().numpy()
        return found
