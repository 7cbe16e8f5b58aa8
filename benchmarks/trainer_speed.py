"""Tokens per second of an update of the policy, against plain torch and TRL on the same samples.

    python benchmarks/trainer_speed.py [--json FILE] [--threads 1] [--passes 3]
    python benchmarks/trainer_speed.py --device cuda [--hidden 1024 --layers 28 ...] [--json FILE]

Three loads of groups of eight: one with a long tail of response lengths, one of long prompts and
short responses, one of long responses; each with a dense model and with one of eight experts, two
of which a token meets. A row is the best of `--passes` updates (forward, backward, clipping, AdamW)
after one that warms up; rows take turns, so that a noisy moment hits all of them alike. Tokens are
the samples', prompts included, however they are fed. `trainer` is everything that the
trainer does with a leased batch: checks, advantages, packing, loss, metrics, step.

On a GPU the model is a Qwen3 with random weights (0.6 B by default) in bf16, and TRL is left out;
`mfu` is six operations per weight and token, without attention, over a large matrix product's rate.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from report import Report
from trainer_peers import PlainPacked, TrlStep
from transformers import (
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from umbra.proto.records import Sampling, Trajectory, VersionSpan, pack_float32, pack_int32
from umbra.services.config import RunConfig
from umbra.services.config.loader import load_config
from umbra.services.modeling.packing import pack
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.make_model import make_model, make_tokenizer
from umbra.services.trainer.policy import load_policy
from umbra.services.trainer.update import PolicyUpdate

GROUP = 8
OURS, UNSHARED = "trainer", "trainer, prompts not shared"
PLAIN = "plain torch, the same packed rows"
TRL = "TRL `GRPOTrainer`"
SPEED_GOAL, MFU_GOAL, SHARED_GOAL = 0.95, 0.45, 1.9


def make_load(
    groups: int, prompt: int, mean: int, longest: int, vocab: int, size: int = GROUP
) -> list[Trajectory]:
    """Groups of responses whose lengths are exponential around `mean`, each cut at `longest`."""
    source = random.Random(1)
    made: list[Trajectory] = []
    for group in range(groups):
        head = [source.randrange(5, vocab) for _ in range(source.randint(prompt // 2, prompt))]
        for member in range(size):
            length = min(longest, 2 + int(source.expovariate(1 / mean)))
            made.append(
                Trajectory(
                    sample_id=f"{group}-{member}",
                    group_id=str(group),
                    prompt_id=str(group),
                    attempt=1,
                    prompt_ids=pack_int32(head),
                    response_ids=pack_int32([source.randrange(5, vocab) for _ in range(length)]),
                    loss_mask=bytes([1] * length),
                    logprobs=pack_float32([-4.0 - source.random() for _ in range(length)]),
                    spans=[VersionSpan(version=0, start=0, end=length)],
                    finish_reason="stop",
                    reward=float(member % 2),
                    sampling=Sampling(),
                )
            )
    return made


class TrainerStep:
    """The trainer's own update of a leased batch."""

    def __init__(self, model: PreTrainedModel, config: RunConfig, load: list[Trajectory]) -> None:
        self._learner = Learner(model, config.trainer, steps=1000)
        self._update = PolicyUpdate(config, self._learner)
        self._load = load

    def __call__(self) -> None:
        batch = make_batch(self._load, self._learner.model.config.vocab_size)
        assert self._update(batch, 0, lambda: True) is not None


def best_of(steps: Mapping[str, Callable[[], object]], passes: int, cuda: bool) -> dict[str, float]:
    """Seconds of the fastest of `passes` calls of each, in turns, after one that warms up."""
    best = dict.fromkeys(steps, float("inf"))
    for number in range(passes + 1):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            if cuda:
                torch.cuda.synchronize()
            if number:
                best[name] = min(best[name], time.perf_counter() - begin)
    return best


def settings(args: argparse.Namespace, **trainer: Any) -> RunConfig:
    """Return the run's configuration; all else is the default."""
    keys = {
        "device": args.device,
        "threads": args.threads,
        "pack_tokens": args.pack_tokens,
        "micro_tokens": args.micro_tokens,
        "precision": "bf16" if args.device == "cuda" else "no",
        "learning_rate": 1e-5,
    } | trainer
    return load_config(overrides=[f"trainer.{k}={v}" for k, v in keys.items()], environ={})


def make_moe(path: Path) -> None:
    """As large as the dense model in what a token meets; eight experts, of which it meets two."""
    tokenizer = make_tokenizer(4096)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=48,  # pyright: ignore[reportCallIssue] (by **kwargs)
        moe_intermediate_size=288,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


def on_cpu(args: argparse.Namespace, report: Report) -> None:
    """Measure all peers on small models, then by the length of rows."""
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        dense, moe = Path(folder) / "dense", Path(folder) / "moe"
        make_model(dense, hidden=192, layers=4, heads=4, kv_heads=2, ff=576, context=4096)
        make_moe(moe)
        vocab = load_policy(dense)[0].config.vocab_size
        loads = {
            "long tail": make_load(args.groups, 48, 60, 250, vocab),
            "long prompts": make_load(args.groups, 300, 16, 60, vocab),
            "long rows": make_load(1, 48, 4000, args.longest, vocab),
        }
        for path in (dense, moe):
            for name, load in loads.items():
                kind = "" if path == dense else "MoE, "
                compare(args, report, path, kind + name, load)


