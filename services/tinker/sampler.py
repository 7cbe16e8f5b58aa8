"""A process that samples for `umbra tinker`: requests come and answers go over its pipe.

A version is a file with the factors of an adapter, or all weights. An engine serves one at a time:
requests for that one join its batch; once another is asked for, it finishes what it has, loads that
one and serves all who wait for it, so no sample ever mixes two.

python -P -m umbra.services.tinker.sampler
"""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import xxhash

from umbra.proto.errors import EXIT_DONE, PeerLostError, UmbraError, UsageError, ends_process
from umbra.services.config import RunConfig
from umbra.services.config.loader import config_of, decode_json
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
from umbra.services.process.command import setup_logging
from umbra.services.process.parent import die_with_parent, parents_end
from umbra.services.process.pipe import Pipe
from umbra.services.tinker.journal import FutureAnswer
from umbra.services.tinker.models import VERSION, put_adapter
from umbra.services.tinker.sampler_process import SampleJob, SampleReport, SamplerStart
from umbra.services.tinker.wire import PROTOBUF, Array, write_samples
from umbra.services.trainer.snapshot import tensor_layout, write_shards
from umbra.services.weights.manifest import build_manifest
from umbra.services.weights.memory import shared_memory

ALIVE_S = 1.0  # between signs of life
POLL_S = 0.02  # that vLLM may take until the next look at its tokens


@dataclass(slots=True, eq=False)
class _LiveJob:
    """A job, and its finished samples."""

    job: SampleJob
    prompt_logprobs: Array | None = None
    samples: dict[str, tuple[list[int], list[float], bool]] = field(default_factory=dict)

    def answer(self) -> FutureAnswer:
        # In the order of their start: that of their ends would put short ones first.
        samples = [self.samples[f"{self.job.id}/{index}"] for index in range(self.job.count)]
        if not all(math.isfinite(sum(logprobs)) for _, logprobs, _ in samples):
            return FutureAnswer.failure(UsageError("logprobs of these weights are not finite"))
        return FutureAnswer(write_samples(samples, self.prompt_logprobs), PROTOBUF)


