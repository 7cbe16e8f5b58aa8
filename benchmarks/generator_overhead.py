"""Tokens per second through the generator's loop over those of bare calls of its engine.

    python benchmarks/generator_overhead.py [--json FILE] [--engines vllm,torch] [--requests 512]
                                            [--slots 64] [--passes 4] [--hidden 256] [--layers 4]

The same prompts, to be answered by the same numbers of tokens (drawn as if one in a hundred ended
an answer): once handed to the engine all at once (for vLLM: one `AsyncLLM.generate` each, gathered;
for torch: one `submit`), once leased from a buffer in this process by the generator's loop, which
tokenises, rolls out, rewards and delivers trajectories. Passes take turns. Then five versions of
weights come while all slots are busy: `new_weights_ms` is what one stops the loop.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import queue
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from report import Report

from umbra.proto.deadline import LEAST_RATE, Pace
from umbra.proto.messages import (
    LeaseSamples,
    Message,
    Ok,
    SampleLeases,
    SubmitAck,
    SubmitTrajectories,
)
from umbra.proto.records import SampleTask, Sampling
from umbra.services.config import EnvironmentConfig, GeneratorConfig
from umbra.services.environments.pool import open_pool
from umbra.services.generator.activity import Activity
from umbra.services.generator.buffer_client import BufferClient
from umbra.services.generator.engines.engine import Engine, EngineOutput, EngineRequest
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.generator.loop import GeneratorLoop
from umbra.services.generator.rollout import RolloutSettings
from umbra.services.generator.runner import RolloutRunner
from umbra.services.generator.sample_log import SampleLog
from umbra.services.generator.stall import StallWatch
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.models import load_model, load_tokenizer, outline_model
from umbra.services.modeling.weights import tensors_in
from umbra.services.process.metrics import MetricsFile
from umbra.services.trainer.make_model import make_model
from umbra.services.weights.manifest import build_manifest
from umbra.services.weights.memory import private_memory

LONGEST = 256
CONTEXT = 320
STOP = 3
GOAL = 0.97


class FixedLengths:
    """An engine whose answer to request i has `lengths[i]` tokens, the last of them `STOP`."""

    def __init__(self, engine: Engine, lengths: Sequence[int]) -> None:
        self._engine = engine
        self._lengths = lengths

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, requests: Iterable[EngineRequest]) -> None:
        """As the engine's."""
        self._engine.submit(
            replace(request, max_tokens=self._lengths[int(request.request_id)])
            for request in requests
        )

    def poll(self, timeout_s: float) -> list[EngineOutput]:
        """As the engine's."""
        outputs = self._engine.poll(timeout_s)
        for output in outputs:
            output.token_ids[-1] = STOP
        return outputs


