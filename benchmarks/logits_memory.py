"""Memory of an update by learned tokens and vocabulary: logits in chunks, and all at once.

    python benchmarks/logits_memory.py [--json FILE] [--tokens 2048 8192 32768]
        [--vocabularies 32000 151936]

A model of two layers (float32, 64 wide, tied) scores one row in which all tokens but the first are
learned, with entropies, and goes back through it; each case in a process of its own. Measured is
how far the kernel's peak of the resident set rises above what was there with the weights and their
gradients. "All at once" is what the trainer did before: it is left out where it needs more than
`--most-gib`, by the bytes of its logits.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from report import Report
from snapshot_memory import memory, reset_peak
from transformers import AutoModelForCausalLM, Qwen3Config

from umbra.services.modeling.micro_batch import MicroBatch, Tokens
from umbra.services.modeling.packing import pack
from umbra.services.modeling.scorer import Scorer

GIB, MIB = 1 << 30, 1 << 20
METHODS = {"in chunks": 256 * MIB, "all at once": 1 << 60}  # bytes of logits at a time
COPIES = 5  # tensors as large as the logits that are there at a time, about
WIDTH = 64
REAL_ROW, REAL_VOCABULARY, REAL_GIB = 32768, 151936, 8.0


def learned_row(tokens: int, vocabulary: int) -> MicroBatch:
    """One row of a random sequence, all of whose `tokens` predict a learned one."""
    ids = torch.randint(vocabulary, (tokens + 1,))
    learned, owner = torch.arange(1, tokens + 1), torch.zeros(tokens, dtype=torch.int64)
    row = Tokens(ids, torch.tensor([tokens + 1]), learned, owner)
    (micro,) = pack(row, pack_tokens=tokens + 1, micro_tokens=tokens + 1)
    return micro


def update(tokens: int, vocabulary: int, chunk_bytes: int) -> dict[str, float]:
    """Score and go back through one row of `tokens`; MiB and seconds."""
    torch.set_num_threads(2)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
        max_position_embeddings=tokens + 1,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    micro = learned_row(tokens, vocabulary)
    scorer, ones = Scorer(model, chunk_bytes), torch.ones(tokens)
    before, began = reset_peak(), time.perf_counter()
    logprobs, _ = scorer(micro, ones)
    (-logprobs.mean()).backward()
    seconds = time.perf_counter() - began
    peak = memory("VmHWM")
    return {"mib": (peak - before) / MIB, "whole_gib": peak / GIB, "seconds": seconds}


def measure(tokens: int, vocabulary: int, method: str) -> dict[str, Any]:
    """`update` in a process of its own."""
    argv = [sys.executable, __file__, "--case", str(tokens), str(vocabulary), method]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {"tokens": tokens, "vocabulary": vocabulary, "method": method, **found}


def summarise(report: Report) -> None:
    """MiB by case, and how much more the longest row takes than the shortest."""
    cells: dict[tuple[int, str], dict[int, Any]] = {}
    lengths = sorted({row["tokens"] for row in report.rows})
    for row in report.rows:
        cells.setdefault((row["vocabulary"], row["method"]), {})[row["tokens"]] = row
    lines = [
        [f"{vocabulary:,}", method, *(_cell(of.get(length)) for length in lengths)]
        for (vocabulary, method), of in cells.items()
    ]
    columns = [f"{length:,} tokens" for length in lengths]
    report.table("memory", ["vocabulary", "logits", *columns], lines)
    for vocabulary in sorted({row["vocabulary"] for row in report.rows}):
        of = cells[vocabulary, "in chunks"]
        # What grows are hidden states and their like, which no vocabulary enlarges.
        grown = of[lengths[-1]]["mib"] - of[lengths[0]]["mib"]
        logits = (lengths[-1] - lengths[0]) * vocabulary * 4 / MIB
        name = f"growth with the row, of that of the logits, {vocabulary:,} tokens' vocabulary"
        report.goal(name, grown / logits, "<", 0.1)
    real = cells.get((REAL_VOCABULARY, "in chunks"), {}).get(REAL_ROW)
    if real:
        name = f"GiB of the whole process, {REAL_ROW:,} tokens of {REAL_VOCABULARY:,}"
        report.goal(name, real["whole_gib"], "<", REAL_GIB)


def _cell(row: dict[str, Any] | None) -> str:
    return "-" if row is None else f"{row['mib']:,.0f} MiB, {row['seconds']:.1f} s"


def main() -> int:
    """All cases; 0 if every goal is met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 8192, 32768])
    parser.add_argument("--vocabularies", nargs="+", type=int, default=[32000, 151936])
    parser.add_argument("--most-gib", type=float, default=12.0, help="for logits all at once")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        tokens, vocabulary, method = args.case
        print(json.dumps(update(int(tokens), int(vocabulary), METHODS[method])))
        return 0
    report = Report("logits_memory")
    for vocabulary in args.vocabularies:
        for method in METHODS:
            for tokens in args.tokens:
                needs = COPIES * 4 * tokens * vocabulary / GIB
                if method == "all at once" and needs > args.most_gib:
                    continue
                report.add(**measure(tokens, vocabulary, method))
    report.restate(summarise)
    return 0 if report.show(args.json) else 1


if __name__ == "__main__":
    raise SystemExit(main())
