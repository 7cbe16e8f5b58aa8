"""Tokens per second of the torch engine against what Transformers itself offers.

    python benchmarks/engines.py [--json FILE] [--threads 1] [--requests 2048] [--passes 3]

The load: prompts of 4 to 40 tokens, answers as long as the prompt, lengths 2 + Exp(mean 5) with a
long tail, no stop token, so that all engines do the same work. The model is small and random. Each
line is the best of `--passes` passes; passes of all engines take turns, so that a noisy moment on
the machine hits all of them alike.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from report import Report
from transformers import ContinuousBatchingConfig, GenerationConfig

from umbra.proto.records import Sampling
from umbra.services.generator.engine import EngineRequest
from umbra.services.generator.torch_engine import TorchEngine
from umbra.services.modeling.models import load_model
from umbra.services.trainer.make_model import make_model

LONGEST = 38
CONTEXT = 128

Load = Sequence[tuple[list[int], int]]


def make_load(count: int, seed: int = 0) -> Load:
    """`count` prompts and the number of tokens to generate for each."""
    source = random.Random(seed)
    load = []
    for _ in range(count):
        size = min(LONGEST, 2 + int(source.expovariate(1 / 5)))
        load.append(([1, *(source.randrange(20, 30) for _ in range(size)), 2], size + 1))
    return load


def slot_engine(model: Any, load: Load, slots: int) -> None:
    """This project's engine, logprobs included."""
    engine = TorchEngine(model, stop_ids=(), slots=slots, max_context=CONTEXT)
    engine.submit(
        EngineRequest(str(i), prompt, Sampling(), new) for i, (prompt, new) in enumerate(load)
    )
    done = 0
    while engine.busy:
        done += len(engine.poll(0.0))
    assert done == len(load)


@torch.inference_mode()
def generate(model: Any, load: Load, batch: int) -> None:
    """`model.generate` on left-padded batches; a batch takes as long as its longest answer.

    Nothing but `max_new_tokens` tells it where an answer ends, as if an eos had been sampled there.
    """
    for start in range(0, len(load), batch):
        part = load[start : start + batch]
        width = max(len(prompt) for prompt, _ in part)
        ids = torch.tensor([[0] * (width - len(p)) + p for p, _ in part])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in part])
        model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=max(new for _, new in part),
            eos_token_id=None,
            pad_token_id=0,
        )


def continuous_batching(model: Any, load: Load, batch: int) -> None:
    """Transformers' ContinuousBatchingManager, logprobs included."""
    config = ContinuousBatchingConfig(
        num_blocks=256,
        page_size=32,
        max_batch_tokens=1024,
        use_cuda_graph=False,
        return_logprobs=True,
    )
    del batch
    generation = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, eos_token_id=-1, pad_token_id=0
    )
    manager = model.init_continuous_batching(
        generation_config=generation, continuous_batching_config=config
    )
    manager.start()
    try:
        for index, (prompt, new) in enumerate(load):
            manager.add_request(prompt, request_id=str(index), max_new_tokens=new)
        done = 0
        until = time.monotonic() + 120
        while done < len(load) and time.monotonic() < until:
            result = manager.get_result(timeout=1)
            done += result is not None
        assert done == len(load), f"only {done} of {len(load)} came back"
    finally:
        manager.stop(block=True)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--requests", type=int, default=2048)
    parser.add_argument("--passes", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    load = make_load(options.requests)
    tokens = sum(new for _, new in load)
    cases: list[tuple[str, Callable[[Any, Load, int], None], int]] = [
        ("HF generate", generate, 64),
        ("HF generate", generate, 256),
        ("HF continuous batching", continuous_batching, 0),
        *(("slot engine", slot_engine, slots) for slots in (32, 64, 128, 256)),
    ]
    seconds: dict[int, list[float]] = {index: [] for index in range(len(cases))}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "model")
        model = load_model(Path(folder) / "model", torch.device("cpu"), torch.float32)
        for _ in range(options.passes):
            for index, (_, run, size) in enumerate(cases):
                start = time.perf_counter()
                run(model, load, size)
                seconds[index].append(time.perf_counter() - start)
    report = Report(f"engines: {options.requests:,} requests, {tokens:,} tokens, 1 model of 0.1 M")
    speeds: dict[str, float] = {}
    for index, (name, _, size) in enumerate(cases):
        best, worst = tokens / min(seconds[index]), tokens / max(seconds[index])
        speeds[name] = max(speeds.get(name, 0.0), best)
        report.add(engine=name, batch=str(size or "-"), tokens_per_s=best, slowest_pass=worst)
    ratio = speeds["slot engine"] / speeds["HF generate"]
    report.goal("slot engine over HF generate, best of each", ratio, ">", 1.0)
    return 0 if report.show(options.json) else 1


if __name__ == "__main__":
    raise SystemExit(main())