class InProcessBuffer:
    """A channel that answers at once: leases from a list, accepts all."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.pushes: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.delivered = self.tokens = 0
        self._rows = list(enumerate(rows))

    def request(
        self,
        body: Message,
        *,
        timeout_s: float,
        on_done: Callable[[Future[Message]], None] | None = None,
    ) -> Future[Message]:
        """As a `Channel`, but answered when it returns; a question without work stays open."""
        del timeout_s
        future: Future[Message] = Future()
        if on_done is not None:
            future.add_done_callback(on_done)
        if isinstance(body, LeaseSamples):
            granted, self._rows = self._rows[: body.capacity], self._rows[body.capacity :]
            if granted:
                future.set_result(SampleLeases(tasks=[_task(i, row) for i, row in granted]))
        elif isinstance(body, SubmitTrajectories):
            self.delivered += len(body.trajectories)
            self.tokens += sum(t.response_tokens for t in body.trajectories)
            future.set_result(SubmitAck(accepted=len(body.trajectories)))
        else:
            future.set_result(Ok())
        return future


def _task(index: int, row: dict[str, Any]) -> SampleTask:
    name = str(index)
    return SampleTask(
        sample_id=name, group_id=name, prompt_id=name, attempt=0, row=row, lease_s=600.0
    )


class Outside:
    """What the loop expects of a session and of a receiver, with nothing behind it."""

    def __init__(self) -> None:
        self.stopping = threading.Event()

    def progress(self, activity: str, count: int = 1) -> None:
        """Nobody watches."""

    def waits(self, activity: str) -> None:
        """Nobody watches."""

    def stats(self, **values: float) -> None:
        """Nobody watches."""

    def check(self) -> None:
        """Nothing fails."""

    def poll(self) -> None:
        """No new weights."""


def through_the_loop(
    bare: Engine,
    chat: Chat,
    rows: Sequence[dict[str, Any]],
    lengths: Sequence[int],
    folder: Path,
) -> float:
    """Seconds from the first question for work to the last delivery."""
    engine: Any = FixedLengths(bare, lengths)
    outside: Any = Outside()
    buffer = InProcessBuffer(rows)
    channel: Any = buffer
    wake = threading.Event()
    pool = open_pool(EnvironmentConfig(), wake=wake.set)
    metrics = MetricsFile(folder / "metrics.jsonl", "generator")
    settings = RolloutSettings(chat, Sampling(max_tokens=LONGEST), CONTEXT)
    loop = GeneratorLoop(
        session=outside,
        receiver=outside,
        buffer=BufferClient(channel, wake),
        runner=RolloutRunner(engine, pool, settings, flush_tokens=448),
        config=GeneratorConfig(kv_policy="keep", prefetch=32),
        sample_log=SampleLog(metrics, chat),
        watch=StallWatch("bare", Pace(600.0, LEAST_RATE)),
        activity=Activity(metrics),
    )
    began = time.perf_counter()
    while buffer.delivered < len(rows):
        loop.turn()
    seconds = time.perf_counter() - began
    assert buffer.tokens == sum(lengths)
    pool.close()
    metrics.close()
    return seconds


def bare_torch(engine: Engine, prompts: Sequence[list[int]], lengths: Sequence[int]) -> float:
    """Seconds of one `submit`, and of `poll` until all is done."""
    began, before = time.perf_counter(), engine.decoded_tokens
    sampling = Sampling(max_tokens=LONGEST)
    engine.submit(
        EngineRequest(str(i), prompt, sampling, length)
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    )
    while engine.busy:
        engine.poll(0.0)
    assert engine.decoded_tokens - before == sum(lengths)
    return time.perf_counter() - began


def bare_vllm(engine: Any, prompts: Sequence[list[int]], lengths: Sequence[int]) -> float:
    """Seconds of one `AsyncLLM.generate` for each prompt, gathered, in vLLM's own event loop."""
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    server = engine._server

    async def one(index: int, prompt: list[int]) -> int:
        params = SamplingParams(
            max_tokens=lengths[index],
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        count = 0
        async for output in server._llm.generate(tokens_input(prompt), params, f"bare-{index}"):
            count = len(output.outputs[0].token_ids)
        return count

    async def all_of_them() -> int:
        return sum(await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts))))

    began = time.perf_counter()
    tokens = asyncio.run_coroutine_threadsafe(all_of_them(), server._loop).result(300)
    assert tokens == sum(lengths)
    return time.perf_counter() - began


