"""Memory of an update by how many ranks share the tokens of a row (`trainer.sequence_parallel`).

    python benchmarks/sequence_memory.py [--json FILE] [--tokens 8192] [--ranks 1,2,4]

A model of two layers (float32, 128 wide) scores one row in which all tokens but the first are
learned, and goes back through it. Ranks are processes of this machine, which exchange over gloo;
each has all weights. Measured is how far the kernel's peak of a rank's resident set rises above
what was there with the weights and their gradients; of several ranks the largest counts.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from logits_memory import learned_row
from report import Report
from snapshot_memory import memory, reset_peak
from transformers import AutoModelForCausalLM, Qwen3Config

from umbra.services.config import TrainerConfig
from umbra.services.modeling.scorer import Scorer
from umbra.services.trainer.ranks import join_ranks

MIB = 1 << 20
WIDTH, VOCABULARY = 128, 512
CHUNK = MIB  # of logits at a time: they are measured elsewhere


def update(tokens: int, ranks: int) -> dict[str, float]:
    """Score and go back through one row of `tokens` as one of `ranks`; MiB and seconds."""
    torch.set_num_threads(1)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=WIDTH // 4, tie_word_embeddings=True,
        max_position_embeddings=tokens + 1,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    micro = learned_row(tokens, VOCABULARY)
    with join_ranks(TrainerConfig(device="cpu", sequence_parallel=ranks)) as joined:
        scorer, ones = Scorer(model, CHUNK, group=joined.sequence), torch.ones(tokens)
        before, began = reset_peak(), time.perf_counter()
        logprobs, _ = scorer(micro, ones, with_entropy=False)
        (-logprobs.mean()).backward()
        seconds = time.perf_counter() - began
        return {"mib": (memory("VmHWM") - before) / MIB, "seconds": seconds}


def measure(tokens: int, ranks: int) -> dict[str, Any]:
    """`update` in `ranks` processes of their own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    argv = [sys.executable, __file__, "--case", str(tokens), str(ranks)]
    running = [
        subprocess.Popen(
            argv,
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    found: list[dict[str, float]] = []
    for process in running:
        out, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"a rank of {ranks} ended with {process.returncode}")
        found.append(json.loads(out.splitlines()[-1]))
    return {
        "tokens": tokens,
        "ranks": ranks,
        "mib": max(one["mib"] for one in found),
        "seconds": max(one["seconds"] for one in found),
    }


def summarise(report: Report) -> None:
    """MiB of a rank, and of how many ranks' share that is."""
    alone = report.rows[0]["mib"] * report.rows[0]["ranks"]
    lines = [
        [
            f"{row['tokens']:,}",
            str(row["ranks"]),
            f"{row['mib']:,.0f}",
            f"{row['mib'] / alone:.2f}",
            f"{row['seconds']:.1f}",
        ]
        for row in report.rows
    ]
    columns = ["tokens of the row", "ranks", "MiB of a rank", "of one rank's", "seconds"]
    report.table("memory", columns, lines)
    for row in report.rows[1:]:
        name = f"memory of one of {row['ranks']} ranks, of its share"
        report.goal(name, row["mib"] / alone * row["ranks"], "<", 1.5)


def main() -> int:
    """All cases; 0 if every goal is met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--ranks", default="1,2,4", help="first the one that others compare with")
    parser.add_argument("--case", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(update(*args.case)))
        return 0
    report = Report("sequence_memory")
    for ranks in map(int, args.ranks.split(",")):
        report.add(**measure(args.tokens, ranks))
    report.restate(summarise)
    return 0 if report.show(args.json) else 1


if __name__ == "__main__":
    raise SystemExit(main())
