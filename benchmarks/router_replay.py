"""A mixture of experts under asynchrony, with and without router replay.

    python benchmarks/router_replay.py [--json FILE] [--quick] [--steps 60] [--seeds 0 1 2]

A tiny Qwen3-MoE with random weights learns from a reward of its tokens alone. The torch engine
serves it in bfloat16, as vLLM would, from weights that are so many versions old; the trainer
computes in float32. Each cell is the same run but for `trainer.router_replay`. k3 is that of the
trainer's logprobs against the engine's, of all tokens; "rerouted" is the share of choices that
the trainer's own routers would have made otherwise, which only replay can tell.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import deque
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from report import Report, spread
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from umbra.proto.records import Manifest, Sampling, Trajectory, pack_float32, pack_int32
from umbra.services.config.loader import load_config
from umbra.services.generator.engines.engine import EngineOutput, EngineRequest
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.snapshot import tensor_layout, write_shards
from umbra.services.trainer.update import PolicyUpdate
from umbra.services.weights.manifest import build_manifest

VOCABULARY, PROMPT, LENGTH, GROUPS, SIZE = 64, 4, 12, 4, 8
LAST = 10  # steps at the end whose mean reward is a run's
COLUMNS = ("mismatch/k3", "mismatch/k3_on_policy", "ess", "experts/rerouted", "ratio/max")


def policy(seed: int) -> PreTrainedModel:
    """Two layers of 16 experts, of which a token meets two."""
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "norm_topk_prob": True, "initializer_range": 0.2, "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }  # fmt: skip
    config = Qwen3MoeConfig(**shape)
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.eval()


class Generator:
    """The torch engine, and the rewards of what it makes."""

    def __init__(self, model: Any, manifest: Manifest, seed: int, tell: bool) -> None:
        self._manifest = manifest
        self._prompts = torch.Generator().manual_seed(seed)
        self._engine = TorchEngine(
            model, stop_ids=(), slots=GROUPS * SIZE, max_context=64, seed=seed, tell_routing=tell
        )

    def batch(self, weights: memoryview, version: int, step: int) -> list[Trajectory]:
        """Groups of answers to random prompts by these weights."""
        self._engine.load(self._manifest, [weights], version, "recompute")
        prompts = torch.randint(VOCABULARY, (GROUPS, PROMPT), generator=self._prompts).tolist()
        names = {f"{step}-{g}-{m}": prompts[g] for g in range(GROUPS) for m in range(SIZE)}
        sampling = Sampling(max_tokens=LENGTH)
        self._engine.submit(EngineRequest(n, p, sampling, LENGTH) for n, p in names.items())
        done: list[EngineOutput] = []
        while self._engine.busy:
            done += self._engine.poll()
        done.sort(key=lambda output: output.request_id)
        return [_trajectory(output, names[output.request_id]) for output in done]


def _trajectory(output: EngineOutput, prompt: list[int]) -> Trajectory:
    """Rewarded is each token that leaves 1, divided by four."""
    tokens = output.token_ids
    hits = sum(token % 4 == 1 for token in tokens)
    return Trajectory(
        sample_id=output.request_id,
        group_id=output.request_id.rpartition("-")[0],
        prompt_id="p",
        attempt=1,
        prompt_ids=pack_int32(prompt),
        response_ids=pack_int32(tokens),
        loss_mask=b"\1" * len(tokens),
        logprobs=pack_float32(output.logprobs),
        spans=output.spans,
        finish_reason="length",
        reward=hits / len(tokens),
        routing=output.routing,
    )


def learn(seed: int, lag: int, replay: bool, steps: int, rate: float) -> dict[str, Any]:
    """One run; what it measured, as means over its steps."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    settings = {
        "learning_rate": rate, "warmup_steps": 0, "device": "cpu", "threads": 1,
        "pack_tokens": 64, "router_replay": str(replay).lower(),
    }  # fmt: skip
    overrides = [f"trainer.{key}={value}" for key, value in settings.items()]
    config = load_config(overrides=[*overrides, "model.path=m", f"run.seed={seed}"], environ={})
    model = policy(seed)
    manifest = build_manifest(tensor_layout(model, "bfloat16"), 1 << 20)
    generator = Generator(policy(seed).bfloat16(), manifest, seed, replay)
    learner = Learner(model, config.trainer, steps)
    update = PolicyUpdate(config, learner)
    kept: deque[tuple[int, memoryview]] = deque(maxlen=lag + 1)
    rewards: list[float] = []
    rows: list[dict[str, float | None]] = []
    for step in range(steps):
        weights = memoryview(bytearray(manifest.total_bytes))
        write_shards(model, manifest, weights)
        kept.append((step, weights))
        version, oldest = kept[0]
        made = generator.batch(oldest, version, step)
        rewards.append(mean(one.reward for one in made))
        row = update(make_batch(made, VOCABULARY, routers=learner.replayed), step, lambda: True)
        assert row is not None
        rows.append(row)
    found: dict[str, Any] = {}
    for column in COLUMNS:
        values = [value for row in rows if (value := row.get(column)) is not None]
        found[column] = mean(values) if values else None
    return {
        "seed": seed, "lag": lag, "replay": replay, "first": mean(rewards[:LAST]),
        "reward": mean(rewards[-LAST:]), "seconds": time.perf_counter() - began, **found,
    }  # fmt: skip


def summarise(report: Report) -> None:
    """k3, what was rerouted, and the reward at the end, by lag and replay."""
    cells: dict[tuple[int, bool], list[dict[str, Any]]] = {}
    for row in report.rows:
        cells.setdefault((row["lag"], row["replay"]), []).append(row)
    lines: list[list[Any]] = []
    for (lag, replay), rows in sorted(cells.items()):
        columns = [[row[name] for row in rows] for name in (*COLUMNS[:1], *COLUMNS[2:4], "reward")]
        shown = [spread([v for v in values if v is not None]) for values in columns]
        lines.append([lag, "yes" if replay else "no", *shown])
    report.table(
        "runs",
        ["versions old", "replay", "k3", "ess", "rerouted", f"reward of the last {LAST} steps"],
        lines,
    )
    for lag in sorted({lag for lag, _ in cells}):
        if (lag, True) in cells and (lag, False) in cells:
            ours, plain = ([row["mismatch/k3"] for row in cells[lag, r]] for r in (True, False))
            report.figure(f"k3 of lag {lag}, without over with replay", mean(plain) / mean(ours))
            gain, base = ([row["reward"] for row in cells[lag, r]] for r in (True, False))
            report.figure(f"reward of lag {lag}, with less without replay", mean(gain) - mean(base))
    of = report.figures.get("k3 of lag 0, without over with replay")
    if of is not None:
        report.goal("k3 on equal weights, without over with replay", of, ">", 1.0)


def main() -> int:
    """All cells; 0 if the goal is met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--quick", action="store_true", help="one seed, few steps")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.seeds = 4, [0]
    report = Report("router_replay", facts={"steps": args.steps, "rate": args.rate})
    for seed, lag in itertools.product(args.seeds, args.lags):
        for replay in (False, True):
            report.add(**learn(seed, lag, replay, args.steps, args.rate))
            report.restate(summarise)
            if args.json:  # what there is so far
                report.write(args.json)
    return 0 if report.show(args.json) else 1


if __name__ == "__main__":
    sys.exit(main())