class RankEngine:
    """An engine for the versions of one rank: adapters, or with 0 whole weights.

    Attributes:
        waiting: jobs for which it has to load another version, or to drain.
    """

    def __init__(self, config: RunConfig, rank: int, seed: int) -> None:
        generator, path, checked = config.generator, config.model.path, config.model.checked
        self._device = pick_device(generator.device, "--device")
        dtype = config.weight_hub.dtype_on(self._device.type)
        model = outline = outline_model(path, checked=checked)
        is_torch = generator.engine == "torch"
        if is_torch or not rank:
            device = self._device if is_torch else torch.device("cpu")
            model = load_model(path, device, getattr(torch, dtype), checked=checked)
        adapter = put_adapter(model, rank, config)
        layout = tensor_layout(model, dtype, adapter=adapter is not None)
        self._manifest = build_manifest(layout, config.weight_hub.bucket_bytes, adapter=adapter)
        self._base = shared_memory(self._manifest.total_bytes)  # of an adapter: B = 0
        if adapter is None:
            write_shards(model, self._manifest, self._base)
        self._tokenizer = load_tokenizer(path)
        self._stop_ids = stop_ids(model, self._tokenizer)
        self._vocabulary: int = outline.get_input_embeddings().num_embeddings
        self._scorer: Scorer | None = None
        if is_torch:
            for factor in factors(model).values():
                factor.data = factor.data.to(self._device, model.dtype)
            self.engine: Engine = TorchEngine(
                model,
                stop_ids=(),  # each request has its own
                slots=generator.slots,
                max_context=generator.max_context,
                seed=seed,
                weights=WeightTable(model, adapter),
            )
            chunk = int(config.trainer.logits_mib * 2**20)
            attention = Attention.prepare(model, torch.device("cpu"))
            self._scorer = Scorer(model, chunk, attention).eval()
        else:
            from umbra.services.generator.vllm.options import set_environment

            set_environment(generator)
            from umbra.services.generator.vllm.engine import VllmEngine  # brings vLLM

            self.engine = VllmEngine(
                check_model_dir(path),
                model if rank else outline,
                config,
                stop_ids=(),  # each request has its own
                seed=seed,
                adapter=adapter,
            )
        self.waiting: list[SampleJob] = []
        self._live: dict[str, _LiveJob] = {}  # by sample
        self._seen: Counter[str] = Counter()  # tokens of each that were looked at
        self._served: str | None = None
        self._loads = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self._live)

    @property
    def live(self) -> dict[str, SampleJob]:
        return {live.job.id: live.job for live in self._live.values()}

    def add(self, job: SampleJob) -> None:
        """Queue a job; ValueError, with a sentence that says why, if it does not fit the engine."""
        if job.scored and self._scorer is None:
            raise ValueError("vLLM has no logprobs of prompts here: start the server with torch")
        check_request(self._request(job, 0), self.engine.max_context, self._vocabulary)
        self.waiting.append(job)

    def turn(self) -> Iterator[tuple[SampleJob, FutureAnswer]]:
        """Run a pass; yield finished jobs with answers. EngineError: the live ones are lost."""
        if not self._live and self.waiting:
            first = self.waiting[0]
            try:
                self._serve(first)
            except UmbraError as error:
                for job in self._waiting_for(first.weights.folder):
                    yield job, FutureAnswer.failure(error)
                if isinstance(error, EngineError):
                    raise
                return
        if not self._live or all(job.weights.folder == self._served for job in self.waiting):
            for job in self._waiting_for(self._served):
                try:
                    self._begin(job)
                except ValueError as error:  # settings that the engine does not have
                    yield job, FutureAnswer.failure(error)
        outputs = self.engine.poll(POLL_S)
        new = self.engine.new_tokens().items()
        stopped = [name for name, tokens in new if self._has_stopped(name, tokens)]
        outputs += self.engine.abort(stopped) if stopped else []
        for output in outputs:
            if (live := self._ended(output)) is not None:
                yield live.job, live.answer()

    def _waiting_for(self, version: str | None) -> list[SampleJob]:
        """Take the jobs of a version from those that wait."""
        jobs = [job for job in self.waiting if job.weights.folder == version]
        self.waiting = [job for job in self.waiting if job.weights.folder != version]
        return jobs

    def _serve(self, job: SampleJob) -> None:
        """Load the version of a job, unless it is the one that is served."""
        if job.weights.folder == self._served:
            return
        self._served = None
        data = self._base
        if folder := job.weights.folder:
            try:
                data = shared_memory(self._manifest.total_bytes)
                with (Path(folder) / VERSION).open("rb") as file:
                    file.readinto(data)
            except OSError as error:
                raise UsageError(
                    "these weights are no longer here: unnamed ones go once there are newer ones; "
                    "save_weights_for_sampler(name) keeps them"
                ) from error
            if xxhash.xxh3_128_hexdigest(data) != job.weights.checksum:
                raise UmbraError(f"{folder} is damaged: its checksum differs; save it again")
        self._loads += 1
        self.engine.load(self._manifest, data, self._loads, "recompute")
        self._served = job.weights.folder

    def _begin(self, job: SampleJob) -> None:
        live = _LiveJob(job)
        if job.scored and self._scorer is not None:
            live.prompt_logprobs = self._score(self._scorer, job.prompt, job.scored)
        for index in range(job.count):
            request = self._request(job, index)
            self.engine.submit([request])
            self._live[request.request_id] = live

    def _request(self, job: SampleJob, index: int) -> EngineRequest:
        name = f"{job.id}/{index}"
        return EngineRequest(name, job.prompt, job.sampling, job.max_tokens, watched=True)

    def _has_stopped(self, name: str, tokens: Sequence[int]) -> bool:
        """Return true if one of the tokens since the last look ends a sample."""
        seen, self._seen[name] = self._seen[name], len(tokens)
        return self._end(self._live[name].job, tokens, seen) > 0

    def _end(self, job: SampleJob, tokens: Sequence[int], since: int = 0) -> int:
        """Return the length of a sample that a token after `since` ends; 0 if none does."""
        stop_ids = self._stop_ids if job.stop_tokens is None else job.stop_tokens
        # A token has a byte at least, so no stop text reaches further back.
        reach = max((len(text.encode()) for text in job.stop_texts), default=0)
        for end in range(since + 1, len(tokens) + 1):
            if tokens[end - 1] in stop_ids:
                return end
            text = self._tokenizer.decode(tokens[max(0, end - reach) : end]) if reach else ""
            if any(stop in text for stop in job.stop_texts):
                return end
        return 0

    def _ended(self, output: EngineOutput) -> _LiveJob | None:
        """Take the output of a sample; return its job if that was the last one."""
        name, tokens = output.request_id, output.token_ids
        live = self._live.pop(name)
        self._seen.pop(name, None)
        end = self._end(live.job, tokens)  # vLLM goes on until it is told
        live.samples[name] = tokens[: end or None], output.logprobs[: end or None], end > 0
        return live if len(live.samples) == live.job.count else None

    @torch.inference_mode()
    def _score(self, scorer: Scorer, prompt: list[int], last: int) -> Array:
        """Return logprobs of the last tokens of a prompt, float32 [N]; NaN for the others."""
        scores = np.full(len(prompt), np.nan, np.float32)
        learned = torch.arange(max(1, len(prompt) - last), len(prompt))
        tokens = Tokens(
            torch.tensor(prompt), torch.tensor([len(prompt)]), learned, torch.zeros_like(learned)
        )
        for micro in pack(tokens, pack_tokens=len(prompt), micro_tokens=len(prompt)):
            ones = torch.ones(len(micro.targets), device=self._device)
            logprobs, _ = scorer(micro.to(self._device), ones, with_entropy=False)
            scores[learned[micro.source].numpy()] = logprobs.float().cpu().numpy()
        return scores


