"""Samples of pinned versions: the torch engine serves one at a time, and drains before the next.

A version is a file with the factors of an adapter, or all weights. Requests for the one that is
served join its batch; once another is asked for, the engine finishes what it has, loads that one
and serves all who wait for it, so no sample ever mixes two.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from umbra.proto.errors import UmbraError, UsageError
from umbra.proto.records import Sampling
from umbra.services.config import RunConfig
from umbra.services.generator.engines.engine import EngineOutput, EngineRequest, check_request
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.modeling.attention import Attention
from umbra.services.modeling.lora import factors
from umbra.services.modeling.micro_batch import Tokens
from umbra.services.modeling.models import load_model, load_tokenizer, pick_device, stop_ids
from umbra.services.modeling.packing import pack
from umbra.services.modeling.scorer import Scorer
from umbra.services.modeling.weights import WeightTable
from umbra.services.tinker.journal import FutureAnswer
from umbra.services.tinker.models import TrainedShape, put_adapter
from umbra.services.tinker.wire import Array, write_samples
from umbra.services.trainer.snapshot import tensor_layout, write_shards
from umbra.services.weights.manifest import build_manifest

PROTOBUF = "application/x-protobuf"


@dataclass(slots=True, eq=False)
class Job:
    """A request for `count` samples of one prompt, and the samples found so far."""

    id: str
    shape: TrainedShape
    version: str  # its file; "" = the base model
    prompt: list[int]
    count: int
    sampling: Sampling
    max_tokens: int
    stop_tokens: frozenset[int] | None  # None: the model's
    stop_texts: tuple[str, ...] = ()
    scored: int = 0  # tokens at the end of the prompt that get logprobs
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
        self._waiting: list[Job] = []
        self._live: dict[str, tuple[Job, int]] = {}
        self._served: str | None = None
        self._loads = 0

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._live)

    def add(self, job: Job) -> None:
        """Queue a job.

        Raises:
            ValueError: it does not fit the engine, with a sentence that says why.
        """
        check_request(self._request(job, 0), self._engine.max_context, self._vocabulary)
        self._waiting.append(job)

    def turn(self) -> Iterable[tuple[Job, FutureAnswer]]:
        """Do one pass; yield jobs that are done."""
        others = any(job.version != self._served for job in self._waiting)
        if not self._live and self._waiting:
            version = self._waiting[0].version
            try:
                self._serve(version)
            except UmbraError as error:
                gone = [job for job in self._waiting if job.version == version]
                self._waiting = [job for job in self._waiting if job.version != version]
                yield from ((job, FutureAnswer.failure(str(error), "user")) for job in gone)
                return
            others = False
        if not others:
            for job in [job for job in self._waiting if job.version == self._served]:
                self._waiting.remove(job)
                self._begin(job)
        outputs = self._engine.poll(0.0)
        live = self._engine.new_tokens()
        stopped = [
            name for name, tokens in live.items() if self._stops(self._live[name][0], tokens)
        ]
        outputs += self._engine.abort(stopped) if stopped else []
        for output in outputs:
            if (job := self._ended(output)) is not None:
                made = (job.found[index] for index in range(job.count))
                yield job, FutureAnswer(write_samples(made, job.prompt_logprobs), PROTOBUF)

    def _serve(self, version: str) -> None:
        """Load a version, unless it is the one that is served."""
        if version == self._served:
            return
        self._served = None
        data = self._base
        if version:
            try:
                data = bytearray(Path(version).read_bytes())
            except OSError as error:
                raise UsageError(
                    "these weights are no longer here: unnamed ones go once there are newer ones; "
                    "save_weights_for_sampler(name) keeps them"
                ) from error
        self._loads += 1
        self._engine.load(self._manifest, memoryview(data), self._loads, "recompute")
        self._served = version

    def _begin(self, job: Job) -> None:
        if job.scored:
            job.prompt_logprobs = self._score(job.prompt, job.scored)
        for index in range(job.count):
            request = self._request(job, index)
            self._live[request.request_id] = job, index
            self._engine.submit([request])

    def _request(self, job: Job, index: int) -> EngineRequest:
        return EngineRequest(f"{job.id}/{index}", job.prompt, job.sampling, job.max_tokens)

    def _stops(self, job: Job, tokens: Any) -> bool:
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

    def _ended(self, output: EngineOutput) -> Job | None:
        """Take the output of a sample; return its job if that was the last one."""
        job, index = self._live.pop(output.request_id)
        stopped = self._stops(job, output.token_ids)
        job.found[index] = output.token_ids, output.logprobs, stopped
        return job if len(job.found) == job.count else None

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


class SamplingThread:
    """The thread that drives all engines. `finish` is called there with each answer."""

    def __init__(
        self, config: RunConfig, finish: Callable[[str, FutureAnswer], None], seed: int
    ) -> None:
        self._config, self._finish, self._seed = config, finish, seed
        self._new: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lanes: dict[TrainedShape, Lane] = {}

    def submit(self, job: Job) -> None:
        self._new.put(job)

    def stop(self) -> None:
        self._new.put(None)

    def run(self) -> None:
        """Serve until `stop`."""
        while True:
            busy = any(lane.busy for lane in self._lanes.values())
            while True:
                try:
                    job = self._new.get(block=not busy)
                except queue.Empty:
                    break
                if job is None:
                    return
                busy = True
                self._add(job)
            for lane in self._lanes.values():
                for job, answer in lane.turn() if lane.busy else ():
                    self._finish(job.id, answer)

    def _add(self, job: Job) -> None:
        try:
            if job.shape not in self._lanes:
                self._lanes[job.shape] = Lane(self._config, job.shape, self._seed)
            self._lanes[job.shape].add(job)
        except (UmbraError, ValueError) as error:
            self._finish(job.id, FutureAnswer.failure(str(error), "user"))
