"""Tokens per second of the torch engine against what Transformers itself offers.

    python benchmarks/long_tail.py [--json FILE] [--threads 1] [--requests 256] [--passes 2]
                                   [--slots 64]

Two loads, both of prompts of 4 to 40 tokens and without a stop token, so that all engines do the
same work: answers of one length, where `generate` has nothing to wait for, and a long-tailed mix
(log-normal, median 24 tokens, at most 256), where each of its batches takes as long as its longest
answer. All engines decode as many sequences at once, but for continuous batching, which picks its
batch itself. The model is a random Qwen3. Each line is the best of `--passes` passes after a batch
that warms up; passes of all engines take turns, so that a noisy moment hits all of them alike.
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
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from umbra.proto.records import Sampling
from umbra.services.generator.engines.engine import Engine, EngineRequest
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.modeling.models import load_model
from umbra.services.trainer.make_model import make_model

LONGEST = 256
CONTEXT = 320
DEADLINE_S = 240.0

Load = Sequence[tuple[list[int], int]]


def make_load(count: int, length: Callable[[random.Random], int], seed: int = 0) -> Load:
    """Return `count` prompts and the number of tokens to generate for each."""
    source = random.Random(seed)
    return [
        ([source.randrange(20, 100) for _ in range(source.randint(4, 40))], length(source))
        for _ in range(count)
    ]


def long_tailed(source: random.Random) -> int:
    """Return a length of the mix: its mean is 1.6 times its median, its p99 about ten times."""
    return max(1, min(LONGEST, round(source.lognormvariate(3.18, 1.0))))


def answer(engine: Engine, load: Load) -> int:
    """Have one of our engines answer `load`, as a generator does; return the number of tokens."""
    engine.submit(
        EngineRequest(str(i), prompt, Sampling(max_tokens=new), new)
        for i, (prompt, new) in enumerate(load)
    )
    tokens = 0
    while engine.busy:
        tokens += sum(len(output.token_ids) for output in engine.poll(0.05))
    assert tokens == sum(new for _, new in load)
    return tokens


def torch_engine(model: Any, load: Load, slots: int) -> None:
    """This project's engine, logprobs included."""
    answer(TorchEngine(model, stop_ids=(), slots=slots, max_context=CONTEXT), load)


@torch.inference_mode()
def generate(model: Any, load: Load, batch: int) -> None:
    """`model.generate` on left-padded batches; a batch takes as long as its longest answer.

    Only `max_new_tokens` ends an answer, as if an eos had been sampled there.
    """
    for start in range(0, len(load), batch):
        part = load[start : start + batch]
        width = max(len(prompt) for prompt, _ in part)
        ids = [[0] * (width - len(p)) + p for p, _ in part]
        mask = [[0] * (width - len(p)) + [1] * len(p) for p, _ in part]
        model.generate(
            input_ids=torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            do_sample=True,
            top_k=0,
            max_new_tokens=max(new for _, new in part),
            eos_token_id=None,
            pad_token_id=0,
        )


def continuous_batching(model: Any, load: Load, batch: int) -> None:
    """Transformers' ContinuousBatchingManager, logprobs included; it picks its batch itself."""
    del batch
    config = ContinuousBatchingConfig(
        num_blocks=512,
        page_size=32,
        max_batch_tokens=1024,
        use_cuda_graph=False,
        return_logprobs=True,
    )
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
        until = time.monotonic() + DEADLINE_S
        while done < len(load) and time.monotonic() < until:
            result = manager.get_result(timeout=1)
            done += result is not None
        assert done == len(load), f"only {done} of {len(load)} came back"
    finally:
        manager.stop(block=True)


OURS = "torch engine"
ENGINES: dict[str, Callable[[Any, Load, int], None]] = {
    "generate": generate,
    "continuous batching": continuous_batching,
    OURS: torch_engine,
}
GOALS = {"equal": 1.0, "long-tailed": 2.0}


def summarise(report: Report) -> None:
    """State the table, and the torch engine over each of the others."""
    speeds = {(row["load"], row["engine"]): row["tokens_per_s"] for row in report.rows}
    slowest = {(row["load"], row["engine"]): row["slowest_pass"] for row in report.rows}
    cells = [
        [name, *(f"{speeds[mix, name]:,.0f} ({slowest[mix, name]:,.0f})" for mix in GOALS)]
        for name in ENGINES
    ]
    report.table("engines", ["engine", *GOALS], cells)
    for mix, goal in GOALS.items():
        ours = speeds[mix, OURS]
        for name in ENGINES:
            if name != OURS:
                report.figure(_key(f"{mix} over {name}"), ours / speeds[mix, name])
        best = max(speeds[mix, name] for name in ENGINES if name != OURS)
        report.figure(_key(f"{mix} over the better"), ours / best)
        report.goal(f"over the better of Transformers' two, {mix} lengths", ours / best, ">=", goal)


def _key(name: str) -> str:
    return name.replace(" ", "_").replace("-", "_")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--slots", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loads = {
        "equal": make_load(options.requests, lambda _: 48),
        "long-tailed": make_load(options.requests, long_tailed),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        parameters = make_model(path, hidden=128, layers=4, ff=384)
        # Transformers' engines get the model with its own attention.
        theirs: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa")
        ours = load_model(path, torch.device("cpu"), torch.float32)
    models = {name: ours if name == OURS else theirs for name in ENGINES}
    for name, run in ENGINES.items():  # warm up
        run(models[name], loads["equal"][: options.slots], options.slots)
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(options.passes):
        for mix, load in loads.items():
            for name, run in ENGINES.items():
                start = time.perf_counter()
                run(models[name], load, options.slots)
                seconds.setdefault((mix, name), []).append(time.perf_counter() - start)
    report = Report(
        f"long_tail: {options.requests} requests a load, {options.slots} at once, a model of "
        f"{parameters / 1e6:.1f} M parameters"
    )
    for (mix, name), spent in seconds.items():
        tokens = sum(new for _, new in loads[mix])
        best, slowest = tokens / min(spent), tokens / max(spent)
        report.add(load=mix, engine=name, tokens_per_s=best, slowest_pass=slowest)
    report.restate(summarise)
    return 0 if report.show(options.json) else 1


if __name__ == "__main__":
    raise SystemExit(main())