class SamplerLoop:
    """The engines of this process, one for each rank, in turns."""

    def __init__(self, start: SamplerStart, pipe: Pipe[SamplerStart | SampleJob]) -> None:
        self._config: RunConfig = config_of(decode_json(start.config), "the server")
        self._seed, self._pipe = start.seed, pipe
        self._engines: dict[int, RankEngine] = {}
        setup_logging(self._config.log, "sampler")

    def run(self, ended: threading.Event) -> None:
        """Sample until `ended` is set; EOFError or OSError if the server is gone."""
        alive_at = 0.0
        while not ended.is_set():
            wait_s = 0.0 if any(engine.busy for engine in self._engines.values()) else ALIVE_S
            while isinstance(job := self._pipe.receive(wait_s), SampleJob):
                self._add(job)
                wait_s = 0.0
            if (now := time.monotonic()) >= alive_at:
                alive_at = now + ALIVE_S
                self._pipe.send(SampleReport())
            for rank, engine in list(self._engines.items()):
                if engine.busy:
                    self._turn(rank, engine)

    def close(self) -> None:
        for engine in self._engines.values():
            engine.engine.close()

    def _add(self, job: SampleJob) -> None:
        try:
            rank = job.weights.rank
            if rank not in self._engines:
                self._engines[rank] = RankEngine(self._config, rank, self._seed)
            self._engines[rank].add(job)
        except (UmbraError, ValueError) as error:
            self._answer(job, FutureAnswer.failure(error))

    def _turn(self, rank: int, engine: RankEngine) -> None:
        try:
            for job, answer in engine.turn():
                self._answer(job, answer)
        except EngineError as error:
            # Of weights with NaN, say: who waits for others gets a new engine.
            self._engines.pop(rank)
            engine.engine.close()
            for job in engine.live.values():
                self._answer(job, FutureAnswer.failure(error))
            for job in engine.waiting:
                self._add(job)

    def _answer(self, job: SampleJob, answer: FutureAnswer) -> None:
        self._pipe.send(SampleReport(job.id, answer))


def main() -> int:
    die_with_parent()
    pipe: Pipe[SamplerStart | SampleJob] = Pipe(parents_end(), SamplerStart | SampleJob)
    ended = threading.Event()
    with suppress(EOFError, OSError):
        start = pipe.receive()
        assert isinstance(start, SamplerStart)
        signal.signal(signal.SIGTERM, lambda *_: ended.set())
        loop = SamplerLoop(start, pipe)
        try:
            loop.run(ended)
        finally:
            loop.close()
    return EXIT_DONE if ended.is_set() else PeerLostError.exit_code


if __name__ == "__main__":
    sys.exit(ends_process(main, "sampling")())
