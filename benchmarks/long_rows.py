"""Memory and speed of an update by the length of its row: attention without a mask of all pairs.

    python benchmarks/long_rows.py [--json FILE] [--tokens 2048 8192 32768] [--width 512]
        [--vocabulary 151936]

A model of two layers (float32, tied) makes a whole update with AdamW on one row: a prompt of a
quarter of it, once, and four responses that share it and are learned, without entropies. Each
length runs in a process of its own. Measured is the kernel's peak of the resident set of the whole
process, with weights, gradients and moments. Attention is what `trainer.attention = "auto"` takes
on a CPU.
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
from snapshot_memory import memory
from transformers import AutoModelForCausalLM, Qwen3Config

from umbra.services.modeling.micro_batch import Tokens
from umbra.services.modeling.packing import pack
from umbra.services.modeling.scorer import Scorer

GIB = 1 << 30
RESPONSES = 4
REAL_ROW, REAL_VOCABULARY, REAL_GIB = 32768, 151936, 8.0


def sample(tokens: int, vocabulary: int) -> Tokens:
    """A group whose row has `tokens`: a prompt and responses of equal lengths."""
    prompt = tokens // 4
    response = (tokens - prompt) // RESPONSES + 1  # the last token of each is not fed
    length = prompt + response
    head = torch.randint(vocabulary, (prompt,))
    ids = [torch.cat([head, torch.randint(vocabulary, (response,))]) for _ in range(RESPONSES)]
    learned = torch.cat([torch.arange(prompt, length) + at * length for at in range(RESPONSES)])
    return Tokens(
        torch.cat(ids),
        torch.full((RESPONSES,), length),
        learned,
        torch.arange(RESPONSES).repeat_interleave(response),
        torch.full((RESPONSES,), prompt),
        torch.zeros(RESPONSES, dtype=torch.int64),
    )


def update(tokens: int, width: int, vocabulary: int) -> dict[str, float]:
    """Learn from one row of `tokens`; GiB of the process, and tokens of the row per second."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=2,
        num_attention_heads=width // 64, num_key_value_heads=max(1, width // 256), head_dim=64,
        tie_word_embeddings=True, max_position_embeddings=tokens + 1,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    (micro,) = pack(
        sample(tokens, vocabulary),
        pack_tokens=2 * tokens,
        micro_tokens=2 * tokens,
        share_prompts=True,
    )
    assert micro.input_ids.shape == (1, tokens)
    scorer, ones = Scorer(model), torch.ones(len(micro.source))
    began = time.perf_counter()
    logprobs, _ = scorer(micro, ones, with_entropy=False)
    (-logprobs.mean()).backward()
    optimizer.step()
    seconds = time.perf_counter() - began
    return {"gib": memory("VmHWM") / GIB, "seconds": seconds, "tokens_s": tokens / seconds}


def measure(tokens: int, width: int, vocabulary: int) -> dict[str, Any]:
    """`update` in a process of its own."""
    sizes = [str(tokens), str(width), str(vocabulary)]
    argv = [sys.executable, __file__, "--case", *sizes]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {"tokens": tokens, "width": width, "vocabulary": vocabulary, **found}


def summarise(report: Report) -> None:
    """GiB and tokens/s by length."""
    rows = sorted(report.rows, key=lambda row: row["tokens"])
    lines = [
        [
            f"{row['tokens']:,}",
            f"{row['gib']:.2f}",
            f"{4 * row['tokens'] ** 2 / GIB:.2f}",
            f"{row['tokens_s']:,.0f}",
        ]
        for row in rows
    ]
    columns = ["tokens of the row", "GiB of the process", "GiB of a float32 mask", "tokens/s"]
    report.table("memory", columns, lines)
    first, last = rows[0], rows[-1]
    # Weights and the like are in both; what a row takes may not grow faster than the row.
    grown = (last["gib"] - first["gib"]) * GIB / (last["tokens"] - first["tokens"])
    report.goal("KiB of the process per token of a longer row", grown / 1024, "<", 256.0)
    real = [r for r in rows if (r["tokens"], r["vocabulary"]) == (REAL_ROW, REAL_VOCABULARY)]
    if real:
        name = f"GiB of the whole process, a row of {REAL_ROW:,}, vocabulary {REAL_VOCABULARY:,}"
        report.goal(name, real[0]["gib"], "<", REAL_GIB)


def main() -> int:
    """All lengths; 0 if every goal is met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 8192, 32768])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--case", nargs=3, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(update(*args.case)))
        return 0
    report = Report("long_rows")
    for tokens in args.tokens:
        report.add(**measure(tokens, args.width, args.vocabulary))
    report.restate(summarise)
    return 0 if report.show(args.json) else 1


if __name__ == "__main__":
    raise SystemExit(main())