def compare(
    args: argparse.Namespace, report: Report, path: Path, name: str, load: list[Trajectory]
) -> None:
    """Measure all peers on one load with the model in `path`."""

    def model() -> PreTrainedModel:
        return load_policy(path)[0]

    shared, apart = settings(args), settings(args, share_prompts="false")
    batch = make_batch(load, model().config.vocab_size)
    micros = pack(batch.tokens, pack_tokens=args.pack_tokens, micro_tokens=args.micro_tokens)
    with tempfile.TemporaryDirectory() as folder:
        steps: dict[str, Callable[[], None]] = {
            OURS: TrainerStep(model(), shared, load),
            UNSHARED: TrainerStep(model(), apart, load),
            PLAIN: PlainPacked(model(), batch, micros, bf16=False),
            TRL: TrlStep(path, load, Path(folder)),
        }
        seconds = best_of(steps, args.passes, cuda=False)
    tokens = int(batch.tokens.lengths.sum())
    for who, spent in seconds.items():
        report.add(load=name, who=who, tokens=tokens, seconds=spent, tokens_s=tokens / spent)


def summarise(report: Report) -> None:
    """State the table, ratios of seconds, and goals."""
    spent: dict[str, dict[str, float]] = {}
    speeds: dict[str, dict[str, float]] = {}
    for row in report.rows:
        spent.setdefault(row["load"], {})[row["who"]] = row["seconds"]
        speeds.setdefault(row["load"], {})[row["who"]] = row["tokens_s"]
    peers = dict.fromkeys(row["who"] for row in report.rows)
    lines = [[load, *(found.get(who) for who in peers)] for load, found in speeds.items()]
    report.table("updates", ["tokens/s", *peers], lines)
    for load, seconds in spent.items():
        name = load.replace(",", "").replace(" ", "_")
        shared, own, rows_alike = (seconds[one] for one in (OURS, UNSHARED, PLAIN))
        report.figure(f"{name}_shared", own / shared)
        report.goal(f"{load}: over plain torch, the same rows", rows_alike / own, ">=", SPEED_GOAL)
        if load == "long prompts":
            report.goal(f"{load}: shared over not shared", own / shared, ">=", SHARED_GOAL)
        if TRL in seconds:
            report.figure(f"{name}_over_trl", seconds[TRL] / shared)
    for row in report.rows:
        if row["load"] == "full rows" and row["who"] == UNSHARED and "mfu" in row:
            report.goal("full rows: MFU", row["mfu"], ">=", MFU_GOAL)


def on_cuda(args: argparse.Namespace, report: Report) -> None:
    """Measure a model of half a billion to a billion weights."""
    device = torch.device("cuda")
    config = Qwen3Config(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.ff,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=max(1, args.heads // 2),
        head_dim=128,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue] (by **kwargs)
    )

    def model() -> PreTrainedModel:
        torch.manual_seed(0)
        with device:
            return Qwen3ForCausalLM(config)

    square = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    top = 2 * 8192**3 / best_of({"": lambda: torch.mm(square, square)}, 5, cuda=True)[""]
    per_token = 6 * sum(weight.numel() for weight in model().parameters() if weight.dim() == 2)
    loads = {
        # A response as long as a row has it alone: no mask, so that the fast causal kernel runs.
        "full rows": make_load(
            args.groups, 512, 10 * args.pack_tokens, args.pack_tokens - 511, 1000
        ),
        "long tail": make_load(args.groups, 512, 1000, args.pack_tokens - 512, 1000),
        "long prompts": make_load(args.groups, 2048, 120, 400, 1000),
    }
    shared, apart = settings(args), settings(args, share_prompts="false")
    for name, load in loads.items():
        batch = make_batch(load, args.vocab)
        tokens = int(batch.tokens.lengths.sum())
        sizes = {"pack_tokens": args.pack_tokens, "micro_tokens": args.micro_tokens}
        micros = pack(batch.tokens, **sizes)
        steps: dict[str, Callable[[], Callable[[], None]]] = {
            OURS: lambda load=load: TrainerStep(model(), shared, load),
            UNSHARED: lambda load=load: TrainerStep(model(), apart, load),
            PLAIN: lambda batch=batch, micros=micros: PlainPacked(
                model(), batch, micros, bf16=True
            ),
        }
        seconds: dict[str, float] = {}
        for who, make in steps.items():  # one at a time: each holds a model and its optimizer
            seconds |= best_of({who: make()}, args.passes, cuda=True)
            torch.cuda.empty_cache()
        for who, spent in seconds.items():
            report.add(
                load=name,
                who=who,
                tokens=tokens,
                seconds=spent,
                tokens_s=tokens / spent,
                mfu=None if who == OURS else per_token * tokens / spent / top,
                peak_gib=torch.cuda.max_memory_allocated() / 2**30,
            )


def main() -> None:
    """Measure, print, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description="Tokens per second of the trainer.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--groups", type=int, default=6)
    parser.add_argument("--pack-tokens", type=int)
    parser.add_argument("--micro-tokens", type=int)
    parser.add_argument("--longest", type=int, default=2000, help="of a long response")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--ff", type=int, default=3072)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--check", action="store_true", help="begin nothing; on any machine")
    args = parser.parse_args()
    if args.check:
        return
    on_gpu = args.device == "cuda"
    args.pack_tokens = args.pack_tokens or (4096 if on_gpu else 512)
    args.micro_tokens = args.micro_tokens or (8192 if on_gpu else 4096)
    report = Report("trainer_speed")
    (on_cuda if on_gpu else on_cpu)(args, report)
    report.restate(summarise)
    report.show(args.json)


if __name__ == "__main__":
    main()