def pauses(engine: Any, path: Path, prompts: Sequence[list[int]]) -> list[float]:
    """Milliseconds for which each of five versions stops the loop while `prompts` are answered."""
    tensors: dict[str, torch.Tensor] = load_model(
        path, torch.device("cpu"), torch.float32
    ).state_dict()
    manifest = build_manifest(((n, "F32", list(t.shape)) for n, t in tensors.items()), 4 << 20)
    # As the receiver stages it: vLLM's workers map this memory.
    allocate = engine.memory.allocate if hasattr(engine, "memory") else private_memory
    memory = allocate(manifest.total_bytes)
    staged = dict(tensors_in(manifest, memory))
    for tensor_name, tensor in tensors.items():
        staged[tensor_name].copy_(tensor)
    sampling = Sampling(max_tokens=LONGEST)
    engine.submit(EngineRequest(f"u{i}", p, sampling, LONGEST) for i, p in enumerate(prompts))
    found: list[float] = []
    for version in range(1, 6):
        until = engine.decoded_tokens + 4 * len(prompts)
        while engine.busy and engine.decoded_tokens < until:
            engine.poll(0.002)
        began = time.perf_counter()
        engine.load(manifest, [memory], version, "keep")
        found.append(1e3 * (time.perf_counter() - began))
    engine.abort()
    return found


def make_engine(name: str, path: Path, slots: int) -> Engine:
    """The engine called `name`, serving the model in `path` as version 0."""
    if name == "torch":
        model = load_model(path, torch.device("cpu"), torch.float32)
        return TorchEngine(model, stop_ids=(), slots=slots, max_context=CONTEXT, version=0)
    from umbra.services.generator.vllm.options import set_environment

    config = GeneratorConfig(engine="vllm", threads=1, slots=slots, max_context=CONTEXT)
    set_environment(config)
    from umbra.services.generator.vllm.engine import VllmEngine

    outline = outline_model(path)
    return VllmEngine(path, outline, config, dtype="float32", stop_ids=(), version=0)


def summarise(report: Report) -> None:
    """The table, and the goal of each engine."""
    columns = ["engine", "bare tokens/s", "loop tokens/s", "median ratio", "of the best passes"]
    names = ("engine", "bare_tok_s", "loop_tok_s", "ratio", "best_ratio", "new_weights_ms")
    rows = [[row[name] for name in names] for row in report.rows]
    report.table("loops", [*columns, "new weights ms"], rows)
    for row in report.rows:
        report.goal(f"{row['engine']}: loop over bare", row["ratio"], ">=", GOAL)


def main() -> int:
    """Measure and print; 0 if the goal is met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engines", default="vllm,torch")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("generator_overhead")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", hidden=args.hidden, layers=args.layers, ff=2 * args.hidden)
        chat = Chat(load_tokenizer(folder / "model"), {STOP})
        rows = [{"prompt": f"{i} " * (1 + i % 9), "answer": ""} for i in range(args.requests)]
        prompts = [chat.prompt_ids([{"role": "user", "content": r["prompt"]}]) for r in rows]
        source = random.Random(0)
        lengths = [min(LONGEST, 1 + int(source.expovariate(0.01))) for _ in prompts]
        for engine_name in args.engines.split(","):
            engine = make_engine(engine_name, folder / "model", args.slots)
            bare = bare_vllm if engine_name == "vllm" else bare_torch
            try:
                # What is compiled or cached once.
                bare(engine, prompts[: args.slots], lengths[: args.slots])
                seconds: dict[str, list[float]] = {"bare": [], "loop": []}
                for _ in range(args.passes):
                    seconds["bare"].append(bare(engine, prompts, lengths))
                    spent = through_the_loop(engine, chat, rows, lengths, folder)
                    seconds["loop"].append(spent)
                pause_ms = median(pauses(engine, folder / "model", prompts[: args.slots]))
            finally:
                engine.close()
            pairs = zip(seconds["bare"], seconds["loop"], strict=True)
            ratio = median(plain / loop for plain, loop in pairs)
            report.add(
                engine=engine_name,
                bare_tok_s=sum(lengths) / median(seconds["bare"]),
                loop_tok_s=sum(lengths) / median(seconds["loop"]),
                ratio=ratio,
                best_ratio=min(seconds["bare"]) / min(seconds["loop"]),
                new_weights_ms=pause_ms,
            )
    report.restate(summarise)
    return 0 if report.show(args.json) else 1


if __name__ == "__main__":
    raise SystemExit(main())
